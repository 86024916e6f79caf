"""The exact algorithms against two independent oracles: exhaustive search, and an integer program solved by HiGHS."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import optimize

from packing import PackingError
from packing.bin_bounds import packing_bound
from packing.inputs import IntArray
from packing.makespan_bounds import partition_bound
from packing.packers.exact import MAX_ITEMS, complete_bins, search_input
from packing.packers.exact import exact as exact_packing
from packing.partitioners.exact import exact as exact_partition
from packing.partitioners.exact import improve
from packing.problem import PackProblem, PartitionProblem

quick = settings(max_examples=150, deadline=None)


def pack_problem(sizes: Any, capacity: list[int], *, use_bound: bool = True) -> PackProblem:
    table = np.array(sizes, np.int64).reshape(-1, len(capacity))
    limits = np.array(capacity, np.int64)
    bound = packing_bound(table, limits) if use_bound else 0
    return PackProblem(sizes=table, capacity=limits, lower_bound=bound, enough=bound)


def partition_problem(
    weights: Any, num_parts: int, *, sizes: Any = (), capacity: Any = (), equal_count: bool = False
) -> PartitionProblem:
    table = np.array(weights, np.int64)
    bound = partition_bound(table, num_parts, equal_count)
    return PartitionProblem(
        weights=table,
        num_parts=num_parts,
        sizes=np.array(sizes, np.int64).reshape(table.shape[0], len(capacity)),
        capacity=np.array(capacity, np.int64),
        equal_count=equal_count,
        lower_bound=bound,
        enough=bound,
    )


def loads(part_of: IntArray, values: IntArray, num_parts: int) -> IntArray:
    load = np.zeros((num_parts, values.shape[1]), np.int64)
    np.add.at(load, part_of, values)
    return load


def check_bins(problem: PackProblem) -> int:
    bin_of, num_bins = exact_packing(problem)
    assert sorted(set(bin_of.tolist())) == list(range(num_bins))
    assert (loads(bin_of, problem.sizes, num_bins) <= problem.capacity).all()
    return num_bins


def check_parts(problem: PartitionProblem) -> int | None:
    part_of = exact_partition(problem)
    if part_of is None:
        return None
    assert (loads(part_of, problem.sizes, problem.num_parts) <= problem.capacity).all()
    counts = np.bincount(part_of, minlength=problem.num_parts)
    assert not problem.equal_count or counts.max() - counts.min() <= 1
    assert problem.capacity.size or problem.num_items < problem.num_parts or counts.min() > 0
    return int(loads(part_of, problem.weights, problem.num_parts).max(initial=0))


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    capacity = draw(st.lists(st.integers(1, 15), min_size=1, max_size=3))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    return draw(st.lists(row, max_size=8)), capacity


@quick
@given(case=packings(), use_bound=st.booleans())
@example(case=([[44], [24], [24], [22], [21], [17], [8], [8], [6], [6]], [60]), use_bound=True)
def test_the_number_of_bins_is_that_of_exhaustive_search(
    exact_bins: Callable[..., int], case: tuple[list[list[int]], list[int]], use_bound: bool
) -> None:
    sizes, capacity = case
    assert check_bins(pack_problem(sizes, capacity, use_bound=use_bound)) == exact_bins(sizes, capacity)


@st.composite
def partitions(draw: st.DrawFn) -> dict[str, Any]:
    most = draw(st.sampled_from([1, 3, 10, 1000]))
    num_stages = draw(st.integers(1, 3))
    weights = draw(
        st.lists(st.lists(st.integers(0, most), min_size=num_stages, max_size=num_stages), min_size=1, max_size=7)
    )
    capacity = draw(st.lists(st.integers(1, 12), max_size=2))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    return {
        "weights": weights,
        "num_parts": draw(st.integers(1, 4)),
        "equal_count": draw(st.booleans()),
        "sizes": draw(st.lists(row, min_size=len(weights), max_size=len(weights))),
        "capacity": capacity,
    }


@quick
@given(case=partitions())
@example(case={"weights": [[7], [6], [5], [4], [3]], "num_parts": 2})
@example(case={"weights": [[9], [1], [1], [1], [0]], "num_parts": 2, "equal_count": True})
@example(case={"weights": [[1], [1], [1]], "num_parts": 2, "sizes": [[6], [6], [6]], "capacity": [10]})
def test_the_makespan_is_that_of_exhaustive_search_and_none_means_that_no_assignment_exists(
    exact_makespan: Callable[..., int | None], case: dict[str, Any]
) -> None:
    assert check_parts(partition_problem(**case)) == exact_makespan(**case)


def highs(problem: PackProblem | PartitionProblem, num_parts: int) -> float | None:
    """Least number of used parts (packing) or least makespan (partition) as a mixed-integer program."""
    is_packing = isinstance(problem, PackProblem)
    num_items, num_columns = problem.sizes.shape
    num_assigned = num_items * num_parts  # columns x[item, part], then used[part] or the makespan
    num_variables = num_assigned + (num_parts if is_packing else 1)
    each = np.eye(num_items).repeat(num_parts, axis=1)
    rows = [np.concatenate([each, np.zeros((num_items, num_variables - num_assigned))], axis=1)]
    low, high = [np.ones(num_items)], [np.ones(num_items)]
    for part in range(num_parts):
        member = np.zeros((num_items, num_parts))
        member[:, part] = 1
        member = member.reshape(1, num_assigned)
        for column in range(num_columns):
            row = np.zeros(num_variables)
            row[:num_assigned] = member * problem.sizes[:, column].repeat(num_parts)
            if is_packing:
                row[num_assigned + part] = -problem.capacity[column]
            rows.append(row[None])
            low.append(np.array([-np.inf]))
            high.append(np.array([0.0 if is_packing else problem.capacity[column]]))
        if isinstance(problem, PartitionProblem):
            for stage in range(problem.weights.shape[1]):
                row = np.zeros(num_variables)
                row[:num_assigned] = member * problem.weights[:, stage].repeat(num_parts)
                row[-1] = -1
                rows.append(row[None])
                low.append(np.array([-np.inf]))
                high.append(np.zeros(1))
            if problem.equal_count:
                rows.append(np.concatenate([member, np.zeros((1, 1))], axis=1))
                low.append(np.array([problem.base_count]))
                high.append(np.array([problem.base_count + (problem.num_extra > 0)]))
    objective = np.zeros(num_variables)
    objective[num_assigned:] = 1
    upper = np.ones(num_variables)
    integrality = np.ones(num_variables)
    if not is_packing:
        upper[-1] = np.inf
        integrality[-1] = 0
    answer = optimize.milp(
        objective,
        integrality=integrality,
        bounds=optimize.Bounds(np.zeros(num_variables), upper),
        constraints=optimize.LinearConstraint(np.concatenate(rows), np.concatenate(low), np.concatenate(high)),
        options={"mip_rel_gap": 0.0},
    )
    return None if answer.x is None else float(answer.fun)


@pytest.mark.parametrize("num_columns", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_number_of_bins_is_that_of_an_integer_program(num_columns: int, seed: int) -> None:
    random = np.random.Generator(np.random.Philox(10 * seed + num_columns))
    sizes = random.integers(5, 70, (11, num_columns))
    problem = pack_problem(sizes, [100] * num_columns, use_bound=False)
    num_bins = check_bins(problem)
    assert num_bins == round(highs(problem, num_bins) or 0)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("num_limits", [0, 1])
@pytest.mark.parametrize("equal_count", [False, True])
@pytest.mark.parametrize("num_parts", [2, 3])
def test_the_makespan_is_that_of_an_integer_program(
    num_stages: int, num_limits: int, equal_count: bool, num_parts: int
) -> None:
    random = np.random.Generator(np.random.Philox(100 * num_stages + 10 * num_limits + num_parts))
    weights = random.integers(1, 200, (10, num_stages))
    sizes = random.integers(1, 9, (10, num_limits))
    capacity = [-(-int(sizes.sum()) // num_parts) + 1] * num_limits
    problem = partition_problem(weights, num_parts, sizes=sizes, capacity=capacity, equal_count=equal_count)
    best = highs(problem, num_parts)
    assert check_parts(problem) == (None if best is None else round(best))


def test_more_items_than_an_exhaustive_search_can_take_are_refused() -> None:
    ones = np.ones((MAX_ITEMS + 1, 1), np.int64)
    with pytest.raises(PackingError, match="takes at most 24 items, not 25; choose another algorithm"):
        exact_packing(pack_problem(ones, [2]))
    with pytest.raises(PackingError, match="takes at most 24 items, not 25"):
        exact_partition(partition_problem(ones, 3))
    assert check_bins(pack_problem(ones[1:], [2])) == 12


def test_best_fit_decreasing_and_lpt_are_improved_where_they_are_not_optimal() -> None:
    assert check_bins(pack_problem([44, 24, 24, 22, 21, 17, 8, 8, 6, 6], [60])) == 3
    assert check_parts(partition_problem([[7], [6], [5], [4], [3]], 2)) == 13


def test_items_above_a_third_are_bounded_by_their_number() -> None:
    # 24 items of which two share a bin: by size ten bins would do, and trying that out takes for ever.
    sizes = np.arange(3_400, 3_400 + 24 * 30, 30)
    assert sizes.sum() < 10 * 10_000
    values, limits, _ = search_input(sizes.reshape(-1, 1), np.array([10_000]))
    assert limits.tolist() == [10_000, 2]
    _, steps = complete_bins(values, limits, 11, 0, 1000)
    assert steps < 10
    assert check_bins(pack_problem(sizes, [10_000], use_bound=False)) == 12


def test_a_search_that_runs_out_of_steps_returns_the_best_it_has() -> None:
    random = np.random.Generator(np.random.Philox(3))
    problem = partition_problem(random.integers(1, 10**9, (22, 1)), 3)
    start = np.arange(22, dtype=np.int32) % 3
    before = start.copy()
    values = [
        int(loads(part_of, problem.weights, 3).max())
        for steps in (0, 1, 30, 1000)
        if (part_of := improve(problem, start, steps)) is not None
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] == loads(start, problem.weights, 3).max() > values[-1] > problem.lower_bound
    assert (start == before).all()
    assert improve(problem, None, 0) is None


def test_a_search_from_nothing_finds_what_lpt_cannot_place() -> None:
    weights, sizes = [[9], [8], [1], [1], [1]], [[3], [3], [6], [4], [4]]
    assert check_parts(partition_problem(weights, 2, sizes=sizes, capacity=[10])) == 18
    assert check_parts(partition_problem(weights, 2, sizes=sizes, capacity=[9])) is None


def test_sizes_near_the_integer_limit_do_not_wrap() -> None:
    third = 2**62 // 3
    assert check_bins(pack_problem([third] * 3, [2 * third], use_bound=False)) == 2
    assert check_bins(pack_problem([2**61, 2**61 - 1, 1], [2**62], use_bound=False)) == 1
    assert check_bins(pack_problem([[2**61, 1], [2**61, 2]], [2**62, 2], use_bound=False)) == 2
    assert check_parts(partition_problem([[2**60], [2**60], [2**60], [2**60]], 3)) == 2**61
    assert check_parts(partition_problem([[2**60 + 7], [2**60], [7], [0]], 2)) == 2**60 + 7


def test_nothing_zeros_and_more_parts_than_items() -> None:
    assert check_bins(pack_problem([], [5])) == 0
    assert check_bins(pack_problem([[0, 0]] * 3, [5, 5], use_bound=False)) == 1
    assert check_parts(partition_problem(np.zeros((0, 2)), 3)) == 0
    assert check_parts(partition_problem([[0]] * 5, 3)) == 0
    assert check_parts(partition_problem([[5, 1], [3, 2]], 4, equal_count=True)) == 5
