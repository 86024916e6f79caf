"""Level fill: slot by slot, like with like. A giant sets the level of its slot; the other ranks fill up to it.

    weights 9 4 3 3 2 1, 2 ranks x 2 slots   ->   slot 0: {9} {4 3 1}, slot 1: {2} {3}, slowest ranks 9 + 3 = 12

1. Levels (`slot_levels`): items in descending order, R to a slot; a slot whose largest item stands above what the
   rest averages has that item as its level, all other slots share one level.
2. Heaviest item first, each to the cell that stands lowest against its level (and has room in its capacities).
3. Moves and swaps (`exchange`), after which cells are regrouped, R of like load to a slot (`align`).

The sum over slots of the slowest cell comes out low, which is what counts when ranks meet in every micro-batch.
Price: totals of ranks are less even than those of `ranks_first`, and where stages compete an item looks at the front of
a heap of cells only. O(n log(R M)) before refinement, O(n sqrt(R M)) where capacities are nearly full.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grids.cells import finish, slot_levels, whole_bins
from packing.grids.heap import push, remove, sift_down
from packing.inputs import IntArray, PartArray
from packing.partitioners.order import descending
from packing.problem import GridProblem

_FRONT = 16  # lowest cells that an item looks at where stages compete; one where there is one stage


def level_fill(problem: GridProblem) -> PartArray | None:
    """cell_of int32 [n] = rank * num_slots + slot, or None when no assignment within the capacities was found."""
    levels = slot_levels(problem)
    order = descending(problem.weights)
    cell_of, complete = fill(problem.values, problem.capacity, order, levels.level, problem.num_ranks)
    start = cell_of if complete else whole_bins(problem)
    return None if start is None else finish(problem, start, levels)


@jit
def fill(
    values: IntArray, capacity: IntArray, order: IntArray, level: IntArray, num_ranks: int
) -> tuple[PartArray, bool]:
    """(cell_of, whether every item found room). No cell stays empty when there are at least as many items as cells.

    Cells stand in a heap by their height above their level. One without room for an item is set aside until a review
    finds that it has room for the item of that turn: later items are lighter, as a rule smaller.
    """
    num_items, num_values = values.shape
    num_slots = level.shape[0]
    num_cells = num_ranks * num_slots
    front = 1 if num_values - capacity.shape[0] == 1 else _FRONT
    cell_of = np.empty(num_items, np.int32)
    load = np.zeros((num_cells, num_values), np.int64)
    count = np.zeros(num_cells, np.int64)
    excess = np.empty(num_cells, np.int64)  # height above the level, negative is room
    heap = np.empty(num_cells, np.int64)
    aside = np.empty(num_cells, np.int64)
    for cell in range(num_cells):
        excess[cell] = -level[cell % num_slots]
        push(heap, cell, excess, cell)
    size, num_aside, num_empty = num_cells, 0, num_cells
    interval, since_review = 2 * int(np.sqrt(num_cells)), 0
    only_empty, may_stay_empty = False, num_items < num_cells
    for turn in range(num_items):
        item = order[turn]
        since_review += 1
        if num_items - turn <= num_empty and not (only_empty or may_stay_empty):  # the rest needs a cell each
            only_empty, size, num_aside = True, 0, 0
            for cell in range(num_cells):
                if count[cell] == 0:
                    push(heap, size, excess, cell)
                    size += 1
        if num_aside > 0 and since_review > interval:
            size, num_aside = _review(values, capacity, load, excess, heap, aside, size, num_aside, item)
            since_review = 0
        place, new_excess, size, num_aside = _lowest(
            values, capacity, load, level, excess, heap, aside, size, num_aside, item, front
        )
        if place < 0:
            size, num_aside = _review(values, capacity, load, excess, heap, aside, size, num_aside, item)
            since_review = 0
            place, new_excess, size, num_aside = _lowest(
                values, capacity, load, level, excess, heap, aside, size, num_aside, item, front
            )
            if place < 0:
                return cell_of, False
        cell = heap[place]
        cell_of[item] = cell
        num_empty -= count[cell] == 0
        count[cell] += 1
        excess[cell] = new_excess
        for column in range(num_values):
            load[cell, column] += values[item, column]
        if only_empty:
            remove(heap, size, excess, place)
            size -= 1
        else:
            sift_down(heap, size, excess, place)
    return cell_of, True


@jit_inner
def _lowest(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    level: IntArray,
    excess: IntArray,
    heap: IntArray,
    aside: IntArray,
    size: int,
    num_aside: int,
    item: int,
    front: int,
) -> tuple[int, int, int, int]:
    """(place in the heap of the cell that stands lowest with the item, or -1; its excess then; size; num_aside).

    Cells at the front of the heap without room for the item are set aside on the way.
    """
    num_stages = values.shape[1] - capacity.shape[0]
    best, best_excess, place = -1, 2**62 + 1, 0
    while place < min(size, front):
        cell = heap[place]
        if not _has_room(values, capacity, load, item, cell):
            aside[num_aside] = cell
            num_aside += 1
            remove(heap, size, excess, place)
            size -= 1
            best, best_excess, place = -1, 2**62 + 1, 0  # places have changed
            continue
        if excess[cell] < best_excess:
            height = 0
            for stage in range(num_stages):
                height = max(height, load[cell, stage] + values[item, stage])
            if height - level[cell % level.shape[0]] < best_excess:
                best, best_excess = place, height - level[cell % level.shape[0]]
        place += 1
    return best, best_excess, size, num_aside


@jit_inner
def _review(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    excess: IntArray,
    heap: IntArray,
    aside: IntArray,
    size: int,
    num_aside: int,
    item: int,
) -> tuple[int, int]:
    """(size, num_aside) after the cells set aside that have room for the item are back in the heap."""
    kept = 0
    for place in range(num_aside):
        cell = aside[place]
        if _has_room(values, capacity, load, item, cell):
            push(heap, size, excess, cell)
            size += 1
        else:
            aside[kept] = cell
            kept += 1
    return size, kept


@jit_inner
def _has_room(values: IntArray, capacity: IntArray, load: IntArray, item: int, cell: int) -> bool:
    num_stages = values.shape[1] - capacity.shape[0]
    for column in range(num_stages, values.shape[1]):
        if values[item, column] > capacity[column - num_stages] - load[cell, column]:
            return False
    return True
