"""From "bin of each item" to "items of each bin": a counting sort, together with the loads."""

import numpy as np

from packing._jit import jit
from packing.inputs import IntArray, PartArray


@jit
def group_by_bin(bin_of: PartArray, sizes: IntArray, num_bins: int) -> tuple[IntArray, IntArray, IntArray]:
    """(order [n], offsets [num_bins + 1], load [num_bins, d]) of an assignment; items ascend inside a bin."""
    num_items, num_columns = sizes.shape
    offsets = np.zeros(num_bins + 1, np.int64)
    load = np.zeros((num_bins, num_columns), np.int64)
    for item in range(num_items):
        offsets[bin_of[item] + 1] += 1
        for column in range(num_columns):
            load[bin_of[item], column] += sizes[item, column]
    for index in range(num_bins):
        offsets[index + 1] += offsets[index]
    position = offsets[:num_bins].copy()
    order = np.empty(num_items, np.int64)
    for item in range(num_items):
        order[position[bin_of[item]]] = item
        position[bin_of[item]] += 1
    return order, offsets, load
