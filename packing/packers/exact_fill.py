"""Exact fill: the largest item left opens a bin, a bounded search fills it to the brim, and the pattern is repeated.

    sizes 7 7 6 5 5 4 3 3, capacity 10   ->   [7 3] [7 3] [6 4] [5 5]

Works on counts of sizes, so a pattern is found once for all bins that can be filled alike: time hardly depends on n,
tens of milliseconds at most. On real lengths the waste is a third of best-fit's or less, and never above it (the
better of the two is returned). Price: where few large sizes have to be combined over all bins at once, filling one
bin after the other uses up the wrong ones; packing/packers/pattern_fill.py looks at all bins. One dimension; others
get best-fit.
"""

from dataclasses import dataclass

import numpy as np

from packing._jit import jit
from packing.completion import NUMBER, RANK, complete, repeats, take
from packing.inputs import IntArray, PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.problem import PackProblem
from packing.size_classes import SizeClasses, size_classes

_NODE_LIMITS = (30, 300)  # of one bin; ever more thorough while the number of bins is not good enough
_NODES_IN_ALL = 2_000_000  # of all bins of one pass together; after that `_FEW_NODES` a bin
_FEW_NODES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A packing in progress, over size classes.

    Attributes:
        left: int64 [k + 1], items of each class that are not packed; one sentinel.
        cursor: int64 [k], place of the next item of each class in the order of decreasing sizes.
        bin_at: int32 [n], bins by place.
        num_bins: bins used so far.
    """

    left: IntArray
    cursor: IntArray
    bin_at: PartArray
    num_bins: int


def new_plan(classes: SizeClasses) -> Plan:
    """Nothing packed but the zeros, which go to the first bin."""
    num_items = classes.key.shape[0]
    return Plan(
        left=np.append(classes.count, 1),
        cursor=classes.place.copy(),
        bin_at=np.zeros(num_items, np.int32),
        num_bins=1 if num_items > 0 and classes.values.shape[0] == 0 else 0,
    )


def exact_fill(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins), never more bins than best-fit-decreasing."""
    best = best_fit_decreasing(problem)
    if problem.sizes.shape[1] != 1 or best[1] <= problem.enough:
        return best
    capacity = int(problem.capacity[0])
    classes = size_classes(problem.sizes.reshape(-1), capacity)
    plan = fill_rest(classes, new_plan(classes), capacity, problem.enough)
    return (classes.bin_of(plan.bin_at), plan.num_bins) if plan.num_bins < best[1] else best


def fill_rest(classes: SizeClasses, start: Plan, capacity: int, enough: int) -> Plan:
    """The best plan that packs what `start` leaves, trying ever harder until it has `enough` bins."""
    best: Plan | None = None
    for max_nodes in _NODE_LIMITS:
        left, cursor, bin_at = start.left.copy(), start.cursor.copy(), start.bin_at.copy()
        num_bins = _fill(
            classes.values, classes.table, left, cursor, bin_at, capacity, max_nodes, _NODES_IN_ALL, start.num_bins
        )
        if best is None or num_bins < best.num_bins:
            best = Plan(left=left, cursor=cursor, bin_at=bin_at, num_bins=int(num_bins))
        if num_bins <= enough:
            break
    return start if best is None else best


@jit
def _fill(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    table: IntArray,
    left: IntArray,
    cursor: IntArray,
    bin_at: PartArray,
    capacity: int,
    max_nodes: int,
    nodes_in_all: int,
    num_bins: int,
) -> int:
    """Pack all that is left into bins from `num_bins` on; the number of bins then."""
    num_sizes = values.shape[0]
    skip = np.arange(1, num_sizes + 2)
    picks = np.empty((num_sizes + 1, 2), np.int64)
    trial = np.empty((num_sizes + 1, 2), np.int64)
    for first in range(num_sizes):
        while left[first] > 0:
            left[first] -= 1
            room = capacity - values[first]
            limit = max_nodes if nodes_in_all > 0 else _FEW_NODES
            num_picks, _, nodes = complete(values, left, skip, table, first, room, limit, picks[1:], trial)
            left[first] += 1
            nodes_in_all -= nodes
            picks[0, RANK], picks[0, NUMBER] = first, 1
            begin = 0
            if num_picks > 0 and picks[1, RANK] == first:
                picks[1, NUMBER] += 1
                begin = 1
            pattern, num_picks = picks[begin:], num_picks + 1 - begin
            times = repeats(pattern, num_picks, left, left[first])
            take(pattern, num_picks, times, num_bins, left, cursor, bin_at)
            num_bins += times
    return num_bins
