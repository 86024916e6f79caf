"""What every registered schedule keeps, for any ranks, chunks, micro-batches and stages per rank."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import ScheduleError
from balancer.schedule import Act, Schedule, build_schedule, canonical_name, schedule_names

WITH_CHUNKS = ("interleaved1f1b", "nested", "phased")


@dataclass(frozen=True)
class Case:
    name: str
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    frozen: tuple[int, ...] = ()

    def build(self) -> Schedule:
        return build_schedule(
            self.name,
            stage_ranks=self.stage_ranks,
            num_microbatches=self.num_microbatches,
            frozen_stages=self.frozen,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(schedule_names()))
    num_ranks = draw(st.integers(1, 6))
    num_chunks = draw(st.integers(1, 4)) if name in WITH_CHUNKS else 1
    stage_ranks: list[int] = []
    for chunk in range(num_chunks * num_ranks):
        stage_ranks += [chunk % num_ranks] * draw(st.integers(1, 2))
    if name in ("nested", "phased"):
        encoder, generator = draw(st.sampled_from([(1, 0), (0, 1), (1, 1)]))
        stage_ranks = [-1] * encoder + stage_ranks + [-1] * generator
    elif name == "interleaved1f1b" and draw(st.booleans()):  # an encoder on a rank of its own
        stage_ranks = [0] + [rank + 1 for rank in stage_ranks]
    frozen = tuple(range(draw(st.integers(0, 2)))) if len(stage_ranks) > 2 else ()
    return Case(name, tuple(stage_ranks), draw(st.integers(1, 20)), frozen)


@given(cases())
def test_every_stage_runs_every_microbatch_once_per_op_where_it_lives(case: Case) -> None:
    schedule = case.build()
    acts = [act for program in schedule.ranks for act in program]
    backward = ("I", "W") if case.name == "zb-h1" else ("B",)
    expected = {
        Act(op, stage, microbatch)
        for stage in range(len(case.stage_ranks))
        for op in ("F", *(() if stage in case.frozen else backward))
        for microbatch in range(case.num_microbatches)
    }
    assert len(acts) == len(expected)
    assert set(acts) == expected
    for rank, program in enumerate(schedule.ranks):
        for act in program:
            home = case.stage_ranks[act.stage]
            assert rank == (act.microbatch % schedule.num_ranks if home < 0 else home)
            assert schedule.rank_of(act.stage, act.microbatch) == rank


@given(cases())
def test_nobody_waits_for_ever(blocked, case: Case) -> None:
    assert blocked(case.build()) == []


@given(cases(), st.data())
def test_nobody_waits_for_what_is_absent(blocked, case: Case, data) -> None:
    pairs = st.tuples(st.integers(0, len(case.stage_ranks) - 1), st.integers(0, case.num_microbatches - 1))
    schedule = case.build().without(data.draw(st.sets(pairs, max_size=30)))
    assert blocked(schedule) == []
    assert blocked(schedule.forward_only()) == []


@given(cases())
def test_a_printed_grid_loads_back_to_the_same_acts_and_places(case: Case) -> None:
    schedule = case.build()
    for loaded in (
        Schedule.from_grid(schedule.to_grid(), frozen_stages=case.frozen),
        Schedule.from_grid(
            schedule.to_grid(),
            stage_ranks=case.stage_ranks,
            num_microbatches=case.num_microbatches,
            frozen_stages=case.frozen,
        ),
    ):
        for field in ("op", "stage", "microbatch", "rank_offsets", "place"):
            assert np.array_equal(getattr(loaded, field), getattr(schedule, field)), field
        assert loaded.ranks == schedule.ranks


@given(cases())
def test_stages_of_one_chunk_run_together(case: Case) -> None:
    schedule = case.build()
    neighbours = {
        (stage, stage + 1)
        for stage, (here, there) in enumerate(zip(case.stage_ranks, case.stage_ranks[1:], strict=False))
        if here == there >= 0
    }
    for program in schedule.ranks:
        position = {act: index for index, act in enumerate(program)}
        for low, high in neighbours:
            for microbatch in range(case.num_microbatches):
                first, second = Act("F", low, microbatch), Act("F", high, microbatch)
                if first in position:
                    assert position[second] == position[first] + 1


@given(cases())
def test_each_op_visits_microbatches_of_a_stage_in_ascending_order(case: Case) -> None:
    """Channels are first in, first out: what one rank sends in order, the next one wants in order."""
    for program in case.build().ranks:
        for op in "FBIW":
            for stage in range(len(case.stage_ranks)):
                own = [act.microbatch for act in program if act.op == op and act.stage == stage]
                assert own == sorted(own)


@given(cases())
def test_a_frozen_head_has_no_backward_and_costs_nothing_else(case: Case) -> None:
    frozen, whole = (
        case.build(),
        build_schedule(case.name, stage_ranks=case.stage_ranks, num_microbatches=case.num_microbatches),
    )
    kept = [[act for act in program if act.op == "F" or act.stage not in case.frozen] for program in whole.ranks]
    assert [list(program) for program in frozen.ranks] == kept


def test_equal_requests_give_the_same_object_and_its_arrays_cannot_be_changed() -> None:
    first = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=4)
    assert build_schedule("1F1B", stage_ranks=(0, 1), num_microbatches=4) is first
    for array in (first.op, first.stage, first.microbatch, first.rank_offsets, first.place, first.act_rank):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved1f1b"),
        ("ZB-H1", "zb-h1"),
        ("zb_h1", "zb-h1"),
        ("ZBH1", "zb-h1"),
        ("Nested", "nested"),
    ],
)
def test_names_are_found_in_any_case_and_in_torchs_spelling(spelled: str, name: str) -> None:
    assert canonical_name(spelled) == name
    assert build_schedule(spelled, num_ranks=2, num_microbatches=2).name == name


@pytest.mark.parametrize(
    ("name", "num_stages", "stage_ranks"),
    [
        ("1f1b", None, (0, 1, 2)),
        ("gpipe", 6, (0, 0, 1, 1, 2, 2)),
        ("zb-h1", 4, (0, 0, 1, 2)),
        ("interleaved1f1b", 6, (0, 1, 2, 0, 1, 2)),
        ("nested", None, (-1, 0, 1, 2)),
        ("phased", 7, (-1, 0, 1, 2, 0, 1, 2)),
    ],
)
def test_numbers_alone_place_the_stages_as_the_schedule_likes_them(name, num_stages, stage_ranks) -> None:
    by_number = build_schedule(name, num_ranks=3, num_stages=num_stages, num_microbatches=4)
    assert by_number is build_schedule(name, stage_ranks=stage_ranks, num_microbatches=4)


def test_a_layout_can_stand_for_the_places() -> None:
    class Places:
        num_ranks = 2
        stage_ranks = (-1, 0, 1)

    assert build_schedule("nested", parallel=Places(), num_microbatches=3) is build_schedule(
        "nested", stage_ranks=[-1, 0, 1], num_microbatches=3, unit_size=2
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("1f1b", {"stage_ranks": [-1, 0, 1]}, r"spread over all ranks \(-1\) needs the schedule phased or nested"),
        ("interleaved1f1b", {"stage_ranks": [-1, 0, 1]}, "needs the schedule phased or nested"),
        ("zb-h1", {"stage_ranks": [0, 1, 0, 1]}, "stages that return to an earlier rank need interleaved1f1b"),
        ("interleaved1f1b", {"stage_ranks": [0, 1, 0]}, "every rank taking the same number"),
        ("interleaved1f1b", {"stage_ranks": [1, 0, 1, 0]}, "chunks go round the ranks in order"),
        ("nested", {"stage_ranks": [0, -1, 1]}, "spread stages .* are the first one, the encoder, and the last one"),
        ("nested", {"stage_ranks": [-1, -1, 0, 1]}, "spread stages .* are the first one"),
        ("phased", {"stage_ranks": [-1, 1, 0]}, "it starts on rank 0 and goes round all ranks"),
        ("nested", {"stage_ranks": [-1, 0, 1, 2, 1, 2]}, "goes round all ranks"),
        ("nested", {"stage_ranks": [-1, 0, 1, 2, 0, 1]}, "every rank taking the same number"),
        ("nested", {"stage_ranks": [-1]}, "stages lie on ranks 0, 1"),
        ("nested", {"stage_ranks": [-1, 0, 1], "unit_size": 3}, "a unit is one micro-batch per pipeline rank, 2 here"),
        ("nested", {"stage_ranks": [-1, 0, 1], "num_units_ahead": 0}, "num_units_ahead=0"),
        ("nested", {"stage_ranks": [-1, 0, 1], "clock": ([1, 1], [2, 2])}, "clock: forward is .* per stage, 3"),
        ("nested", {"stage_ranks": [-1, 0, 1], "clock": ([1, 1, 1], [2, 2, -2])}, "clock: backward"),
        ("1f1b", {"stage_ranks": [0, 1], "num_ranks": 3}, "num_ranks=3: stages lie on ranks"),
        ("1f1b", {"stage_ranks": [0, 1], "num_stages": 3}, "num_stages=3, but stage_ranks"),
        ("1f1b", {"num_ranks": 3, "num_stages": 2}, "3 ranks need 3 stages or more"),
        ("1f1b", {}, "give stage_ranks, parallel, or num_ranks"),
        ("1f1b", {"stage_ranks": [0, 1], "frozen_stages": [1]}, "only stages at the head of the chain"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused_with_a_remedy(name, arguments, message) -> None:
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, num_microbatches=4, **arguments)
