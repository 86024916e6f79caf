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
from packing.inputs import IntArray, PartArray

_MIN_CANDIDATES = 200_000
_CANDIDATES_PER_ITEM = 40
_CELL_PARTNERS = 6  # lowest units that the highest one tries: cells are many and small,
_RANK_PARTNERS = 24  # ranks few and large


def exchange(
    values: IntArray, capacity: IntArray, cell_of: PartArray, level: IntArray, *, cells_per_unit: int, slack: int
) -> PartArray:
    """A better `cell_of` [n], for units of `cells_per_unit` consecutive cells with level [units].

    Args:
        values: int64 [n, S + d], weights and sizes. capacity: int64 [d], of a cell.
        slack: excess above the level that is good enough.
    """
    result = cell_of.copy()
    limit = max(_MIN_CANDIDATES, _CANDIDATES_PER_ITEM * values.shape[0])
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
        excess[unit] = _top(total, unit) - level[unit]
    stuck = np.zeros(num_units, np.int64)
    partners = np.empty(_CELL_PARTNERS if cells_per_unit == 1 else _RANK_PARTNERS, np.int64)
    while max_candidates > 0:
        high = -1
        for unit in range(num_units):
            if stuck[unit] == 0 and excess[unit] > slack and (high < 0 or excess[unit] > excess[high]):
                high = unit
        if high < 0:
            return
        give, take, goal, low = -1, -1, -1, -1
        num_partners = _lowest(excess, high, partners)
        max_candidates -= num_units
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
            stuck[high] = 1
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
        excess[high] = _top(total, high) - level[high]
        excess[low] = _top(total, low) - level[low]


@jit_inner
def _lowest(excess: IntArray, high: int, partners: IntArray) -> int:
    """Write the units other than `high` with the smallest excess, ascending; return how many."""
    found = 0
    for unit in range(excess.shape[0]):
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
    worst = _top(total, high) - level[high]
    best_excess = worst
    room = (worst - (_top(total, low) - level[low])) // 2
    enough = worst - (room - room // 4)
    best_give, best_take, best_goal = -1, -1, -1
    seen = 0
    give = links[2, high]
    while give >= 0:
        take = -1
        while True:
            seen += 1
            new_high, new_low = 0, 0
            for stage in range(num_stages):
                change = values[give, stage] - (values[take, stage] if take >= 0 else 0)
                new_high = max(new_high, total[high, stage] - change)
                new_low = max(new_low, total[low, stage] + change)
            new_excess = max(new_high - level[high], new_low - level[low])
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
def _top(total: IntArray, unit: int) -> int:
    top = 0
    for stage in range(total.shape[1]):
        top = max(top, total[unit, stage])
    return top


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
