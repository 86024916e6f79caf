"""Malformed input is refused with the value, its place and a remedy; nothing wraps or is rounded silently."""

import pickle
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
    pack,
    partition,
)


def test_a_negative_size_is_named_with_its_place() -> None:
    with pytest.raises(NegativeSizeError, match=r"sizes\[1\] is -4 in column 0"):
        pack([3, -4], capacity=10)
    with pytest.raises(NegativeSizeError, match=r"weights\[0\] is -1 in column 1"):
        partition([[1, -1]], 2)


@pytest.mark.parametrize("sizes", [[1.0, 2.0], [True, False], ["a"], np.array([1.5])])
def test_sizes_that_are_not_integers_are_refused(sizes: Any) -> None:
    with pytest.raises(PackingError, match="are integers"):
        pack(sizes, capacity=10)


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


@pytest.mark.parametrize("capacity", [0, -1, 2**62 + 1, 1.5, "8", [4, 4], True, [[4]]])
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
        CapacityError("capacity is 0"),
    ],
)
def test_errors_survive_the_trip_between_processes(error: PackingError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert isinstance(again, ValueError)
