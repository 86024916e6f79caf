"""Multifit: binary search for the smallest makespan at which first-fit-decreasing needs no more than k parts.

    weights 7 6 5 4 3, 2 parts, limit 13   ->   {7 6} {5 4 3}, makespan 13 (optimum; LPT: 14)

Coffman, Garey and Johnson 1978. With one stage, free counts and no capacity at most 13/11 of the optimum (Yue 1990),
plus what the last halving leaves. Several stages, capacities and counts are limits of first fit like the makespan is,
so the search is the same and its factor unknown. Starts at LPT and is never worse.

Price: O(n k (S + d)) a trial, and up to 24 trials, so it is slow on many parts, where `lpt_refined` is better too.
"""

import numpy as np

from packing._jit import jit
from packing.inputs import MAX_TOTAL, IntArray, PartArray
from packing.partitioners.lpt import lpt
from packing.partitioners.order import descending
from packing.problem import PartitionProblem

_MAX_TRIALS = 24


def multifit(problem: PartitionProblem) -> PartArray | None:
    """part_of int32 [n], or None when neither LPT nor first fit keeps capacities and counts."""
    best = lpt(problem)
    if problem.num_items == 0:
        return best
    num_stages = problem.weights.shape[1]
    below, above = problem.lower_bound - 1, MAX_TOTAL  # no partition at `below`; one at `above`, if there is any
    if best is not None:
        above = problem.makespan(best)
    values, order = problem.values, descending(problem.weights)
    for _ in range(_MAX_TRIALS):
        if above <= problem.enough or above - below <= 1:
            break
        # The first trial without a start has no limit; later ones halve what is between.
        limit = (below + above) // 2 if best is not None else MAX_TOTAL
        limits = np.concatenate([np.full(num_stages, limit), problem.capacity])
        part_of, complete = _first_fit(values, limits, order, problem.num_parts, problem.base_count, problem.num_extra)
        if complete:
            best = part_of
            above = problem.makespan(best)
        elif best is None:
            break
        else:
            below = limit
    return best


@jit
def _first_fit(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    limits: IntArray,
    order: IntArray,
    num_parts: int,
    base_count: int,
    num_extra: int,
) -> tuple[PartArray, bool]:
    """Items in `order`, each into the first part within all limits [S + d] and its item count."""
    num_items, num_values = values.shape
    part_of = np.zeros(num_items, np.int32)
    load = np.zeros((num_parts, num_values), np.int64)
    count = np.zeros(num_parts, np.int64)
    for turn in range(num_items):
        item = order[turn]
        part = 0
        while part < num_parts:
            fits = count[part] < base_count or (count[part] == base_count and num_extra > 0)
            for column in range(num_values):
                fits = fits and values[item, column] <= limits[column] - load[part, column]
            if fits:
                break
            part += 1
        if part == num_parts:
            return part_of, False
        part_of[item] = part
        num_extra -= count[part] == base_count
        count[part] += 1
        for column in range(num_values):
            load[part, column] += values[item, column]
    return part_of, True
