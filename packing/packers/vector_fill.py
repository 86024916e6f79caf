"""Bins in several dimensions, filled one after the other so that all capacities run out together.

    (tokens, items) 90 1, 60 1, 30 1, 10 1, 5 1, 5 1, capacity 100 3   ->   [90 5 5] [60 30 10]

The largest item left opens a bin. The next one is chosen so that what stays free, as a share of each capacity, is
small and even; what the items left over, by their totals, will not need does not count as free:

    free[d]  = (residual[d] - size[d]) / capacity[d] - (1 - demand[d] / largest demand)
    score    = sum(free) + spread * (max(free) - min(free))                                   smallest wins

A search goes through the levels of the table (packing/packers/vector_table.py), in each to the sizes next to the one
that leaves both dimensions even (`beta` 0) or to the largest that fits (`beta` 8), and stops where no level can win
any more. Further dimensions are checked and scored, not searched. A bin that ends with a scarce dimension free is
filled again with a smaller second item, `trials` times in all, and the best is kept.

Price: no approximation factor; 0.2 to 0.5 microseconds an item. Evenness over dimensions is the idea of the
dot-product and norm heuristics of Panigrahy et al., "Heuristics for Vector Bin Packing", 2011; counting demand out is
ours: taking the largest first uses up what the small ones need to be combined with.
"""

from dataclasses import dataclass

import numpy as np

from packing._jit import jit, jit_inline, jit_inner
from packing.inputs import IntArray, PartArray
from packing.packers.vector_table import (
    BEGIN,
    COUNT,
    END,
    FIRST_COLUMN,
    FULL,
    LARGEST,
    LAST_SHARE,
    LEAST,
    LEFT,
    Table,
    find,
    remove_one,
    share_of,
    tabulate,
)

_SEED_STEPS = 4096  # of the share by which items open bins
_STRIDE = 8
_TRIES = 8  # cells looked at on one side of a level
_NEAR = FULL >> 8  # an item this close to the even choice is taken without a look at larger ones
_CLOSE = FULL >> 9  # a bin with less than this free in a scarce dimension is not filled again
_SCARCE = FULL >> 3  # a dimension that may stay free by less than this is scarce
_NONE = 1 << 61
_BETA, _SPREAD, _SWITCH, _TRIALS = range(4)  # entries of `options`


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How bins are filled; the score above explains the names.

    Attributes:
        beta: eighths of the way from the even choice (0) to the largest item that fits (8).
        spread: eighths by which unevenness counts.
        switch: while the second scarcest dimension needs less than this share (1024ths) of its capacity, items are
            taken by size alone, as with beta 8 and spread 4.
        trials: fillings of a bin to choose from.
    """

    beta: int
    spread: int
    switch: int
    trials: int


def fill_bins(sizes: IntArray, capacity: IntArray, table: Table, rule: Rule) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins) by `rule`, for n > 0 items in d > 1 dimensions."""
    options = np.array([rule.beta, rule.spread, rule.switch, rule.trials], np.int64)
    bin_of, num_bins = _fill(sizes, capacity, table.scale, table.levels.copy(), table.layout, options)
    return bin_of, int(num_bins)


@jit_inner
def _score(  # noqa: PLR0917  kernels take flat arguments
    rows: IntArray, position: int, free: IntArray, slack: IntArray, scale: IntArray, spread: int
) -> int:
    """Score of what stays free beside the item of that position (-1: no item), or _NONE where it does not fit."""
    low, high, total = _NONE, -_NONE, 0
    for column in range(free.shape[0]):
        left = free[column] - (rows[position, column] if position >= 0 else 0)
        if left < 0:
            return _NONE
        share = share_of(left, column, scale) - slack[column]
        low, high, total = min(low, share), max(high, share), total + share
    return total + ((high - low) * spread >> 3)


