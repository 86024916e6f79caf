"""Nested and phased: what bigmac.md derives about time, memory, order and deadlocks, checked by the simulator."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import ScheduleError
from balancer.schedule import Act, Schedule, build_schedule
from balancer.simulate import peak_live, simulate

ENCODER, GENERATOR, LLM = (5.0, 11.0), (3.0, 4.0), (3.0, 6.0)
SHAPES = list(itertools.product([2, 3, 4, 8, 16], [1, 2, 4]))
EVERY_SHAPE = pytest.mark.parametrize(("num_ranks", "num_chunks"), SHAPES)
GENERATORS = pytest.mark.parametrize("generator", [False, True], ids=["no generator", "generator"])


def build(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    generator: bool = False,
    **options: object,
) -> Schedule:
    stage_ranks = [-1] + list(range(num_ranks)) * num_chunks + [-1] * generator
    return build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches, **options)


def nested(*shape: int, **options: object) -> Schedule:
    return build("nested", *shape, **options)


def durations(schedule: Schedule, generator: bool, llm: tuple[float, float] = LLM) -> dict[str, np.ndarray]:
    """The same for all micro-batches: the first stage is the encoder, the last one may be the generator."""
    times = {}
    for index, op in enumerate(("forward_ms", "backward_ms")):
        times[op] = np.full((schedule.num_stages, schedule.num_microbatches), llm[index])
        times[op][0] = ENCODER[index]
        if generator:
            times[op][-1] = GENERATOR[index]
    return times


def makespan(schedule: Schedule, generator: bool, llm: tuple[float, float] = LLM) -> float:
    return simulate(schedule, **durations(schedule, generator, llm)).makespan_ms


def ideal(num_ranks: int, num_chunks: int, num_microbatches: int, generator: bool, llm=LLM) -> float:
    """Time with unlimited memory: the LLM with its own bubble, and all spread work in equal shares."""
    spread = sum(ENCODER) + sum(GENERATOR) * generator
    return (num_microbatches * num_chunks + num_ranks - 1) * sum(llm) + num_microbatches // num_ranks * spread


def unit_acts(schedule: Schedule, rank: int) -> list[str]:
    """The encoder's acts of one rank as F and B of units."""
    return [f"{act.op}{act.microbatch // schedule.num_ranks}" for act in schedule.ranks[rank] if act.stage == 0]


def test_two_ranks_and_five_units_are_nested_like_this() -> None:
    assert nested(2, 1, 10).to_grid().split("\n") == [
        "0F0,0F2,0F4,1F0,1F1,1B0,1F2,1B1,0B0,0F6,1F3,1B2,1F4,1B3,0B2,0F8,1F5,1B4,1F6,1B5,0B4,1F7,1B6,1F8,1B7,0B6,"
        "1F9,1B8,1B9,0B8",
        "0F1,0F3,0F5,2F0,2B0,2F1,2B1,2F2,2B2,0B1,0F7,2F3,2B3,2F4,2B4,0B3,0F9,2F5,2B5,2F6,2B6,0B5,2F7,2B7,2F8,2B8,"
        "0B7,2F9,2B9,0B9",
    ]


@EVERY_SHAPE
@GENERATORS
@pytest.mark.parametrize("num_units", [1, 2, 3, 7])
def test_a_step_takes_as_long_as_with_unlimited_memory(num_ranks, num_chunks, generator, num_units) -> None:
    num_microbatches = num_units * num_ranks
    schedule = nested(num_ranks, num_chunks, num_microbatches, generator=generator)
    assert makespan(schedule, generator) == ideal(num_ranks, num_chunks, num_microbatches, generator)


@EVERY_SHAPE
@GENERATORS
@pytest.mark.parametrize("llm", [(1.0, 1.0), (2.0, 6.0), (5.0, 7.0)])
def test_so_it_does_for_other_ratios_on_a_clock_of_their_own(num_ranks, num_chunks, generator, llm) -> None:
    num_stages, num_microbatches = 1 + num_ranks * num_chunks + generator, 4 * num_ranks
    clock = ([int(llm[0])] * num_stages, [int(llm[1])] * num_stages)
    schedule = nested(num_ranks, num_chunks, num_microbatches, generator=generator, clock=clock)
    assert makespan(schedule, generator, llm) == ideal(num_ranks, num_chunks, num_microbatches, generator, llm)


@EVERY_SHAPE
@GENERATORS
def test_phased_takes_as_long_and_holds_all_encoder_microbatches(num_ranks, num_chunks, generator) -> None:
    num_microbatches = 5 * num_ranks
    schedule = build("phased", num_ranks, num_chunks, num_microbatches, generator=generator)
    assert makespan(schedule, generator) == ideal(num_ranks, num_chunks, num_microbatches, generator)
    assert peak_live(schedule, stages=[0]).tolist() == [5] * num_ranks
    assert unit_acts(schedule, 0) == [f"{op}{unit}" for op in "FB" for unit in range(5)]


