"""Exact packing of a few items: bins are completed one after the other, and only bins that no better one replaces.

    sizes 44 24 24 22 21 17 8 8 6 6, capacity 60   ->   [44 8 8] [24 24 6 6] [22 21 17]   (best-fit-decreasing: 4 bins)

The first free item opens a bin, then every completion of that bin is tried, larger items first. Left out are
completions that leave too much for the bins to come, bins that take one more item, bins in which a free item could
replace one that is nowhere larger (Martello and Toth 1990), and repetitions with equal items. All of this holds in any
number of dimensions and for partitions too (packing/partitioners/exact.py): their largest load is one more limit.

Price: exponential. At most 24 items; after a fixed number of steps the best packing so far is returned, unproven.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.errors import PackingError
from packing.inputs import IntArray, PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.problem import PackProblem

MAX_ITEMS = 24
MAX_STEPS = 2_000_000


def exact(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins): as few as possible.

    Raises:
        PackingError: more than `MAX_ITEMS` items.
    """
    check_few(problem.num_items)
    bin_of, num_bins = best_fit_decreasing(problem)
    values, limits, order = search_input(problem.sizes, problem.capacity)
    while num_bins > max(problem.lower_bound, problem.enough, 1):
        placed, _ = complete_bins(values, limits, num_bins - 1, 0, MAX_STEPS)
        if placed[0] < 0:
            break
        bin_of[order] = placed.max() - placed
        num_bins = int(placed.max() - placed.min()) + 1
    return bin_of, num_bins


def check_few(num_items: int) -> None:
    """Refuse what an exhaustive search cannot do."""
    if num_items > MAX_ITEMS:
        raise PackingError(
            f"the exact search takes at most {MAX_ITEMS} items, not {num_items}; choose another algorithm"
        )


