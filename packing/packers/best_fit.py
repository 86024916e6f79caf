"""Best-fit-decreasing: largest item first, each into the fullest bin that still takes it.

    sizes 6 5 4 3 2, capacity 10   ->   [6 4] [5 3 2]

At most 11/9 OPT + 6/9 bins in one dimension (Dósa and Sgall's tight bound for the decreasing rules); on real lengths
within a few hundredths of a percent of the bound. Price: reorders items.

One dimension: counting sort, then a bitset over residual capacities, O(n + capacity) plus a few words per item; ties
go to the bin touched last. Several dimensions, or a capacity too large for a table: packing/packers/vector_fit.py.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.bitset import find_at_least, insert, level_starts, remove
from packing.inputs import IntArray, PartArray
from packing.packers.vector_fit import best_fit_vector
from packing.problem import PackProblem

_MAX_SCALAR_CAPACITY = 2**22  # tables of the scalar route: 16 bytes for each unit of capacity


def best_fit_decreasing(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins)."""
    sizes, capacity = problem.sizes, problem.capacity
    limit = int(capacity[0])
    if sizes.shape[1] == 1 and limit <= min(_MAX_SCALAR_CAPACITY, 4096 + 64 * sizes.shape[0]):
        bin_of, num_bins = _best_fit_scalar(sizes[:, 0].copy(), limit)
        return bin_of, int(num_bins)
    return best_fit_vector(sizes, capacity)


@jit_inner
def _decreasing(sizes: IntArray, capacity: int) -> IntArray:
    """Stable order of decreasing size, by counting."""
    starts = np.zeros(capacity + 2, np.int64)
    for item in range(sizes.shape[0]):
        starts[capacity - sizes[item] + 1] += 1
    for key in range(capacity + 1):
        starts[key + 1] += starts[key]
    order = np.empty(sizes.shape[0], np.int64)
    for item in range(sizes.shape[0]):
        key = capacity - sizes[item]
        order[starts[key]] = item
        starts[key] += 1
    return order


@jit
def _best_fit_scalar(sizes: IntArray, capacity: int) -> tuple[PartArray, int]:
    num_items = sizes.shape[0]
    starts = level_starts(capacity + 1)
    words = np.zeros(starts[-1], np.int64)
    newest = np.full(capacity + 1, -1, np.int32)  # residual -> bin touched last; `below` links the others
    below = np.empty(num_items, np.int32)
    bin_of = np.empty(num_items, np.int32)
    num_bins = 0
    for item in _decreasing(sizes, capacity):
        residual = find_at_least(words, starts, sizes[item])
        if residual < 0:
            index, residual = num_bins, capacity
            num_bins += 1
        else:
            index = newest[residual]
            newest[residual] = below[index]
            if newest[residual] < 0:
                remove(words, starts, residual)
        bin_of[item] = index
        residual -= sizes[item]
        if newest[residual] < 0:
            insert(words, starts, residual)
        below[index] = newest[residual]
        newest[residual] = index
    return bin_of, num_bins
