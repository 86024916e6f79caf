"""`sequential`: the order of selection, cut into contiguous pieces. What a run without a balancer does.

    samples 0 1 2 3 4 5 6, 2 ranks, 2 micro-batches   ->   rank 0: [0 1][2 3]   rank 1: [4 5][6]

Reading ranks and micro-batches in order gives the input back. Ranks get equal counts, and so do the micro-batches of a
rank where capacities allow; otherwise micro-batches are filled one after the other, which needs the fewest for a
given order. Price: no thought of cost at all.
"""

from itertools import pairwise

import numpy as np

from balancer.counts import Int64Array
from balancer.policies.base import Placement, PlacementProblem, even_bounds, groups_of
from packing import pack


def place(problem: PlacementProblem) -> Placement:
    """Place the samples in their order.

    Raises:
        PlanError: a fixed number of micro-batches that is too small.
    """
    bounds = even_bounds(problem.num_samples, problem.dp_size)
    pieces = [problem.sizes[start:stop] for start, stop in pairwise(bounds.tolist())]
    filled = [fill_in_order(sizes, problem.capacity) for sizes in pieces]
    least = max(num_groups(groups) for groups in filled)
    if problem.num_microbatches is not None and least > problem.num_microbatches:
        return _across_ranks(problem, least)
    num_microbatches = problem.choose_num_microbatches("sequential", least)
    microbatch = [
        spread_in_order(sizes, problem.capacity, num_microbatches, groups)
        for sizes, groups in zip(pieces, filled, strict=True)
    ]
    return Placement.from_cells(groups_of(bounds), np.concatenate(microbatch), num_microbatches)


def _across_ranks(problem: PlacementProblem, least: int) -> Placement:
    """Equal counts per rank do not fit into M: fill cells over the borders of ranks, then share out the cells."""
    cells = fill_in_order(problem.sizes, problem.capacity)
    bounds = even_bounds(num_groups(cells), problem.dp_size)
    most = int(np.diff(bounds).max())
    num_microbatches = problem.choose_num_microbatches("sequential", min(least, most))
    dp_rank = groups_of(bounds)[cells]
    return Placement.from_cells(dp_rank, cells - bounds[dp_rank], num_microbatches)


def num_groups(groups: Int64Array) -> int:
    """Number of groups of an ascending group index."""
    return int(groups[-1]) + 1 if len(groups) else 0


def fill_in_order(sizes: Int64Array, capacity: tuple[int, ...]) -> Int64Array:
    """Group of each item when groups are filled one after the other (next fit), int64 [n]."""
    return pack(sizes, capacity=capacity, algorithm="next_fit").bin_of.astype(np.int64)


def spread_in_order(sizes: Int64Array, capacity: tuple[int, ...], count: int, filled: Int64Array) -> Int64Array:
    """Contiguous groups of equal count where they fit, otherwise `filled`; int64 [n]."""
    groups = groups_of(even_bounds(len(sizes), count))
    loads = np.zeros((count, len(capacity)), dtype=np.int64)
    np.add.at(loads, groups, sizes)
    return groups if bool((loads <= np.asarray(capacity)).all()) else filled