@jit_inner
def _at_least(one: int, other: int, spread: int) -> int:
    """No score is below this where two dimensions have at least these shares free."""
    return one + other + (abs(one - other) * min(spread, 8) >> 3)


@jit_inline
def _next(  # noqa: PLR0917  kernels take flat arguments
    rows: IntArray,
    cells: IntArray,
    levels: IntArray,
    layout: IntArray,
    scale: IntArray,
    free: IntArray,
    slack: IntArray,
    most: int,
    beta: int,
    spread: int,
) -> int:
    """Cell of the item to add, or -1. Items above the share `most` are left alone."""
    by_size, by_level, cut, width = layout[0], layout[1], layout[2], layout[3]
    size_free = share_of(free[by_size], by_size, scale) - slack[by_size]
    level_free = share_of(free[by_level], by_level, scale) - slack[by_level]
    last, level_limit = free[by_size] >> cut, free[by_level]
    if most < FULL:
        last = min(last, (most // scale[1, by_size]) << scale[0, by_size] >> cut)
        level_limit = min(level_limit, (most // scale[1, by_level]) << scale[0, by_level])
    # While much is free, a look at every second level, or fewer, is enough.
    stride = (min(size_free, level_free) * _STRIDE >> 30) if levels.shape[0] > _STRIDE else 0
    best, found, skip = _NONE, -1, 0
    for level in range(levels.shape[0] - 1, -1, -1):
        if levels[level, LEAST] > level_limit or levels[level, FIRST_COLUMN] > last or levels[level, COUNT] == 0:
            continue
        if skip > 0:
            skip -= 1
            continue
        skip = stride if found >= 0 else 0
        # Not less than this stays free in the dimension of the levels, here and below.
        least = level_free - share_of(min(level_limit, levels[level, LARGEST]), by_level, scale)
        if _at_least(least, -slack[by_size], spread) >= best:
            break
        if _at_least(least, max(size_free - levels[level, LAST_SHARE], -slack[by_size]), spread) >= best:
            continue
        aim = last * beta >> 3
        if size_free > least:
            even = (size_free - least) * width >> 30  # the column of that share of the capacity
            aim = even + ((last - even) * beta >> 3) if even < last else last
        first = level * (width + 2)
        for side in range(2 if aim < last else 1):
            if side == 1 and best < 2 * least + _NEAR:
                break
            cell = find(cells, first + 1 + aim + side, LEFT + side)
            for _ in range(_TRIES):
                if not first < cell <= first + width:
                    break
                if cells[cell, END] > cells[cell, BEGIN]:
                    score = _score(rows, cells[cell, END] - 1, free, slack, scale, spread)
                    if score < best:
                        best, found = score, cell
                    if score < _NONE:
                        break
                cell = find(cells, cell + 2 * side - 1, LEFT + side)
    return found


@jit_inner
def _seeds(sizes: IntArray, scale: IntArray, total: IntArray) -> IntArray:
    """Items by their largest share, largest first, in steps. Adds up the total share of every dimension."""
    num_items, num_columns = sizes.shape
    begin = np.zeros(_SEED_STEPS + 2, np.int64)
    step = np.empty(num_items, np.int64)
    for item in range(num_items):
        largest = 0
        for column in range(num_columns):
            share = share_of(sizes[item, column], column, scale)
            total[column] += share
            largest = max(largest, share)
        step[item] = _SEED_STEPS - largest // (FULL // _SEED_STEPS)
        begin[step[item] + 1] += 1
    for index in range(_SEED_STEPS + 1):
        begin[index + 1] += begin[index]
    seeds = np.empty(num_items, np.int64)
    for item in range(num_items):
        seeds[begin[step[item]]] = item
        begin[step[item]] += 1
    return seeds


@jit_inner
def _set_slack(total: IntArray, slack: IntArray) -> int:
    """How much of each capacity the items left over will not need, by their totals; the need of the second dimension,
    in 2**20ths of a capacity."""
    largest = 1
    for column in range(total.shape[0]):
        largest = max(largest, total[column])
    second = 0
    for column in range(total.shape[0]):
        need = min(total[column] // max(1, largest >> 20), 1 << 20)
        slack[column] = ((1 << 20) - need) << 10
        if total[column] < largest:
            second = max(second, need)
    return second


@jit_inline
def _fill_one(  # noqa: PLR0917  kernels take flat arguments
    seed: int,
    rows: IntArray,
    cells: IntArray,
    levels: IntArray,
    layout: IntArray,
    scale: IntArray,
    free: IntArray,
    slack: IntArray,
    most: int,
    beta: int,
    spread: int,
    chosen: IntArray,
) -> int:
    """Fill a bin that has room `free` from the cell `seed` on: number of `chosen` cells, an item is taken from each."""
    cell, num_chosen = seed, 0
    while cell >= 0:
        cells[cell, END] -= 1
        chosen[num_chosen] = cell
        for column in range(free.shape[0]):
            free[column] -= rows[cells[cell, END], column]
        cell = _next(rows, cells, levels, layout, scale, free, slack, FULL if num_chosen else most, beta, spread)
        num_chosen += 1
    return num_chosen


@jit
def _fill(  # noqa: PLR0917  kernels take flat arguments
    sizes: IntArray, capacity: IntArray, scale: IntArray, levels: IntArray, layout: IntArray, options: IntArray
) -> tuple[PartArray, int]:
    num_items, num_columns = sizes.shape
    cell_of = np.empty(num_items, np.int64)
    cells = tabulate(sizes, levels, layout, cell_of)
    total, slack, free = np.zeros(num_columns, np.int64), np.empty(num_columns, np.int64), capacity.copy()
    seeds = _seeds(sizes, scale, total)
    order, rows = np.empty(num_items, np.int64), np.empty((num_items, num_columns), np.int64)
    cursor = cells[:, BEGIN].copy()
    for item in range(num_items):
        position = cursor[cell_of[item]]
        cursor[cell_of[item]] += 1
        order[position] = item
        for column in range(num_columns):
            rows[position, column] = sizes[item, column]
    bin_of = np.empty(num_items, np.int32)
    chosen, kept = np.empty(num_items + 1, np.int64), np.empty(num_items + 1, np.int64)
    num_bins = 0
    for item in seeds:
        seed = cell_of[item]  # any item of its cell will do; a cell has as many seeds as it had items
        if cells[seed, BEGIN] == cells[seed, END]:
            continue
        by_size_alone = _set_slack(total, slack) < options[_SWITCH] << 10
        beta, spread = (8, 4) if by_size_alone else (options[_BETA], options[_SPREAD])
        best, num_kept, most = _NONE, 0, FULL
        for _ in range(options[_TRIALS]):
            for column in range(num_columns):
                free[column] = capacity[column]
            num_chosen = _fill_one(seed, rows, cells, levels, layout, scale, free, slack, most, beta, spread, chosen)
            score = _score(rows, -1, free, slack, scale, spread)
            tightest, second = _NONE, 0
            for column in range(num_columns):
                if slack[column] < _SCARCE:
                    tightest = min(tightest, share_of(free[column], column, scale))
            for index in range(num_chosen - 1, -1, -1):
                if index == 1:
                    for column in range(num_columns):
                        second = max(second, share_of(rows[cells[chosen[1], END], column], column, scale))
                cells[chosen[index], END] += 1
            if score < best:
                best, num_kept = score, num_chosen
                chosen, kept = kept, chosen
            if num_chosen == 1 or tightest < _CLOSE:
                break
            most = second * 7 // 8
        for index in range(num_kept):
            remove_one(cells, levels, layout, scale, kept[index])
            position = cells[kept[index], END]
            bin_of[order[position]] = num_bins
            for column in range(num_columns):
                total[column] -= share_of(rows[position, column], column, scale)
        num_bins += 1
    return bin_of, num_bins
