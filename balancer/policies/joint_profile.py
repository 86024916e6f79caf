"""How large the micro-batches of a replica should be, in the order in which they run.

    schedule, time per stage  --every micro-batch a share of all work, shares divisible-->  shares [M], sum 2**20

    1F1B, encoder 0.5 | LLM 1 1 1, M = 16    equal shares: 1.156 of the work of a rank, these: 1.077
    0.15 0.32 0.63 1.12 1.43 1.43 1.41 1.39 1.37 1.33 1.27 1.19 1.07 0.90 0.66 0.33 of the mean

A pipeline warms up and drains at the pace of its first and last micro-batches, so these should be small. The makespan
is the longest path through the acts, a convex function of the shares, so descent finds the best ones: shares that lie
on the longest path shrink, the others grow. All in integers, on rounded stage times, so that neighbouring steps
share one result and every host has the same. Price: about 10 ms for the first step of a kind; after `_NUM_STEPS` steps
the result is within 1 % of the optimum of a linear program on 24 pipelines tried, and samples are not divisible.
"""

from functools import lru_cache

import numpy as np

from balancer.counts import Int64Array
from balancer.makespans import makespans_ns
from balancer.schedule import Schedule

TOTAL = 2**20
PARTS = 64
_ROOMY, _ROOMY_PARTS = 2 * PARTS, 16  # from this share on, capacities in coarser steps: they hardly bind
_NUM_STEPS = 96
_LEVELS = 32  # stage times are rounded to this many parts of the longest
_FIRST_STEP, _LAST_STEP, _STEP_PARTS = 512, 12, 1024  # of 1,024: how far shares may move in a step of the descent
_SAFE_BITS = 62 - 21
_MOST_GROUPS = 24  # micro-batches in the middle of a long step share one share


def slot_shares(schedule: Schedule, work_ns: Int64Array, most: int, *, routed: bool) -> Int64Array:
    """Shares int64 [M] of a replica's work, in running order, sum about 2**20.

    Args:
        schedule: what a replica runs.
        work_ns: int64 [2, S], forward and backward time of all samples in every stage.
        most: largest share, in `PARTS` of the mean: what capacities leave room for.
        routed: media items are exchanged inside units.
    """
    num_microbatches = schedule.num_microbatches
    if num_microbatches == 1 or schedule.num_ranks == 1 or most <= PARTS:
        return np.full(num_microbatches, TOTAL // num_microbatches, dtype=np.int64)
    longest = max(1, int(work_ns.max()))
    rounded = tuple(int(ns) for ns in (work_ns.reshape(-1) * _LEVELS + longest // 2) // longest)
    if most > _ROOMY:
        most -= most % _ROOMY_PARTS
    return _descend(schedule, rounded, min(most, PARTS * num_microbatches), routed)


@lru_cache(maxsize=256)
def _descend(schedule: Schedule, work: tuple[int, ...], most: int, routed: bool) -> Int64Array:
    """The best shares seen."""
    num_microbatches = schedule.num_microbatches
    forward, backward = np.array(work, dtype=np.int64).reshape(2, -1)
    group = _groups(num_microbatches)  # [M] -> share group [G]
    size = np.bincount(group).astype(np.int64)
    cap = max(1, TOTAL * most // (PARTS * num_microbatches))
    share = np.full(len(size), TOTAL // num_microbatches, dtype=np.int64)
    bump = np.diag(np.full(len(size), max(1, TOTAL // (64 * num_microbatches)), dtype=np.int64))
    best, best_makespan, step = share, -1, _FIRST_STEP
    for _ in range(_NUM_STEPS):
        tried = np.concatenate([share[np.newaxis], share + bump])[:, group]  # [1 + G, M]
        makespans = makespans_ns(
            schedule,
            divisible_times(schedule, tried, forward, routed),
            divisible_times(schedule, tried, backward, routed),
            routed=routed,
        )
        if best_makespan < 0 or makespans[0] < best_makespan:
            best, best_makespan = share, int(makespans[0])
        slope = (makespans[1:] - makespans[0]) // size
        slope -= int((share * size * slope).sum()) // TOTAL
        share = share - (share * step // _STEP_PARTS) * slope // max(1, int(np.abs(slope).max()))
        share = _normalised(np.maximum(share, TOTAL // (256 * num_microbatches)), size, cap)
        step = max(_LAST_STEP, step * 31 // 32)
    result: Int64Array = best[group]
    result.setflags(write=False)
    return result


def _groups(num_microbatches: int) -> Int64Array:
    """Group of every micro-batch: one each, but one for all in the middle where there are many."""
    group = np.arange(num_microbatches, dtype=np.int64)
    ends = _MOST_GROUPS // 2
    if num_microbatches > _MOST_GROUPS:
        group = np.minimum(group, ends)
        group[-ends:] = ends + 1 + np.arange(ends)
    return group


def divisible_times(schedule: Schedule, shares: Int64Array, work: Int64Array, routed: bool) -> Int64Array:
    """Durations int64 [K, M, S] of shares [K, M] of `work` [S]; routed, all ranks of a unit encode equally long."""
    times = shares[:, :, np.newaxis] * work
    if routed:
        unit_size = schedule.unit_size
        for first in range(0, shares.shape[1], unit_size):
            unit = slice(first, min(first + unit_size, shares.shape[1]))
            times[:, unit, 0] = times[:, unit, 0].sum(axis=1, keepdims=True) // (unit.stop - unit.start)
    return times


def _normalised(share: Int64Array, size: Int64Array, cap: int) -> Int64Array:
    """Shares with sum about TOTAL over all micro-batches, none above the cap."""
    share = share * TOTAL // int((share * size).sum())
    for _ in range(8):
        share = np.minimum(share, cap)
        short = TOTAL - int((share * size).sum())
        growing = np.where(share < cap, share, 0)
        total = int((growing * size).sum())
        if short <= 0 or not total:
            break
        share = share + growing * short // total
    return share


def levels(shares: Int64Array, total: int, giants: Int64Array) -> Int64Array:
    """Height that the cells of every slot should reach, int64 [M], sum `total` or what giants need.

    giants: int64 [M], descending: an item of this weight at least is in some cell of the k-th slot by size. A slot
    whose giant stands above its share has it as its level; the others keep their proportions in what is left.
    """
    by_share = np.argsort(-shares, kind="stable")
    share, level = shares[by_share], np.zeros(len(shares), dtype=np.int64)
    free = np.ones(len(shares), dtype=np.bool_)
    while True:
        left = max(0, total - int(giants[~free].sum()))
        shift = max(0, left.bit_length() - _SAFE_BITS)  # so that no product overflows
        level[free] = (share[free] * (left >> shift) // max(1, int(share[free].sum()))) << shift
        above = free & (giants > level)
        if not above.any():
            break
        free &= ~above
        level[~free] = giants[~free]
    result = np.empty_like(level)
    result[by_share] = level
    return result
