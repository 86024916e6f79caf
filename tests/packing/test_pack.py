"""`pack` itself: splitting into a multiple of bins, the limit on items, fill, the result record. Algorithms: the suites
test_conformance.py (invariants), test_adversarial.py (hard inputs) and the files named after them."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import PackingError, bin_lower_bound, pack, partition, partition_grid

quick = settings(max_examples=60, deadline=None)
one_dimension = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=40), st.just(capacity))
)


def naive_next_fit(sizes: list[int], capacity: int) -> list[int]:
    bin_of: list[int] = []
    used = 0
    for size in sizes:
        is_new = not bin_of or used + size > capacity
        used = size if is_new else used + size
        bin_of.append((bin_of[-1] if bin_of else -1) + is_new)
    return bin_of


@quick
@given(case=one_dimension, multiple=st.integers(1, 9))
def test_next_fit_keeps_the_input_order_also_when_bins_are_split(case: tuple[list[int], int], multiple: int) -> None:
    sizes, capacity = case
    assert pack(sizes, capacity=capacity, algorithm="next_fit").bin_of.tolist() == naive_next_fit(sizes, capacity)
    result = pack(sizes, capacity=capacity, algorithm="next_fit", num_bins_multiple=multiple)
    assert result.order.tolist() == list(range(len(sizes)))
    assert (np.diff(result.bin_of) >= 0).all()


def test_splitting_halves_the_fullest_bins() -> None:
    result = pack([10, 4, 3, 2, 1], capacity=10, num_bins_multiple=4)  # bins {10} {4 3 2 1} before
    assert result.load[:, 0].tolist() == [10, 4, 3, 3]


def test_splitting_cuts_where_the_larger_half_is_smallest() -> None:
    result = pack([1, 1, 1, 6, 1], capacity=10, algorithm="next_fit", num_bins_multiple=2)
    assert result.load[:, 0].tolist() == [3, 7]
    assert [result.items(index).tolist() for index in (0, 1)] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("place", [0, 500, 999])
def test_splitting_halves_the_items_where_zeros_do_not_matter(place: int) -> None:
    sizes = np.zeros(1000, np.int64)
    sizes[place] = 9
    assert np.diff(pack(sizes, capacity=10, num_bins_multiple=2).offsets).tolist() == [500, 500]
    counts = np.diff(pack(sizes, capacity=10, num_bins_multiple=500).offsets)
    assert counts.max() <= 4


def test_of_equally_full_bins_the_one_with_most_items_is_split() -> None:
    result = pack([4, 4, 2, 2, 2, 2], capacity=8, algorithm="next_fit", num_bins_multiple=3)
    assert [result.items(index).tolist() for index in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_splitting_weighs_all_dimensions() -> None:
    result = pack([[1, 9], [1, 9], [30, 1], [30, 1]], capacity=[100, 20], num_bins_multiple=2)
    assert result.num_bins == 2
    assert result.load.max(axis=0).tolist() == [32, 10] or result.load.max(axis=0).tolist() == [60, 18]
    assert pack([[0, 0]] * 4, capacity=[3, 3], num_bins_multiple=4).load.tolist() == [[0, 0]] * 4


@pytest.mark.parametrize(("num_items", "multiple"), [(0, 4), (1, 4), (3, 4), (4, 4), (5, 4), (5, 7)])
def test_bins_are_empty_only_where_items_are_fewer_than_the_multiple(num_items: int, multiple: int) -> None:
    result = pack([1] * num_items, capacity=10, num_bins_multiple=multiple)
    assert result.num_bins == (multiple if num_items else 0)
    counts = np.diff(result.offsets)
    assert (counts > 0).sum() == min(num_items, result.num_bins)
    assert (np.diff((counts > 0).astype(int)) <= 0).all()  # the empty ones come last
    assert result.lower_bound == result.num_bins
    assert result.gap == 0


@quick
@given(case=one_dimension, most=st.integers(1, 6))
@example(case=([0] * 7, 5), most=2)
def test_a_limit_on_items_is_one_more_dimension(case: tuple[list[int], int], most: int) -> None:
    sizes, capacity = case
    limited = pack(sizes, capacity=capacity, max_items_per_bin=most)
    spelled_out = pack([[size, 1] for size in sizes] or np.zeros((0, 2), int), capacity=[capacity, most])
    assert limited.num_bins == spelled_out.num_bins
    assert limited.load.shape == (limited.num_bins, 1)
    assert limited.lower_bound >= -(-len(sizes) // most)


def test_two_tight_capacities_stay_close_to_the_bound() -> None:
    random = np.random.Generator(np.random.Philox(2))
    tokens = random.lognormal(6.8, 0.8, 4000).astype(np.int64).clip(1, 4096)
    images = random.integers(0, 6, 4000)
    sizes = np.stack([tokens, images], axis=1)
    result = pack(sizes, capacity=[4096, 9])
    assert result.gap < 0.08
    assert result.num_bins < 0.9 * pack(sizes, capacity=[4096, 9], algorithm="next_fit").num_bins


def test_fill_is_used_over_available_capacity() -> None:
    result = pack([[6, 1], [5, 1], [4, 1]], capacity=[10, 4])
    assert result.num_bins == 2
    assert result.fill.tolist() == [15 / 20, 3 / 8]
    assert pack([1, 1], capacity=4, num_bins_multiple=4).fill.tolist() == [2 / 16]


def test_no_items_need_no_bins(check_packing: Callable[..., None]) -> None:
    result = pack([], capacity=10, num_bins_multiple=4)
    assert (result.num_bins, result.lower_bound, result.gap) == (0, 0, 0)
    assert result.fill.tolist() == [0]
    check_packing(result, [], 10)
    check_packing(pack(np.zeros((0, 2), np.int64), capacity=[3, 4]), [], [3, 4])


def test_the_caller_keeps_the_input_and_the_result_cannot_be_changed() -> None:
    sizes = np.array([4, 3, 2], np.int64)
    result = pack(sizes, capacity=5)
    sizes[0] = 1  # still the caller's own
    assert result.load.sum() == 9
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                value[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.num_bins = 1  # type: ignore[misc]


@pytest.mark.parametrize("index", [-1, 2, 10**9, np.int64(-1)])
def test_a_bin_that_does_not_exist_has_no_items(index: int) -> None:
    with pytest.raises(IndexError, match=f"bin {index} does not exist; the 2 bins are numbered from 0"):
        pack([4, 3, 2], capacity=5).items(index)


def test_results_are_shown_in_one_line_without_their_arrays() -> None:
    packed = pack(range(1, 500), capacity=600)
    parts = partition(range(1, 500), 7)
    grid = partition_grid(range(1, 500), 2, 3)
    assert repr(packed).startswith(f"PackResult(items=499, bins={packed.num_bins}, lower_bound={packed.lower_bound}, ")
    assert repr(parts).startswith(f"PartitionResult(items=499, parts=7, makespan={parts.makespan}, lower_bound=")
    assert repr(grid).startswith(f"GridResult(items=499, ranks=2, slots=3, makespan={grid.makespan}, lower_bound=")
    for result in (packed, parts, grid):
        assert repr(result).endswith("algorithm='" + result.algorithm + "')")
        assert len(repr(result)) < 120


def test_a_result_survives_copies_and_the_trip_between_processes() -> None:
    result = pack([4, 3, 2], capacity=5)
    for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert again.bin_of.tolist() == result.bin_of.tolist()
        assert (again.num_bins, again.lower_bound, again.algorithm) == (2, 2, result.algorithm)


def test_the_bound_of_a_packing_is_the_public_bound() -> None:
    sizes = [6, 6, 6, 5, 5]
    assert pack(sizes, capacity=10).lower_bound == bin_lower_bound(sizes, capacity=10) == 4


@pytest.mark.parametrize(
    "target_gap", [-0.1, float("nan"), float("inf"), None, "a", [], 1j, True, np.array([0.1]), np.array([])]
)
def test_a_target_gap_is_a_relative_distance(target_gap: Any) -> None:
    with pytest.raises(PackingError, match="give a relative distance of at least 0"):
        pack([1], capacity=2, target_gap=target_gap)
