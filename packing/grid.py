"""`partition_grid`: items on R ranks x M slots (micro-batches), even where ranks wait for one another.

weights [n, S] --algorithm--> cell of each item --> load [R, M, S] --> objective, beside its lower bound

    "per_rank"   ranks meet once a step:          largest total of a rank      (DDP, ZeRO-1 and 2)
    "per_slot"   ranks meet in every micro-batch: sum of the slots' largest    (ZeRO-3, TP, EP, CP groups)

    weights 9 4 3 3 2 1 on 2 x 2   per_rank: {9 | 2} {3 3 | 4 1}, 11   per_slot: {9 | 2} {4 3 1 | 3}, 9 + 3 = 12
"""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt

from packing.bin_bounds import packing_bound
from packing.errors import InfeasiblePartitionError, PackingError
from packing.grid_bounds import grid_bound
from packing.grids.cells import cell_loads, objective_value
from packing.inputs import IntArray, as_limits, as_weights, at_least_one, check_count
from packing.makespan_bounds import costly_stages
from packing.packers.best_fit import best_fit_decreasing
from packing.problem import GridProblem, Objective, PackProblem
from packing.registry import GRID_PLACERS, find
from packing.results import GridResult, gap_to, stop_at


def partition_grid(
    weights: npt.ArrayLike,
    num_ranks: int,
    num_slots: int,
    *,
    capacity: int | Sequence[int] | IntArray | None = None,
    sizes: npt.ArrayLike | None = None,
    objective: Objective = "per_rank",
    algorithm: str = "auto",
    target_gap: float = 1e-4,
) -> GridResult:
    """Assign every item to a cell, one slot of one rank; minimise what ranks that wait for one another cost.

    With at least as many items as cells no cell is empty, since a rank without a micro-batch hangs the others; the
    lower bound does not count on that. Slots come in descending order: the heaviest cell of a rank is in slot 0.

    Args:
        weights: integers [n], or [n, S] for S stages that every cell works through (nanoseconds, say).
        num_ranks, num_slots: R and M. Slots beyond the number of items stay empty.
        capacity, sizes: sizes [n] or [n, d] and the limit of a cell in each dimension; give both or none.
        objective: `per_rank`, the largest over ranks and stages of the sum over slots, with the cells of a rank even
            as far as possible; or `per_slot`, the sum over slots of the largest over ranks and stages.
        algorithm: `ranks_first`, `level_fill` or `auto`.
        target_gap: relative distance to the lower bound at which the search stops.

    Returns:
        A `GridResult`. All loads are 0 for no items. Its `gap` judges the algorithm, by the bound; `rank_ratio` and
        `sync_ratio` judge what waiting costs, by a perfectly even grid, which may not exist. `per_rank` stops at
        `target_gap`, so that its `rank_ratio` can be 1.0001 where 1 is possible.

    Raises:
        InfeasiblePartitionError: no assignment within the capacities was found; `.proven` says whether none exists,
            and then no search was tried.
            One is always found when best-fit-decreasing packs the sizes into R * M bins.
        ItemTooLargeError: an item above a capacity.
        NegativeSizeError, SizeOverflowError, CapacityError, PackingError: malformed input.
    """
    if objective not in get_args(Objective):
        raise PackingError(f"unknown objective {objective!r}; available: {', '.join(get_args(Objective))}")
    matrix = as_weights(weights)
    ranks, slots = at_least_one(num_ranks, "num_ranks"), at_least_one(num_slots, "num_slots")
    check_count(ranks * slots, matrix.shape[0], "num_ranks * num_slots")
    limited, limits = as_limits(sizes, capacity, matrix.shape[0])
    placer = find(GRID_PLACERS, algorithm)
    costs = costly_stages(matrix)
    # No more slots than items are ever needed, in the best grid too; one more, so that cells may stay empty.
    used = min(slots, matrix.shape[0] + 1)
    bound = grid_bound(costs, ranks, used, limited, limits, per_slot=objective == "per_slot")
    problem = GridProblem(
        weights=costs,
        num_ranks=ranks,
        num_slots=used,
        sizes=limited,
        capacity=limits,
        objective=objective,
        lower_bound=bound,
        enough=stop_at(bound, target_gap),
    )
    needed = packing_bound(limited, limits) if limits.size else 0
    proven = needed > ranks * slots
    cell_of = None if proven else placer(problem)
    if cell_of is None:
        raise InfeasiblePartitionError(ranks * slots, needed, _bins_found(problem), proven, (ranks, slots))
    load = np.zeros((ranks, slots, matrix.shape[1]), np.int64)
    load[:, :used] = cell_loads(matrix, cell_of, ranks, used)
    value = objective_value(load, objective)
    return GridResult(
        rank_of=cell_of // np.int32(used),
        slot_of=cell_of % np.int32(used),
        load=load,
        makespan=value,
        lower_bound=bound,
        gap=gap_to(value, bound),
        algorithm=algorithm,
        objective=objective,
    )


def _bins_found(problem: GridProblem) -> int:
    cells = problem.num_ranks * problem.num_slots
    packing = PackProblem(sizes=problem.sizes, capacity=problem.capacity, lower_bound=0, enough=cells)
    return best_fit_decreasing(packing)[1]
