"""The checked input of a partition, as every partition algorithm receives it."""

from dataclasses import dataclass

import numpy as np

from packing.inputs import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionProblem:
    """Assign n items to k parts; minimise the largest load over parts and stages.

    Attributes:
        weights: int64 [n, S], cost of each item in each stage.
        num_parts: k.
        sizes: int64 [n, d] and
        capacity: int64 [d], a hard limit for every part; d = 0 when there is none.
        equal_count: counts of parts differ by at most one.
        lower_bound: makespan below which no search is needed.
    """

    weights: IntArray
    num_parts: int
    sizes: IntArray
    capacity: IntArray
    equal_count: bool
    lower_bound: int

    @property
    def values(self) -> IntArray:
        """int64 [n, S + d]: weights and sizes side by side, for kernels (each array argument costs compile time)."""
        return np.concatenate([self.weights, self.sizes], axis=1)

    @property
    def num_items(self) -> int:
        """n."""
        return int(self.weights.shape[0])

    @property
    def base_count(self) -> int:
        """Items that every part may hold; n when counts are free."""
        return self.num_items // self.num_parts if self.equal_count else self.num_items

    @property
    def num_extra(self) -> int:
        """Parts that may hold one item more than `base_count`."""
        return self.num_items % self.num_parts if self.equal_count else 0

    def decreasing(self) -> IntArray:
        """Item order: largest stage weight first, then largest sum, then index."""
        peak = self.weights.max(axis=1)
        return np.lexsort((-self.weights.sum(axis=1), -peak))
