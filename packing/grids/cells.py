"""What both grid placers share: item order, value of an assignment, order of slots and ranks, and the last resort.

cells are numbered rank * num_slots + slot; `load` has shape [R * M, S], and [R, M, S] where a rank axis is needed
"""

import heapq
from dataclasses import dataclass

import numpy as np

from packing.grid_bounds import weight_left
from packing.grids.exchange import exchange
from packing.grouping import group_by_bin
from packing.inputs import IntArray, PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.partitioners.lpt import lpt
from packing.partitioners.order import peaks
from packing.problem import GridProblem, Objective, PackProblem, PartitionProblem


def cell_loads(weights: IntArray, cell_of: PartArray, num_ranks: int, num_slots: int) -> IntArray:
    """int64 [R, M, S]."""
    _, _, load = group_by_bin(cell_of, weights, num_ranks * num_slots)
    return load.reshape(num_ranks, num_slots, -1)


def objective_value(load: IntArray, objective: Objective) -> int:
    """What load [R, M, S] costs: see `GridProblem`."""
    if objective == "per_rank":
        return int(load.sum(axis=1).max())
    return int(load.max(axis=(0, 2)).sum())


def value_of(problem: GridProblem, cell_of: PartArray) -> int:
    """What an assignment costs under the objective of the problem."""
    return objective_value(_loads(problem, cell_of), problem.objective)


def _loads(problem: GridProblem, cell_of: PartArray) -> IntArray:
    return cell_loads(problem.weights, cell_of, problem.num_ranks, problem.num_slots)


