"""Best-fit-decreasing: largest item first, each into the fullest bin that still takes it.

    sizes 6 5 4 3 2, capacity 10   ->   [6 4] [5 3 2]

At most 11/9 OPT + 6/9 bins in one dimension (Dósa and Sgall's tight bound for the decreasing rules); on real lengths
within a few hundredths of a percent of the bound. Price: reorders items; in several dimensions there is no such
factor.

Two routes with the same result where both apply (ties go to the bin touched last):
    scalar  counting sort, then a bitset over residual capacities: O(n + capacity) plus a few words per item
    vector  open bins kept sorted by the score of their free space; a scan starts where a bin could first fit, and is
            long where one dimension is full and another is not: O(n * bins) at worst, 1e5 items take seconds
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.inputs import IntArray, PartArray
from packing.scoring import score_terms, scores

_MAX_SCALAR_CAPACITY = 2**22  # tables of the scalar route: 16 bytes for each unit of capacity
_MAX_LEVELS = 8  # 32**8 members
_WORD_BITS = 32  # words of 32 bits in int64, so that no operation overflows, also without the compiler

# Position of the lowest set bit by a de Bruijn multiplication.
_LOWEST_BIT = np.zeros(32, np.int64)
for _bit in range(32):
    _LOWEST_BIT[((1 << _bit) * 0x077CB531 & 0xFFFFFFFF) >> 27] = _bit


def best_fit_decreasing(sizes: IntArray, capacity: IntArray) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins) for sizes [n, d] that each fit `capacity` [d]."""
    limit = int(capacity[0])
    if sizes.shape[1] == 1 and limit <= min(_MAX_SCALAR_CAPACITY, 4096 + 64 * sizes.shape[0]):
        bin_of, num_bins = _best_fit_scalar(sizes[:, 0].copy(), limit)
        return bin_of, int(num_bins)
    return best_fit_vector(sizes, capacity)


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
def _level_starts(num_words: int) -> IntArray:
    """Where each level of the bitset begins among its words, and the number of words; the top level is one word."""
    sizes = np.empty(_MAX_LEVELS, np.int64)
    num_levels = 0
    while num_levels == 0 or num_words > 1:
        num_words = (num_words + _WORD_BITS - 1) // _WORD_BITS
        sizes[num_levels] = num_words
        num_levels += 1
    starts = np.zeros(num_levels + 1, np.int64)
    for level in range(num_levels):
        starts[level + 1] = starts[level] + sizes[level]
    return starts


@jit_inner
def _lowest_bit(word: int) -> int:
    return int(_LOWEST_BIT[((word & -word) * 0x077CB531 & 0xFFFFFFFF) >> 27])


@jit_inner
def _find_at_least(words: IntArray, starts: IntArray, value: int) -> int:
    """Smallest member >= value of the set, or -1. A bit of level k + 1 says that its word of level k is not 0."""
    position = value
    for level in range(starts.shape[0] - 1):
        index = position // _WORD_BITS
        if starts[level] + index >= starts[level + 1]:
            return -1
        shift = position % _WORD_BITS
        word = (words[starts[level] + index] >> shift) << shift
        if word != 0:
            position = index * _WORD_BITS + _lowest_bit(word)
            for down in range(level - 1, -1, -1):
                word = words[starts[down] + position]
                position = position * _WORD_BITS + _lowest_bit(word)
            return position
        position = index + 1
    return -1


@jit_inner
def _insert(words: IntArray, starts: IntArray, value: int) -> None:
    for level in range(starts.shape[0] - 1):
        index = starts[level] + value // _WORD_BITS
        before = words[index]
        words[index] = before | (1 << (value % _WORD_BITS))
        if before != 0:
            return
        value //= _WORD_BITS


@jit_inner
def _remove(words: IntArray, starts: IntArray, value: int) -> None:
    for level in range(starts.shape[0] - 1):
        index = starts[level] + value // _WORD_BITS
        words[index] &= ~(1 << (value % _WORD_BITS))
        if words[index] != 0:
            return
        value //= _WORD_BITS


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
    starts = _level_starts(capacity + 1)
    words = np.zeros(starts[-1], np.int64)
    newest = np.full(capacity + 1, -1, np.int32)  # residual -> bin touched last; `below` links the others
    below = np.empty(num_items, np.int32)
    bin_of = np.empty(num_items, np.int32)
    num_bins = 0
    for item in _decreasing(sizes, capacity):
        residual = _find_at_least(words, starts, sizes[item])
        if residual < 0:
            index, residual = num_bins, capacity
            num_bins += 1
        else:
            index = newest[residual]
            newest[residual] = below[index]
            if newest[residual] < 0:
                _remove(words, starts, residual)
        bin_of[item] = index
        residual -= sizes[item]
        if newest[residual] < 0:
            _insert(words, starts, residual)
        below[index] = newest[residual]
        newest[residual] = index
    return bin_of, num_bins


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
