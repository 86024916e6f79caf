"""What the samples of one step cost, as integer columns: the planner's only view of the data.

    CostIndex (all samples, memory-mapped)  --from_index(sample_ids)-->  StepCounts (n rows)

Every column is int64 [n] and read-only. Quadratic columns are sums over attention *segments* (windows, frames), so
adding up the rows of a pack gives the exact count of the pack: nothing attends across samples.

Media items are a second table in CSR order, int64 [k]: items of sample i are rows item_offsets[i] to
item_offsets[i + 1]. An encoder with a placement of its own moves items, not samples. Callers that know sums only leave
it out: a sample with patches then counts as one item that cannot be divided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.errors import PlanError

Int64Array = NDArray[np.int64]

SAMPLE_COLUMNS = ("llm_tokens", "label_tokens", "visual_tokens", "patches", "num_items")
ITEM_COLUMNS = ("full_total_sq", "window_total_sq")
COUNT_COLUMNS = SAMPLE_COLUMNS + ITEM_COLUMNS

# Column of the item table -> the column of the samples that its items add up to.
SUM_OF_ITEMS: Mapping[str, str] = MappingProxyType(
    {
        "item_patches": "patches",
        "item_visual_tokens": "visual_tokens",
        "item_full_sq": "full_total_sq",
        "item_window_sq": "window_total_sq",
    }
)
ITEM_TABLE = ("item_offsets", *SUM_OF_ITEMS)
_ITEM_OF = {total: name for name, total in SUM_OF_ITEMS.items()}
_NOT_GIVEN: Int64Array = np.zeros(0, dtype=np.int64)


class IndexLike(Protocol):
    """The part of `dataloaders.CostIndex` that planning reads: two tables in CSR order."""

    @property
    def samples(self) -> Mapping[str, NDArray[Any]]:
        """Columns with one row per sample."""

    @property
    def items(self) -> Mapping[str, NDArray[Any]]:
        """Columns with one row per media item."""

    @property
    def item_offsets(self) -> NDArray[Any]:
        """int64 [n + 1]: items of sample i are rows item_offsets[i] to item_offsets[i + 1]."""

    def __len__(self) -> int:
        """Number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCounts:
    """Counts of the samples of one step, in the order in which they were selected.

    Attributes:
        sample_ids: rows of the index, each at most once.
        llm_tokens: LLM sequence positions, visual tokens included.
        label_tokens: positions that carry a loss.
        visual_tokens: positions that receive a visual embedding. Where the LLM attends to images across (Mllama), the
            keys and values of that, which are no positions: there may be more of them than LLM tokens.
        patches: vision-tower tokens before merging.
        num_items: media items.
        full_total_sq: sum over full-attention segments of length squared, in patches^2.
        window_total_sq: the same over window-attention segments.

        item_offsets: int64 [n + 1], the items of a sample in the item table.
        item_patches, item_visual_tokens, item_full_sq, item_window_sq: int64 [k]. Give all five or none.

    Raises:
        PlanError: columns of unequal length, a count that is no whole number (floats with a fraction, NaN, booleans,
            text) or negative, more label tokens than LLM tokens, a sample that is listed twice, or items that do
            not add up to their samples.
    """

    sample_ids: Int64Array
    llm_tokens: Int64Array
    label_tokens: Int64Array
    visual_tokens: Int64Array
    patches: Int64Array
    num_items: Int64Array
    full_total_sq: Int64Array
    window_total_sq: Int64Array
    item_offsets: Int64Array = field(default_factory=lambda: _NOT_GIVEN)
    item_patches: Int64Array = field(default_factory=lambda: _NOT_GIVEN)
    item_visual_tokens: Int64Array = field(default_factory=lambda: _NOT_GIVEN)
    item_full_sq: Int64Array = field(default_factory=lambda: _NOT_GIVEN)
    item_window_sq: Int64Array = field(default_factory=lambda: _NOT_GIVEN)

    def __post_init__(self) -> None:
        num_samples = self._length_of("sample_ids", "n")
        for name in ("sample_ids", *COUNT_COLUMNS):
            self._set(name, num_samples)
        above = self.label_tokens > self.llm_tokens
        if above.any():
            row = int(above.argmax())
            raise PlanError(
                f"label_tokens={int(self.label_tokens[row])}{self._owner('label_tokens', row)} is above its llm_tokens="
                f"{int(self.llm_tokens[row])}: labels are those of the LLM positions that carry a loss"
            )
        ids = np.sort(self.sample_ids)
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            raise PlanError(
                f"samples {np.unique(twice).tolist()} are listed more than once in one step; a step holds a sample once"
            )
        given = [name for name in ITEM_TABLE if getattr(self, name) is not _NOT_GIVEN]
        if not given:
            self._items_from_sums()
        elif len(given) != len(ITEM_TABLE):
            raise PlanError(f"item columns {given} without {sorted(set(ITEM_TABLE) - set(given))}; give all or none")
        self._check_items(derived=not given)

    def _length_of(self, name: str, length: str) -> int:
        """Rows of a column that says how long others are."""
        column = _array_of(name, getattr(self, name))
        if column.ndim != 1:
            raise PlanError(f"counts column {name} has shape {column.shape}; expected ({length},)")
        return len(column)

    def _set(self, name: str, length: int) -> None:
        """Store a column as its own read-only int64 array."""
        given = _array_of(name, getattr(self, name))
        if given.shape != (length,):
            raise PlanError(f"counts column {name} has shape {given.shape}; expected ({length},)")
        if length and given.dtype != np.int64:
            self._check_whole(name, given)
        column = given.astype(np.int64)  # always a copy
        if length and int(column.min()) < 0:
            row = int(column.argmin())
            raise PlanError(f"{name}={int(column[row])}{self._owner(name, row)} is negative")
        column.flags.writeable = False
        object.__setattr__(self, name, column)

    def _check_whole(self, name: str, column: NDArray[Any]) -> None:
        """int64 holds every value of the column as it is; converting alone would cut fractions off in silence."""
        if column.dtype.kind == "f":
            # NaN and infinities differ from what they are cut to, or leave the range; so does 2^63.
            wrong = ~((np.trunc(column) == column) & (np.abs(column) < 2.0**63))
        elif column.dtype.kind == "u":
            wrong = column > np.uint64(np.iinfo(np.int64).max)
        else:
            wrong = np.full(len(column), column.dtype.kind != "i")
        if wrong.any():
            row = int(wrong.argmax())
            value = column[row].item() if isinstance(column[row], np.generic) else column[row]
            raise PlanError(
                f"{name}={value!r}{self._owner(name, row)} is no whole number of 64 bits (the column is {column.dtype})"
            )

    def _owner(self, name: str, row: int) -> str:
        """Whose value a row of a column is, for messages."""
        if name in SUM_OF_ITEMS:
            row = int(np.searchsorted(self.item_offsets, row, side="right")) - 1
        elif name not in COUNT_COLUMNS:
            return f" in row {row}"
        return f" of sample {int(self.sample_ids[row])}"

    def _items_from_sums(self) -> None:
        """One item per sample that has patches: the least that sums can say."""
        some = np.flatnonzero(self.patches)
        offsets = np.zeros(len(self.sample_ids) + 1, dtype=np.int64)
        np.cumsum(self.patches > 0, out=offsets[1:])
        object.__setattr__(self, "item_offsets", offsets)
        for name, total in SUM_OF_ITEMS.items():
            object.__setattr__(self, name, getattr(self, total)[some])

    def _check_items(self, *, derived: bool) -> None:
        num_samples, num_items = len(self.sample_ids), self._length_of("item_patches", "k")
        self._set("item_offsets", num_samples + 1)
        offsets = self.item_offsets
        if int(offsets[0]) != 0 or int(offsets[-1]) != num_items or (offsets[1:] < offsets[:-1]).any():
            raise PlanError(f"item_offsets do not cut {num_items} items into {num_samples} samples")
        for name in SUM_OF_ITEMS:
            self._set(name, num_items)
        if derived:
            return
        for name, total in SUM_OF_ITEMS.items():
            wrong = np.flatnonzero(sum_of_items(getattr(self, name), self.item_offsets) != getattr(self, total))
            if len(wrong):
                raise PlanError(
                    f"{name} of sample {int(self.sample_ids[wrong[0]])} do not add up to its {total}; rebuild the index"
                )

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def num_media(self) -> int:
        """k, rows of the item table."""
        return len(self.item_patches)

    def item_rows(self) -> Int64Array:
        """Row of the sample of every media item, int64 [k]."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.item_offsets))

    def sum_of_items(self, column: Int64Array) -> Int64Array:
        """Sums of a column of the item table, int64 [k], over the items of every sample, int64 [n]."""
        return sum_of_items(column, self.item_offsets)

    def longest_of_items(self, column: Int64Array) -> Int64Array:
        """Largest of the items of every sample, int64 [n]; 0 where it has none."""
        largest = np.zeros(len(self), dtype=np.int64)
        some = np.flatnonzero(np.diff(self.item_offsets))
        if len(some):
            largest[some] = np.maximum.reduceat(column, self.item_offsets[some])
        return largest

    @classmethod
    def from_index(cls, index: IndexLike, sample_ids: ArrayLike | Sequence[int]) -> "StepCounts":
        """Counts of `sample_ids` (int64 [n]), gathered without reading the rest of the index."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(index)):
            outside = ids[(ids < 0) | (ids >= len(index))].tolist()
            raise PlanError(f"samples {outside} are not rows of an index of {len(index)} samples; rebuild the index")
        columns = {name: np.asarray(index.samples[name][ids], dtype=np.int64) for name in SAMPLE_COLUMNS}
        items = _items(index, ids)
        sums = {name: sum_of_items(items[_ITEM_OF[name]], items["item_offsets"]) for name in ITEM_COLUMNS}
        return cls(sample_ids=ids, **columns, **sums, **items)


def _array_of(name: str, values: object) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:  # lists of unequal length
        raise PlanError(f"counts column {name} is no column of numbers: {error}") from None


def sum_of_items(column: Int64Array, offsets: Int64Array) -> Int64Array:
    """Sums over the items of every sample: column int64 [k], offsets int64 [n + 1] -> int64 [n]."""
    running = np.zeros(len(column) + 1, dtype=np.int64)
    np.cumsum(column, out=running[1:])
    return running[offsets[1:]] - running[offsets[:-1]]


def _items(index: IndexLike, ids: Int64Array) -> dict[str, Int64Array]:
    """The item table of `ids`: gathers their items only."""
    first = np.asarray(index.item_offsets[ids], dtype=np.int64)
    num_items = np.asarray(index.item_offsets[ids + 1], dtype=np.int64) - first
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum(num_items, out=offsets[1:])
    rows = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], num_items)
    table = {name: np.asarray(index.items[source][rows], dtype=np.int64) for name, source in SUM_OF_ITEMS.items()}
    return {"item_offsets": offsets, **table}
