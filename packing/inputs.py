"""Checking and normalising input: after this, kernels may assume int64, contiguous, non-negative, no overflow.

Arrays handed to kernels are always writable int64 in C order: numba compiles a kernel anew for every other kind.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packing.errors import CapacityError, ItemTooLargeError, NegativeSizeError, PackingError, SizeOverflowError

IntArray = npt.NDArray[np.int64]
PartArray = npt.NDArray[np.int32]

MAX_TOTAL = 2**62
"""Largest sum of all sizes (or weights) over items: leaves one bit for sums of two such values."""

MAX_ITEMS = 2**31 - 1
"""Item and bin indices are int32 in results."""


def as_matrix(values: npt.ArrayLike, name: str) -> IntArray:
    """`values` [n] or [n, d] as int64 [n, d], checked.

    Raises:
        PackingError: not integers, not one or two dimensions, no column, or too many items.
        NegativeSizeError: a value below zero.
        SizeOverflowError: the sum of one column above 2**62.
    """
    array = np.asarray(values)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
        raise PackingError(f"{name} has shape {array.shape}; give [n] or [n, d] with d >= 1")
    if array.shape[0] > MAX_ITEMS:
        raise PackingError(f"{name} has {array.shape[0]} items; at most {MAX_ITEMS} are supported")
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype in (object, np.uint64):
        _check_wide(array, name)
    elif array.dtype.kind not in "iu":
        raise PackingError(f"{name} has type {array.dtype}; sizes and weights are integers (round up before packing)")
    matrix = np.require(array.reshape(array.shape[0], -1 if array.size else _columns(array)), np.int64, ["C", "W"])
    _check_range(matrix, name)
    return matrix


def _columns(array: npt.NDArray[np.generic]) -> int:
    return array.shape[1] if array.ndim == 2 else 1


def _check_wide(array: npt.NDArray[np.generic], name: str) -> None:
    """Types that int64 may not hold: Python integers and uint64."""
    for value in array.flat:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise PackingError(f"{name} holds {value!r} ({type(value).__name__}); sizes and weights are integers")
        if abs(int(value)) > MAX_TOTAL:
            raise SizeOverflowError(name, int(value), MAX_TOTAL)


def _check_range(matrix: IntArray, name: str) -> None:
    if matrix.size == 0:
        return
    if matrix.min() < 0:
        index, column = (int(place) for place in np.argwhere(matrix < 0)[0])
        raise NegativeSizeError(name, index, column, int(matrix[index, column]))
    if int(matrix.max()) <= MAX_TOTAL // matrix.shape[0]:
        return  # no column can reach the limit
    worst = max(column_totals(matrix))
    if worst > MAX_TOTAL:
        raise SizeOverflowError(f"the sum of {name}", worst, MAX_TOTAL)


def column_totals(matrix: IntArray) -> list[int]:
    """Exact sum of each column, as Python integers (an int64 sum could wrap before it is checked)."""
    low = (matrix & 0x7FFFFFFF).sum(axis=0)
    high = (matrix >> 31).sum(axis=0)
    return [(int(upper) << 31) + int(lower) for upper, lower in zip(high, low, strict=True)]


def as_capacity(capacity: int | Sequence[int] | IntArray, num_columns: int) -> IntArray:
    """`capacity` as int64 [d].

    Raises:
        CapacityError: not positive integers, above 2**62, or not one per column of the sizes.
    """
    array = np.asarray(capacity)
    if array.dtype.kind not in "iuO" or array.ndim > 1:
        raise CapacityError(f"capacity is {capacity!r}; give one positive integer, or one per column of the sizes")
    values = [int(value) for value in np.atleast_1d(array)]
    if len(values) != num_columns:
        raise CapacityError(
            f"capacity has {len(values)} entries but sizes have {num_columns} columns; give one for each"
        )
    for column, value in enumerate(values):
        if not 1 <= value <= MAX_TOTAL:
            raise CapacityError(f"capacity of column {column} is {value}; it must lie in 1..2**62")
    return np.array(values, dtype=np.int64)


def check_items_fit(sizes: IntArray, capacity: IntArray) -> None:
    """Raise `ItemTooLargeError` for the first item above a capacity: never dropped, never cut."""
    if any((sizes[:, column] > limit).any() for column, limit in enumerate(capacity)):
        index, column = (int(place) for place in np.argwhere(sizes > capacity)[0])
        raise ItemTooLargeError(index, int(sizes[index, column]), int(capacity[column]), column)


def as_weights(weights: npt.ArrayLike) -> IntArray:
    """int64 [n, S], with a total over items and stages within the exact range."""
    matrix = as_matrix(weights, "weights")
    if matrix.size == 0 or int(matrix.max()) <= MAX_TOTAL // matrix.size:
        return matrix  # no sum can reach the limit
    total = sum(column_totals(matrix))
    if total > MAX_TOTAL:
        raise SizeOverflowError("the sum of weights over all stages", total, MAX_TOTAL)
    return matrix


def as_limits(
    sizes: npt.ArrayLike | None, capacity: int | Sequence[int] | IntArray | None, num_items: int
) -> tuple[IntArray, IntArray]:
    """(sizes int64 [n, d], capacity int64 [d]) of parts or cells; d = 0 when neither is given.

    Raises:
        CapacityError: one without the other, or a malformed capacity.
        ItemTooLargeError: an item above a capacity.
        PackingError and its kinds: malformed sizes, or not one row an item.
    """
    if (capacity is None) != (sizes is None):
        raise CapacityError("capacity and sizes belong together: the capacity limits the sizes; give both or none")
    if capacity is None or sizes is None:
        return np.empty((num_items, 0), np.int64), np.empty(0, np.int64)
    matrix = as_matrix(sizes, "sizes")
    if matrix.shape[0] != num_items:
        raise PackingError(f"sizes have {matrix.shape[0]} rows but weights have {num_items}; give one row an item")
    limits = as_capacity(capacity, matrix.shape[1])
    check_items_fit(matrix, limits)
    return matrix, limits


def at_least_one(value: int, name: str) -> int:
    """`value` as a checked positive integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise PackingError(f"{name} is {value!r}; it must be an integer of at least 1")
    return int(value)
