"""`partition`: items into k parts whose largest load, over parts and stages, is small; capacities are hard.

weights [n, S] --algorithm--> part_of [n] --> load [k, S] --> makespan, beside its lower bound
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy.typing as npt

from packing.bin_bounds import packing_bound
from packing.errors import InfeasiblePartitionError, PackingError
from packing.grouping import group_by_bin
from packing.inputs import IntArray, as_limits, as_weights, at_least_one
from packing.makespan_bounds import partition_bound
from packing.packers.best_fit import best_fit_decreasing
from packing.partitioners.refine import refine, within_capacity
from packing.problem import PartitionProblem
from packing.registry import PARTITIONERS, find
from packing.results import PartitionResult, gap_to, stop_at

AUTO = "lpt_refined"
StageNorm = Literal["max", "sum"]


def partition(
    weights: npt.ArrayLike,
    num_parts: int,
    *,
    algorithm: str = "auto",
    equal_count: bool = False,
    capacity: int | Sequence[int] | IntArray | None = None,
    sizes: npt.ArrayLike | None = None,
    stage_norm: StageNorm = "max",
    target_gap: float = 1e-4,
) -> PartitionResult:
    """Assign every item to one of `num_parts` parts; minimise the largest load over parts and stages.

    Args:
        weights: integers [n], or [n, S] for S stages that a part works through (nanoseconds, say).
        num_parts: k; parts stay empty where n is smaller.
        algorithm: a name of `packing.registry.PARTITIONERS`, or `auto`.
        equal_count: numbers of items per part differ by at most one.
        capacity, sizes: sizes [n] or [n, d] and the limit of a part in each dimension; give both or none.
        stage_norm: what a part costs: its largest stage load (`max`), or the sum of its stage loads (`sum`, as when
            one device works through all stages). With `sum`, `makespan` and `lower_bound` are sums too.
        target_gap: relative distance to the lower bound at which `auto` stops; 0 searches to the end.

    Returns:
        A `PartitionResult`. All loads are 0 for no items.

    Raises:
        InfeasiblePartitionError: no assignment within the capacities was found; `.proven` says whether none exists.
            One is always found when best-fit-decreasing packs the sizes into k bins (and counts are free).
        ItemTooLargeError: an item above a capacity.
        NegativeSizeError, SizeOverflowError, CapacityError, PackingError: malformed input.
    """
    matrix = as_weights(weights)
    costs = _costs(matrix, stage_norm)
    parts = at_least_one(num_parts, "num_parts")
    limited, limits = as_limits(sizes, capacity, matrix.shape[0])
    bound = partition_bound(costs, parts, equal_count)
    problem = PartitionProblem(
        weights=costs,
        num_parts=parts,
        sizes=limited,
        capacity=limits,
        equal_count=equal_count,
        lower_bound=bound,
        enough=stop_at(bound, target_gap),
    )
    name = AUTO if algorithm == "auto" else algorithm
    part_of = find(PARTITIONERS, name)(problem)
    if part_of is None:
        start = within_capacity(problem)
        if start is None:
            raise _infeasible(problem)
        part_of = refine(problem, start)
    _, _, load = group_by_bin(part_of, matrix, problem.num_parts)
    makespan = int(_costs(load, stage_norm).max())
    return PartitionResult(
        part_of=part_of,
        load=load,
        makespan=makespan,
        lower_bound=problem.lower_bound,
        gap=gap_to(makespan, problem.lower_bound),
        algorithm=name,
    )


def _costs(stages: IntArray, stage_norm: StageNorm) -> IntArray:
    """What counts of weights or loads [m, S]: all stages, or their sum [m, 1]."""
    if stage_norm not in get_args(StageNorm):
        raise PackingError(f"unknown stage_norm {stage_norm!r}; available: {', '.join(get_args(StageNorm))}")
    return stages if stage_norm == "max" else stages.sum(axis=1, keepdims=True)


def _infeasible(problem: PartitionProblem) -> InfeasiblePartitionError:
    most = problem.base_count + (problem.num_extra > 0) if problem.equal_count else None
    needed = packing_bound(problem.sizes, problem.capacity, most)
    _, found = best_fit_decreasing(problem.packing())
    return InfeasiblePartitionError(problem.num_parts, needed, found, needed > problem.num_parts)
