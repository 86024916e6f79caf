"""DistTrain (arXiv 2408.04275): samples over ranks by size, then micro-batches in an order that fills the intervals.

    1. within a micro-batch:  all samples of the step, longest first to the lightest rank, equal counts
    2. between micro-batches: each rank orders its own for 1F1B:

        smallest | fit the first interval with P - 1 | one micro-batch for each interval | the P - 1 smallest last

An *interval* is the time in which stage 0 waits for the next backward to come back; the forward that fits it best goes
there. The smallest comes first so that all stages start early, the next smallest come last because nothing is left to
fill the last intervals with.

It takes the LLM to be the same for every micro-batch (its packs all have the same length), so the intervals are
computed here with the mean of the later stages; the token capacity is not kept and the grouping of samples into
micro-batches is left as it came. Price: Python over M, numpy over ranks.
"""

import heapq

import numpy as np

from tools.benchmarks.baseline_step import StepGrid, slots_in_order
from tools.benchmarks.baseline_types import IntArray


def disttrain(grid: StepGrid) -> IntArray:
    """Cells of every sample, int64 [n, 2]."""
    cells = np.empty((len(grid), 2), np.int64)
    cells[:, 0] = _equal_counts(grid.totals, grid.num_ranks)
    cells[:, 1] = slots_in_order(cells[:, 0], grid.num_ranks, grid.num_slots)
    if grid.rank_forward.shape[1] == 1 or grid.num_slots == 1:
        return cells
    place_of = np.argsort(_orders(grid, cells), axis=1)  # [R, M]: micro-batch -> its turn
    cells[:, 1] = place_of[cells[:, 0], cells[:, 1]]
    return cells


def _equal_counts(costs: list[int], num_ranks: int) -> IntArray:
    """Longest first to the lightest rank that still takes samples, int64 [n]."""
    most = -(-len(costs) // num_ranks)
    rank_of = np.empty(len(costs), np.int64)
    counts = [0] * num_ranks
    heap = [(0, rank) for rank in range(num_ranks)]
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, rank = heap[0]
        rank_of[item] = rank
        counts[rank] += 1
        if counts[rank] < most:
            heapq.heapreplace(heap, (load + costs[item], rank))
        else:
            heapq.heappop(heap)
    return rank_of


def _orders(grid: StepGrid, cells: IntArray) -> IntArray:
    """Order of the micro-batches of every replica, int64 [R, M]: entry [r, i] runs i-th."""
    num_stages = grid.rank_forward.shape[1]
    shape = (grid.num_ranks, grid.num_slots, num_stages)
    forward, backward = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    np.add.at(forward, (cells[:, 0], cells[:, 1]), grid.rank_forward)
    np.add.at(backward, (cells[:, 0], cells[:, 1]), grid.rank_backward)
    later = (forward[:, :, 1:] + backward[:, :, 1:]).mean(axis=1)  # [R, P - 1]
    return np.stack(
        [
            _order(forward[rank, :, 0], backward[rank, :, 0], float(later[rank].sum()), float(later[rank].max()))
            for rank in range(grid.num_ranks)
        ]
    )


def _order(forward: IntArray, backward: IntArray, trip: float, pace: float) -> IntArray:
    """Order of one replica: stage-0 times int64 [M], the trip through the later stages and back, and their pace."""
    later_stages = max(round(trip / pace), 1) if pace else 1
    waiting = np.argsort(forward, kind="stable").tolist()
    order = [waiting.pop(0)]
    rear = [waiting.pop(0) for _ in range(min(later_stages, len(waiting)))]
    clock = float(forward[order[0]])
    returns = clock + trip
    for turn in range(len(forward)):
        if not waiting:
            break
        # All the forwards of the warm-up share the first interval, then there is one an interval.
        count = min(later_stages if turn == 0 else 1, len(waiting))
        for place in range(count):
            wanted = (returns - clock) / (count - place)
            best = min(waiting, key=lambda microbatch: (abs(float(forward[microbatch]) - wanted), microbatch))
            waiting.remove(best)
            order.append(best)
            clock += float(forward[best])
        clock = max(clock, returns) + float(backward[order[turn]])
        returns += pace
    return np.array([*order, *rear], np.int64)
