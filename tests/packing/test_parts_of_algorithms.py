"""The pieces below the public functions: bitset, grouping, scores, refinement, evening out of counts, the decorator."""

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packing.grouping import group_by_bin
from packing.inputs import IntArray
from packing.makespan_bounds import partition_bound
from packing.packers.best_fit import best_fit_decreasing
from packing.partitioners.karmarkar_karp import karmarkar_karp
from packing.partitioners.lpt import lpt
from packing.partitioners.multifit import multifit
from packing.partitioners.order import ascending, descending
from packing.partitioners.refine import _settle, refine
from packing.partitioners.within_capacity import _even_out
from packing.problem import PackProblem, PartitionProblem
from packing.scoring import score_terms, scores

quick = settings(max_examples=60, deadline=None)


def problem(
    weights: list[list[int]],
    num_parts: int,
    *,
    sizes: list[list[int]] | None = None,
    capacity: list[int] | None = None,
    equal_count: bool = False,
) -> PartitionProblem:
    table = np.array(weights, np.int64)
    bound = partition_bound(table, num_parts, equal_count)
    return PartitionProblem(
        weights=table,
        num_parts=num_parts,
        sizes=np.array(sizes, np.int64) if sizes else np.empty((len(weights), 0), np.int64),
        capacity=np.array(capacity or [], np.int64),
        equal_count=equal_count,
        lower_bound=bound,
        enough=bound,
    )


