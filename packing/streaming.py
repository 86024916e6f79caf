"""`StreamingPacker`: bounded look-ahead packing of an endless stream.

    add(sizes)  --one item at a time-->  window of up to `lookahead` items  --overflows-->  bin  --pop()-->  consumer
                                                        |
                                         state(): the window, counters, bins not popped

A bin is decided when the arrival of an item makes more than `lookahead` items wait, so the sequence of bins is a
function of the items and the options alone: not of how items were grouped into calls, nor of when bins are popped.
How a bin is chosen: packing/stream_rule.py.

Property: every item leaves exactly once. One that has seen 16 times `lookahead` arrivals is overdue, and every bin
holds the oldest item while that is overdue: at most `lookahead` bins later it is gone.
Price: items leave in another order; a window cannot mix what arrives further apart, so input sorted by size packs
worse than shuffled input (though on all tables at hand no worse than best-fit with as many items in open bins).
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from packing.errors import ItemTooLargeError, PackingError
from packing.inputs import (
    MAX_TOTAL,
    IntArray,
    PartArray,
    as_capacity,
    as_matrix,
    at_least_one,
    check_items_fit,
    column_totals,
)
from packing.results import gap_to
from packing.stream_rule import advance
from packing.stream_state import StreamedBin, StreamOptions, StreamState, cut_bins, read_options, read_state
from packing.stream_window import FIRST_SIZE, NUMBER, SCORE, window_scores, window_terms

MAX_LOOKAHEAD = 2**20


class StreamingPacker:
    """Packs items as they come, looking at no more than `lookahead` waiting items at a time.

    Attributes:
        num_items: items taken in so far; the next one gets this number.
        num_bins: bins finished so far, popped or not.
        num_waiting: items taken in and not yet in a bin; at most `lookahead`.
        num_ready: bins that wait to be popped.
        fill, lower_bound, gap: how full bins are, and how far from the fewest possible.
    """

    def __init__(
        self,
        capacity: int | Sequence[int] | IntArray,
        lookahead: int,
        *,
        max_items_per_bin: int | None = None,
    ) -> None:
        """A packer that has seen nothing.

        Args:
            capacity: limit of a bin, one per dimension, in the unit of the sizes.
            lookahead: items that may wait, 1..2**20. More of them fill bins better, and wait longer.
            max_items_per_bin: further limit on the number of items.

        Raises:
            CapacityError, PackingError: malformed options.
        """
        self._capacity = as_capacity(capacity, None)
        self._num_columns = self._capacity.shape[0]
        if at_least_one(lookahead, "lookahead") > MAX_LOOKAHEAD:
            raise PackingError(f"lookahead is {lookahead}; at most {MAX_LOOKAHEAD} items may wait")
        most = None if max_items_per_bin is None else at_least_one(max_items_per_bin, "max_items_per_bin")
        limits = self._capacity
        if most is not None and most <= lookahead:
            # A limit on the count is one more dimension, in which every item has size 1.
            limits = np.append(limits, most)
        self._options = StreamOptions(
            capacity=tuple(self._capacity.tolist()), lookahead=int(lookahead), max_items_per_bin=most
        )
        self._terms = window_terms(limits)
        self._window = np.empty((FIRST_SIZE + limits.shape[0], lookahead + 1), np.int64)
        self._ready: deque[StreamedBin] = deque()
        self._used = [0] * self._num_columns
        self.num_items = self.num_bins = self.num_waiting = 0

    @property
    def num_ready(self) -> int:
        """Bins that wait to be popped."""
        return len(self._ready)

    @property
    def fill(self) -> npt.NDArray[np.float64]:
        """float64 [d]: used over capacity of all bins finished so far; 0 before the first."""
        rooms = [max(1, self.num_bins * int(limit)) for limit in self._capacity]
        return np.array([used / room for used, room in zip(self._used, rooms, strict=True)])

    @property
    def lower_bound(self) -> int:
        """Bins that any packing of all items so far needs, waiting ones too: by total size, and by number.

        ceil(total / capacity) of the scarcest dimension, or ceil(num_items / max_items_per_bin): no more can be said
        without keeping every item. The optimum is above it where items do not fit together, such as many above half.
        """
        waiting = self._window[FIRST_SIZE : FIRST_SIZE + self._num_columns, : self.num_waiting]
        totals = [used + more for used, more in zip(self._used, column_totals(waiting.T), strict=True)]
        return self._bound(totals, self.num_items)

    @property
    def gap(self) -> float:
        """Finished bins over what their items need by the rule of `lower_bound`, minus 1; 0 before the first.

        0 is proven optimal for these items. After `flush` they are all items, and `gap` is num_bins / lower_bound - 1.
        """
        return gap_to(self.num_bins, self._bound(self._used, self.num_items - self.num_waiting))

    def _bound(self, totals: Sequence[int], num_items: int) -> int:
        most = self._options.max_items_per_bin or max(1, num_items)
        limits = zip([*totals, num_items], [*self._options.capacity, most], strict=True)
        return max(-(-total // limit) for total, limit in limits)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self._options.as_json().items())
        fill = ", ".join(f"{share:.3f}" for share in self.fill)
        return (
            f"StreamingPacker({options}; num_items={self.num_items}, num_bins={self.num_bins}, "
            f"num_waiting={self.num_waiting}, fill=[{fill}])"
        )

    def add(self, sizes: npt.ArrayLike) -> None:
        """Take in items, numbered in order of arrival. A call that raises takes in none.

        Args:
            sizes: integers [m], or [m, d] for d dimensions. One item may be given as an integer, or as [d] where d > 1.

        Raises:
            ItemTooLargeError: an item above a capacity; its index is the number that it would have in the stream.
            NegativeSizeError, PackingError: malformed input; positions are those in `sizes`.
            SizeOverflowError: the sizes of one call sum to more than 2**62.
        """
        matrix = self._checked(sizes)
        if matrix.shape[0]:
            self._advance(matrix, flush=False)

    def pop(self) -> StreamedBin | None:
        """The next finished bin, or None when more input (or `flush`) is needed first."""
        return self._ready.popleft() if self._ready else None

    def flush(self) -> list[StreamedBin]:
        """All bins not popped yet; every waiting item is in one of them. The packer can go on afterwards."""
        if self.num_waiting:
            self._advance(np.empty((0, self._num_columns), np.int64), flush=True)
        bins = list(self._ready)
        self._ready.clear()
        return bins

    def state(self) -> dict[str, Any]:
        """What `from_state` needs to go on identically: JSON values, exact integers (packing/stream_state.py).

        Its size is bounded by `lookahead` once all ready bins have been popped.
        """
        waiting = self._window[:, : self.num_waiting]
        waiting = waiting[:, np.argsort(waiting[NUMBER])]
        return StreamState(
            num_items=self.num_items,
            num_bins=self.num_bins,
            used=tuple(self._used),
            items=waiting[NUMBER],
            sizes=waiting[FIRST_SIZE : FIRST_SIZE + self._num_columns].T,
            ready=tuple(self._ready),
        ).as_json(self._options)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "StreamingPacker":
        """A packer that goes on where `state()` was taken.

        Raises:
            PackingError and its kinds: another version, missing or malformed values, an item above a capacity, an item
                twice, more items than may wait.
        """
        packer = cls(**read_options(state))
        packer.load_state(state)
        return packer

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state()` was taken from a packer with the same options; forget everything before.

        Raises:
            PackingError and its kinds: as `from_state`, or other options. The packer stays as it was.
        """
        restored = read_state(state, self._options)
        inner = self._inner(restored.sizes)
        score = window_scores(inner, self._terms)
        order = np.lexsort((restored.items, -score))
        self.num_waiting = order.shape[0]
        self._window[NUMBER, : self.num_waiting] = restored.items[order]
        self._window[SCORE, : self.num_waiting] = score[order]
        self._window[FIRST_SIZE:, : self.num_waiting] = inner[order].T
        self._ready = deque(restored.ready)
        self._used = list(restored.used)
        self.num_items, self.num_bins = restored.num_items, restored.num_bins

    def _checked(self, sizes: npt.ArrayLike) -> IntArray:
        array = np.asarray(sizes)
        if array.ndim == 0 or (array.ndim == 1 and array.size and self._num_columns > 1):
            array = array.reshape(1, -1)
        matrix = as_matrix(array, "sizes")
        if matrix.shape[0] == 0:
            return np.empty((0, self._num_columns), np.int64)
        if matrix.shape[1] != self._num_columns:
            raise PackingError(
                f"sizes have {matrix.shape[1]} columns but capacity has {self._num_columns} entries; give one for each"
            )
        if self.num_items + matrix.shape[0] > MAX_TOTAL:
            raise PackingError(f"the stream has {self.num_items} items; at most 2**62 can be numbered")
        try:
            check_items_fit(matrix, self._capacity)
        except ItemTooLargeError as error:
            number = self.num_items + error.index
            raise ItemTooLargeError(number, error.size, error.capacity, error.column) from None
        return matrix

    def _inner(self, matrix: IntArray) -> IntArray:
        """[m, d] with the column of the count, where that is a dimension."""
        if self._terms.shape[1] == matrix.shape[1]:
            return matrix
        return np.concatenate([matrix, np.ones((matrix.shape[0], 1), np.int64)], axis=1)

    def _advance(self, matrix: IntArray, *, flush: bool) -> None:
        order, ends, load, num_waiting = advance(
            self._window, self.num_waiting, self.num_items, self._inner(matrix), self._terms, flush
        )
        self.num_waiting = int(num_waiting)
        self.num_items += matrix.shape[0]
        if not ends.shape[0]:
            return
        self.num_bins += ends.shape[0]
        order, load = order.copy(), load[:, : self._num_columns].copy()  # the kernel's arrays are longer than needed
        self._used = [before + more for before, more in zip(self._used, column_totals(load), strict=True)]
        self._ready.extend(cut_bins(order, ends, load))


