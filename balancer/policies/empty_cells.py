"""No micro-batch stays empty while its rank could fill it.

    rank 0, M = 4: [a b c][d][][]   ->   [a][b c][d][] -> [a][b][c][d]

A count that is rounded up (to a multiple, or to the other ranks' count) leaves cells without samples. The heaviest
cell of the same rank is cut in two, at the place that halves its predicted time best, until none is empty or every
cell holds one sample. The order of samples stays, so `sequential` stays sequential; totals of ranks stay too. Where
ranks meet in every micro-batch an empty cell would hang them, so a rank with fewer samples than micro-batches then
takes the lightest sample of the rank that holds the most; capacities hold, since the sample gets a cell of its own.
Ranks in the order of the samples keep it: their cells are then cut and dealt out anew.

Price: a Python loop over the ranks that have an empty cell; the others cost one count.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array
from balancer.policies.base import Placement, PlacementProblem, even_bounds, total_over_stages


def without_empty_cells(problem: PlacementProblem, placement: Placement) -> Placement:
    """The placement with as few empty cells as its ranks' samples allow.

    A placement that routes media items is left alone: its policy has chosen units.
    """
    num_microbatches = placement.num_microbatches
    num_cells = problem.dp_size * num_microbatches
    held = np.bincount(problem.cells_of(placement), minlength=num_cells).reshape(problem.dp_size, num_microbatches)
    if placement.routed or not can_fill(problem, held):
        return placement
    time = total_over_stages(problem.forward_ns) + total_over_stages(problem.backward_ns)
    groups = _groups(placement, _with_gap(held))
    if problem.fills_cells and _is_short(held):
        everything = _groups(placement, np.ones(len(held), dtype=np.bool_))
        rows = np.concatenate([row for cells in everything.values() for row in cells])
        if bool((np.diff(rows) > 0).all()):
            groups = _cut_in_order([cell for cells in everything.values() for cell in cells], held.shape, time)
        else:
            _feed(groups, placement, held, time)
    dp_rank, microbatch, slot = placement.dp_rank.copy(), placement.microbatch.copy(), placement.slot.copy()
    for rank, cells in groups.items():
        for index, rows in enumerate(_filled(cells, num_microbatches, time)):
            dp_rank[rows], microbatch[rows], slot[rows] = rank, index, np.arange(len(rows))
    return Placement(dp_rank=dp_rank, microbatch=microbatch, slot=slot, num_microbatches=num_microbatches)


def can_fill(problem: PlacementProblem, held: Int64Array) -> bool:
    """Whether a cell is empty that should not be; held [R, M] are the samples of the cells."""
    if bool(held.all()):
        return False
    return (problem.fills_cells and _is_short(held)) or bool(_with_gap(held).any())


def _is_short(held: Int64Array) -> bool:
    """Whether a rank has fewer samples than cells and another one more."""
    samples = held.sum(axis=1)
    return bool(samples.min() < held.shape[1] < samples.max())


def _with_gap(held: Int64Array) -> NDArray[np.bool_]:
    """Ranks that could fill a cell from another one of theirs, [R]. Others keep their cells in their places."""
    gap: NDArray[np.bool_] = (held == 0).any(axis=1) & (held > 1).any(axis=1)
    return gap


def _groups(placement: Placement, wanted: NDArray[np.bool_]) -> dict[int, list[Int64Array]]:
    """Rows of every cell of the `wanted` ranks [R], in slot order."""
    num_microbatches = placement.num_microbatches
    mine = np.flatnonzero(wanted[placement.dp_rank])
    cell = placement.dp_rank[mine].astype(np.int64) * num_microbatches + placement.microbatch[mine]
    order = np.lexsort((placement.slot[mine], cell))
    mine = mine[order]
    bounds = np.searchsorted(cell[order], np.arange(len(wanted) * num_microbatches + 1)).tolist()
    return {
        rank: [mine[start:stop] for start, stop in pairwise(bounds[first : first + num_microbatches + 1])]
        for rank in np.flatnonzero(wanted).tolist()
        for first in (rank * num_microbatches,)
    }


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


def _cut_in_order(cells: list[Int64Array], shape: tuple[int, ...], time: Int64Array) -> dict[int, list[Int64Array]]:
    """Cells of all ranks in the order of the samples, cut until there are enough and dealt out anew in that order."""
    num_ranks, num_microbatches = shape
    filled = [cell for cell in _filled(cells, num_ranks * num_microbatches, time) if len(cell)]
    bounds = even_bounds(len(filled), num_ranks).tolist()
    return {rank: filled[start:stop] for rank, (start, stop) in enumerate(pairwise(bounds))}


def _feed(groups: dict[int, list[Int64Array]], placement: Placement, held: Int64Array, time: Int64Array) -> None:
    """Give ranks with fewer samples than cells the lightest samples of the ranks with the most, one at a time."""
    num_cells = placement.num_microbatches
    samples = held.sum(axis=1)
    while True:
        taker, giver = int(samples.argmin()), int(samples.argmax())
        if samples[taker] >= num_cells or samples[giver] <= num_cells:
            return
        for rank in (giver, taker):
            if rank not in groups:
                groups |= _groups(placement, np.arange(len(held)) == rank)
        rows = np.concatenate(groups[giver])
        moved = int(rows[time[rows].argmin()])
        groups[giver] = [cell[cell != moved] for cell in groups[giver]]
        groups[taker] = [*groups[taker], np.array([moved], dtype=np.int64)]
        samples[giver] -= 1
        samples[taker] += 1