def reference_best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing as one would write it on a board; the bin touched last wins a tie."""
    bin_of = [0] * len(sizes)
    free: list[int] = []
    touched: list[int] = []
    for turn, item in enumerate(sorted(range(len(sizes)), key=lambda index: -sizes[index])):
        fitting = [index for index, room in enumerate(free) if room >= sizes[item]]
        if not fitting:
            free.append(capacity)
            touched.append(turn)
            fitting = [len(free) - 1]
        chosen = min(fitting, key=lambda index: (free[index], -touched[index]))
        free[chosen] -= sizes[item]
        touched[chosen] = turn
        bin_of[item] = chosen
    return bin_of


@quick
@given(
    case=st.sampled_from([1, 2, 31, 32, 33, 63, 64, 1023, 1024, 1025, 5000]).flatmap(
        lambda capacity: st.tuples(st.lists(st.integers(0, capacity), max_size=60), st.just(capacity))
    )
)
def test_best_fit_equals_the_textbook_rule_at_every_size_of_the_bitset(case: tuple[list[int], int]) -> None:
    sizes, capacity = case
    bin_of, num_bins = best_fit_decreasing(
        PackProblem(
            sizes=np.array(sizes, np.int64).reshape(-1, 1),
            capacity=np.array([capacity], np.int64),
            lower_bound=0,
            enough=0,
        )
    )
    assert bin_of.tolist() == reference_best_fit(sizes, capacity)
    assert num_bins == max(bin_of, default=-1) + 1


def test_grouping_lists_items_in_ascending_order_and_sums_loads() -> None:
    order, offsets, load = group_by_bin(np.array([1, 0, 1, 2], np.int32), np.array([[4], [3], [2], [1]], np.int64), 4)
    assert order.tolist() == [1, 0, 2, 3]
    assert offsets.tolist() == [0, 1, 3, 4, 4]
    assert load[:, 0].tolist() == [3, 6, 1, 0]


@quick
@given(
    capacity=st.lists(st.integers(1, 2**58), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_score_is_monotone_in_every_dimension_and_never_wraps(capacity: list[int], data: st.DataObject) -> None:
    rows = st.lists(st.tuples(*(st.integers(0, limit) for limit in capacity)), min_size=1, max_size=6)
    sizes = np.array(data.draw(rows), np.int64)
    limits = np.array(capacity, np.int64)
    shift, weight = score_terms(sizes, limits)
    values = scores(sizes, shift, weight)
    full = scores(limits.reshape(1, -1), shift, weight)[0]
    exact = [
        sum((int(size) >> int(cut)) * int(factor) for size, cut, factor in zip(row, shift, weight, strict=True))
        for row in sizes
    ]
    assert values.tolist() == exact
    assert (values >= 0).all()
    assert (values <= full).all()
    assert full < 2**62


def test_the_scarce_dimension_dominates_the_score() -> None:
    sizes = np.array([[1, 9], [9, 1], [1, 9], [1, 9]], np.int64)
    values = scores(sizes, *score_terms(sizes, np.array([10, 10], np.int64)))
    assert values[0] > values[1]


@quick
@given(
    weights=st.lists(st.lists(st.integers(0, 40), min_size=2, max_size=2), min_size=1, max_size=24),
    num_parts=st.integers(1, 5),
    data=st.data(),
)
def test_refinement_never_raises_the_makespan_of_any_start(
    weights: list[list[int]], num_parts: int, data: st.DataObject
) -> None:
    parts = st.lists(st.integers(0, num_parts - 1), min_size=len(weights), max_size=len(weights))
    start = np.array(data.draw(parts), np.int32)
    before = start.copy()
    instance = problem(weights, num_parts)
    refined = refine(instance, start)
    loads = [group_by_bin(part_of, instance.weights, num_parts)[2].max() for part_of in (start, refined)]
    assert loads[1] <= loads[0]
    assert (start == before).all()


def test_refinement_keeps_equal_counts_by_swapping() -> None:
    weights = [[9], [8], [1], [2]]
    refined = refine(problem(weights, 2, equal_count=True), np.array([0, 0, 1, 1], np.int32))
    assert sorted(np.bincount(refined)) == [2, 2]
    assert {refined[0] == refined[2], refined[1] == refined[3]} == {True}


def test_refinement_lowers_two_stages_that_peak_in_different_parts() -> None:
    weights = [[5, 0], [5, 0], [0, 5], [0, 5]]
    refined = refine(problem(weights, 2), np.array([0, 0, 1, 1], np.int32))
    assert group_by_bin(refined, np.array(weights, np.int64), 2)[2].tolist() == [[5, 5], [5, 5]]


def test_refinement_respects_a_capacity_that_forbids_the_best_exchange() -> None:
    weights, sizes = [[4], [4], [1]], [[1], [1], [9]]
    refined = refine(problem(weights, 2, sizes=sizes, capacity=[9]), np.array([0, 0, 1], np.int32))
    assert refined.tolist() == [0, 0, 1]


def test_counts_are_evened_out_within_the_capacity_or_given_up() -> None:
    sizes = np.array([[1], [1], [1], [5]], np.int64)
    for capacity, looks, even in ((6, 100, True), (5, 100, False), (6, 0, False)):
        part_of = np.array([0, 0, 0, 1], np.int32)
        count, used = np.array([3, 1]), np.array([[3], [5]], np.int64)
        done = _even_out(sizes, np.array([capacity], np.int64), part_of, count, used, looks)
        assert done == (np.bincount(part_of).tolist() == [2, 2])
        assert done == even or looks == 0


@quick
@given(
    weights=st.lists(st.integers(0, 5) | st.integers(0, 2**40) | st.just(2**61), max_size=40),
    repeat=st.sampled_from([1, 20]),
)
def test_packed_keys_sort_like_a_stable_argsort(weights: list[int], repeat: int) -> None:
    values = np.array(weights * repeat, np.int64)
    assert ascending(values).tolist() == np.argsort(values, kind="stable").tolist()
    table = np.stack([values, values[::-1]], axis=1)
    assert descending(table).tolist() == np.argsort(-table.max(axis=1, initial=0), kind="stable").tolist()


def naive_difference(groups: list[list[list[int]]], weights: list[int]) -> list[int]:
    """Largest differencing as one would write it on a board, ties by the first item; the loads of the result."""
    num_parts = len(groups[0])
    partials = [sorted(group, key=lambda part: (-sum(weights[item] for item in part), part)) for group in groups]

    def spread(partial: list[list[int]]) -> int:
        loads = [sum(weights[item] for item in part) for part in partial]
        return max(loads) - min(loads)

    while len(partials) > 1:
        partials.sort(key=lambda partial: -spread(partial))
        one, other, *rest = partials
        merged = [first + second for first, second in zip(one, other[::-1], strict=True)]
        merged.sort(key=lambda part: -sum(weights[item] for item in part))
        partials = [merged, *rest]
    assert len(partials[0]) == num_parts
    return sorted(sum(weights[item] for item in part) for part in partials[0])


def test_karmarkar_karp_equals_the_textbook_rule() -> None:
    random = np.random.Generator(np.random.Philox(11))
    for _ in range(40):
        num_items, num_parts = int(random.integers(1, 40)), int(random.integers(1, 7))
        weights = sorted({int(value) for value in random.integers(0, 2**40, num_items)}, reverse=True)
        free = [[[item], *[[] for _ in range(num_parts - 1)]] for item in range(len(weights))]
        found = karmarkar_karp(problem([[weight] for weight in weights], num_parts))
        assert found is not None
        loads = np.bincount(found, weights=weights, minlength=num_parts)
        assert sorted(loads.astype(np.int64).tolist()) == naive_difference(free, weights)


def test_karmarkar_karp_beats_the_worked_example_and_refuses_a_broken_capacity() -> None:
    weights = [[8], [7], [6], [5], [4]]
    found = karmarkar_karp(problem(weights, 2))
    assert found is not None
    assert group_by_bin(found, np.array(weights, np.int64), 2)[2].tolist() == [[16], [14]]
    assert karmarkar_karp(problem(weights, 2, sizes=[[1]] * 5, capacity=[3])) is not None
    assert karmarkar_karp(problem(weights, 2, sizes=[[1], [9], [1], [9], [1]], capacity=[10])) is None


def test_multifit_finds_what_lpt_misses_and_is_never_worse() -> None:
    found = multifit(problem([[7], [6], [5], [4], [3]], 2))
    assert found is not None
    assert sorted(np.bincount(found, weights=[7, 6, 5, 4, 3]).tolist()) == [12, 13]
    random = np.random.Generator(np.random.Philox(12))
    for _ in range(20):
        instance = problem(random.integers(0, 100, (30, 2)).tolist(), 5)
        loads = [group_by_bin(run(instance), instance.weights, 5)[2].max() for run in (multifit, lpt)]  # type: ignore[arg-type]
        assert loads[0] <= loads[1]


@numba.njit  # type: ignore[untyped-decorator]
def settle(  # noqa: PLR0917  an inner function has no entry for Python
    ranked: IntArray, turned: IntArray, height: IntArray, place: int, new_height: int, stop: int
) -> int:
    return _settle(ranked, turned, height, place, new_height, stop)


@quick
@given(
    heights=st.lists(st.integers(0, 40), min_size=1, max_size=1200),
    moves=st.lists(st.tuples(st.integers(0, 1199), st.integers(0, 40)), max_size=40),
)
def test_a_part_settles_in_the_blocked_list_as_in_a_plain_one(heights: list[int], moves: list[tuple[int, int]]) -> None:
    height, size = np.array(heights, np.int64), len(heights)
    plain = np.argsort(height, kind="stable").tolist()
    ranked = np.zeros(-(-size // 256) * 256, np.int64)
    ranked[:size] = plain
    turned = np.zeros(ranked.size // 256, np.int64)
    for number, new_height in moves:
        place = number % size
        part = plain.pop(place)
        plain.insert(sum(height[other] < new_height for other in plain), part)
        steps = settle(ranked, turned, height, place, new_height, size)
        rings = [np.roll(ring, -by) for ring, by in zip(ranked.reshape(-1, 256), turned, strict=True)]
        assert np.concatenate(rings)[:size].tolist() == plain
        assert steps <= 2 * 256 + turned.size


def test_evening_out_counts_every_look_and_finds_many_moves_within_a_few_each() -> None:
    num_items, num_parts = 20_000, 5_000
    part_of = (np.arange(num_items) % 2).astype(np.int32)
    sizes, capacity = np.ones((num_items, 1), np.int64), np.array([num_items])
    count = np.bincount(part_of, minlength=num_parts)
    used = count.reshape(-1, 1).copy()
    assert _even_out(sizes, capacity, part_of, count, used, 50 * num_items)
    assert set(np.bincount(part_of).tolist()) == {4}
    # All parts but one are full, so every move fails: quadratic unless the failures count as well.
    count = np.bincount(np.arange(400_000) % 200_000)
    count[0], part_of = 3, (np.arange(400_000) % 200_000).astype(np.int32)
    part_of[200_001], count[1] = 0, 1
    full = np.full((200_000, 1), 9)
    assert not _even_out(np.ones((400_000, 1), np.int64), np.array([9]), part_of, count, full, 10_000)
