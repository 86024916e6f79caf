"""Malformed input is refused with the value, its place and a remedy; nothing wraps or is rounded silently."""

import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from packing import (
    CapacityError,
    InfeasiblePartitionError,
    ItemTooLargeError,
    NegativeSizeError,
    PackingError,
    SizeOverflowError,
    bin_lower_bound,
    pack,
    partition,
)
from packing.inputs import MAX_BINS, as_flag, check_count


def test_a_negative_size_is_named_with_its_place() -> None:
    with pytest.raises(NegativeSizeError, match=r"sizes\[1\] is -4 in column 0"):
        pack([3, -4], capacity=10)
    with pytest.raises(NegativeSizeError, match=r"weights\[0\] is -1 in column 1"):
        partition([[1, -1]], 2)


@pytest.mark.parametrize("sizes", [[1.0, 2.0], [True, False], ["a"], np.array([1.5])])
def test_sizes_that_are_not_integers_are_refused(sizes: Any) -> None:
    with pytest.raises(PackingError, match="are integers"):
        pack(sizes, capacity=10)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([1, 2.5], r"sizes\[1\] is 2.5 \(float\).*scale and round to integers first"),
        (np.array([1.5]), "type float64.*scale and round to integers first"),
        (np.array([[1, 2], [3, Fraction(1, 2)]], object), r"sizes\[1, 1\] is Fraction.*scale and round"),
        (np.array([1, True], object), r"sizes\[1\] is True \(bool\); sizes and weights are integers$"),
        (np.array([1, None], object), r"sizes\[1\] is None"),
        ([True, False], "type bool; sizes and weights are integers$"),
        (["a"], "one number an item and column$"),
        ([(1, 2), (1,)], "equal rows"),
        (None, "of type NoneType; give a list or an array"),
        ({1, 2}, "of type set; give a list or an array"),
        ({1: 2}, "of type dict; give a list or an array"),
        ((size for size in (1, 2)), "of type generator; give a list or an array"),
        ("12", "of type str; give a list or an array"),
        (np.ma.masked_array([1, 2], [True, False]), "masked"),
        (np.ones((3, 65), np.int64), "at most 64 columns|65 columns; at most 64"),
    ],
)
def test_what_is_no_table_of_integers_is_named_with_a_remedy(sizes: Any, text: str) -> None:
    with pytest.raises(PackingError, match=text):
        pack(sizes, capacity=10)


def test_a_masked_array_without_masked_entries_is_accepted() -> None:
    assert pack(np.ma.masked_array([1, 2]), capacity=3).num_bins == 1


def test_a_huge_or_negative_python_integer_is_named_with_its_place() -> None:
    with pytest.raises(SizeOverflowError, match=r"sizes\[1\] reaches 9223372036854775808"):
        pack([1, 2**63], capacity=10)
    with pytest.raises(NegativeSizeError, match=r"sizes\[1\] is -\d+ in column 0"):
        pack([1, -(2**70)], capacity=10)
    with pytest.raises(NegativeSizeError, match=r"sizes\[0\] is -1 in column 1"):
        pack(np.array([[1, -1]], object), capacity=[10, 10])


@pytest.mark.parametrize("sizes", [5, [[[1]]], np.zeros((3, 0), np.int64)])
def test_shapes_other_than_items_by_dimensions_are_refused(sizes: Any) -> None:
    with pytest.raises(PackingError, match="has shape"):
        pack(sizes, capacity=10)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64, object])
def test_every_integer_type_gives_the_same_packing(dtype: Any) -> None:
    sizes = [6, 5, 4, 3, 2]
    assert pack(np.array(sizes, dtype), capacity=10).bin_of.tolist() == pack(sizes, capacity=10).bin_of.tolist()


def test_strided_and_fortran_arrays_are_accepted() -> None:
    table = np.asfortranarray(np.array([[6, 1], [5, 1], [4, 1]], np.int64))
    assert pack(table, capacity=[10, 9]).bin_of.tolist() == pack(table.tolist(), capacity=[10, 9]).bin_of.tolist()
    assert pack(np.arange(10)[::2], capacity=8).num_bins == pack([0, 2, 4, 6, 8], capacity=8).num_bins


@pytest.mark.parametrize("sizes", [[2**63], [2**62, 1], np.array([2**63], np.uint64), [2**70], [2**61, 2**61, 1]])
def test_sums_beyond_two_to_the_62_are_refused(sizes: Any) -> None:
    with pytest.raises(SizeOverflowError, match="use a coarser unit"):
        pack(sizes, capacity=2**62)


def test_the_sum_over_stages_is_guarded_too() -> None:
    with pytest.raises(SizeOverflowError, match="over all stages"):
        partition([[2**61, 2**61], [2**61, 2**61]], 2)


@pytest.mark.parametrize(
    "capacity",
    [
        *(0, -1, 2**62 + 1, 1.5, "8", [4, 4], True, [[4]], [], None, [None], {}, {4}, [[4], [4, 4]]),
        *(Fraction(9, 2), Decimal("4.5"), [True], 2**70, [2**63, 1]),
        *(np.array([4.5], object), np.array([True], object), np.array([True]), np.ma.masked_array([4], [True])),
    ],
)
def test_a_capacity_is_one_positive_integer_for_each_column(capacity: Any) -> None:
    with pytest.raises(CapacityError, match="capacity"):
        pack([1, 2], capacity=capacity)