def search_input(sizes: IntArray, limits: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """(values [n, c + 1], limits [c + 1], item of each row) for `complete_bins`: large items first, counts last.

    A row comes after every row that is nowhere smaller, and equal rows are neighbours. The last column counts items;
    its limit is how many of the smallest fit into one bin.
    """
    share = (sizes / limits).max(axis=1, initial=0.0)
    order = np.lexsort((*-sizes.T, -share))
    ascending = np.cumsum(np.sort(sizes, axis=0), axis=0)
    most = (ascending <= limits).sum(axis=0).min(initial=sizes.shape[0])
    values = np.concatenate([sizes[order], np.ones((sizes.shape[0], 1), np.int64)], axis=1)
    return values, np.append(limits, most), order


@jit
def complete_bins(
    values: IntArray, limits: IntArray, num_bins: int, min_count: int, max_steps: int
) -> tuple[IntArray, int]:
    """(bin of each row, steps taken): rows of `values` in at most `num_bins` bins, column sums within `limits`.

    The last column is 1 in every row; `min_count` above 0 is the number of rows that every bin must hold. All bins
    are -1 when nothing was found: none exists, unless the steps reached `max_steps`. The last bin is filled first.
    """
    # Indices come from arrays and arguments, never from a literal: numba compiles helpers once more for each literal.
    num_items, num_columns = values.shape
    bin_of = np.empty(num_items, np.int64)
    load = np.zeros((num_bins, num_columns), np.int64)
    least = np.zeros((num_bins, num_columns), np.int64)  # a bin below it leaves more than the later ones take
    left = np.zeros(num_columns, np.int64)
    for item in range(num_items):
        bin_of[item] = -1
        for column in range(num_columns):
            left[column] += values[item, column]
    position = np.zeros(num_bins, np.int64)  # the rows before it are decided for this bin
    chosen = np.empty(num_items, np.int64)
    depth = 0
    index = num_bins - 1
    is_new = True
    for step in range(max_steps):
        if is_new:
            _set_least(limits, left, least, index, min_count)
            is_new = False
        item = _next_item(values, limits, bin_of, load, least, index, position[index])
        if item >= 0:
            _toggle(values, bin_of, load, left, item, index)
            chosen[depth] = item
            depth += 1
            position[index] = item + 1
            continue
        if item == -1 and _is_complete(values, limits, bin_of, load, least, index, min_count):
            if depth == num_items:
                return bin_of, step
            if index > 0:
                index -= 1
                position[index] = 0
                is_new = True
                continue
        # Take the last item out again and go on without it; the first item of a bin stays, as it has to be somewhere.
        while True:
            if depth == 0:
                return bin_of, step
            depth -= 1
            item = chosen[depth]
            index = bin_of[item]
            _toggle(values, bin_of, load, left, item, index)
            if load[index, num_columns - 1] > 0:
                break
        after = item + 1
        while after < num_items and _is_at_most(values, item, after):  # an equal one, by the order of rows
            after += 1
        position[index] = after
    for item in range(num_items):
        bin_of[item] = -1
    return bin_of, max_steps


@jit_inner
def _toggle(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray, bin_of: IntArray, load: IntArray, left: IntArray, item: int, index: int
) -> None:
    """Put a free item into a bin, or take it out of it."""
    sign = 1 if bin_of[item] < 0 else -1
    bin_of[item] = index if sign > 0 else -1
    for column in range(values.shape[1]):
        load[index, column] += sign * values[item, column]
        left[column] -= sign * values[item, column]


@jit_inner
def _set_least(limits: IntArray, left: IntArray, least: IntArray, index: int, min_count: int) -> None:
    """What a new bin has to take, so that the rest can fit into the `index` bins that follow it."""
    num_columns = limits.shape[0]
    for column in range(num_columns):
        # index * limit is computed only where it stays below what is left.
        has_room = index > 0 and limits[column] > left[column] // index
        least[index, column] = 0 if has_room else left[column] - index * limits[column]
    least[index, num_columns - 1] = max(least[index, num_columns - 1], min_count)


@jit_inner
def _next_item(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray, limits: IntArray, bin_of: IntArray, load: IntArray, least: IntArray, index: int, position: int
) -> int:
    """The first free item from `position` on that fits; -1: none; -2: all that fit one by one are not enough."""
    num_items, num_columns = values.shape
    for column in range(num_columns):
        reach = load[index, column]
        for item in range(position, num_items):
            if bin_of[item] < 0 and values[item, column] <= limits[column] - load[index, column]:
                reach += values[item, column]
        if min(reach, limits[column]) < least[index, column]:
            return -2
    for item in range(position, num_items):
        if bin_of[item] < 0 and _fits(values, limits, load, index, item, item):
            return item
    return -1


@jit_inner
def _is_complete(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray, limits: IntArray, bin_of: IntArray, load: IntArray, least: IntArray, index: int, min_count: int
) -> bool:
    """Whether a bin holds enough, takes no free item more, and none in place of one that is nowhere larger."""
    num_items, num_columns = values.shape
    for column in range(num_columns):
        if load[index, column] < least[index, column]:
            return False
    for item in range(num_items):
        if bin_of[item] >= 0:
            continue
        if min_count == 0 and _fits(values, limits, load, index, item, item):
            return False
        for other in range(item + 1, num_items):  # by the order of rows, smaller ones come later
            if (
                bin_of[other] == index
                and _is_at_most(values, other, item)
                and _fits(values, limits, load, index, item, other)
            ):
                return False
    return True


@jit_inner
def _is_at_most(values: IntArray, item: int, other: int) -> bool:
    for column in range(values.shape[1]):  # noqa: SIM110  numba has no generator expressions
        if values[item, column] > values[other, column]:
            return False
    return True


@jit_inner
def _fits(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray, limits: IntArray, load: IntArray, index: int, item: int, out: int
) -> bool:
    """Whether a free item fits into a bin from which item `out` is taken (`out` the item itself: nothing is)."""
    for column in range(values.shape[1]):
        room = limits[column] - load[index, column]
        if out != item:
            room += values[out, column]
        if values[item, column] > room:
            return False
    return True
