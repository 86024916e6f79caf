"""Completing a bin out of a window (packing/stream_window.py): two searches that write places to picks[1].

`complete` goes depth first, largest item first, with a bounded number of steps: it keeps small items for later, and
finds exact fills wherever many items wait. `fill_by_sums` lists all sums of sizes that can be reached, as bits: it
finds the fullest bin where items are large and few fit together, in one dimension.

Depth first with a fixed first item is the rule of Fleszar and Hindi, "New heuristics for one-dimensional
bin-packing", 2002, after the minimum bin slack of Gupta and Ho, 1999.
"""

# ruff: noqa: PLR0917  kernels take flat arguments

import numpy as np

from packing._jit import jit_inner
from packing.bitset import lowest_bit
from packing.inputs import IntArray
from packing.stream_window import CAPACITY, FIRST_SIZE, SCORE, first_at_most, fits, reset, score_of, slack_of, take

NEAR_BITS = 6  # a bin within 1/64 of full needs no other start; another start must gain that much

_STEPS = 200  # items tried for one start, after its first full descent
_SCAN = 16  # items passed over that count as one tried
_UNITS = 4096  # resolution of the sums: sizes are rounded up to it, so nothing exceeds the capacity
_WORD = 32  # bits in use of a word of `reach`
_MASK = 2**32 - 1


@jit_inner
def _keep(picks: IntArray, num_picks: int) -> None:
    for index in range(num_picks):
        picks[1, index] = picks[0, index]


@jit_inner
def complete(
    window: IntArray, stop: int, start: int, terms: IntArray, demand: IntArray, limit: int, picks: IntArray
) -> tuple[int, int]:
    """(slack, number of picks) of the best bin found with the item at `start`; none when its slack reaches `limit`.

    Depth first, largest first. picks[0] is the current branch; the places of the bin go to picks[1].
    """
    room = np.empty(terms.shape[1], np.int64)
    reset(room, terms)
    take(window, start, room)
    picks[0, 0] = start
    depth, place = 1, 0
    steps = num_picks = 0
    while True:
        slack = slack_of(room, terms, demand)
        found = stop if slack == 0 else max(place, first_at_most(window, stop, score_of(room, terms)))
        first = found
        while found < stop and (found == start or not fits(window, found, room)):
            found += 1
        steps += 1 + (found - first) // _SCAN
        if found < stop:
            picks[0, depth] = found
            depth += 1
            take(window, found, room)
            place = found + 1
            continue
        if slack < limit:
            limit, num_picks = slack, depth
            _keep(picks, depth)
        if limit == 0 or steps > _STEPS or depth == 1:
            return limit, num_picks
        depth -= 1
        last = picks[0, depth]
        for column in range(room.shape[0]):
            room[column] += window[FIRST_SIZE + column, last]
        place = max(last + 1, first_at_most(window, stop, window[SCORE, last] - 1))


@jit_inner
def _reach(window: IntArray, stop: int, skip: int, unit: int, goal: int, top: int) -> tuple[IntArray, IntArray]:
    """Sums <= top of items in `unit`s, except the item at `skip`, as bits; and the last place that each sum needs.

    Items come largest first, so a sum is reached with the largest items that reach it. Ends early at `goal`.
    """
    num_words = top // _WORD + 1
    reach = np.zeros(num_words + 1, np.int64)  # the word of sums [32 k, 32 k + 32) at k + 1; none at 0
    fresh = np.zeros(num_words + 1, np.int64)
    via = np.zeros(num_words * _WORD, np.int64)
    reach[1] = 1
    copies = last = 0
    for place in range(stop):
        size = -(-window[FIRST_SIZE, place] // unit)
        copies = copies + 1 if size == last else 1
        last = size
        if place == skip or copies * size > top:
            continue
        word, bit = size // _WORD, size % _WORD
        for index in range(1, num_words + 1 - word):
            moved = ((reach[index] << bit) | (reach[index - 1] >> (_WORD - bit))) & _MASK
            fresh[index + word] = moved & ~reach[index + word]
        for index in range(word + 1, num_words + 1):
            rest = fresh[index]
            reach[index] |= rest
            while rest != 0:
                via[(index - 1) * _WORD + lowest_bit(rest)] = place
                rest &= rest - 1
        if (reach[goal // _WORD + 1] >> (goal % _WORD)) & 1 != 0:
            break
    return reach, via


@jit_inner
def _largest_sum(reach: IntArray, most: int) -> int:
    total = most
    while (reach[total // _WORD + 1] >> (total % _WORD)) & 1 == 0:
        total -= 1
    return total


@jit_inner
def fill_by_sums(
    window: IntArray, stop: int, start: int, terms: IntArray, free: bool, limit: int, picks: IntArray
) -> int:
    """As `complete` for one dimension, exact up to the rounding of sizes; returns the number of picks.

    When `free`, the bin need not hold the item at `start` if it is clearly fuller without.
    """
    capacity = terms[CAPACITY, 0]
    unit = (capacity + _UNITS - 1) // _UNITS
    top = capacity // unit
    goal = max(0, top + -window[FIRST_SIZE, start] // unit)
    reach, via = _reach(window, stop, start, unit, goal, top if free else goal)
    total = _largest_sum(reach, goal)
    num_picks, slack = 1, capacity - window[FIRST_SIZE, start]
    picks[0, 0] = start
    if free:
        fullest = _largest_sum(reach, top)
        if (top - fullest) * unit + (capacity >> NEAR_BITS) < min(limit, (goal - total) * unit):
            num_picks, slack, total = 0, capacity, fullest
    while total > 0:
        place = via[total]
        picks[0, num_picks] = place
        num_picks += 1
        slack -= window[FIRST_SIZE, place]
        total -= -(-window[FIRST_SIZE, place] // unit)
    if slack >= limit:
        return 0
    _keep(picks, num_picks)
    return num_picks
