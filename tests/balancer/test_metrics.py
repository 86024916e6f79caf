"""The numbers by which plans are judged."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer import metrics


def test_imbalance_is_max_over_mean() -> None:
    assert metrics.imbalance([3.0, 1.0]) == 1.5
    assert metrics.imbalance(np.array([2, 2, 2])) == 1.0


@given(st.lists(st.floats(0.0, 1e12), min_size=1, max_size=9))
def test_imbalance_is_never_below_one(values: list[float]) -> None:
    assert metrics.imbalance(values) >= 1.0


def test_imbalance_of_idle_ranks_is_one_and_of_no_ranks_unknown() -> None:
    assert metrics.imbalance([0, 0]) == 1.0
    assert math.isnan(metrics.imbalance([]))


@given(st.integers(1, 8), st.integers(1, 16))
def test_both_bubble_numbers_of_a_uniform_pipeline(ranks: int, microbatches: int) -> None:
    busy, makespan = [3.0 * microbatches] * ranks, 3.0 * (microbatches + ranks - 1)
    assert metrics.bubble_ratio(busy, makespan) == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert metrics.bubble_overhead(busy, makespan) == pytest.approx((ranks - 1) / microbatches)


def test_a_step_in_which_nothing_runs_has_no_bubble() -> None:
    assert metrics.bubble_ratio([0.0], 0.0) == 0.0
    assert metrics.bubble_overhead([0.0], 0.0) == 0.0


def test_shares_of_no_capacity_are_unknown() -> None:
    assert metrics.fill(3, 4) == 0.75
    assert metrics.padding_ratio(1, 4) == 0.25
    assert math.isnan(metrics.fill(0, 0))
    assert math.isnan(metrics.padding_ratio(0, 0))
