"""Turns that are as even as turns can be, and counted without being listed: the golden-ratio rotation.

    slot x  ->  point x * GOLDEN mod 2^64        part k owns the points in [bounds[k], bounds[k + 1])

Successive points fall into the largest gap that is left, so in *every* window of slots a part gets its share of them to
within about one or two. How many of the slots before x belong to a part is a sum of floors with a closed form (a
Euclidean descent), so slot 10^12 costs what slot 0 costs, and a share may be as small as 2^-64.

Example: shares 1/2, 1/3, 1/6 give the slots 0 1 0 2 0 0 1 0 2 1 0 1 ...: 0 in every second turn, as nearly as can be.

Price: about 40 us per count. All integers, so all hosts agree.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

MODULUS = 2**64
GOLDEN = 0x9E3779B97F4A7C15  # odd, and the nearest such to 2^64 / golden ratio


def points(start: int, count: int) -> NDArray[np.uint64]:
    """Points of the slots [start, start + count), uint64 [count]; start + count <= 2^64."""
    return (np.arange(count, dtype=np.uint64) + np.uint64(start)) * np.uint64(GOLDEN)  # wraps around by itself


def bounds_of(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Where each part's points begin, and 2^64: [len(shares) + 1] integers for weights of any positive sum."""
    total, running = sum(shares), Fraction(0)
    bounds = [0]
    for share in shares:
        running += share
        bounds.append(int(MODULUS * running / total))
    return tuple(bounds)


def count_below(bound: int, stop: int) -> int:
    """How many of the slots [0, stop) have a point below `bound` (0 to 2^64)."""
    if bound in (0, MODULUS):
        return stop if bound else 0
    # [y mod M < T] = floor(y / M) - floor((y - T) / M); M is added to keep the last numerator positive.
    return _floor_sum(stop, 0) - _floor_sum(stop, MODULUS - bound) + stop


def most_in_window(width: int, window: int) -> int:
    """The most points that an arc of `width` holds among any `window` successive slots: exact, over all starts."""
    if width in (0, MODULUS):
        return window if width else 0
    first = _sorted_points(window)
    stops = first + np.uint64(width)
    # Another start turns all points alike, so the arcs that begin at a point of the first window stand for all.
    held = np.searchsorted(first, stops, side="left") - np.arange(window)
    held[stops < first] += window
    return int(held.max())


@lru_cache(maxsize=8)
def _sorted_points(window: int) -> NDArray[np.uint64]:
    return np.sort(points(0, window))


@lru_cache(maxsize=256)  # one of the two sums of a count is the same for all bounds
def _floor_sum(count: int, offset: int) -> int:
    """Sum over x in [0, count) of floor((GOLDEN * x + offset) / MODULUS), in O(log count) steps."""
    modulus, factor, total = MODULUS, GOLDEN, 0
    while count > 0:
        quotient, factor = divmod(factor, modulus)
        total += quotient * (count * (count - 1) // 2)
        quotient, offset = divmod(offset, modulus)
        total += quotient * count
        # Lattice points under a line are counted along the other axis, where there are fewer.
        count, offset = divmod(factor * count + offset, modulus)
        modulus, factor = factor, modulus
    return total
