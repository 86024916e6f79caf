"""A binary heap of units (cells or ranks) by height, lowest first: the inner functions of the grid kernels.

    heap [0] is the lowest of the first `size` entries; entries 2 i + 1 and 2 i + 2 are no lower than entry i

The first few entries are, nearly, the lowest few: what several stages need, where the lowest unit is not always the
best one. Ties are kept as they are, so results depend on the order of operations alone.
"""

from packing._jit import jit_inner
from packing.inputs import IntArray


@jit_inner
def sift_down(heap: IntArray, size: int, height: IntArray, place: int) -> None:
    """Move the unit at `place`, which may have grown, down to where it belongs."""
    unit = heap[place]
    tall = height[unit]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and height[heap[child + 1]] < height[heap[child]]:
            child += 1
        if height[heap[child]] >= tall:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = unit


@jit_inner
def push(heap: IntArray, size: int, height: IntArray, unit: int) -> None:
    """Add a unit behind the first `size` entries and move it up to where it belongs."""
    _sift_up(heap, height, size, unit)


@jit_inner
def remove(heap: IntArray, size: int, height: IntArray, place: int) -> None:
    """Take out the unit at `place`; the heap has one entry less."""
    moved = heap[size - 1]
    if place == size - 1:
        return
    _sift_up(heap, height, place, moved)
    sift_down(heap, size - 1, height, place)


@jit_inner
def _sift_up(heap: IntArray, height: IntArray, place: int, unit: int) -> None:
    while place > 0:
        parent = (place - 1) // 2
        if height[heap[parent]] <= height[unit]:
            break
        heap[place] = heap[parent]
        place = parent
    heap[place] = unit


@jit_inner
def settle(heap: IntArray, place_of: IntArray, height: IntArray, unit: int, size: int) -> None:
    """Move a unit whose height has changed to where it belongs, in a heap that knows the place of every unit."""
    place, tall = place_of[unit], height[unit]
    while place > 0 and height[heap[(place - 1) // 2]] > tall:
        heap[place] = heap[(place - 1) // 2]
        place_of[heap[place]] = place
        place = (place - 1) // 2
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and height[heap[child + 1]] < height[heap[child]]:
            child += 1
        if height[heap[child]] >= tall:
            break
        heap[place] = heap[child]
        place_of[heap[place]] = place
        place = child
    heap[place] = unit
    place_of[unit] = place
