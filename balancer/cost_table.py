"""Costs of samples that did not come out of a scan, as an index that selection and planning can read (`SelectIndex`).

    columns [n] of the caller       --table_of-->    CostTable      one media item per sample that has patches
    index, rows [k]                 --taken-->       CostTable      those rows, in that order, repeats allowed
    several indices                 --joined-->      CostTable      one behind the other
    any of them, times [n, 2]       --with_times-->  CostTable      limits and labels as before, times as given

Times that a caller knows are carried where a cost model finds them: in the two sums of squares, full for the encoder,
windowed for the LLM. No capacity limits these columns, so limits stay in tokens and patches while `AS_GIVEN` reads
nanoseconds out of them, one per unit. Price: with `with_times`, a sample is one media item whatever it holds, so an
encoder with a placement of its own cannot move items of a sample apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import COUNT_COLUMNS, SAMPLE_COLUMNS, SUM_OF_ITEMS, Int64Array, StepCounts
from balancer.plan import digest_fields
from balancer.select import SelectIndex
from dataloaders.index import Confidence

AS_GIVEN = CostModel(
    stages=(
        StageCost(forward=StageTerms(per_full_sq_ns=1.0), backward=StageTerms()),
        StageCost(forward=StageTerms(per_window_sq_ns=1.0), backward=StageTerms()),
    ),
    note="times as the caller gave them, in the caller's unit",
)
_ITEM_COLUMNS = tuple(SUM_OF_ITEMS.values())
_READ_COLUMNS = (*SAMPLE_COLUMNS, "confidence")
NameOf = Callable[[int], tuple[object, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableRow:
    """A row that nothing can be loaded from."""

    sample_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """A `SelectIndex` of columns in memory.

    Attributes:
        samples: `SAMPLE_COLUMNS` and `confidence`, [n] each.
        items: patches, visual_tokens, full_total_sq, window_total_sq of every media item, [k] each.
        item_offsets: int64 [n + 1].
        shard_numbers: int [n].
        bad: unusable rows, ascending.
        name_of: row -> (shard, key), for messages.
    """

    samples: Mapping[str, NDArray[Any]]
    items: Mapping[str, NDArray[Any]]
    item_offsets: Int64Array
    shard_numbers: NDArray[Any]
    bad: Sequence[UnusableRow]
    name_of: NameOf

    def __len__(self) -> int:
        return len(self.item_offsets) - 1

    def keys(self, i: int) -> object:
        """Name of sample i."""
        return self.name_of(int(i))[1]

    def shard(self, i: int) -> object:
        """Shard of sample i."""
        return self.name_of(int(i))[0]

    @property
    def fingerprint(self) -> str:
        """Hex digest of all numbers; equal for equal costs, wherever they came from. Reads every column once."""
        samples = {name: np.asarray(self.samples[name]) for name in _READ_COLUMNS}
        items = {f"item {name}": np.asarray(self.items[name]) for name in _ITEM_COLUMNS}
        return digest_fields({**samples, **items, "item_offsets": self.item_offsets})


def table_of(columns: Mapping[str, NDArray[Any]], num_samples: int) -> CostTable:
    """The table of columns [n] named as in `StepCounts`; those that are absent are 0.

    A sample with patches counts as one media item where `num_items` is not given.

    Raises:
        PlanError: columns of another length, numbers that are not whole or negative, more labels than tokens.
    """
    nothing = np.zeros(num_samples, dtype=np.int64)
    given = {name: columns.get(name, nothing) for name in COUNT_COLUMNS}
    if "num_items" not in columns:
        given["num_items"] = (np.asarray(given["patches"]) > 0).astype(np.int64)
    counts = StepCounts(sample_ids=np.arange(num_samples), **given)
    return CostTable(
        samples={name: getattr(counts, name) for name in SAMPLE_COLUMNS} | _all_usable(num_samples),
        items={column: getattr(counts, name) for name, column in SUM_OF_ITEMS.items()},
        item_offsets=counts.item_offsets,
        shard_numbers=np.broadcast_to(np.int32(0), (num_samples,)),
        bad=(),
        name_of=_in_dataset,
    )


def taken(index: SelectIndex, rows: Int64Array) -> CostTable:
    """Rows `rows` (int64 [k], each in [0, n), repeats allowed) of an index as a table."""
    first = np.asarray(index.item_offsets[rows], dtype=np.int64)
    num_items = np.asarray(index.item_offsets[rows + 1], dtype=np.int64) - first
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(num_items, out=offsets[1:])
    item_rows = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], num_items)
    reasons = {int(bad.sample_id): str(bad.reason) for bad in index.bad}
    unusable = np.flatnonzero(np.isin(rows, list(reasons))) if reasons else ()
    return CostTable(
        samples={name: np.asarray(index.samples[name][rows]) for name in _READ_COLUMNS},
        items={name: np.asarray(index.items[name][item_rows]) for name in _ITEM_COLUMNS},
        item_offsets=offsets,
        shard_numbers=np.asarray(index.shard_numbers[rows]),
        bad=[UnusableRow(sample_id=int(at), reason=reasons[int(rows[at])]) for at in unusable],
        name_of=lambda i: _name(index, int(rows[i])),
    )


def joined(parts: Sequence[SelectIndex]) -> CostTable:
    """Indices one behind the other; at least one. Shards of two of them never share a number."""
    starts = np.cumsum([0, *(len(part) for part in parts)])
    offsets, numbers = [np.zeros(1, dtype=np.int64)], []
    first = 0
    for part in parts:
        offsets.append(np.asarray(part.item_offsets[1:], dtype=np.int64) + offsets[-1][-1])
        own = np.asarray(part.shard_numbers, dtype=np.int64)
        numbers.append(own + first)
        first += int(own.max(initial=-1)) + 1

    def name_of(i: int) -> tuple[object, object]:
        number = int(np.searchsorted(starts, i, side="right")) - 1
        return _name(parts[number], i - int(starts[number]))

    return CostTable(
        samples={name: np.concatenate([np.asarray(part.samples[name]) for part in parts]) for name in _READ_COLUMNS},
        items={name: np.concatenate([np.asarray(part.items[name]) for part in parts]) for name in _ITEM_COLUMNS},
        item_offsets=np.concatenate(offsets),
        shard_numbers=np.concatenate(numbers),
        bad=[
            UnusableRow(sample_id=int(start) + int(bad.sample_id), reason=str(bad.reason))
            for part, start in zip(parts, starts, strict=False)
            for bad in part.bad
        ],
        name_of=name_of,
    )


def with_times(index: SelectIndex, times: Int64Array) -> CostTable:
    """The same samples with times int64 [n, 2] (encoder, LLM) for `AS_GIVEN`.

    No encoder runs for a sample without patches; what the caller says that it takes there counts as the LLM's.
    """
    patches = np.asarray(index.samples["patches"])
    encoder = np.where(patches > 0, times[:, 0], 0)
    return CostTable(
        samples=index.samples,
        items={
            "patches": patches,
            "visual_tokens": np.asarray(index.samples["visual_tokens"]),
            "full_total_sq": encoder,
            "window_total_sq": times.sum(axis=1) - encoder,
        },
        item_offsets=np.arange(len(index) + 1, dtype=np.int64),
        shard_numbers=index.shard_numbers,
        bad=[UnusableRow(sample_id=int(bad.sample_id), reason=str(bad.reason)) for bad in index.bad],
        name_of=lambda i: _name(index, i),
    )


def _all_usable(num_samples: int) -> dict[str, NDArray[Any]]:
    return {"confidence": np.broadcast_to(np.int8(Confidence.COUNTED), (num_samples,))}


def _in_dataset(i: int) -> tuple[object, object]:
    return "dataset", i


def _name(index: SelectIndex, i: int) -> tuple[object, object]:
    return index.shard(i), index.keys(i)
