"""`pack`: items into as few bins as possible under hard capacities.

sizes [n, d], capacity [d] --algorithm--> bin_of [n] --group--> order, offsets, load [B, d]
                                             |
                             split bins until B is a multiple of num_bins_multiple
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from packing.bin_bounds import packing_bound
from packing.binding import binding
from packing.grouping import group_by_bin
from packing.inputs import IntArray, PartArray, as_sizes, at_least_one, check_count
from packing.problem import Packer, PackProblem
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
            items or more; bins are empty only where n is smaller than that multiple. At most 2**24, or n if larger.
        target_gap: relative distance to the lower bound at which algorithms that search on stop; 0 searches to the end.

    Returns:
        A `PackResult`; no bins for no items. Bins keep the algorithm's order, so results are reproducible.

    Raises:
        ItemTooLargeError: an item above a capacity (index, size, capacity, column).
        NegativeSizeError, SizeOverflowError, CapacityError, PackingError: malformed input.
    """
    matrix, limits = as_sizes(sizes, capacity)
    num_items = matrix.shape[0]
    multiple = at_least_one(num_bins_multiple, "num_bins_multiple")
    check_count(multiple, num_items, "num_bins_multiple")
    packer = find(PACKERS, algorithm)
    most = num_items if max_items_per_bin is None else at_least_one(max_items_per_bin, "max_items_per_bin", limit=None)
    bound = packing_bound(matrix, limits, most)
    problem = PackProblem(sizes=matrix, capacity=limits, lower_bound=bound, enough=stop_at(bound, target_gap))
    bin_of, num_bins = _pack_limited(packer, problem, most)
    order, offsets, load = group_by_bin(bin_of, matrix, num_bins)
    if num_bins % multiple:
        offsets = _split(order, offsets, matrix, load, limits, num_bins + multiple - num_bins % multiple)
        num_bins = offsets.shape[0] - 1
        bin_of[order] = np.repeat(np.arange(num_bins, dtype=np.int32), np.diff(offsets))
        order, offsets, load = group_by_bin(bin_of, matrix, num_bins)
    bound += -bound % multiple
    available = [max(num_bins * int(limit), 1) for limit in limits]
    used = [int(total) for total in load.sum(axis=0)]
    return PackResult(
        bin_of=bin_of,
        num_bins=num_bins,
        load=load,
        order=order,
        offsets=offsets,
        fill=np.array([total / room for total, room in zip(used, available, strict=True)]),
        lower_bound=bound,
        gap=gap_to(num_bins, bound),
        algorithm=algorithm,
    )


def _pack_limited(packer: Packer, problem: PackProblem, most: int) -> tuple[PartArray, int]:
    """With a limit on the number of items: one more dimension, in which every item has size 1.

    Where the one dimension there is decides, its own packing often keeps the limit, and is much faster.
    """
    num_items = problem.num_items
    if most >= num_items:
        return packer(binding(problem))
    if problem.sizes.shape[1] == 1 and -(-num_items // most) < problem.lower_bound:
        bin_of, num_bins = packer(problem)
        if int(np.bincount(bin_of).max()) <= most:
            return bin_of, num_bins
    ones = np.ones((num_items, 1), np.int64)
    sizes, capacity = np.concatenate([problem.sizes, ones], axis=1), np.append(problem.capacity, most)
    return packer(binding(replace(problem, sizes=sizes, capacity=capacity)))


def _split(  # noqa: PLR0917  the pieces of a result that does not exist yet
    order: IntArray, offsets: IntArray, sizes: IntArray, load: IntArray, capacity: IntArray, num_bins: int
) -> IntArray:
    """Offsets of `num_bins` bins: cut the fullest divisible bin (of equals the one with most items) in two, again and
    again, where the larger half is smallest (of equals nearest the middle).

    Cuts are contiguous and the new bin follows the old one, so an order-preserving packing stays one. Only the items
    of bins that are cut are looked at.
    """
    terms = score_terms(sizes, capacity)
    num_cuts = num_bins - load.shape[0]
    counts = np.diff(offsets)
    divisible = np.flatnonzero(counts >= 2)
    fullness = scores(load[divisible], *terms)
    if num_cuts < divisible.shape[0]:  # every cut divides one bin, so only the fullest `num_cuts` can be touched
        least = np.partition(fullness, -num_cuts)[-num_cuts]
        fuller = np.flatnonzero(fullness > least)
        ties = np.flatnonzero(fullness == least)
        most_first = np.argsort(-counts[divisible[ties]], kind="stable")
        chosen = np.concatenate([fuller, ties[most_first[: num_cuts - fuller.shape[0]]]])
        divisible, fullness = divisible[chosen], fullness[chosen]
    heap = [
        (negative, start - stop, start, stop)
        for negative, start, stop in zip(
            (-fullness).tolist(), offsets[divisible].tolist(), offsets[divisible + 1].tolist(), strict=True
        )
    ]
    heapq.heapify(heap)
    cuts: list[int] = []
    while heap and len(cuts) < num_cuts:
        negative, _, start, stop = heapq.heappop(heap)
        left = np.cumsum(scores(sizes[order[start : stop - 1]], *terms))
        larger = np.maximum(left, -negative - left)
        places = np.flatnonzero(larger == larger.min())
        place = int(places[np.argmin(np.abs(2 * (places + 1) - (stop - start)))])
        cut, half = start + place + 1, int(left[place])
        cuts.append(cut)
        if cut - start >= 2:
            heapq.heappush(heap, (-half, start - cut, start, cut))
        if stop - cut >= 2:
            heapq.heappush(heap, (negative + half, cut - stop, cut, stop))
    empty = np.full(num_cuts - len(cuts), offsets[-1])  # more bins than items
    return np.concatenate([np.sort(np.concatenate([offsets, np.array(cuts, np.int64)])), empty])
