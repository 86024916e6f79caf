"""No micro-batch stays empty while its rank could fill it.

    rank 0, M = 4: [a b c][d][][]   ->   [a][b c][d][] -> [a][b][c][d]

A count that is rounded up (to a multiple, or to the other ranks' count) leaves cells without samples. The heaviest
cell of the same rank is cut in two, at the place that halves its predicted time best, until none is empty or every
cell holds one sample. The order of samples stays, so `sequential` stays sequential; totals of ranks stay too. Where
ranks meet in every micro-batch an empty cell would hang them, so a rank with fewer samples than micro-batches then
takes the lightest sample of the rank that holds the most; capacities hold, since the sample gets a cell of its own.

Price: a Python loop over the ranks that have an empty cell; the others cost one count.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from balancer.counts import Int64Array
from balancer.policies.base import Placement, PlacementProblem


def without_empty_cells(problem: PlacementProblem, placement: Placement) -> Placement:
    """The placement with as few empty cells as its ranks' samples allow.

    A placement that routes media items is left alone: its policy has chosen units.
    """
    num_microbatches = placement.num_microbatches
    num_cells = problem.dp_size * num_microbatches
    held = np.bincount(problem.cells_of(placement), minlength=num_cells).reshape(problem.dp_size, num_microbatches)
    if bool(held.all()) or placement.routed:
        return placement
    time = (problem.forward_ns + problem.backward_ns).sum(axis=1)
    groups = {int(rank): _groups(placement, int(rank)) for rank in np.flatnonzero((held == 0).any(axis=1))}
    if problem.parallel.meet != "step":
        _feed(groups, placement, held, time)
    dp_rank, microbatch, slot = placement.dp_rank.copy(), placement.microbatch.copy(), placement.slot.copy()
    for rank, cells in groups.items():
        for index, rows in enumerate(_filled(cells, num_microbatches, time)):
            dp_rank[rows], microbatch[rows], slot[rows] = rank, index, np.arange(len(rows))
    return Placement(dp_rank=dp_rank, microbatch=microbatch, slot=slot, num_microbatches=num_microbatches)


def _groups(placement: Placement, rank: int) -> list[Int64Array]:
    """Rows of every cell of a rank, in slot order."""
    mine = np.flatnonzero(placement.dp_rank == rank)
    mine = mine[np.lexsort((placement.slot[mine], placement.microbatch[mine]))]
    bounds = np.searchsorted(placement.microbatch[mine], np.arange(placement.num_microbatches + 1))
    return [mine[start:stop] for start, stop in pairwise(bounds.tolist())]


def _filled(cells: list[Int64Array], num_cells: int, time: Int64Array) -> list[Int64Array]:
    """The same rows in `num_cells` cells, empty ones last."""
    rows = np.concatenate(cells)
    before = [0, *np.cumsum(time[rows]).tolist()]  # time of the first k rows
    starts = [0, *np.cumsum([len(cell) for cell in cells if len(cell)]).tolist()]
    # Heaviest first, of equals the first; cells of one row stay whole.
    heap = [(before[start] - before[stop], start, stop) for start, stop in pairwise(starts) if stop - start > 1]
    heapify(heap)
    while len(starts) - 1 < num_cells and heap:
        _, start, stop = heappop(heap)
        cut = _middle(before, start, stop)
        insort(starts, cut)
        for first, last in ((start, cut), (cut, stop)):
            if last - first > 1:
                heappush(heap, (before[first] - before[last], first, last))
    filled = [rows[start:stop] for start, stop in pairwise(starts)]
    return filled + [np.zeros(0, dtype=np.int64)] * (num_cells - len(filled))


def _middle(before: list[int], start: int, stop: int) -> int:
    """The first place between `start` and `stop` that halves the time of the rows there best."""
    both = before[start] + before[stop]
    place = bisect_left(before, both // 2, start + 1, stop - 1)
    if place > start + 1 and abs(2 * before[place - 1] - both) <= abs(2 * before[place] - both):
        return bisect_left(before, before[place - 1], start + 1, place)
    return place


def _feed(groups: dict[int, list[Int64Array]], placement: Placement, held: Int64Array, time: Int64Array) -> None:
    """Give ranks with fewer samples than cells the lightest samples of the ranks with the most, one at a time."""
    num_cells = placement.num_microbatches
    samples = held.sum(axis=1)
    while True:
        taker, giver = int(samples.argmin()), int(samples.argmax())
        if samples[taker] >= num_cells or samples[giver] <= num_cells:
            return
        for rank in (giver, taker):
            groups.setdefault(rank, _groups(placement, rank))
        rows = np.concatenate(groups[giver])
        moved = int(rows[time[rows].argmin()])
        groups[giver] = [cell[cell != moved] for cell in groups[giver]]
        groups[taker] = [*groups[taker], np.array([moved], dtype=np.int64)]
        samples[giver] -= 1
        samples[taker] += 1
