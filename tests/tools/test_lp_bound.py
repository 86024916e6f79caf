"""The column-generation bound: never above the optimum, above the simple bound where that is loose, always valid."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.bin_bounds import packing_bound
from packing.errors import ItemTooLargeError
from tools.benchmarks.lp_bound import lp_bound


def optimum(sizes: Sequence[Sequence[int]], capacity: Sequence[int]) -> int:
    """Fewest bins by exhaustive search."""
    best = len(sizes)

    def place(item: int, free: list[list[int]]) -> None:
        nonlocal best
        if len(free) >= best:
            return
        if item == len(sizes):
            best = len(free)
            return
        for index in range(len(free) + 1):
            room = free[index] if index < len(free) else list(capacity)
            left = [have - need for have, need in zip(room, sizes[item], strict=True)]
            if min(left) >= 0:
                place(item + 1, [*free[:index], left, *free[index + 1 :]])

    place(0, [])
    return best


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    capacity = draw(st.lists(st.integers(2, 15), min_size=1, max_size=3))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    return draw(st.lists(row, min_size=1, max_size=7)), capacity


@settings(max_examples=60, deadline=None)
@given(case=cases(), max_rounds=st.integers(1, 4), max_nodes=st.integers(1, 200))
def test_the_bound_is_never_above_the_optimum_however_early_it_stops(
    case: tuple[list[list[int]], list[int]], max_rounds: int, max_nodes: int
) -> None:
    sizes, capacity = case
    best = optimum(sizes, capacity)
    early = lp_bound(np.array(sizes), capacity=capacity, max_rounds=max_rounds, max_nodes=max_nodes)
    full = lp_bound(np.array(sizes), capacity=capacity)
    assert packing_bound(np.array(sizes), np.array(capacity)) <= early.num_bins <= best
    assert full.num_bins <= best
    assert early.value <= best + 1e-6
    assert full.value <= full.linear_value * (1 + 1e-6)


@pytest.mark.parametrize(
    ("sizes", "capacity", "num_bins"),
    [
        ([[6], [6], [6], [4]], [10], 3),
        ([[4]] * 7, [10], 4),  # two a bin: 3.5 bins, where the sum asks for 2.8
        ([[4, 1]] * 7, [10, 9], 4),
        ([[1, 0]] * 3 + [[0, 1]] * 3, [1, 1], 3),
        ([[3, 3], [3, 3], [5, 1], [1, 5]], [6, 6], 2),
        ([[2, 1], [2, 1], [2, 1], [1, 2], [1, 2], [1, 2]], [3, 3], 3),
        ([[7]], [7], 1),
        ([[0]] * 4, [5], 1),
    ],
)
def test_known_optima_are_reached(sizes: list[list[int]], capacity: list[int], num_bins: int) -> None:
    assert lp_bound(np.array(sizes), capacity=capacity).num_bins == num_bins


def test_large_items_that_waste_the_other_capacity_raise_the_bound() -> None:
    # Ten items fill the tokens alone and take one image; the twenty others need five images a bin.
    sizes = np.array([[100, 1]] * 10 + [[10, 1]] * 20)
    assert packing_bound(sizes, np.array([100, 4])) == 12
    assert lp_bound(sizes, capacity=[100, 4]).num_bins == 15


def test_tables_too_large_for_exact_steps_still_give_valid_and_close_bounds() -> None:
    random = np.random.Generator(np.random.Philox(1))
    pieces = np.diff(np.sort(random.integers(1, 10**6, (30, 3)), axis=1), prepend=0, append=10**6, axis=1)
    other = np.diff(np.sort(random.integers(1, 10**7, (30, 3)), axis=1), prepend=0, append=10**7, axis=1)
    sizes = np.stack([pieces.ravel(), other.ravel()], axis=1)  # 30 bins, all full
    result = lp_bound(sizes, capacity=[10**6, 10**7], max_rounds=5)
    assert result.num_bins == 30
    assert 29.9 < result.value <= 30 + 1e-6


def test_capacities_near_the_integer_limit_do_not_wrap() -> None:
    huge = 2**59
    assert lp_bound(np.array([[huge, 1], [huge, 1], [huge, 2]]), capacity=[2 * huge, 4]).num_bins == 2
    assert lp_bound(np.array([[huge, huge]] * 7), capacity=[2 * huge + 1, 2 * huge + 3]).num_bins == 4


def test_no_items_need_no_bins_and_oversize_items_are_errors() -> None:
    assert lp_bound(np.zeros((0, 2), np.int64), capacity=[3, 4]).num_bins == 0
    with pytest.raises(ItemTooLargeError, match="item 0 has size 5"):
        lp_bound([5], capacity=4)


def test_random_instances_match_the_optimum_mostly() -> None:
    random = np.random.Generator(np.random.Philox(2))
    hits = 0
    for _ in range(25):
        sizes = random.integers(1, 9, (7, 2))
        hits += lp_bound(sizes, capacity=[10, 10]).num_bins == optimum(sizes.tolist(), [10, 10])
    assert hits >= 23
