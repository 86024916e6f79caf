"""Turns: counted as they would be listed, and as even in every window as in the whole."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.rotation import MODULUS, bounds_of, count_below, most_in_window, points

BOUNDS = st.integers(0, MODULUS)


@given(BOUNDS, st.integers(0, 2000))
def test_the_count_is_that_of_the_listed_points(bound: int, stop: int) -> None:
    listed = sum(int(point) < bound for point in points(0, stop))
    assert count_below(bound, stop) == listed


@given(BOUNDS, st.integers(0, 10**15), st.integers(0, 300))
def test_far_away_windows_are_counted_as_exactly_as_near_ones(bound: int, start: int, window: int) -> None:
    listed = sum(int(point) < bound for point in points(start, window))
    assert count_below(bound, start + window) - count_below(bound, start) == listed


@given(st.integers(1, MODULUS - 1), st.sampled_from([1, 2, 7, 64, 257]), st.integers(0, MODULUS - 1))
def test_no_window_holds_more_points_than_the_most(width: int, window: int, low: int) -> None:
    inside = (points(0, 5000) - np.uint64(low)) < np.uint64(width)
    running = np.concatenate([[0], np.cumsum(inside)])
    most = most_in_window(width, window)
    assert (running[window:] - running[:-window]).max() <= most
    assert most <= width / MODULUS * window + 3


@given(st.integers(1, MODULUS - 1), st.sampled_from([2, 7, 64]))
def test_the_most_is_reached_by_some_window(width: int, window: int) -> None:
    """An arc that begins at a point of the first window holds that many of its points."""
    first = points(0, window)
    held = [int((first - low < np.uint64(width)).sum()) for low in first]
    assert max(held) == most_in_window(width, window)


@pytest.mark.parametrize("window", [1, 64])
def test_nothing_and_everything(window: int) -> None:
    assert (most_in_window(0, window), most_in_window(MODULUS, window)) == (0, window)
    assert (count_below(0, window), count_below(MODULUS, window)) == (0, window)


def test_bounds_split_all_points_by_the_weights() -> None:
    bounds = bounds_of([Fraction(1), Fraction(0), Fraction(3)])
    assert bounds == (0, MODULUS // 4, MODULUS // 4, MODULUS)
    slots = np.searchsorted(np.array(bounds_of([Fraction(1, 2), Fraction(1, 3), Fraction(1, 6)])[:3], np.uint64),
                            points(0, 12), side="right") - 1  # fmt: skip
    assert slots.tolist() == [0, 1, 0, 2, 0, 0, 1, 0, 2, 1, 0, 1]  # as in the module's example
