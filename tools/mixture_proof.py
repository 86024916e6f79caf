"""Proof that every part of a mixture was read sample by sample, each once per epoch of that part.

    step line ──ids──> ids of each part
      | as weighed    their number = what the weights of the start ask for, counted again (balancer.mixture_draws)
      | once          after d draws of a part of n samples, each of them was drawn d // n times, or once more
      | as selected   the ids = those that (part, seed, its epoch) select, computed again where the indices are there
    start line ──weights──> may differ from those before, but not for steps that were run

Parts have epochs of their own, and one step may end one epoch and begin the next: counts per sample tell both apart.
Memory: 4 bytes per sample.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from balancer.errors import LedgerError, PlanError
from balancer.ledger import ids_digest
from balancer.ledger_groups import groups_of_ids
from balancer.ledger_lines import PartLine, RunLine, StartLine, StepLine
from balancer.mixture import MixturePart, MixtureSelector, mixture_parts
from balancer.mixture_draws import DrawTable, PartSize
from balancer.mixture_weights import MixtureWeights
from balancer.shuffle import Shuffle
from dataloaders.mixture_source import id_ranges
from tools.found import Found, Int64Array, check_place, compare_selection, few
from tools.known_ids import known_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEpochs:
    """What was read of a part: whole epochs of its eligible ids, and samples of the epoch begun last."""

    name: str
    num_ids: int
    num_complete: int
    unfinished: int


class MixtureProof:
    """A `SelectionProof` of runs whose samples a `MixtureSelector` selects.

    Attributes:
        weight_changes: steps (finished ones before them) at which weights changed.
    """

    def __init__(self, run: RunLine, folder: Path, found: Found) -> None:
        self.num_complete = self.unfinished = self.num_selected = 0
        self.ids_from = ""
        self.notes: list[str] = []
        self.weight_changes: tuple[int, ...] = ()
        self._run, self._folder, self._found = run, folder, found
        self._counts = _counts_of(run, found)
        self._sizes = [_size_of(part) for part in run.parts]
        self._weights: MixtureWeights | None = None
        self._table: DrawTable | None = None
        self._selector: MixtureSelector | None = None
        self._parts = self._parts_of(run) if self._counts else ()

    def _parts_of(self, run: RunLine) -> tuple[MixturePart, ...]:
        """The parts with their ids; none where the indices are not at hand."""
        known = known_ids(run, self._folder, self._found, self.notes)
        if known is None:
            return ()
        index, ids = known
        ranges = id_ranges({part.name: part.num_samples for part in run.parts})
        try:
            groups = None
            if run.group_runs:
                groups = groups_of_ids(run.group_runs, np.arange(run.num_samples), num_samples=run.num_samples)
            parts = mixture_parts(index, ids, ranges, shuffle=cast("Shuffle", run.shuffle), groups=groups)
        except (LedgerError, PlanError) as error:
            self._found(f"what the run is cannot be: {error}")
            return ()
        if [part.size for part in parts] != self._sizes:
            self._found("the sizes of the parts that follow from their indices are not those of the run")
            return ()
        self.ids_from = "index"
        return parts

    def start(self, line: StartLine) -> None:
        """Take the weights of a start; those of steps that were run have to be the same."""
        if not self._counts:
            return
        try:
            weights = MixtureWeights.from_state(line.weights)
            self._table = DrawTable(self._sizes, weights, self._run.global_batch_size)
            self._selector = self._select_by(weights)
        except PlanError as error:
            self._found(f"start {line.number}: its weights cannot be: {error}")
            self._table = self._selector = None
            return
        before = self._weights
        if before is not None and _until(before, line.step) != _until(weights, line.step):
            self._found(f"start {line.number}: its weights are others than before for steps that were run")
        self._weights = weights
        self.weight_changes = tuple(revision.since for revision in weights.revisions()[1:])

    def _select_by(self, weights: MixtureWeights) -> MixtureSelector | None:
        run = self._run
        if not self._parts:
            return None
        return MixtureSelector(
            self._parts,
            weights,
            seed=run.seed,
            global_batch_size=run.global_batch_size,
            shuffle=cast("Shuffle", run.shuffle),
            block_shards=run.block_shards,
        )

    def step(self, line: StepLine, ids: Int64Array) -> None:
        """Compare a step with what the weights ask for, and count its samples."""
        run, name = self._run, f"step {line.step}"
        if len(ids) != run.global_batch_size:
            self._found(f"{name} consumed {len(ids)} samples; {run.global_batch_size} are selected")
        check_place(line, run, self._found)
        drawn = [part.add(name, ids, self._found) for part in self._counts]
        if self._table is None:
            return
        before, after = self._table.draws_before(line.step - 1), self._table.draws_before(line.step)
        for part, own, low, high in zip(self._counts, drawn, before, after, strict=True):
            if own != high - low:
                self._found(f"{name} consumed {own} samples of part {part.name!r}; its weights ask for {high - low}")
        self._compare(line.step, ids)

    def _compare(self, step: int, ids: Int64Array) -> None:
        if self._selector is None:
            return
        try:
            selected = self._selector.step_ids(step - 1)[1]
        except PlanError as error:
            self._found(f"step {step} of such a run cannot be: {error}")
            return
        self.num_selected += 1
        compare_selection(f"step {step}", selected, ids, self._found)

    def end(self) -> None:
        """Say what was not proven."""
        if self._table is not None and self._selector is None:
            self.notes.append(
                "the samples of each part were counted, and that each came once per epoch of its part; in which order "
                "the seed selects them was not computed again: that takes the indices"
            )

    @property
    def parts(self) -> tuple[PartEpochs, ...]:
        """What was read of each part so far."""
        return tuple(part.epochs for part in self._counts)


class _PartCounts:
    """How often each sample of a part was drawn."""

    def __init__(self, line: PartLine, ids: range) -> None:
        self.name, self._line, self._ids = line.name, line, ids
        self._counts = np.zeros(len(ids), dtype=np.int32)
        self._draws = self._complete = 0

    def add(self, step: str, ids: Int64Array, found: Found) -> int:
        """Count the samples of a step that are of this part; returns their number."""
        own = ids[(ids >= self._ids.start) & (ids < self._ids.stop)] - self._ids.start
        if not len(own):
            return 0
        np.add.at(self._counts, own, 1)
        self._draws += len(own)
        n, name = self._line.num_ids, f"{step}, part {self.name!r}"
        if not n:
            found(f"{name}: samples {few(own + self._ids.start)} were consumed, but none of it is eligible")
            return len(own)
        again = own[self._counts[own] > -(-self._draws // n)]
        if len(again):
            found(
                f"{name}: samples {few(again + self._ids.start)} come again before the others of epoch "
                f"{(self._draws - 1) // n} of this part"
            )
        if self._draws // n > self._complete:
            self._complete = self._draws // n
            self._check_complete(name, found)
        return len(own)

    def _check_complete(self, name: str, found: Found) -> None:
        n, epoch = self._line.num_ids, self._complete - 1
        whole = int((self._counts >= self._complete).sum())
        if whole != n:
            found(f"{name}: {n - whole} of its {n} samples are missing in epoch {epoch} of this part")
        elif not epoch and ids_digest(np.flatnonzero(self._counts) + self._ids.start) != self._line.ids_digest:
            found(f"{name}: the {n} samples of its first epoch are not the eligible ones")

    @property
    def epochs(self) -> PartEpochs:
        """What was read so far."""
        n = self._line.num_ids
        complete = self._draws // n if n else 0
        return PartEpochs(name=self.name, num_ids=n, num_complete=complete, unfinished=self._draws - complete * n)


def _counts_of(run: RunLine, found: Found) -> list[_PartCounts]:
    lengths = {part.name: part.num_samples for part in run.parts}
    if len(lengths) != len(run.parts) or sum(lengths.values()) != run.num_samples:
        found(f"its parts do not make up the {run.num_samples} samples of the run")
        return []
    ranges = id_ranges(lengths)
    return [_PartCounts(part, ranges[part.name]) for part in run.parts]


def _size_of(part: PartLine) -> PartSize:
    return PartSize(name=part.name, samples=part.num_ids, llm_tokens=part.llm_tokens, visual_tokens=part.visual_tokens)


def _until(weights: MixtureWeights, step: int) -> list[dict[str, Any]]:
    """The weights that held before `step`."""
    return [state for state in weights.to_state() if state["since"] < step]
