"""Best-fit-decreasing in several dimensions: items and free space are ordered by their scores (packing/scoring.py).

Open bins are kept sorted by the score of their free space; a scan starts where a bin could first fit, and is long
where one dimension is full and another is not: O(n * bins) at worst, 1e5 items take seconds. No approximation factor.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.inputs import IntArray, PartArray
from packing.scoring import score_terms, scores


def best_fit_vector(sizes: IntArray, capacity: IntArray) -> tuple[PartArray, int]:
    """The vector route for any d, also d = 1; see `best_fit_decreasing`."""
    shift, weight = score_terms(sizes, capacity)
    score = scores(sizes, shift, weight)
    order = np.argsort(-score, kind="stable")
    # smallest[t, d]: the least size among items t, t + 1, ... of the order; a bin below it is closed for good.
    smallest = np.ascontiguousarray(np.minimum.accumulate(sizes[order][::-1], axis=0)[::-1])
    bin_of, num_bins = _best_fit_vector(sizes, capacity, order, score, smallest, shift, weight)
    return bin_of, int(num_bins)


@jit_inner
def _first_at_least(values: IntArray, count: int, value: int) -> int:
    """Least position among the first `count` ascending values whose value is at least `value`, or `count`."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@jit_inner
def _fits(sizes: IntArray, row: int, residual: IntArray, index: int) -> bool:
    for column in range(sizes.shape[1]):  # noqa: SIM110  numba has no generator expressions
        if sizes[row, column] > residual[index, column]:
            return False
    return True


@jit
def _best_fit_vector(  # noqa: PLR0917  kernels take flat arguments
    sizes: IntArray,
    capacity: IntArray,
    order: IntArray,
    score: IntArray,
    smallest: IntArray,
    shift: IntArray,
    weight: IntArray,
) -> tuple[PartArray, int]:
    num_items, num_columns = sizes.shape
    bin_of = np.empty(num_items, np.int32)
    residual = np.empty((num_items, num_columns), np.int64)
    open_bin = np.empty(num_items + 1, np.int64)  # sorted by open_score; among equals the one touched last comes first
    open_score = np.empty(num_items + 1, np.int64)
    num_open = num_bins = 0
    for turn in range(num_items):
        item = order[turn]
        place = _first_at_least(open_score, num_open, score[item])
        while place < num_open and not _fits(sizes, item, residual, open_bin[place]):
            place += 1
        if place == num_open:
            open_bin[place] = num_bins
            for column in range(num_columns):
                residual[num_bins, column] = capacity[column]
            num_bins += 1
            num_open += 1
        index = open_bin[place]
        bin_of[item] = index
        left = 0
        for column in range(num_columns):
            residual[index, column] -= sizes[item, column]
            left += (residual[index, column] >> shift[column]) * weight[column]
        if turn + 1 < num_items and not _fits(smallest, turn + 1, residual, index):
            num_open -= 1
            for other in range(place, num_open):
                open_bin[other], open_score[other] = open_bin[other + 1], open_score[other + 1]
            continue
        goal = _first_at_least(open_score, place, left)
        for other in range(place, goal, -1):
            open_bin[other], open_score[other] = open_bin[other - 1], open_score[other - 1]
        open_bin[goal], open_score[goal] = index, left
    return bin_of, num_bins
