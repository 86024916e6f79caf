"""Moves and swaps between units of a grid, the one that stands highest above its level first.

    per_rank   a unit is a rank (its slots add up), all have one level: the lower bound
    per_slot   a unit is a cell, its level that of its slot (`slot_levels`)

    weights 9 4 3 3 2 1 in {9 2 1} {4 3 3}, bound 11   ->   move 1   ->   {9 2} {4 3 3 1}, largest total 11

An exchange leaves both units below where the higher one stood above its level, so the largest excess never grows.
Capacities of cells hold throughout; no cell is emptied unless items are fewer than cells. Work is limited by a count
of candidates, not by time: results are the same on every machine.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grids.heap import settle
from packing.inputs import IntArray, PartArray

_MIN_CANDIDATES = 200_000
_CANDIDATES_PER_ITEM = 40
_CELL_PARTNERS = 6  # lowest units that the highest one tries: cells are many and small,
_RANK_PARTNERS = 24  # ranks few and large
_FRONT = 2  # entries of the heap, per partner, among which the lowest units are sought
_TURN_WORK = 32  # candidates that take as long as turning to another unit
_STUCK = 2**62  # depth of a unit that no exchange helps


def exchange(
    values: IntArray,
    capacity: IntArray,
    cell_of: PartArray,
    level: IntArray,
    *,
    cells_per_unit: int,
    slack: int,
    work_divisor: int = 1,
) -> PartArray:
    """A better `cell_of` [n], for units of `cells_per_unit` consecutive cells.

    Args:
        values: int64 [n, S + d], weights and sizes. capacity: int64 [d], of a cell.
        level: int64 [units] for all stages, or [units, S].
        slack: excess above the level that is good enough.
        work_divisor: one part in that many of the work limit.
    """
    result = cell_of.copy()
    if level.ndim == 1:
        level = np.repeat(level[:, np.newaxis], values.shape[1] - capacity.shape[0], axis=1)
    limit = max(_MIN_CANDIDATES, _CANDIDATES_PER_ITEM * values.shape[0]) // work_divisor
    _exchange(values, capacity, result, level, cells_per_unit, slack, limit)
    return result


@jit
def _exchange(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    cell_of: PartArray,
    level: IntArray,
    cells_per_unit: int,
    slack: int,
    max_candidates: int,
) -> None:
    num_items, num_values = values.shape
    num_stages = num_values - capacity.shape[0]
    num_units = level.shape[0]
    num_cells = num_units * cells_per_unit
    load = np.zeros((num_cells, num_values), np.int64)
    total = np.zeros((num_units, num_stages), np.int64)
    excess = np.zeros(num_units, np.int64)
    # The items of a unit are a doubly linked list: rows are next item, previous item, first item (by unit).
    links = np.full((3, max(num_items, num_units)), -1, np.int64)
    # Items of a cell, whose last one may not move away; one more where cells may stay empty, so that it may.
    count = np.full(num_cells, 0 if num_items >= num_cells else 1, np.int64)
    for item in range(num_items):
        _add(values, load, total, links, count, item, int(cell_of[item]), cells_per_unit)
    for unit in range(num_units):
        excess[unit] = _excess(total, level, unit)
    # Heaps of units and their places in them: the highest first (by `depth`, minus the excess), the lowest first.
    depth = -excess
    highest, lowest = np.arange(num_units), np.arange(num_units)
    place_high, place_low = np.arange(num_units), np.arange(num_units)
    for unit in range(num_units):
        settle(highest, place_high, depth, unit, unit + 1)
        settle(lowest, place_low, excess, unit, unit + 1)
    partners = np.empty(_CELL_PARTNERS if cells_per_unit == 1 else _RANK_PARTNERS, np.int64)
    while max_candidates > 0:
        high = highest[0]
        if -depth[high] <= slack:
            return
        give, take, goal, low = -1, -1, -1, -1
        num_partners = _lowest(excess, lowest, high, partners)
        max_candidates -= _TURN_WORK
        for place in range(num_partners):
            low = partners[place]
            if num_stages == 1 and excess[low] >= excess[high]:
                break
            give, take, goal, seen = _best(
                values, capacity, cell_of, level, load, total, links, count, high, low, cells_per_unit
            )
            max_candidates -= seen
            if give >= 0:
                break
        if give < 0:
            if cells_per_unit > 1:
                return  # the largest total is the objective
            depth[high] = _STUCK
            settle(highest, place_high, depth, high, num_units)
            continue
        source = int(cell_of[give])
        _remove(values, load, total, links, count, give, source, cells_per_unit)
        if take >= 0:
            goal = int(cell_of[take])
            _remove(values, load, total, links, count, take, goal, cells_per_unit)
            _add(values, load, total, links, count, take, source, cells_per_unit)
            cell_of[take] = source
        _add(values, load, total, links, count, give, goal, cells_per_unit)
        cell_of[give] = goal
        for unit in (high, low):
            excess[unit] = _excess(total, level, unit)
            settle(lowest, place_low, excess, unit, num_units)
            if depth[unit] != _STUCK:
                depth[unit] = -excess[unit]
                settle(highest, place_high, depth, unit, num_units)


@jit_inner
def _lowest(excess: IntArray, heap: IntArray, high: int, partners: IntArray) -> int:
    """Write units other than `high` with the smallest excess, ascending; return how many.

    They come from the front of the heap, which holds nearly the lowest ones.
    """
    found = 0
    for index in range(min(heap.shape[0], _FRONT * partners.shape[0])):
        unit = heap[index]
        if unit == high or (found == partners.shape[0] and excess[unit] >= excess[partners[found - 1]]):
            continue
        place = min(found, partners.shape[0] - 1)
        while place > 0 and excess[unit] < excess[partners[place - 1]]:
            partners[place] = partners[place - 1]
            place -= 1
        partners[place] = unit
        found = min(found + 1, partners.shape[0])
    return found


@jit_inner
def _best(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    cell_of: PartArray,
    level: IntArray,
    load: IntArray,
    total: IntArray,
    links: IntArray,
    count: IntArray,
    high: int,
    low: int,
    cells_per_unit: int,
) -> tuple[int, int, int, int]:
    """(item to give, item to take or -1, cell to move to, candidates seen); give is -1 when nothing lowers the pair.

    Takes the first exchange that gains at least three quarters of what one stage could gain, else the best.
    """
    num_stages = total.shape[1]
    worst = _excess(total, level, high)
    best_excess = worst
    room = (worst - _excess(total, level, low)) // 2
    enough = worst - (room - room // 4)
    best_give, best_take, best_goal = -1, -1, -1
    seen = 0
    give = links[2, high]
    while give >= 0:
        take = -1
        while True:
            seen += 1
            new_excess = -(2**62)
            for stage in range(num_stages):
                change = values[give, stage] - (values[take, stage] if take >= 0 else 0)
                new_excess = max(new_excess, total[high, stage] - change - level[high, stage])
                new_excess = max(new_excess, total[low, stage] + change - level[low, stage])
            if new_excess < best_excess:
                goal = _goal(values, capacity, cell_of, load, count, give, take, low, cells_per_unit)
                if goal >= 0:
                    best_give, best_take, best_goal, best_excess = give, take, goal, new_excess
                    if new_excess <= enough:
                        return best_give, best_take, best_goal, seen
            take = links[2, low] if take < 0 else links[0, take]
            if take < 0:
                break
        give = links[0, give]
    return best_give, best_take, best_goal, seen


@jit_inner
def _goal(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    cell_of: PartArray,
    load: IntArray,
    count: IntArray,
    give: int,
    take: int,
    low: int,
    cells_per_unit: int,
) -> int:
    """The cell of unit `low` that can hold `give` (the lightest, or that of `take` in a swap), or -1."""
    num_stages = values.shape[1] - capacity.shape[0]
    source = int(cell_of[give])
    if take < 0 and count[source] <= 1:
        return -1
    best = -1
    first = low * cells_per_unit
    for cell in range(first, first + cells_per_unit):
        if take >= 0 and cell_of[take] != cell:
            continue
        fits = best < 0 or load[cell, 0] < load[best, 0]
        for column in range(num_stages, values.shape[1]):
            change = values[give, column] - (values[take, column] if take >= 0 else 0)
            limit = capacity[column - num_stages]
            if change > limit - load[cell, column] or -change > limit - load[source, column]:
                fits = False
        if fits:
            best = cell
    return best


@jit_inner
def _excess(total: IntArray, level: IntArray, unit: int) -> int:
    """How far the stage that stands highest above its level does so."""
    top = total[unit, 0] - level[unit, 0]
    for stage in range(1, total.shape[1]):
        top = max(top, total[unit, stage] - level[unit, stage])
    return int(top)


@jit_inner
def _add(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    load: IntArray,
    total: IntArray,
    links: IntArray,
    count: IntArray,
    item: int,
    cell: int,
    cells_per_unit: int,
) -> None:
    unit = cell // cells_per_unit
    first = links[2, unit]
    links[0, item] = first
    links[1, item] = -1
    if first >= 0:
        links[1, first] = item
    links[2, unit] = item
    count[cell] += 1
    for column in range(values.shape[1]):
        load[cell, column] += values[item, column]
        if column < total.shape[1]:
            total[unit, column] += values[item, column]


@jit_inner
def _remove(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    load: IntArray,
    total: IntArray,
    links: IntArray,
    count: IntArray,
    item: int,
    cell: int,
    cells_per_unit: int,
) -> None:
    unit = cell // cells_per_unit
    after, prior = links[0, item], links[1, item]
    if prior >= 0:
        links[0, prior] = after
    else:
        links[2, unit] = after
    if after >= 0:
        links[1, after] = prior
    count[cell] -= 1
    for column in range(values.shape[1]):
        load[cell, column] -= values[item, column]
        if column < total.shape[1]:
            total[unit, column] -= values[item, column]
