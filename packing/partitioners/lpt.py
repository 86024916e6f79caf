"""LPT, longest processing time first: heaviest item first, each to the part that it raises least.

    weights 7 6 5 4 3, 2 parts   ->   {7 4 3} {6 5}, makespan 14 (optimum 13)

With one stage, free counts and no capacity at most 4/3 - 1/(3k) of the optimum (Graham 1969), O(n log n). With several
stages, or a capacity, a part's height is its largest stage load, and the item looks at the whole front of a heap of
heights, `_CANDIDATES` parts: all of them where k is at most that, else nearly the lowest ones, which is the price of
O(n (S + d)) instead of O(n k (S + d)). Ties go to the smaller sum, then to fewer items, then to the lower index.
Parts that would exceed a capacity or their item count are passed over, and where the whole front is full, the item
looks further back, twice as far each time. It can fail where an assignment exists, and it gives up after
`_FURTHER_LOOKS` parts an item on average, so that no input takes n k steps.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.inputs import IntArray, PartArray
from packing.partitioners.order import descending
from packing.problem import PartitionProblem

_CANDIDATES = 64
_FURTHER_LOOKS = 256
_CLOSED = np.int64(2**62 + 1)  # height of a part that takes no more items; above every sum of weights


def lpt(problem: PartitionProblem) -> PartArray | None:
    """part_of int32 [n], or None when an item fits no part any more."""
    values, num_parts = problem.values, problem.num_parts
    part_of = np.empty(problem.num_items, np.int32)
    load = np.zeros((num_parts, values.shape[1]), np.int64)
    height, count, heap = np.zeros(num_parts, np.int64), np.zeros(num_parts, np.int64), np.arange(num_parts)
    order = descending(problem.weights)
    complete = _lpt(
        values, problem.capacity, order, problem.base_count, problem.num_extra, part_of, load, height, count, heap
    )
    return part_of if complete else None


@jit
def _lpt(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    order: IntArray,
    base_count: int,
    num_extra: int,
    part_of: PartArray,
    load: IntArray,
    height: IntArray,
    count: IntArray,
    heap: IntArray,
) -> bool:
    """Fill `part_of`; False when an item fits no part. `heap` orders the parts by height."""
    num_items, num_values = values.shape
    num_parts = heap.shape[0]
    window = min(num_parts, 1 if num_values == 1 else _CANDIDATES)
    looks = _FURTHER_LOOKS * num_items
    for turn in range(num_items):
        item = order[turn]
        start, stop = 0, window
        place, new_height = _least_raised(values, capacity, load, height, count, heap, item, start, stop)
        while place < 0 and stop < num_parts and looks > 0:  # beyond the front of the heap
            start, stop = stop, min(2 * stop, num_parts)
            looks -= stop - start
            place, new_height = _least_raised(values, capacity, load, height, count, heap, item, start, stop)
        if place < 0:
            return False
        part = heap[place]
        part_of[item] = part
        for column in range(num_values):
            load[part, column] += values[item, column]
        count[part] += 1
        height[part] = new_height
        if count[part] > base_count:
            num_extra -= 1
            height[part] = _CLOSED
        if count[part] == base_count and num_extra == 0:
            height[part] = _CLOSED
        _sift(heap, height, count, place)
        if count[part] > base_count and num_extra == 0:
            for other in range(num_parts):  # no second one for any part: those with their share are closed
                if count[other] == base_count:
                    height[other] = _CLOSED
            for place in range(num_parts // 2, -1, -1):
                _sift(heap, height, count, place)
    return True


@jit_inner
def _least_raised(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    height: IntArray,
    count: IntArray,
    heap: IntArray,
    item: int,
    start: int,
    stop: int,
) -> tuple[int, int]:
    """(place in the heap of the part to take, its new height) among places start..stop; place is -1 for none."""
    num_stages = values.shape[1] - capacity.shape[0]
    best, best_height, best_sum = -1, _CLOSED, np.int64(0)
    for place in range(start, stop):
        part = heap[place]
        if height[part] > best_height or height[part] == _CLOSED:
            continue
        new_height, new_sum = np.int64(0), np.int64(0)
        for stage in range(num_stages):
            new_load = load[part, stage] + values[item, stage]
            new_height = max(new_height, new_load)
            new_sum += new_load
        if new_height > best_height or (
            new_height == best_height
            and (new_sum > best_sum or (new_sum == best_sum and not _before(part, heap[best], count)))
        ):
            continue
        fits = True
        for column in range(num_stages, values.shape[1]):
            if values[item, column] > capacity[column - num_stages] - load[part, column]:
                fits = False
        if fits:
            best, best_height, best_sum = place, new_height, new_sum
    return best, int(best_height)


@jit_inner
def _before(part: int, other: int, count: IntArray) -> bool:
    """Between equal heights: fewer items, then the lower index."""
    return bool(count[part] < count[other] or (count[part] == count[other] and part < other))


@jit_inner
def _sift(heap: IntArray, height: IntArray, count: IntArray, place: int) -> None:
    """Move the part at `place`, which may have grown, down to where it belongs."""
    part = heap[place]
    while True:
        child = 2 * place + 1
        if child >= heap.shape[0]:
            break
        lower = heap[child]
        if child + 1 < heap.shape[0]:
            other = heap[child + 1]
            if height[other] < height[lower] or (height[other] == height[lower] and _before(other, lower, count)):
                child, lower = child + 1, other
        if height[part] < height[lower] or (height[part] == height[lower] and _before(part, lower, count)):
            break
        heap[place] = lower
        place = child
    heap[place] = part
