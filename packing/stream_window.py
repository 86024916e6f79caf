"""The window of a stream: items that wait, sorted by score, in columns of an int64 array [2 + d, lookahead + 1].

    rows: number of the item in the stream, score (largest first, equals in order of arrival), then one size a dimension

Scores and slack are sums over dimensions of (size >> shift) * weight, from the terms [3, d] of a stream: capacity,
shift, weight. One dimension scores as itself. Kernels only; no constant is passed to another kernel, since numba would
compile that anew for each.
"""

# ruff: noqa: PLR0917  kernels take flat arguments

import numpy as np

from packing._jit import jit_inner
from packing.inputs import IntArray

NUMBER, SCORE, FIRST_SIZE = 0, 1, 2  # rows of the window
CAPACITY, SHIFT, WEIGHT = 0, 1, 2  # rows of the terms

_SIZE_BITS = 30  # of a capacity that scores see; whether an item fits is always exact
_SCORE_BITS = 40  # of the score of a full dimension


def window_terms(capacity: IntArray) -> IntArray:
    """int64 [3, d]. Every dimension weighs the same, for the totals of a stream are unknown."""
    if capacity.shape[0] == 1:
        return np.array([[capacity[0]], [0], [1]], np.int64)
    shift = [max(0, int(limit).bit_length() - _SIZE_BITS) for limit in capacity]
    weight = [(1 << _SCORE_BITS) // (int(limit) >> cut) for limit, cut in zip(capacity, shift, strict=True)]
    return np.array([capacity, shift, weight], np.int64)


def window_scores(sizes: IntArray, terms: IntArray) -> IntArray:
    """int64 [n] of sizes [n, d]."""
    total: IntArray = ((sizes >> terms[SHIFT]) * terms[WEIGHT]).sum(axis=1)
    return total


@jit_inner
def first_at_most(window: IntArray, stop: int, score: int) -> int:
    """Least place below `stop` whose score is at most `score` (scores descend), or `stop`."""
    low, high = 0, stop
    while low < high:
        middle = (low + high) // 2
        if window[SCORE, middle] > score:
            low = middle + 1
        else:
            high = middle
    return low


@jit_inner
def insert(window: IntArray, count: int, terms: IntArray, sizes: IntArray, item: int, number: int) -> None:
    """Row `item` of the sizes, behind items of equal score, which came earlier."""
    score = 0
    for column in range(sizes.shape[1]):
        score += (sizes[item, column] >> terms[SHIFT, column]) * terms[WEIGHT, column]
    goal = first_at_most(window, count, score - 1)
    for row in range(window.shape[0]):
        for place in range(count, goal, -1):
            window[row, place] = window[row, place - 1]
    window[NUMBER, goal], window[SCORE, goal] = number, score
    for column in range(sizes.shape[1]):
        window[FIRST_SIZE + column, goal] = sizes[item, column]


@jit_inner
def remove(window: IntArray, count: int, picks: IntArray, num_picks: int) -> None:
    """Take the items at picks[1] out of the window."""
    for index in range(num_picks):
        window[NUMBER, picks[1, index]] = -1
    for back in range(window.shape[0]):
        row = window.shape[0] - 1 - back  # numbers, which say what goes, come last
        kept = 0
        for place in range(count):
            if window[NUMBER, place] >= 0:
                window[row, kept] = window[row, place]
                kept += 1


@jit_inner
def sort_numbers(window: IntArray, picks: IntArray, num_picks: int) -> None:
    """Numbers of the items at picks[1], ascending, into picks[0]: Shell sort, for bins are short and a general sort
    costs seconds to compile."""
    gap = 1
    for index in range(num_picks):
        picks[0, index] = window[NUMBER, picks[1, index]]
        gap = max(gap, 3 * gap + 1 if index > 3 * gap else gap)
    while gap > 0:
        for index in range(gap, num_picks):
            value, other = picks[0, index], index - gap
            while other >= 0 and picks[0, other] > value:
                picks[0, other + gap] = picks[0, other]
                other -= gap
            picks[0, other + gap] = value
        gap //= 3


@jit_inner
def reset(room: IntArray, terms: IntArray) -> None:
    for column in range(room.shape[0]):
        room[column] = terms[CAPACITY, column]


@jit_inner
def take(window: IntArray, place: int, room: IntArray) -> None:
    for column in range(room.shape[0]):
        room[column] -= window[FIRST_SIZE + column, place]


@jit_inner
def fits(window: IntArray, place: int, room: IntArray) -> bool:
    for column in range(room.shape[0]):  # noqa: SIM110  numba has no generator expressions
        if window[FIRST_SIZE + column, place] > room[column]:
            return False
    return True


@jit_inner
def score_of(room: IntArray, terms: IntArray) -> int:
    total = 0
    for column in range(room.shape[0]):
        total += (room[column] >> terms[SHIFT, column]) * terms[WEIGHT, column]
    return total


@jit_inner
def slack_of(room: IntArray, terms: IntArray, demand: IntArray) -> int:
    """Free room, each dimension counting by its demand."""
    total = 0
    for column in range(room.shape[0]):
        total += (room[column] >> terms[SHIFT, column]) * terms[WEIGHT, column] * demand[column]
    return total
