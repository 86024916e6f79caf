"""The simulator against its rules, written as slowly and plainly as possible, on random schedules and durations."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import ScheduleError
from balancer.schedule import Act, Schedule
from balancer.simulate import (
    Timeline,
    compiled,
    makespans_ns,
    makespans_of_orders_ns,
    meeting_makespan_ns,
    peak_live,
    rank_ends_ns,
    simulate,
)

SEEDS = st.integers(0, 2**32)
LATENCIES = st.sampled_from([0, 3])

# (op, stage, micro-batch) -> duration
Duration = Callable[[Act], float]


class SlowSimulator:
    """Who waits for whom, and when everything happens."""

    def __init__(self, schedule: Schedule, *, unit_size: int = 0) -> None:
        self.schedule = schedule
        self.unit_size = unit_size  # > 0: stage 0 is exchanged inside units
        self.rank_of = {act: rank for rank, acts in enumerate(schedule.ranks) for act in acts}

    def sources(self, act: Act) -> list[Act]:
        """Acts that must have ended, and whose results must have arrived."""
        if act.op == "W":
            return [Act("I", act.stage, act.microbatch)]
        if act.op == "F":
            return self._forward_sources(act)
        return [Act("F", act.stage, act.microbatch), *self._backward_sources(act)]

    def _forward_sources(self, act: Act) -> list[Act]:
        first = 1 if self.unit_size else 0
        before = [Act("F", stage, act.microbatch) for stage in range(act.stage - 1, first - 1, -1)]
        nearest = self._first_present(before)
        if self.unit_size and act.stage > 0 and not nearest:
            return self._present(Act("F", 0, other) for other in self._unit(act.microbatch))
        return nearest

    def _backward_sources(self, act: Act) -> list[Act]:
        if self.unit_size and act.stage == 0:
            return [source for other in self._unit(act.microbatch) for source in self._after(1, other)]
        return self._after(act.stage + 1, act.microbatch)

    def _after(self, first: int, microbatch: int) -> list[Act]:
        stages = range(first, self.schedule.num_stages)
        return self._first_present(Act(op, stage, microbatch) for stage in stages for op in ("B", "I"))

    def _unit(self, microbatch: int) -> range:
        first = microbatch // self.unit_size * self.unit_size
        return range(first, min(first + self.unit_size, self.schedule.num_microbatches))

    def _present(self, acts: Iterable[Act]) -> list[Act]:
        return [act for act in acts if act in self.rank_of]

    def _first_present(self, acts: Iterable[Act]) -> list[Act]:
        return self._present(acts)[:1]

    def takes_latency(self, source: Act, act: Act) -> bool:
        exchange = self.unit_size > 0 and (source.stage == 0) != (act.stage == 0) and self.schedule.num_ranks > 1
        return exchange or self.rank_of[source] != self.rank_of[act]

    def run(self, duration: Duration, p2p: float = 0) -> tuple[dict[Act, float], dict[Act, float]]:
        """(start, end) of every act that ever runs; acts that are missing wait for ever."""
        programs = [list(acts) for acts in self.schedule.ranks]
        clock = [0.0] * len(programs)
        start: dict[Act, float] = {}
        end: dict[Act, float] = {}
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(programs):
                if program and all(source in end for source in self.sources(program[0])):
                    act = program.pop(0)
                    arrivals = [end[source] + p2p * self.takes_latency(source, act) for source in self.sources(act)]
                    start[act] = max([clock[rank], *arrivals])
                    end[act] = clock[rank] = start[act] + duration(act)
                    moved = True
        return start, end


def durations(forward: np.ndarray, backward: np.ndarray, weight: np.ndarray) -> Duration:
    """Durations of acts from arrays [S, M]; W is the given part of backward."""

    def of(act: Act) -> float:
        whole, part = backward[act.stage, act.microbatch], weight[act.stage, act.microbatch]
        return {"F": forward[act.stage, act.microbatch], "B": whole, "I": whole - part, "W": part}[act.op]

    return of


def whole_numbers(shape: tuple[int, ...], seed: int, most: int = 50) -> np.ndarray:
    """Integers 0..most, int64: exact in floating point too."""
    return np.random.default_rng(seed).integers(0, most + 1, shape)


@st.composite
def runnable_schedules(draw: st.DrawFn) -> Schedule:
    """Any placement, any order that can run: acts are drawn one by one from those whose sources have been drawn.

    Where stage 0 is spread over the ranks, the order can also run with its items routed.
    """
    num_ranks, stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    spread = draw(st.booleans())
    stage_ranks = [draw(st.integers(0, num_ranks - 1)) for _ in range(stages)]
    if spread:
        stage_ranks[0] = -1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    split = rng.random((stages, microbatches)) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    waiting = [Act("F", stage, m) for stage in range(stages) for m in range(microbatches)]
    frozen = draw(st.integers(0, min(2, stages - 1)))  # stages at the head without a backward
    for stage, m in np.ndindex(stages, microbatches):
        if stage < frozen:
            continue
        waiting += [Act("I", stage, m), Act("W", stage, m)] if split[stage, m] else [Act("B", stage, m)]
    fixed = {"num_microbatches": microbatches, "frozen_stages": range(frozen)}
    every = Schedule.from_acts([waiting], stage_ranks=[0] * stages, **fixed)
    rules = SlowSimulator(every, unit_size=num_ranks if spread else 0)
    programs: list[list[Act]] = [[] for _ in range(num_ranks)]
    done: set[Act] = set()
    while waiting:
        ready = [act for act in waiting if done.issuperset(rules.sources(act))]
        act = ready[rng.integers(len(ready))]
        waiting.remove(act)
        done.add(act)
        rank = stage_ranks[act.stage]
        programs[act.microbatch % num_ranks if rank < 0 else rank].append(act)
    return Schedule.from_acts(programs, stage_ranks=stage_ranks, **fixed)


def absent_cells(schedule: Schedule, seed: int) -> set[tuple[int, int]]:
    shape = (schedule.num_stages, schedule.num_microbatches)
    rng = np.random.default_rng(seed)
    return {(int(s), int(m)) for s, m in np.argwhere(rng.random(shape) < rng.choice([0.0, 0.3, 0.8]))}


def assert_same(timeline: Timeline, start: dict[Act, float], end: dict[Act, float]) -> None:
    acts = list(timeline.acts())
    assert len(acts) == len(end)
    assert {act: (begin, finish) for _, act, begin, finish in acts} == {act: (start[act], end[act]) for act in end}


@given(runnable_schedules(), SEEDS, LATENCIES, st.booleans())
def test_a_timeline_is_what_the_rules_say(schedule: Schedule, seed: int, p2p: int, routed: bool) -> None:
    routed = routed and schedule.unit_size > 0
    shape = (schedule.num_stages, schedule.num_microbatches)
    forward, weight = whole_numbers(shape, seed), whole_numbers(shape, seed + 1)
    backward = weight + whole_numbers(shape, seed + 2)
    present = schedule.without(absent_cells(schedule, seed))
    timeline = simulate(present, forward_ms=forward, backward_ms=backward, weight_ms=weight, p2p_ms=p2p, routed=routed)
    rules = SlowSimulator(present, unit_size=schedule.unit_size if routed else 0)
    assert_same(timeline, *rules.run(durations(forward, backward, weight), p2p))
    busy = [sum(durations(forward, backward, weight)(act) for act in acts) for acts in present.ranks]
    assert timeline.busy_ms.tolist() == busy
    assert timeline.makespan_ms == max(timeline.end_ms, default=0.0)
    assert timeline.idle_ms.tolist() == [timeline.makespan_ms - time for time in busy]


@given(runnable_schedules(), st.integers(1, 5), SEEDS, LATENCIES, st.booleans())
def test_many_replicas_at_once_agree_with_one_at_a_time(
    schedule: Schedule, replicas: int, seed: int, p2p: int, routed: bool
) -> None:
    routed = routed and schedule.unit_size > 0
    shape = (replicas, schedule.num_microbatches, schedule.num_stages)
    forward, weight = whole_numbers(shape, seed), whole_numbers(shape, seed + 1)
    backward = weight + whole_numbers(shape, seed + 2)
    absent = [absent_cells(schedule, seed + replica) for replica in range(replicas)]
    present = np.ones(shape, dtype=np.bool_)
    for replica, cells in enumerate(absent):
        for stage, microbatch in cells:
            present[replica, microbatch, stage] = False
    ends = rank_ends_ns(schedule, forward, backward, present, weight_ns=weight, p2p_ns=p2p, routed=routed)
    many = makespans_ns(schedule, forward, backward, present, weight_ns=weight, p2p_ns=p2p, routed=routed)
    for replica in range(replicas):
        rules = SlowSimulator(schedule.without(absent[replica]), unit_size=schedule.unit_size if routed else 0)
        _, end = rules.run(durations(forward[replica].T, backward[replica].T, weight[replica].T), p2p)
        last = [max((end[act] for act in acts), default=0) for acts in rules.schedule.ranks]
        assert ends[replica].tolist() == last
        assert many[replica] == max(last)


@given(runnable_schedules(), SEEDS)
def test_without_given_weights_w_takes_half_of_backward_rounded_down(schedule: Schedule, seed: int) -> None:
    shape = (1, schedule.num_microbatches, schedule.num_stages)
    forward, backward = whole_numbers(shape, seed), whole_numbers(shape, seed + 1)
    halves = makespans_ns(schedule, forward, backward, weight_ns=backward // 2)
    assert makespans_ns(schedule, forward, backward).tolist() == halves.tolist()


@given(runnable_schedules(), st.integers(1, 4), st.integers(1, 30), SEEDS, LATENCIES)
def test_orders_are_simulated_as_if_the_microbatches_had_been_exchanged(
    schedule: Schedule, replicas: int, candidates: int, seed: int, p2p: int
) -> None:
    """Up to 120 candidates: more than run side by side at once."""
    shape = (replicas, schedule.num_microbatches, schedule.num_stages)
    forward, backward = whole_numbers(shape, seed), whole_numbers(shape, seed + 1)
    present = whole_numbers(shape, seed + 2, 3) > 0
    keys = np.random.default_rng(seed).random((candidates, replicas, schedule.num_microbatches))
    orders = keys.argsort(axis=2)
    found = makespans_of_orders_ns(schedule, forward, backward, present, orders, p2p_ns=p2p)
    assert found.shape == (candidates, replicas)
    replica = np.arange(replicas)[:, np.newaxis]
    for candidate in range(candidates):
        moved = [array[replica, orders[candidate]] for array in (forward, backward, present)]
        assert found[candidate].tolist() == makespans_ns(schedule, *moved, p2p_ns=p2p).tolist()


@given(runnable_schedules(), st.integers(2, 4), SEEDS)
def test_replicas_in_lockstep_take_what_acts_take_that_all_begin_together(
    schedule: Schedule, replicas: int, seed: int
) -> None:
    """In lockstep an act begins when it can begin everywhere, and ends everywhere with the slowest."""
    shape = (replicas, schedule.num_microbatches, schedule.num_stages)
    forward, weight = whole_numbers(shape, seed), whole_numbers(shape, seed + 1)
    backward = weight + whole_numbers(shape, seed + 2)
    present = whole_numbers(shape, seed + 3, 3) > 0
    found = meeting_makespan_ns(schedule, forward, backward, present, "microbatch", weight_ns=weight)
    runs = present.any(axis=0)
    absent = {(int(stage), int(microbatch)) for microbatch, stage in np.argwhere(~runs)}

    def slowest(act: Act) -> float:
        return max(
            durations(forward[replica].T, backward[replica].T, weight[replica].T)(act)
            for replica in range(replicas)
            if present[replica, act.microbatch, act.stage]
        )

    _, end = SlowSimulator(schedule.without(absent)).run(slowest)
    assert found == max(end.values(), default=0)


@given(runnable_schedules(), st.integers(1, 4), SEEDS)
def test_the_more_often_replicas_meet_the_longer_the_step(schedule: Schedule, replicas: int, seed: int) -> None:
    shape = (replicas, schedule.num_microbatches, schedule.num_stages)
    forward, backward = whole_numbers(shape, seed), whole_numbers(shape, seed + 1)
    step, unit, microbatch = (
        meeting_makespan_ns(schedule, forward, backward, None, meet) for meet in ("step", "unit", "microbatch")
    )
    assert makespans_ns(schedule, forward, backward).max() == step <= unit <= microbatch
    if replicas == 1:
        assert step == microbatch


@given(runnable_schedules(), SEEDS, LATENCIES, st.booleans())
def test_a_critical_path_has_no_gap_and_ends_the_step(schedule: Schedule, seed: int, p2p: int, routed: bool) -> None:
    routed = routed and schedule.unit_size > 0
    shape = (schedule.num_stages, schedule.num_microbatches)
    present = schedule.without(absent_cells(schedule, seed))
    times = whole_numbers(shape, seed)
    timeline = simulate(present, forward_ms=times, backward_ms=2 * times, p2p_ms=p2p, routed=routed)
    path = timeline.critical_path.tolist()
    if not len(timeline.end_ms):
        assert path == []
        return
    assert timeline.start_ms[path[0]] == 0.0
    assert timeline.end_ms[path[-1]] == timeline.makespan_ms
    acts = [act for rank in present.ranks for act in rank]
    rules = SlowSimulator(present, unit_size=schedule.unit_size if routed else 0)
    for before, after in pairwise(path):
        waited = timeline.start_ms[after] - timeline.end_ms[before]
        follows = after == before + 1 and present.act_rank[before] == present.act_rank[after]
        if not (follows and waited == 0):
            assert acts[before] in rules.sources(acts[after])
            assert waited == p2p * rules.takes_latency(acts[before], acts[after])


@given(runnable_schedules(), SEEDS)
def test_peaks_are_what_stepping_through_the_programs_shows(schedule: Schedule, seed: int) -> None:
    shape = (schedule.num_stages, schedule.num_microbatches)
    present = schedule.without(absent_cells(schedule, seed))
    size = whole_numbers(shape, seed)
    stages = {int(stage) for stage in np.flatnonzero(whole_numbers(shape[:1], seed, 1))}
    for chosen, weights in ((None, np.ones(shape, dtype=np.int64)), (stages, size)):
        expected = [peak_of(acts, chosen, weights) for acts in present.ranks]
        found = peak_live(present, stages=chosen, weights=None if chosen is None else weights)
        assert found.tolist() == expected


def peak_of(acts: tuple[Act, ...], stages: set[int] | None, weights: np.ndarray) -> int:
    live: dict[tuple[int, int], int] = {}
    peak = 0
    for index, act in enumerate(acts):
        cell = (act.stage, act.microbatch)
        if act.op == "F" and (stages is None or act.stage in stages):
            live[cell] = int(weights[cell])
        peak = max(peak, sum(live.values()))
        later = {(other.stage, other.microbatch) for other in acts[index + 1 :] if other.op in ("B", "W")}
        live = {held: size for held, size in live.items() if held in later}
    return peak


@given(runnable_schedules(), SEEDS)
def test_shuffled_programs_complete_or_are_refused_but_never_hang(schedule: Schedule, seed: int) -> None:
    """A program order is runnable exactly when moving ready acts one by one reaches the end."""
    rng = np.random.default_rng(seed)
    programs = [[acts[i] for i in rng.permutation(len(acts))] for acts in schedule.ranks]
    shuffled = Schedule.from_acts(
        programs,
        stage_ranks=[-1 if len(set(places)) > 1 else places[0] for places in schedule.place.tolist()],
        num_microbatches=schedule.num_microbatches,
        frozen_stages=schedule.frozen_stages,
    )
    start, _ = SlowSimulator(shuffled).run(lambda act: 1.0)
    if len(start) == len(schedule.op):
        assert sorted(compiled(shuffled).order) == list(range(len(start)))
    else:
        with pytest.raises(ScheduleError, match="would deadlock: rank"):
            compiled(shuffled)
