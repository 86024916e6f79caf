"""A sorted list of (key, value) for kernels, in blocks: find the first key at or above a bound, insert, take out.

    spine: blocks in order   [2 5 5] [7 8] [9]   a full block is cut in two, an empty one leaves the spine

Keys may repeat: the pair inserted last comes first. Nothing is hashed or rounded, so clustered keys cost no more than
others. Price: an insertion moves up to a block of pairs, and every 256th at most the spine; both are short.
"""

import numpy as np

from packing._jit import jit_inner
from packing.inputs import IntArray

_BLOCK = 512
_HALF = _BLOCK // 2


def empty_list(num_insertions: int) -> tuple[IntArray, IntArray, IntArray]:
    """(blocks [m, 512, 2], spine [m], count [m]): a list of no blocks, for so many insertions.

    spine[:number of blocks] are the blocks in use, in order; the others are free. Half a block of insertions lies
    between two cuts of it, so m cannot be exceeded.
    """
    num_blocks = 2 + num_insertions // _HALF
    return np.empty((num_blocks, _BLOCK, 2), np.int64), np.arange(num_blocks), np.zeros(num_blocks, np.int64)


@jit_inner
def find_first(blocks: IntArray, spine: IntArray, count: IntArray, num_blocks: int, key: int) -> tuple[int, int]:
    """(position in the spine, place in the block) of the first pair with a key >= `key`.

    Beyond the last pair of the last block where there is none.
    """
    low, high = 0, num_blocks - 1
    while low < high:
        middle = (low + high) // 2
        block = spine[middle]
        if blocks[block, count[block] - 1, 0] < key:
            low = middle + 1
        else:
            high = middle
    position, block = low, spine[low]
    low, high = 0, count[block]
    while low < high:
        middle = (low + high) // 2
        if blocks[block, middle, 0] < key:
            low = middle + 1
        else:
            high = middle
    return position, low


@jit_inner
def insert_before(  # noqa: PLR0917  kernels take flat arguments
    blocks: IntArray, spine: IntArray, count: IntArray, num_blocks: int, key: int, value: int
) -> int:
    """Insert a pair before all keys >= `key`; the new number of blocks."""
    num_blocks = max(num_blocks, 1)
    position, place = find_first(blocks, spine, count, num_blocks, key)
    block = spine[position]
    if count[block] == _BLOCK:
        upper = spine[num_blocks]
        for behind in range(num_blocks, position + 1, -1):
            spine[behind] = spine[behind - 1]
        spine[position + 1] = upper
        num_blocks += 1
        for index in range(_HALF):
            blocks[upper, index, 0] = blocks[block, _HALF + index, 0]
            blocks[upper, index, 1] = blocks[block, _HALF + index, 1]
        count[block] = count[upper] = _HALF
        if place > _HALF:
            block, place = upper, place - _HALF
    for index in range(count[block], place, -1):
        blocks[block, index, 0] = blocks[block, index - 1, 0]
        blocks[block, index, 1] = blocks[block, index - 1, 1]
    blocks[block, place, 0] = key
    blocks[block, place, 1] = value
    count[block] += 1
    return num_blocks


@jit_inner
def take_out(  # noqa: PLR0917  kernels take flat arguments
    blocks: IntArray, spine: IntArray, count: IntArray, num_blocks: int, position: int, place: int
) -> int:
    """Take out the pair at a place that `find_first` gave; the new number of blocks."""
    block = spine[position]
    count[block] -= 1
    for index in range(place, count[block]):
        blocks[block, index, 0] = blocks[block, index + 1, 0]
        blocks[block, index, 1] = blocks[block, index + 1, 1]
    if count[block] > 0:
        return num_blocks
    for behind in range(position, num_blocks - 1):
        spine[behind] = spine[behind + 1]
    spine[num_blocks - 1] = block
    return num_blocks - 1
