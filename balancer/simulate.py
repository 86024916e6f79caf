"""What a schedule does in time: start and end of every act, or the cycle that would make it hang.

An act starts when its rank has finished the act before it in program order and its inputs have arrived:

    F(stage)   after F of the nearest present stage(s) before it        (+ p2p between ranks)
    B(stage)   after F of its own stage and B of the nearest present stage(s) after it

Sends never block (the executor posts them and goes on), so a run hangs exactly when program order and these edges
form a cycle; `execution_order` finds an order in which everything can run or names the cycle.

Two forms: `simulate` for one replica with a full timeline in milliseconds, and `makespans_ns` for many replicas of
the same schedule at once in integers, which is what the planner compares candidates with.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.counts import Int64Array
from balancer.errors import ScheduleError
from balancer.metrics import bubble_ratio
from balancer.schedule import Act, Schedule

# Data edges between stages: (producer, consumer).
Edges = Collection[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When everything happened; times in ms from the start of the step.

    Attributes:
        start_ms, end_ms: per rank, one entry per act, aligned with `schedule.ranks`.
        makespan_ms: end of the last act.
        busy_ms: time every rank works, [P].
        bubble_ratio: 1 - sum(busy) / (P * makespan).
    """

    start_ms: tuple[tuple[float, ...], ...]
    end_ms: tuple[tuple[float, ...], ...]
    makespan_ms: float
    busy_ms: tuple[float, ...]
    bubble_ratio: float


def simulate(
    schedule: Schedule,
    forward_ms: ArrayLike,
    backward_ms: ArrayLike | None = None,
    p2p_ms: float = 0.0,
    edges: Edges | None = None,
) -> Timeline:
    """Run `schedule` with the given durations.

    Args:
        forward_ms, backward_ms: [S, M]; entries of absent acts are not read. `backward_ms` may be left out for a
            forward-only schedule.
        p2p_ms: latency added to an input that comes from another rank.
        edges: data edges between stages; default is the chain 0 -> 1 -> ... -> S-1.

    Raises:
        ScheduleError: a deadlock (with its cycle), or durations of another shape, negative or not finite.
    """
    durations = {"F": _durations(schedule, "forward_ms", forward_ms)}
    has_backward = any(act.op == "B" for acts in schedule.ranks for act in acts)
    if has_backward:
        if backward_ms is None:
            raise ScheduleError(f"schedule {schedule.name} has backward acts; give backward_ms or use forward_only()")
        durations["B"] = _durations(schedule, "backward_ms", backward_ms)
    graph = _Graph(schedule, edges)
    start: dict[Act, float] = {}
    end: dict[Act, float] = {}
    clock = [0.0] * schedule.num_ranks
    for act in graph.order():
        rank = schedule.stage_rank[act.stage]
        arrivals = [
            end[source] + (p2p_ms if schedule.stage_rank[source.stage] != rank else 0.0) for source in graph.inputs(act)
        ]
        start[act] = max(clock[rank], *arrivals) if arrivals else clock[rank]
        end[act] = clock[rank] = start[act] + float(durations[act.op][act.stage, act.microbatch])
    busy = tuple(sum(float(durations[act.op][act.stage, act.microbatch]) for act in acts) for acts in schedule.ranks)
    makespan = max(clock)
    return Timeline(
        start_ms=tuple(tuple(start[act] for act in acts) for acts in schedule.ranks),
        end_ms=tuple(tuple(end[act] for act in acts) for acts in schedule.ranks),
        makespan_ms=makespan,
        busy_ms=busy,
        bubble_ratio=bubble_ratio(busy, makespan),
    )


def makespans_ns(
    schedule: Schedule, forward_ns: Int64Array, backward_ns: Int64Array, present: NDArray[np.bool_]
) -> Int64Array:
    """Makespans of K replicas that run the same full `schedule` over a chain of stages, int64 [K].

    Args:
        schedule: complete: absent acts are named by `present`, which may differ from replica to replica.
        forward_ns, backward_ns: int64 [K, M, S].
        present: bool [K, M, S]: False where an act does not run.
    """
    num_replicas = forward_ns.shape[0]
    # [K, M, S] -> [S, M, K]: one contiguous row of replicas per act.
    durations = {"F": _rows(forward_ns, present), "B": _rows(backward_ns, present)}
    here = np.ascontiguousarray(present.transpose(2, 1, 0))
    if schedule.num_ranks == 1:
        total: Int64Array = durations["F"].sum(axis=(0, 1)) + durations["B"].sum(axis=(0, 1))
        return total
    all_present = bool(here.all())
    clock = np.zeros((schedule.num_ranks, num_replicas), dtype=np.int64)
    arrived = {op: np.zeros((schedule.num_microbatches, num_replicas), dtype=np.int64) for op in "FB"}
    for act in execution_order(schedule):
        rank = schedule.stage_rank[act.stage]
        # The own forward of a backward is earlier on the same rank: the clock covers it.
        end = np.maximum(clock[rank], arrived[act.op][act.microbatch]) + durations[act.op][act.stage, act.microbatch]
        if not all_present:
            runs = here[act.stage, act.microbatch]
            clock[rank] = np.where(runs, end, clock[rank])
            arrived[act.op][act.microbatch] = np.where(runs, end, arrived[act.op][act.microbatch])
        else:
            clock[rank] = arrived[act.op][act.microbatch] = end
    makespans: Int64Array = clock.max(axis=0)
    return makespans


