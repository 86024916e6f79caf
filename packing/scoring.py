"""One number for a vector of sizes, so that items and free space of bins can be ordered in several dimensions.

    score(x) = sum_d weight[d] * (x[d] >> shift[d])          weight ~ demand[d] / capacity[d]

Dimensions that are scarce (total size over capacity) count more; one dimension scores as itself. Scores are integers
and monotone: a bin that can take an item never scores below it. Price: with two tight capacities the order is a
heuristic. Weighted sums by average demand are the `FFDAvgSum` of Panigrahy et al., "Heuristics for Vector Bin
Packing", 2011.
"""

import numpy as np

from packing.inputs import IntArray, column_totals

_SIZE_BITS = 40
_DEMAND_STEPS = 1024
_WEIGHT_BITS = 45


def score_terms(sizes: IntArray, capacity: IntArray) -> tuple[IntArray, IntArray]:
    """(shift [d], weight [d]) such that the score of a full bin stays below 2**62.

    A dimension scores at most _DEMAND_STEPS << _WEIGHT_BITS = 2**55, and there are at most MAX_COLUMNS + 1 of them.
    """
    limits = [int(value) for value in capacity]
    if len(limits) == 1:
        return np.zeros(1, np.int64), np.ones(1, np.int64)
    shift = [max(0, limit.bit_length() - _SIZE_BITS) for limit in limits]
    # Python integers: exact, and the same on every host.
    demand = [(total << 20) // limit for total, limit in zip(column_totals(sizes), limits, strict=True)]
    most = max(1, *demand)
    steps = [max(1, value * _DEMAND_STEPS // most) for value in demand]
    weight = [(step << _WEIGHT_BITS) // (limit >> cut) for step, limit, cut in zip(steps, limits, shift, strict=True)]
    return np.array(shift, np.int64), np.array([max(1, value) for value in weight], np.int64)


def scores(sizes: IntArray, shift: IntArray, weight: IntArray) -> IntArray:
    """int64 [n], the score of each row of sizes [n, d]."""
    total: IntArray = ((sizes >> shift) * weight).sum(axis=1)
    return total
