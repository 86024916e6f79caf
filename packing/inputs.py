"""Checking and normalising input: after this, kernels may assume int64, contiguous, non-negative, no overflow.

Arrays handed to kernels are always writable int64 in C order: numba compiles a kernel anew for every other kind.
"""

import sys
from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt

from packing.errors import CapacityError, ItemTooLargeError, NegativeSizeError, PackingError, SizeOverflowError

IntArray = npt.NDArray[np.int64]
PartArray = npt.NDArray[np.int32]

MAX_TOTAL = 2**62
"""Largest sum of all sizes (or weights) over items: leaves one bit for sums of two such values."""

MAX_ITEMS = 2**31 - 1
"""Item and bin indices are int32 in results."""


_CAPACITY_FORM = "give one positive integer, or one per column of the sizes"

MAX_COLUMNS = 64
"""Dimensions of sizes and stages of weights; more of them would overflow scores, and are surely transposed input."""

MAX_BINS = 2**24
"""Bins, parts and cells that may be asked for, unless there are more items."""


def as_matrix(values: npt.ArrayLike, name: str) -> IntArray:
    """`values` [n] or [n, d] as int64 [n, d], checked.

    Raises:
        PackingError: not integers, not one or two dimensions, no column, too many columns or items.
        NegativeSizeError: a value below zero.
        SizeOverflowError: the sum of one column above 2**62.
    """
    array = _read(values, name)
    if array.ndim == 0 and array.dtype.kind not in "iuf":
        raise PackingError(f"{name} is of type {type(values).__name__}; give a list or an array of integers")
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
        raise PackingError(f"{name} has shape {array.shape}; give [n] or [n, d] with d >= 1")
    if array.shape[0] > MAX_ITEMS:
        raise PackingError(f"{name} has {array.shape[0]} items; at most {MAX_ITEMS} are supported")
    if array.ndim == 2 and array.shape[1] > MAX_COLUMNS:
        raise PackingError(f"{name} has {array.shape[1]} columns; at most {MAX_COLUMNS} are supported (rows are items)")
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind == "f" and isinstance(values, (list, tuple)):
        array = np.asarray(values, dtype=object)  # to name the float; or there is none, just integers beyond int64
    if array.dtype == object:
        _check_objects(array, name)
    elif array.dtype.kind not in "iu":
        raise PackingError(f"{name} has type {array.dtype}; sizes and weights are integers{_remedy(array.dtype.kind)}")
    elif array.dtype == np.uint64 and int(array.max()) > MAX_TOTAL:
        raise SizeOverflowError(name, int(array.max()), MAX_TOTAL)
    matrix = np.require(array.reshape(array.shape[0], -1 if array.size else _columns(array)), np.int64, ["C", "W"])
    _check_range(matrix, name)
    return matrix


def _read(values: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    """`values` as an array of whatever type."""
    # Not np.ma: that imports it, and a fork beside an import leaves its lock to the child. Not imported, not masked.
    masked: Any = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    if isinstance(values, masked) and np.any(getattr(values, "mask", False)):
        raise PackingError(f"{name} has masked entries; fill or remove them first")
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise PackingError(f"{name} is no table of numbers ({error}); give [n], or [n, d] with equal rows") from error


def _columns(array: npt.NDArray[Any]) -> int:
    return array.shape[1] if array.ndim == 2 else 1


def _remedy(kind: str) -> str:
    if kind == "f":
        return ": scale and round to integers first (seconds to nanoseconds, say)"
    return ", one number an item and column" if kind in "US" else ""


def _check_objects(array: npt.NDArray[Any], name: str) -> None:
    """Python integers, and what is none, with its place."""
    for place, value in np.ndenumerate(array):
        where = f"{name}{list(place)}"
        if not _is_integer(value):
            kind = "f" if isinstance(value, (float, np.floating, Number)) and not isinstance(value, bool) else "O"
            raise PackingError(
                f"{where} is {value!r} ({type(value).__name__}); sizes and weights are integers{_remedy(kind)}"
            )
        if value < 0:
            raise NegativeSizeError(name, place[0], place[-1] if array.ndim == 2 else 0, int(value))
        if value > MAX_TOTAL:
            raise SizeOverflowError(where, int(value), MAX_TOTAL)


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


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


def as_capacity(capacity: int | Sequence[int] | IntArray, num_columns: int | None) -> IntArray:
    """`capacity` as int64 [d]; d = `num_columns` where that is known.

    Raises:
        CapacityError: not positive integers, above 2**62, or not one per column of the sizes.
    """
    try:
        array = _read(capacity, "capacity")
    except PackingError as error:
        raise CapacityError(f"capacity is {capacity!r}; {_CAPACITY_FORM}") from error
    values = np.atleast_1d(array).tolist()
    if array.ndim > 1 or not values or not all(map(_is_integer, values)):
        raise CapacityError(f"capacity is {capacity!r}; {_CAPACITY_FORM}")
    if num_columns is not None and len(values) != num_columns:
        raise CapacityError(
            f"capacity has {len(values)} entries but sizes have {num_columns} columns; give one for each"
        )
    if len(values) > MAX_COLUMNS:
        raise CapacityError(f"capacity has {len(values)} entries; at most {MAX_COLUMNS} are supported")
    for column, value in enumerate(values):
        if not 1 <= value <= MAX_TOTAL:
            raise CapacityError(f"capacity of column {column} is {value}; it must lie in 1..2**62")
    return np.array(values, dtype=np.int64)


def as_sizes(sizes: npt.ArrayLike, capacity: int | Sequence[int] | IntArray) -> tuple[IntArray, IntArray]:
    """(sizes int64 [n, d], capacity int64 [d]), checked; an empty list takes its columns from the capacity.

    Raises:
        ItemTooLargeError: an item above a capacity.
        PackingError and its kinds: as `as_matrix` and `as_capacity`.
    """
    matrix = as_matrix(sizes, "sizes")
    is_empty_list = matrix.shape[0] == 0 and np.ndim(sizes) == 1
    limits = as_capacity(capacity, None if is_empty_list else matrix.shape[1])
    if is_empty_list:
        return np.empty((0, limits.shape[0]), np.int64), limits
    check_items_fit(matrix, limits)
    return matrix, limits


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
    matrix, limits = as_sizes(sizes, capacity)
    if matrix.shape[0] != num_items:
        raise PackingError(f"sizes have {matrix.shape[0]} rows but weights have {num_items}; give one row an item")
    return matrix, limits


def at_least_one(value: int, name: str, *, limit: int | None = MAX_ITEMS) -> int:
    """`value` as a checked positive Python integer."""
    if not _is_integer(value) or value < 1:
        raise PackingError(f"{name} is {value!r}; it must be an integer of at least 1")
    if limit is not None and value > limit:
        raise PackingError(f"{name} is {value}; at most {limit} is supported")
    return int(value)


def check_count(value: int, num_items: int, name: str) -> None:
    """Refuse a number of bins, parts or cells that would mostly be empty, before room for them is made."""
    limit = max(MAX_BINS, num_items)
    if value > limit:
        raise PackingError(f"{name} is {value}; with {num_items} items at most {limit} is supported")


def as_flag(value: bool, name: str) -> bool:
    """`value` as a checked Python bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise PackingError(f"{name} is {value!r}; it must be True or False")
    return bool(value)
