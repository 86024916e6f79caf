"""A set of small integers as bits in levels, for kernels: next member at or above a value in a few word reads.

level 0: one bit a member    level k + 1: one bit a word of level k that is not 0    the top level is one word
"""

import numpy as np

from packing._jit import jit_inner
from packing.inputs import IntArray

_WORD_BITS = 32  # words of 32 bits in int64, so that no operation overflows, also without the compiler

# Position of the lowest set bit by a de Bruijn multiplication.
_LOWEST_BIT = np.zeros(32, np.int64)
for _bit in range(32):
    _LOWEST_BIT[((1 << _bit) * 0x077CB531 & 0xFFFFFFFF) >> 27] = _bit


def empty_set(num_values: int) -> tuple[IntArray, IntArray]:
    """(words, starts) of an empty set of members below `num_values`: level k is words[starts[k]:starts[k + 1]]."""
    starts = [0]
    while len(starts) == 1 or num_values > 1:
        num_values = -(-num_values // _WORD_BITS)
        starts.append(starts[-1] + num_values)
    return np.zeros(starts[-1], np.int64), np.array(starts, np.int64)


@jit_inner
def lowest_bit(word: int) -> int:
    return int(_LOWEST_BIT[((word & -word) * 0x077CB531 & 0xFFFFFFFF) >> 27])


@jit_inner
def find_at_least(words: IntArray, starts: IntArray, value: int) -> int:
    """Smallest member >= value of the set, or -1. A bit of level k + 1 says that its word of level k is not 0."""
    position = value
    for level in range(starts.shape[0] - 1):
        index = position // _WORD_BITS
        if starts[level] + index >= starts[level + 1]:
            return -1
        shift = position % _WORD_BITS
        word = (words[starts[level] + index] >> shift) << shift
        if word != 0:
            position = index * _WORD_BITS + lowest_bit(word)
            for down in range(level - 1, -1, -1):
                word = words[starts[down] + position]
                position = position * _WORD_BITS + lowest_bit(word)
            return position
        position = index + 1
    return -1


@jit_inner
def insert(words: IntArray, starts: IntArray, value: int) -> None:
    for level in range(starts.shape[0] - 1):
        index = starts[level] + value // _WORD_BITS
        before = words[index]
        words[index] = before | (1 << (value % _WORD_BITS))
        if before != 0:
            return
        value //= _WORD_BITS


@jit_inner
def remove(words: IntArray, starts: IntArray, value: int) -> None:
    for level in range(starts.shape[0] - 1):
        index = starts[level] + value // _WORD_BITS
        words[index] &= ~(1 << (value % _WORD_BITS))
        if words[index] != 0:
            return
        value //= _WORD_BITS
