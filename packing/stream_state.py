"""The exact state of a `StreamingPacker` as JSON values: what it was made of, checked before anything is believed.

    {"version": 1, "options": {capacity, lookahead, max_items_per_bin},
     "num_items", "num_bins", "used": [d],
     "waiting": {"items": [w], "sizes": [w][d]},            w <= lookahead
     "ready": [{"items": [k], "load": [d]}, ...]}           bins finished and not popped

The order of the window and its scores follow from these, so they are not part of it.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from packing.errors import ItemTooLargeError, NegativeSizeError, PackingError
from packing.inputs import MAX_TOTAL, IntArray, column_totals

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
    """`capacity`, `lookahead` and `max_items_per_bin` of a state, integers for the constructor to check."""
    if not isinstance(state, Mapping):
        raise PackingError(f"state is {_short(state)}; give the mapping that state() returned (json.loads of its text)")
    options = _get(state, "options")
    capacity, most = _get(options, "capacity"), _get(options, "max_items_per_bin")
    return {
        "capacity": _integers(capacity, "capacity", None).tolist(),
        "lookahead": _integer(_get(options, "lookahead"), "lookahead", MAX_TOTAL),
        "max_items_per_bin": None if most is None else _integer(most, "max_items_per_bin", MAX_TOTAL),
    }


def read_state(state: object, options: StreamOptions) -> StreamState:
    """The state of a packer with these options.

    Raises:
        PackingError and its kinds: another version, other options, missing or malformed values, more items than may
            wait, an item above a capacity, an item twice.
    """
    given = read_options(state)
    version = _get(state, "version")
    if type(version) is not int or version != STATE_VERSION:
        raise PackingError(f"state has version {_short(version)}; this is version {STATE_VERSION}")
    if given != options.as_json():
        raise PackingError(f"state has options {_short(given)}; the packer has {_short(options.as_json())}")
    num_items = _integer(_get(state, "num_items"), "num_items", MAX_TOTAL)
    num_bins = _integer(_get(state, "num_bins"), "num_bins", num_items)
    waiting = _get(state, "waiting")
    items = _integers(_get(waiting, "items"), "waiting items", None)
    _check_ascending([items], num_items, "waiting items")
    if len(items) > options.lookahead:
        raise PackingError(f"state has {len(items)} waiting items; at most {options.lookahead} may wait")
    sizes = _sizes(_get(waiting, "sizes"), items, options.capacity)
    ready = _bins(_get(state, "ready"), num_items, options)
    if len(ready) > num_bins:
        raise PackingError(f"state has {len(ready)} ready bins but num_bins is {num_bins}")
    together = np.sort(np.concatenate([items, *(one.items for one in ready)]))
    if (np.diff(together) == 0).any():
        raise PackingError("state has an item twice among waiting items and ready bins")
    used = _used(_get(state, "used"), num_bins, ready, options.capacity)
    return StreamState(num_items=num_items, num_bins=num_bins, used=used, items=items, sizes=sizes, ready=tuple(ready))


def _short(value: object) -> str:
    """A `repr` of bounded length and depth: whatever the value, describing it does not fail."""
    try:
        return reprlib.repr(value)
    except Exception:  # an integer of too many digits, an object of somebody else
        return f"of type {type(value).__name__}"


def _get(value: object, key: str) -> Any:
    if not isinstance(value, Mapping) or key not in value:
        raise PackingError(f"state lacks {key!r}")
    return value[key]


def _integer(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise PackingError(f"{name} of the state is {_short(value)}; it must be an integer in 0..{most}")
    return value


def _list(values: object, name: str, count: int | None) -> Sequence[Any]:
    if not isinstance(values, (list, tuple)) or (count is not None and len(values) != count):
        raise PackingError(f"{name} of the state is not a list of {'integers' if count is None else count}")
    return values


def _integers(values: object, name: str, count: int | None) -> IntArray:
    return _as_array(_list(values, name, count), name)


def _as_array(values: Sequence[Any], name: str) -> IntArray:
    """int64 of integers in 0..2**62."""
    if not set(map(type, values)) <= {int} or (values and (min(values) < 0 or max(values) > MAX_TOTAL)):
        for value in values:
            _integer(value, name, MAX_TOTAL)
    return np.array(values, np.int64)


def _check_ascending(lists: Sequence[IntArray], num_items: int, name: str) -> None:
    """Raise unless each of the lists ascends, below `num_items`."""
    numbers = np.concatenate(lists) if lists else np.empty(0, np.int64)
    first = np.zeros(numbers.shape[0] + 1, np.bool_)  # a list begins here
    first[np.cumsum([0, *map(len, lists)])] = True
    falls = (np.diff(numbers) <= 0) & ~first[1:-1]
    if falls.any() or (numbers >= num_items).any():
        raise PackingError(f"{name} of the state are not ascending numbers below num_items, {num_items}")


def _used(values: object, num_bins: int, ready: Sequence[StreamedBin], capacity: tuple[int, ...]) -> tuple[int, ...]:
    """Exact: no bound of int64 holds for the total of an endless stream."""
    loads = np.array([one.load for one in ready], np.int64).reshape(len(ready), len(capacity))
    used = _list(values, "used", len(capacity))
    for total, least, limit in zip(used, column_totals(loads), capacity, strict=True):
        if _integer(total, "used", num_bins * limit) < least:
            raise PackingError(f"used of the state is {total}, but its ready bins hold {least}")
    return tuple(used)


def _sizes(values: object, items: IntArray, capacity: tuple[int, ...]) -> IntArray:
    if not isinstance(values, (list, tuple)) or len(values) != len(items):
        raise PackingError(f"sizes of the state are not a list of {len(items)} rows, one a waiting item")
    for row in values:
        if not isinstance(row, (list, tuple)) or len(row) != len(capacity):
            raise PackingError(f"sizes of the state hold {_short(row)}; each row has {len(capacity)} integers")
    for value in chain.from_iterable(values):
        if type(value) is not int:
            raise PackingError(f"sizes of the state hold {_short(value)}; sizes are integers")
    for item, row in zip(items.tolist(), values, strict=True):
        for column, (size, limit) in enumerate(zip(row, capacity, strict=True)):
            if size < 0:
                raise NegativeSizeError("sizes", item, column, size)
            if size > limit:
                raise ItemTooLargeError(item, size, limit, column)
    return np.array(values, np.int64).reshape(len(items), len(capacity))


def _bins(values: object, num_items: int, options: StreamOptions) -> list[StreamedBin]:
    """All bins are checked together: array operations on each would take 40 us a bin."""
    if not isinstance(values, (list, tuple)):
        raise PackingError("ready bins of the state are not a list")
    lists = [_list(_get(value, "items"), "items of a ready bin", None) for value in values]
    loads = [_list(_get(value, "load"), "load", len(options.capacity)) for value in values]
    most = options.lookahead + 1 if options.max_items_per_bin is None else options.max_items_per_bin
    for one in lists:
        if not 1 <= len(one) <= most:
            raise PackingError(f"a ready bin of the state has {len(one)} items; it must have 1..{most}")
    numbers = _as_array(list(chain.from_iterable(lists)), "items of a ready bin")
    load = _as_array(list(chain.from_iterable(loads)), "load").reshape(len(lists), len(options.capacity))
    if (load > np.array(options.capacity)).any():
        index, column = np.argwhere(load > np.array(options.capacity))[0]
        raise PackingError(
            f"a ready bin of the state holds {load[index, column]} in column {column}; "
            f"capacity {options.capacity[column]}"
        )
    bins = cut_bins(numbers, np.cumsum([len(one) for one in lists], dtype=np.int64), load)
    _check_ascending([one.items for one in bins], num_items, "items of a ready bin")
    return bins


def cut_bins(items: IntArray, ends: IntArray, load: IntArray) -> list[StreamedBin]:
    """Read-only views of each bin: its items end in `items` at `ends`, its load is a row."""
    items.flags.writeable = load.flags.writeable = False
    bins, start = [], 0
    for index, stop in enumerate(ends.tolist()):
        bins.append(StreamedBin(items=items[start:stop], load=load[index]))
        start = stop
    return bins
