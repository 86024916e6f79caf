"""Items by size: how many there are of each, and how a plan "so many of this size to that bin" reaches the items.

    sizes 5 3 5 2, capacity 6    count[0..6] = 0 0 1 1 0 2 0
    bins in the order of decreasing sizes (5 5 3 2):  0 1 2 2     ->     bin_of = 0 2 1 2

Equal sizes are exchangeable, so a packer decides over sizes (thousands) and not over items (millions). Price: tables
of capacity + 1 entries; where those do not pay, one sort.
"""

from dataclasses import dataclass

import numpy as np

from packing._jit import jit, jit_inner
from packing.inputs import IntArray, PartArray

MAX_TABLE_CAPACITY = 2**22
"""Tables by size take 8 bytes for each unit of capacity."""


def table_pays(capacity: int, num_items: int) -> bool:
    """Whether tables with one entry for each size from 0 to `capacity` are small enough, and worth their time."""
    return capacity <= min(MAX_TABLE_CAPACITY, 4096 + 64 * num_items)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeClasses:
    """The k distinct sizes above zero of n items of one dimension.

    Attributes:
        values: int64 [k], largest first.
        count: int64 [k], items of each.
        place: int64 [k], place of the first item of each in the order of decreasing sizes; zeros come last.
        table: int64 [capacity + 1], number of values above a room; empty where a table does not pay.
        key: int64 [n], number of the class of each item in `key_place`.
        key_place: int64, the same places by key.
    """

    values: IntArray
    count: IntArray
    place: IntArray
    table: IntArray
    key: IntArray
    key_place: IntArray

    def bin_of(self, bin_at: PartArray) -> PartArray:
        """int32 [n] from the bins of the items in the order of decreasing sizes."""
        bin_of = np.empty(self.key.shape[0], np.int32)
        _bin_of(self.key, self.key_place.copy(), bin_at, bin_of)
        return bin_of


def size_classes(sizes: IntArray, capacity: int) -> SizeClasses:
    """Classes of sizes [n] that are at most `capacity`: by a table of all sizes, or by sorting when it is too large."""
    key, table = sizes, np.empty(0, np.int64)
    if table_pays(capacity, sizes.shape[0]):
        num_by_key = np.bincount(sizes, minlength=capacity + 1).astype(np.int64, copy=False)
        values = keys = np.flatnonzero(num_by_key)[::-1]
        table = np.count_nonzero(values) - np.cumsum(np.concatenate([np.zeros(1, np.int64), num_by_key[1:] > 0]))
    else:
        ascending, key, num_by_key = np.unique(sizes, return_inverse=True, return_counts=True)
        keys = np.arange(ascending.shape[0])[::-1]
        values = ascending[keys]
    count = num_by_key[keys]
    place = np.cumsum(count) - count
    key_place = np.zeros(num_by_key.shape[0], np.int64)
    key_place[keys] = place
    num_positive = int(np.count_nonzero(values))
    return SizeClasses(
        values=np.ascontiguousarray(values[:num_positive]),
        count=count[:num_positive],
        place=place[:num_positive],
        table=table,
        key=key,
        key_place=key_place,
    )


@jit_inner
def hand_out(keys: IntArray, place: IntArray, bin_at: PartArray, bin_of: PartArray) -> None:
    """bin_of: the items of one key, in input order, take the bins at `place[key]`, `place[key] + 1`, ...

    `place` is used up.
    """
    for item in range(keys.shape[0]):
        position = place[keys[item]]
        place[keys[item]] = position + 1
        bin_of[item] = bin_at[position]


@jit
def _bin_of(keys: IntArray, place: IntArray, bin_at: PartArray, bin_of: PartArray) -> None:
    hand_out(keys, place, bin_at, bin_of)
