"""The simulator: known closed forms, waits that exist and waits that must not, deadlocks named with their cycle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import ScheduleError
from balancer.schedule import Act, Schedule, build_schedule, schedule_names
from balancer.simulate import execution_order, makespans_ns, simulate

STAGE_RANKS = st.sampled_from([[0], [0, 0], [0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 2, 3]])
NAMES = st.sampled_from(schedule_names())


def draw_times(data, stages: int, microbatches: int) -> np.ndarray:
    rows = st.lists(st.integers(0, 50), min_size=microbatches, max_size=microbatches)
    return np.array(data.draw(st.lists(rows, min_size=stages, max_size=stages)), dtype=np.float64)


@given(NAMES, st.integers(1, 6), st.integers(1, 12))
def test_uniform_pipelines_have_the_known_bubble(name: str, stages: int, microbatches: int) -> None:
    schedule = build_schedule(name, stage_ranks=list(range(stages)), num_microbatches=microbatches)
    timeline = simulate(schedule, np.full((stages, microbatches), 2.0), np.full((stages, microbatches), 4.0))
    assert timeline.makespan_ms == 6.0 * (microbatches + stages - 1)
    assert timeline.bubble_ratio == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert timeline.busy_ms == (6.0 * microbatches,) * stages


def test_a_worked_example() -> None:
    """Stage 1 waits for 0F0 until 3; 0B0 waits for 1B0 until 3 + 1 + 2."""
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=1)
    timeline = simulate(schedule, [[3.0], [1.0]], [[5.0], [2.0]])
    assert timeline.start_ms == ((0.0, 6.0), (3.0, 4.0))
    assert timeline.end_ms == ((3.0, 11.0), (4.0, 6.0))
    assert timeline.makespan_ms == 11.0
    assert timeline.bubble_ratio == pytest.approx(0.5)


def test_latency_counts_between_ranks_only() -> None:
    times = [[3.0], [1.0]], [[5.0], [2.0]]
    across = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=1)
    within = build_schedule("1f1b", stage_ranks=[0, 0], num_microbatches=1)
    assert simulate(across, *times, p2p_ms=0.5).makespan_ms == 12.0
    assert simulate(within, *times, p2p_ms=0.5).makespan_ms == 11.0


def test_nobody_waits_for_the_encoder_of_a_text_only_microbatch() -> None:
    """Micro-batch 0 has the encoder (10 ms), micro-batch 1 is text: run first, its LLM starts at 0."""
    grid = "0F0,0B0\n1F1,1B1,1F0,1B0"
    schedule = Schedule.from_grid(grid, stage_ranks=[0, 1], num_microbatches=2)
    timeline = simulate(schedule, [[10.0, 99.0], [1.0, 1.0]], [[1.0, 99.0], [1.0, 1.0]])
    assert timeline.start_ms[1] == (0.0, 1.0, 10.0, 11.0)
    assert timeline.makespan_ms == 13.0


def test_an_absent_stage_in_the_middle_passes_the_wait_on() -> None:
    schedule = build_schedule("gpipe", stage_ranks=[0, 1, 2], num_microbatches=1).without({(1, 0)})
    timeline = simulate(schedule, [[4.0], [50.0], [1.0]], [[1.0], [50.0], [2.0]], p2p_ms=0.5)
    assert timeline.start_ms[2] == (4.5, 5.5)
    assert timeline.start_ms[0] == (0.0, 8.0)


def test_edges_may_skip_the_chain() -> None:
    """Two encoders side by side feed stage 2; without the edge 0 -> 1 they run at the same time."""
    schedule = build_schedule("gpipe", stage_ranks=[0, 1, 2], num_microbatches=1).forward_only()
    times = [[4.0], [3.0], [1.0]]
    assert simulate(schedule, times, edges={(0, 2), (1, 2)}).makespan_ms == 5.0
    assert simulate(schedule, times).makespan_ms == 8.0
    with pytest.raises(ScheduleError, match="edge 2 -> 0: edges go from a stage to a later one"):
        simulate(schedule, times, edges={(2, 0)})


def test_forward_only_needs_no_backward_times() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3)
    assert simulate(schedule.forward_only(), np.ones((2, 3))).makespan_ms == 4.0
    with pytest.raises(ScheduleError, match=r"give backward_ms or use forward_only\(\)"):
        simulate(schedule, np.ones((2, 3)))


def test_an_empty_program_takes_no_time() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=1).without({(0, 0), (1, 0)})
    timeline = simulate(schedule, np.ones((2, 1)), np.ones((2, 1)))
    assert (timeline.makespan_ms, timeline.bubble_ratio) == (0.0, 0.0)


def test_a_deadlock_across_ranks_is_refused_with_its_cycle() -> None:
    """Rank 0 wants B of 0 before it sends F of 1; rank 1 wants F of 1 before it computes B of 0."""
    schedule = Schedule.from_grid("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", stage_ranks=[0, 1], num_microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, np.ones((2, 2)), np.ones((2, 2)))
    assert str(caught.value) == (
        "schedule grid would deadlock: rank 0: 0B0 waits for 1B0, which rank 1 runs only after 1F1; "
        "rank 1: 1F1 waits for 0F1, which rank 0 runs only after 0B0"
    )


def test_a_backward_before_its_own_forward_is_refused() -> None:
    schedule = Schedule.from_grid("0B0,0F0", stage_ranks=[0], num_microbatches=1)
    with pytest.raises(ScheduleError, match="rank 0: 0B0 waits for 0F0, which rank 0 runs only after 0B0"):
        execution_order(schedule)


@given(NAMES, STAGE_RANKS, st.integers(1, 6), st.data())
def test_every_valid_schedule_completes_in_the_order_of_its_inputs(name, stage_ranks, microbatches, data) -> None:
    stages = len(stage_ranks)
    pairs = [(stage, microbatch) for stage in range(stages) for microbatch in range(microbatches)]
    absent = data.draw(st.sets(st.sampled_from(pairs)))
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=microbatches).without(absent)
    forward, backward = draw_times(data, stages, microbatches), draw_times(data, stages, microbatches)
    timeline = simulate(schedule, forward, backward)
    end = {
        act: t
        for acts, ends in zip(schedule.ranks, timeline.end_ms, strict=True)
        for act, t in zip(acts, ends, strict=True)
    }
    start = {
        act: t
        for acts, starts in zip(schedule.ranks, timeline.start_ms, strict=True)
        for act, t in zip(acts, starts, strict=True)
    }
    for act in end:
        before = range(act.stage) if act.op == "F" else range(act.stage + 1, stages)
        sources = [Act(act.op, stage, act.microbatch) for stage in before]
        sources += [Act("F", act.stage, act.microbatch)] if act.op == "B" else []
        assert all(start[act] >= end[source] for source in sources if source in end)
    for acts, starts, ends in zip(schedule.ranks, timeline.start_ms, timeline.end_ms, strict=True):
        assert list(starts) == sorted(starts)
        assert all(later >= earlier for earlier, later in zip(ends, starts[1:], strict=False))
        assert len(acts) == len(starts)
    assert timeline.makespan_ms >= max(timeline.busy_ms)


@given(STAGE_RANKS.filter(lambda ranks: len(ranks) > 1), st.integers(1, 4), st.data())
def test_shuffled_programs_complete_or_are_refused_but_never_hang(stage_ranks, microbatches, data) -> None:
    """A program order is runnable exactly when moving ready acts one by one reaches the end."""
    schedule = build_schedule("1f1b", stage_ranks=stage_ranks, num_microbatches=microbatches)
    programs = [data.draw(st.permutations(list(acts))) for acts in schedule.ranks]
    grid = "\n".join(",".join(map(str, acts)) for acts in programs)
    shuffled = Schedule.from_grid(grid, stage_ranks=stage_ranks, num_microbatches=microbatches)
    runnable = runs_to_the_end([list(acts) for acts in programs], len(stage_ranks))
    if runnable:
        assert len(execution_order(shuffled)) == sum(map(len, programs))
    else:
        with pytest.raises(ScheduleError, match="would deadlock: rank"):
            execution_order(shuffled)


def runs_to_the_end(programs: list[list[Act]], stages: int) -> bool:
    """The definition, as slowly as possible."""
    done: set[Act] = set()
    moved = True
    while moved:
        moved = False
        for program in programs:
            if not program:
                continue
            act = program[0]
            needs = {Act("F", act.stage - 1, act.microbatch)} if act.op == "F" and act.stage else set()
            if act.op == "B":
                needs = {Act("F", act.stage, act.microbatch)}
                needs |= {Act("B", act.stage + 1, act.microbatch)} if act.stage + 1 < stages else set()
            if needs <= done:
                done.add(program.pop(0))
                moved = True
    return not any(programs)


@given(NAMES, STAGE_RANKS, st.integers(1, 5), st.integers(1, 4), st.data())
def test_many_replicas_at_once_agree_with_one_at_a_time(name, stage_ranks, microbatches, replicas, data) -> None:
    stages = len(stage_ranks)
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=microbatches)
    forward = np.stack([draw_times(data, stages, microbatches) for _ in range(replicas)])
    backward = np.stack([draw_times(data, stages, microbatches) for _ in range(replicas)])
    flags = st.lists(st.booleans(), min_size=forward.size, max_size=forward.size)
    present = np.array(data.draw(flags), dtype=np.bool_).reshape(forward.shape)
    many = makespans_ns(
        schedule,
        forward.astype(np.int64).transpose(0, 2, 1),
        backward.astype(np.int64).transpose(0, 2, 1),
        present.transpose(0, 2, 1),
    )
    for replica in range(replicas):
        absent = {(int(s), int(m)) for s, m in np.argwhere(~present[replica])}
        one = simulate(schedule.without(absent), forward[replica], backward[replica])
        assert many[replica] == one.makespan_ms


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(bad: float) -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=2)
    times = np.ones((2, 2))
    times[1, 0] = bad
    with pytest.raises(ScheduleError, match=r"forward_ms\[1, 0\]=.* is not a duration"):
        simulate(schedule, times, np.ones((2, 2)))
    # The entry of an act that does not run is not read.
    assert simulate(schedule.without({(1, 0)}), times, np.ones((2, 2))).makespan_ms > 0.0


def test_durations_of_another_shape_are_refused() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3)
    with pytest.raises(
        ScheduleError, match=r"forward_ms has shape \(3, 2\); expected \[stages, micro-batches\] = \(2, 3\)"
    ):
        simulate(schedule, np.ones((3, 2)), np.ones((2, 3)))
