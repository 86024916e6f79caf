"""The pieces below the public functions: bitset, grouping, scores, refinement, evening out of counts, the decorator."""

import logging
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packing import _jit
from packing.grouping import group_by_bin
from packing.makespan_bounds import partition_bound
from packing.packers.best_fit import best_fit_decreasing
from packing.partitioners.refine import _even_out, refine
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
    sizes = [[1], [1], [1], [5]]
    start = np.array([0, 0, 0, 1], np.int32)
    fits = problem(sizes, 2, sizes=sizes, capacity=[6], equal_count=True)
    evened = _even_out(fits, start)
    assert evened is not None
    assert np.bincount(evened).tolist() == [2, 2]
    assert _even_out(problem(sizes, 2, sizes=sizes, capacity=[5], equal_count=True), start) is None
    assert start.tolist() == [0, 0, 0, 1]


def test_a_missing_cache_is_reported_once_for_all_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_cache(cache: bool = False, **_options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", without_cache)
    monkeypatch.setattr(_jit, "_warned", False)
    with caplog.at_level(logging.WARNING, logger="packing"):
        assert _jit.jit(len) is len
        assert _jit.jit(abs) is abs
    assert [record.message.startswith("no writable cache") for record in caplog.records] == [True]


def test_another_failure_of_the_compiler_is_not_taken_for_a_missing_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_options: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(numba, "njit", broken)
    with pytest.raises(RuntimeError, match="out of order"):
        _jit.jit(len)
