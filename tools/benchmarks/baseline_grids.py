"""Placement on ranks x micro-batches by public systems: `Grid` -> int64 [n, 2], the rank and the slot of each item."""

import numpy as np

from packing import pack
from tools.benchmarks.baseline_packers import megatron_next_fit, omnibal
from tools.benchmarks.baseline_partitions import karmarkar_karp
from tools.benchmarks.baseline_step import StepGrid
from tools.benchmarks.baseline_types import Grid, IntArray, Items, bin_of_items

DEAL_SEED = 0
OMNIBAL_SLACK_PERCENT = 10


def megatron_dp_balanced(grid: Grid) -> IntArray:
    """Megatron-LM `dp_balanced`: next-fit packs in input order, dealt to ranks slot by slot.

    Packs become a multiple of the ranks by moving the last samples of the last packs into packs of their own. The
    number of slots follows from the packs, so there may be more of them than asked for."""
    limits = np.array([grid.capacity], np.int64)
    packs = megatron_next_fit(Items(sizes=grid.sizes[:, None], capacity=limits))
    last = len(packs) - 1
    while len(packs) % grid.num_ranks and last >= 0:
        if len(packs[last]) > 1:
            packs.append([packs[last].pop()])
        else:
            last -= 1
    return _dealt(packs, grid)


def verl_two_level(grid: Grid) -> IntArray:
    """verl: Karmarkar-Karp with equal counts over ranks, then Karmarkar-Karp over the micro-batches of each rank.

    Costs are balanced, tokens are not: a cell may exceed the capacity."""
    cells = np.empty((len(grid.totals), 2), np.int64)
    for rank, items in enumerate(karmarkar_karp(grid.totals, grid.num_ranks, equal_count=True)):
        slots = karmarkar_karp([grid.totals[item] for item in items], grid.num_slots, equal_count=False)
        cells[items, 0] = rank
        cells[items, 1] = bin_of_items(slots, len(items))
    return cells


def best_fit_at_random(grid: Grid) -> IntArray:
    """Best-fit packs (TRL, axolotl and others pack, then sample packs at random), as many as cells, dealt at random."""
    cells = grid.num_ranks * grid.num_slots
    packed = pack(grid.sizes, capacity=grid.capacity, num_bins_multiple=cells)
    packs = [packed.items(index).tolist() for index in range(packed.num_bins)]
    np.random.Generator(np.random.Philox(DEAL_SEED)).shuffle(packs)
    return _dealt(packs, grid)


def omnibal_dealt(grid: StepGrid) -> IntArray:
    """OmniBal: packs under two limits (tokens and images) by iterative sampling and filtering, dealt in their order.

    Balance comes from packs being full in both; no cost is known. The number of slots follows from the packs. The
    original packs a whole dataset and leaves out what makes no full slot over all ranks in the end; a step on its own
    keeps it here, so some ranks may have a micro-batch less."""
    columns = [grid.sizes]
    limits = [grid.capacity]
    if grid.images.any():
        columns.append(grid.images)
        roomy = -(-int(grid.images.sum()) * (100 + OMNIBAL_SLACK_PERCENT) // (100 * grid.num_cells))
        limits.append(max(int(grid.images.max()), roomy))
    packs = omnibal(Items(sizes=np.stack(columns, axis=1), capacity=np.array(limits, np.int64)))
    return _dealt(packs, grid)


def _dealt(packs: list[list[int]], grid: Grid) -> IntArray:
    pack_of = bin_of_items(packs, len(grid.sizes))
    return np.stack([pack_of % grid.num_ranks, pack_of // grid.num_ranks], axis=1)
