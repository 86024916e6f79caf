"""The bound on bins: the definition of L2 by table and by sorting, several dimensions, never above the optimum."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import bin_bounds, bin_lower_bound
from packing.size_classes import table_pays

quick = settings(max_examples=100, deadline=None)
one_dimension = st.integers(1, 40).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=40), st.just(capacity))
)


def l2_by_definition(sizes: list[int], capacity: int) -> int:
    """Threshold by threshold, as in Martello and Toth's book."""
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [size for size in sizes if size > capacity - threshold]
        middle = [size for size in sizes if capacity / 2 < size <= capacity - threshold]
        light = [size for size in sizes if threshold <= size <= capacity / 2]
        excess = sum(light) - (len(middle) * capacity - sum(middle))
        best = max(best, len(alone) + len(middle) + max(0, -(-excess // capacity)))
    return max(best, 1) if sizes else 0


@quick
@given(case=one_dimension)
def test_the_bound_is_l2_by_definition(case: tuple[list[int], int]) -> None:
    sizes, capacity = case
    assert bin_lower_bound(sizes, capacity=capacity) == l2_by_definition(sizes, capacity)


@quick
@given(case=one_dimension, factor=st.sampled_from([2**23, 2**40, 2**50 - 1]))
def test_sizes_too_large_for_a_table_are_sorted_to_the_same_bound(case: tuple[list[int], int], factor: int) -> None:
    sizes, capacity = case
    assert table_pays(capacity, len(sizes))
    assert not table_pays(capacity * factor, len(sizes))
    scaled = [size * factor for size in sizes]
    assert bin_lower_bound(scaled, capacity=capacity * factor) == bin_lower_bound(sizes, capacity=capacity)


@pytest.mark.parametrize("capacity", [4096, 8191, 2**22, 2**22 + 1, 2**40])
def test_table_and_sorting_agree_on_a_large_set(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.Generator(np.random.Philox(3)).lognormal(6, 1.5, 70_000).astype(np.int64).clip(0, 4096)
    found = bin_lower_bound(sizes, capacity=capacity)
    monkeypatch.setattr(bin_bounds, "table_pays", lambda _capacity, _num_items: capacity <= 2**22 + 1)
    tabled = bin_lower_bound(sizes, capacity=capacity)
    monkeypatch.setattr(bin_bounds, "table_pays", lambda _capacity, _num_items: False)
    assert found == tabled == bin_lower_bound(sizes, capacity=capacity)


@quick
@given(data=st.data(), num_columns=st.integers(2, 3))
def test_several_dimensions_are_no_weaker_than_the_best_one_and_never_above_the_optimum(
    data: st.DataObject, num_columns: int, exact_bins: Callable[..., int]
) -> None:
    capacity = data.draw(st.lists(st.integers(1, 12), min_size=num_columns, max_size=num_columns))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    sizes = data.draw(st.lists(row, min_size=1, max_size=7))
    table = np.array(sizes, np.int64)
    bound = bin_lower_bound(table, capacity=capacity)
    assert bound >= max(bin_lower_bound(table[:, column], capacity=limit) for column, limit in enumerate(capacity))
    assert bound <= exact_bins(sizes, capacity)


@quick
@given(case=one_dimension, most=st.integers(1, 5))
def test_a_limit_on_the_items_counts_like_a_dimension_of_ones(case: tuple[list[int], int], most: int) -> None:
    sizes, capacity = case
    rows = np.array([[size, 1] for size in sizes], np.int64).reshape(-1, 2)
    assert bin_lower_bound(sizes, capacity=capacity, max_items_per_bin=most) == bin_lower_bound(
        rows, capacity=[capacity, most]
    )


def test_a_column_of_a_matrix_is_bounded_like_the_same_sizes_alone() -> None:
    sizes = np.random.Generator(np.random.Philox(4)).integers(0, 900, (500, 3))
    columns = [bin_lower_bound(sizes[:, column], capacity=1000 + column) for column in range(3)]
    assert bin_lower_bound(sizes, capacity=[1000, 1001, 1002]) == max(columns)
    assert bin_lower_bound(np.asfortranarray(sizes), capacity=[1000, 1001, 1002]) == max(columns)
