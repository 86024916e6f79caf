"""`pack`: items into as few bins as possible under hard capacities.

sizes [n, d], capacity [d] --algorithm--> bin_of [n] --group--> order, offsets, load [B, d]
                                             |
                             split bins until B is a multiple of num_bins_multiple
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packing.bin_bounds import packing_bound
from packing.grouping import group_by_bin
from packing.inputs import IntArray, as_capacity, as_matrix, at_least_one, check_items_fit, column_totals
from packing.problem import PackProblem
from packing.registry import PACKERS, find
from packing.results import PackResult, gap_to, stop_at
from packing.scoring import score_terms, scores


def pack(
    sizes: npt.ArrayLike,
    *,
    capacity: int | Sequence[int] | IntArray,
    algorithm: str = "best_fit_decreasing",
    max_items_per_bin: int | None = None,
    num_bins_multiple: int = 1,
    target_gap: float = 1e-3,
) -> PackResult:
    """Pack every item into a bin; nothing is dropped, cut, or placed above a capacity.

    Args:
        sizes: integers [n], or [n, d] for d dimensions. Zero is legal and takes no room.
        capacity: limit of a bin, one per dimension, in the unit of the sizes.
        algorithm: a name of `packing.registry.PACKERS`; `next_fit` keeps the input order.
        max_items_per_bin: further limit on the number of items.
        num_bins_multiple: the number of bins becomes a multiple of this by splitting the fullest bins that hold two
            items or more; bins are empty only where n is smaller than that multiple.
        target_gap: relative distance to the lower bound at which algorithms that search on stop; 0 searches to the end.

    Returns:
        A `PackResult`; no bins for no items. Bins keep the algorithm's order, so results are reproducible.

    Raises:
        ItemTooLargeError: an item above a capacity (index, size, capacity, column).
        NegativeSizeError, SizeOverflowError, CapacityError, PackingError: malformed input.
    """
    matrix = as_matrix(sizes, "sizes")
    limits = as_capacity(capacity, matrix.shape[1])
    multiple = at_least_one(num_bins_multiple, "num_bins_multiple")
    num_items = matrix.shape[0]
    packer = find(PACKERS, algorithm)
    check_items_fit(matrix, limits)
    inner, inner_limits = matrix, limits
    if max_items_per_bin is not None and at_least_one(max_items_per_bin, "max_items_per_bin") < num_items:
        # A limit on the count is one more dimension, in which every item has size 1.
        inner = np.concatenate([matrix, np.ones((num_items, 1), np.int64)], axis=1)
        inner_limits = np.append(limits, max_items_per_bin)
    bound = packing_bound(matrix, limits, max_items_per_bin)
    problem = PackProblem(sizes=inner, capacity=inner_limits, lower_bound=bound, enough=stop_at(bound, target_gap))
    bin_of, num_bins = packer(problem)
    order, offsets, load = group_by_bin(bin_of, matrix, num_bins)
    if num_bins % multiple:
        offsets = _split(order, offsets, inner, inner_limits, num_bins + multiple - num_bins % multiple)
        num_bins = offsets.shape[0] - 1
        bin_of[order] = np.repeat(np.arange(num_bins, dtype=np.int32), np.diff(offsets))
        order, offsets, load = group_by_bin(bin_of, matrix, num_bins)
    bound += -bound % multiple
    available = [max(num_bins * int(limit), 1) for limit in limits]
    return PackResult(
        bin_of=bin_of,
        num_bins=num_bins,
        load=load,
        order=order,
        offsets=offsets,
        fill=np.array([total / room for total, room in zip(column_totals(matrix), available, strict=True)]),
        lower_bound=bound,
        gap=gap_to(num_bins, bound),
        algorithm=algorithm,
    )


def _split(order: IntArray, offsets: IntArray, sizes: IntArray, capacity: IntArray, num_bins: int) -> IntArray:
    """Offsets of `num_bins` bins: cut the fullest divisible bin in two equal halves, again and again.

    Cuts are contiguous and the new bin follows the old one, so an order-preserving packing stays one.
    """
    score = scores(sizes, *score_terms(sizes, capacity))[order]
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(score, dtype=np.int64)])
    while offsets.shape[0] - 1 < num_bins:
        count = np.diff(offsets)
        if count.max() < 2:
            return np.append(offsets, np.full(num_bins + 1 - offsets.shape[0], offsets[-1]))
        fullest = int(np.argmax(np.where(count >= 2, before[offsets[1:]] - before[offsets[:-1]], -1)))
        start, stop = int(offsets[fullest]), int(offsets[fullest + 1])
        left = before[start + 1 : stop] - before[start]
        larger_half = np.maximum(left, before[stop] - before[start] - left)
        cut = start + 1 + int(np.argmin(larger_half))
        offsets = np.insert(offsets, fullest + 1, cut)
    return offsets
