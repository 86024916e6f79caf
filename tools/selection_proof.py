"""Proof that steps hold what (seed, epoch, step) select of one set of samples, each of them once per epoch.

    step line ──cursor──> where its samples lie in an epoch
      | as selected   the samples of a step = those that (ids, seed, epoch, cursor) select, computed again
      | once          a complete epoch = the eligible ids, each once; an unfinished one repeats none

The eligible ids come from the cost index. Without it the first complete epoch gives them: the ledger keeps their number
and digest. Until one is complete, the selection cannot be computed again, which a note says. Memory: about 8 bytes per
sample of an epoch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.errors import BalancerError, LedgerError, PlanError
from balancer.ledger import ids_digest
from balancer.ledger_groups import groups_of_ids
from balancer.ledger_lines import RunLine, StartLine, StepLine
from balancer.plan import Capacities
from balancer.select import StepRange, StepSelector, eligible_ids, split_held_out, step_range
from balancer.shuffle import Shuffle
from dataloaders.errors import DataError
from dataloaders.index import CostIndex
from dataloaders.index_concat import IndexConcat

MAX_NAMED_IDS = 5
Int64Array = NDArray[np.int64]
Found = Callable[[str], None]
"""Takes what is wrong, in a sentence."""


class SelectionProof(Protocol):
    """What follows the lines of a ledger and checks which samples their steps hold.

    Attributes:
        num_complete: epochs that hold every eligible id once. unfinished: samples of the epoch begun last.
        num_selected: steps whose selection was computed again.
        ids_from: where the eligible ids came from; "" (unknown).
        notes: what could not be proven, and why.
    """

    num_complete: int
    unfinished: int
    num_selected: int
    ids_from: str
    notes: list[str]

    def start(self, line: StartLine) -> None:
        """A start of the run, which the next steps belong to."""

    def step(self, line: StepLine, ids: Int64Array) -> None:
        """A step with the ids of all its ranks, int64 [n]."""

    def end(self) -> None:
        """The ledger has ended."""


class StepProof:
    """A `SelectionProof` of runs whose samples a `StepSelector` selects."""

    def __init__(self, run: RunLine, found: Found) -> None:
        self.num_complete = self.unfinished = self.num_selected = 0
        self.ids_from = ""
        self.notes: list[str] = []
        self._run, self._found = run, found
        self._selector: StepSelector | None = None
        self._waiting: list[tuple[int, Int64Array]] = []
        self._epoch, self._parts = 0, list[Int64Array]()
        known = known_ids(run, found, self.notes)
        if known is not None:
            self._know(known[1], "index", known[0].shard_numbers[known[1]])

    def _know(self, ids: Int64Array, ids_from: str, shards: NDArray[np.int32] | None) -> None:
        """From here on the selection of a step can be computed; do so for the steps that have waited."""
        run = self._run
        try:
            if run.group_runs:
                groups: ArrayLike | None = groups_of_ids(run.group_runs, ids, num_samples=run.num_samples)
            else:
                groups = shards
            if run.shuffle == "block" and groups is None:
                return
            self._selector = StepSelector(
                ids,
                seed=run.seed,
                global_batch_size=run.global_batch_size,
                shuffle=cast("Shuffle", run.shuffle),
                groups=groups,
                block_shards=run.block_shards,
            )
        except (LedgerError, PlanError) as error:
            self._found(f"what the run is cannot be: {error}")
            return
        self.ids_from = ids_from
        for step, consumed in self._waiting:
            self._compare(self._selector, step, consumed)
        self._waiting = []

    def start(self, line: StartLine) -> None:
        """Starts change nothing of the selection."""

    def step(self, line: StepLine, ids: Int64Array) -> None:
        """Compare a step with what is selected."""
        name, where = f"step {line.step}", check_place(line, self._run, self._found)
        if where is None:
            return
        if len(ids) != where.stop - where.cursor:
            self._found(f"{name} consumed {len(ids)} samples; {where.stop - where.cursor} are selected")
        if where.epoch != self._epoch:
            self._end_epoch(is_last=False)
            self._epoch = where.epoch
        self._parts.append(ids)
        if self._selector is None:
            self._waiting.append((line.step, ids))
        else:
            self._compare(self._selector, line.step, ids)

    def _compare(self, selector: StepSelector, step: int, consumed: Int64Array) -> None:
        self.num_selected += 1
        compare_selection(step, selector.step_ids(step - 1)[1], consumed, self._found)

    def end(self) -> None:
        """Check the last epoch, which may be unfinished."""
        self._end_epoch(is_last=True)
        if self._waiting:
            self.notes.append(
                f"the selection of {len(self._waiting)} steps was not computed again: that takes the index, or "
                f"one complete epoch that was not shuffled in blocks"
            )

    def _end_epoch(self, *, is_last: bool) -> None:
        """Check the epoch whose parts were collected; only the last one may be unfinished."""
        if not self._parts:
            return
        run = self._run
        ids, self._parts = np.concatenate(self._parts), []
        name = f"epoch {self._epoch}"
        if len(repeated := repeated_ids(ids)):
            self._found(f"{name}: samples {few(repeated)} come more than once")
        values = np.unique(ids)
        if len(ids) < run.num_ids:
            self.unfinished = len(ids)
            if not is_last:
                self._found(f"{name}: {run.num_ids - len(values)} of {run.num_ids} samples are missing")
        elif ids_digest(values) != run.ids_digest:
            self._found(f"{name}: its {len(values)} different samples are not the {run.num_ids} eligible ones")
        else:
            self.num_complete += 1
            if self._selector is None:
                self._know(values, "first complete epoch", None)


def known_ids(run: RunLine, found: Found, notes: list[str]) -> tuple[CostIndex, Int64Array] | None:
    """(index of a run, the ids it trains on); None, with a note or a finding, where they cannot be had."""
    try:
        index = open_index(run)
    except (BalancerError, DataError, OSError) as error:
        notes.append(f"the ledger is checked without the index: {error}")
        return None
    ids = trained_ids(index, run)
    if len(ids) != run.num_ids or ids_digest(ids) != run.ids_digest:
        found("the eligible ids that follow from the index are not those of the run: one of its options differs")
        return None
    return index, ids


def open_index(run: RunLine) -> CostIndex:
    """The cost index of a run, of a mixture those of its parts seen as one.

    Raises:
        LedgerError: it is gone, or another one lies there now.
    """
    if not run.parts:
        return _open(run.index_folder, run.index)
    index = IndexConcat({part.name: _open(part.index_folder, part.index) for part in run.parts})
    if index.fingerprint != run.index:
        raise LedgerError(f"the indices of its parts make up {index.fingerprint}, that of the run is {run.index}")
    return index


def _open(folder: str, fingerprint: str) -> CostIndex:
    if not folder:
        raise LedgerError("it was kept in memory")
    if not Path(folder).is_dir():
        raise LedgerError(f"{folder} is gone")
    index = CostIndex.open(folder)
    if index.fingerprint != fingerprint:
        raise LedgerError(f"{folder} has fingerprint {index.fingerprint}, that of the run is {fingerprint}")
    return index


def trained_ids(index: CostIndex, run: RunLine) -> Int64Array:
    """The ids that a run trains on, by its own rules, int64 [n]."""
    capacities = Capacities(tokens=run.capacity_tokens, patches=run.capacity_patches)
    eligible = eligible_ids(index, capacities, "drop").ids
    return split_held_out(eligible, share=run.eval_share, seed=run.seed)[0]


def check_place(line: StepLine, run: RunLine, found: Found) -> StepRange | None:
    """Where a step of a run lies, having compared its line with that; None, with a finding, where it cannot be."""
    try:
        where = step_range(line.step - 1, num_samples=run.num_ids, global_batch_size=run.global_batch_size)
    except PlanError as error:
        found(f"step {line.step} of such a run cannot be: {error}")
        return None
    if (line.epoch, line.cursor) != (where.epoch, where.cursor):
        found(
            f"step {line.step} is at epoch {line.epoch}, sample {line.cursor}; it belongs at epoch {where.epoch}, "
            f"sample {where.cursor}"
        )
    return where


def compare_selection(step: int, selected: Int64Array, consumed: Int64Array, found: Found) -> None:
    """Say which samples of a step (from 1) were lost, and which do not belong there."""
    lost, strange = np.setdiff1d(selected, consumed), np.setdiff1d(consumed, selected)
    if len(lost):
        found(f"step {step}: samples {few(lost)} are selected by seed and epoch, but were not consumed")
    if len(strange):
        found(f"step {step}: samples {few(strange)} were consumed, but are not selected by seed and epoch")


def repeated_ids(ids: Int64Array) -> Int64Array:
    """Ids that come more than once, ascending."""
    values, counts = np.unique(ids, return_counts=True)
    return values[counts > 1]


def few(ids: ArrayLike) -> str:
    """The first of these ids, for messages."""
    listed = np.asarray(ids).tolist()
    more = f" and {len(listed) - MAX_NAMED_IDS} more" if len(listed) > MAX_NAMED_IDS else ""
    return ", ".join(map(str, listed[:MAX_NAMED_IDS])) + more
