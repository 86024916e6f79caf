"""`pack`: conservation, hard capacities, quality against the exact optimum, order, splitting, determinism."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import ItemTooLargeError, PackResult, bin_lower_bound, pack
from packing.packers.best_fit import _best_fit_scalar
from packing.packers.vector_fit import best_fit_vector
from packing.registry import PACKERS

ALGORITHMS = sorted(PACKERS)
quick = settings(max_examples=60, deadline=None)

one_dimension = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=40), st.just(capacity))
)
small = st.integers(1, 12).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=8), st.just(capacity))
)


@st.composite
def several_dimensions(draw: st.DrawFn, max_items: int = 30) -> tuple[list[list[int]], list[int]]:
    capacity = draw(st.lists(st.integers(1, 40), min_size=2, max_size=3))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    return draw(st.lists(row, max_size=max_items)), capacity


def check(result: PackResult, sizes: object, capacity: object) -> None:
    """What holds for every packing: each item once, every view consistent, no capacity exceeded, no empty bin."""
    table = np.asarray(sizes, np.int64).reshape(len(result.bin_of), -1 if len(result.bin_of) else result.load.shape[1])
    limits = np.atleast_1d(np.asarray(capacity))
    assert sorted(result.order.tolist()) == list(range(len(table)))
    assert result.offsets[0] == 0
    assert result.offsets[-1] == len(table)
    for index in range(result.num_bins):
        items = result.items(index)
        assert (np.diff(items) > 0).all()
        assert (result.bin_of[items] == index).all()
        assert (result.load[index] == table[items].sum(axis=0)).all()
        assert len(items) > 0
    assert (result.load <= limits).all()
    assert result.lower_bound <= result.num_bins
    assert result.gap == (result.num_bins / result.lower_bound - 1 if len(table) else 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@quick
@given(case=one_dimension)
def test_every_item_is_packed_once_and_no_bin_exceeds_the_capacity(algorithm: str, case: tuple[list[int], int]) -> None:
    sizes, capacity = case
    check(pack(sizes, capacity=capacity, algorithm=algorithm), sizes, capacity)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@quick
@given(case=several_dimensions(), most=st.none() | st.integers(1, 5))
def test_every_dimension_and_the_item_count_are_hard_limits(
    algorithm: str, case: tuple[list[list[int]], list[int]], most: int | None
) -> None:
    sizes, capacity = case
    table = np.array(sizes, np.int64).reshape(len(sizes), len(capacity))
    result = pack(table, capacity=capacity, algorithm=algorithm, max_items_per_bin=most)
    check(result, table, capacity)
    assert most is None or np.diff(result.offsets).max(initial=0) <= most


@quick
@given(case=small)
@example(case=([6, 5, 4, 3, 2], 10))
def test_best_fit_decreasing_stays_within_its_proven_factor(
    exact_bins: Callable[..., int], case: tuple[list[int], int]
) -> None:
    sizes, capacity = case
    best = exact_bins([[size] for size in sizes], [capacity])
    found = pack(sizes, capacity=capacity).num_bins
    assert best <= found <= (11 * best + 6) // 9
    assert pack(sizes, capacity=capacity, algorithm="next_fit").num_bins <= max(2 * best - 1, best)


@quick
@given(case=several_dimensions(max_items=7))
def test_no_packing_beats_the_optimum_in_several_dimensions(
    exact_bins: Callable[..., int], case: tuple[list[list[int]], list[int]]
) -> None:
    sizes, capacity = case
    table = np.array(sizes, np.int64).reshape(len(sizes), len(capacity))
    best = exact_bins(sizes, capacity)
    result = pack(table, capacity=capacity)
    assert result.lower_bound <= best <= result.num_bins <= max(len(capacity) * best + 1, best)


@quick
@given(case=one_dimension)
@example(case=([5, 5, 5, 0, 0, 3, 2, 2], 5))
def test_one_dimension_gives_the_same_bins_through_the_scalar_and_the_vector_route(
    case: tuple[list[int], int],
) -> None:
    sizes, capacity = case
    table = np.array(sizes, np.int64)
    scalar, num_scalar = _best_fit_scalar(table, capacity)
    vector, num_vector = best_fit_vector(table.reshape(-1, 1), np.array([capacity], np.int64))
    assert num_scalar == num_vector
    assert scalar.tolist() == vector.tolist()


def test_the_two_routes_agree_on_a_large_set_too() -> None:
    sizes = np.random.Generator(np.random.Philox(1)).lognormal(6.5, 1.0, 20_000).astype(np.int64).clip(1, 8192)
    scalar, num_scalar = _best_fit_scalar(sizes, 8192)
    vector, num_vector = best_fit_vector(sizes.reshape(-1, 1), np.array([8192], np.int64))
    assert num_scalar == num_vector
    assert (scalar == vector).all()
    assert pack(sizes, capacity=8192).gap < 0.001


@quick
@given(case=one_dimension, multiple=st.integers(1, 9))
def test_next_fit_keeps_the_input_order_also_when_bins_are_split(case: tuple[list[int], int], multiple: int) -> None:
    sizes, capacity = case
    result = pack(sizes, capacity=capacity, algorithm="next_fit", num_bins_multiple=multiple)
    assert result.order.tolist() == list(range(len(sizes)))
    assert (np.diff(result.bin_of) >= 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@quick
@given(case=one_dimension, multiple=st.integers(1, 9))
def test_a_multiple_of_bins_is_reached_by_splitting_and_no_bin_is_empty_unless_items_are_too_few(
    algorithm: str, case: tuple[list[int], int], multiple: int
) -> None:
    sizes, capacity = case
    result = pack(sizes, capacity=capacity, algorithm=algorithm, num_bins_multiple=multiple)
    plain = pack(sizes, capacity=capacity, algorithm=algorithm)
    assert result.num_bins == -(-plain.num_bins // multiple) * multiple
    assert result.lower_bound % multiple == 0
    filled = (np.diff(result.offsets) > 0).sum()
    assert filled == min(result.num_bins, len(sizes))
    if filled == result.num_bins:
        check(result, sizes, capacity)


def test_splitting_halves_the_fullest_bins() -> None:
    result = pack([10, 4, 3, 2, 1], capacity=10, num_bins_multiple=4)  # bins {10} {4 3 2 1} before
    assert result.load[:, 0].tolist() == [10, 4, 3, 3]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_capacity_is_never_an_average_pk_01(algorithm: str) -> None:
    result = pack([7] * 8, capacity=8, algorithm=algorithm)
    assert result.num_bins == 8
    assert result.load.max() <= 8


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_oversize_item_is_an_error_that_names_it_pk_02(algorithm: str) -> None:
    with pytest.raises(ItemTooLargeError, match="item 1 has size 12 in column 0, above the capacity of 10") as caught:
        pack([5, 12, 3], capacity=10, algorithm=algorithm)
    assert (caught.value.index, caught.value.size, caught.value.capacity, caught.value.column) == (1, 12, 10, 0)
    result = pack([5, 3], capacity=10, algorithm=algorithm)
    assert result.num_bins == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 1024, 1025, 2**22, 2**61])
def test_uniform_inputs_are_packed_optimally(algorithm: str, capacity: int) -> None:
    assert pack([capacity] * 3 if capacity < 2**61 else [capacity] * 2, capacity=capacity, algorithm=algorithm).gap == 0
    ones = pack([1] * 70, capacity=capacity, algorithm=algorithm)
    assert ones.num_bins == -(-70 // capacity)
    assert pack([0] * 5, capacity=capacity, algorithm=algorithm).num_bins == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_items_need_no_bins(algorithm: str) -> None:
    result = pack([], capacity=10, algorithm=algorithm, num_bins_multiple=4)
    assert (result.num_bins, result.lower_bound, result.gap) == (0, 0, 0)
    assert result.load.shape == (0, 1)
    assert result.fill.tolist() == [0]
    assert pack(np.zeros((0, 2), np.int64), capacity=[3, 4], algorithm=algorithm).load.shape == (0, 2)


def test_sizes_near_the_integer_limit_do_not_wrap() -> None:
    huge = 2**60
    for algorithm in ALGORITHMS:
        result = pack([huge, huge, huge, 1], capacity=2 * huge, algorithm=algorithm)
        assert result.num_bins == 2
        assert result.load.max() == 2 * huge
    both = pack([[huge, 1], [huge, 1], [huge, 3]], capacity=[2 * huge, 3])
    assert both.num_bins == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_items_in_another_order_give_the_same_loads(algorithm: str) -> None:
    sizes = [3, 3, 5, 2, 2, 5, 3]
    again = [*sizes]
    again[0], again[1] = again[1], again[0]
    assert (
        pack(sizes, capacity=8, algorithm=algorithm).bin_of.tolist()
        == pack(again, capacity=8, algorithm=algorithm).bin_of.tolist()
    )


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


def test_results_are_read_only_and_inputs_are_untouched() -> None:
    sizes = np.array([4, 3, 2], np.int64)
    sizes.setflags(write=False)
    result = pack(sizes, capacity=5)
    for array in (result.bin_of, result.load, result.order, result.offsets, result.fill):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert (result.bin_of.dtype, result.order.dtype, result.load.dtype) == (np.int32, np.int64, np.int64)
    mutable = np.array([4, 3, 2], np.int64)
    pack(mutable, capacity=5)
    mutable[0] = 1  # still the caller's own


def test_the_bound_of_a_packing_is_the_public_bound() -> None:
    sizes = [6, 6, 6, 5, 5]
    assert pack(sizes, capacity=10).lower_bound == bin_lower_bound(sizes, capacity=10) == 4
