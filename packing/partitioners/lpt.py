"""LPT, longest processing time first: heaviest item first, each to the part that it raises least.

    weights 7 6 5 4 3, 2 parts   ->   {7 4 3} {6 5}, makespan 14 (optimum 13)

With one stage, free counts and no capacity at most 4/3 - 1/(3k) of the optimum (Graham 1969). With several stages a
part's height is its largest stage load; ties go to the smaller sum, then to fewer items, then to the lower index.
Parts that would exceed a capacity or their item count are passed over, so it can fail where an assignment exists.
Cost: O(n k (S + d)).
"""

import numpy as np

from packing._jit import jit
from packing.inputs import IntArray, PartArray
from packing.problem import PartitionProblem


def lpt(problem: PartitionProblem) -> PartArray | None:
    """part_of int32 [n], or None when an item fits no part any more."""
    part_of, complete = _lpt(
        problem.values,
        problem.capacity,
        problem.decreasing(),
        problem.num_parts,
        problem.base_count,
        problem.num_extra,
    )
    return part_of if complete else None


@jit
def _lpt(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    order: IntArray,
    num_parts: int,
    base_count: int,
    num_extra: int,
) -> tuple[PartArray, bool]:
    num_items, num_values = values.shape
    num_stages = num_values - capacity.shape[0]
    part_of = np.empty(num_items, np.int32)
    load = np.zeros((num_parts, num_values), np.int64)
    height = np.zeros(num_parts, np.int64)
    total = np.zeros(num_parts, np.int64)
    count = np.zeros(num_parts, np.int64)
    for turn in range(num_items):
        item = order[turn]
        best, best_height = -1, 0
        for part in range(num_parts):
            if best >= 0 and height[part] > best_height:
                continue
            if count[part] >= base_count and (count[part] > base_count or num_extra == 0):
                continue
            new_height = 0
            for stage in range(num_stages):
                new_height = max(new_height, load[part, stage] + values[item, stage])
            if best >= 0:
                if new_height > best_height:
                    continue
                if new_height == best_height:
                    if total[part] > total[best]:
                        continue
                    if total[part] == total[best] and count[part] >= count[best]:
                        continue
            fits = True
            for column in range(num_stages, num_values):
                if values[item, column] > capacity[column - num_stages] - load[part, column]:
                    fits = False
            if fits:
                best, best_height = part, new_height
        if best < 0:
            return part_of, False
        part_of[item] = best
        if count[best] == base_count:
            num_extra -= 1
        count[best] += 1
        height[best] = best_height
        for column in range(num_values):
            load[best, column] += values[item, column]
            if column < num_stages:
                total[best] += values[item, column]
    return part_of, True
