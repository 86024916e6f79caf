"""The indices of several sources seen as one, without a copy: the costs of a mixture.

    captions/ (mapped)  1,000 rows  --+
                                      +-->  IndexConcat  1,250 rows, ids as in `MixtureSource`
    pages/    (mapped)    250 rows  --+

Each part keeps the files it was built with, and is built again alone. What asks for rows (planning a step, loading a
sample) is answered by the mapped column of the part; what works on a whole column (`index.samples["patches"].sum()`)
joins it for that moment. Workers receive the parts by reference, so all processes of a host share one page cache.

Price: a row costs a binary search more than in one index; `item_offsets` and, where reasons are numbered differently,
the column `reason` are held in memory: 8 and 2 bytes per sample.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from dataloaders import index_format as form
from dataloaders.duck_column import DuckColumn
from dataloaders.errors import IndexFormatError
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, BadSample, CostIndex, foreign
from dataloaders.index_format import Column, ShardRows
from dataloaders.mixture_source import id_ranges, mixture_fingerprint

_NAMES = pa.schema([("shard", pa.string()), ("key", pa.string())])


class IndexConcat(CostIndex):
    """A `CostIndex` over the samples of all parts, in order.

    Args:
        parts: name -> index, in the order of `MixtureSource.parts`; counted by the same rules and options.

    Attributes:
        parts: as given.
        ranges: name -> rows of its samples.
        key: that of the parts, with the fingerprint of the `MixtureSource` as `source`.

    Raises:
        IndexFormatError: no part, a part that is itself an unmerged part of a source, or parts that were counted
            differently: every difference is named.
    """

    def __init__(self, parts: Mapping[str, CostIndex]) -> None:
        _check_same_rules(parts)
        self.parts = dict(parts)
        self.ranges = id_ranges({name: len(index) for name, index in self.parts.items()})
        pieces = list(self.parts.values())
        reasons = tuple(dict.fromkeys(["", *(reason for piece in pieces for reason in piece.reasons)]))
        self._part_names, self._pieces = list(self.parts), pieces
        self._sample_starts = [ids.start for ids in self.ranges.values()]
        self._item_starts = _starts([len(piece.items["kind"]) for piece in pieces])
        super().__init__(
            key=replace(pieces[0].key, source=mixture_fingerprint(piece.key.source for piece in pieces)),
            samples={},
            items={},
            names=None,
            bad=(),
            reasons=reasons,
            rules=pieces[0].rules,
            fingerprint=hashlib.sha256("\n".join(["concat", *(p.fingerprint for p in pieces)]).encode()).hexdigest(),
        )
        # Duck arrays: all that reads an index does so by rows or through NumPy's functions.
        self.samples = _JoinedColumns(SAMPLE_COLUMNS, lambda name: [_sample_column(p, name, reasons) for p in pieces])
        self.items = _JoinedColumns(ITEM_COLUMNS, lambda name: [piece.items[name] for piece in pieces])

    def __len__(self) -> int:
        return self.ranges[next(reversed(self.ranges))].stop

    def __repr__(self) -> str:
        return f"IndexConcat({', '.join(f'{name}: {index!r}' for name, index in self.parts.items())})"

    @cached_property
    def item_offsets(self) -> NDArray[np.int64]:
        """int64 [num_samples + 1]: items of sample i are rows item_offsets[i] to item_offsets[i + 1]."""
        # Not from the parts' own offsets, which would stay in memory beside these.
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        for (name, piece), ids, start in zip(self.parts.items(), self.ranges.values(), self._item_starts, strict=True):
            own = offsets[ids.start + 1 : ids.stop + 1]
            np.cumsum(piece.samples["num_items"], out=own)
            found, expected = int(own[-1]) if len(own) else 0, len(piece.items["kind"])
            if found != expected:
                raise IndexFormatError(
                    f"the samples of {name!r} name {found} items, but there are {expected}",
                    place=str(piece.folder or "index"),
                    remedy=form.AGAIN,
                )
            own += start
        return form.read_only(offsets, np.int64)

    @cached_property
    def names(self) -> pa.Table:
        """Table with `shard` and `key` of every sample."""
        return pa.concat_tables([piece.names.cast(_NAMES) for piece in self.parts.values()])

    @cached_property
    def bad(self) -> list[BadSample]:
        """Unusable samples, ascending; their places begin with the name of the part."""
        return [
            replace(bad, sample_id=bad.sample_id + ids.start, place=f"{name}: {bad.place}")
            for (name, piece), ids in zip(self.parts.items(), self.ranges.values(), strict=True)
            for bad in piece.bad
        ]

    @cached_property
    def shards(self) -> tuple[ShardRows, ...]:
        """Shards of all parts, in order."""
        return tuple(shard for piece in self.parts.values() for shard in piece.shards)

    @cached_property
    def shard_numbers(self) -> NDArray[np.int32]:
        """int32 [num_samples]: number of the shard of every sample; shards of two parts never share one."""
        numbers, first = [], 0
        for piece in self.parts.values():
            own = piece.shard_numbers
            numbers.append(own + np.int32(first))
            first += int(own.max(initial=-1)) + 1
        return form.read_only(np.concatenate(numbers), np.int32)

    def keys(self, i: int) -> str:
        """Key of sample `i` in its shard."""
        _, piece, row = self.locate(i)
        return piece.keys(row)

    def shard(self, i: int) -> str:
        """Shard of sample `i`."""
        _, piece, row = self.locate(i)
        return piece.shard(row)

    def locate(self, i: int) -> tuple[str, CostIndex, int]:
        """(name, index, row there) of sample `i`.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} is not among the {len(self)} of this mixture")
        number = bisect_right(self._sample_starts, i) - 1
        return self._part_names[number], self._pieces[number], i - self._sample_starts[number]

    def source_of(self, row: int) -> tuple[int, float, float]:
        """(frames, frames per second, duration in s) of the file of item `row`; (1, 0, 0) for an image."""
        number = bisect_right(self._item_starts, row) - 1
        return self._pieces[number].source_of(row - self._item_starts[number])

    def __reduce__(self) -> tuple[Any, ...]:
        # Parts that were written travel as the names of their folders.
        return (IndexConcat, (self.parts,))


