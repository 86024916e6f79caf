"""Best-fit-decreasing beyond the scalar route: several dimensions, or one with a capacity too large for a table.

    sizes [n, d]    d = 1: best-fit in buckets of free space
                    d > 1: fill bins by the rule that is best on a sample

Several dimensions: which way of filling (packing/packers/vector_fill.py) is best depends on how scarce the dimensions
are, and differs by up to 15 % of the bins; a few thousand items tell. Price: a tenth of the time is spent on the
sample, and the choice may be off by 0.2 %. No approximation factor.
"""

from dataclasses import replace

import numpy as np

from packing._jit import jit, jit_inner
from packing.binding import column_sums
from packing.bitset import empty_set, find_at_least, insert, remove
from packing.inputs import IntArray, PartArray
from packing.packers.vector_fill import Rule, fill_bins
from packing.packers.vector_table import lay_out

_SAMPLE = 2048  # rows on which the rules are compared
_CLOSE = 1024  # a rule within 1 / _CLOSE of the bound needs no comparison
_BUCKET_BITS = 17

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
    shift = max(0, capacity.bit_length() - _BUCKET_BITS)
    words, starts = empty_set((capacity >> shift) + 1)
    bin_of, num_bins = _best_fit_wide(sizes, order, capacity, shift, words, starts)
    return bin_of, int(num_bins)


@jit_inner
def _enlist(index: int, bucket: int, residual: IntArray, first: IntArray, after: IntArray) -> None:
    """Put a bin into the list of its bucket: ascending residuals, before its equals."""
    before, behind = -1, first[bucket]
    while behind >= 0 and residual[behind] < residual[index]:
        before, behind = behind, after[behind]
    after[index] = behind
    if before >= 0:
        after[before] = index
    else:
        first[bucket] = index


@jit
def _best_fit_wide(  # noqa: PLR0917  kernels take flat arguments
    sizes: IntArray, order: IntArray, capacity: int, shift: int, words: IntArray, starts: IntArray
) -> tuple[PartArray, int]:
    """Open bins in buckets by residual >> shift, each a list of ascending residuals, among equals the one touched
    last first; a bitset knows the buckets in use. Bins that no positive size fits are in no list."""
    num_items = sizes.shape[0]
    num_buckets = (capacity >> shift) + 1
    first = np.full(num_buckets, -1, np.int64)
    after = np.empty(num_items, np.int64)
    residual = np.empty(num_items, np.int64)
    bin_of = np.empty(num_items, np.int32)
    smallest = capacity
    for size in sizes:
        if size > 0:
            smallest = min(smallest, size)
    num_bins, fullest = 0, -1
    for item in order:
        size = sizes[item]
        index = before = -1
        if size == 0 and num_bins > 0:
            bin_of[item] = fullest
            continue
        bucket = size >> shift
        index = first[bucket]
        while index >= 0 and residual[index] < size:
            before, index = index, after[index]
        if index < 0:
            before = -1
            bucket = find_at_least(words, starts, bucket + 1) if bucket + 1 < num_buckets else -1
            index = first[bucket] if bucket >= 0 else -1
        if index < 0:
            index = num_bins
            residual[index] = capacity
            num_bins += 1
        elif before >= 0:
            after[before] = after[index]
        else:
            first[bucket] = after[index]
            if first[bucket] < 0:
                remove(words, starts, bucket)
        bin_of[item] = index
        residual[index] -= size
        if fullest < 0 or residual[index] <= residual[fullest]:
            fullest = index
        if residual[index] < smallest:
            continue
        bucket = residual[index] >> shift
        if first[bucket] < 0:
            insert(words, starts, bucket)
        _enlist(index, bucket, residual, first, after)
    return bin_of, num_bins
