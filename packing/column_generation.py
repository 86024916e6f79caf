"""Which combinations of sizes fill bins without waste, and how many bins of each: a small linear program, in kernels.

    minimise sum(x[p])   such that   sum(x[p] * patterns[p, c]) = demand[c]   for every class c of sizes

    prices  <--- simplex basis (inverse kept) <---+
       |                                          |  until no pattern is worth more than a bin
       +---> knapsack: most valuable pattern -----+

    weights 6 4 on a grid of 10, demand 3 5   ->   x = 3 of [1 1] and 1 of [0 2]

Column generation of Gilmore and Gomory, 1961. A class stands for many sizes, with one weight on a coarse grid, so m is
40 to 100 and a solution takes milliseconds whatever n is. Price: the answer guides, it is neither a packing nor a
bound. Floating point, but only + - * / in a fixed order, which every IEEE machine computes alike.
"""

import numpy as np
import numpy.typing as npt

from packing._jit import jit, jit_inner
from packing.inputs import IntArray

FloatArray = npt.NDArray[np.float64]

_GAIN = 1e-7  # a pattern must be worth this much more than a bin
_TINY = 1e-9  # smallest pivot


@jit_inner
def _most_valuable(weights: IntArray, price: FloatArray, value: FloatArray, chosen: IntArray) -> None:
    """value[r], chosen[r]: best value within r units of the grid, and the class to take first (-1: none)."""
    for room in range(value.shape[0]):
        value[room] = 0.0
        chosen[room] = -1
    for index in range(weights.shape[0]):
        gain, weight = price[index], weights[index]
        for room in range(weight, value.shape[0]):
            candidate = value[room - weight] + gain
            if candidate > value[room]:
                value[room] = candidate
                chosen[room] = index


@jit_inner
def _pivot(inverse: FloatArray, amount: FloatArray, direction: FloatArray) -> int:
    """Bring a pattern into the basis; the row that leaves (ties: the first), or -1."""
    row = -1
    least = 0.0
    for index in range(amount.shape[0]):
        if direction[index] > _TINY:
            ratio = amount[index] / direction[index]
            if row < 0 or ratio < least:
                row, least = index, ratio
    if row < 0:
        return -1
    scale = direction[row]
    for column in range(amount.shape[0]):
        inverse[row, column] /= scale
    for index in range(amount.shape[0]):
        factor = direction[index]
        if index != row and factor != 0.0:
            amount[index] = max(amount[index] - least * factor, 0.0)
            for column in range(amount.shape[0]):
                inverse[index, column] -= factor * inverse[row, column]
    amount[row] = least
    return row


@jit_inner
def _worth(pattern: IntArray, price: FloatArray) -> float:
    total = 0.0
    for index in range(price.shape[0]):
        if pattern[index] > 0:
            total += pattern[index] * price[index]
    return total


@jit
def best_patterns(weights: IntArray, demand: IntArray, grid: int, max_tables: int) -> tuple[IntArray, FloatArray]:
    """(patterns [m, m], bins of each [m]) that serve the demand with the fewest bins.

    One table of the knapsack gives a pattern for every class, the best one that holds it; each is brought in if it
    still pays when its turn comes.

    Args:
        weights: of each class, 1 .. grid.
        demand: items of each class.
        grid: the capacity in units of the weights.
        max_tables: limit of the work; any basis before the best one serves the demand too.
    """
    num_classes = weights.shape[0]
    patterns = np.zeros((num_classes, num_classes), np.int64)
    inverse = np.zeros((num_classes, num_classes), np.float64)
    amount, price = np.empty(num_classes, np.float64), np.empty(num_classes, np.float64)
    for index in range(num_classes):  # begin with bins of one class each
        patterns[index, index] = grid // weights[index]
        price[index] = inverse[index, index] = 1.0 / patterns[index, index]
        amount[index] = demand[index] * price[index]
    value, chosen = np.empty(grid + 1, np.float64), np.empty(grid + 1, np.int64)
    pattern, direction = np.empty(num_classes, np.int64), np.empty(num_classes, np.float64)
    for _ in range(max_tables):
        _most_valuable(weights, price, value, chosen)
        if value[grid] <= 1.0 + _GAIN:
            break
        for first in range(-1, num_classes):
            for index in range(num_classes):
                pattern[index] = 0
                direction[index] = 0.0
            room = grid
            if first >= 0:
                pattern[first] = 1
                room -= weights[first]
            while room > 0 and chosen[room] >= 0:
                pattern[chosen[room]] += 1
                room -= weights[chosen[room]]
            gain = _worth(pattern, price) - 1.0
            if gain <= _GAIN:
                continue
            for column in range(num_classes):
                if pattern[column] > 0:
                    for index in range(num_classes):
                        direction[index] += inverse[index, column] * pattern[column]
            row = _pivot(inverse, amount, direction)
            if row < 0:
                continue
            for column in range(num_classes):
                patterns[row, column] = pattern[column]
                price[column] -= gain * inverse[row, column]
    return patterns, amount
