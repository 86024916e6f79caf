"""Proof that steps hold what (seed, epoch, step) select of one set of samples, each of them once per epoch.

    step line ──cursor──> where its samples lie in an epoch
      | as selected   the samples of a step = those that (ids, seed, epoch, cursor) select, see `tools.select_again`
      | once          a complete epoch = the eligible ids, each once, but for what its tail leaves out or repeats;
                      an unfinished one repeats none

The eligible ids come from the cost index (`tools.known_ids`). Without it, complete epochs give them: the ledger keeps
their number and digest. Until they are known, or where steps are cut by tokens, the selection cannot be computed again,
which a note says. Memory: about 8 bytes per sample of an epoch.
"""

from pathlib import Path
from typing import Protocol

import numpy as np

from balancer.cost_model import CostModel
from balancer.errors import LedgerError, PlanError
from balancer.ledger import ids_digest
from balancer.ledger_lines import RunLine, StartLine, StepLine
from balancer.run_evidence import COST_FILE, FOLDER, read_cost
from balancer.select import Tail, check_tail, steps_per_epoch
from dataloaders.index import CostIndex
from tools.found import Found, Int64Array, check_place, compare_place, few, repeated_ids
from tools.known_ids import known_ids
from tools.select_again import SelectAgain, takes_index

