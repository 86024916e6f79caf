"""Lower bounds on the makespan: how even any partition can be.

Never above the optimum; it is what lets a partition say how good it is.
Plain numpy on sorted values, O(n log n) per dimension.
"""

import numpy as np
import numpy.typing as npt

from packing.inputs import IntArray, as_matrix, at_least_one


def makespan_lower_bound(weights: npt.ArrayLike, num_parts: int, *, equal_count: bool = False) -> int:
    """No partition of `weights` [n] or [n, S] into `num_parts` has a smaller largest load than this.

    The largest over stages of: the longest item; the average, rounded up; the generalised pigeonhole (of the
    j*k + 1 largest items some part holds j + 1, so at least the j + 1 smallest of them); with `equal_count` the
    longest item beside the lightest ones that must share its part.

    Raises:
        PackingError and its kinds: as `partition`.
    """
    return partition_bound(as_matrix(weights, "weights"), at_least_one(num_parts, "num_parts"), equal_count)


def partition_bound(weights: IntArray, num_parts: int, equal_count: bool = False) -> int:
    """`makespan_lower_bound` on checked input: weights [n, S]."""
    if weights.shape[0] == 0:
        return 0
    return max(_stage_bound(weights[:, stage], num_parts, equal_count) for stage in range(weights.shape[1]))


def _stage_bound(weights: IntArray, num_parts: int, equal_count: bool) -> int:
    descending = np.sort(weights)[::-1]
    num_items = descending.shape[0]
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(descending)])  # before[i]: sum of the i largest
    bound = max(int(descending[0]), -(-int(before[-1]) // num_parts))
    fold = np.arange(1, (num_items - 1) // num_parts + 1)  # every j with j * num_parts + 1 <= num_items
    if fold.size:
        last = fold * num_parts
        bound = max(bound, int((before[last + 1] - before[last - fold]).max()))
    if equal_count and num_items >= num_parts:
        companions = num_items // num_parts - 1
        bound = max(bound, int(descending[0]) + int(before[-1] - before[num_items - companions]))
    return bound