@EVERY_SHAPE
@GENERATORS
@pytest.mark.parametrize("num_units", [1, 2, 3, 4, 12])
def test_memory_is_three_encoder_units_and_the_llms_own_whatever_the_number_of_units(
    num_ranks, num_chunks, generator, num_units
) -> None:
    num_microbatches = num_units * num_ranks
    schedule = nested(num_ranks, num_chunks, num_microbatches, generator=generator)
    llm = range(1, 1 + num_ranks * num_chunks)
    assert peak_live(schedule, stages=[0]).tolist() == [min(3, num_units)] * num_ranks
    if generator:
        assert peak_live(schedule, stages=[llm.stop]).tolist() == [1] * num_ranks
    alone = [
        num_ranks - rank if num_chunks == 1 else 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks + 1
        for rank in range(num_ranks)
    ]
    assert peak_live(schedule, stages=llm).tolist() == [
        min(chunks + num_ranks * generator, num_chunks * num_microbatches) for chunks in alone
    ]


@EVERY_SHAPE
@GENERATORS
def test_two_units_ahead_deadlock_exactly_where_the_reference_says_and_the_cycle_is_named(
    num_ranks, num_chunks, generator
) -> None:
    schedule = nested(num_ranks, num_chunks, 4 * num_ranks, generator=generator, num_units_ahead=2)
    if generator or (num_chunks >= 2 and num_ranks >= 3):
        with pytest.raises(ScheduleError, match=r"schedule nested would deadlock: rank \d+: \d+F\d+ waits for"):
            makespan(schedule, generator)
    else:
        assert makespan(schedule, generator) == ideal(num_ranks, num_chunks, 4 * num_ranks, generator)


@EVERY_SHAPE
def test_four_units_ahead_gain_nothing_where_units_are_even(num_ranks, num_chunks) -> None:
    schedule = nested(num_ranks, num_chunks, 6 * num_ranks, num_units_ahead=4)
    assert makespan(schedule, False) == ideal(num_ranks, num_chunks, 6 * num_ranks, False)
    assert peak_live(schedule, stages=[0]).tolist() == [4] * num_ranks


@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 4), (4, 2), (8, 2)])
@GENERATORS
def test_order_is_the_same_on_every_rank_and_the_llms_own_is_untouched(num_ranks, num_chunks, generator) -> None:
    num_units = 6
    schedule = nested(num_ranks, num_chunks, num_units * num_ranks, generator=generator)
    # Three units ahead, then each backward with the next forward as a pair.
    expected = ["F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "F5", "B3", "B4", "B5"]
    spread = {0, schedule.num_stages - 1} if generator else {0}
    programs = []
    for rank, program in enumerate(schedule.ranks):
        assert unit_acts(schedule, rank) == expected
        texts = [str(act) for act in program]
        for unit in range(num_units - 3):
            own, later = unit * num_ranks + rank, (unit + 3) * num_ranks + rank
            assert f"0B{own},0F{later}" in ",".join(texts)
        programs.append([(act.op, act.stage, act.microbatch // num_ranks) for act in program if act.stage in spread])
    assert all(program == programs[0] for program in programs)
    first, last = schedule.ranks[0], schedule.ranks[-1]
    for unit in range(num_units):
        # Rank 0 runs a unit's encoder backward right after the last gradient of the unit has come back to it.
        returned = first.index(Act("B", 1, unit * num_ranks + num_ranks - 1))
        assert first[returned + 1] == Act("B", 0, unit * num_ranks)
        if generator:
            finished = last.index(Act("F", schedule.num_stages - 2, unit * num_ranks + num_ranks - 1))
            own = unit * num_ranks + num_ranks - 1
            assert last[finished + 1 : finished + 3] == (
                Act("F", schedule.num_stages - 1, own),
                Act("B", schedule.num_stages - 1, own),
            )
    if not generator:
        alone = build_schedule(
            "interleaved1f1b",
            num_ranks=num_ranks,
            num_stages=num_ranks * num_chunks,
            num_microbatches=num_units * num_ranks,
        )
        kept = [[(a.op, a.stage - 1, a.microbatch) for a in program if a.stage] for program in schedule.ranks]
        assert kept == [[(a.op, a.stage, a.microbatch) for a in program] for program in alone.ranks]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 40), st.booleans())
def test_a_partial_last_unit_runs_in_no_more_time_than_a_whole_one(
    num_ranks, num_chunks, num_microbatches, generator
) -> None:
    num_units = -(-num_microbatches // num_ranks)
    if num_ranks == 1:
        num_chunks = 1
    schedule = nested(num_ranks, num_chunks, num_microbatches, generator=generator)
    assert makespan(schedule, generator) <= ideal(num_ranks, num_chunks, num_units * num_ranks, generator)
    assert peak_live(schedule, stages=[0]).max() <= 3


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 30))
def test_a_frozen_encoder_has_no_backward_and_the_step_loses_exactly_its_time(num_ranks, num_chunks, num_units) -> None:
    num_microbatches = num_units * num_ranks
    num_chunks = 1 if num_ranks == 1 else num_chunks
    schedule = nested(num_ranks, num_chunks, num_microbatches, frozen_stages=[0])
    assert not [act for program in schedule.ranks for act in program if act.stage == 0 and act.op != "F"]
    whole = ideal(num_ranks, num_chunks, num_microbatches, False)
    assert makespan(schedule, False) == whole - num_units * ENCODER[1]


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 40), st.booleans(), st.data())
def test_three_or_more_units_ahead_never_hang_whatever_the_clock_says(
    num_ranks, num_chunks, num_microbatches, generator, data
) -> None:
    num_stages = 1 + num_ranks * num_chunks + generator
    ahead = data.draw(st.integers(3, 6))
    ticks = st.lists(st.integers(0, 9), min_size=num_stages, max_size=num_stages)
    for name in ("nested", "phased"):
        schedule = build(
            name,
            num_ranks,
            num_chunks,
            num_microbatches,
            generator=generator,
            num_units_ahead=ahead,
            clock=(data.draw(ticks), data.draw(ticks)),
        )
        assert makespan(schedule, generator) > 0


