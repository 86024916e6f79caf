"""Proof from a ledger that every sample was consumed exactly once per epoch, as (seed, epoch, step) select it.

ledger.jsonl ──lines, each with its check──> starts and steps as executed
  | gapless       steps 1, 2, 3 ...; each start goes on where the steps before it end
  | as placed     the samples of each DP rank = those of its cells in plans/step_N.json
  | as selected, and once                       tools.selection_proof; of a mixture: tools.mixture_proof
  v
findings: none, or what is wrong
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from balancer.errors import LedgerError, PlanError
from balancer.ledger_lines import MIXTURE_SELECTOR, STEP_SELECTOR, Line, RunLine, StartLine, StepLine
from balancer.plan import StepPlan
from balancer.select import Tail
from tools.found import Int64Array, few, repeated_ids
from tools.mixture_proof import MixtureProof, PartEpochs
from tools.selection_proof import SelectionProof, StepProof

MAX_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Consecutive steps executed by one start."""

    first_step: int
    last_step: int
    world_size: int
    dp_size: int


class Proof:
    """One pass over the lines of a ledger.

    Args:
        folder: of the run; its plans are compared where they are still there.

    Attributes:
        findings: what is wrong, the first `MAX_LISTED` of `num_findings`.
        notes: what could not be proven, and why.
        selection: what was found of the selection; None: no run, or one whose selection cannot be computed.
        num_steps, num_samples: executed, without discarded ones.
        num_starts, num_discarded: starts, and steps that were lost with a process and executed again.
        worlds: ranks over time. replaced: ids trained as stand-ins.
        num_placed: steps that were compared with their plan.
    """

    def __init__(self, folder: Path) -> None:
        self.findings: list[str] = []
        self.num_findings = 0
        self.notes: list[str] = []
        self.run: RunLine | None = None
        self.selection: SelectionProof | None = None
        self.num_steps = self.num_samples = self.num_starts = self.num_discarded = self.num_placed = 0
        self.worlds: list[World] = []
        self.replaced: set[int] = set()
        self._folder = folder
        self._start: StartLine | None = None

    @property
    def parts(self) -> tuple[PartEpochs, ...]:
        """What was read of each part of a mixture."""
        return self.selection.parts if isinstance(self.selection, MixtureProof) else ()

    @property
    def tail(self) -> Tail | None:
        """What the end of every epoch looks like; None where epochs are those of parts, or unknown."""
        return self.selection.tail if isinstance(self.selection, StepProof) else None

    @property
    def weight_changes(self) -> tuple[int, ...]:
        """Steps after which the weights of a mixture changed."""
        return self.selection.weight_changes if isinstance(self.selection, MixtureProof) else ()

    def follow(self, lines: Iterable[Line]) -> None:
        """Check every line, and at the end what only the end can tell."""
        try:
            for line in lines:
                if isinstance(line, RunLine):
                    self._begin(line)
                elif self.run is None:
                    self._found("the ledger does not begin with what the run is")
                    return
                elif isinstance(line, StartLine):
                    self._continue(line)
                else:
                    self._step(line, self.run)
        except LedgerError as error:
            self._found(str(error))
        if self.run is None and not self.findings:
            self._found("the ledger is empty")
        if self.selection is not None:
            self.selection.end()
            self.notes += self.selection.notes

    def _found(self, text: str) -> None:
        self.num_findings += 1
        if len(self.findings) < MAX_LISTED:
            self.findings.append(text)

    def _begin(self, run: RunLine) -> None:
        if self.run is not None:
            self._found("the ledger says twice what its run is")
            return
        self.run = run
        if run.selector == STEP_SELECTOR:
            self.selection = StepProof(run, self._folder, self._found)
        elif run.selector == MIXTURE_SELECTOR:
            self.selection = MixtureProof(run, self._folder, self._found)
        else:
            self.notes.append(
                f"samples are selected by {run.selector!r}: epochs and selection cannot be computed from the ledger"
            )

    def _continue(self, start: StartLine) -> None:
        if self._start is not None and start.number <= self._start.number:
            self._found(f"start {start.number} follows start {self._start.number}")
        if start.step != self.num_steps:
            self._found(
                f"start {start.number} continues after step {start.step}, but the steps before it end at "
                f"{self.num_steps}"
            )
        self._start = start
        self.num_starts += 1
        self.num_discarded += start.discarded
        if self.selection is not None:
            self.selection.start(start)

    def _step(self, line: StepLine, run: RunLine) -> None:
        name = f"step {line.step}"
        if line.step != self.num_steps + 1:
            self._found(f"{name} follows step {self.num_steps}")
        self.num_steps = line.step
        self._executed_by(name, line)
        ids = np.array([i for rank in line.ids for i in rank], dtype=np.uint64).astype(np.int64)
        self.num_samples += len(ids)
        self._check_ids(name, line, ids, run)
        self._check_placement(name, line)
        if self.selection is not None:
            self.selection.step(line, ids)

    def _executed_by(self, name: str, line: StepLine) -> None:
        start = self._start
        if start is None or line.start != start.number:
            self._found(f"{name} was executed by start {line.start}, which is not the start before it")
            return
        if len(line.ids) != start.dp_size:
            self._found(f"{name} lists {len(line.ids)} DP ranks, its start has {start.dp_size}")
        world = World(first_step=line.step, last_step=line.step, world_size=start.world_size, dp_size=start.dp_size)
        last = self.worlds[-1] if self.worlds else None
        if last is not None and (last.world_size, last.dp_size) == (world.world_size, world.dp_size):
            self.worlds[-1] = World(
                first_step=last.first_step, last_step=line.step, world_size=last.world_size, dp_size=last.dp_size
            )
        else:
            self.worlds.append(world)

    def _check_ids(self, name: str, line: StepLine, ids: Int64Array, run: RunLine) -> None:
        outside = ids[(ids < 0) | (ids >= run.num_samples)]
        if len(outside):
            self._found(f"{name}: samples {few(outside)} are not among the {run.num_samples} of the index")
        if len(repeated := repeated_ids(ids)):
            self._found(f"{name}: samples {few(repeated)} were consumed more than once")
        strangers = sorted(set(line.replaced) - set(ids.tolist()))
        if strangers:
            self._found(f"{name}: samples {few(strangers)} were replaced, but not consumed")
        self.replaced.update(line.replaced)

    def _check_placement(self, name: str, line: StepLine) -> None:
        """Compare each rank's samples with the plan, in the order of its micro-batches."""
        path = self._folder / "plans" / f"step_{line.step:06d}.json"
        if not path.is_file():
            return
        try:
            plan = StepPlan.from_json(path.read_text(encoding="utf-8"))
        except (PlanError, OSError, UnicodeDecodeError) as error:
            self._found(f"{name}: its plan {path} cannot be read: {error}")
            return
        self.num_placed += 1
        if plan.dp_size != len(line.ids):
            self._found(f"{name} was planned for {plan.dp_size} DP ranks and consumed by {len(line.ids)}")
            return
        for rank, ids in enumerate(line.ids):
            planned = [int(i) for m in range(plan.num_microbatches) for i in plan.members(rank, m)]
            if planned != list(ids):
                self._found(f"{name}: rank {rank} consumed other samples, or in another order, than its plan says")
