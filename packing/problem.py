"""The checked input of an algorithm: what a packer, a partitioner and a grid placer receive, and what they return."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from packing.grouping import group_by_bin
from packing.inputs import IntArray, PartArray

Objective = Literal["per_rank", "per_slot"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackProblem:
    """Put n items into as few bins as possible.

    Attributes:
        sizes: int64 [n, d], each row within `capacity`. A limit on the number of items is one more column of ones.
        capacity: int64 [d].
        lower_bound: no packing has fewer bins.
        enough: number of bins at which a search may stop; at least the bound.
    """

    sizes: IntArray
    capacity: IntArray
    lower_bound: int
    enough: int

    @property
    def num_items(self) -> int:
        """n."""
        return int(self.sizes.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionProblem:
    """Assign n items to k parts; minimise the largest load over parts and stages.

    Attributes:
        weights: int64 [n, S], cost of each item in each stage.
        num_parts: k.
        sizes: int64 [n, d] and
        capacity: int64 [d], a hard limit for every part; d = 0 when there is none.
        equal_count: counts of parts differ by at most one.
        lower_bound: no partition has a smaller makespan.
        enough: makespan at which a search may stop; at least the bound.
    """

    weights: IntArray
    num_parts: int
    sizes: IntArray
    capacity: IntArray
    equal_count: bool
    lower_bound: int
    enough: int

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

    def makespan(self, part_of: PartArray) -> int:
        """Largest load over parts and stages of an assignment int32 [n]."""
        return int(group_by_bin(part_of, self.weights, self.num_parts)[2].max())

    def packing(self) -> PackProblem:
        """The sizes alone, to be packed into at most k bins."""
        return PackProblem(sizes=self.sizes, capacity=self.capacity, lower_bound=0, enough=self.num_parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GridProblem:
    """Assign n items to R ranks x M slots (micro-batches).

    Attributes:
        weights: int64 [n, S], cost of each item in each stage.
        num_ranks, num_slots: R and M.
        sizes: int64 [n, d] and
        capacity: int64 [d], a hard limit for every cell; d = 0 when there is none.
        objective: what is minimised, with load [R, M, S]:
            "per_rank"  ranks meet once:          max over ranks and stages of the sum over slots
            "per_slot"  ranks meet in every slot: sum over slots of the max over ranks and stages
        lower_bound: no assignment has a smaller objective.
        enough: objective at which a search may stop; at least the bound.
    """

    weights: IntArray
    num_ranks: int
    num_slots: int
    sizes: IntArray
    capacity: IntArray
    objective: Objective
    lower_bound: int
    enough: int

    @property
    def values(self) -> IntArray:
        """int64 [n, S + d]: weights and sizes side by side, for kernels (each array argument costs compile time)."""
        return np.concatenate([self.weights, self.sizes], axis=1)

    @property
    def num_items(self) -> int:
        """n."""
        return int(self.weights.shape[0])


Packer = Callable[[PackProblem], tuple[PartArray, int]]
Partitioner = Callable[[PartitionProblem], PartArray | None]
GridPlacer = Callable[[GridProblem], PartArray | None]
