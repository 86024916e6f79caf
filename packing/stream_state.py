"""The exact state of a `StreamingPacker` as JSON values: what it was made of, checked before anything is believed.

    {"version": 1, "options": {capacity, lookahead, max_items_per_bin},
     "num_items", "num_bins", "used": [d],
     "waiting": {"items": [w], "sizes": [w][d]},            w <= lookahead
     "ready": [{"items": [k], "load": [d]}, ...]}           bins finished and not popped

The order of the window and its scores follow from these, so they are not part of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packing.errors import ItemTooLargeError, NegativeSizeError, PackingError
from packing.inputs import MAX_TOTAL, IntArray

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamedBin:
    """One finished bin.

    Attributes:
        items: int64 [k], numbers of its items in the stream, ascending; k >= 1.
        load: int64 [d], sums of their sizes.
    """

    items: IntArray
    load: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of a packer, checked by it: capacity per dimension, items that may wait, items in a bin."""

    capacity: tuple[int, ...]
    lookahead: int
    max_items_per_bin: int | None

    def as_json(self) -> dict[str, Any]:
        return {
            "capacity": list(self.capacity),
            "lookahead": self.lookahead,
            "max_items_per_bin": self.max_items_per_bin,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamState:
    """Everything else.

    Attributes:
        num_items, num_bins: taken in, and finished.
        used: total load of the finished bins, per dimension.
        items: int64 [w], numbers of the waiting items, ascending.
        sizes: int64 [w, d].
        ready: bins not popped.
    """

    num_items: int
    num_bins: int
    used: tuple[int, ...]
    items: IntArray
    sizes: IntArray
    ready: tuple[StreamedBin, ...]

    def as_json(self, options: StreamOptions) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "options": options.as_json(),
            "num_items": self.num_items,
            "num_bins": self.num_bins,
            "used": list(self.used),
            "waiting": {"items": self.items.tolist(), "sizes": self.sizes.tolist()},
            "ready": [{"items": one.items.tolist(), "load": one.load.tolist()} for one in self.ready],
        }


def read_options(state: object) -> dict[str, Any]:
    """`capacity`, `lookahead` and `max_items_per_bin` of a state, for the constructor to check."""
    options = _get(state, "options")
    capacity = _integers(_get(options, "capacity"), "capacity", None)
    return {
        "capacity": capacity,
        "lookahead": _get(options, "lookahead"),
        "max_items_per_bin": _get(options, "max_items_per_bin"),
    }


def read_state(state: object, options: StreamOptions) -> StreamState:
    """The state of a packer with these options.

    Raises:
        PackingError and its kinds: another version, other options, missing or malformed values, more items than may
            wait, an item above a capacity, an item twice.
    """
    if _get(state, "version") != STATE_VERSION:
        raise PackingError(f"state has version {_get(state, 'version')!r}; this is version {STATE_VERSION}")
    if _get(state, "options") != options.as_json():
        raise PackingError(f"state has options {_get(state, 'options')!r}; the packer has {options.as_json()!r}")
    num_items = _integer(_get(state, "num_items"), "num_items", MAX_TOTAL)
    num_bins = _integer(_get(state, "num_bins"), "num_bins", num_items)
    waiting = _get(state, "waiting")
    items = _numbers(_get(waiting, "items"), "waiting items", num_items)
    if len(items) > options.lookahead:
        raise PackingError(f"state has {len(items)} waiting items; at most {options.lookahead} may wait")
    sizes = _sizes(_get(waiting, "sizes"), items, options.capacity)
    ready = _bins(_get(state, "ready"), num_items, options)
    if len(ready) > num_bins:
        raise PackingError(f"state has {len(ready)} ready bins but num_bins is {num_bins}")
    used = _integers(_get(state, "used"), "used", len(options.capacity))
    for total, limit in zip(used, options.capacity, strict=True):
        _integer(total, "used", num_bins * limit)
    taken = [items, *(one.items for one in ready)]
    together = np.concatenate(taken)
    if np.unique(together).shape[0] != together.shape[0]:
        raise PackingError("state has an item twice among waiting items and ready bins")
    return StreamState(
        num_items=num_items, num_bins=num_bins, used=tuple(used), items=items, sizes=sizes, ready=tuple(ready)
    )


def _get(value: object, key: str) -> Any:
    if not isinstance(value, Mapping) or key not in value:
        raise PackingError(f"state lacks {key!r}")
    return value[key]


def _integer(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise PackingError(f"{name} of the state is {value!r}; it must be an integer in 0..{most}")
    return value


def _integers(values: object, name: str, count: int | None) -> list[int]:
    if not isinstance(values, (list, tuple)) or (count is not None and len(values) != count):
        raise PackingError(f"{name} of the state is not a list of {'integers' if count is None else count}")
    return [_integer(value, name, MAX_TOTAL) for value in values]


def _numbers(values: object, name: str, num_items: int) -> IntArray:
    numbers = np.array(_integers(values, name, None), np.int64)
    if numbers.shape[0] and (numbers[-1] >= num_items or (np.diff(numbers) <= 0).any()):
        raise PackingError(f"{name} of the state are not ascending numbers below num_items, {num_items}")
    return numbers


def _sizes(values: object, items: IntArray, capacity: tuple[int, ...]) -> IntArray:
    if not isinstance(values, (list, tuple)) or len(values) != len(items):
        raise PackingError(f"sizes of the state are not a list of {len(items)} rows, one a waiting item")
    rows = [_signed_row(row, len(capacity)) for row in values]
    for item, row in zip(items.tolist(), rows, strict=True):
        for column, (size, limit) in enumerate(zip(row, capacity, strict=True)):
            if size < 0:
                raise NegativeSizeError("sizes", item, column, size)
            if size > limit:
                raise ItemTooLargeError(item, size, limit, column)
    return np.array(rows, np.int64).reshape(len(items), len(capacity))


def _signed_row(row: object, count: int) -> list[int]:
    if not isinstance(row, (list, tuple)) or len(row) != count:
        raise PackingError(f"sizes of the state hold {row!r}; each row has {count} integers")
    for value in row:
        if isinstance(value, bool) or not isinstance(value, int):
            raise PackingError(f"sizes of the state hold {value!r}; sizes are integers")
    return list(row)


def _bins(values: object, num_items: int, options: StreamOptions) -> list[StreamedBin]:
    if not isinstance(values, (list, tuple)):
        raise PackingError("ready bins of the state are not a list")
    bins = []
    for value in values:
        items = _numbers(_get(value, "items"), "items of a ready bin", num_items)
        load = _integers(_get(value, "load"), "load", len(options.capacity))
        most = options.lookahead + 1 if options.max_items_per_bin is None else options.max_items_per_bin
        if not 1 <= len(items) <= most:
            raise PackingError(f"a ready bin of the state has {len(items)} items; it must have 1..{most}")
        for column, (total, limit) in enumerate(zip(load, options.capacity, strict=True)):
            if total > limit:
                raise PackingError(f"a ready bin of the state holds {total} in column {column}; capacity {limit}")
        bins.append(frozen_bin(items, np.array(load, np.int64)))
    return bins


def frozen_bin(items: IntArray, load: IntArray) -> StreamedBin:
    items.flags.writeable = load.flags.writeable = False
    return StreamedBin(items=items, load=load)
