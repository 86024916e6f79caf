"""`sequential`: the order of selection, cut into contiguous pieces. What a run without a balancer does.

    samples 0 1 2 3 4 5 6, 2 ranks, 2 micro-batches   ->   rank 0: [0 1][2 3]   rank 1: [4 5][6]

Reading ranks and micro-batches in order gives the input back. Ranks get equal counts, and so do the micro-batches of a
rank where capacities allow; otherwise micro-batches are filled one after the other, which needs the fewest for a
given order. Price: no thought of cost at all.
"""

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array
from balancer.policies.base import Placement, PlacementProblem, even_bounds, groups_of, sum_over_cells
from packing.packers.next_fit import next_fit
from packing.problem import PackProblem


def place(problem: PlacementProblem) -> Placement:
    """Place the samples in their order.

    Raises:
        PlanError: a fixed number of micro-batches that is too small.
    """
    starts = even_bounds(problem.num_samples, problem.dp_size)
    dp_rank = groups_of(starts)
    fixed = problem.num_microbatches
    if fixed is not None:
        even, fits = _spread_pieces(problem, starts, dp_rank, fixed)
        if bool(fits.all()):
            return Placement.from_cells(dp_rank, even, fixed)
    filled = fill_pieces_in_order(problem.sizes, problem.capacity, starts)
    least = num_groups(filled)
    if fixed is not None and least > fixed:
        return _across_ranks(problem, least)
    num_microbatches = problem.choose_num_microbatches("sequential", least)
    even, fits = _spread_pieces(problem, starts, dp_rank, num_microbatches)
    return Placement.from_cells(dp_rank, np.where(fits[dp_rank], even, filled), num_microbatches)


def _spread_pieces(
    problem: PlacementProblem, starts: Int64Array, dp_rank: Int64Array, num_microbatches: int
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Micro-batch of every sample when each rank cuts its piece into equal counts, [n]; whether that fits, [R]."""
    counts = np.diff(starts)
    base, extra = counts // num_microbatches, counts % num_microbatches
    # The first `extra` micro-batches of a rank hold one sample more: sizes [R, M] of all cells, in order.
    sizes = base[:, np.newaxis] + (np.arange(num_microbatches) < extra[:, np.newaxis])
    cell = np.repeat(np.arange(sizes.size, dtype=np.int64), sizes.reshape(-1))
    loads = sum_over_cells(cell, problem.sizes, (problem.dp_size, num_microbatches))
    fits: NDArray[np.bool_] = np.all(loads <= np.asarray(problem.capacity), axis=(1, 2))
    return cell - dp_rank * num_microbatches, fits


def _across_ranks(problem: PlacementProblem, least: int) -> Placement:
    """Equal counts per rank do not fit into M: fill cells over the borders of ranks, then share out the cells."""
    cells = fill_in_order(problem.sizes, problem.capacity)
    bounds = even_bounds(num_groups(cells), problem.dp_size)
    most = int(np.diff(bounds).max())
    num_microbatches = problem.choose_num_microbatches("sequential", min(least, most))
    dp_rank = groups_of(bounds)[cells]
    return Placement.from_cells(dp_rank, cells - bounds[dp_rank], num_microbatches)


def num_groups(groups: Int64Array) -> int:
    """Number of groups of a group index from 0."""
    return int(groups.max(initial=-1)) + 1


def fill_in_order(sizes: Int64Array, capacity: tuple[int, ...]) -> Int64Array:
    """Group of each item when groups are filled one after the other (next fit), int64 [n]."""
    return fill_pieces_in_order(sizes, capacity, np.array([0, len(sizes)], dtype=np.int64))


def fill_pieces_in_order(sizes: Int64Array, capacity: tuple[int, ...], starts: Int64Array) -> Int64Array:
    """The same for contiguous pieces with `starts` [k + 1], each with groups of its own from 0; int64 [n].

    All pieces in one run: a column of ones never binds, except at a bar before every piece, which fills a whole group.
    """
    num_items, num_pieces = len(sizes), len(starts) - 1
    table = np.zeros((num_items + num_pieces, sizes.shape[1] + 1), dtype=np.int64)
    row = np.arange(num_items) + groups_of(starts) + 1
    table[:, -1] = num_items
    table[row, :-1], table[row, -1] = sizes, 1
    problem = PackProblem(
        sizes=table, capacity=np.array([*capacity, max(num_items, 1)], dtype=np.int64), lower_bound=0, enough=0
    )
    bin_of = next_fit(problem)[0].astype(np.int64)
    bars = starts[:-1] + np.arange(num_pieces)
    filled: Int64Array = bin_of[row] - bin_of[bars][groups_of(starts)] - 1
    return filled


def spread_in_order(sizes: Int64Array, capacity: tuple[int, ...], count: int, filled: Int64Array) -> Int64Array:
    """Contiguous groups of equal count where they fit, otherwise `filled`; int64 [n]."""
    groups = groups_of(even_bounds(len(sizes), count))
    loads = sum_over_cells(groups, sizes, (count, 1))
    return groups if bool((loads <= np.asarray(capacity)).all()) else filled
