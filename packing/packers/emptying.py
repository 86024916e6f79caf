"""A pass that takes the emptiest bins apart and puts their items elsewhere; any number of dimensions.

    [9] [5 2] [4 4], capacity 10, 5 2 -> the others: 2 fits beside 4 4, 5 nowhere -> nothing changes
    [6 3] [5 4] [1 1], capacity 10                                               -> [6 3 1] [5 4 1]

Bins are tried from the emptiest on. Each of its items, largest first, goes where it leaves least free; where it fits
nowhere, it may take the place of a smaller item that fits in a third bin. Either all items of a bin move or none, so
there are never more bins than before. Price: work is bounded by counts (only the roomiest bins take part), about a
millisecond; of use at the end of a packing, where few bins are left half empty, not against waste in all of them.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grouping import group_by_bin
from packing.inputs import IntArray, PartArray
from packing.scoring import score_terms, scores

_MAX_BINS = 192  # roomiest bins that take part
_MAX_VICTIMS = 48  # bins tried
_MAX_CHECKS = 1_000_000  # comparisons of an item with a bin


def empty_bins(
    sizes: IntArray, capacity: IntArray, bin_of: PartArray, num_bins: int, enough: int
) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins): at most `num_bins`; stops at `enough`. `bin_of` is left as it is."""
    if num_bins <= max(enough, 1):
        return bin_of, num_bins
    free = capacity - group_by_bin(bin_of, sizes, num_bins)[2]
    shift, weight = score_terms(sizes, capacity)
    roomiest = np.argsort(-scores(free, shift, weight), kind="stable")[:_MAX_BINS]
    rank = np.full(num_bins, -1, np.int64)
    rank[roomiest] = np.arange(len(roomiest))
    rank_of = rank[bin_of]
    taking_part = np.flatnonzero(rank_of >= 0)
    score = scores(sizes[taking_part], shift, weight)
    largest_first = np.argsort(-score, kind="stable")
    taking_part = taking_part[largest_first]
    at = rank_of[taking_part]
    num_left = _empty(
        np.ascontiguousarray(sizes[taking_part]),
        np.ascontiguousarray(free[roomiest]),
        at,
        score[largest_first],
        num_bins - max(enough, 1),
    )
    if num_left == len(roomiest):
        return bin_of, num_bins
    moved = bin_of.copy()
    moved[taking_part] = roomiest[at]
    kept = np.zeros(num_bins, np.bool_)
    kept[moved] = True
    return (np.cumsum(kept) - 1)[moved].astype(np.int32), int(kept.sum())


@jit_inner
def _fitting(sizes: IntArray, item: int, free: IntArray, slot: int, without: int) -> bool:
    """Whether the item fits in the bin, once item `without` (or none, -1) has left it."""
    for column in range(free.shape[1]):
        room = free[slot, column] + (sizes[without, column] if without >= 0 else 0)
        if sizes[item, column] > room:
            return False
    return True


@jit_inner
def _move(sizes: IntArray, item: int, free: IntArray, at: IntArray, slot: int) -> None:
    for column in range(free.shape[1]):
        free[at[item], column] += sizes[item, column]
        free[slot, column] -= sizes[item, column]
    at[item] = slot


@jit_inner
def _slot_for(sizes: IntArray, item: int, free: IntArray, closed: IntArray, other: int) -> int:
    """The last of the bins, roomiest first, that takes the item: a tight one; not `other`. -1: none."""
    for slot in range(free.shape[0] - 1, -1, -1):
        if closed[slot] == 0 and slot != other and _fitting(sizes, item, free, slot, -1):
            return slot
    return -1


@jit
def _empty(sizes: IntArray, free: IntArray, at: IntArray, score: IntArray, goal: int) -> int:
    """Items [m], largest score first, in bins 0, 1, ... by decreasing room. Changes `at`; returns bins left."""
    num_items, num_slots = sizes.shape[0], free.shape[0]
    closed = np.zeros(num_slots, np.int64)  # 1: emptied, or being emptied
    moved, origin = np.empty(2 * num_items + 2, np.int64), np.empty(2 * num_items + 2, np.int64)
    checks = num_closed = 0
    for victim in range(min(num_slots, _MAX_VICTIMS)):
        if num_closed >= goal or checks > _MAX_CHECKS:
            break
        closed[victim] = 1
        num_moved, done = 0, True
        for item in range(num_items):
            if at[item] != victim:
                continue
            slot, third, leaving = _slot_for(sizes, item, free, closed, victim), -1, -1
            checks += num_slots
            for other in range(item + 1, num_items if slot < 0 else 0):
                if checks > _MAX_CHECKS:
                    break
                checks += 1
                if closed[at[other]] != 0 or score[other] >= score[item]:
                    continue
                if _fitting(sizes, item, free, at[other], other):
                    checks += num_slots
                    third = _slot_for(sizes, other, free, closed, at[other])
                    if third >= 0:
                        leaving, slot = other, at[other]
                        break
            if slot < 0:
                done = False
                break
            if leaving >= 0:
                moved[num_moved], origin[num_moved] = leaving, slot
                _move(sizes, leaving, free, at, third)
                num_moved += 1
            moved[num_moved], origin[num_moved] = item, victim
            _move(sizes, item, free, at, slot)
            num_moved += 1
        if done:
            num_closed += 1
            continue
        for index in range(num_moved - 1, -1, -1):
            _move(sizes, moved[index], free, at, origin[index])
        closed[victim] = 0
    return int(num_slots - num_closed)
