"""`partition`: items into k parts whose largest load, over parts and stages, is small; capacities are hard.

weights [n, S] --algorithm--> part_of [n] --> load [k, S] --> makespan, beside its lower bound
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packing.best_fit import best_fit_decreasing
from packing.bounds import packing_bound, partition_bound
from packing.errors import CapacityError, InfeasiblePartitionError, PackingError, SizeOverflowError
from packing.grouping import group_by_bin
from packing.inputs import MAX_TOTAL, IntArray, as_capacity, as_matrix, at_least_one, check_items_fit, column_totals
from packing.problem import PartitionProblem
from packing.refine import refine, within_capacity
from packing.registry import PARTITIONERS, find
from packing.results import PartitionResult, gap_to

AUTO = "lpt_refined"


def partition(
    weights: npt.ArrayLike,
    num_parts: int,
    *,
    algorithm: str = "auto",
    equal_count: bool = False,
    capacity: int | Sequence[int] | IntArray | None = None,
    sizes: npt.ArrayLike | None = None,
) -> PartitionResult:
    """Assign every item to one of `num_parts` parts; minimise the largest load over parts and stages.

    Args:
        weights: integers [n], or [n, S] for S stages that a part works through (nanoseconds, say).
        num_parts: k; parts stay empty where n is smaller.
        algorithm: a name of `packing.registry.PARTITIONERS`, or `auto`.
        equal_count: numbers of items per part differ by at most one.
        capacity, sizes: sizes [n] or [n, d] and the limit of a part in each dimension; give both or none.

    Returns:
        A `PartitionResult`. All loads are 0 for no items.

    Raises:
        InfeasiblePartitionError: no assignment within the capacities was found; `.proven` says whether none exists.
            One is always found when best-fit-decreasing packs the sizes into k bins (and counts are free).
        ItemTooLargeError: an item above a capacity.
        NegativeSizeError, SizeOverflowError, CapacityError, PackingError: malformed input.
    """
    problem = _problem(weights, num_parts, equal_count, capacity, sizes)
    name = AUTO if algorithm == "auto" else algorithm
    part_of = find(PARTITIONERS, name)(problem)
    if part_of is None:
        start = within_capacity(problem)
        if start is None:
            raise _infeasible(problem)
        part_of = refine(problem, start)
    _, _, load = group_by_bin(part_of, problem.weights, problem.num_parts)
    makespan = int(load.max())
    return PartitionResult(
        part_of=part_of,
        load=load,
        makespan=makespan,
        lower_bound=problem.lower_bound,
        gap=gap_to(makespan, problem.lower_bound),
        algorithm=name,
    )


def _problem(
    weights: npt.ArrayLike,
    num_parts: int,
    equal_count: bool,
    capacity: int | Sequence[int] | IntArray | None,
    sizes: npt.ArrayLike | None,
) -> PartitionProblem:
    matrix = as_matrix(weights, "weights")
    total = sum(column_totals(matrix))
    if total > MAX_TOTAL:
        raise SizeOverflowError("the sum of weights over all stages", total, MAX_TOTAL)
    parts = at_least_one(num_parts, "num_parts")
    num_items = matrix.shape[0]
    limited, limits = np.empty((num_items, 0), np.int64), np.empty(0, np.int64)
    if (capacity is None) != (sizes is None):
        raise CapacityError("capacity and sizes belong together: the capacity limits the sizes; give both or none")
    if capacity is not None and sizes is not None:
        limited = as_matrix(sizes, "sizes")
        if limited.shape[0] != num_items:
            raise PackingError(f"sizes have {limited.shape[0]} rows but weights have {num_items}; give one row an item")
        limits = as_capacity(capacity, limited.shape[1])
        check_items_fit(limited, limits)
    return PartitionProblem(
        weights=matrix,
        num_parts=parts,
        sizes=limited,
        capacity=limits,
        equal_count=equal_count,
        lower_bound=partition_bound(matrix, parts, equal_count),
    )


def _infeasible(problem: PartitionProblem) -> InfeasiblePartitionError:
    most = problem.base_count + (problem.num_extra > 0) if problem.equal_count else None
    needed = packing_bound(problem.sizes, problem.capacity, most)
    _, found = best_fit_decreasing(problem.sizes, problem.capacity)
    return InfeasiblePartitionError(problem.num_parts, needed, found, needed > problem.num_parts)
