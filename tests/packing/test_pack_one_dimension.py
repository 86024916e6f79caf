"""One dimension: runs of equal sizes, first-fit, exact fill, patterns, splitting, and the limit on the item count."""

from collections.abc import Callable

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import pack
from packing.bin_bounds import packing_bound
from packing.column_generation import best_patterns
from packing.completion import NUMBER, RANK, complete
from packing.inputs import IntArray, PartArray
from packing.packers.auto import auto as pack_auto
from packing.packers.best_fit import best_fit_decreasing
from packing.packers.exact_fill import exact_fill
from packing.packers.first_fit import first_fit, first_fit_decreasing
from packing.packers.next_fit import next_fit
from packing.packers.pattern_fill import pattern_fill
from packing.problem import PackProblem
from packing.scoring import score_terms, scores
from packing.size_classes import size_classes

Packer = Callable[[PackProblem], tuple[PartArray, int]]
SEARCHING: list[Packer] = [exact_fill, pattern_fill, pack_auto]
PACKERS: list[Packer] = [best_fit_decreasing, first_fit, first_fit_decreasing, *SEARCHING]

quick = settings(max_examples=60, deadline=None)
sizes_and_capacity = st.sampled_from([1, 2, 7, 30, 64, 1000]).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=50), st.just(capacity))
)


def problem(sizes: object, capacity: object, *, gap: float = 0.0) -> PackProblem:
    limits = np.atleast_1d(np.asarray(capacity, np.int64))
    table = np.array(sizes, np.int64).reshape(-1, limits.shape[0])
    bound = packing_bound(table, limits)
    return PackProblem(sizes=table, capacity=limits, lower_bound=bound, enough=bound + int(bound * gap))


def check(instance: PackProblem, packing: tuple[PartArray, int]) -> int:
    """Every item in a bin, no bin empty or too full; the number of bins."""
    bin_of, num_bins = packing
    assert bin_of.dtype == np.int32
    assert bin_of.shape == (instance.num_items,)
    assert sorted(set(bin_of.tolist())) == list(range(num_bins))
    load = np.zeros((num_bins, instance.sizes.shape[1]), np.int64)
    np.add.at(load, bin_of, instance.sizes)
    assert (load <= instance.capacity).all()
    return num_bins


def internvl_like(num_items: int, seed: int = 0) -> IntArray:
    """Tiles of 256 tokens and a little text: few distinct large sizes."""
    random = np.random.Generator(np.random.Philox(seed))
    tiles = random.choice([1, 3, 5, 7], num_items, p=[0.1, 0.35, 0.5, 0.05])
    return 256 * tiles + random.geometric(1 / 70, num_items)


@pytest.mark.parametrize("algorithm", PACKERS)
@quick
@given(case=sizes_and_capacity)
@example(case=([0, 0, 0], 5))
@example(case=([], 5))
def test_every_item_is_packed_and_no_bin_is_too_full_or_empty(algorithm: Packer, case: tuple[list[int], int]) -> None:
    instance = problem(*case)
    assert check(instance, algorithm(instance)) >= instance.lower_bound


@pytest.mark.parametrize("algorithm", SEARCHING)
@quick
@given(case=sizes_and_capacity, factor=st.sampled_from([1, 2**24, 2**50]))
def test_a_searching_packer_never_needs_more_bins_than_best_fit(
    algorithm: Packer, case: tuple[list[int], int], factor: int
) -> None:
    sizes, capacity = case
    instance = problem([size * factor for size in sizes], capacity * factor)
    assert check(instance, algorithm(instance)) <= best_fit_decreasing(instance)[1]


