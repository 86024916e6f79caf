"""Errors of packing and partitioning: each carries the offending values and says what to do.

All of them rebuild from their arguments, so they survive the trip from a worker process.
"""


class PackingError(ValueError):
    """Base of all errors of `packing`; raised itself for malformed input (type, shape, unknown name)."""


class NegativeSizeError(PackingError):
    """A size or weight below zero."""

    def __init__(self, name: str, index: int, column: int, value: int) -> None:
        self.name, self.index, self.column, self.value = name, index, column, value
        super().__init__(name, index, column, value)

    def __str__(self) -> str:
        return f"{self.name}[{self.index}] is {self.value} in column {self.column}; sizes and weights are at least 0"


class SizeOverflowError(PackingError):
    """Values whose sum would leave the range in which integer arithmetic is exact here (2**62)."""

    def __init__(self, name: str, total: int, limit: int) -> None:
        self.name, self.total, self.limit = name, total, limit
        super().__init__(name, total, limit)

    def __str__(self) -> str:
        return f"{self.name} reaches {self.total}, above the limit of {self.limit} (2**62); use a coarser unit"


class CapacityError(PackingError):
    """A capacity that is not positive, or does not match the columns of the sizes."""


class ItemTooLargeError(PackingError):
    """An item that no bin can hold.

    Attributes:
        index: position of the first such item.
        size, capacity: its size and the limit, in the unit of the sizes.
        column: the dimension in which it does not fit.
    """

    def __init__(self, index: int, size: int, capacity: int, column: int) -> None:
        self.index, self.size, self.capacity, self.column = index, size, capacity, column
        super().__init__(index, size, capacity, column)

    def __str__(self) -> str:
        return (
            f"item {self.index} has size {self.size} in column {self.column}, above the capacity of {self.capacity}; "
            "raise the capacity, or shrink or remove the item before packing"
        )


class InfeasiblePartitionError(PackingError):
    """No assignment within the capacities was found.

    Attributes:
        num_parts: parts (or cells of a grid) that were available.
        num_bins_bound: parts that any assignment needs (a lower bound).
        num_bins_found: parts that best-fit-decreasing needs.
        proven: True when that bound exceeds `num_parts`, or some part would have to exceed a capacity; False when only
            the search failed.
        grid: ranks and slots, where the parts are the cells of a grid; else None.
    """

    def __init__(
        self,
        num_parts: int,
        num_bins_bound: int,
        num_bins_found: int,
        proven: bool,
        grid: tuple[int, int] | None = None,
    ) -> None:
        self.num_parts, self.num_bins_bound = num_parts, num_bins_bound
        self.num_bins_found, self.proven, self.grid = num_bins_found, proven, grid
        super().__init__(num_parts, num_bins_bound, num_bins_found, proven, grid)

    @property
    def unit(self) -> str:
        """What the items were to be assigned to: parts or cells."""
        return "parts" if self.grid is None else "cells"

    def __str__(self) -> str:
        if self.num_bins_bound > self.num_parts:
            verdict = f"proven impossible: any assignment needs at least {self.num_bins_bound} {self.unit}"
        elif self.proven:
            verdict = f"proven impossible: in any assignment some {self.unit[:-1]} exceeds a capacity"
        else:
            verdict = (
                f"not proven impossible: at least {self.num_bins_bound} {self.unit} are needed,"
                f" {self.num_bins_found} were needed by best-fit-decreasing"
            )
        shape, more = "", "parts"
        if self.grid is not None:
            shape, more = f" ({self.grid[0]} ranks x {self.grid[1]} slots)", "slots"
        return (
            f"no assignment to {self.num_parts} {self.unit}{shape} within the capacities was found ({verdict}); "
            f"use more {more} or a larger capacity"
        )
