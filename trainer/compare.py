"""Before -> after, measured: the same steps run with the balancer off and on, in turn, on the trained model.

Per compared step: off, on, on, off. The two runs of each are averaged, so a drift of the machine's speed cancels to
first order. Forward and backward run as in training; no weight is changed. Samples are read once, before the clock.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from balancer.errors import PlanError
from balancer.measured import MeasuredStep, measure
from balancer.plan_loader import PlanLoader, SampleReader, StepBatches
from balancer.plan_sequence import PlanSequence
from balancer.records import ActionRecord, StepRecord
from trainer.comm import Comm
from trainer.step import StepResult, StepRunner

OFF = "sequential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Medians over the compared steps, off and on, with every record they were taken from.

    Attributes:
        time_ratio: median of on / off step time over pairs of the *same* step; the medians before and after mix steps
            of different size, this one does not.
        time_ratio_range: its smallest and largest pair: how much is noise.
    """

    before: MeasuredStep
    after: MeasuredStep
    time_ratio: float
    time_ratio_range: tuple[float, float]
    records: tuple[StepRecord, ...]


def compare(
    runner: StepRunner,
    reader: SampleReader,
    plans: PlanSequence,
    *,
    steps: Sequence[int],
    record: Callable[[StepBatches, StepResult], StepRecord],
) -> Comparison:
    """Measure `steps` with policy `sequential` and with the run's policy."""
    comm = runner.comm
    records: dict[str, list[StepRecord]] = {OFF: [], plans.policy: []}
    for step in steps:
        loaded = {policy: _load(reader, plans, step, policy, comm) for policy in records}
        for policy in (OFF, plans.policy, plans.policy, OFF):
            batches = loaded[policy]
            runner.pieces.zero_grad()
            planned = plans.weight_sum(step, reader.loss_reduction)
            result = runner.run(batches, planned_weight=planned)
            records[policy].append(record(batches, result))
    runner.pieces.zero_grad()
    pairs = zip(records[OFF], records[plans.policy], strict=True)
    ratios = [on.step_ms / off.step_ms for off, on in pairs if off.step_ms] or [math.nan]
    return Comparison(
        before=_median(records[OFF], comm),
        after=_median(records[plans.policy], comm),
        time_ratio=statistics.median(ratios),
        time_ratio_range=(min(ratios), max(ratios)),
        records=tuple(item for policy in records for item in records[policy]),
    )


def _load(reader: SampleReader, plans: PlanSequence, step: int, policy: str, comm: Comm) -> StepBatches:
    varied = replace(plans, policy=policy)
    try:
        varied.plan(step)
    except PlanError:  # a fixed number of micro-batches may be too small for the order of selection
        varied = replace(varied, num_microbatches=None)
    return next(iter(PlanLoader(reader, varied, dp_rank=comm.dp_rank, steps=range(step, step + 1))))


def measured(actions: Sequence[ActionRecord], comm: Comm) -> MeasuredStep:
    """Metrics of one step of this job from its actions."""
    return measure(actions, ranks=comm.world_size, replicas=comm.layout.dp_size)


def _median(records: Sequence[StepRecord], comm: Comm) -> MeasuredStep:
    """Median of every metric on its own."""
    steps = [measured(record.actions, comm) for record in records]
    names = [field.name for field in fields(MeasuredStep)]
    return MeasuredStep(**{name: statistics.median(getattr(step, name) for step in steps) for name in names})
