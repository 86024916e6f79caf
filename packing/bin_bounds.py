"""Lower bounds on bins: how few any packing can need.

Never above the optimum; it is what lets a packing say how good it is.
Plain numpy on the distinct values: O(n + capacity) per dimension, or O(n log n) where a capacity is too large for a
table.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packing.inputs import IntArray, as_sizes, at_least_one
from packing.size_classes import table_pays


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
    matrix, limits = as_sizes(sizes, capacity)
    most = None if max_items_per_bin is None else at_least_one(max_items_per_bin, "max_items_per_bin", limit=None)
    return packing_bound(matrix, limits, most)


def packing_bound(sizes: IntArray, capacity: IntArray, max_items_per_bin: int | None = None) -> int:
    """`bin_lower_bound` on checked input: sizes [n, d], capacity [d]."""
    num_items = sizes.shape[0]
    if num_items == 0:
        return 0
    bound = 1 if max_items_per_bin is None else -(-num_items // max_items_per_bin)
    return max(bound, *(_martello_toth(sizes[:, column], int(limit)) for column, limit in enumerate(capacity)))


def _distinct(sizes: IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """(values ascending, count of each): by a table of all sizes where that is small, else by sorting."""
    if table_pays(capacity, sizes.shape[0]):
        count = np.bincount(sizes, minlength=1)
        values = np.flatnonzero(count)
        return values, count[values]
    return np.unique(sizes, return_counts=True)


def _martello_toth(sizes: IntArray, capacity: int) -> int:
    """L2: for a threshold a, items above capacity - a are alone, those above capacity / 2 never meet, and items in
    [a, capacity / 2] must fit beside the latter or in new bins. The best threshold is one of the small sizes."""
    values, count = _distinct(sizes, capacity)
    zero = np.zeros(1, np.int64)
    number = np.concatenate([zero, np.cumsum(count)])  # number[i], total[i]: items of the i smallest values
    total = np.concatenate([zero, np.cumsum(count * values)])
    half = int(np.searchsorted(values, capacity // 2, side="right"))  # values [0, half) are at most capacity / 2
    thresholds = np.concatenate([zero, values[:half]])
    alone = np.searchsorted(values, capacity - thresholds, side="right")  # items of values [alone, end): a bin each
    first = np.searchsorted(values, thresholds, side="left")  # values [first, half) are the small ones that count
    num_middle = number[alone] - number[half]
    # num_middle * capacity < 2 * (sum of the middle items), so it stays below 2**63.
    room = num_middle * capacity - (total[alone] - total[half])
    excess = np.maximum(total[half] - total[first] - room, 0)
    bounds = (number[-1] - number[half]) + excess // capacity + (excess % capacity > 0)
    return int(bounds.max())
