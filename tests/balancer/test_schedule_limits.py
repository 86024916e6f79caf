"""Grids and requests of any kind: the same schedule whoever ended the lines, and a named error before allocating."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from balancer.errors import ScheduleError
from balancer.layout import MAX_MICROBATCHES
from balancer.schedule import Act, Schedule, build_schedule
from balancer.simulate import simulate

GRID = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"


@pytest.mark.parametrize(
    "text", [GRID + "\n", GRID.replace("\n", "\r\n"), GRID.replace("\n", "\r\n") + "\r\n", GRID + "\n \n\n"]
)
def test_the_end_of_lines_and_of_the_text_adds_no_rank(text: str) -> None:
    loaded = Schedule.from_grid(text)
    assert loaded.num_ranks == 2
    assert loaded.ranks == Schedule.from_grid(GRID).ranks


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_rank_without_acts_is_printed_and_loaded_wherever_it_is(idle: int) -> None:
    whole = build_schedule("1f1b", num_ranks=3, num_microbatches=2)
    schedule = whole.without({(idle, 0), (idle, 1)})
    loaded = Schedule.from_grid(schedule.to_grid(), stage_ranks=[0, 1, 2], num_microbatches=2)
    assert loaded.num_ranks == 3
    assert loaded.ranks == schedule.ranks


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches"), [("nested", 2, 1), ("phased", 2, 1), ("nested", 1, 3)]
)
def test_a_spread_encoder_that_acts_do_not_show_is_named_when_its_grid_is_loaded(
    name: str, num_ranks: int, num_microbatches: int
) -> None:
    schedule = build_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    loaded = Schedule.from_grid(schedule.to_grid(), stage_ranks=[-1, *range(num_ranks)])
    assert loaded.unit_size == schedule.unit_size == num_ranks
    assert loaded.place.tolist() == schedule.place.tolist()
    # Without the argument it is a stage of one rank; asking for routed items then is an error, not another time.
    plain = Schedule.from_grid(schedule.to_grid())
    times = np.ones((num_ranks + 1, num_microbatches))
    with pytest.raises(ScheduleError, match="spread"):
        simulate(plain, forward_ms=times, backward_ms=times, routed=True)


@pytest.mark.parametrize("text", ["٢F0", "0F²", "0F0\n", "\x000F0", "0F", "0f0", "1" * 10 + "F0", 7, None, b"0F0"])
def test_only_plain_digits_make_an_act(text: object) -> None:
    if text == "0F0\n":  # space around an act is none of its parts
        assert Act.parse(text) == Act("F", 0, 0)
        return
    with pytest.raises(ScheduleError, match="is not an act"):
        Act.parse(text)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "stage of ten digits": (lambda: Schedule.from_grid("2000000000F0,2000000000B0"), "not an act"),
    "large stage": (lambda: Schedule.from_grid("200000000F0,200000000B0"), "200000000F0: stage=200000000: .* below"),
    "large micro-batch": (lambda: Schedule.from_grid("0F200000000,0B200000000"), "micro-batch=200000000: .* below"),
    "product": (lambda: Schedule.from_grid("16383F0,0F65535"), "3221225472 acts, at most 16777216"),
    "M of a grid": (lambda: Schedule.from_grid(GRID, num_microbatches=-1), "num_microbatches=-1"),
    "M of a grid is a float": (lambda: Schedule.from_grid(GRID, num_microbatches=2.0), "no whole number"),
    "no stage ranks": (lambda: Schedule.from_grid(GRID, stage_ranks=[]), "num_stages=0: give stage_ranks"),
    "stage rank -2": (lambda: Schedule.from_grid(GRID, stage_ranks=[-2, 1]), "rank=-2"),
    "frozen text": (lambda: Schedule.from_grid(GRID, frozen_stages=["0"]), "frozen_stages: stage='0'"),
    "empty": (lambda: Schedule.from_grid("\n\n"), "ranks of the grid=0"),
    "no text": (lambda: Schedule.from_grid(None), "a grid is text"),
    "act of int64": (lambda: Schedule.from_acts([[Act("F", 2**40, 0)]]), "stage=1099511627776"),
    "act of another op": (lambda: Schedule.from_acts([[Act("X", 0, 0)]]), "'X' is no op"),
    "M": (
        lambda: build_schedule("1f1b", num_ranks=2, num_microbatches=10**8),
        "num_microbatches=100000000: .* at most",
    ),
    "M is a float": (lambda: build_schedule("1f1b", num_ranks=2, num_microbatches=2.5), "no whole number"),
    "acts": (
        lambda: build_schedule("gpipe", num_ranks=512, num_microbatches=MAX_MICROBATCHES),
        "acts, at most 16777216",
    ),
    "ranks": (lambda: build_schedule("1f1b", num_ranks=10**9, num_microbatches=1), "num_ranks=1000000000"),
    "stages": (
        lambda: build_schedule("1f1b", num_ranks=1, num_stages=10**9, num_microbatches=1),
        "num_stages=1000000000",
    ),
    "stage rank": (lambda: build_schedule("1f1b", stage_ranks=[0, 10**9], num_microbatches=1), "rank=1000000000"),
    "units ahead": (
        lambda: build_schedule("nested", num_ranks=2, num_microbatches=4, num_units_ahead=1.5),
        "units_ahead",
    ),
    "name": (lambda: build_schedule(7, num_ranks=2, num_microbatches=4), "schedule 7 is no name"),
    "clock": (
        lambda: build_schedule("nested", num_ranks=1, num_microbatches=4, clock=([2**70, 1], [1, 1])),
        "clock: forward of stage 0=1180591620717411303424: .* coarser tick",
    ),
    "clock is a float": (
        lambda: build_schedule("nested", num_ranks=1, num_microbatches=4, clock=([1, 1], [1, 1.5])),
        "backward of stage 1=1.5 is no whole number",
    ),
    "clock of one": (
        lambda: build_schedule("nested", num_ranks=1, num_microbatches=4, clock=([1], [1, 1])),
        "per stage, 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_schedule_is_refused_by_name_before_memory_is_taken(case: str) -> None:
    make, message = REFUSED[case]
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match=message):
            make()
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_fields_of_a_schedule_do_not_wrap_into_smaller_types() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="stage holds 4294967297, beyond int32"):
        replace(schedule, stage=schedule.stage.astype(np.int64) + 2**32)
    with pytest.raises(ScheduleError, match="microbatch holds float64"):
        replace(schedule, microbatch=schedule.microbatch.astype(np.float64))
    with pytest.raises(ScheduleError, match="num_microbatches=-1"):
        replace(schedule, num_microbatches=-1)


def test_the_longest_clock_still_places_its_units() -> None:
    tick = 2**62 // (2 * 2 * 4)
    long = build_schedule("nested", num_ranks=1, num_microbatches=4, clock=([tick, tick], [tick, tick]))
    short = build_schedule("nested", num_ranks=1, num_microbatches=4, clock=([1, 1], [1, 1]))
    assert long.ranks == short.ranks
