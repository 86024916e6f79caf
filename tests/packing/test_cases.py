"""Faults that users of other packers met (cases.md of the shared references): each a test over all algorithms.

PK-11, PK-13 and PK-14 are in test_processes.py.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packing import InfeasiblePartitionError, ItemTooLargeError, pack, partition

MostItems = Callable[[Callable[..., Any], str], int]


def test_a_capacity_is_a_ceiling_never_an_average_pk_01(packer: str) -> None:
    result = pack([7] * 8, capacity=8, algorithm=packer)
    assert result.num_bins == 8
    assert result.load.max() <= 8


@pytest.mark.parametrize("exponent", [1, 2])
def test_balancing_a_cost_does_not_exceed_the_capacity_pk_01(partitioner: str, exponent: int) -> None:
    lengths = np.array([7] * 8)
    parts = partition(lengths**exponent, 8, algorithm=partitioner, sizes=lengths, capacity=8)
    assert np.bincount(parts.part_of, weights=lengths).max() <= 8
    with pytest.raises(InfeasiblePartitionError, match="any assignment needs at least 8 parts"):
        partition(lengths**exponent, 7, algorithm=partitioner, sizes=lengths, capacity=8)


def test_an_item_above_the_capacity_is_named_and_no_bin_is_ever_empty_pk_02(packer: str) -> None:
    with pytest.raises(ItemTooLargeError, match="item 1 has size 12 in column 0, above the capacity of 10") as caught:
        pack([5, 12, 3], capacity=10, algorithm=packer)
    assert (caught.value.index, caught.value.size, caught.value.capacity) == (1, 12, 10)
    assert "raise the capacity, or shrink or remove the item" in str(caught.value)
    # Each policy for such items is a call on what is left of them.
    dropped = pack([5, 3], capacity=10, algorithm=packer)
    truncated = pack([5, 10, 3], capacity=10, algorithm=packer)
    assert dropped.load.tolist() == [[8]]
    assert np.diff(truncated.offsets).min() > 0
    assert truncated.num_bins <= 3


def test_nothing_left_after_dropping_is_a_legal_packing_of_nothing_pk_04(packer: str) -> None:
    lengths = np.array([20, 30])
    result = pack(lengths[lengths <= 10], capacity=10, algorithm=packer)
    assert (result.num_bins, result.lower_bound, len(result.bin_of)) == (0, 0, 0)


def test_a_window_of_many_bins_is_filled_where_a_window_of_one_is_not_pk_05() -> None:
    random = np.random.Generator(np.random.Philox(5))
    lengths = random.normal(0.33 * 4096, 500, 3 * 64 * 8).astype(np.int64).clip(16, 4096)

    def fill(window: int) -> float:
        packed = [pack(lengths[start : start + window], capacity=4096) for start in range(0, len(lengths), window)]
        return lengths.sum() / (4096 * sum(result.num_bins for result in packed))

    assert fill(3 * 64) >= 0.95
    assert fill(3) < 0.85


def test_the_order_of_the_input_can_be_kept_pk_08() -> None:
    lengths = [4, 5, 3, 7, 2, 9, 1, 1]
    result = pack(lengths, capacity=10, algorithm="next_fit", num_bins_multiple=2)
    in_bins = [lengths[item] for index in range(result.num_bins) for item in result.items(index)]
    assert in_bins == lengths


def test_equal_counts_differ_by_at_most_one_for_any_number_of_items_bl_01(
    partitioner: str, most_items: MostItems
) -> None:
    weights = [(37 * index) % 53 for index in range(50)]
    for num_items in range(1, min(50, most_items(partition, partitioner)) + 1):
        for num_parts in range(1, 9):
            result = partition(weights[:num_items], num_parts, algorithm=partitioner, equal_count=True)
            counts = np.bincount(result.part_of, minlength=num_parts)
            assert counts.sum() == num_items
            assert counts.max() - counts.min() <= 1


def test_nine_items_on_four_parts_leave_none_empty_bl_02(partitioner: str) -> None:
    counts = np.bincount(partition([1] * 9, 4, algorithm=partitioner, equal_count=True).part_of, minlength=4)
    assert sorted(counts.tolist(), reverse=True) == [3, 2, 2, 2]
    for num_items in range(1, 20):
        for num_parts in range(1, num_items + 1):
            counts = np.bincount(partition([0] * num_items, num_parts, algorithm=partitioner).part_of)
            assert len(counts) == num_parts
            assert counts.min() >= 1


def test_six_bins_become_eight_by_splitting_where_a_multiple_of_four_is_needed_bl_04(packer: str) -> None:
    lengths = [6, 4, 5, 5, 7, 3, 8, 2, 9, 1, 6, 4]  # six full bins in pairs
    assert pack(lengths, capacity=10, algorithm=packer).num_bins == 6
    result = pack(lengths, capacity=10, algorithm=packer, num_bins_multiple=4)
    assert result.num_bins == result.lower_bound == 8
    assert np.diff(result.offsets).min() > 0
    assert result.load.max() <= 10
    few = pack([10] * 6, capacity=10, algorithm=packer, num_bins_multiple=4)  # six items cannot fill eight bins
    assert few.num_bins == 8
    assert np.diff(few.offsets).tolist() == [1] * 6 + [0] * 2


def test_equal_tokens_are_not_equal_time_bl_05(partitioner: str) -> None:
    lengths = np.array([1024, 512, 512, 1024, 512, 512])

    def cost(quadratic: int) -> np.ndarray:
        return 1000 * lengths + quadratic * lengths**2

    by_tokens = [[0, 3], [1, 2, 4, 5]]  # 2,048 tokens each, called balanced by their number
    linear, squared = ([int(cost(b)[part].sum()) for part in by_tokens] for b in (0, 1))
    assert linear[0] == linear[1]
    assert squared[0] > squared[1]
    result = partition(cost(1), 2, algorithm=partitioner, sizes=lengths, capacity=2048)
    assert result.makespan < max(squared)
    assert np.bincount(result.part_of, weights=lengths).max() <= 2048


def test_vision_work_is_balanced_beside_text_bl_07(partitioner: str) -> None:
    heavy, thumbnail = [8192, 4096], [64, 4096]
    result = partition([heavy, thumbnail] * 8, 2, algorithm=partitioner)
    assert (result.load.max(axis=0) / result.load.mean(axis=0)).max() < 1.1


def test_tokens_patches_and_items_have_a_ceiling_each_bl_11(packer: str) -> None:
    random = np.random.Generator(np.random.Philox(11))
    sizes = np.stack([random.integers(100, 4000, 22), 4 * random.integers(0, 1200, 22)], axis=1)
    result = pack(sizes, capacity=[8192, 8192], algorithm=packer, max_items_per_bin=5)
    assert (result.load <= 8192).all()
    assert np.diff(result.offsets).max() <= 5
    two = pack([[10, 4096], [10, 4100]], capacity=[8192, 8192], algorithm=packer)
    assert two.num_bins == 2
