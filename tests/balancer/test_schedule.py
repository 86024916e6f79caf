"""Schedules as data: complete, printable, and refused when they could not mean anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import ScheduleError
from balancer.schedule import Act, Schedule, build_schedule, schedule_names

STAGE_RANKS = st.sampled_from([[0], [0, 0], [0, 1], [0, 1, 2], [0, 0, 1], [0, 1, 1, 2, 3]])
NAMES = st.sampled_from(schedule_names())


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


@pytest.mark.parametrize("name", schedule_names())
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
    assert loaded == schedule


def test_idle_cells_of_a_grid_are_skipped() -> None:
    grid = "0F0,,,0B0\n,1F0,1B0,"
    schedule = Schedule.from_grid(grid, stage_ranks=[0, 1], num_microbatches=1)
    assert texts(schedule) == ["0F0 0B0", "1F0 1B0"]


@pytest.mark.parametrize("text", ["0X0", "F0", "0F", "0F0 0F1", "-1F0"])
def test_what_is_no_act_is_quoted(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an act; acts are stage, F or B, micro-batch, such as 2F0"):
        Act.parse(text)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("0F0,0B0,0F0\n1F0,1B0", "0F0 occurs twice"),
        ("0F0,0B0,1F0\n1B0", "1F0 is on rank 0, but stage 1 lives on rank 1"),
        ("0F0\n1F0,1B0", "0F0 has no 0B0"),
        ("0F0,0B0\n1B0", "1B0 has no 1F0"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0", "0F1 is outside 2 stages x 1 micro-batches"),
        ("0F0,0B0", "1 programs for 2 ranks"),
    ],
)
def test_incomplete_and_misplaced_schedules_are_refused(grid: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule(
            name="grid",
            num_ranks=2,
            num_stages=2,
            num_microbatches=1,
            ranks=tuple(tuple(map(Act.parse, line.split(","))) for line in grid.split("\n")),
            stage_rank=(0, 1),
        )


def test_unknown_names_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(ScheduleError, match="'zb' is not available; available: 1f1b, gpipe"):
        build_schedule("zb", stage_ranks=[0], num_microbatches=1)
    with pytest.raises(ScheduleError, match="num_microbatches=0"):
        build_schedule("1f1b", stage_ranks=[0], num_microbatches=0)


@pytest.mark.parametrize("stage_ranks", [[], [1], [0, 2], [0, 1, 0], [1, 0]])
def test_placements_these_schedules_cannot_run_are_refused(stage_ranks: list[int]) -> None:
    with pytest.raises(ScheduleError, match=r"stages lie on ranks 0, 1, \.\.\. in order"):
        build_schedule("1f1b", stage_ranks=stage_ranks, num_microbatches=2)
