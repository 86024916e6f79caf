"""A partition that keeps capacities and counts, whatever its makespan: where LPT on the weights runs into a limit.

    sizes 6 6 4 4, capacity 10, 2 parts   ->   {6 4} {6 4}

First the sizes are balanced over the parts as if they were weights; else best-fit-decreasing packs them, so that a
partition is found whenever that packing needs at most k bins. With equal counts its bins are evened out.
Price: with equal counts it can fail although a solution exists.
"""

from dataclasses import replace

import numpy as np

from packing._jit import jit
from packing.grouping import group_by_bin
from packing.inputs import IntArray, PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.partitioners.lpt import lpt
from packing.partitioners.refine import refine
from packing.problem import PartitionProblem

_LOOKS_PER_ITEM = 1000
_SIZE_BITS = 30  # a capacity in units of sizes, when sizes are balanced


def within_capacity(problem: PartitionProblem) -> PartArray | None:
    """A partition that keeps capacities and counts, whatever its makespan; None when none is found.

    Sizes balanced over the parts as if they were weights; else best-fit-decreasing on the sizes, so that one is found
    whenever that packing needs at most k bins. With equal counts its bins are evened out, which can fail although
    a solution exists.
    """
    part_of = _balanced_sizes(problem)
    if part_of is not None:
        return part_of
    part_of, num_bins = best_fit_decreasing(problem.packing())
    if num_bins > problem.num_parts:
        return None
    if problem.equal_count:
        _, offsets, used = group_by_bin(part_of, problem.sizes, problem.num_parts)
        looks = _LOOKS_PER_ITEM * max(problem.num_items, 16)
        if not _even_out(problem.sizes, problem.capacity, part_of, np.diff(offsets), used, looks):
            return None
    return part_of


def _balanced_sizes(problem: PartitionProblem) -> PartArray | None:
    """LPT and refinement on sizes in units of their capacity, rounded up; None where a part stays above it."""
    shift = np.array([max(0, int(limit).bit_length() - _SIZE_BITS - 1) for limit in problem.capacity])
    limits = problem.capacity >> shift
    coarse = -(-problem.sizes >> shift)
    shares = -(-(coarse << _SIZE_BITS) // limits)
    if problem.capacity.size == 0 or (shares > 1 << _SIZE_BITS).any():
        return None
    sizes = replace(
        problem,
        weights=shares,
        sizes=np.empty((problem.num_items, 0), np.int64),
        capacity=np.empty(0, np.int64),
        lower_bound=0,
        enough=1 << _SIZE_BITS,
    )
    part_of = lpt(sizes)
    if part_of is None:
        return None
    part_of = refine(sizes, part_of)
    _, _, used = group_by_bin(part_of, problem.sizes, problem.num_parts)
    return None if (used > problem.capacity).any() else part_of


@jit
def _even_out(  # noqa: PLR0917  kernels take flat arguments
    sizes: IntArray, capacity: IntArray, part_of: PartArray, count: IntArray, used: IntArray, looks: int
) -> bool:
    """Move items in place from the fullest parts (by count) to the emptiest that takes one, until counts differ by one.

    False when no single move helps, or after so many looks at an item or a part. Each search goes on where the last
    ended.
    """
    num_items, num_parts = part_of.shape[0], count.shape[0]
    having = np.zeros(num_items + 1, np.int64)  # parts with so many items
    for part in range(num_parts):
        having[count[part]] += 1
    least, most = count.min(), count.max()
    part, item, few = 0, 0, least
    while most - least > 1 and few < most - 1 and looks > 0:
        found, left = False, having[few]  # parts with `few` items that are still to be asked
        while left > 0 and looks > 0 and not found:
            part = part + 1 if part + 1 < num_parts else 0
            looks -= 1
            if count[part] != few:
                continue
            left -= 1
            for _ in range(min(num_items, looks)):
                looks -= 1
                item = item + 1 if item + 1 < num_items else 0
                found = count[part_of[item]] == most
                for column in range(sizes.shape[1]):
                    found = found and sizes[item, column] <= capacity[column] - used[part, column]
                if found:
                    break
        few += 1
        if not found:
            continue
        source = part_of[item]
        for column in range(sizes.shape[1]):
            used[source, column] -= sizes[item, column]
            used[part, column] += sizes[item, column]
        having[count[source]] -= 1
        having[count[part]] -= 1
        count[source] -= 1
        count[part] += 1
        having[count[source]] += 1
        having[count[part]] += 1
        part_of[item] = part
        most -= having[most] == 0
        least += having[least] == 0
        few = least
    return bool(most - least <= 1)
