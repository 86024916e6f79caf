"""The simulator: known closed forms, waits that exist and waits that must not, deadlocks named with their cycle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import ScheduleError
from balancer.metrics import bubble_overhead
from balancer.schedule import Act, Schedule, build_schedule
from balancer.simulate import (
    Timeline,
    compiled,
    makespans_ns,
    makespans_of_orders_ns,
    meeting_makespan_ns,
    meeting_makespans_ns,
    peak_live,
    simulate,
)

TWO_OF_ONE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


def per_rank(timeline: Timeline, values: np.ndarray) -> list[list[float]]:
    return [values[timeline.of_rank(rank)].tolist() for rank in range(timeline.schedule.num_ranks)]


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12))
def test_uniform_pipelines_have_the_known_bubble(name: str, stages: int, microbatches: int) -> None:
    schedule = build_schedule(name, stage_ranks=list(range(stages)), num_microbatches=microbatches)
    shape = (stages, microbatches)
    timeline = simulate(schedule, forward_ms=np.full(shape, 2.0), backward_ms=np.full(shape, 4.0))
    assert timeline.makespan_ms == 6.0 * (microbatches + stages - 1)
    assert timeline.bubble_ratio == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert bubble_overhead(timeline.busy_ms, timeline.makespan_ms) == pytest.approx((stages - 1) / microbatches)
    assert timeline.busy_ms.tolist() == [6.0 * microbatches] * stages
    assert timeline.idle_ms.tolist() == [6.0 * (stages - 1)] * stages


def test_a_worked_example() -> None:
    """Stage 1 waits for 0F0 until 3; 0B0 waits for 1B0 until 3 + 1 + 2."""
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=1)
    timeline = simulate(schedule, forward_ms=[[3.0], [1.0]], backward_ms=[[5.0], [2.0]])
    assert list(timeline.acts()) == [
        (0, Act("F", 0, 0), 0.0, 3.0),
        (0, Act("B", 0, 0), 6.0, 11.0),
        (1, Act("F", 1, 0), 3.0, 4.0),
        (1, Act("B", 1, 0), 4.0, 6.0),
    ]
    assert timeline.makespan_ms == 11.0
    assert timeline.bubble_ratio == pytest.approx(0.5)
    # 0F0, 1F0, 1B0, 0B0: all of it is on the critical path.
    assert timeline.critical_path.tolist() == [0, 2, 3, 1]


def test_the_critical_path_goes_through_the_rank_that_holds_up_the_others() -> None:
    schedule = build_schedule("gpipe", stage_ranks=[0, 1], num_microbatches=3).forward_only()
    timeline = simulate(schedule, forward_ms=[[1.0] * 3, [5.0] * 3])
    path = [str(schedule.ranks[0][i]) if i < 3 else str(schedule.ranks[1][i - 3]) for i in timeline.critical_path]
    assert path == ["0F0", "1F0", "1F1", "1F2"]


def test_latency_counts_between_ranks_only() -> None:
    times = {"forward_ms": [[3.0], [1.0]], "backward_ms": [[5.0], [2.0]]}
    across = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=1)
    within = build_schedule("1f1b", stage_ranks=[0, 0], num_microbatches=1)
    assert simulate(across, **times, p2p_ms=0.5).makespan_ms == 12.0
    assert simulate(within, **times, p2p_ms=0.5).makespan_ms == 11.0


def test_a_result_that_was_there_is_not_mistaken_for_one_that_travelled() -> None:
    """Both end at 3 and 2F0 starts one latency later: what it waited for is 1F0, from the other rank."""
    schedule = Schedule.from_grid("0F0,2F0\n1F0", stage_ranks=[0, 1, 0], num_microbatches=1)
    timeline = simulate(schedule, forward_ms=[[3.0], [3.0], [1.0]], p2p_ms=2.0, edges={(0, 2), (1, 2)})
    assert timeline.start_ms.tolist() == [0.0, 5.0, 0.0]
    assert timeline.critical_path.tolist() == [2, 1]


def test_nobody_waits_for_the_encoder_of_a_text_only_microbatch_ps_05() -> None:
    """Micro-batch 0 has the encoder (10 ms), micro-batch 1 is text: run first, its LLM starts at 0."""
    grid = "0F0,0B0\n1F1,1B1,1F0,1B0"
    schedule = Schedule.from_grid(grid, stage_ranks=[0, 1], num_microbatches=2)
    timeline = simulate(schedule, forward_ms=[[10.0, 99.0], [1.0, 1.0]], backward_ms=[[1.0, 99.0], [1.0, 1.0]])
    assert per_rank(timeline, timeline.start_ms)[1] == [0.0, 1.0, 10.0, 11.0]
    assert timeline.makespan_ms == 13.0


def test_an_absent_stage_in_the_middle_passes_the_wait_on() -> None:
    schedule = build_schedule("gpipe", stage_ranks=[0, 1, 2], num_microbatches=1).without({(1, 0)})
    timeline = simulate(schedule, forward_ms=[[4.0], [50.0], [1.0]], backward_ms=[[1.0], [50.0], [2.0]], p2p_ms=0.5)
    assert per_rank(timeline, timeline.start_ms)[2] == [4.5, 5.5]
    assert per_rank(timeline, timeline.start_ms)[0] == [0.0, 8.0]


def test_an_absent_stage_of_another_rank_costs_no_latency_either() -> None:
    """Stages 0 and 2 on rank 0, 1 on rank 1: without 1 nothing travels."""
    schedule = Schedule.from_grid("0F0,2F0,2B0,0B0\n1F0,1B0", stage_ranks=[0, 1, 0])
    times = np.array([[[4, 50, 1]]])
    present = np.array([[[True, False, True]]])
    assert makespans_ns(schedule, times, 2 * times, present, p2p_ns=7).tolist() == [15]
    assert makespans_ns(schedule, times, 2 * times, p2p_ns=7).tolist() == [4 + 7 + 50 + 7 + 3 + 7 + 100 + 7 + 8]


def test_split_backward_lets_the_gradient_of_the_input_go_first() -> None:
    """1I0 (1 ms of 3) ends at 3: 0B0 need not wait for 1W0."""
    schedule = Schedule.from_grid("0F0,0B0\n1F0,1I0,1W0", stage_ranks=[0, 1], num_microbatches=1)
    times = {"forward_ms": [[1.0], [1.0]], "backward_ms": [[4.0], [3.0]]}
    timeline = simulate(schedule, **times, weight_ms=[[0.0], [2.0]])
    assert per_rank(timeline, timeline.start_ms) == [[0.0, 3.0], [1.0, 2.0, 3.0]]
    assert simulate(schedule, **times).makespan_ms == 1.0 + 1.0 + 1.5 + 4.0


def test_a_frozen_encoder_that_runs_ahead_lowers_the_makespan_ps_11() -> None:
    """Forward only; its look-ahead is what the program says."""
    in_step = Schedule.from_grid("0F0,0F1\n1F0,1B0,1F1,1B1", stage_ranks=[0, 1], frozen_stages=[0])
    late = Schedule.from_grid("0F0,1F0,1B0,0F1,1F1,1B1", stage_ranks=[0, 0], frozen_stages=[0])
    times = {"forward_ms": [[2.0, 2.0], [1.0, 1.0]], "backward_ms": [[99.0, 99.0], [1.0, 1.0]]}
    assert simulate(in_step, **times).makespan_ms == 6.0
    assert simulate(late, **times).makespan_ms == 8.0


def test_edges_may_skip_the_chain() -> None:
    """Two encoders side by side feed stage 2; without the edge 0 -> 1 they run at the same time."""
    schedule = build_schedule("gpipe", stage_ranks=[0, 1, 2], num_microbatches=1).forward_only()
    times = [[4.0], [3.0], [1.0]]
    assert simulate(schedule, forward_ms=times, edges={(0, 2), (1, 2)}).makespan_ms == 5.0
    assert simulate(schedule, forward_ms=times).makespan_ms == 8.0
    with pytest.raises(ScheduleError, match="edge 2 -> 0: edges go from a stage to a later one"):
        simulate(schedule, forward_ms=times, edges={(2, 0)})


def test_edges_pass_through_absent_stages_and_hold_for_backwards_too() -> None:
    """0 and 1 feed 2, 2 feeds 3; 2 is absent: 3 waits for both, and both wait for 3."""
    schedule = build_schedule("gpipe", stage_ranks=[0, 1, 2, 3], num_microbatches=1)
    times = {"forward_ms": [[4.0], [3.0], [9.0], [1.0]], "backward_ms": [[1.0], [2.0], [9.0], [5.0]]}
    timeline = simulate(schedule.without({(2, 0)}), **times, edges={(0, 2), (1, 2), (2, 3)}, p2p_ms=0.5)
    assert per_rank(timeline, timeline.start_ms) == [[0.0, 11.0], [0.0, 11.0], [], [4.5, 5.5]]
    halves = simulate(schedule.split_backward(), **times, edges={(0, 1), (1, 2), (2, 3)})
    chain = simulate(schedule.split_backward(), **times)
    assert halves.start_ms.tolist() == chain.start_ms.tolist()


def test_forward_only_needs_no_backward_times() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3)
    assert simulate(schedule.forward_only(), forward_ms=np.ones((2, 3))).makespan_ms == 4.0
    with pytest.raises(ScheduleError, match=r"give backward_ms or use forward_only\(\)"):
        simulate(schedule, forward_ms=np.ones((2, 3)))


def test_an_empty_program_takes_no_time() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=1).without({(0, 0), (1, 0)})
    timeline = simulate(schedule, forward_ms=np.ones((2, 1)), backward_ms=np.ones((2, 1)))
    assert (timeline.makespan_ms, timeline.bubble_ratio) == (0.0, 0.0)
    assert timeline.critical_path.tolist() == []
    assert timeline.peak_activations.tolist() == [0, 0]


def test_a_deadlock_across_ranks_is_refused_with_its_cycle() -> None:
    """Rank 0 wants B of 0 before it sends F of 1; rank 1 wants F of 1 before it computes B of 0."""
    schedule = Schedule.from_grid("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", stage_ranks=[0, 1], num_microbatches=2)
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, forward_ms=np.ones((2, 2)), backward_ms=np.ones((2, 2)))
    assert str(caught.value) == (
        "schedule grid would deadlock: rank 0: 0B0 waits for 1B0, which rank 1 runs only after 1F1; "
        "rank 1: 1F1 waits for 0F1, which rank 0 runs only after 0B0"
    )


def test_a_backward_before_its_own_forward_is_refused() -> None:
    schedule = Schedule.from_grid("0B0,0F0", stage_ranks=[0], num_microbatches=1)
    with pytest.raises(ScheduleError, match="rank 0: 0B0 waits for 0F0, which rank 0 runs only after 0B0"):
        compiled(schedule)


def test_a_schedule_is_compiled_once() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3)
    assert compiled(schedule) is compiled(schedule)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_refused(bad: float) -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=2)
    times = np.ones((2, 2))
    times[1, 0] = bad
    with pytest.raises(ScheduleError, match=r"forward_ms\[1, 0\]=.* is not a duration"):
        simulate(schedule, forward_ms=times, backward_ms=np.ones((2, 2)))
    with pytest.raises(ScheduleError, match=r"backward_ms\[1, 0\]=.* is not a duration"):
        simulate(schedule, forward_ms=np.ones((2, 2)), backward_ms=times)
    with pytest.raises(ScheduleError, match=r"p2p_ms=.* is not a duration"):
        simulate(schedule, forward_ms=np.ones((2, 2)), backward_ms=np.ones((2, 2)), p2p_ms=bad)
    # The entry of an act that does not run is not read.
    present = schedule.without({(1, 0)})
    assert simulate(present, forward_ms=times, backward_ms=np.ones((2, 2))).makespan_ms > 0.0


def test_more_weight_gradient_than_backward_is_refused() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0], num_microbatches=1).split_backward()
    with pytest.raises(ScheduleError, match=r"backward_ms\[0, 0\]=1.0 is not a duration with weight_ms=2.0 taken"):
        simulate(schedule, forward_ms=[[1.0]], backward_ms=[[1.0]], weight_ms=[[2.0]])


def test_durations_of_another_shape_are_refused() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3)
    with pytest.raises(
        ScheduleError, match=r"forward_ms has shape \(3, 2\); expected \[stages, micro-batches\] = \(2, 3\)"
    ):
        simulate(schedule, forward_ms=np.ones((3, 2)), backward_ms=np.ones((2, 3)))
    times = np.ones((4, 3, 2), dtype=np.int64)
    with pytest.raises(
        ScheduleError, match=r"backward_ns has shape \(4, 2, 3\); expected \[replicas, micro-batches, stages\]"
    ):
        makespans_ns(schedule, times, times.transpose(0, 2, 1), times > 0)
    with pytest.raises(ScheduleError, match=r"weights has shape \(3, 2\)"):
        peak_live(schedule, weights=np.ones((3, 2)))


def test_orders_that_are_no_orders_are_refused() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3)
    times = np.ones((1, 3, 2), dtype=np.int64)
    with pytest.raises(ScheduleError, match=r"orders names micro-batches outside 0\.\.2"):
        makespans_of_orders_ns(schedule, times, times, None, np.array([[[0, 1, 3]]]))


def test_no_replicas_have_no_makespans() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3)
    assert makespans_ns(schedule, *[np.zeros((0, 3, 2), dtype=np.int64)] * 2).shape == (0,)


def test_items_are_routed_only_where_units_exist() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=2)
    with pytest.raises(ScheduleError, match="encoder is spread over the ranks"):
        compiled(schedule, routed=True)


def test_an_exchange_ends_for_all_ranks_of_the_unit_with_its_last_part() -> None:
    """Encoder shares take 1 and 4 ms: without an exchange micro-batch 0 enters at 1, with it both enter at 4."""
    grid = "0F0,1F0,1F1,1B0,1B1,0B0\n0F1,0B1"
    schedule = Schedule.from_grid(grid, stage_ranks=[-1, 0], num_microbatches=2)
    times = {"forward_ms": [[1.0, 4.0], [2.0, 2.0]], "backward_ms": [[1.0, 4.0], [3.0, 3.0]]}
    apart, together = simulate(schedule, **times), simulate(schedule, **times, routed=True)
    assert per_rank(apart, apart.start_ms) == [[0.0, 1.0, 4.0, 6.0, 9.0, 12.0], [0.0, 12.0]]
    assert per_rank(together, together.start_ms) == [[0.0, 4.0, 6.0, 8.0, 11.0, 14.0], [0.0, 14.0]]
    late = simulate(schedule, **times, routed=True, p2p_ms=0.5)
    assert per_rank(late, late.start_ms) == [[0.0, 4.5, 6.5, 8.5, 11.5, 15.0], [0.0, 15.0]]
    times["backward_ms"][0] = [9.0, 4.0]  # now rank 0 ends last, by what came back to it
    late = simulate(schedule, **times, routed=True, p2p_ms=0.5)
    assert late.critical_path.tolist() == [6, 1, 2, 3, 4, 5]


def test_where_replicas_meet_decides_what_the_step_takes() -> None:
    """One rank, two micro-batches; replica 0 has its long encoder first, replica 1 last."""
    schedule = build_schedule("1f1b", stage_ranks=[0, 0], num_microbatches=2)
    # [R, M, S]
    forward = np.array([[[5, 1], [1, 2]], [[1, 1], [5, 1]]], dtype=np.int64)
    backward = np.zeros_like(forward)
    found = [meeting_makespan_ns(schedule, forward, backward, None, meet) for meet in ("step", "unit", "microbatch")]
    assert found == [9, 13, 13]
    forward[1, :, 1] = [3, 0]  # LLM stages no longer agree: lockstep waits for each, a unit only at the encoder
    found = [meeting_makespan_ns(schedule, forward, backward, None, meet) for meet in ("step", "unit", "microbatch")]
    assert found == [9, 13, 15]
    several = meeting_makespans_ns(schedule, np.stack([forward] * 3), np.stack([backward] * 3), None, "unit")
    assert several.tolist() == [13] * 3
    with pytest.raises(ScheduleError, match="meet='often' is not known; known: step, microbatch, unit"):
        meeting_makespan_ns(schedule, forward, backward, None, "often")


def test_an_absent_act_holds_up_nobody_in_lockstep() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 0], num_microbatches=1)
    forward = np.array([[[1, 1]], [[1000, 1]]], dtype=np.int64)
    present = np.array([[[True, True]], [[False, True]]])
    assert meeting_makespan_ns(schedule, forward, 0 * forward, present, "microbatch") == 2


def test_activations_are_held_until_b_or_until_w() -> None:
    whole = Schedule.from_grid(TWO_OF_ONE, stage_ranks=[0, 1], num_microbatches=2)
    assert peak_live(whole).tolist() == [2, 1]
    delayed = Schedule.from_grid("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1", stage_ranks=[0, 1])
    assert peak_live(delayed).tolist() == [2, 2]
    assert peak_live(whole, weights=[[10, 20], [3, 4]]).tolist() == [30, 4]
    assert peak_live(whole, stages=[1]).tolist() == [0, 1]
    assert peak_live(whole, weights=np.array([[0.5, 0.25], [1.0, 2.0]])).tolist() == [0.75, 2.0]
    assert peak_live(whole.forward_only()).tolist() == [1, 1]
