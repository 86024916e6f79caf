"""Karmarkar-Karp: combine the two partial partitions of largest difference, largest part with smallest, to the last.

    weights 8 7 6 5 4, 2 parts   ->   8-7 6-5 4   ->   differences 1 1 4   ->   3 1   ->   {8 6} {7 5 4}, makespan 16

The largest differencing method (Karmarkar and Karp 1982) for k parts. With equal counts it starts from groups of k
neighbours in sorted order, one for each part, so every combination keeps counts equal: the balanced method (Yakir
1996; Michiels et al. 2003); a last group that is not full is filled with items of weight 0 that do not exist.

Price: differences are of one number, so several stages are differenced by their sum: only the sum comes out even, and
single stages can be 10-20 % above their mean. Capacities are not looked at:
where the result exceeds one the answer is None, never a broken limit. Only parts that are not empty are stored, O(n)
memory. A combination sorts up to k loads; with free counts and few items a part most of the n - 1 do (100 ms for 8,192
to 1,024, 4 ms for 8,192 to 64), with equal counts there are n / k of them.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grouping import group_by_bin
from packing.inputs import IntArray, PartArray
from packing.makespan_bounds import stage_costs
from packing.partitioners.order import descending
from packing.problem import PartitionProblem


def karmarkar_karp(problem: PartitionProblem) -> PartArray | None:
    """part_of int32 [n], or None when the result exceeds a capacity."""
    num_items, num_parts = problem.num_items, problem.num_parts
    if num_items == 0:
        return np.empty(0, np.int32)
    weights = stage_costs(problem.weights, "sum")
    order = descending(weights)
    group = num_parts if problem.equal_count else 1
    padded = np.zeros(-(-num_items // group) * group, np.int64)
    padded[:num_items] = weights[order, 0]
    part_of = np.empty(num_items, np.int32)
    part_of[order] = _difference(padded, group, num_parts)[:num_items]
    if problem.capacity.size:
        used = group_by_bin(part_of, problem.sizes, num_parts)[2]
        if (used > problem.capacity).any():
            return None
    return part_of


@jit
def _difference(weights: IntArray, group: int, num_parts: int) -> PartArray:
    """Parts of items with descending `weights`; `group` neighbours make a first partial partition.

    A partial partition is named by the item that heads its largest part. Its parts that hold something are a list in
    descending load, each named by its first item.
    """
    num_items = weights.shape[0]
    num_partials = num_items // group
    load = weights.copy()  # of the part that an item heads
    # Rows: next part in the list, next item in the part, last item of the part.
    links = np.full((3, num_items), -1, np.int64)
    heap = np.zeros((2, num_partials), np.int64)  # difference and head, largest difference first
    for item in range(num_items):
        links[2, item] = item
        if (item + 1) % group != 0:
            links[0, item] = item + 1
    scratch = np.zeros((2, num_parts), np.int64)
    for index in range(num_partials - 1, -1, -1):
        first = index * group
        spread = load[first] - (load[first + group - 1] if group == num_parts else 0)
        _sink(heap, index, num_partials, spread, first)
    while num_partials > 1:
        one = heap[1, 0]
        num_partials -= 1
        _sink(heap, 0, num_partials, heap[0, num_partials], heap[1, num_partials])
        head, spread = _combine(load, links, scratch, one, heap[1, 0])
        _sink(heap, 0, num_partials, spread, head)
    part_of = np.zeros(num_items, np.int32)
    head, part = heap[1, 0], 0
    while head >= 0:
        item = head
        while item >= 0:
            part_of[item] = part
            item = links[1, item]
        head = links[0, head]
        part += 1
    return part_of


@jit_inner
def _sink(heap: IntArray, place: int, size: int, spread: int, head: int) -> None:
    """Write an entry that belongs at `place` or below; between equal differences the lower head comes first."""
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and (
            heap[0, child + 1] > heap[0, child]
            or (heap[0, child + 1] == heap[0, child] and heap[1, child + 1] < heap[1, child])
        ):
            child += 1
        if spread > heap[0, child] or (spread == heap[0, child] and head < heap[1, child]):
            break
        heap[0, place], heap[1, place] = heap[0, child], heap[1, child]
        place = child
    heap[0, place], heap[1, place] = spread, head


@jit_inner
def _combine(load: IntArray, links: IntArray, scratch: IntArray, one: int, other: int) -> tuple[int, int]:
    """(head, difference) of two partial partitions put together: largest part of each with the smallest of the other.

    Parts beyond k in the second list, counted from behind, meet parts of the first; the others stay alone.
    """
    num_parts = scratch.shape[1]
    size = 0
    while one >= 0:
        scratch[0, size], scratch[1, size] = load[one], one
        one = links[0, one]
        size += 1
    place = num_parts - 1  # the largest of the other meets the last of the k, and so on upwards
    while other >= 0:
        following = links[0, other]
        if place < size:
            head = scratch[1, place]
            links[1, links[2, head]] = other
            links[2, head] = links[2, other]
            scratch[0, place] += load[other]
            load[head] = scratch[0, place]
        else:
            # Free places are filled from `place` down; the list is made dense below.
            scratch[0, place], scratch[1, place] = load[other], other
        other = following
        place -= 1
    if place >= size:  # places size..place stayed free
        gap = place + 1 - size
        for index in range(place + 1, num_parts):
            scratch[0, index - gap], scratch[1, index - gap] = scratch[0, index], scratch[1, index]
        size = num_parts - gap
    else:
        size = num_parts
    _sort_descending(scratch, size)
    for index in range(size):
        links[0, scratch[1, index]] = scratch[1, index + 1] if index + 1 < size else -1
    return scratch[1, 0], scratch[0, 0] - (scratch[0, size - 1] if size == num_parts else 0)


@jit_inner
def _sort_descending(pairs: IntArray, size: int) -> None:
    """Shell sort of columns (load, head): by descending load, then by head."""
    step = 1
    while step < size:
        step = 3 * step + 1
    while step > 0:
        for index in range(step, size):
            load, head = pairs[0, index], pairs[1, index]
            place = index
            while place >= step and (
                pairs[0, place - step] < load or (pairs[0, place - step] == load and pairs[1, place - step] > head)
            ):
                pairs[0, place], pairs[1, place] = pairs[0, place - step], pairs[1, place - step]
                place -= step
            pairs[0, place], pairs[1, place] = load, head
        step //= 3