class _Joined(DuckColumn):
    """Arrays one behind another that read as one, [sum of lengths]; read-only."""

    def __init__(self, pieces: Sequence[Column], dtype: DTypeLike) -> None:
        self._pieces = [form.read_only(piece, np.dtype(dtype)) for piece in pieces]
        self._starts = _starts([len(piece) for piece in pieces])
        super().__init__(dtype, self._starts[-1] + len(pieces[-1]))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Column:
        if copy is False and len(self._pieces) > 1:
            raise ValueError("the column of a mixture cannot be had without a copy: it lies in several files")
        return super().__array__(dtype, None)

    def __iter__(self) -> Iterator[Any]:
        for piece in self._pieces:
            yield from piece

    def _row(self, row: int) -> Any:
        number = bisect_right(self._starts, row) - 1
        return self._pieces[number][row - self._starts[number]]

    def _slice(self, start: int, stop: int) -> Column:
        found = [
            piece[max(start - first, 0) : max(stop - first, 0)]
            for piece, first in zip(self._pieces, self._starts, strict=True)
            if start < first + len(piece) and first < stop
        ]
        if len(found) == 1:
            return found[0]
        return form.read_only(np.concatenate([np.zeros(0, self.dtype), *found]), self.dtype)

    def _gather(self, rows: NDArray[np.int64]) -> Column:
        numbers = np.searchsorted(np.asarray(self._starts, dtype=np.int64), rows, side="right") - 1
        gathered = np.empty(len(rows), dtype=self.dtype)
        for number in np.unique(numbers).tolist():
            own = numbers == number
            gathered[own] = self._pieces[number][rows[own] - self._starts[number]]
        return gathered


class _JoinedColumns(Mapping[str, Column]):
    """Columns by name, each joined from the pieces when it is first asked for."""

    def __init__(self, dtypes: Mapping[str, DTypeLike], pieces: Callable[[str], Sequence[Column]]) -> None:
        self._dtypes, self._pieces = dtypes, pieces
        self._made: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        if name not in self._made:
            if name not in self._dtypes:
                raise KeyError(f"no column {name!r}; there are {', '.join(self._dtypes)}")
            self._made[name] = cast(Column, _Joined(self._pieces(name), self._dtypes[name]))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)


def _sample_column(piece: CostIndex, name: str, reasons: Sequence[str]) -> Column:
    column = piece.samples[name]
    if name != "reason" or piece.reasons == tuple(reasons[: len(piece.reasons)]):
        return column
    new = np.array([reasons.index(reason) for reason in piece.reasons], dtype=SAMPLE_COLUMNS["reason"])
    return np.asarray(new[column])


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(np.asarray(lengths[:-1], dtype=np.int64)).tolist()]


def _check_same_rules(parts: Mapping[str, CostIndex]) -> None:
    if not parts:
        raise IndexFormatError("a mixture without parts", remedy="Name at least one index.")
    unmerged = [name for name, index in parts.items() if index.part is not None]
    if unmerged:
        raise IndexFormatError(
            f"the index of {unmerged[0]!r} is part {parts[unmerged[0]].part} of a source, not the whole",
            place=str(parts[unmerged[0]].folder or "index"),
            remedy="Merge its parts first: balancer-analyze merge.",
        )
    first_name, first = next(iter(parts.items()))
    for name, index in parts.items():
        differing = index.key.differences(first.key, but=("source",), rules=index.rules, expected_rules=first.rules)
        if differing:
            raise foreign(
                str(index.folder or "index in memory"),
                [f"{text} as in {first_name!r}" for text in differing],
                f"Parts of a mixture are counted alike: build the index of {name!r} or of {first_name!r} again.",
            )
