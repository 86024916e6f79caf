"""What the measured acts of one step say: its span, who was busy for how long, and the metrics that follow.

actions of a StepRecord -> span (step start to last end), busy ms per rank | replica | micro-batch -> balancer.metrics
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from balancer.metrics import bubble_ratio, imbalance
from balancer.records import ActionRecord, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Metrics of one step; all NaN where no acts were recorded.

    Attributes:
        span_ms: from the start of the step to the end of its last act on any rank.
        bubble_ratio: idle share of all ranks within the span, see `balancer.metrics`.
        rank_imbalance: max / mean over DP ranks (replicas) of busy time; 1.0 with one.
        microbatch_imbalance: max / mean over (replica, micro-batch) of busy time.
    """

    span_ms: float
    bubble_ratio: float
    rank_imbalance: float
    microbatch_imbalance: float


def num_ranks(records: Iterable[StepRecord]) -> int:
    """Ranks that appear in the acts, counted from rank 0; a rank that had nothing to do in one step still counts."""
    return 1 + max((action.rank for record in records for action in record.actions), default=-1)


def num_replicas(records: Iterable[StepRecord]) -> int:
    """Replicas that appear in the acts, counted like `num_ranks`."""
    return 1 + max((action.dp_rank for record in records for action in record.actions), default=-1)


def measure(actions: Sequence[ActionRecord], *, ranks: int, replicas: int) -> MeasuredStep:
    """Metrics of a step's acts on `ranks` world ranks in `replicas` replicas, idle ones included."""
    if not actions:
        return MeasuredStep(
            span_ms=math.nan, bubble_ratio=math.nan, rank_imbalance=math.nan, microbatch_imbalance=math.nan
        )
    span_ms = max(action.end_ms for action in actions)
    of_rank = _busy(actions, lambda action: action.rank)
    of_replica = _busy(actions, lambda action: action.dp_rank)
    of_cell = _busy(actions, lambda action: (action.dp_rank, action.microbatch))
    return MeasuredStep(
        span_ms=span_ms,
        bubble_ratio=bubble_ratio([of_rank.get(rank, 0.0) for rank in range(ranks)], span_ms),
        rank_imbalance=imbalance([of_replica.get(replica, 0.0) for replica in range(replicas)]),
        microbatch_imbalance=imbalance(list(of_cell.values())),
    )


def _busy(actions: Iterable[ActionRecord], key: Callable[[ActionRecord], Hashable]) -> dict[Hashable, float]:
    busy: defaultdict[Hashable, float] = defaultdict(float)
    for action in actions:
        busy[key(action)] += action.end_ms - action.start_ms
    return busy
