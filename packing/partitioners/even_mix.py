"""Even mix: place large items so that what is missing everywhere is the mix of stages that the small items bring.

    stages (2, 0) (1, 1) (1, 1) (0, 2), 2 parts   ->   {(2, 0) (1, 1)} {(1, 1) (0, 2)} by LPT, makespan 3
    where (2, 0) is, (0, 2) is missing            ->   {(2, 0) (0, 2)} {(1, 1) (1, 1)}, makespan 2

With several stages, LPT leaves some parts high in one stage and some in another. If the small items all have one
ratio of stages, as clips beside whole videos, whose attention costs grow with the square, nothing mends that later.
So items go, heaviest first, where a quadratic form of what the part lacks falls most:

    lack x = mean - load,   V = sum of w w^T / |w| over the items to come,   the part with the largest  x^T V^-1 w

V^-1 weighs each direction of x by how little the items to come can change it. Parts that would rise above the mean are
passed over while others are left. An equal count is one more column that has to be even.

Then refinement. A second start with V near a multiple of the identity is better where single items, not the mix, are
the trouble (a part with a long text can never fill its encoder); the better one after a short refinement goes on.

Price: O(n (64 + S^3)) for each start, as an item looks at 64 parts only, other ones each time, and where those are
full at all parts, but at `_FURTHER_LOOKS` an item on average. No guarantee for the makespan, so `auto` runs it after
LPT and keeps the better one. Capacities and counts hold throughout; the answer is None when an item fits no part any
more, or none was found in that many looks. Floats, but of +, -, * and / in a fixed order only: same results everywhere.
"""

import numpy as np
import numpy.typing as npt

from packing._jit import jit, jit_inner
from packing.inputs import IntArray, PartArray, column_totals
from packing.partitioners.order import descending
from packing.partitioners.refine import refine
from packing.problem import PartitionProblem

FloatArray = npt.NDArray[np.float64]

_WINDOW = 64
_FURTHER_LOOKS = 256
_ABOVE_MEAN = 1 / 256
_COUNT_SHARE = 0.25  # weight of the column of counts
_FOLLOW_MIX = 1e-4  # identity mixed into V, as a part of its trace
_IGNORE_MIX = 1.0
_FEW_PER_PART = 16  # with fewer items a part the second start has not paid
_SMALL_GAIN = 1000  # nor where less than one part in that many is missing
_SHORT = 6  # of two starts: each is refined by one part in that many of the work, then the better one goes on
_MEDIUM = 3  # of the only start
_SINGULAR = 1e-12
_TINY = 1e-100
_HUGE = 1e300


def even_mix(problem: PartitionProblem) -> PartArray | None:
    """part_of int32 [n], refined, or None when an item fits no part any more."""
    num_items, num_parts = problem.num_items, problem.num_parts
    if num_items == 0:
        return np.empty(0, np.int32)
    shares = _shares(problem)
    order = descending(problem.weights)
    start = _start(problem, shares, order, _FOLLOW_MIX)
    if num_items < _FEW_PER_PART * num_parts:
        return None if start is None else refine(problem, start, _MEDIUM)
    if start is not None:
        start = refine(problem, start, _SHORT)
    if start is None or _above(problem, start) > problem.enough // _SMALL_GAIN:
        other = _start(problem, shares, order, _IGNORE_MIX)
        if other is not None:
            other = refine(problem, other, _SHORT)
            if start is None or _above(problem, other) < _above(problem, start):
                start = other
    return None if start is None else refine(problem, start)


def _above(problem: PartitionProblem, part_of: PartArray) -> int:
    return problem.makespan(part_of) - problem.enough


def _start(problem: PartitionProblem, shares: FloatArray, order: IntArray, blend: float) -> PartArray | None:
    num_parts, num_columns = problem.num_parts, shares.shape[1]
    part_of = np.zeros(problem.num_items, np.int32)
    lack = np.full((num_columns, num_parts), 1.0 + _ABOVE_MEAN)
    room = np.tile(problem.capacity, (num_parts, 1))
    scratch = np.empty((2, num_parts))
    system = np.zeros((2 * num_columns + 1, num_columns))
    limits = (problem.base_count, problem.num_extra, problem.weights.shape[1])
    complete = _place(shares, problem.sizes, order, part_of, lack, room, scratch, system, *limits, blend)
    return part_of if complete else None


def _shares(problem: PartitionProblem) -> FloatArray:
    """Weights as shares of the mean load of a part, and one column of shares of the count where it must be equal."""
    num_items, num_stages = problem.weights.shape
    columns = num_stages + problem.equal_count
    shares = np.full((num_items, columns), _COUNT_SHARE * problem.num_parts / num_items)
    for stage, total in enumerate(column_totals(problem.weights)):
        shares[:, stage] = problem.weights[:, stage] / (max(total, 1) / problem.num_parts)
    return shares