def pack_stream(
    stream: Iterable[npt.ArrayLike],
    *,
    capacity: int | Sequence[int] | IntArray,
    lookahead: int,
    max_items_per_bin: int | None = None,
) -> Iterator[StreamedBin]:
    """Bins of a stream of items, or of arrays of items, as soon as each is finished; the rest when the stream ends.

    Raises:
        CapacityError, PackingError: malformed options, or no iterable; at the call. Of the items: where they are met.
    """
    packer = StreamingPacker(capacity, lookahead, max_items_per_bin=max_items_per_bin)
    try:
        arrivals = iter(stream)
    except TypeError:
        raise PackingError(f"stream has type {type(stream).__name__}; give an iterable of items or of arrays") from None

    def bins() -> Iterator[StreamedBin]:
        for sizes in arrivals:
            packer.add(sizes)
            while (one := packer.pop()) is not None:
                yield one
        yield from packer.flush()

    return bins()


def pack_windowed(
    sizes: npt.ArrayLike,
    *,
    capacity: int | Sequence[int] | IntArray,
    lookahead: int,
    max_items_per_bin: int | None = None,
) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins) of a whole table that arrives in its order: streaming, to be compared."""
    packer = StreamingPacker(capacity, lookahead, max_items_per_bin=max_items_per_bin)
    packer.add(sizes)
    bins = packer.flush()
    bin_of = np.empty(packer.num_items, np.int32)
    for index, one in enumerate(bins):
        bin_of[one.items] = index
    return bin_of, len(bins)