FIRST_EPOCH, EPOCHS, INDEX = "first complete epoch", "epochs so far", "index"


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
    """A `SelectionProof` of runs over one set of samples, whose steps are cut by count or by tokens.

    Args:
        run: first line of the ledger.
        folder: of the run.
        found: takes what is wrong.

    Attributes:
        tail: what the end of every epoch looks like.
    """

    def __init__(self, run: RunLine, folder: Path, found: Found) -> None:
        self.num_complete = self.unfinished = self.num_selected = 0
        self.ids_from = ""
        self.notes: list[str] = []
        self.tail = _tail_of(run, found)
        self._run, self._found = run, found
        self._cost = _lookahead_cost(run, folder, found, self.notes)
        self._selection: SelectAgain | None = None
        self._waiting: list[tuple[int, Int64Array]] = []
        self._epoch, self._parts = 0, list[Int64Array]()
        self._met: Int64Array = np.empty(0, dtype=np.int64)  # ids of finished epochs, while the eligible are unknown
        known = known_ids(run, folder, found, self.notes)
        if known is not None:
            self._know(known[1], INDEX, known[0])

    def _know(self, ids: Int64Array, ids_from: str, index: CostIndex | None) -> None:
        """From here on the selection of a step can be computed; do so for the steps that have waited."""
        if index is None and takes_index(self._run):
            return
        try:
            self._selection = SelectAgain(self._run, ids, index=index, cost=self._cost, found=self._found)
        except (LedgerError, PlanError) as error:
            self._found(f"what the run is cannot be: {error}")
            return
        self.ids_from = ids_from
        for step, consumed in self._waiting:
            self._selection.compare(step, consumed)
        self._waiting = []

    def start(self, line: StartLine) -> None:
        """Starts change nothing of the selection."""

    def step(self, line: StepLine, ids: Int64Array) -> None:
        """Compare a step with what is selected."""
        epoch = self._epoch_by_tokens(line) if self._run.step_tokens else self._epoch_by_count(line, len(ids))
        if epoch is None:
            return
        if epoch != self._epoch:
            self._end_epoch(is_last=False)
            self._epoch = epoch
        self._parts.append(ids)
        if self._selection is None:
            self._waiting.append((line.step - 1, ids))
        else:
            self._selection.compare(line.step - 1, ids)

    def _epoch_by_count(self, line: StepLine, num_consumed: int) -> int | None:
        """The epoch of a step, having compared its place and its number of samples; None: there is no such step."""
        where = check_place(line, self._run, self._found)
        if where is None:
            return None
        num_selected = where.stop - where.cursor
        if self.tail.num_repeated and num_selected < self._run.global_batch_size:
            num_selected += self.tail.num_repeated
        if num_consumed != num_selected:
            self._found(f"step {line.step} consumed {num_consumed} samples; {num_selected} are selected")
        return where.epoch

    def _epoch_by_tokens(self, line: StepLine) -> int:
        """The same of steps by tokens; where these are unknown, steps and epochs follow each other without a gap."""
        if self._selection is not None:
            where = self._selection.place(line.step - 1)
            compare_place(line, where.epoch, where.cursor, self._found)
            return where.epoch
        begun = sum(map(len, self._parts))
        epoch, cursor = (self._epoch + 1, 0) if begun >= self._run.num_ids else (self._epoch, begun)
        # With look-ahead a step lies where it lay before samples were exchanged.
        compare_place(line, epoch, cursor if self._run.lookahead_steps == 1 else line.cursor, self._found)
        return line.epoch

    def end(self) -> None:
        """Check the last epoch, which may be unfinished."""
        self._end_epoch(is_last=True)
        if self._waiting:
            self.notes.append(
                f"the selection of {len(self._waiting)} steps was not computed again: that takes the index, or "
                f"complete epochs of steps that are neither cut by tokens nor shuffled in blocks"
            )
        if self._selection is None:
            return
        self._selection.end()
        self.num_selected = self._selection.num_steps
        if self._selection.num_in_blocks:
            self.notes.append(
                f"of {self._selection.num_in_blocks} steps it was computed again which samples their block of "
                f"{self._run.lookahead_steps} holds, not which step of it: look-ahead takes the index and the cost"
            )

    def _end_epoch(self, *, is_last: bool) -> None:
        """Check the epoch whose parts were collected; only the last one may be unfinished."""
        if not self._parts:
            return
        ids, self._parts = np.concatenate(self._parts), []
        name, tail = f"epoch {self._epoch}", self.tail
        values, counts = np.unique(ids, return_counts=True)
        size = self._run.num_ids - tail.num_dropped
        # Which samples come twice under `repeat` is compared with the selection of the step that repeats them.
        is_whole = len(ids) >= size + tail.num_repeated
        twice = repeated_ids(ids)
        if len(twice) > (tail.num_repeated if is_whole else 0) or (counts > 2).any():
            self._found(f"{name}: samples {few(twice)} come more than once")
        if not is_whole:
            self.unfinished = len(ids)
            if not is_last:
                self._found(f"{name}: {max(0, size - len(values))} of {size} samples are missing")
        elif len(values) != size or (not tail.num_dropped and ids_digest(values) != self._run.ids_digest):
            self._found(f"{name}: its {len(values)} different samples are not the {size} eligible ones")
        else:
            self.num_complete += 1
            self._learn(values)

    def _learn(self, values: Int64Array) -> None:
        """Take the ids of a complete epoch: together with those before they may be all that are eligible."""
        if self._selection is not None or self.ids_from:
            return
        self._met = np.union1d(self._met, values)
        if ids_digest(self._met) == self._run.ids_digest:
            self._know(self._met, EPOCHS if self.tail.num_dropped else FIRST_EPOCH, None)
        elif len(self._met) >= self._run.num_ids:
            self._found(f"epochs 0 to {self._epoch}: their samples are not the {self._run.num_ids} eligible ones")


def _tail_of(run: RunLine, found: Found) -> Tail:
    """What the end of an epoch of the run looks like."""
    try:
        if run.step_tokens or not run.num_ids:
            return Tail(policy="pad")
        steps_per_epoch(run.num_ids, run.global_batch_size, check_tail(run.tail))
        return Tail.of(run.num_ids, run.global_batch_size, check_tail(run.tail))
    except PlanError as error:
        found(f"what the run is cannot be: {error}")
        return Tail(policy="pad")


def _lookahead_cost(run: RunLine, folder: Path, found: Found, notes: list[str]) -> CostModel | None:
    """What look-ahead evens; None, with a note or a finding, where that is not at hand, or there is none."""
    if run.lookahead_steps == 1:
        return None
    path = folder / FOLDER / COST_FILE
    try:
        model = read_cost(folder, COST_FILE)
    except LedgerError as error:
        found(str(error))
        return None
    if model is None:
        notes.append(f"{path}, the cost that look-ahead evens, is gone")
    elif model.fingerprint != run.lookahead_cost:
        found(f"{path} is not the cost that the look-ahead of this run has evened")
        return None
    return model
