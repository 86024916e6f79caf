"""Partitioners of public systems: `Weights` -> parts. See `baselines` for what is kept and what is spared.

Systems that balance one cost get the LLM's (the last stage), as they would in training; `karmarkar_karp_sum` gets what
a user would try next, the sum of all stages, each divided by its own total.
"""

import heapq
from collections.abc import Sequence
from itertools import count, pairwise

import numpy as np

from tools.benchmarks.baseline_types import IntArray, Weights, bin_of_items

_Sets = list[tuple[int, list[int]]]  # (sum, items) of each part, largest sum first
UNIT = 2**40


def verl_karmarkar_karp_equal(weights: Weights) -> list[list[int]]:
    """verl `karmarkar_karp(equal_size=True)`, as slime, RL2 and MindSpeed-RL: equal counts. heapq over tuples of sets.

    Starts from groups of k neighbours in sorted order; n must be a multiple of k, as in the original."""
    return karmarkar_karp(weights.stages[-1], weights.num_parts, equal_count=True)


def verl_karmarkar_karp(weights: Weights) -> list[list[int]]:
    """verl `karmarkar_karp(equal_size=False)`: the largest differencing method, n * k work per merge of tuples."""
    return karmarkar_karp(weights.stages[-1], weights.num_parts, equal_count=False)


def karmarkar_karp_sum(weights: Weights) -> list[list[int]]:
    """The same, with free counts, on the sum of the stage costs, each divided by the total of its stage."""
    totals = [max(sum(stage), 1) for stage in weights.stages]
    shares = [[cost * UNIT // total for cost in stage] for stage, total in zip(weights.stages, totals, strict=True)]
    return karmarkar_karp([sum(costs) for costs in zip(*shares, strict=True)], weights.num_parts, equal_count=False)


def karmarkar_karp(costs: Sequence[int], num_parts: int, *, equal_count: bool) -> list[list[int]]:
    """Merge the two tuples of largest spread, the largest set of one with the smallest of the other, until one is left.

    Raises:
        ValueError: equal counts of a number of items that is no multiple of the parts.
    """
    if equal_count and len(costs) % num_parts:
        raise ValueError(f"{len(costs)} items do not make {num_parts} parts of equal counts")
    order = sorted(range(len(costs)), key=costs.__getitem__)
    number = count()
    heap: list[tuple[int, int, _Sets]] = []
    width = num_parts if equal_count else 1
    for start in range(0, len(order), width):
        sets = [(costs[item], [item]) for item in reversed(order[start : start + width])]
        sets += [(0, []) for _ in range(num_parts - width)]
        heap.append((sets[-1][0] - sets[0][0], next(number), sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        heapq.heappush(heap, _merged(left, right, next(number)))
    return [items for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def _merged(left: _Sets, right: _Sets, number: int) -> tuple[int, int, _Sets]:
    sets = []
    for (left_sum, left_items), (right_sum, right_items) in zip(left, reversed(right), strict=True):
        left_items.extend(right_items)
        sets.append((left_sum + right_sum, left_items))
    sets.sort(key=lambda pair: pair[0], reverse=True)
    return sets[-1][0] - sets[0][0], number, sets


def verl_greedy(weights: Weights) -> list[list[int]]:
    """verl `greedy_partition(equal_size=False)`: items in input order to the part that is lightest; loop over parts."""
    parts: list[list[int]] = [[] for _ in range(weights.num_parts)]
    loads = [0] * weights.num_parts
    for item, cost in enumerate(weights.stages[-1]):
        lightest = 0
        for part in range(1, weights.num_parts):
            if loads[part] < loads[lightest]:
                lightest = part
        parts[lightest].append(item)
        loads[lightest] += cost
    return parts


def areal_balanced_greedy(weights: Weights) -> list[list[int]]:
    """AReaL balanced greedy: largest first to the lightest part that is not full; equal counts. heapq."""
    return _longest_first(weights.stages[-1], weights.num_parts, -(-len(weights.stages[-1]) // weights.num_parts))


def veomni_lpt(weights: Weights) -> list[list[int]]:
    """VeOmni, LoongForge: longest processing time first. heapq."""
    return _longest_first(weights.stages[-1], weights.num_parts, len(weights.stages[-1]))


def _longest_first(costs: Sequence[int], num_parts: int, most: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part) for part in range(num_parts)]
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, part = heap[0]
        parts[part].append(item)
        if len(parts[part]) < most:
            heapq.heapreplace(heap, (load + costs[item], part))
        else:
            heapq.heappop(heap)
    return parts


def lpt_per_stage(weights: Weights) -> IntArray:
    """VeOmni, OrchMLLM: each stage has an assignment of its own, and data is shuffled between stages. int64 [n, S]."""
    num_items = len(weights.costs)
    stages = [_longest_first(stage, weights.num_parts, num_items) for stage in weights.stages]
    return np.stack([bin_of_items(parts, num_items) for parts in stages], axis=1)


def sequential(weights: Weights) -> list[list[int]]:
    """What a sampler without balancing does: equal counts of consecutive items."""
    num_items = len(weights.costs)
    edges = [num_items * part // weights.num_parts for part in range(weights.num_parts + 1)]
    return [list(range(start, stop)) for start, stop in pairwise(edges)]
