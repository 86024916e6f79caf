"""First-fit, and first-fit-decreasing: each item into the first bin that still takes it.

    sizes 6 5 4 3 2, capacity 10   ->   [6 4] [5 3 2]

First-fit takes items as they come (at most 1.7 OPT bins), first-fit-decreasing largest first (at most
11/9 OPT + 6/9, Dósa 2007); in several dimensions "largest" is the score of packing/scoring.py. The first bin is found
in a tree over the bins that knows the largest free space below each node, in each dimension: O(log n) a step in one
dimension. Price: in several dimensions the free spaces of a node may belong to different bins, so the search may turn
back often; best-fit wastes less room, and exact fill least.
"""

import numpy as np

from packing._jit import jit
from packing.inputs import IntArray, PartArray
from packing.problem import PackProblem
from packing.scoring import score_terms, scores


def first_fit(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins), items in input order."""
    bin_of, num_bins = _first_fit(problem.sizes, problem.capacity, np.arange(problem.num_items))
    return bin_of, int(num_bins)


def first_fit_decreasing(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins), items with a large score first."""
    score = scores(problem.sizes, *score_terms(problem.sizes, problem.capacity))
    bin_of, num_bins = _first_fit(problem.sizes, problem.capacity, np.argsort(-score, kind="stable"))
    return bin_of, int(num_bins)


@jit
def _first_fit(sizes: IntArray, capacity: IntArray, order: IntArray) -> tuple[PartArray, int]:
    num_items, num_columns = sizes.shape
    bin_of = np.empty(num_items, np.int32)
    num_leaves = 1
    while num_leaves < num_items:
        num_leaves *= 2
    # free[node]: the largest free space below it; node 1 is the root, 2 * node and 2 * node + 1 are its children, and
    # leaf num_leaves + index is bin `index`. Bins that are not open yet are empty, and come last.
    free = np.empty((2 * num_leaves, num_columns), np.int64)
    for node in range(2 * num_leaves):
        for column in range(num_columns):
            free[node, column] = capacity[column]
    num_bins = 0
    leaf = num_leaves
    for turn in range(num_items):
        item = order[turn]
        same = turn > 0
        for column in range(num_columns):
            same = same and sizes[item, column] == sizes[order[turn - 1], column]
        node = leaf if same else 1  # an equal item cannot fit before the bin of the last one
        while True:
            fits = True
            for column in range(num_columns):
                fits = fits and sizes[item, column] <= free[node, column]
            if fits and node >= num_leaves:
                break
            if fits:
                node *= 2
                continue
            while node % 2 == 1:
                node //= 2
            node += 1
        leaf = node
        bin_of[item] = node - num_leaves
        num_bins = max(num_bins, node - num_leaves + 1)
        for column in range(num_columns):
            free[node, column] -= sizes[item, column]
        while node > 1:
            node //= 2
            changed = False
            for column in range(num_columns):
                largest = max(free[2 * node, column], free[2 * node + 1, column])
                changed = changed or largest != free[node, column]
                free[node, column] = largest
            if not changed:
                break
    return bin_of, num_bins
