"""Hard inputs for every algorithm: worst cases from the literature, degenerate ones, and the limits of the integers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from packing import pack, partition
from packing.inputs import IntArray

MostItems = Callable[[Callable[..., Any], str], int]
Check = Callable[..., None]


def random(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def johnson(scale: int) -> IntArray:
    """First- and best-fit-decreasing need 11 bins of 100 for every 9 (Johnson 1973): 51+26+23 and 27+27+23+23."""
    return np.repeat([51, 27, 26, 23], [6 * scale, 6 * scale, 6 * scale, 12 * scale])


def triplets(num_bins: int) -> IntArray:
    """Three items fill a bin of 1000 exactly, none is left (Falkenauer 1996)."""
    large = random(1).integers(380, 490, num_bins)
    middle = random(2).integers((1000 - large) // 2, 500)
    return np.concatenate([large, middle, 1000 - large - middle])


TALL, WIDE = [90, 0], [0, 90]

# name -> (sizes, capacity, least number of bins)
PACKINGS: dict[str, tuple[Any, Any, int]] = {
    "all equal": ([3] * 20, 10, 7),
    "all at capacity": ([8192] * 20, 8192, 20),
    "all one": ([1] * 20, 7, 3),
    "all zero": ([0] * 20, 7, 1),
    "capacity one": ([1, 0, 1, 0, 1], 1, 3),
    "one item": ([5], 5, 1),
    "one giant among ones": ([1000, *[1] * 19], 1000, 2),
    "just above half": ([51] * 20, 100, 20),
    "just above a third": ([34] * 20, 100, 10),
    "half and just above": ([50, 51] * 10, 100, 15),
    "zeros beside full bins": ([10, 0] * 10, 10, 10),
    "pairs that fit exactly": (list(range(1, 21)), 21, 10),
    "sorted up": (list(range(20)), 19, 10),
    "sorted down": (list(range(19, -1, -1)), 19, 10),
    "johnson": (johnson(1), 100, 9),
    "johnson, large": (johnson(20), 100, 180),
    "triplets": (triplets(7), 1000, 7),
    "triplets, large": (triplets(400), 1000, 400),
    "best fit closes the wrong bin": ([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 60, 3),
    "near 2**62": ([2**62 // 3] * 3, 2**62 // 3 * 2, 2),
    "one at 2**62": ([2**62], 2**62, 1),
    "halves of 2**62": ([2**61, 2**61 - 1, 1], 2**61, 2),
    "huge capacity": ([1, 2, 3], 2**61, 1),
    "huge capacity, several columns": ([[2**60, 1], [2**60, 2], [2**60, 3]], [2**61, 4], 2),
    "tall and wide": ([TALL, WIDE] * 10, [100, 100], 10),
    "tall, then wide": ([TALL] * 10 + [WIDE] * 10, [100, 100], 10),
    "full in one of two": ([[100, 0], [0, 100]] * 10, [100, 100], 10),
    "a column that never binds": ([[30, 1]] * 20, [90, 1000], 7),
    "four columns": (np.eye(4, dtype=np.int64).repeat(5, axis=0) * 7, [7] * 4, 5),
    "four columns at once": ([[1, 2, 3, 4]] * 20, [4, 8, 9, 20], 7),
    "columns of very different units": ([[2**40, 1], [2**40, 1], [2**40, 2]] * 3, [2**41, 3], 5),
    "zero in every column": ([[0, 0, 0]] * 20, [1, 1, 1], 1),
    "50,000 of one size": (np.full(50_000, 3), 8192, 19),
    "50,000 of one size in two columns": (np.full((50_000, 2), [3, 1]), [8192, 500], 100),
    "many distinct sizes": (random(3).permutation(4096) + 1, 8194, 1024),
}


# name -> (weights, num_parts, further arguments, least makespan)
PARTITIONS: dict[str, tuple[Any, int, dict[str, Any], int]] = {
    "all equal": ([3] * 20, 6, {}, 12),
    "all one": ([1] * 20, 20, {}, 1),
    "all zero": ([0] * 20, 7, {}, 0),
    "one part": ([5, 4, 3, 0], 1, {}, 12),
    "one item": ([5], 3, {}, 5),
    "fewer items than parts": ([5, 3], 4, {}, 5),
    "fewer items than parts, equal counts": ([5, 3], 4, {"equal_count": True}, 5),
    "as many items as parts": (list(range(1, 13)), 12, {}, 12),
    "one item more than parts": ([*range(6, 18), 6], 12, {}, 17),
    "one giant among ones": ([1000, *[1] * 19], 4, {}, 1000),
    "one giant, equal counts": ([1000, *[1] * 19], 4, {"equal_count": True}, 1004),
    "graham's worst case": ([9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 5], 5, {}, 15),
    "karmarkar and karp's": ([8, 7, 6, 5, 4], 2, {}, 15),
    "sorted up": (list(range(1, 21)), 10, {}, 21),
    "sorted down": (list(range(20, 0, -1)), 10, {}, 21),
    "powers of two": ([2**power for power in range(20)], 3, {}, 2**19),
    "near 2**62": ([2**62 // 4] * 4, 3, {}, 2**61),
    "one at 2**62": ([2**62, 0, 0], 2, {}, 2**62),
    "two stages that never meet": ([[9, 0], [0, 9]] * 8, 4, {}, 18),
    "a stage without work": ([[7, 0]] * 12, 4, {}, 21),
    "stages of very different units": ([[2**40, 1]] * 8, 4, {}, 2**41),
    "four stages": (np.eye(4, dtype=np.int64).repeat(4, axis=0) * 5, 4, {}, 5),
    "zeros and giants": ([0] * 10 + [10**9] * 3, 3, {}, 10**9),
    "zeros and giants, equal counts": ([0] * 9 + [10**9] * 3, 3, {"equal_count": True}, 10**9),
    "capacity that forces a bad makespan": ([9, 8, 1, 1, 1], 2, {"sizes": [3, 3, 6, 4, 4], "capacity": 10}, 18),
    "every part full": ([4, 3, 2, 1], 4, {"sizes": [8] * 4, "capacity": 8}, 4),
    "sizes of zero": ([4, 3, 2, 1], 2, {"sizes": [0] * 4, "capacity": 1}, 5),
    "capacity near 2**62": ([1] * 4, 2, {"sizes": [2**60] * 4, "capacity": 2**61}, 2),
    "tall and wide": ([1] * 20, 10, {"sizes": [TALL, WIDE] * 10, "capacity": [100, 100]}, 2),
    "four capacities": ([1] * 16, 4, {"sizes": np.eye(4, dtype=np.int64).repeat(4, axis=0), "capacity": [1] * 4}, 4),
    "50,000 of one weight": (np.full(50_000, 3), 64, {}, 2346),
    "50,000 of one weight, equal counts": (np.full(50_000, 3), 64, {"equal_count": True}, 2346),
    "50,000 of one weight in two stages": (np.full((50_000, 2), [3, 1]), 64, {}, 2346),
    "many distinct weights": (random(4).permutation(4096) + 1, 64, {}, 131_104),
}


def skip_if_too_many(values: Any, most: int) -> None:
    if len(values) > most:
        pytest.skip(f"the algorithm takes at most {most} items")


@pytest.mark.parametrize("name", PACKINGS)
def test_hard_packings_are_legal_and_within_the_factor_of_any_rule(
    packer: str, name: str, most_items: MostItems, check_packing: Check
) -> None:
    sizes, capacity, best = PACKINGS[name]
    skip_if_too_many(sizes, most_items(pack, packer))
    result = pack(sizes, capacity=capacity, algorithm=packer)
    check_packing(result, sizes, capacity)
    assert result.lower_bound <= best <= result.num_bins <= max(1, 2 * result.load.shape[1] * best - 1)


@pytest.mark.parametrize("name", [name for name, case in PACKINGS.items() if np.ndim(case[1]) == 0])
def test_the_default_stays_within_eleven_ninths_on_hard_packings(name: str) -> None:
    sizes, capacity, best = PACKINGS[name]
    assert pack(sizes, capacity=capacity).num_bins <= (11 * best + 6) // 9


@pytest.mark.parametrize("name", [name for name, case in PACKINGS.items() if len(case[0]) < 50_000])
@pytest.mark.parametrize("most", [1, 2, 7])
def test_hard_packings_with_a_limit_on_items(
    packer: str, name: str, most: int, most_items: MostItems, check_packing: Check
) -> None:
    sizes, capacity, best = PACKINGS[name]
    skip_if_too_many(sizes, most_items(pack, packer))
    result = pack(sizes, capacity=capacity, algorithm=packer, max_items_per_bin=most, num_bins_multiple=3)
    assert result.num_bins % 3 == 0
    assert np.diff(result.offsets).max() <= most
    assert (result.load <= capacity).all()
    assert sorted(result.order.tolist()) == list(range(len(sizes)))
    assert result.num_bins >= result.lower_bound >= max(-(-len(sizes) // most), 1)
    assert best <= result.num_bins


@pytest.mark.parametrize("name", PARTITIONS)
def test_hard_partitions_are_legal_and_no_better_than_the_optimum(
    partitioner: str, name: str, most_items: MostItems, check_partition: Check
) -> None:
    weights, num_parts, options, best = PARTITIONS[name]
    skip_if_too_many(weights, most_items(partition, partitioner))
    result = partition(weights, num_parts, algorithm=partitioner, **options)
    check_partition(result, weights, num_parts, **options)
    assert result.lower_bound <= best <= result.makespan
    if not options:
        assert result.makespan <= 2 * result.load.shape[1] * best


@pytest.mark.parametrize("name", PARTITIONS)
def test_auto_is_within_one_percent_on_hard_partitions(name: str, check_partition: Check) -> None:
    weights, num_parts, options, best = PARTITIONS[name]
    result = partition(weights, num_parts, **options)
    check_partition(result, weights, num_parts, **options)
    assert best <= result.makespan <= best + best // 100


def test_graham_s_family_is_the_worst_of_lpt() -> None:
    for num_parts in (2, 3, 5, 8):
        weights = [*np.repeat(np.arange(2 * num_parts - 1, num_parts, -1), 2).tolist(), *[num_parts] * 3]
        assert sum(weights) == 3 * num_parts * num_parts
        assert partition(weights, num_parts, algorithm="lpt").makespan == 4 * num_parts - 1


def test_johnson_s_family_costs_the_decreasing_rules_two_ninths_more() -> None:
    assert pack(johnson(20), capacity=100, algorithm="best_fit_decreasing").num_bins == 220
