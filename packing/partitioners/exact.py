"""Exact partition of a few items: can every part stay below the best makespan so far? Asked until the answer is no.

    weights 7 6 5 4 3, 2 parts   ->   {7 5} {6 4 3}, makespan 13   (LPT: 14)

Each question is a packing with the makespan as one more capacity (packing/packers/exact.py), so stages, capacities
and equal counts need nothing of their own. Starts from LPT; stops at `enough`.

Price: exponential. At most 24 items; after a fixed number of steps the best partition so far is returned, unproven.
"""

import numpy as np

from packing.inputs import PartArray
from packing.packers.exact import MAX_STEPS, check_few, complete_bins, search_input
from packing.partitioners.lpt import lpt
from packing.problem import PartitionProblem


def exact(problem: PartitionProblem) -> PartArray | None:
    """part_of int32 [n] of least makespan, or None when no assignment keeps capacities and counts.

    Raises:
        PackingError: more than `packing.packers.exact.MAX_ITEMS` items.
    """
    check_few(problem.num_items)
    return improve(problem, lpt(problem), MAX_STEPS)


def improve(problem: PartitionProblem, part_of: PartArray | None, max_steps: int) -> PartArray | None:
    """The best partition found within `max_steps`, none worse than `part_of`; None when there is none to start from."""
    highest = int(problem.weights.sum(axis=0).max(initial=0)) if part_of is None else problem.makespan(part_of) - 1
    num_stages = problem.weights.shape[1]
    limits = np.concatenate([np.full(num_stages, max(highest, 1)), problem.capacity])
    values, limits, order = search_input(problem.values, limits)
    if problem.equal_count:
        limits[-1] = min(limits[-1], problem.base_count + (problem.num_extra > 0))
    min_count = problem.base_count if problem.equal_count else 0
    found = part_of
    while max_steps > 0 and (found is None or highest >= problem.enough):
        limits[:num_stages] = highest
        placed, steps = complete_bins(values, limits, problem.num_parts, min_count, max_steps)
        if problem.num_items and placed[0] < 0:
            break
        found = np.empty(problem.num_items, np.int32)
        found[order] = placed.max(initial=0) - placed
        _fill_empty(found, problem.num_parts)
        highest = problem.makespan(found) - 1
        max_steps -= steps + 1
    return found


def _fill_empty(part_of: PartArray, num_parts: int) -> None:
    """Give each empty part an item of the part that holds most, while one holds two; that raises no load."""
    count = np.bincount(part_of, minlength=num_parts)
    while count.min() == 0 and count.max() > 1:
        item = int(np.flatnonzero(part_of == count.argmax())[-1])
        count[part_of[item]] -= 1
        part_of[item] = count.argmin()
        count[part_of[item]] += 1
