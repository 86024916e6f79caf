"""Level fill: slot by slot, like with like. A giant sets the level of its slot; the other ranks fill up to it.

    weights 9 4 3 3 2 1, 2 ranks x 2 slots   ->   slot 0: {9} {4 3 1}, slot 1: {2} {3}, slowest ranks 9 + 3 = 12

1. Levels (`slot_levels`): items in descending order, R to a slot; a slot whose largest item stands above what the
   rest averages has that item as its level, all other slots share one level.
2. Heaviest item first, each to the cell that stands lowest against its level (and has room in its capacities).
3. Moves and swaps (`exchange`), after which cells are regrouped, R of like load to a slot (`align`).

The sum over slots of the slowest cell comes out low, which is what counts when ranks meet in every micro-batch.
Price: totals of ranks are less even than those of `ranks_first`, and where stages compete only some blocks of cells
are searched. O(n sqrt(R M)) before refinement, more where capacities are nearly full.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grids.cells import finish, slot_levels, whole_bins
from packing.inputs import IntArray, PartArray
from packing.partitioners.order import descending
from packing.problem import GridProblem

_SPARE_BLOCKS = 1  # searched beyond the first block with room: matters where stages compete
_ASIDE = 2**62 + 1  # excess of a cell set aside; above every load


def level_fill(problem: GridProblem) -> PartArray | None:
    """cell_of int32 [n] = rank * num_slots + slot, or None when no assignment within the capacities was found."""
    levels = slot_levels(problem)
    order = descending(problem.weights)
    cell_of, complete = _fill(problem.values, problem.capacity, order, levels.level, problem.num_ranks)
    start = cell_of if complete else whole_bins(problem)
    return None if start is None else finish(problem, start, levels)


@jit
def _fill(
    values: IntArray, capacity: IntArray, order: IntArray, level: IntArray, num_ranks: int
) -> tuple[PartArray, bool]:
    """(cell_of, whether every item found room). No cell stays empty when there are at least as many items as cells.

    A cell without room for an item is set aside until a review finds that it has room for the item of that turn:
    later items are lighter, as a rule smaller.
    """
    num_items, num_values = values.shape
    num_slots = level.shape[0]
    num_cells = num_ranks * num_slots
    width = 8  # cells a block
    while width * width < num_cells:
        width += 8
    num_blocks = (num_cells + width - 1) // width
    cell_of = np.empty(num_items, np.int32)
    load = np.zeros((num_cells, num_values), np.int64)
    count = np.zeros(num_cells, np.int64)
    excess = np.empty(num_cells, np.int64)  # height above the level, negative is room
    for cell in range(num_cells):
        excess[cell] = -level[cell % num_slots]
    lowest = np.empty(num_blocks, np.int64)  # excess in a block
    for block in range(num_blocks):
        _update_lowest(lowest, excess, block, width)
    tried = np.full(num_blocks, -1, np.int64)
    num_empty = num_cells
    may_stay_empty = num_items < num_cells
    since_review, turn, lap = 0, 0, 0
    while turn < num_items:
        item = order[turn]
        only_empty = not may_stay_empty and num_items - turn <= num_empty
        lap += 1
        since_review += 1
        if since_review > width * 2:
            _review(values, capacity, load, level, excess, lowest, item, width)
            since_review = 0
        cell, new_excess = _lowest_cell(
            values, capacity, load, level, count, excess, lowest, tried, item, lap, only_empty, width
        )
        if cell < 0:
            if since_review == 0:
                return cell_of, False
            since_review = width * 2  # once more, with a review
            continue
        cell_of[item] = cell
        num_empty -= count[cell] == 0
        count[cell] += 1
        excess[cell] = new_excess
        for column in range(num_values):
            load[cell, column] += values[item, column]
        _update_lowest(lowest, excess, cell // width, width)
        turn += 1
    return cell_of, True


@jit_inner
def _lowest_cell(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    level: IntArray,
    count: IntArray,
    excess: IntArray,
    lowest: IntArray,
    tried: IntArray,
    item: int,
    lap: int,
    only_empty: bool,
    width: int,
) -> tuple[int, int]:
    """(cell, its excess with the item), the lowest with room in the blocks that were searched, or -1.

    Blocks are searched from the one with the lowest cell on, until none can hold a better cell or enough are done.
    """
    num_cells, num_stages = load.shape[0], values.shape[1] - capacity.shape[0]
    least = values[item, 0]  # what every cell rises by at least
    for stage in range(1, num_stages):
        least = min(least, values[item, stage])
    best, best_excess, spare = -1, _ASIDE, _SPARE_BLOCKS
    while best < 0 or spare > 0:
        block = -1
        bar = best_excess - least if best >= 0 else _ASIDE
        for other in range(lowest.shape[0]):
            if lowest[other] < bar and tried[other] != lap:
                block, bar = other, lowest[other]
        if block < 0:
            break
        tried[block] = lap
        spare -= best >= 0
        some_aside = False
        for cell in range(block * width, min(num_cells, (block + 1) * width)):
            if excess[cell] >= best_excess - least or (only_empty and count[cell] > 0):
                continue
            if not _has_room(values, capacity, load, item, cell):
                excess[cell] = _ASIDE
                some_aside = True
                continue
            height = 0
            for stage in range(num_stages):
                height = max(height, load[cell, stage] + values[item, stage])
            if height - level[cell % level.shape[0]] < best_excess:
                best, best_excess = cell, height - level[cell % level.shape[0]]
        if some_aside:
            _update_lowest(lowest, excess, block, width)
    return best, best_excess


@jit_inner
def _review(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    level: IntArray,
    excess: IntArray,
    lowest: IntArray,
    item: int,
    width: int,
) -> None:
    """Take back the cells set aside that have room for the item."""
    for cell in range(load.shape[0]):
        if excess[cell] == _ASIDE and _has_room(values, capacity, load, item, cell):
            height = 0
            for stage in range(values.shape[1] - capacity.shape[0]):
                height = max(height, load[cell, stage])
            excess[cell] = height - level[cell % level.shape[0]]
            _update_lowest(lowest, excess, cell // width, width)


@jit_inner
def _has_room(values: IntArray, capacity: IntArray, load: IntArray, item: int, cell: int) -> bool:
    num_stages = values.shape[1] - capacity.shape[0]
    for column in range(num_stages, values.shape[1]):
        if values[item, column] > capacity[column - num_stages] - load[cell, column]:
            return False
    return True


@jit_inner
def _update_lowest(lowest: IntArray, excess: IntArray, block: int, width: int) -> None:
    start = block * width
    least = excess[start]
    for cell in range(start + 1, min(excess.shape[0], start + width)):
        least = min(least, excess[cell])
    lowest[block] = least