@pytest.mark.parametrize("algorithm", PACKERS)
@pytest.mark.parametrize("capacity", [1, 2, 4096, 2**22, 2**22 + 1, 2**40, 2**61])
def test_uniform_sizes_are_packed_optimally(algorithm: Packer, capacity: int) -> None:
    for sizes in ([capacity] * 2, [1] * 70, [0] * 5, [capacity // 2 + 1], [capacity - 1, 1, 0]):
        instance = problem(sizes, capacity)
        assert check(instance, algorithm(instance)) == instance.lower_bound


@quick
@given(data=st.data(), num_columns=st.integers(1, 3))
def test_first_fit_is_the_first_bin_that_takes_the_item(data: st.DataObject, num_columns: int) -> None:
    capacity = data.draw(st.lists(st.integers(1, 15), min_size=num_columns, max_size=num_columns))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    instance = problem(data.draw(st.lists(row, max_size=40)), capacity)
    score = scores(instance.sizes, *score_terms(instance.sizes, instance.capacity))
    decreasing = np.argsort(-score, kind="stable").tolist()
    for packer, order in ((first_fit, list(range(instance.num_items))), (first_fit_decreasing, decreasing)):
        free: list[IntArray] = []
        expected = np.zeros(instance.num_items, np.int32)
        for item in order:
            fitting = [index for index, room in enumerate(free) if (instance.sizes[item] <= room).all()]
            if not fitting:
                fitting = [len(free)]
                free.append(instance.capacity.copy())
            free[fitting[0]] -= instance.sizes[item]
            expected[item] = fitting[0]
        bin_of, num_bins = packer(instance)
        assert bin_of.tolist() == expected.tolist()
        assert num_bins == len(free)


@numba.njit  # what only kernels may call is called by one
def _search(  # noqa: PLR0917  as `complete`
    values: IntArray,
    left: IntArray,
    skip: IntArray,
    table: IntArray,
    first: int,
    room: int,
    max_nodes: int,
    picks: IntArray,
    trial: IntArray,
) -> tuple[int, int, int]:
    return complete(values, left, skip, table, first, room, max_nodes, picks, trial)


@quick
@given(case=st.tuples(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 60)), tabled=st.booleans())
def test_a_completion_with_enough_nodes_is_the_fullest_there_is(case: tuple[list[int], int], tabled: bool) -> None:
    sizes, room = case
    classes = size_classes(np.array(sizes, np.int64), 100)
    num_sizes = classes.values.shape[0]
    left = np.append(classes.count, 1)
    before = left.copy()
    picks, trial = np.zeros((num_sizes + 1, 2), np.int64), np.zeros((num_sizes + 1, 2), np.int64)
    table = classes.table if tabled else np.empty(0, np.int64)

    num_picks, free, nodes = _search(
        classes.values, left, np.arange(1, num_sizes + 2), table, 0, room, 10**6, picks, trial
    )
    reachable = {0}
    for size in sizes:
        reachable |= {total + size for total in reachable if total + size <= room}
    assert room - free == max(reachable)
    assert sum(classes.values[rank] * number for rank, number in picks[:num_picks].tolist()) == room - free
    assert (picks[:num_picks, NUMBER] <= left[picks[:num_picks, RANK]]).all()
    assert (left == before).all()
    assert nodes >= 1


def test_patterns_of_the_linear_program_serve_the_demand_without_waste_where_that_is_possible() -> None:
    weights, demand = np.array([6, 5, 4], np.int64), np.array([30, 11, 30], np.int64)
    patterns, amount = best_patterns(weights, demand, 10, 100)
    assert (patterns @ weights <= 10).all()
    assert amount @ patterns == pytest.approx(demand)
    assert amount.sum() == pytest.approx(35.5)  # 30 of [6 4] and 5.5 of [5 5]


def test_the_linear_program_may_stop_at_any_time() -> None:
    weights, demand = np.array([6, 5, 4, 3], np.int64), np.array([30, 11, 30, 7], np.int64)
    fewest = np.inf
    for max_pivots in range(6):
        patterns, amount = best_patterns(weights, demand, 10, max_pivots)
        assert amount @ patterns == pytest.approx(demand)
        assert amount.sum() <= fewest + 1e-9
        fewest = amount.sum()


@pytest.mark.parametrize(("capacity", "most"), [(4096, 1.01), (8192, 1.002)])
def test_few_large_sizes_are_packed_close_to_the_bound_by_patterns(capacity: int, most: float) -> None:
    instance = problem(internvl_like(30_000), capacity)
    best_fit = check(instance, best_fit_decreasing(instance))
    exact = check(instance, exact_fill(instance))
    patterns = check(instance, pattern_fill(instance))
    assert patterns < exact <= best_fit
    assert patterns <= most * instance.lower_bound < best_fit


def test_exact_fill_closes_the_gap_that_best_fit_leaves_where_small_sizes_are_plenty() -> None:
    sizes = np.random.Generator(np.random.Philox(1)).lognormal(6.5, 1.2, 20_000).astype(np.int64).clip(1, 4096)
    instance = problem(sizes, 4096)
    assert check(instance, exact_fill(instance)) <= 1.0005 * instance.lower_bound


def test_a_searching_packer_stops_when_best_fit_is_good_enough() -> None:
    instance = problem(internvl_like(2_000), 4096, gap=0.5)
    expected = best_fit_decreasing(instance)
    for packer in SEARCHING:
        bin_of, num_bins = packer(instance)
        assert num_bins == expected[1]
        assert (bin_of == expected[0]).all()


@pytest.mark.parametrize("algorithm", [best_fit_decreasing, *SEARCHING])
def test_more_than_the_packing_of_equal_items_does_not_depend_on_their_order(algorithm: Packer) -> None:
    sizes = internvl_like(3_000)
    order = np.random.Generator(np.random.Philox(2)).permutation(sizes.shape[0])
    loads = []
    for table in (sizes, sizes[order]):
        bin_of, num_bins = algorithm(problem(table, 4096))
        loads.append(np.bincount(bin_of, weights=table, minlength=num_bins).tolist())
    assert loads[0] == loads[1]


@pytest.mark.parametrize("algorithm", SEARCHING)
def test_results_are_the_same_again(algorithm: Packer) -> None:
    instance = problem(internvl_like(5_000), 4096)
    assert (algorithm(instance)[0] == algorithm(instance)[0]).all()


def test_a_limit_on_the_items_that_does_not_bind_leaves_the_packing_alone() -> None:
    sizes = internvl_like(2_000)
    free = pack(sizes, capacity=4096)
    most = int(np.diff(free.offsets).max())
    assert (pack(sizes, capacity=4096, max_items_per_bin=most).bin_of == free.bin_of).all()
    tight = pack(sizes, capacity=4096, max_items_per_bin=most - 1)
    assert np.diff(tight.offsets).max() <= most - 1


def test_bins_are_split_where_they_are_fullest_also_when_many_are_missing() -> None:
    sizes = np.random.Generator(np.random.Philox(6)).integers(1, 9, 4_000)
    plain = pack(sizes, capacity=64)
    split = pack(sizes, capacity=64, num_bins_multiple=plain.num_bins + 100)
    assert split.num_bins == plain.num_bins + 100
    assert (np.diff(split.offsets) > 0).all()
    halved = np.sort(split.load[:, 0])[:200]
    assert halved.max() <= 32 + 4  # a hundred full bins became two halves each


def test_a_multiple_far_above_the_items_leaves_the_rest_empty() -> None:
    result = pack([0, 0, 0, 3, 0, 1], capacity=4, num_bins_multiple=10)
    assert result.num_bins == 10
    assert np.diff(result.offsets).tolist() == [1] * 6 + [0] * 4


@quick
@given(case=sizes_and_capacity)
def test_auto_never_needs_more_bins_than_any_other_packer(case: tuple[list[int], int]) -> None:
    instance = problem(*case)
    assert check(instance, pack_auto(instance)) <= min(packer(instance)[1] for packer in [*PACKERS, next_fit])


@quick
@given(
    case=st.integers(1, 15).flatmap(
        lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=8), st.just(capacity))
    )
)
@example(case=([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], 60))
def test_auto_is_optimal_for_a_few_items(exact_bins: Callable[..., int], case: tuple[list[int], int]) -> None:
    sizes, capacity = case
    assert pack_auto(problem(sizes, capacity))[1] == exact_bins([[size] for size in sizes], [capacity])
