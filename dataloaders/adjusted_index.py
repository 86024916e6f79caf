"""A cost index in which some samples are adjusted so that they fit, without a copy of the others.

    CostIndex (mapped)   rows of millions of samples      --+
                                                            +--> AdjustedIndex: same samples, other counts in k rows
    k adjusted samples   sample rows, item rows, limits   --+

Whoever reads costs (planning, the loader's memory, stand-ins, loading) reads the adjusted ones and needs no word about
it; loading asks `adjustment(i)` for what the numbers do not say: where text is cut, which frames are taken.

Price: asking for rows costs a binary search among the changed ones; what works on a whole column
(`index.samples["patches"].sum()`) copies it for that moment.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataloaders import index_format as form
from dataloaders.adjustment import Adjustment
from dataloaders.duck_column import DuckColumn
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, BadSample, CostIndex
from dataloaders.index_format import Column, ShardRows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdjustedRows:
    """Values of some rows of a table.

    Attributes:
        rows: int64 [k], ascending.
        columns: name -> new values [k], of the columns that change.
    """

    rows: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.int64]]


class AdjustedIndex(CostIndex):
    """A `CostIndex` with other counts for some samples.

    Args:
        base: the index as scanned, or a concatenation of several.
        adjustments: sample -> what is done to it.
        sample_rows, item_rows: their counts.

    Attributes:
        base: as given.
        adjustments: as given.
        changed: `samples` and `items` -> their adjusted rows.
        fingerprint: of the base and of everything that is changed.
    """

    def __init__(
        self,
        base: CostIndex,
        adjustments: Mapping[int, Adjustment],
        *,
        sample_rows: AdjustedRows,
        item_rows: AdjustedRows,
    ) -> None:
        self.base, self.adjustments = base, dict(adjustments)
        self.changed = {"samples": sample_rows, "items": item_rows}
        super().__init__(
            key=base.key,
            samples={},
            items={},
            names=None,
            bad=(),
            reasons=base.reasons,
            rules=base.rules,
            part=base.part,
            fingerprint=_fingerprint(base, self.adjustments, self.changed),
        )
        self.samples = _AdjustedColumns(SAMPLE_COLUMNS, base.samples, sample_rows)
        self.items = _AdjustedColumns(ITEM_COLUMNS, base.items, item_rows)

    def __len__(self) -> int:
        return len(self.base)

    def __repr__(self) -> str:
        return f"AdjustedIndex({len(self.adjustments)} samples adjusted of {self.base!r})"

    def adjustment(self, i: int) -> Adjustment | None:
        """What is done to sample `i`."""
        return self.adjustments.get(i)

    @cached_property
    def item_offsets(self) -> NDArray[np.int64]:
        """int64 [num_samples + 1]: no sample gains or loses a medium."""
        return self.base.item_offsets

    @cached_property
    def names(self) -> pa.Table:
        """Table with `shard` and `key` of every sample."""
        return self.base.names

    @cached_property
    def bad(self) -> list[BadSample]:
        """Unusable samples, ascending."""
        return self.base.bad

    @cached_property
    def shards(self) -> tuple[ShardRows, ...]:
        """Shards that were scanned, in order."""
        return self.base.shards

    @cached_property
    def shard_numbers(self) -> NDArray[np.int32]:
        """int32 [num_samples]: number of the shard of every sample."""
        return self.base.shard_numbers

    def keys(self, i: int) -> str:
        """Key of sample `i` in its shard."""
        return self.base.keys(i)

    def shard(self, i: int) -> str:
        """Shard of sample `i`."""
        return self.base.shard(i)

    def source_of(self, row: int) -> tuple[int, float, float]:
        """(frames, frames per second, duration in s) of the file of item `row`, which stays what it is."""
        return self.base.source_of(row)

    def __reduce__(self) -> tuple[Any, ...]:
        # The base travels as the name of its folder.
        return (_rebuilt, (self.base, self.adjustments, self.changed["samples"], self.changed["items"]))


def _rebuilt(
    base: CostIndex, adjustments: Mapping[int, Adjustment], sample_rows: AdjustedRows, item_rows: AdjustedRows
) -> AdjustedIndex:
    return AdjustedIndex(base, adjustments, sample_rows=sample_rows, item_rows=item_rows)


class _Adjusted(DuckColumn):
    """A column with other values in some rows, [n]; read-only."""

    def __init__(self, base: Column, rows: NDArray[np.int64], values: Column) -> None:
        super().__init__(base.dtype, len(base))
        self._base, self._changed, self._values = base, rows, values

    def _row(self, row: int) -> Any:
        at = int(np.searchsorted(self._changed, row))
        if at < len(self._changed) and self._changed[at] == row:
            return self._values[at]
        return self._base[row]

    def _slice(self, start: int, stop: int) -> Column:
        first, last = np.searchsorted(self._changed, [start, stop]).tolist()
        if first >= last:
            return self._base[start:stop]
        part = np.array(self._base[start:stop])
        part[self._changed[first:last] - start] = self._values[first:last]
        return form.read_only(part, self.dtype)

    def _gather(self, rows: NDArray[np.int64]) -> Column:
        gathered = np.array(self._base[rows])
        at = np.minimum(np.searchsorted(self._changed, rows), len(self._changed) - 1)
        changed = self._changed[at] == rows
        gathered[changed] = self._values[at[changed]]
        return gathered


class _AdjustedColumns(Mapping[str, Column]):
    """Columns by name: those of the base, or over it where something changes."""

    def __init__(self, dtypes: Mapping[str, Any], base: Mapping[str, Column], adjusted: AdjustedRows) -> None:
        self._dtypes, self._base, self._adjusted = dtypes, base, adjusted
        self._made: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        if name not in self._adjusted.columns or not len(self._adjusted.rows):
            return self._base[name]
        if name not in self._made:
            values = self._adjusted.columns[name].astype(self._dtypes[name])
            self._made[name] = cast(Column, _Adjusted(self._base[name], self._adjusted.rows, values))
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)


def _fingerprint(base: CostIndex, adjustments: Mapping[int, Adjustment], tables: Mapping[str, AdjustedRows]) -> str:
    said = {str(i): asdict(adjustment) for i, adjustment in adjustments.items()}
    digest = hashlib.sha256(json.dumps(["adjusted", base.fingerprint, said], sort_keys=True).encode())
    for name, table in tables.items():
        digest.update(name.encode() + np.ascontiguousarray(table.rows, dtype="<i8").tobytes())
        for column, values in sorted(table.columns.items()):
            digest.update(column.encode() + np.ascontiguousarray(values, dtype="<i8").tobytes())
    return digest.hexdigest()