def uneven(schedule: Schedule, seed: int) -> dict[str, np.ndarray]:
    """Encoder micro-batches of lognormal size (sigma 1) and equal mean."""
    sizes = np.random.Generator(np.random.Philox(seed)).lognormal(0.0, 1.0, schedule.num_microbatches)
    times = durations(schedule, False, (1.0, 2.0))
    times["forward_ms"][0] = 2.0 * sizes / sizes.mean()
    times["backward_ms"][0] = 4.0 * sizes / sizes.mean()
    return times


@pytest.mark.parametrize("seed", range(4))
def test_a_frozen_encoder_with_uneven_units_gains_from_looking_further_ahead(seed: int) -> None:
    near, far = (
        simulate(schedule, **uneven(schedule, seed)).makespan_ms
        for schedule in (nested(8, 2, 256, frozen_stages=[0], num_units_ahead=ahead) for ahead in (3, 32))
    )
    assert far < 0.99 * near


@pytest.mark.parametrize("seed", range(4))
def test_a_frozen_encoder_on_its_own_rank_is_not_held_back_by_what_comes_back_to_it(seed: int) -> None:
    """PS-11: the same durations with a backward of no length make the encoder wait for its turn."""
    times = []
    for frozen in ((), (0,)):
        schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=64, frozen_stages=frozen)
        assert frozen == () or {act.op for act in schedule.ranks[0]} == {"F"}
        lengths = uneven(schedule, seed)
        lengths["backward_ms"][0] = 0.0
        times.append(simulate(schedule, **lengths).makespan_ms)
    assert times[1] < times[0]


@pytest.mark.parametrize("seed", range(4))
def test_uneven_units_cost_time_and_evening_out_each_unit_brings_it_back(seed: int) -> None:
    schedule = nested(8, 2, 256)
    times = uneven(schedule, seed)
    unequal = simulate(schedule, **times).makespan_ms
    for values in times.values():
        values[0] = values[0].reshape(32, 8).mean(axis=1).repeat(8)
    even = simulate(schedule, **times).makespan_ms
    bound = (256 * 2 + 7) * 3.0 + 32 * 6.0
    assert even == pytest.approx(bound, rel=1e-12)
    assert unequal > 1.08 * even


@pytest.mark.parametrize("name", ["nested", "phased"])
@pytest.mark.parametrize("stage_ranks", [[0, 1], [0, 0, 1], [0, 1, 0, 1], [0]])
def test_without_a_spread_stage_there_is_nothing_to_nest(name: str, stage_ranks: list[int]) -> None:
    """It would be plain (interleaved) 1F1B under a name that promises even encoder work."""
    message = (
        rf"schedule {name} with stage_ranks=.*: no stage is spread .*encoder=.spread.* or take 1f1b \(interleaved1f1b"
    )
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, stage_ranks=stage_ranks, num_microbatches=4)


def test_a_spread_generator_alone_can_be_nested() -> None:
    alone = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=4)
    schedule = build_schedule("nested", stage_ranks=[0, 1, -1], num_microbatches=4)
    assert schedule.unit_size == 2
    for rank, program in enumerate(schedule.ranks):
        own = [act for act in program if act.stage == 2]
        assert [str(act) for act in own] == [f"2{op}{unit * 2 + rank}" for unit in range(2) for op in "FB"]
        # Two more forwards ahead, or the cut of the generator would wait for itself.
        assert {act for act in program if act.stage != 2} == set(alone.ranks[rank])
