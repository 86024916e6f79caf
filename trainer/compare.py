"""Before -> after, measured: the same steps run with the balancer off and on, in turn, on the trained model.

Per compared step: off, on, on, off. The two runs of each are averaged, so a drift of the machine's speed cancels to
first order. Forward and backward run as in training; no weight is changed. Samples are read once, before the clock.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from balancer.plan_loader import PlanLoader, SampleReader, StepBatches
from balancer.metrics import bubble_ratio, imbalance
from balancer.plan_sequence import PlanSequence
from balancer.records import ActionRecord, StepRecord
from trainer.comm import Comm
from trainer.step import StepResult, StepRunner

OFF = "sequential"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians over the compared steps of one policy.

    Attributes:
        step_ms: wall time from the first forward to the end of the last action of any rank.
        rank_imbalance: max / mean over DP ranks of busy time (1.0 with one replica).
        microbatch_imbalance: max / mean over micro-batches of their busy time.
        bubble_ratio: idle share of all ranks during the step.
    """

    step_ms: float
    rank_imbalance: float
    microbatch_imbalance: float
    bubble_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Off and on over the same steps, with every record it was taken from."""

    before: Measured
    after: Measured
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
    return Comparison(
        before=_median(records[OFF], comm),
        after=_median(records[plans.policy], comm),
        records=tuple(item for policy in records for item in records[policy]),
    )


def _load(reader: SampleReader, plans: PlanSequence, step: int, policy: str, comm: Comm) -> StepBatches:
    varied = replace(plans, policy=policy)
    return next(iter(PlanLoader(reader, varied, dp_rank=comm.dp_rank, steps=range(step, step + 1))))


def measure(actions: Sequence[ActionRecord], comm: Comm) -> Measured:
    """Metrics of one step from its actions."""
    span = max((action.end_ms for action in actions), default=0.0)
    busy_of_rank = [0.0] * comm.world_size
    busy_of_replica = [0.0] * comm.layout.dp_size
    busy_of_cell: dict[tuple[int, int], float] = {}
    for action in actions:
        duration = action.end_ms - action.start_ms
        busy_of_rank[action.rank] += duration
        busy_of_replica[action.dp_rank] += duration
        cell = (action.dp_rank, action.microbatch)
        busy_of_cell[cell] = busy_of_cell.get(cell, 0.0) + duration
    return Measured(
        step_ms=span,
        rank_imbalance=imbalance(busy_of_replica),
        microbatch_imbalance=imbalance(list(busy_of_cell.values())),
        bubble_ratio=bubble_ratio(busy_of_rank, span),
    )


def _median(records: Sequence[StepRecord], comm: Comm) -> Measured:
    measured = [measure(record.actions, comm) for record in records]
    return Measured(
        step_ms=statistics.median(item.step_ms for item in measured),
        rank_imbalance=statistics.median(item.rank_imbalance for item in measured),
        microbatch_imbalance=statistics.median(item.microbatch_imbalance for item in measured),
        bubble_ratio=statistics.median(item.bubble_ratio for item in measured),
    )
