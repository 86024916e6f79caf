"""Ranks first: heaviest item first, to the rank with the lowest total, there to the lightest cell that has room.

    weights 9 4 3 3 2 1, 2 ranks x 2 slots   ->   rank 0: {9 | 2}, rank 1: {3 3 | 4 1}, totals 11 and 11

LPT (Graham 1969) over ranks and, inside each rank, over its slots, in one pass; moves and swaps between ranks follow.
Totals of ranks come out even, which is what counts when ranks meet once a step. Price: slots are not alike across
ranks (9 beside 6 above), so ranks that meet in every micro-batch wait; `level_fill` is for them.
Where stages compete, an item looks at the front of a heap of ranks only. O(n (log R + M)) before refinement.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grids.cells import finish, whole_bins
from packing.grids.heap import sift_down
from packing.inputs import IntArray, PartArray
from packing.partitioners.order import descending
from packing.problem import GridProblem

_FRONT = 16  # lowest ranks that an item looks at where stages compete; one where there is one stage


def ranks_first(problem: GridProblem) -> PartArray | None:
    """cell_of int32 [n] = rank * num_slots + slot, or None when no assignment within the capacities was found."""
    cell_of, complete = deal(
        problem.values,
        problem.capacity,
        descending(problem.weights),
        np.zeros(problem.num_slots, np.int64),
        problem.num_ranks,
    )
    start = cell_of if complete else whole_bins(problem)
    return None if start is None else finish(problem, start)


@jit
def deal(
    values: IntArray, capacity: IntArray, order: IntArray, level: IntArray, num_ranks: int
) -> tuple[PartArray, bool]:
    """(cell_of, whether every item found room). No cell stays empty when there are at least as many items as cells.

    level int64 [M]: what a slot may stand higher than others; cells of a rank compare by height above their level.
    """
    num_items, num_values = values.shape
    num_slots = level.shape[0]
    num_stages = num_values - capacity.shape[0]
    cell_of = np.empty(num_items, np.int32)
    load = np.zeros((num_ranks * num_slots, num_values), np.int64)
    total = np.zeros((num_ranks, num_stages), np.int64)
    height = np.zeros(num_ranks, np.int64)
    heap = np.arange(num_ranks)
    count = np.zeros(num_ranks * num_slots, np.int64)
    empty_cells = np.full(num_ranks, num_slots, np.int64)
    refused = np.full(num_ranks, -1, np.int64)  # last item that no cell of the rank had room for
    num_empty = num_ranks * num_slots
    may_stay_empty = num_items < num_empty
    front = 1 if num_stages == 1 else _FRONT
    for turn in range(num_items):
        item = order[turn]
        only_empty = not may_stay_empty and num_items - turn <= num_empty
        cell, start, stop = -1, 0, min(front, num_ranks)
        best, best_height = -1, 2**62 + 1
        while cell < 0:
            best, best_height = -1, 2**62 + 1
            for place in range(start, stop):
                rank = heap[place]
                if height[rank] >= best_height or refused[rank] == item or (only_empty and empty_cells[rank] == 0):
                    continue
                new_height = 0
                for stage in range(num_stages):
                    new_height = max(new_height, total[rank, stage] + values[item, stage])
                if best < 0 or new_height < best_height:
                    best, best_height = place, new_height
            if best < 0:
                if stop == num_ranks:
                    return cell_of, False
                start, stop = stop, min(2 * stop, num_ranks)  # the front has no room: further back
                continue
            rank = heap[best]
            cell = _lightest(values, capacity, load, level, count, item, rank * num_slots, only_empty)
            refused[rank] = item
        rank = heap[best]
        cell_of[item] = cell
        if count[cell] == 0:
            num_empty -= 1
            empty_cells[rank] -= 1
        count[cell] += 1
        height[rank] = best_height
        for stage in range(num_stages):
            total[rank, stage] += values[item, stage]
        for column in range(num_values):
            load[cell, column] += values[item, column]
        sift_down(heap, num_ranks, height, best)
    return cell_of, True


@jit_inner
def _lightest(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    level: IntArray,
    count: IntArray,
    item: int,
    first: int,
    only_empty: bool,
) -> int:
    """The cell of a rank that stands lowest above its level with the item in it, among those with room; or -1."""
    num_stages = values.shape[1] - capacity.shape[0]
    best, best_excess = -1, 2**62 + 1
    for slot in range(level.shape[0]):
        cell = first + slot
        height = 0
        for stage in range(num_stages):
            height = max(height, load[cell, stage] + values[item, stage])
        fits = (best < 0 or height - level[slot] < best_excess) and not (only_empty and count[cell] > 0)
        for column in range(num_stages, values.shape[1]):
            if values[item, column] > capacity[column - num_stages] - load[cell, column]:
                fits = False
        if fits:
            best, best_excess = cell, height - level[slot]
    return best
