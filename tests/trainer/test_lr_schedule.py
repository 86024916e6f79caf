"""The learning rate: warm-up first, one decay, and exactly the floor at the last step."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ConfigError
from trainer.lr_schedule import SCHEDULES, learning_rate, resolve_warmup

schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def course(schedule: str, total: int, *, warmup: int = 0, floor: float = 0.1, decay: float = 0.2) -> list[float]:
    return [
        learning_rate(
            step,
            total,
            peak=2.0,
            min_ratio=floor,
            schedule=schedule,
            warmup_steps=warmup,
            wsd_decay_share=decay,
        )
        for step in range(total)
    ]


@given(
    schedule=st.sampled_from(SCHEDULES),
    total=st.integers(1, 60),
    data=st.data(),
    floor=st.floats(0.0, 1.0),
    decay=st.floats(0.01, 1.0),
)
def test_a_course_rises_once_falls_once_and_ends_at_the_floor(
    schedule: str, total: int, data: st.DataObject, floor: float, decay: float
) -> None:
    warmup = data.draw(st.integers(0, total - 1))
    rates = course(schedule, total, warmup=warmup, floor=floor, decay=decay)
    bottom = 2.0 if schedule == "constant" else 2.0 * floor
    assert rates[-1] == bottom
    assert all(0.0 <= rate <= 2.0 * (1 + 1e-12) for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(falling))
    assert all(rate >= bottom - 1e-12 for rate in falling)
    if total > warmup + 1:
        assert max(rates) == pytest.approx(2.0), "the peak is reached"


@schedules
def test_warm_up_is_linear_and_its_first_step_moves(schedule: str) -> None:
    assert course(schedule, 20, warmup=4)[:4] == [0.5, 1.0, 1.5, 2.0]


@schedules
def test_without_warm_up_the_first_step_has_the_peak(schedule: str) -> None:
    assert course(schedule, 10)[0] == pytest.approx(2.0)


@schedules
def test_runs_of_one_and_two_steps_end_at_the_floor(schedule: str) -> None:
    bottom = 2.0 if schedule == "constant" else pytest.approx(0.2)
    assert course(schedule, 1) == [bottom]
    assert course(schedule, 2) == [pytest.approx(2.0), bottom]


def test_halfway_the_decay_is_halfway() -> None:
    # 11 steps from the peak 2.0 (step 0) to the floor 0.2 (step 10); the middle is 1.1
    assert course("linear", 11)[5] == pytest.approx(1.1)
    assert course("cosine", 11)[5] == pytest.approx(1.1)
    quarter = 0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 0.2))
    assert course("cosine", 11)[2] == pytest.approx(quarter)


def test_wsd_stays_at_the_peak_and_decays_over_its_share() -> None:
    rates = course("wsd", 20, warmup=2, decay=0.25)
    assert rates[1:15] == pytest.approx([2.0] * 14)
    assert rates[15:] == pytest.approx([2.0 - 1.8 * k / 5 for k in range(1, 6)])


def test_constant_stays_at_the_peak() -> None:
    assert course("constant", 6, warmup=2) == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]


def test_a_step_outside_the_run_has_no_rate() -> None:
    with pytest.raises(ConfigError, match="step 5 is outside a run of 5 steps"):
        learning_rate(5, 5, peak=1.0)


def test_an_unknown_schedule_is_refused_at_every_step() -> None:
    for step in range(3):
        with pytest.raises(ConfigError, match="lr_schedule='step' is not one of: cosine"):
            learning_rate(step, 3, peak=1.0, schedule="step", warmup_steps=1)


@pytest.mark.parametrize(("total", "expected"), [(1, 0), (2, 1), (20, 1), (21, 2), (100, 5), (1000, 50)])
def test_the_default_warm_up_is_five_percent_and_always_fits(total: int, expected: int) -> None:
    assert resolve_warmup(None, total) == expected


def test_a_given_warm_up_must_fit() -> None:
    assert resolve_warmup(0, 1) == 0
    assert resolve_warmup(9, 10) == 9
    with pytest.raises(ConfigError, match=r"warmup_steps=10 does not fit into a run of 10 steps. Give at most 9"):
        resolve_warmup(10, 10)
