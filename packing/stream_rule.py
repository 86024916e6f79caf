"""Packing a stream: one bin at a time out of a window of waiting items, whenever the window overflows.

    window 6 5 4 3 2 2, capacity 10   ->   [6 4] leaves   ->   window 5 3 2 2

A bin is a *start* and the items that complete it best (packing/stream_search.py). Starts are tried in this order
until one leaves little room:

    1. the largest item waiting; or the oldest, and no other, once it has seen `PATIENCE` windows of arrivals
    2. items at each quarter of the window by size, if their bin is clearly fuller
    3. none: the fullest bin of all, by sums of sizes (one dimension only)

The largest items set the pace, so that what is hard to place does not pile up; a fuller bin elsewhere goes first
where the largest would leave much room, so that they wait for what completes them: it matters when sizes descend.

Price: a heuristic without an approximation factor, O(lookahead) per item at least.
"""

# ruff: noqa: PLR0917  kernels take flat arguments

import numpy as np

from packing._jit import jit, jit_inner
from packing.inputs import IntArray
from packing.stream_search import NEAR_BITS, complete, fill_by_sums
from packing.stream_window import (
    CAPACITY,
    FIRST_SIZE,
    NUMBER,
    SCORE,
    SHIFT,
    WEIGHT,
    fits,
    insert,
    remove,
    reset,
    slack_of,
    sort_numbers,
    take,
)

PATIENCE = 16
"""Arrivals, in windows, after which the oldest item starts the next bin."""

_STARTS = 4  # places by size: the largest, and at each quarter
_POOR_BITS = 5  # above 1/32 of slack sums of sizes are searched
_DEMAND_STEPS = 1024


@jit_inner
def _demands(window: IntArray, stop: int, terms: IntArray) -> IntArray:
    """How scarce each dimension is among the items that wait, sharpened: [d], the scarcest about `_DEMAND_STEPS`."""
    num_columns = terms.shape[1]
    demand = np.empty(num_columns, np.int64)
    most = 0
    for column in range(num_columns):
        total = 0
        for place in range(stop):
            total += window[FIRST_SIZE + column, place] >> terms[SHIFT, column]
        demand[column] = total * terms[WEIGHT, column]
        most = max(most, demand[column])
    for column in range(num_columns):
        share = demand[column] // max(1, most // _DEMAND_STEPS)
        square = share * share // _DEMAND_STEPS
        demand[column] = max(1, square * square // _DEMAND_STEPS)
    return demand


@jit_inner
def _choose(window: IntArray, stop: int, start: int, free: bool, terms: IntArray, picks: IntArray) -> int:
    """Number of places of the next bin, in picks[1]; `free` when it need not hold the item at `start`."""
    num_columns = terms.shape[1]
    demand = np.empty(num_columns, np.int64)
    demand[0] = 1
    if num_columns > 1:
        demand = _demands(window, stop, terms)
    room = np.empty(num_columns, np.int64)
    reset(room, terms)
    full = slack_of(room, terms, demand)
    near, best, num_picks = full >> NEAR_BITS, full + 1, 0
    for quarter in range(_STARTS if free else 1):
        limit = best - near if quarter > 0 else best
        slack, num_found = complete(window, stop, start + stop * quarter // _STARTS, terms, demand, limit, picks)
        if num_found > 0:
            best, num_picks = slack, num_found
        if best <= near:
            break
    if num_columns == 1 and best > full >> _POOR_BITS:
        num_found = fill_by_sums(window, stop, start, terms, free, best, picks)
        num_picks = num_found if num_found > 0 else num_picks
    return num_picks


@jit_inner
def _first_start(window: IntArray, count: int, too_old: int) -> tuple[int, bool]:
    """Place of the oldest item and True when it came before `too_old`; else of the largest, and False."""
    oldest = 0
    for place in range(count):
        if window[NUMBER, place] < window[NUMBER, oldest]:
            oldest = place
    if window[NUMBER, oldest] < too_old:
        return oldest, True
    return 0, False


@jit_inner
def _take_bin(
    window: IntArray, count: int, terms: IntArray, too_old: int, ending: bool, picks: IntArray, room: IntArray
) -> int:
    """Take one bin out of the window: numbers of its items go to picks[0], its free room to room; returns how many."""
    start, forced = _first_start(window, count, too_old)
    stop = count
    while stop > 0 and window[SCORE, stop - 1] == 0:
        stop -= 1
    num_picks = _choose(window, stop, start, not (forced or ending), terms, picks)
    reset(room, terms)
    for index in range(num_picks):
        take(window, picks[1, index], room)
    for place in range(stop, count):  # items of score 0 take no room, or next to none
        if place != start and fits(window, place, room):
            picks[1, num_picks] = place
            num_picks += 1
            take(window, place, room)
    sort_numbers(window, picks, num_picks)
    remove(window, count, picks, num_picks)
    return num_picks


@jit
def advance(
    window: IntArray, num_waiting: int, num_arrived: int, arrivals: IntArray, terms: IntArray, flush: bool
) -> tuple[IntArray, IntArray, IntArray, int]:
    """Let items arrive one by one and make a bin whenever the window overflows; with `flush` empty it at the end.

    window [2 + d, lookahead + 1], changed in place; arrivals [m, d]; terms [3, d].
    Returns numbers of items bin after bin, where each bin ends among them, loads [num_bins, d], and the number waiting.
    """
    lookahead = window.shape[1] - 1
    num_items, num_columns = arrivals.shape
    order = np.empty(num_waiting + num_items, np.int64)
    ends = np.empty(num_waiting + num_items, np.int64)
    load = np.empty((num_waiting + num_items, num_columns), np.int64)
    picks = np.empty((2, lookahead + 1), np.int64)
    room = np.empty(num_columns, np.int64)
    num_bins = num_taken = 0
    for item in range(num_items + 1):
        ending = item == num_items
        if not ending:
            insert(window, num_waiting, terms, arrivals, item, num_arrived)
            num_waiting += 1
            num_arrived += 1
        while num_waiting > (0 if ending and flush else lookahead):
            too_old = num_arrived - PATIENCE * lookahead
            taken = _take_bin(window, num_waiting, terms, too_old, ending, picks, room)
            for index in range(taken):
                order[num_taken + index] = picks[0, index]
            for column in range(num_columns):
                load[num_bins, column] = terms[CAPACITY, column] - room[column]
            num_waiting -= taken
            num_taken += taken
            ends[num_bins] = num_taken
            num_bins += 1
    return order[:num_taken], ends[:num_bins], load[:num_bins], num_waiting
