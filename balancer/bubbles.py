"""Why ranks idle: the bubble of one step, split by kind.

    durations [R, M, S] --four simulations, each with one more cause--> idle time by kind, over all R x P ranks

    kind            simulated with                                            adds
    structural      every act as long as the mean of its op in the replica    P * makespan - busy
    stage_skew      every act as long as the mean of its op and stage         P * (makespan - the one before)
    data            durations and absences as they are                        P * (makespan - the one before)
    communication   ... and the latency between ranks                         P * (makespan - the one before)
    straggler       ... and all replicas end with the slowest                 P * (slowest - makespan)

All but the last are summed over replicas. Means count absent acts as zero, so every simulation has the same work, and
the kinds add up exactly to the idle time R * P * slowest - busy. Order matters: each kind is what its cause adds to
those above it. A kind may be negative, where a cause happens to help: a short first micro-batch fills the pipeline
sooner than the mean one.

Price: four simulations of every replica (balancer/makespans.py), below a millisecond for 64 replicas of 4 x 16.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array
from balancer.errors import ScheduleError
from balancer.makespans import BoolArray, makespans_ns
from balancer.schedule import Schedule
from balancer.simulation_core import FORWARD, WEIGHT_GRADIENT

BubbleKind = Literal["structural", "stage_skew", "data", "communication", "straggler"]
BUBBLE_KINDS: tuple[BubbleKind, ...] = get_args(BubbleKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubbles:
    """Idle time of one step by kind; times in ms.

    Attributes:
        num_ranks: all ranks, R * P.
        makespan_ms: of the slowest replica.
        busy_ms: work of all ranks together.
        structural_ms, stage_skew_ms, data_ms, communication_ms, straggler_ms: idle time of all ranks together, see the
            head of this file.
    """

    num_ranks: int
    makespan_ms: float
    busy_ms: float
    structural_ms: float
    stage_skew_ms: float
    data_ms: float
    communication_ms: float
    straggler_ms: float

    @property
    def idle_ms(self) -> float:
        """Idle time of all ranks together, the sum of the kinds."""
        return self.num_ranks * self.makespan_ms - self.busy_ms

    def of_kind(self, kind: BubbleKind) -> float:
        """Idle time of one kind in ms."""
        value: float = getattr(self, f"{kind}_ms")
        return value

    def share(self, kind: BubbleKind) -> float:
        """The same as a share of all rank time; shares add up to `bubble_ratio`. 0.0 where nothing ran."""
        total = self.num_ranks * self.makespan_ms
        return self.of_kind(kind) / total if total else 0.0


def bubbles_of(
    schedule: Schedule,
    forward_ns: Int64Array,
    backward_ns: Int64Array,
    present: BoolArray | None = None,
    *,
    weight_ns: Int64Array | None = None,
    p2p_ns: int = 0,
    routed: bool = False,
) -> Bubbles:
    """The bubble of R replicas that run `schedule` and meet at the end of the step.

    Args:
        schedule: complete; absent acts are named by `present`.
        forward_ns, backward_ns, present, weight_ns, p2p_ns, routed: as in `makespans_ns`, [R, M, S].

    Raises:
        ScheduleError: a deadlock, arrays of another shape, or no replica.
    """
    if len(forward_ns) == 0:
        raise ScheduleError("forward_ns holds no replica; bubbles are those of at least one")
    weight = backward_ns // 2 if weight_ns is None else weight_ns
    op = schedule.op
    backwards = (op != FORWARD) & (op != WEIGHT_GRADIENT)
    has = [_cells(schedule, acts) for acts in (op == FORWARD, backwards, op == WEIGHT_GRADIENT)]
    real = [
        np.where(runs if present is None else runs & present, values, 0)
        for runs, values in zip(has, (forward_ns, backward_ns, weight), strict=True)
    ]
    uniform = [_mean(values, runs, axes=(1, 2)) for values, runs in zip(real, has, strict=True)]
    skewed = [_mean(values, runs, axes=(1,)) for values, runs in zip(real, has, strict=True)]
    spans = [
        makespans_ns(schedule, forward, backward, here, weight_ns=part, p2p_ns=latency, routed=routed)
        for (forward, backward, part), here, latency in (
            (uniform, None, 0),
            (skewed, None, 0),
            (real, present, 0),
            (real, present, p2p_ns),
        )
    ]
    busy = int(real[0].sum()) + int(real[1].sum())  # W is a part of backward
    ranks, slowest = schedule.num_ranks, int(spans[-1].max())
    steps = [int(span.sum()) * ranks for span in spans]
    parts = [steps[0] - busy, *(after - before for before, after in pairwise(steps))]
    parts.append(len(forward_ns) * ranks * slowest - steps[-1])
    structural, stage_skew, data, communication, straggler = (part / 1e6 for part in parts)
    return Bubbles(
        num_ranks=len(forward_ns) * ranks,
        makespan_ms=slowest / 1e6,
        busy_ms=busy / 1e6,
        structural_ms=structural,
        stage_skew_ms=stage_skew,
        data_ms=data,
        communication_ms=communication,
        straggler_ms=straggler,
    )


def _cells(schedule: Schedule, chosen: NDArray[np.bool_]) -> BoolArray:
    """Where the chosen acts are, bool [M, S]."""
    cells = np.zeros((schedule.num_microbatches, schedule.num_stages), dtype=np.bool_)
    cells[schedule.microbatch[chosen], schedule.stage[chosen]] = True
    return cells


def _mean(values: Int64Array, runs: BoolArray, *, axes: tuple[int, ...]) -> Int64Array:
    """Values [R, M, S] replaced by their means over `axes`, of the cells that run, whole ns."""
    count = np.broadcast_to(runs, values.shape).sum(axis=axes, keepdims=True)
    means = values.sum(axis=axes, keepdims=True) // np.maximum(count, 1)
    replaced: Int64Array = np.ascontiguousarray(np.broadcast_to(means, values.shape))
    return replaced