@lru_cache(maxsize=64)
def execution_order(schedule: Schedule) -> tuple[Act, ...]:
    """An order of all acts in which every one finds its inputs ready, for the chain of stages.

    Raises:
        ScheduleError: there is none; the text shows the cycle.
    """
    return _Graph(schedule, None).order()


class _Graph:
    """Program order and data edges of one schedule."""

    def __init__(self, schedule: Schedule, edges: Edges | None) -> None:
        self._schedule = schedule
        self._present = {act for acts in schedule.ranks for act in acts}
        chain = edges if edges is not None else [(stage, stage + 1) for stage in range(schedule.num_stages - 1)]
        self._before: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
        self._after: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
        for producer, consumer in chain:
            if not 0 <= producer < consumer < schedule.num_stages:
                raise ScheduleError(f"edge {producer} -> {consumer}: edges go from a stage to a later one")
            self._before[consumer].append(producer)
            self._after[producer].append(consumer)

    def inputs(self, act: Act) -> list[Act]:
        """Present acts whose results `act` waits for."""
        if act.op == "F":
            return self._nearest(act, self._before)
        return [Act("F", act.stage, act.microbatch), *self._nearest(act, self._after)]

    def _nearest(self, act: Act, neighbours: dict[int, list[int]]) -> list[Act]:
        """Acts of the nearest present stages in one direction: an absent stage passes the wait on, not itself."""
        found: list[Act] = []
        waiting = list(neighbours[act.stage])
        while waiting:
            stage = waiting.pop()
            candidate = Act(act.op, stage, act.microbatch)
            if candidate in self._present:
                found.append(candidate)
            else:
                waiting.extend(neighbours[stage])
        return found

    def order(self) -> tuple[Act, ...]:
        """All acts, each after its inputs and after the act before it on its rank."""
        programs = self._schedule.ranks
        position = [0] * len(programs)
        done: set[Act] = set()
        order: list[Act] = []
        # Ranks to look at again, by the act that stopped them.
        stopped: dict[Act, list[int]] = {}
        ready = list(range(len(programs)))[::-1]
        while ready:
            rank = ready.pop()
            while position[rank] < len(programs[rank]):
                act = programs[rank][position[rank]]
                missing = next((source for source in self.inputs(act) if source not in done), None)
                if missing is not None:
                    stopped.setdefault(missing, []).append(rank)
                    break
                done.add(act)
                order.append(act)
                position[rank] += 1
                ready.extend(stopped.pop(act, ()))
        if len(order) != len(self._present):
            heads = {rank: acts[position[rank]] for rank, acts in enumerate(programs) if position[rank] < len(acts)}
            raise ScheduleError(self._describe_cycle(heads, done))
        return tuple(order)

    def _describe_cycle(self, heads: dict[int, Act], done: set[Act]) -> str:
        """Follow who waits for whom from any stuck rank until a rank repeats, and spell out that loop."""
        steps: list[tuple[int, str]] = []
        rank = next(iter(heads))
        while rank not in [visited for visited, _ in steps]:
            head = heads[rank]
            missing = next(source for source in self.inputs(head) if source not in done)
            holder = self._schedule.stage_rank[missing.stage]
            behind = "" if heads[holder] == missing else f", which rank {holder} runs only after {heads[holder]}"
            steps.append((rank, f"rank {rank}: {head} waits for {missing}{behind}"))
            rank = holder
        first = [visited for visited, _ in steps].index(rank)
        cycle = "; ".join(text for _, text in steps[first:])
        return f"schedule {self._schedule.name} would deadlock: {cycle}"


def _durations(schedule: Schedule, name: str, values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    shape = (schedule.num_stages, schedule.num_microbatches)
    if array.shape != shape:
        raise ScheduleError(f"{name} has shape {array.shape}; expected [stages, micro-batches] = {shape}")
    for stage, microbatch in _pairs(schedule):
        if not (np.isfinite(array[stage, microbatch]) and array[stage, microbatch] >= 0.0):
            raise ScheduleError(f"{name}[{stage}, {microbatch}]={array[stage, microbatch]} is not a duration")
    return array


def _pairs(schedule: Schedule) -> Iterator[tuple[int, int]]:
    programs: Sequence[Sequence[Act]] = schedule.ranks
    return ((act.stage, act.microbatch) for acts in programs for act in acts if act.op == "F")


def _rows(times_ns: Int64Array, present: NDArray[np.bool_]) -> Int64Array:
    return np.ascontiguousarray(np.where(present, times_ns, 0).transpose(2, 1, 0))
