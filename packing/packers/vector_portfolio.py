"""Several capacities: the algorithms in order of cost, until there are few enough bins.

    the rule of packing/packers/vector_fit.py that is best on a sample (few items: on all)   ->   emptying of bins

Never more bins than `best_fit_decreasing`. Price: about 1.2 times its time.
"""

from packing.inputs import PartArray
from packing.packers.emptying import empty_bins
from packing.packers.vector_fit import best_fit_vector
from packing.problem import PackProblem

_MAX_BINS = 8192  # above, the few bins that could be emptied are less than 0.02 % of all


def vector_portfolio(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins)."""
    bin_of, num_bins = best_fit_vector(problem.sizes, problem.capacity)
    if num_bins > _MAX_BINS:
        return bin_of, num_bins
    return empty_bins(problem.sizes, problem.capacity, bin_of, num_bins, problem.enough)
