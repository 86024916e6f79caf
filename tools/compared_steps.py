"""Steps that were measured twice, with the balancer off and on, and the pair that stands for them all.

compare.jsonl: StepRecords of the same steps under policy `sequential` (off) and another policy (on)
    -> pairs (off, on) of one step -> the pair with the median gain, or the one of a chosen step
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from balancer.records import StepRecord, read_records
from tools.errors import AnalyzeError, UsageError

COMPARE_FILE = "compare.jsonl"
OFF_POLICY = "sequential"
HOW_TO_MAKE = (
    "`balancer-train fit` writes it at the end of a run with --compare-steps above 0 and a policy that balances"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPair:
    """One step measured with the balancer off and on."""

    before: StepRecord
    after: StepRecord

    @property
    def step(self) -> int:
        """Number of the step, from 1."""
        return self.before.step

    @property
    def gain(self) -> float:
        """Measured step time off / on: above 1 the balancer made the step faster."""
        return self.before.step_ms / self.after.step_ms


def read_pairs(run_folder: Path) -> list[StepPair]:
    """All pairs of `run_folder`/compare.jsonl, by step.

    A step may be measured several times: the first run off goes with the first run on, and so forth.

    Raises:
        UsageError: no such folder or file; the text says how the file is made.
        AnalyzeError: the file holds no step that was measured both ways.
        RecordFormatError: a damaged line.
    """
    path = run_folder / COMPARE_FILE
    if not run_folder.is_dir():
        raise UsageError(
            f"run folder {run_folder} does not exist or is no folder. Give the folder that balancer-train printed."
        )
    if not path.is_file():
        raise UsageError(f"{path} does not exist. {HOW_TO_MAKE}.")
    off: defaultdict[int, list[StepRecord]] = defaultdict(list)
    on: defaultdict[int, list[StepRecord]] = defaultdict(list)
    for record in read_records(path):
        (off if record.policy == OFF_POLICY else on)[record.step].append(record)
    pairs = [
        StepPair(before=before, after=after)
        for step in sorted(off)
        # Runs without a partner (the file was cut short) are left out.
        for before, after in zip(off[step], on[step], strict=False)
        if before.actions and after.actions and after.step_ms > 0.0
    ]
    if not pairs:
        raise AnalyzeError(
            f"{path} holds no step measured with the balancer both off and on: "
            f"steps off {sorted(off) or 'none'}, on {sorted(step for step in on if on[step]) or 'none'}. {HOW_TO_MAKE}."
        )
    return pairs


def choose_pair(pairs: Sequence[StepPair], step: int | None = None) -> StepPair:
    """The pair with the median gain (of an even number the lower of the two), among those of `step` if given.

    Raises:
        UsageError: `step` was not compared; the text lists the steps that were.
    """
    candidates = [pair for pair in pairs if step is None or pair.step == step]
    if not candidates:
        compared = ", ".join(map(str, sorted({pair.step for pair in pairs})))
        raise UsageError(f"step {step} was not compared. Compared steps: {compared}.")
    return sorted(candidates, key=lambda pair: pair.gain)[(len(candidates) - 1) // 2]
