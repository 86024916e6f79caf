"""What a schedule does in time: start and end of every act of one replica, in milliseconds.

    schedule [A acts] + durations [S, M] --simulate--> Timeline: start, end [A], busy [P], critical path, peaks

An act starts when its rank has finished the act before it in program order and its inputs have arrived; who waits for
whom, and that nobody waits for ever, is in balancer/compiled_schedule.py. What comes from another rank arrives
`p2p_ms` later. An absent stage takes no time and passes the wait on.

This is for looking at one replica; very many are compared by balancer/makespans.py, which is re-exported here.

Price: about 6 ms for 131,072 acts the first time, 2 ms once the schedule is compiled, linear in acts.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.compiled_schedule import Compiled, Edges, compiled
from balancer.counts import Int64Array
from balancer.errors import ScheduleError
from balancer.makespans import (
    Meet,
    makespans_ns,
    makespans_of_orders_ns,
    meeting_makespan_ns,
    meeting_makespans_ns,
    rank_ends_ns,
)
from balancer.metrics import bubble_ratio
from balancer.schedule import Act, Schedule
from balancer.simulation_core import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, read_only, time_acts

__all__ = [
    "Compiled",
    "Edges",
    "Meet",
    "Timeline",
    "compiled",
    "makespans_ns",
    "makespans_of_orders_ns",
    "meeting_makespan_ns",
    "meeting_makespans_ns",
    "peak_live",
    "rank_ends_ns",
    "simulate",
]

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """When everything happened; times in ms from the start of the step.

    Attributes:
        schedule: what ran; arrays [A] are aligned with its acts.
        start_ms, end_ms: of every act, [A].
        makespan_ms: end of the last act.
        busy_ms: time every rank works, [P].
        bubble_ratio: 1 - sum(busy) / (P * makespan).
    """

    schedule: Schedule
    start_ms: Float64Array
    end_ms: Float64Array
    makespan_ms: float
    busy_ms: Float64Array
    bubble_ratio: float
    _links: Compiled
    _p2p_ms: float

    @property
    def idle_ms(self) -> Float64Array:
        """Time every rank waits between the start of the step and its end, [P]."""
        return self.makespan_ms - self.busy_ms

    @property
    def peak_activations(self) -> Int64Array:
        """Most forwards that every rank holds for a backward to come, [P]; see `peak_live`."""
        return peak_live(self.schedule)

    def acts(self) -> Iterator[tuple[int, Act, float, float]]:
        """(rank, act, start_ms, end_ms) of every act, rank by rank in program order."""
        times = zip(self.start_ms.tolist(), self.end_ms.tolist(), strict=True)
        for rank, acts in enumerate(self.schedule.ranks):
            for act in acts:
                yield rank, act, *next(times)

    def of_rank(self, rank: int) -> slice:
        """Where the acts of one rank are in the arrays."""
        first, last = self.schedule.rank_offsets[rank : rank + 2].tolist()
        return slice(first, last)

    @property
    def critical_path(self) -> NDArray[np.int64]:
        """Acts that decide the makespan, first to last: each starts as soon as the one before lets it.

        Of several such chains, the one that stays on its rank where it can. Between two acts on different ranks lies
        the latency.
        """
        if len(self.end_ms) == 0:
            return np.zeros(0, dtype=np.int64)
        path = [int(self.end_ms.argmax())]
        while (before := self._tight_before(path[-1])) is not None:
            path.append(before)
        return np.array(path[::-1], dtype=np.int64)

    def _tight_before(self, act: int) -> int | None:
        """The act whose end (and arrival) is the start of `act`; None when it starts with the step."""
        start, rank, links = self.start_ms[act], self._links.act_rank, self._links
        if act > 0 and rank[act - 1] == rank[act] and self.end_ms[act - 1] == start:
            return act - 1
        for source in links.sources[links.offsets[act] : links.offsets[act + 1]].tolist():
            if self.end_ms[source] + (self._p2p_ms if links.is_away(source, act) else 0.0) == start:
                return int(source)
        return None


def simulate(
    schedule: Schedule,
    *,
    forward_ms: ArrayLike,
    backward_ms: ArrayLike | None = None,
    weight_ms: ArrayLike | None = None,
    p2p_ms: float = 0.0,
    edges: Edges | None = None,
    routed: bool = False,
) -> Timeline:
    """Run `schedule` with the given durations.

    Args:
        schedule: what runs; may lack acts (`without`, `forward_only`).
        forward_ms, backward_ms: [S, M]; entries of absent acts are not read. `backward_ms` may be left out for a
            forward-only schedule.
        weight_ms: the part of `backward_ms` that is W where backward is split into I and W; default half.
        p2p_ms: latency added to an input that comes from another rank.
        edges: data edges between stages; default is the chain 0 -> 1 -> ... -> S-1.
        routed: media items are exchanged inside each unit: entry [0, u * P + j] is the share of rank j in unit u, and
            an exchange ends for all its ranks `p2p_ms` after its last part.

    Raises:
        ScheduleError: a deadlock (with its cycle), or durations of another shape, negative, not finite, or with a sum
            that is not finite.
    """
    links = compiled(schedule, edges=edges, routed=routed)
    if links.has_backward and backward_ms is None:
        raise ScheduleError(f"schedule {schedule.name} has backward acts; give backward_ms or use forward_only()")
    if not 0.0 <= p2p_ms < np.inf:
        raise ScheduleError(f"p2p_ms={p2p_ms} is not a duration")
    forward = _durations(schedule, "forward_ms", forward_ms)
    backward = forward if backward_ms is None else _durations(schedule, "backward_ms", backward_ms)
    weight = 0.5 * backward if weight_ms is None else _durations(schedule, "weight_ms", weight_ms)
    start, end, busy, bad = time_acts(
        links.order,
        links.offsets,
        links.sources,
        schedule.op,
        links.cell,
        links.act_rank,
        read_only(forward.reshape(-1)),
        read_only(backward.reshape(-1)),
        read_only(weight.reshape(-1)),
        float(p2p_ms),
        schedule.num_ranks,
        links.num_exchanged,
    )
    if bad >= 0:
        raise ScheduleError(_describe_bad(schedule, bad, forward, backward, weight))
    makespan = float(end.max(initial=0.0))
    if not np.isfinite(makespan * schedule.num_ranks):
        raise ScheduleError(
            f"schedule {schedule.name}: the durations add up to {makespan} ms on {schedule.num_ranks} ranks, beyond "
            "what a float holds; check forward_ms, backward_ms and p2p_ms"
        )
    return Timeline(
        schedule=schedule,
        start_ms=start,
        end_ms=end,
        makespan_ms=makespan,
        busy_ms=busy,
        bubble_ratio=bubble_ratio(busy, makespan),
        _links=links,
        _p2p_ms=float(p2p_ms),
    )


def peak_live(
    schedule: Schedule, *, stages: Collection[int] | None = None, weights: ArrayLike | None = None
) -> NDArray[Any]:
    """Most that every rank holds at once: forwards whose backward (or W, where split) has not ended, [P].

    Args:
        schedule: what runs; a forward without a backward holds its activations while it runs.
        stages: count only these; default all. Of a spread encoder, one micro-batch on a rank is that rank's part of
            one unit.
        weights: [S, M], such as bytes of activations; default 1 each.

    Ranks run one act at a time in a fixed order, so peaks depend on no duration.
    """
    shape = (schedule.num_stages, schedule.num_microbatches)
    weight = np.ones(shape, dtype=np.int64) if weights is None else np.asarray(weights)
    if weight.shape != shape:
        raise ScheduleError(f"weights has shape {weight.shape}; expected [stages, micro-batches] = {shape}")
    op, cell = schedule.op, schedule.stage * schedule.num_microbatches + schedule.microbatch
    size = weight.reshape(-1)[cell]
    if stages is not None:
        size = np.where(np.isin(schedule.stage, list(stages)), size, 0)
    last = np.zeros(weight.size, dtype=np.int8)  # code of the act that frees a cell: F < B < I < W
    np.maximum.at(last, cell, op)
    held = np.cumsum(np.where(op == FORWARD, size, 0)) - np.cumsum(np.where(op == last[cell], size, 0))
    # What an act frees is still held while it runs.
    during = held + np.where(op == last[cell], size, 0)
    peaks = np.zeros(schedule.num_ranks, dtype=size.dtype)
    for rank, (first, end) in enumerate(zip(schedule.rank_offsets[:-1], schedule.rank_offsets[1:], strict=True)):
        if end > first:
            before = held[first - 1] if first > 0 else 0
            peaks[rank] = (during[first:end] - before).max()
    return peaks


def _durations(schedule: Schedule, name: str, values: ArrayLike) -> Float64Array:
    try:
        array = np.ascontiguousarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ScheduleError(f"{name} is no table of durations: {error}") from error
    shape = (schedule.num_stages, schedule.num_microbatches)
    if array.shape != shape:
        raise ScheduleError(f"{name} has shape {array.shape}; expected [stages, micro-batches] = {shape}")
    return array


def _describe_bad(
    schedule: Schedule, act: int, forward: Float64Array, backward: Float64Array, weight: Float64Array
) -> str:
    op, stage, microbatch = int(schedule.op[act]), int(schedule.stage[act]), int(schedule.microbatch[act])
    name, values = {FORWARD: ("forward_ms", forward), WEIGHT_GRADIENT: ("weight_ms", weight)}.get(
        op, ("backward_ms", backward)
    )
    text = f"{name}[{stage}, {microbatch}]={values[stage, microbatch]} is not a duration"
    if op == INPUT_GRADIENT:
        text += f" with weight_ms={weight[stage, microbatch]} taken from it"
    return text
