"""How few bins are possible? A bound by column generation (Gilmore and Gomory, 1961), to judge packers on samples.

A pattern is a set of items that fits into one bin. Give every item a price; when no pattern is worth more than `most`,

    bins >= sum(prices) / most                                                          (Farley, 1990)

      prices <---- linear program over the known patterns (HiGHS) <----+
         |                                                             |
         +---> most valuable pattern (dynamic program or search) ------+     until none is worth more than a bin

    sizes 6 6 6 4, capacity 10: prices 1 1 1 0 and no pattern is worth more than 1   ->   3 bins

Every round gives a valid bound, so stopping early only weakens it. Prices are rounded to integers before patterns are
valued and the quotient is taken in integers: the bound holds whatever the error of the solver. Price: seconds to a
minute for 1,000 items.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csc_array

from packing._jit import jit, jit_inner
from packing.bin_bounds import packing_bound
from packing.inputs import IntArray, as_capacity, as_matrix, check_items_fit
from packing.packers.vector_fit import best_fit_vector

_FloatArray = npt.NDArray[np.float64]
_PriceArray = npt.NDArray[np.int32]

_MAX_TABLE = 2**24  # items times cells of the table behind the search for a pattern, 4 bytes each
_NUM_EXCHANGES = 3
_MAX_PATTERNS = 200  # new patterns in a round
_SMOOTHING = 0.5  # share of the best prices so far in the prices to try first (Wentges, 1997)


@dataclass(frozen=True, slots=True, kw_only=True)
class LpBound:
    """Result of `lp_bound`.

    Attributes:
        num_bins: no packing has fewer bins.
        value: the same before rounding up, at most the optimum of the linear program.
        linear_value: optimum over the known patterns and exchanges; `value` comes close to it at the end.
        num_rounds: linear programs solved.
    """

    num_bins: int
    value: float
    linear_value: float
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Classes:
    """Distinct items: sizes [m, d], largest first; count [m]; capacity [d]; unit: integer price of a bin."""

    sizes: IntArray
    count: IntArray
    capacity: IntArray
    unit: int
    max_nodes: int


def lp_bound(
    sizes: npt.ArrayLike,
    *,
    capacity: int | Sequence[int] | IntArray,
    tolerance: float = 1e-3,
    max_rounds: int = 100,
    max_nodes: int = 2_000_000,
) -> LpBound:
    """Bins that any packing of `sizes` [n] or [n, d] needs.

    Args:
        sizes: integers; n of a few thousand at most.
        capacity: limit of a bin per dimension.
        tolerance: relative distance between bound and linear program at which to stop.
        max_rounds: linear programs to solve at most.
        max_nodes: nodes of one search for patterns (where capacities are too large for the dynamic program).

    Raises:
        PackingError and its kinds: as `packing.pack`.
    """
    matrix = as_matrix(sizes, "sizes")
    limits = as_capacity(capacity, matrix.shape[1])
    check_items_fit(matrix, limits)
    num_bins = packing_bound(matrix, limits)
    if matrix.shape[0] == 0:
        return LpBound(num_bins=0, value=0.0, linear_value=0.0, num_rounds=0)
    unique, class_of, count = np.unique(matrix, axis=0, return_inverse=True, return_counts=True)
    decreasing = np.argsort(-(unique / limits).sum(axis=1), kind="stable")
    classes = _Classes(
        sizes=np.require(unique[decreasing], np.int64, ["C", "W"]),
        count=count[decreasing].astype(np.int64),
        capacity=limits,
        unit=2**30 // len(matrix),  # sums of prices stay in int32
        max_nodes=max_nodes,
    )
    rank = np.argsort(decreasing)[class_of.reshape(-1)]
    patterns = _first_patterns(matrix, limits, rank, len(count))
    exchanges = _exchanges(classes.sizes, limits)
    # The first prices are those of the simple bound: the share of the scarcest capacity that an item takes.
    scarcest = int(np.argmax(matrix.sum(axis=0) / limits))
    best_prices = classes.sizes[:, scarcest] / limits[scarcest]
    value = float(best_prices @ classes.count)
    num_rounds, linear_value = 0, float(len(matrix))
    while num_rounds < max_rounds:
        num_rounds += 1
        linear_value, prices = _solve(patterns, exchanges, classes.count)
        found: list[IntArray] = []
        for weight in (_SMOOTHING, 0.0):
            trial = np.floor((weight * best_prices + (1 - weight) * prices) * classes.unit).astype(np.int64)
            most, columns = _valuable_patterns(classes, trial)
            total = int(trial @ classes.count)
            num_bins = max(num_bins, -(-total // most))
            if total / most > value:
                value, best_prices = total / most, trial / most
            found = [column for column in columns if column @ prices > 1 + 1e-6]
            if found:
                break
        if not found or linear_value <= value * (1 + tolerance):
            break
        patterns += found
    return LpBound(num_bins=num_bins, value=value, linear_value=linear_value, num_rounds=num_rounds)


def _first_patterns(sizes: IntArray, capacity: IntArray, class_of: IntArray, num_classes: int) -> list[IntArray]:
    """The bins of a packing, and every item alone."""
    bin_of, num_bins = best_fit_vector(sizes, capacity)
    patterns = np.zeros((num_bins, num_classes), np.int64)
    np.add.at(patterns, (bin_of, class_of), 1)
    return [*patterns, *np.eye(num_classes, dtype=np.int64)]


def _exchanges(sizes: IntArray, capacity: IntArray) -> IntArray:
    """Rows of +1 at a class and -1 at one that needs at least as much of everything: its place will do.

    They cost nothing and make prices grow with sizes, which saves most of the rounds (Valerio de Carvalho, 2005)."""
    share = (sizes / capacity).sum(axis=1)
    rows = []
    for index, row in enumerate(sizes):
        larger = np.flatnonzero((sizes >= row).all(axis=1) & (np.arange(len(sizes)) != index))
        for other in larger[np.argsort(share[larger], kind="stable")[:_NUM_EXCHANGES]]:
            rows.append(np.zeros(len(sizes), np.int64))
            rows[-1][[index, other]] = 1, -1
    return np.array(rows, np.int64).reshape(-1, len(sizes))


def _solve(patterns: list[IntArray], exchanges: IntArray, count: IntArray) -> tuple[float, _FloatArray]:
    """Fewest fractional bins that hold every item, from the known patterns, and the price of each class."""
    table = csc_array(np.concatenate([np.array(patterns), exchanges]).T, dtype=np.float64)
    cost = np.repeat([1.0, 0.0], [len(patterns), len(exchanges)])
    solved = linprog(cost, A_ub=-table, b_ub=-count.astype(np.float64), method="highs-ds")
    if solved.status != 0:
        raise RuntimeError(f"HiGHS failed on {table.shape[1]} patterns of {table.shape[0]} classes: {solved.message}")
    return float(solved.fun), np.maximum(-solved.ineqlin.marginals, 0.0)


def _valuable_patterns(classes: _Classes, prices: IntArray) -> tuple[int, list[IntArray]]:
    """(a value that no pattern exceeds, patterns worth more than a bin that share no item) at integer prices [m]."""
    items = np.repeat(np.arange(len(classes.count)), classes.count)
    items = items[prices[items] > 0]
    table = np.concatenate([classes.sizes[items], prices[items].reshape(-1, 1), items.reshape(-1, 1)], axis=1)
    grid = _grid(classes.capacity, _MAX_TABLE // (len(items) + 1))
    upper = _upper_bounds(table, classes.capacity, grid)
    free = np.ones(len(items), np.bool_)
    # The first search also proves; a pattern within 1/4000 of a bin is not worth the time.
    at_least, nodes = classes.unit + classes.unit // 4000, classes.max_nodes
    most = 0
    columns: list[IntArray] = []
    while len(columns) < _MAX_PATTERNS:
        limit, taken = _search(table, classes.capacity, grid, upper, free, at_least, nodes)
        most = most or max(int(limit), 1)
        if not len(taken):
            break
        columns.append(np.bincount(items[taken], minlength=len(prices)).astype(np.int64))
        free[taken] = False
        at_least, nodes = classes.unit, classes.max_nodes // 200
    return max(most, 1), columns


def _grid(capacity: IntArray, num_cells: int) -> IntArray:
    """Steps of each capacity, at most all of it, such that the table of residual capacities has `num_cells` cells."""
    steps = np.ones(len(capacity), np.int64)
    for rank, column in enumerate(np.argsort(capacity, kind="stable")):
        share = int(num_cells ** (1 / (len(capacity) - rank)))
        steps[column] = max(1, min(int(capacity[column]), share - 1))
        num_cells //= int(steps[column]) + 1
    return steps


@jit_inner
def _coarse(size: int, capacity: int, steps: int) -> int:
    """Size in steps, rounded down: what fits in truth fits in steps."""
    if steps == capacity:
        return size
    if capacity < 1 << 38:
        return size * steps // capacity
    return (size >> 24) * steps // (capacity >> 24)  # both below 2**38, steps below 2**24


@jit
def _upper_bounds(table: IntArray, capacity: IntArray, grid: IntArray) -> _PriceArray:
    """int32 [n + 1, cells]: no subset of items i, i + 1, ... in a residual capacity is worth more than [i, cell]."""
    num_items, num_columns = table.shape[0], capacity.shape[0]
    stride = np.ones(num_columns, np.int64)
    for column in range(num_columns - 2, -1, -1):
        stride[column] = stride[column + 1] * (grid[column + 1] + 1)
    num_cells = stride[0] * (grid[0] + 1)
    upper = np.zeros((num_items + 1, num_cells), np.int32)
    need = np.empty(num_columns, np.int64)
    coordinate = np.empty(num_columns, np.int64)
    for item in range(num_items - 1, -1, -1):
        offset = 0
        for column in range(num_columns):
            need[column] = _coarse(table[item, column], capacity[column], grid[column])
            offset += need[column] * stride[column]
            coordinate[column] = 0
        for cell in range(num_cells):
            fits = True
            for column in range(num_columns):
                fits &= coordinate[column] >= need[column]
            best = upper[item + 1, cell]
            if fits:
                best = max(best, upper[item + 1, cell - offset] + table[item, num_columns])
            upper[item, cell] = best
            column = num_columns - 1
            coordinate[column] += 1
            while column > 0 and coordinate[column] > grid[column]:
                coordinate[column] = 0
                column -= 1
                coordinate[column] += 1
    return upper


@jit
def _search(  # noqa: PLR0917  kernels take flat arguments
    table: IntArray,
    capacity: IntArray,
    grid: IntArray,
    upper: _PriceArray,
    free: npt.NDArray[np.bool_],
    at_least: int,
    max_nodes: int,
) -> tuple[int, IntArray]:
    """(a value that no pattern exceeds, items of the best pattern worth more than `at_least`, maybe none).

    table [n, d + 2]: sizes, price, class, equal items adjacent; only `free` items are used. Depth-first, taking an
    item before leaving it out. Out of nodes, the bound is that of `upper`.
    """
    num_items, num_columns = table.shape[0], capacity.shape[0]
    residual = capacity.copy()
    chosen = np.empty(num_items + 1, np.int64)
    found = np.empty(0, np.int64)
    best, value, depth, item, nodes = at_least, 0, 0, 0, 0
    while True:
        nodes += 1
        cell = 0
        for column in range(num_columns):
            cell = cell * (grid[column] + 1) + _coarse(residual[column], capacity[column], grid[column])
        if value > best:
            best = value
            found = chosen[:depth].copy()
        if nodes <= max_nodes and item < num_items and value + upper[item, cell] > best:
            fits = free[item]
            for column in range(num_columns):
                fits &= table[item, column] <= residual[column]
            if fits:
                for column in range(num_columns):
                    residual[column] -= table[item, column]
                value += table[item, num_columns]
                chosen[depth] = item
                depth += 1
            item += 1
            continue
        if depth == 0 or nodes > max_nodes:
            break
        depth -= 1
        item = chosen[depth]
        for column in range(num_columns):
            residual[column] += table[item, column]
        value -= table[item, num_columns]
        item += 1
        while item < num_items and table[item, num_columns + 1] == table[item - 1, num_columns + 1]:
            item += 1  # equals of an item that is left out are left out with it
    return (best if nodes <= max_nodes else max(best, upper[0, -1])), found
