"""Lower bounds: never above the optimum, monotone, and as strong as they claim."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import bin_lower_bound, makespan_lower_bound

quick = settings(max_examples=100, deadline=None)
small = st.integers(1, 15).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=8), st.just(capacity))
)


@quick
@given(case=small)
@example(case=([6, 6, 6], 10))
def test_the_bin_bound_is_never_above_the_optimum_and_at_least_the_average(
    exact_bins: Callable[..., int], case: tuple[list[int], int]
) -> None:
    sizes, capacity = case
    bound = bin_lower_bound(sizes, capacity=capacity)
    assert -(-sum(sizes) // capacity) <= bound <= exact_bins([[size] for size in sizes], [capacity])


@quick
@given(case=small, more=st.integers(1, 15))
def test_another_item_never_lowers_the_bin_bound(case: tuple[list[int], int], more: int) -> None:
    sizes, capacity = case
    assert bin_lower_bound(sizes, capacity=capacity) <= bin_lower_bound(
        [*sizes, min(more, capacity)], capacity=capacity
    )


def naive_l2(sizes: list[int], capacity: int) -> int:
    """The definition, threshold by threshold."""
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [size for size in sizes if size > capacity - threshold]
        middle = [size for size in sizes if capacity - threshold >= size > capacity / 2]
        light = [size for size in sizes if threshold <= size <= capacity / 2]
        excess = sum(light) - (len(middle) * capacity - sum(middle))
        best = max(best, len(alone) + len(middle) + max(0, -(-excess // capacity)))
    return best


@quick
@given(case=small)
def test_the_bin_bound_is_that_of_martello_and_toth(case: tuple[list[int], int]) -> None:
    sizes, capacity = case
    assert bin_lower_bound(sizes, capacity=capacity) == max(naive_l2(sizes, capacity), 1 if sizes else 0)


def test_items_above_half_the_capacity_never_share_a_bin() -> None:
    assert bin_lower_bound([6, 6, 6, 1], capacity=10) == 3
    assert bin_lower_bound([6, 6, 6, 5, 5], capacity=10) == 4


def test_several_dimensions_take_the_strongest_one_and_the_item_count() -> None:
    sizes = [[1, 6], [1, 6], [1, 6]]
    assert bin_lower_bound(sizes, capacity=[10, 10]) == 3
    assert bin_lower_bound([1] * 7, capacity=100, max_items_per_bin=2) == 4


def test_the_bin_bound_survives_sizes_near_the_integer_limit() -> None:
    assert bin_lower_bound([2**60] * 4, capacity=2**60) == 4
    assert bin_lower_bound([2**61, 2**61], capacity=2**62) == 1
    assert bin_lower_bound([2**61 + 1, 2**61 - 1], capacity=2**61 + 2) == 2


@quick
@given(
    weights=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=7),
    num_parts=st.integers(1, 4),
    equal_count=st.booleans(),
)
@example(weights=[(5, 0), (5, 0), (5, 0)], num_parts=2, equal_count=False)
@example(weights=[(9, 0), (1, 0), (1, 0), (1, 0)], num_parts=2, equal_count=True)
def test_the_makespan_bound_is_never_above_the_optimum(
    exact_makespan: Callable[..., int], weights: list[tuple[int, int]], num_parts: int, equal_count: bool
) -> None:
    bound = makespan_lower_bound(weights, num_parts, equal_count=equal_count)
    assert bound <= exact_makespan(weights, num_parts, equal_count=equal_count)
    for stage in (0, 1):
        column = [weight[stage] for weight in weights]
        assert bound >= max(*column, -(-sum(column) // num_parts))


def test_the_makespan_bound_knows_the_pigeonhole_and_the_companions() -> None:
    assert makespan_lower_bound([5, 5, 5], 2) == 10
    assert makespan_lower_bound([4, 4, 4, 4, 4], 2) == 12
    assert makespan_lower_bound([9, 1, 1, 1], 2) == 9
    assert makespan_lower_bound([9, 1, 1, 1], 2, equal_count=True) == 10
    assert makespan_lower_bound([], 4) == 0


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_more_parts_never_raise_the_makespan_bound(num_parts: int) -> None:
    weights = np.random.Generator(np.random.Philox(5)).integers(0, 1000, 50)
    assert makespan_lower_bound(weights, num_parts) >= makespan_lower_bound(weights, num_parts + 1)
