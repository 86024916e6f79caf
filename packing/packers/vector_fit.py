"""Best-fit-decreasing beyond the scalar route: several dimensions, or one with a capacity too large for a table.

    sizes [n, d]    d = 1: best-fit over a sorted list of free spaces, O(n log n) and short moves
                    d > 1: fill bins by the rule that is best on a sample

Several dimensions: which way of filling (packing/packers/vector_fill.py) is best depends on how scarce the dimensions
are, and differs by up to 15 % of the bins; a few thousand items tell. Price: a tenth of the time is spent on the
sample, and the choice may be off by 0.2 %. No approximation factor.
"""

from dataclasses import replace

import numpy as np

from packing._jit import jit
from packing.binding import column_sums
from packing.inputs import IntArray, PartArray
from packing.packers.vector_fill import Rule, fill_bins
from packing.packers.vector_table import lay_out
from packing.sorted_blocks import empty_list, find_first, insert_before, take_out

_SAMPLE = 2048  # rows on which the rules are compared
_CLOSE = 1024  # a rule within 1 / _CLOSE of the bound needs no comparison

# In the order of how often they win on (tokens, images), (tokens, patches) and (tokens, count).
RULES = (
    Rule(beta=0, spread=24, switch=800, trials=1),
    Rule(beta=0, spread=8, switch=960, trials=1),
    Rule(beta=0, spread=8, switch=0, trials=1),
    Rule(beta=0, spread=48, switch=0, trials=1),
    Rule(beta=0, spread=12, switch=0, trials=1),
    Rule(beta=0, spread=24, switch=990, trials=1),
    Rule(beta=0, spread=12, switch=900, trials=1),
    Rule(beta=8, spread=8, switch=0, trials=1),
)
_TRIALS = 4
_WORTH = 512  # filling bins several times must save one bin in so many


def best_fit_vector(sizes: IntArray, capacity: IntArray) -> tuple[PartArray, int]:
    """The route of `best_fit_decreasing` for any d and any capacity: (bin_of int32 [n], number of bins)."""
    num_items = sizes.shape[0]
    if num_items == 0:
        return np.empty(0, np.int32), 0
    if sizes.shape[1] == 1:
        return _best_fit_of_one(sizes.reshape(-1), int(capacity[0]))
    if num_items < 2 * _SAMPLE:
        return _best_of_rules(sizes, capacity)[1]
    sample = np.ascontiguousarray(sizes[:: num_items // _SAMPLE])
    rule, _ = _best_of_rules(sample, capacity)
    return fill_bins(sizes, capacity, lay_out(sizes, capacity), rule)


def _best_of_rules(sizes: IntArray, capacity: IntArray) -> tuple[Rule, tuple[PartArray, int]]:
    """The rule with the fewest bins, the first of equals, and its packing; the best two also with several trials."""
    table = lay_out(sizes, capacity)
    bound = max(-(-total // int(limit)) for total, limit in zip(column_sums(sizes), capacity, strict=True))
    good = bound + bound // _CLOSE
    found = []
    for rule in RULES:
        found.append((rule, fill_bins(sizes, capacity, table, rule)))
        if found[-1][1][1] <= good:
            return found[-1]
    found.sort(key=_num_bins)  # stable
    best = found[0]
    for rule, _ in found[:2]:
        tried = replace(rule, trials=_TRIALS)
        packing = fill_bins(sizes, capacity, table, tried)
        if packing[1] < best[1][1] - (best[1][1] // _WORTH if best[0].trials == 1 else 0):
            best = tried, packing
    return best


def _num_bins(found: tuple[Rule, tuple[PartArray, int]]) -> int:
    return found[1][1]


def _best_fit_of_one(sizes: IntArray, capacity: int) -> tuple[PartArray, int]:
    order = np.argsort(-sizes, kind="stable")
    bin_of, num_bins = _best_fit_wide(sizes, order, capacity, *empty_list(sizes.shape[0] + 1))
    return bin_of, int(num_bins)


@jit
def _best_fit_wide(  # noqa: PLR0917  kernels take flat arguments
    sizes: IntArray, order: IntArray, capacity: int, blocks: IntArray, spine: IntArray, count: IntArray
) -> tuple[PartArray, int]:
    """Open bins in a sorted list by free space, among equals the one touched last first. Bins that no positive size
    fits are left out; the last entry, roomier than any bin, stands for a new one."""
    bin_of = np.empty(sizes.shape[0], np.int32)
    smallest = capacity
    for size in sizes:
        if size > 0:
            smallest = min(smallest, size)
    num_blocks = insert_before(blocks, spine, count, 0, capacity + 1, -1)
    num_bins, fullest, least = 0, -1, capacity
    for item in order:
        size = sizes[item]
        if size == 0 and num_bins > 0:
            bin_of[item] = fullest
            continue
        position, place = find_first(blocks, spine, count, num_blocks, size)
        block = spine[position]
        free, index = blocks[block, place, 0], blocks[block, place, 1]
        if index < 0:
            free, index = capacity, num_bins
            num_bins += 1
        else:
            num_blocks = take_out(blocks, spine, count, num_blocks, position, place)
        bin_of[item] = index
        free -= size
        if free <= least:
            fullest, least = index, free
        if free >= smallest:
            num_blocks = insert_before(blocks, spine, count, num_blocks, free, index)
    return bin_of, num_bins
