"""`partition`: items into k parts whose largest load, over parts and stages, is small; capacities are hard.

weights [n, S] --algorithm--> part_of [n] --> load [k, S] --> makespan, beside its lower bound
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packing.bin_bounds import packing_bound
from packing.errors import InfeasiblePartitionError
from packing.grouping import group_by_bin
from packing.inputs import IntArray, as_flag, as_limits, as_weights, at_least_one, check_count
from packing.makespan_bounds import StageNorm, costly_stages, partition_bound, stage_costs
from packing.packers.best_fit import best_fit_decreasing
from packing.partitioners.refine import refine
from packing.partitioners.within_capacity import within_capacity
from packing.problem import PartitionProblem
from packing.registry import PARTITIONERS, find
from packing.results import PartitionResult, gap_to, stop_at


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
        algorithm: a name of `packing.registry.PARTITIONERS`; `auto` chooses.
        equal_count: numbers of items per part differ by at most one.
        capacity, sizes: sizes [n] or [n, d] and the limit of a part in each dimension; give both or none.
        stage_norm: what a part costs: its largest stage load (`max`), or the sum of its stage loads (`sum`, as when
            one device works through all stages). With `sum`, `makespan` and `lower_bound` are sums too.
        target_gap: relative distance to the lower bound at which algorithms that search on stop; 0 searches to the end.

    Returns:
        A `PartitionResult`. All loads are 0 for no items. A gap above `target_gap` need not mean a poor partition: the
        bound may be loose. After `exact` it is, as that partition is optimal, unless its step limit was reached.

    Raises:
        InfeasiblePartitionError: no assignment within the capacities was found; `.proven` says whether none exists,
            and then no search was tried.
            One is always found when best-fit-decreasing packs the sizes into k bins (and counts are free), and nearly
            always where the sizes spread over the parts with a little room left.
        ItemTooLargeError: an item above a capacity.
        NegativeSizeError, SizeOverflowError, CapacityError, PackingError: malformed input.
    """
    matrix = as_weights(weights)
    costs = costly_stages(stage_costs(matrix, stage_norm))
    parts = at_least_one(num_parts, "num_parts")
    check_count(parts, matrix.shape[0], "num_parts")
    equal_count = as_flag(equal_count, "equal_count")
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
    partitioner = find(PARTITIONERS, algorithm)
    needed = _needed(problem)
    proven = needed > parts or _too_full(problem)
    part_of = None if proven else partitioner(problem)
    if part_of is None:
        start = None if proven else within_capacity(problem)
        if start is None:
            raise InfeasiblePartitionError(parts, needed, best_fit_decreasing(problem.packing())[1], proven)
        part_of = refine(problem, start)
    _, _, load = group_by_bin(part_of, matrix, problem.num_parts)
    makespan = int(stage_costs(load, stage_norm).max())
    return PartitionResult(
        part_of=part_of,
        load=load,
        makespan=makespan,
        lower_bound=problem.lower_bound,
        gap=gap_to(makespan, problem.lower_bound),
        algorithm=algorithm,
    )


def _needed(problem: PartitionProblem) -> int:
    """Parts that any assignment within the capacities needs."""
    most = problem.base_count + (problem.num_extra > 0) if problem.equal_count else None
    return packing_bound(problem.sizes, problem.capacity, most) if problem.capacity.size else 0


def _too_full(problem: PartitionProblem) -> bool:
    """Whether some part exceeds a capacity in any assignment: sizes are weights whose makespan has a bound too."""
    columns = (np.ascontiguousarray(problem.sizes[:, [column]]) for column in range(problem.sizes.shape[1]))
    return any(
        partition_bound(column, problem.num_parts, problem.equal_count) > limit
        for column, limit in zip(columns, problem.capacity, strict=True)
    )
