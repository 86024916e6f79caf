"""Best-fit-decreasing: largest item first, each into the fullest bin that still takes it.

    sizes 6 5 4 3 2, capacity 10   ->   [6 4] [5 3 2]

At most 11/9 OPT + 6/9 bins in one dimension (Dósa and Sgall's tight bound for the decreasing rules); on real lengths
within a few hundredths of a percent of the bound. Price: reorders items.

One dimension goes by runs: all items of one size, and all bins with the same free space that follow each other in the
order of the rule, are handled in one step, because a bin with free space r takes r // size items in a row before
another becomes the fullest. O(n + capacity) plus a few word reads per run, and exactly the bins that the rule
gives item by item; ties go to the bin touched last. packing/packers/vector_fit.py has the rest: a capacity too large
for a table, and several dimensions, where "fullest" is not one number and bins are filled one after the other instead.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.binding import binding
from packing.bitset import empty_set, find_at_least, insert, remove
from packing.inputs import IntArray, PartArray
from packing.packers.vector_fit import best_fit_vector
from packing.problem import PackProblem
from packing.size_classes import hand_out, table_pays


def best_fit_decreasing(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins)."""
    problem = binding(problem)
    sizes, capacity = problem.sizes, problem.capacity
    if sizes.shape[1] == 1 and table_pays(int(capacity[0]), problem.num_items):
        return _best_fit_scalar(sizes.reshape(-1), int(capacity[0]))
    return best_fit_vector(sizes, capacity)


# A run is a row (last bin, number of bins, step, run below): bins last, last - step, last - 2 * step, ... have the same
# free space and were touched in the opposite order. `top[r]` is the run touched last among those with free space r.
_LAST, _COUNT, _STEP, _BELOW = 0, 1, 2, 3


@jit_inner
def _push(  # noqa: PLR0917  kernels take flat arguments
    runs: IntArray, row: int, top: IntArray, free: int, last: int, count: int, step: int
) -> bool:
    """Lay a run on the stack of its free space; True when the stack was empty."""
    was_empty = top[free] < 0
    runs[row, _LAST] = last
    runs[row, _COUNT] = count
    runs[row, _STEP] = step
    runs[row, _BELOW] = top[free]
    top[free] = row
    return bool(was_empty)


def _best_fit_scalar(sizes: IntArray, capacity: int) -> tuple[PartArray, int]:
    """`best_fit_decreasing` for sizes [n] of one dimension."""
    num_items = sizes.shape[0]
    count = np.bincount(sizes, minlength=capacity + 1)
    words, starts = empty_set(capacity + 1)
    top = np.full(capacity + 1, -1)
    runs = np.empty((num_items, 4), np.int64)  # every run holds a bin and every bin an item
    bin_at, bin_of = np.empty(num_items, np.int32), np.empty(num_items, np.int32)
    place = num_items - np.cumsum(count)  # of the first item of each size when sizes decrease
    num_bins = _fill(sizes, capacity, count, words, starts, top, runs, bin_at, place, bin_of)
    return bin_of, int(num_bins)


@jit
def _fill(  # noqa: PLR0917  kernels take flat arguments
    sizes: IntArray,
    capacity: int,
    count: IntArray,
    words: IntArray,
    starts: IntArray,
    top: IntArray,
    runs: IntArray,
    bin_at: PartArray,
    place: IntArray,
    bin_of: PartArray,
) -> int:
    """Fill `bin_of`; the number of bins. `words` is the set of free spaces that some bin has."""
    num_runs = num_bins = position = 0
    for size in range(capacity, -1, -1):
        left = count[size]
        while left > 0:
            free = find_at_least(words, starts, size)
            if free < 0:
                free = capacity
                fits = capacity // size if size > 0 else left
                fresh = (left + fits - 1) // fits
                _push(runs, num_runs, top, capacity, num_bins, fresh, -1)
                insert(words, starts, capacity)
                num_bins += fresh
                num_runs += 1
            row = top[free]
            each = free // size if size > 0 else left
            num_taken = min(runs[row, _COUNT], left // each)
            if num_taken == 0:
                each, num_taken = left, 1
            last, step = runs[row, _LAST], runs[row, _STEP]
            for turn in range(num_taken):
                for _ in range(each):
                    bin_at[position] = last - turn * step
                    position += 1
            left -= num_taken * each
            if num_taken < runs[row, _COUNT]:
                runs[row, _LAST] = last - num_taken * step
                runs[row, _COUNT] -= num_taken
                row = num_runs
                num_runs += 1
            else:
                top[free] = runs[row, _BELOW]
                if top[free] < 0:
                    remove(words, starts, free)
            goal = free - each * size
            if _push(runs, row, top, goal, last - (num_taken - 1) * step, num_taken, -step):
                insert(words, starts, goal)
    hand_out(sizes, place, bin_at, bin_of)
    return num_bins