def test_capacity_and_sizes_belong_together() -> None:
    with pytest.raises(CapacityError, match="give both or none"):
        partition([1, 2], 2, capacity=3)
    with pytest.raises(CapacityError, match="give both or none"):
        partition([1, 2], 2, sizes=[1, 2])
    with pytest.raises(PackingError, match="sizes have 1 rows but weights have 2"):
        partition([1, 2], 2, sizes=[1], capacity=3)


@pytest.mark.parametrize("capacity", [np.int8(4), np.uint64(4), [4], np.array(4, object), np.array([4], np.uint8)])
def test_every_integer_type_of_capacity_is_accepted(capacity: Any) -> None:
    assert pack([3, 2, 2], capacity=capacity).num_bins == 2


@pytest.mark.parametrize("sizes", [[], (), np.zeros(0)])
def test_an_empty_list_has_as_many_columns_as_the_capacity(sizes: Any) -> None:
    assert pack(sizes, capacity=[10, 4]).load.shape == (0, 2)
    assert bin_lower_bound(sizes, capacity=[10, 4]) == 0
    assert partition([], 2, sizes=sizes, capacity=[3, 4]).load.tolist() == [[0], [0]]
    with pytest.raises(CapacityError, match="capacity has 3 entries but sizes have 2 columns"):
        pack(np.zeros((0, 2), np.int64), capacity=[1, 2, 3])
    with pytest.raises(CapacityError, match="at most 64"):
        pack(sizes, capacity=[1] * 65)


def test_64_columns_and_a_limit_on_items_are_within_the_exact_range() -> None:
    capacity = np.full(64, 2**40 - 1)
    sizes = np.vstack([capacity, capacity // 2, capacity // 2, capacity // 3])
    for algorithm in ("first_fit_decreasing", "best_fit_decreasing", "auto"):
        result = pack(sizes, capacity=capacity, max_items_per_bin=2, num_bins_multiple=4, algorithm=algorithm)
        assert result.num_bins == 4
        assert result.load.max() == 2**40 - 1


@pytest.mark.parametrize("most", [np.uint64(2), np.int8(2), np.uint8(2), np.int64(2)])
def test_a_limit_on_items_may_be_any_integer_type(most: Any) -> None:
    sizes = [1] * 300
    assert bin_lower_bound(sizes, capacity=100, max_items_per_bin=most) == 150
    assert pack(sizes, capacity=100, max_items_per_bin=most).num_bins == 150


@pytest.mark.parametrize("most", [np.int8(100), 2**40, 2**80])
def test_a_limit_on_items_that_is_never_reached_changes_nothing(most: Any) -> None:
    assert pack([1] * 300, capacity=3, max_items_per_bin=most).num_bins == 100
    assert bin_lower_bound([1] * 300, capacity=3, max_items_per_bin=most) == 100


@pytest.mark.parametrize("value", [MAX_BINS + 1, 2**31, 2**40, 2**80, np.uint64(2**63)])
def test_more_bins_than_memory_holds_are_refused_before_they_are_made(value: Any) -> None:
    with pytest.raises(PackingError, match=f"num_bins_multiple is {value}.* at most [0-9]+ is supported"):
        pack([1], capacity=2, num_bins_multiple=value)


def test_as_many_bins_as_items_are_always_allowed() -> None:
    check_count(MAX_BINS, 0, "num_parts")
    check_count(MAX_BINS + 5, MAX_BINS + 5, "num_parts")
    with pytest.raises(PackingError, match="num_parts is 16777222; with 16777221 items at most 16777221"):
        check_count(MAX_BINS + 6, MAX_BINS + 5, "num_parts")


def test_a_flag_is_true_or_false() -> None:
    assert as_flag(np.bool_(True), "equal_count") is True
    for value in (1, 0, None, "no", np.array([True])):
        with pytest.raises(PackingError, match=r"equal_count is .*; it must be True or False"):
            as_flag(value, "equal_count")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -3, 1.0, True])
def test_counts_are_integers_of_at_least_one(value: Any) -> None:
    with pytest.raises(PackingError, match="num_parts"):
        partition([1], value)
    with pytest.raises(PackingError, match="num_bins_multiple"):
        pack([1], capacity=2, num_bins_multiple=value)
    with pytest.raises(PackingError, match="max_items_per_bin"):
        pack([1], capacity=2, max_items_per_bin=value)


@pytest.mark.parametrize(
    "error",
    [
        ItemTooLargeError(1, 12, 10, 0),
        NegativeSizeError("sizes", 2, 0, -1),
        SizeOverflowError("sizes", 2**63, 2**62),
        InfeasiblePartitionError(2, 3, 3, True),
        InfeasiblePartitionError(6, 7, 7, True, (2, 3)),
        CapacityError("capacity is 0"),
    ],
)
def test_errors_survive_the_trip_between_processes(error: PackingError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert isinstance(again, ValueError)
