"""What packing and partitioning return: frozen records of read-only arrays, always with a bound on the optimum."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from packing.errors import PackingError
from packing.inputs import MAX_TOTAL, IntArray, PartArray


def _freeze_arrays(record: object) -> None:
    for field in fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            value.setflags(write=False)


def _summary(result: "PackResult | PartitionResult | GridResult", **counts: int) -> str:
    """One line without the arrays."""
    shown = [f"{name}={value}" for name, value in counts.items()]
    shown += [f"lower_bound={result.lower_bound}", f"gap={result.gap:.3g}", f"algorithm={result.algorithm!r}"]
    return f"{type(result).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackResult:
    """Bins for n items in d dimensions.

    Attributes:
        bin_of: int32 [n], the bin of each item.
        num_bins: number of bins B. None is empty, except where a multiple was asked for and n is smaller.
        load: int64 [B, d], used size of each bin.
        order: int64 [n], items grouped by bin, ascending item index inside a bin.
        offsets: int64 [B + 1]; the items of bin b are order[offsets[b]:offsets[b + 1]].
        fill: float64 [d], used over available capacity; 0 when there is no bin.
        lower_bound: bins that any packing needs (rounded up to the multiple asked for).
        gap: num_bins / lower_bound - 1; 0 is proven optimal.
        algorithm: name of the algorithm that produced it.
    """

    bin_of: PartArray
    num_bins: int
    load: IntArray
    order: IntArray
    offsets: IntArray
    fill: npt.NDArray[np.float64]
    lower_bound: int
    gap: float
    algorithm: str

    def __post_init__(self) -> None:
        _freeze_arrays(self)

    def __repr__(self) -> str:
        return _summary(self, items=self.bin_of.shape[0], bins=self.num_bins)

    def items(self, bin_index: int) -> IntArray:
        """Item indices of one bin, ascending.

        Raises:
            IndexError: no such bin; negative indices do not count from the end.
        """
        if not 0 <= bin_index < self.num_bins:
            raise IndexError(f"bin {bin_index} does not exist; the {self.num_bins} bins are numbered from 0")
        return self.order[self.offsets[bin_index] : self.offsets[bin_index + 1]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionResult:
    """n items in k parts under S stage costs.

    Attributes:
        part_of: int32 [n], the part of each item.
        load: int64 [k, S], summed weight of each part and stage.
        makespan: the largest entry of `load`; with `stage_norm="sum"` the largest sum of a part's entries.
        lower_bound: no partition has a smaller makespan than this.
        gap: makespan / lower_bound - 1; 0 is proven optimal.
        algorithm: name of the algorithm that produced it.
    """

    part_of: PartArray
    load: IntArray
    makespan: int
    lower_bound: int
    gap: float
    algorithm: str

    def __post_init__(self) -> None:
        _freeze_arrays(self)

    def __repr__(self) -> str:
        return _summary(self, items=self.part_of.shape[0], parts=self.load.shape[0], makespan=self.makespan)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GridResult:
    """n items on R ranks x M slots under S stage costs.

    Attributes:
        rank_of, slot_of: int32 [n], where each item goes.
        load: int64 [R, M, S], summed weight of each cell and stage.
        makespan: the objective: with "per_rank" the largest over ranks and stages of the sum over slots, with
            "per_slot" the sum over slots of the largest over ranks and stages.
        lower_bound: no assignment has a smaller objective than this.
        gap: makespan / lower_bound - 1; 0 is proven optimal.
        algorithm: name of the algorithm that produced it.
        objective: "per_rank" or "per_slot".
    """

    rank_of: PartArray
    slot_of: PartArray
    load: IntArray
    makespan: int
    lower_bound: int
    gap: float
    algorithm: str
    objective: str

    def __post_init__(self) -> None:
        _freeze_arrays(self)

    def __repr__(self) -> str:
        ranks, slots, _ = self.load.shape
        return _summary(self, items=self.rank_of.shape[0], ranks=ranks, slots=slots, makespan=self.makespan)

    @property
    def cell_of(self) -> PartArray:
        """int32 [n], rank * M + slot."""
        return self.rank_of * np.int32(self.load.shape[1]) + self.slot_of

    @property
    def rank_ratio(self) -> float:
        """Largest total of a rank, over ranks and stages, by the mean rank of the busiest stage.

        What an uneven grid costs ranks that meet once a step: 1 is even, and so is a grid without weight.
        """
        mean = self._mean_total()
        return int(self.load.sum(axis=1).max()) / mean if mean else 1.0

    @property
    def sync_ratio(self) -> float:
        """Sum over slots of the slowest rank, over ranks and stages, by the mean rank of the busiest stage.

        What an uneven grid costs ranks that meet in every slot; at least `rank_ratio`.
        """
        mean = self._mean_total()
        return int(self.load.max(axis=(0, 2)).sum()) / mean if mean else 1.0

    def _mean_total(self) -> float:
        """Mean over ranks of their totals in the stage with the largest total."""
        total = int(self.load.sum(axis=(0, 1)).max())
        return total / int(self.load.shape[0])


def stop_at(lower_bound: int, target_gap: float) -> int:
    """Value at which a search may stop.

    Raises:
        PackingError: a gap below 0, or not a number.
    """
    is_number = isinstance(target_gap, (int, float, np.integer, np.floating)) and not isinstance(target_gap, bool)
    if not is_number or not 0 <= target_gap < 2**20:
        raise PackingError(f"target_gap is {target_gap!r}; give a relative distance of at least 0, such as 0.001")
    return min(lower_bound + int(lower_bound * float(target_gap)), MAX_TOTAL)


def gap_to(value: int, lower_bound: int) -> float:
    """Relative distance to a lower bound; 0 where both are 0."""
    return value / lower_bound - 1.0 if lower_bound else 0.0
