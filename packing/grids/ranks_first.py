"""Ranks first: heaviest item first, to the rank with the lowest total, there to the lightest cell that has room.

    weights 9 4 3 3 2 1, 2 ranks x 2 slots   ->   rank 0: {9 | 2}, rank 1: {3 3 | 4 1}, totals 11 and 11

LPT (Graham 1969) over ranks and, inside each rank, over its slots, in one pass; moves and swaps between ranks follow.
Totals of ranks come out even, which is what counts when ranks meet once a step. Price: slots are not alike across
ranks (9 beside 6 above), so ranks that meet in every micro-batch wait; `level_fill` is for them.
Cost: O(n (R + M)) before refinement.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grids.cells import finish, whole_bins
from packing.inputs import IntArray, PartArray
from packing.partitioners.order import descending
from packing.problem import GridProblem


def ranks_first(problem: GridProblem) -> PartArray | None:
    """cell_of int32 [n] = rank * num_slots + slot, or None when no assignment within the capacities was found."""
    cell_of, complete = _deal(
        problem.values,
        problem.capacity,
        descending(problem.weights),
        problem.num_ranks,
        problem.num_slots,
    )
    start = cell_of if complete else whole_bins(problem)
    return None if start is None else finish(problem, start)


@jit
def _deal(
    values: IntArray, capacity: IntArray, order: IntArray, num_ranks: int, num_slots: int
) -> tuple[PartArray, bool]:
    """(cell_of, whether every item found room). No cell stays empty when there are at least as many items as cells."""
    num_items, num_values = values.shape
    num_stages = num_values - capacity.shape[0]
    cell_of = np.empty(num_items, np.int32)
    load = np.zeros((num_ranks * num_slots, num_values), np.int64)
    total = np.zeros((num_ranks, num_stages), np.int64)
    height = np.zeros(num_ranks, np.int64)
    count = np.zeros(num_ranks * num_slots, np.int64)
    empty_cells = np.full(num_ranks, num_slots, np.int64)
    refused = np.full(num_ranks, -1, np.int64)  # last item that no cell of the rank had room for
    num_empty = num_ranks * num_slots
    may_stay_empty = num_items < num_empty
    for turn in range(num_items):
        item = order[turn]
        only_empty = not may_stay_empty and num_items - turn <= num_empty
        cell = -1
        while cell < 0:
            best, best_height = -1, 2**62 + 1
            for rank in range(num_ranks):
                if height[rank] >= best_height or refused[rank] == item or (only_empty and empty_cells[rank] == 0):
                    continue
                new_height = 0
                for stage in range(num_stages):
                    new_height = max(new_height, total[rank, stage] + values[item, stage])
                if best < 0 or new_height < best_height:
                    best, best_height = rank, new_height
            if best < 0:
                return cell_of, False
            cell = _lightest(values, capacity, load, count, item, best * num_slots, num_slots, only_empty)
            refused[best] = item
        cell_of[item] = cell
        if count[cell] == 0:
            num_empty -= 1
            empty_cells[best] -= 1
        count[cell] += 1
        height[best] = best_height
        for stage in range(num_stages):
            total[best, stage] += values[item, stage]
        for column in range(num_values):
            load[cell, column] += values[item, column]
    return cell_of, True


@jit_inner
def _lightest(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    count: IntArray,
    item: int,
    first: int,
    num_slots: int,
    only_empty: bool,
) -> int:
    """The cell of a rank that stands lowest with the item in it, among those with room for it; -1 if there is none."""
    num_stages = values.shape[1] - capacity.shape[0]
    best, best_height = -1, 2**62 + 1
    for cell in range(first, first + num_slots):
        height = 0
        for stage in range(num_stages):
            height = max(height, load[cell, stage] + values[item, stage])
        fits = (best < 0 or height < best_height) and not (only_empty and count[cell] > 0)
        for column in range(num_stages, values.shape[1]):
            if values[item, column] > capacity[column - num_stages] - load[cell, column]:
                fits = False
        if fits:
            best, best_height = cell, height
    return best
