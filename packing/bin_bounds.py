"""Lower bounds on bins: how few any packing can need.

Never above the optimum; it is what lets a packing say how good it is.
Plain numpy on sorted values, O(n log n) per dimension.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packing.inputs import IntArray, as_capacity, as_matrix, at_least_one, check_items_fit


def bin_lower_bound(
    sizes: npt.ArrayLike,
    *,
    capacity: int | Sequence[int] | IntArray,
    max_items_per_bin: int | None = None,
) -> int:
    """Bins that any packing of `sizes` [n] or [n, d] needs.

    The largest over dimensions of the bound L2 of Martello and Toth ("Lower bounds and reduction procedures for the
    bin packing problem", 1990), which is at least ceil(total / capacity), and of ceil(n / max_items_per_bin).

    Raises:
        PackingError and its kinds: as `pack`.
    """
    matrix = as_matrix(sizes, "sizes")
    limits = as_capacity(capacity, matrix.shape[1])
    check_items_fit(matrix, limits)
    if max_items_per_bin is not None:
        at_least_one(max_items_per_bin, "max_items_per_bin")
    return packing_bound(matrix, limits, max_items_per_bin)


def packing_bound(sizes: IntArray, capacity: IntArray, max_items_per_bin: int | None = None) -> int:
    """`bin_lower_bound` on checked input: sizes [n, d], capacity [d]."""
    num_items = sizes.shape[0]
    if num_items == 0:
        return 0
    bound = 1 if max_items_per_bin is None else -(-num_items // max_items_per_bin)
    return max(bound, *(_martello_toth(sizes[:, column], int(limit)) for column, limit in enumerate(capacity)))


def _martello_toth(sizes: IntArray, capacity: int) -> int:
    """L2: for a threshold a, items above capacity - a are alone, those above capacity / 2 never meet, and items in
    [a, capacity / 2] must fit beside the latter or in new bins. The best threshold is one of the small sizes."""
    ascending = np.sort(sizes)
    below = np.concatenate([np.zeros(1, np.int64), np.cumsum(ascending)])  # below[i]: sum of the i smallest
    num_items = ascending.shape[0]
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))  # items [0, half) are at most capacity / 2
    thresholds = np.concatenate([np.zeros(1, np.int64), ascending[:half]])
    alone = np.searchsorted(ascending, capacity - thresholds, side="right")  # items [alone, n) take a bin each
    first = np.searchsorted(ascending, thresholds, side="left")  # items [first, half) are the small ones that count
    num_middle = alone - half
    # num_middle * capacity < 2 * (sum of the middle items), so it stays below 2**63.
    room = num_middle * capacity - (below[alone] - below[half])
    excess = np.maximum(below[half] - below[first] - room, 0)
    bounds = (num_items - half) + excess // capacity + (excess % capacity > 0)
    return int(bounds.max())
