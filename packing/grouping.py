"""From "bin of each item" to "items of each bin": a counting sort, together with the loads."""

import numpy as np

from packing._jit import jit
from packing.inputs import IntArray, PartArray


def group_by_bin(bin_of: PartArray, sizes: IntArray, num_bins: int) -> tuple[IntArray, IntArray, IntArray]:
    """(order [n], offsets [num_bins + 1], load [num_bins, d]) of an assignment; items ascend inside a bin."""
    order = np.empty(bin_of.shape[0], np.int64)
    offsets = np.zeros(num_bins + 2, np.int64)
    load = np.zeros((num_bins, sizes.shape[1]), np.int64)
    _group(bin_of, sizes, order, offsets, load)
    return order, offsets[:-1], load


@jit
def _group(bin_of: PartArray, sizes: IntArray, order: IntArray, offsets: IntArray, load: IntArray) -> None:
    num_items, num_columns = sizes.shape
    for item in range(num_items):
        index = bin_of[item]
        offsets[index + 2] += 1
        for column in range(num_columns):
            load[index, column] += sizes[item, column]
    for index in range(2, offsets.shape[0]):
        offsets[index] += offsets[index - 1]
    for item in range(num_items):  # offsets[b + 1] moves from the start of bin b to its end
        index = bin_of[item] + 1
        order[offsets[index]] = item
        offsets[index] += 1
