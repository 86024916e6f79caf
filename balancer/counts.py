"""What the samples of one step cost, as integer columns: the planner's only view of the data.

    CostIndex (all samples, memory-mapped)  --from_index(sample_ids)-->  StepCounts (n rows)

Every column is int64 [n] and read-only. Quadratic columns are sums over attention *segments* (windows, frames), so
adding up the rows of a pack gives the exact count of the pack: nothing attends across samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.errors import PlanError

Int64Array = NDArray[np.int64]

SAMPLE_COLUMNS = ("llm_tokens", "label_tokens", "visual_tokens", "patches", "num_items")
ITEM_COLUMNS = ("full_total_sq", "window_total_sq")
COUNT_COLUMNS = SAMPLE_COLUMNS + ITEM_COLUMNS


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
        visual_tokens: positions that receive a visual embedding.
        patches: vision-tower tokens before merging.
        num_items: media items.
        full_total_sq: sum over full-attention segments of length squared, in patches^2.
        window_total_sq: the same over window-attention segments.

    Raises:
        PlanError: columns of unequal length, a negative count, or a sample that is listed twice.
    """

    sample_ids: Int64Array
    llm_tokens: Int64Array
    label_tokens: Int64Array
    visual_tokens: Int64Array
    patches: Int64Array
    num_items: Int64Array
    full_total_sq: Int64Array
    window_total_sq: Int64Array

    def __post_init__(self) -> None:
        num_samples = len(self.sample_ids)
        for name in ("sample_ids", *COUNT_COLUMNS):
            column = np.array(getattr(self, name), dtype=np.int64)
            if column.shape != (num_samples,):
                raise PlanError(f"counts column {name} has shape {column.shape}; expected ({num_samples},)")
            if num_samples and int(column.min()) < 0:
                row = int(column.argmin())
                raise PlanError(f"{name}={int(column[row])} of sample {int(self.sample_ids[row])} is negative")
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        ids, times = np.unique(self.sample_ids, return_counts=True)
        if len(ids) != num_samples:
            twice = ids[times > 1].tolist()
            raise PlanError(f"samples {twice} are listed more than once in one step; a step holds a sample once")

    def __len__(self) -> int:
        return len(self.sample_ids)

    @classmethod
    def from_index(cls, index: IndexLike, sample_ids: ArrayLike | Sequence[int]) -> "StepCounts":
        """Counts of `sample_ids` (int64 [n]), gathered without reading the rest of the index."""
        ids = np.asarray(sample_ids, dtype=np.int64)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= len(index)):
            outside = ids[(ids < 0) | (ids >= len(index))].tolist()
            raise PlanError(f"samples {outside} are not rows of an index of {len(index)} samples; rebuild the index")
        columns = {name: np.asarray(index.samples[name][ids], dtype=np.int64) for name in SAMPLE_COLUMNS}
        return cls(sample_ids=ids, **columns, **_item_sums(index, ids))


def _item_sums(index: IndexLike, ids: Int64Array) -> dict[str, Int64Array]:
    """Sums of item columns per sample: gathers the items of `ids` only, then differences a running sum."""
    first = np.asarray(index.item_offsets[ids], dtype=np.int64)
    num_items = np.asarray(index.item_offsets[ids + 1], dtype=np.int64) - first
    stops = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_items)])
    rows = np.arange(stops[-1]) + np.repeat(first - stops[:-1], num_items)
    sums: dict[str, Int64Array] = {}
    for name in ITEM_COLUMNS:
        gathered = np.asarray(index.items[name][rows], dtype=np.int64)
        running = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(gathered)])
        sums[name] = running[stops[1:]] - running[stops[:-1]]
    return sums
