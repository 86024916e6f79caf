"""What a result is worth: recomputed from the assignment alone, the same way for ours and for everyone else's."""

import numpy as np

from tools.benchmarks.baseline_types import IntArray


def packing_quality(bin_of: IntArray, bound: int) -> dict[str, float]:
    """bins, bound and excess = bins / bound - 1; bin_of int64 [n]."""
    num_bins = int(bin_of.max(initial=-1)) + 1
    return {"bins": num_bins, "bound": bound, "excess": num_bins / max(bound, 1) - 1.0}


def packing_violations(bin_of: IntArray, sizes: IntArray, capacity: IntArray) -> dict[str, float]:
    """Items in no bin, bins above a capacity and by how much; empty when all is well."""
    placed = bin_of >= 0
    num_bins = int(bin_of.max(initial=-1)) + 1
    loads = group_sums(bin_of[placed], sizes[placed], num_bins)
    over = (loads > capacity).any(axis=1)
    found = {"unplaced": float((~placed).sum()), "bins_above_capacity": float(over.sum())}
    if over.any():
        found["worst_load"] = float((loads / capacity).max())
    return {name: value for name, value in found.items() if value}


def group_sums(group_of: IntArray, values: IntArray, num_groups: int) -> IntArray:
    """Exact int64 sums [groups, columns] of values [n, columns]."""
    sums = np.zeros((num_groups, values.shape[1]), np.int64)
    np.add.at(sums, group_of, values)
    return sums


def partition_quality(part_of: IntArray, costs: IntArray, num_parts: int, bound: int) -> dict[str, float]:
    """makespan over parts and stages, and its gap to the bound; part_of int64 [n], or [n, S] with one each stage."""
    assigned = part_of[:, None] if part_of.ndim == 1 else part_of
    makespan = 0
    for stage in range(costs.shape[1]):
        column = assigned[:, min(stage, assigned.shape[1] - 1)]
        makespan = max(makespan, int(group_sums(column, costs[:, stage : stage + 1], num_parts).max()))
    return {"makespan": makespan, "bound": bound, "gap": makespan / max(bound, 1) - 1.0}


def count_spread(part_of: IntArray, num_parts: int) -> int:
    """Largest minus smallest number of items in a part."""
    counts = np.bincount(part_of, minlength=num_parts)
    return int(counts.max() - counts.min())


def grid_quality(cells: IntArray, costs: IntArray, num_ranks: int) -> dict[str, float]:
    """cells int64 [n, 2] (rank, slot), costs int64 [n, S].

    sync_ratio: sum over slots of the slowest rank (and stage), over the mean of a rank: ranks meet in every slot.
    rank_ratio: largest over mean of the ranks' totals: ranks meet once. largest_cell: over the mean cell.
    """
    num_slots = int(cells[:, 1].max()) + 1
    loads = group_sums(cells[:, 0] * num_slots + cells[:, 1], costs, num_ranks * num_slots)
    loads = loads.reshape(num_ranks, num_slots, costs.shape[1])  # [rank, slot, stage]
    mean = max(float(loads.sum(axis=1).mean(axis=0).max()), 1.0)
    return {
        "slots": num_slots,
        "sync_ratio": float(loads.max(axis=(0, 2)).sum()) / mean,
        "rank_ratio": float(loads.sum(axis=1).max()) / mean,
        "largest_cell": float(loads.max()) / (mean / num_slots),
    }


def grid_violations(cells: IntArray, sizes: IntArray, capacity: int, num_slots: int) -> dict[str, float]:
    """Cells above the capacity, and slots beyond those asked for."""
    found = packing_violations(
        np.where((cells >= 0).all(axis=1), cells[:, 0] * (cells[:, 1].max() + 1) + cells[:, 1], -1),
        sizes[:, None],
        np.array([capacity], np.int64),
    )
    extra = int(cells[:, 1].max()) + 1 - num_slots
    return {**found, **({"extra_slots": float(extra)} if extra > 0 else {})}