def align(problem: GridProblem, cell_of: PartArray) -> PartArray:
    """The same cells, renumbered so that like meets like: heavy cells of all ranks in slot 0, light ones in the last.

    per_rank: every rank orders its own cells, so its total stays what it is.
    per_slot: all cells are ordered, R of them make a slot; this is the best grouping, as each group costs its largest.
        Inside a slot the heaviest cell goes to the rank with the lowest total so far.
    """
    ranks, slots = problem.num_ranks, problem.num_slots
    load = _loads(problem, cell_of)
    peak = peaks(load.reshape(ranks * slots, -1)).reshape(ranks, slots)
    new_cell = np.empty(ranks * slots, np.int32)
    if problem.objective == "per_rank":
        by_peak = np.argsort(-peak, axis=1, kind="stable")  # [R, M], slots of a rank from heavy to light
        old = by_peak + np.arange(ranks)[:, None] * slots
        new_cell[old.reshape(-1)] = np.arange(ranks * slots)
    else:
        old = np.argsort(-peak.reshape(-1), kind="stable").reshape(slots, ranks)
        flat = load.reshape(ranks * slots, -1)
        total = np.zeros((ranks, flat.shape[1]), np.int64)
        for slot in range(slots):
            lightest = np.argsort(total.max(axis=1), kind="stable")
            new_cell[old[slot]] = lightest * slots + slot
            total[lightest] += flat[old[slot]]
    return new_cell[cell_of]


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Height that the cells of each slot should reach, under `per_slot`.

    Attributes:
        level: int64 [M], descending: giants first, then one level that the other slots share.
        num_giant: slots whose largest item is above what the rest averages; it is their level.
    """

    level: IntArray
    num_giant: int


def slot_levels(problem: GridProblem) -> Levels:
    """Levels under which slots with giants are filled up as far as their levels and capacities allow."""
    ranks, slots = problem.num_ranks, problem.num_slots
    peak = np.sort(peaks(problem.weights))[::-1]
    giants = [int(value) for value in peak[::ranks][:slots]] + [0] * (slots - -(-problem.num_items // ranks))
    total = max(int(problem.weights[:, stage].sum()) for stage in range(problem.weights.shape[1]))
    left = [total] + [0] * (slots - 1)
    if giants[0] * slots * ranks > total:
        left = weight_left(problem.weights, problem.sizes, problem.capacity, ranks, slots)
    levels: list[int] = []
    beyond = total  # weight that the slots so far have no place for
    while len(levels) < slots:
        beyond = max(beyond, left[len(levels)])
        shared = -(-beyond // (ranks * (slots - len(levels))))
        giant = giants[len(levels)]
        if giant <= shared:
            return Levels(np.array(levels + [shared] * (slots - len(levels)), np.int64), len(levels))
        levels.append(giant)
        beyond = max(0, beyond - ranks * giant)
    return Levels(np.array(levels, np.int64), slots)


def finish(problem: GridProblem, cell_of: PartArray, levels: Levels | None = None) -> PartArray:
    """Align a legal assignment and refine it for the objective of the problem; never worse than it was."""
    ranks, slots = problem.num_ranks, problem.num_slots
    slack = problem.enough - problem.lower_bound
    if problem.objective == "per_rank":
        level = np.full(ranks, problem.lower_bound, np.int64)
        return align(
            problem, exchange(problem.values, problem.capacity, cell_of, level, cells_per_unit=slots, slack=slack)
        )
    start = align(problem, cell_of)
    load = _loads(problem, start)
    wanted = slot_levels(problem) if levels is None else levels
    level = wanted.level.copy()
    if wanted.num_giant < slots:  # what the other slots really share
        rest = load[:, wanted.num_giant :].sum(axis=(0, 1)).max()
        level[wanted.num_giant :] = -(-int(rest) // (ranks * (slots - wanted.num_giant)))
    value = objective_value(load, "per_slot")
    if value - int(level.sum()) <= slack:
        return start
    each = np.tile(level, ranks)
    found = align(
        problem, exchange(problem.values, problem.capacity, start, each, cells_per_unit=1, slack=slack // slots)
    )
    return found if value_of(problem, found) < value else start


def whole_bins(problem: GridProblem) -> PartArray | None:
    """Best-fit-decreasing bins of the sizes as cells: found whenever that packing needs at most R * M bins.

    Bins are split until no cell is empty (where items suffice), then dealt out whole: M to each rank by LPT.
    """
    ranks, slots = problem.num_ranks, problem.num_slots
    num_cells = ranks * slots
    bin_of, num_bins = best_fit_decreasing(
        PackProblem(sizes=problem.sizes, capacity=problem.capacity, lower_bound=0, enough=num_cells)
    )
    if num_bins > num_cells:
        return None
    bin_of = _split(problem, bin_of, num_bins)
    if problem.objective == "per_slot":
        return align(problem, bin_of)
    _, _, load = group_by_bin(bin_of, problem.weights, num_cells)
    rank_of = lpt(
        PartitionProblem(
            weights=load,
            num_parts=ranks,
            sizes=np.empty((num_cells, 0), np.int64),
            capacity=np.empty(0, np.int64),
            equal_count=True,
            lower_bound=0,
            enough=0,
        )
    )
    if rank_of is None:  # cannot be: without capacities LPT always finishes
        return bin_of
    cell = np.empty(num_cells, np.int32)
    cell[np.argsort(rank_of, kind="stable")] = np.arange(num_cells)  # M cells a rank, in order
    return cell[bin_of]


def _split(problem: GridProblem, bin_of: PartArray, num_bins: int) -> PartArray:
    """Fill the unused cells: each takes every other item of the heaviest cell that has several items."""
    num_cells = problem.num_ranks * problem.num_slots
    weight = peaks(problem.weights)
    order, offsets, _ = group_by_bin(bin_of, problem.weights, num_cells)
    groups = [order[offsets[cell] : offsets[cell + 1]] for cell in range(num_bins)]
    splittable = [(-int(weight[group].sum()), cell) for cell, group in enumerate(groups) if len(group) > 1]
    heapq.heapify(splittable)
    result = bin_of.copy()
    for cell in range(num_bins, min(num_cells, problem.num_items)):
        _, source = heapq.heappop(splittable)  # there is one, as cells are fewer than items
        group = groups[source][np.argsort(-weight[groups[source]], kind="stable")]
        groups[source] = group[::2]
        groups.append(group[1::2])
        result[group[1::2]] = cell
        for half in (source, cell):
            if len(groups[half]) > 1:
                heapq.heappush(splittable, (-int(weight[groups[half]].sum()), half))
    return result