@jit
def _place(  # noqa: PLR0917  kernels take flat arguments
    shares: FloatArray,
    sizes: IntArray,
    order: IntArray,
    part_of: PartArray,
    lack: FloatArray,
    room: IntArray,
    scratch: FloatArray,
    system: FloatArray,
    base_count: int,
    num_extra: int,
    num_stages: int,
    blend: float,
) -> bool:
    """Fill part_of; whether all items were placed."""
    num_items, num_columns = shares.shape
    num_parts = room.shape[0]
    count = np.zeros(num_parts, np.int64)
    num_empty = min(num_parts, num_items)  # parts that still must get an item
    moments, factor, slope = system[:num_columns], system[num_columns:-1], system[-1]
    for item in range(num_items):
        _add_moments(moments, shares, item, 1.0)
    least = _TINY  # of a pivot; what is below is rounding error of the moments taken away
    for column in range(num_columns):
        least += _SINGULAR * moments[column, column]
    num_windows = -(-num_parts // _WINDOW)
    window = -(-num_parts // num_windows)  # windows of nearly the same length, so that no part is asked more often
    first, looks = 0, _FURTHER_LOOKS * num_items
    for turn in range(num_items):
        item = order[turn]
        _add_moments(moments, shares, item, -1.0)
        _solve(moments, shares, item, blend, least, factor, slope)
        most = base_count + (num_extra > 0)
        if num_items - turn <= num_empty:
            most = 1
        best, stop = -1, min(first + window, num_parts)
        while best < 0:  # the window, then all parts
            best = _steepest(shares, sizes, lack, room, count, slope, scratch, item, first, stop, most, num_stages)
            if best < 0 and ((first == 0 and stop == num_parts) or looks < 0):
                return False
            if best < 0:
                first, stop = 0, num_parts
                looks -= num_parts
        first = stop if stop < num_parts else 0
        part_of[item] = best
        num_empty -= count[best] == 0
        count[best] += 1
        num_extra -= count[best] > base_count
        for column in range(num_columns):
            lack[column, best] -= shares[item, column]
        for column in range(room.shape[1]):
            room[best, column] -= sizes[item, column]
    return True


@jit_inner
def _add_moments(moments: FloatArray, shares: FloatArray, item: int, sign: float) -> None:
    """Add or take away the term w w^T / |w|_1 of an item."""
    length = _TINY
    for column in range(shares.shape[1]):
        length += shares[item, column]
    scale = sign / length
    for row in range(shares.shape[1]):
        for column in range(shares.shape[1]):
            moments[row, column] += scale * (shares[item, row] * shares[item, column])


@jit_inner
def _solve(  # noqa: PLR0917  kernels take flat arguments
    moments: FloatArray,
    shares: FloatArray,
    item: int,
    blend: float,
    least: float,
    factor: FloatArray,
    slope: FloatArray,
) -> None:
    """slope = (moments + blend * trace * identity)^-1 w by factors L D L^T; pivots stay positive."""
    size = slope.shape[0]
    trace = 0.0
    for row in range(size):
        trace += max(moments[row, row], 0.0)
    for row in range(size):
        for column in range(row + 1):
            value = moments[row, column]
            if row == column:
                value += blend * trace
            for inner in range(column):
                value -= factor[row, inner] * factor[column, inner] * factor[inner, inner]
            if row == column:
                factor[row, row] = max(value, least)
            else:
                factor[row, column] = value / factor[column, column]
    for row in range(size):
        slope[row] = shares[item, row]
        for inner in range(row):
            slope[row] -= factor[row, inner] * slope[inner]
    for row in range(size):
        slope[row] /= factor[row, row]
    for row in range(size - 1, -1, -1):
        for inner in range(row + 1, size):
            slope[row] -= factor[inner, row] * slope[inner]


@jit_inner
def _steepest(  # noqa: PLR0917  kernels take flat arguments
    shares: FloatArray,
    sizes: IntArray,
    lack: FloatArray,
    room: IntArray,
    count: IntArray,
    slope: FloatArray,
    scratch: FloatArray,
    item: int,
    first: int,
    stop: int,
    most: int,
    num_stages: int,
) -> int:
    """Of parts first..stop, those that can take the item: the best below the mean, else the lowest; -1 for none."""
    gains, lefts = scratch[0, first:stop], scratch[1, first:stop]
    gains[:] = 0.0
    lefts[:] = 0.0
    for column in range(lack.shape[0]):  # one simple pass for each column is vectorised
        lacks, steepness, weight = lack[column, first:stop], slope[column], shares[item, column]
        for place in range(stop - first):
            gains[place] += steepness * lacks[place]
        if column < num_stages:
            for place in range(stop - first):
                left = lacks[place] - weight
                lefts[place] = left if left < lefts[place] else lefts[place]
    best, best_gain = -1, -_HUGE
    for place in range(stop - first):
        part = first + place
        if gains[place] > best_gain and lefts[place] == 0.0 and count[part] < most and _fits(sizes, room, item, part):
            best, best_gain = part, gains[place]
    if best >= 0:
        return best
    best_left = -_HUGE
    for place in range(stop - first):
        part = first + place
        if lefts[place] > best_left and count[part] < most and _fits(sizes, room, item, part):
            best, best_left = part, lefts[place]
    return best


@jit_inner
def _fits(sizes: IntArray, room: IntArray, item: int, part: int) -> bool:
    fits = True
    for column in range(sizes.shape[1]):
        fits = fits and sizes[item, column] <= room[part, column]
    return fits
