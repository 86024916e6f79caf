"""Several capacities: the algorithms in order of cost, until there are few enough bins.

    columns that cannot bind are left out
    d = 1   ->  pattern fill (which begins with best-fit and exact fill)
    d > 1   ->  best-fit by the rule that is best on a sample  ->  every other rule (small n)  ->  emptying of bins

Never more bins than `best_fit_decreasing` in the same dimensions. Price: about 1.2 times its time in several
dimensions; in one, that of packing/packers/pattern_fill.py.
"""

from dataclasses import replace

import numpy as np

from packing.inputs import PartArray
from packing.packers.emptying import empty_bins
from packing.packers.pattern_fill import pattern_fill
from packing.packers.vector_fit import best_fit_vector, binding_columns
from packing.problem import PackProblem

_MAX_BINS = 8192  # above, the few bins that could be emptied are less than 0.02 % of all


def vector_portfolio(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins) for any d >= 1."""
    sizes, capacity = problem.sizes, problem.capacity
    if problem.num_items == 0:
        return np.empty(0, np.int32), 0
    columns = binding_columns(sizes, capacity)
    if len(columns) < sizes.shape[1]:
        sizes, capacity = np.ascontiguousarray(sizes[:, columns]), np.ascontiguousarray(capacity[columns])
    if len(columns) == 1:
        bin_of, num_bins = pattern_fill(replace(problem, sizes=sizes, capacity=capacity))
    else:
        bin_of, num_bins = best_fit_vector(sizes, capacity)
    if num_bins > _MAX_BINS:
        return bin_of, num_bins
    return empty_bins(sizes, capacity, bin_of, num_bins, problem.enough)
