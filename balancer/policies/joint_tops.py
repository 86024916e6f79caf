"""Lower the slowest cells where replicas wait for one another in every micro-batch.

    slot 0: {9 4} {10}   slot 1: {5} {6 1}   tops 13 + 7   ->   move 1, swap 4 and 1 ...   tops 10 + 9

There a step costs what the slowest replica of every micro-batch and stage takes, so what counts is the *top* of each
(micro-batch, stage). The cell that makes a top gives a sample away, or exchanges one, such that it gets lighter in that
stage and no top anywhere rises. A step is never slower afterwards: all its durations are at most what they were.
Partners are drawn from a fixed sequence of pseudo-random numbers, and work is limited by a count of candidates.
Price: exchanges that raise one top to lower another by more are not seen.
"""

import numpy as np
from numpy.typing import NDArray

from packing._jit import jit, jit_inner

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_PROBES = 32  # partners that a cell at the top looks at before its stage counts as stuck
_PROBE_WORK = 4  # candidates that take as long as looking at another partner
_SCANNED = 4  # cells of a slot that are scanned as fast as a candidate
_MULTIPLIER, _INCREMENT, _MASK = 1103515245, 12345, 2**31 - 1


def lower_tops(  # noqa: PLR0917  kernels take flat arguments
    values: Int64Array, capacity: Int64Array, cell_of: Int32Array, num_replicas: int, num_slots: int, max_work: int
) -> Int32Array:
    """A better `cell_of` int32 [n] (replica * M + micro-batch).

    Args:
        values: int64 [n, S + d], times per stage, then sizes. capacity: int64 [d], of a cell.
        max_work: candidates that may be looked at.
    """
    result = cell_of.copy()
    _lower(values, capacity, result, num_replicas, num_slots, max_work)
    return result


@jit
def _lower(  # noqa: PLR0917  kernels take flat arguments
    values: Int64Array, capacity: Int64Array, cell_of: Int32Array, num_replicas: int, num_slots: int, max_work: int
) -> None:
    num_items, num_values = values.shape
    num_stages = num_values - len(capacity)
    num_cells = num_replicas * num_slots
    load = np.zeros((num_cells, num_values), np.int64)
    links = np.full((3, max(num_items, num_cells)), -1, np.int64)  # next item, previous item, first item of a cell
    count = np.zeros(num_cells, np.int64)
    for item in range(num_items):
        _put(values, load, links, count, item, cell_of[item])
    top = np.zeros((num_slots, num_stages), np.int64)
    mean = np.zeros((num_slots, num_stages), np.int64)
    for cell in range(num_cells):
        for stage in range(num_stages):
            top[cell % num_slots, stage] = max(top[cell % num_slots, stage], load[cell, stage])
            mean[cell % num_slots, stage] += load[cell, stage]
    mean //= num_replicas
    stuck = np.zeros((num_slots, num_stages), np.bool_)
    random, turn, idle = 1, 0, 0
    while max_work > 0 and idle < num_slots * num_stages:
        slot, stage = turn // num_stages % num_slots, turn % num_stages
        turn += 1
        idle += 1
        if stuck[slot, stage] or top[slot, stage] <= mean[slot, stage]:
            continue
        high = _highest(load, slot, num_slots, stage)
        max_work -= num_replicas // _SCANNED + 1
        top[slot, stage] = load[high, stage]  # what raised it may have been lowered since
        want = top[slot, stage] - mean[slot, stage]
        if want <= 0:
            continue
        best_gain, best_give, best_take, best_low = 0, -1, -1, -1
        for _ in range(_PROBES):
            random = (random * _MULTIPLIER + _INCREMENT) & _MASK
            low = (random >> 4) % num_cells
            max_work -= _PROBE_WORK
            if low == high or load[low, stage] >= top[low % num_slots, stage]:
                continue
            gain, give, take, seen = _best(values, capacity, load, links, count, top, high, low, stage, num_slots, want)
            max_work -= seen
            if gain > best_gain:
                best_gain, best_give, best_take, best_low = gain, give, take, low
                if 2 * gain >= want:
                    break
        if best_give < 0:
            stuck[slot, stage] = True
            continue
        idle = 0
        _take_out(values, load, links, count, best_give, high)
        if best_take >= 0:
            _take_out(values, load, links, count, best_take, best_low)
            _put(values, load, links, count, best_take, high)
            cell_of[best_take] = high
        _put(values, load, links, count, best_give, best_low)
        cell_of[best_give] = best_low


@jit_inner
def _highest(load: Int64Array, slot: int, num_slots: int, stage: int) -> int:
    """The cell of a slot that stands highest in a stage."""
    high = slot
    for cell in range(slot, load.shape[0], num_slots):
        if load[cell, stage] > load[high, stage]:
            high = cell
    return high


@jit_inner
def _best(  # noqa: PLR0917  kernels take flat arguments
    values: Int64Array,
    capacity: Int64Array,
    load: Int64Array,
    links: Int64Array,
    count: Int64Array,
    top: Int64Array,
    high: int,
    low: int,
    stage: int,
    num_slots: int,
    want: int,
) -> tuple[int, int, int, int]:
    """(gain up to `want`, item to give, item to take or -1, candidates seen); give is -1 where nothing helps."""
    num_stages = top.shape[1]
    room = top[low % num_slots, stage] - load[low, stage]
    best_gain, best_give, best_take, seen = 0, -1, -1, 0
    give = links[2, high]
    while give >= 0:
        take = -1
        if count[high] == 1:  # a cell keeps a sample
            take = links[2, low]
        while True:
            seen += 1
            change = values[give, stage] - (values[take, stage] if take >= 0 else 0)
            if best_gain < change <= room:
                fits = True
                for column in range(values.shape[1]):
                    moved = values[give, column] - (values[take, column] if take >= 0 else 0)
                    if column < num_stages:
                        most_low, most_high = top[low % num_slots, column], top[high % num_slots, column]
                    else:
                        most_low = most_high = capacity[column - num_stages]
                    if load[low, column] + moved > most_low or load[high, column] - moved > most_high:
                        fits = False
                        break
                if fits:
                    best_gain, best_give, best_take = min(change, want), give, take
                    if change >= want:
                        return best_gain, best_give, best_take, seen
            take = links[2, low] if take < 0 else links[0, take]
            if take < 0:
                break
        give = links[0, give]
    return best_gain, best_give, best_take, seen


@jit_inner
def _put(  # noqa: PLR0917  kernels take flat arguments
    values: Int64Array, load: Int64Array, links: Int64Array, count: Int64Array, item: int, cell: int
) -> None:
    first = links[2, cell]
    links[0, item], links[1, item], links[2, cell] = first, -1, item
    if first >= 0:
        links[1, first] = item
    count[cell] += 1
    for column in range(values.shape[1]):
        load[cell, column] += values[item, column]


@jit_inner
def _take_out(  # noqa: PLR0917  kernels take flat arguments
    values: Int64Array, load: Int64Array, links: Int64Array, count: Int64Array, item: int, cell: int
) -> None:
    after, before = links[0, item], links[1, item]
    if before >= 0:
        links[0, before] = after
    else:
        links[2, cell] = after
    if after >= 0:
        links[1, after] = before
    count[cell] -= 1
    for column in range(values.shape[1]):
        load[cell, column] -= values[item, column]
