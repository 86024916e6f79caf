"""Items of several dimensions in a table, so that the one that fits best is found in a few steps.

    (tokens, images), images 0..7:   row = number of images, column = tokens in steps   ->   a stack of items a cell

Of the two scarcest dimensions, the one of fewer distinct values gives the rows (levels): a small capacity one row a
value, a larger one rows of about equally many items, zero apart. The other gives the columns. Empty cells link to the
next cell with items on both sides, so a search steps over them (union-find: items only ever leave). Price: sizes
within one cell are told apart only when they are tried.
"""

from dataclasses import dataclass

import numpy as np

from packing._jit import jit_inner
from packing.binding import column_sums
from packing.inputs import IntArray

FULL = 1 << 30
"""A whole capacity in the unit of shares."""

_CELLS = 1 << 15
_FEW_LEVELS, _MANY_LEVELS = 12, 24
_MANY_ITEMS = 6  # from so many items a bin on, few levels are precise enough
_MAX_EXACT_LEVELS = 64  # a capacity below this has one level a value
_SAMPLE = 2048  # rows looked at to place the levels

# Columns of `levels`.
LEAST, LARGEST, COUNT, FIRST_COLUMN, LAST_SHARE = range(5)
# Columns of `cells`.
BEGIN, END, LEFT, RIGHT = range(4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """The layout of the items, shared by all rules.

    Attributes:
        scale: int64 [2, d], shift and factor: (size >> shift) * factor is a share of FULL.
        levels: int64 [L, 5]: least and largest size of a level, number of items, first column with items, a bound on
            the share of the sizes in its columns. Only the first is filled in.
        layout: int64 [4]: dimension of the columns, dimension of the levels, shift from sizes to columns, number of
            columns.
    """

    scale: IntArray
    levels: IntArray
    layout: IntArray


def lay_out(sizes: IntArray, capacity: IntArray) -> Table:
    """Choose levels and columns for n > 0 items."""
    limits = [int(limit) for limit in capacity]
    demand = [(total << 20) // limit for total, limit in zip(column_sums(sizes), limits, strict=True)]
    scarcest = sorted(range(len(limits)), key=lambda column: (-demand[column], column))[:2]
    sample = sizes[:: max(1, sizes.shape[0] // _SAMPLE)]
    distinct = [np.unique(sample[:, column]) for column in scarcest]
    fewer = min(range(len(scarcest)), key=lambda index: (len(distinct[index]), -index))
    by_level, by_size = scarcest[fewer], scarcest[len(scarcest) - 1 - fewer]
    items_per_bin = (sizes.shape[0] << 20) // max(1, *demand)
    num_levels = _FEW_LEVELS if items_per_bin >= _MANY_ITEMS else _MANY_LEVELS
    if limits[by_level] < _MAX_EXACT_LEVELS:
        edges = np.arange(limits[by_level] + 1)
    elif len(distinct[fewer]) <= num_levels:
        edges = np.append(0, distinct[fewer])
    else:
        ordered = np.sort(sample[:, by_level])
        edges = np.append([0, 1], ordered[np.arange(1, num_levels) * len(ordered) // num_levels])
    edges = np.unique(edges)
    cut = max(0, limits[by_size].bit_length() - (_CELLS // len(edges)).bit_length())
    num_columns = (limits[by_size] >> cut) + 1
    levels = np.zeros((len(edges), 5), np.int64)
    levels[:, LEAST] = levels[:, LARGEST] = edges
    levels[:, FIRST_COLUMN] = num_columns
    levels[:, LAST_SHARE] = FULL
    shift = [max(0, limit.bit_length() - 30) for limit in limits]
    factor = [FULL // (limit >> places) for limit, places in zip(limits, shift, strict=True)]
    return Table(
        scale=np.array([shift, factor], np.int64),
        levels=levels,
        layout=np.array([by_size, by_level, cut, num_columns], np.int64),
    )


@jit_inner
def share_of(size: int, column: int, scale: IntArray) -> int:
    """Size as a share of its capacity, at most FULL."""
    return int((size >> scale[0, column]) * scale[1, column])


@jit_inner
def find(cells: IntArray, cell: int, link: int) -> int:
    """Nearest cell with items in the direction of `link`; the empty end of the level if there is none."""
    while cells[cell, link] != cell:
        after = cells[cell, link]
        cells[cell, link] = cells[after, link]  # halves the path for the next search
        cell = after
    return cell


@jit_inner
def tabulate(sizes: IntArray, levels: IntArray, layout: IntArray, cell_of: IntArray) -> IntArray:
    """Cells [.., 4]: begin and end of the positions of their items, links to the left and right.

    The cell of column c in level l is l * (num_columns + 2) + 1 + c; those at both ends stay empty and end a search.
    Fills in `levels` (all but LAST_SHARE) and `cell_of` [n].
    """
    num_levels, width = levels.shape[0], layout[3] + 2
    cells = np.zeros((num_levels * width, 4), np.int64)
    for item in range(sizes.shape[0]):
        size, column = sizes[item, layout[1]], sizes[item, layout[0]] >> layout[2]
        level, above = 0, num_levels
        while above - level > 1:
            middle = (level + above) // 2
            if levels[middle, LEAST] <= size:
                level = middle
            else:
                above = middle
        levels[level, LARGEST] = max(levels[level, LARGEST], size)
        levels[level, COUNT] += 1
        levels[level, FIRST_COLUMN] = min(levels[level, FIRST_COLUMN], column)
        cell_of[item] = level * width + 1 + column
        cells[cell_of[item], END] += 1
    total = 0
    for cell in range(cells.shape[0]):
        ends = cells[cell, END] > 0 or cell % width == 0
        total += cells[cell, END]
        cells[cell, BEGIN], cells[cell, END] = total - cells[cell, END], total
        cells[cell, LEFT] = cell if ends else cells[cell - 1, LEFT]
    for cell in range(cells.shape[0] - 1, -1, -1):
        ends = cells[cell, BEGIN] < cells[cell, END] or cell % width == width - 1
        cells[cell, RIGHT] = cell if ends else cells[cell + 1, RIGHT]
    return cells


@jit_inner
def remove_one(cells: IntArray, levels: IntArray, layout: IntArray, scale: IntArray, cell: int) -> None:
    """Take the last item of a cell out for good."""
    width = layout[3] + 2
    level, first = cell // width, cell - cell % width
    levels[level, COUNT] -= 1
    cells[cell, END] -= 1
    if cells[cell, END] == cells[cell, BEGIN]:
        cells[cell, LEFT], cells[cell, RIGHT] = cell - 1, cell + 1
        levels[level, FIRST_COLUMN] = (
            find(cells, first + 1 + min(levels[level, FIRST_COLUMN], layout[3]), RIGHT) - first - 1
        )
        levels[level, LAST_SHARE] = share_of(
            (find(cells, first + layout[3], LEFT) - first) << layout[2], layout[0], scale
        )
