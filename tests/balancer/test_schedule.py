"""Schedules as data: complete, printable, and refused when they could not mean anything."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import ScheduleError
from balancer.schedule import Act, Schedule, build_schedule

STAGE_RANKS = st.sampled_from([[0], [0, 0], [0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 1, 2, 3]])
# Schedules that put one group of stages on every rank and run whole backwards; the others: tests/balancer/schedules.
ONE_CHUNK = ["1f1b", "gpipe"]
NAMES = st.sampled_from(ONE_CHUNK)


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, acts)) for acts in schedule.ranks]


@given(NAMES, STAGE_RANKS, st.integers(1, 9))
def test_every_stage_runs_every_microbatch_once_per_op_on_its_own_rank(name, stage_ranks, num_microbatches) -> None:
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    acts = [act for program in schedule.ranks for act in program]
    everything = {
        Act(op, stage, microbatch)
        for op in "FB"
        for stage in range(len(stage_ranks))
        for microbatch in range(num_microbatches)
    }
    assert len(acts) == len(everything)
    assert set(acts) == everything
    assert all(stage_ranks[act.stage] == rank for rank, program in enumerate(schedule.ranks) for act in program)


def test_1f1b_of_three_stages_is_the_one_in_the_module_text() -> None:
    assert texts(build_schedule("1f1b", stage_ranks=[0, 1, 2], num_microbatches=4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_gpipe_runs_all_forwards_first() -> None:
    assert texts(build_schedule("gpipe", stage_ranks=[0, 1], num_microbatches=2)) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
    ]


@pytest.mark.parametrize("name", ONE_CHUNK)
def test_stages_on_one_rank_finish_a_microbatch_before_the_next(name: str) -> None:
    schedule = build_schedule(name, stage_ranks=[0, 0], num_microbatches=2)
    assert texts(schedule) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]


@given(STAGE_RANKS, st.integers(1, 9))
def test_1f1b_never_holds_more_activations_than_ranks_behind_it(stage_ranks, num_microbatches) -> None:
    schedule = build_schedule("1f1b", stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    for rank, program in enumerate(schedule.ranks):
        for stage in {act.stage for act in program}:
            live = peak = 0
            for act in program:
                live += (act.stage == stage) * (1 if act.op == "F" else -1)
                peak = max(peak, live)
            assert peak == min(schedule.num_ranks - rank, num_microbatches)


@given(NAMES, STAGE_RANKS, st.integers(1, 6), st.data())
def test_without_removes_exactly_the_absent_pairs_and_keeps_the_order(
    name, stage_ranks, num_microbatches, data
) -> None:
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    pairs = [(stage, microbatch) for stage in range(len(stage_ranks)) for microbatch in range(num_microbatches)]
    absent = data.draw(st.sets(st.sampled_from(pairs)))
    expected = tuple(
        tuple(act for act in program if (act.stage, act.microbatch) not in absent) for program in schedule.ranks
    )
    assert schedule.without(absent).ranks == expected


def test_forward_only_keeps_the_forwards() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=3).forward_only()
    assert texts(schedule) == ["0F0 0F1 0F2", "1F0 1F1 1F2"]


@given(NAMES, STAGE_RANKS, st.integers(1, 6))
def test_a_printed_grid_loads_back_to_the_same_schedule(name, stage_ranks, num_microbatches) -> None:
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches).without({(0, 0)})
    loaded = Schedule.from_grid(
        schedule.to_grid(), stage_ranks=stage_ranks, num_microbatches=num_microbatches, name=name
    )
    assert loaded.ranks == schedule.ranks
    assert loaded.stage_rank == schedule.stage_rank == tuple(stage_ranks)


def test_idle_cells_of_a_grid_are_skipped() -> None:
    grid = "0F0,,,0B0\n,1F0,1B0,"
    schedule = Schedule.from_grid(grid, stage_ranks=[0, 1], num_microbatches=1)
    assert texts(schedule) == ["0F0 0B0", "1F0 1B0"]


@pytest.mark.parametrize("text", ["0X0", "F0", "0F", "0F0 0F1", "-1F0", "0f0"])
def test_what_is_no_act_is_quoted(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an act; acts are stage, F, B, I or W, micro-batch, such as 2F0"):
        Act.parse(text)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("0F0,0B0,0F0\n1F0,1B0", "0F0 occurs twice"),
        ("0F0,0B0,1F0\n1B0", "1F0 is on rank 0, but stage 1 lives on rank 1"),
        ("0F0\n1F0,1B0", "0F0 has no 0B0"),
        ("0F0,0B0\n1B0", "1B0 has no 1F0"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0", "0F1 is outside 2 stages x 1 micro-batches"),
        ("0F0,0B0\n1F0,1B0,2F0", "2F0 is outside 2 stages x 1 micro-batches"),
        ("0F0,0I0\n1F0,1B0", "0I0 has no 0W0"),
        ("0F0,0W0\n1F0,1B0", "0W0 has no 0I0"),
        ("0I0,0W0\n1F0,1B0", "0B0 has no 0F0"),
        ("0F0,0B0\n1F0,1B0,1I0,1W0", r"1B0 comes whole and in halves \(I, W\)"),
        ("0F0,0B0\n1F0,1B0,1W0", "1B0 comes whole and in halves"),
    ],
)
def test_incomplete_and_misplaced_schedules_are_refused(grid: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"schedule grid: {message}"):
        Schedule.from_grid(grid, stage_ranks=[0, 1], num_microbatches=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rank_offsets": [0, 2]}, "1 programs for 2 ranks"),
        ({"place": [[0], [1], [1]]}, r"places of shape \[3, 1\] for \[2, 1\] stages and micro-batches"),
        ({"stage": [0, 0, 1]}, "4 ops, 3 stages and 4 micro-batches for rank_offsets"),
        ({"rank_offsets": [0, 5, 4]}, r"rank_offsets \[0, 5, 4\]"),
        ({"op": [0, 1, 0, 4]}, "an op is a code of FBIW, 0 to 3"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(changed: dict[str, list[int]], message: str) -> None:
    whole = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=1)
    with pytest.raises(ScheduleError, match=message):
        replace(whole, **{name: np.array(value) for name, value in changed.items()})


def test_unknown_names_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(ScheduleError, match="'zb' is not available; available: 1f1b, gpipe, interleaved1f1b, nested"):
        build_schedule("zb", stage_ranks=[0], num_microbatches=1)
    with pytest.raises(ScheduleError, match="num_microbatches=0"):
        build_schedule("1f1b", stage_ranks=[0], num_microbatches=0)
    with pytest.raises(ScheduleError, match="stages of stage_ranks=0"):
        build_schedule("1f1b", stage_ranks=[], num_microbatches=1)


@pytest.mark.parametrize("stage_ranks", [[1], [0, 2], [0, 1, 0], [1, 0]])
def test_placements_these_schedules_cannot_run_are_refused(stage_ranks: list[int]) -> None:
    with pytest.raises(ScheduleError, match=r"stages lie on ranks 0, 1, \.\.\. in order"):
        build_schedule("1f1b", stage_ranks=stage_ranks, num_microbatches=2)


def test_arrays_and_acts_are_the_same_thing_twice() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1, 2], num_microbatches=4)
    assert schedule.op.tolist()[:8] == [0, 0, 0, 1, 0, 1, 1, 1]
    assert schedule.microbatch.tolist()[:8] == [0, 1, 2, 0, 3, 1, 2, 3]
    assert schedule.stage.tolist() == schedule.act_rank.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert schedule.rank_offsets.tolist() == [0, 8, 16, 24]
    assert schedule.place.tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert schedule.has_backward
    assert not schedule.forward_only().has_backward
    assert Schedule.from_acts(schedule.ranks).ranks == schedule.ranks


def test_the_largest_pipelines_have_a_schedule_of_131072_acts() -> None:
    schedule = build_schedule("1f1b", stage_ranks=range(1024), num_microbatches=64)
    assert len(schedule.op) == 131_072
    assert np.diff(schedule.rank_offsets).tolist() == [128] * 1024
    assert schedule.to_grid().startswith("0F0,0F1,")


def test_a_split_backward_is_its_halves_in_its_place() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=2).split_backward()
    assert texts(schedule) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"]
    assert schedule.split_backward().ranks == schedule.ranks


def test_a_spread_stage_lives_where_its_lines_are_and_has_no_rank_of_its_own() -> None:
    schedule = Schedule.from_grid("0F0,1F0,1F1\n0F1")
    assert schedule.place.tolist() == [[0, 1], [0, 0]]
    assert schedule.unit_size == 2
    with pytest.raises(ScheduleError, match=r"stage 0 is spread over the ranks; ask rank_of\(stage, microbatch\)"):
        schedule.stage_rank  # noqa: B018
    with pytest.raises(ScheduleError, match="0F0 is on rank 1, but stage 0 lives on rank 0"):
        Schedule.from_grid("0F0,1F0\n0F0,0F1", stage_ranks=[-1, 0])


def test_a_frozen_stage_has_no_backward_and_only_the_head_of_the_chain_can_be_frozen() -> None:
    frozen = Schedule.from_grid("0F0\n1F0,1B0", frozen_stages=[0])
    assert frozen.without({(0, 0)}).frozen_stages == (0,)
    with pytest.raises(ScheduleError, match="0B0 belongs to a frozen stage"):
        Schedule.from_grid("0F0,0B0\n1F0,1B0", frozen_stages=[0])
    with pytest.raises(ScheduleError, match=r"frozen_stages=\[1\]; only stages at the head of the chain"):
        Schedule.from_grid("0F0,0B0\n1F0", frozen_stages=[1])
