"""Next-fit: fill one bin at a time in input order; open the next when an item does not fit.

    sizes 4 5 3 7 2, capacity 10   ->   [4 5] [3 7] [2]

Keeps the order of the input (the concatenated bins are the input). Price: up to twice the optimal number of bins in
one dimension, in practice 16-30 % more than best-fit-decreasing.
"""

import numpy as np

from packing._jit import jit
from packing.inputs import IntArray, PartArray
from packing.problem import PackProblem


def next_fit(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins)."""
    bin_of, num_bins = _next_fit(problem.sizes, problem.capacity)
    return bin_of, int(num_bins)


@jit
def _next_fit(sizes: IntArray, capacity: IntArray) -> tuple[PartArray, int]:
    num_items, num_columns = sizes.shape
    bin_of = np.empty(num_items, np.int32)
    used = np.zeros(num_columns, np.int64)
    num_bins = 1 if num_items > 0 else 0
    for item in range(num_items):
        fits = True
        for column in range(num_columns):
            # Written as a difference: a sum of two sizes near 2**62 could wrap.
            if sizes[item, column] > capacity[column] - used[column]:
                fits = False
        if not fits:
            num_bins += 1
        for column in range(num_columns):
            used[column] = sizes[item, column] + (used[column] if fits else 0)
        bin_of[item] = num_bins - 1
    return bin_of, num_bins
