"""What a baseline receives: one prepared input, as an array and as the Python lists that most systems work on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

Bins = Sequence[Sequence[int]] | IntArray
"""Item indices of each bin, or the bin of each item."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Items:
    """Items to pack: sizes int64 [n, d] within capacity int64 [d]."""

    sizes: IntArray
    capacity: IntArray

    @cached_property
    def rows(self) -> list[list[int]]:
        """The sizes as a list of lists."""
        rows: list[list[int]] = self.sizes.tolist()
        return rows

    @cached_property
    def lengths(self) -> list[int]:
        """The first dimension as a list."""
        lengths: list[int] = self.sizes[:, 0].tolist()
        return lengths

    @cached_property
    def limits(self) -> list[int]:
        """The capacity as a list."""
        limits: list[int] = self.capacity.tolist()
        return limits


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """Items to partition: costs int64 [n, S] into `num_parts` parts."""

    costs: IntArray
    num_parts: int

    @cached_property
    def stages(self) -> list[list[int]]:
        """Costs of all items, a list for each stage."""
        stages: list[list[int]] = self.costs.T.tolist()
        return stages


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Items to place on ranks x slots: costs int64 [n, S], sizes int64 [n] within `capacity` a cell."""

    costs: IntArray
    sizes: IntArray
    capacity: int
    num_ranks: int
    num_slots: int

    @cached_property
    def lengths(self) -> list[int]:
        """The sizes as a list."""
        lengths: list[int] = self.sizes.tolist()
        return lengths

    @cached_property
    def totals(self) -> list[int]:
        """Cost of each item over all stages, as a list."""
        totals: list[int] = self.costs.sum(axis=1).tolist()
        return totals


def bin_of_items(bins: Bins, num_items: int) -> IntArray:
    """Bin of each item, -1 for one that is in none.

    Raises:
        ValueError: an item that is in two bins, or an index that is no item.
    """
    if isinstance(bins, np.ndarray):
        return bins.astype(np.int64)
    counts = np.fromiter((len(items) for items in bins), np.int64, len(bins))
    items = np.fromiter((item for group in bins for item in group), np.int64, int(counts.sum()))
    if items.size and (items.min() < 0 or items.max() >= num_items):
        raise ValueError("a bin holds an index that is no item")
    if np.bincount(items, minlength=num_items).max(initial=0) > 1:
        raise ValueError("an item is in two bins")
    bin_of = np.full(num_items, -1, np.int64)
    bin_of[items] = np.repeat(np.arange(len(bins)), counts)
    return bin_of
