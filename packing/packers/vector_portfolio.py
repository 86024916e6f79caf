"""Several capacities: the algorithms in order of cost, until there are few enough bins.

    the rule of packing/packers/vector_fit.py that is best on a sample (few items: on all)
    -> the scarcest capacity alone by pattern fill, bins that break another one packed again
    -> emptying of bins

The second step is for capacities that rarely bind, as a number of tiles that three samples hardly ever reach. Never
more bins than `best_fit_decreasing`. Price: two to four times its time where the bound is out of reach.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from packing.binding import column_sums
from packing.grouping import group_by_bin
from packing.inputs import PartArray
from packing.packers.emptying import empty_bins
from packing.packers.pattern_fill import pattern_fill
from packing.packers.vector_fit import best_fit_vector
from packing.problem import PackProblem

_MAX_BINS = 8192  # above, the few bins that could be emptied are less than 0.02 % of all
_MOST_BROKEN = 4  # the scarcest capacity alone must do for all but one bin in so many


def vector_portfolio(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins)."""
    best = best_fit_vector(problem.sizes, problem.capacity)
    if best[1] > problem.enough:
        other = _scarcest_alone(problem)
        if other is not None and other[1] < best[1]:
            best = other
    if best[1] > _MAX_BINS:
        return best
    return empty_bins(problem.sizes, problem.capacity, *best, problem.enough)


def _scarcest_alone(problem: PackProblem) -> tuple[PartArray, int] | None:
    """Pattern fill of one column; the items of bins that break another capacity are packed again in all columns."""
    sizes, capacity = problem.sizes, problem.capacity
    shares = [(total << 20) // int(limit) for total, limit in zip(column_sums(sizes), capacity, strict=True)]
    column = shares.index(max(shares))
    alone = replace(problem, sizes=np.ascontiguousarray(sizes[:, [column]]), capacity=capacity[[column]])
    bin_of, num_bins = pattern_fill(alone)
    over = group_by_bin(bin_of, sizes, num_bins)[2] > capacity
    broken: npt.NDArray[np.bool_] = np.logical_or.reduce(over, axis=1)
    if _MOST_BROKEN * int(broken.sum()) > num_bins:
        return None
    again = broken[bin_of]
    places = np.cumsum(~broken) - 1
    result = places[bin_of].astype(np.int32)
    packed, num_more = best_fit_vector(np.ascontiguousarray(sizes[again]), capacity)
    num_kept = num_bins - int(broken.sum())
    result[again] = packed + np.int32(num_kept)
    return result, num_kept + num_more
