"""What every placement policy gets and gives.

    PlacementProblem: n samples, times [n, S], sizes [n, d]  --place-->  Placement: (dp_rank, microbatch, slot) [n]

A policy is a pure function of the problem. Capacities are hard; the number of micro-batches is given, or the least
that the policy finds room for, and is the same on every DP rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.schedule import Schedule, build_schedule
from balancer.simulate import makespans_ns

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Where each sample goes: arrays [n] aligned with the counts; `slot` is the place inside the cell.

    `num_microbatches` is M of every rank; a cell (rank, micro-batch) may be empty.
    """

    dp_rank: Int32Array
    microbatch: Int32Array
    slot: Int32Array
    num_microbatches: int

    @classmethod
    def from_cells(cls, dp_rank: Int64Array, microbatch: Int64Array, num_microbatches: int) -> "Placement":
        """Placement whose slots follow the order of the samples."""
        cell = dp_rank.astype(np.int64) * num_microbatches + microbatch
        order = np.argsort(cell, kind="stable")
        first = np.searchsorted(cell[order], cell[order], side="left")
        slot = np.empty(len(cell), dtype=np.int32)
        slot[order] = np.arange(len(cell)) - first
        return cls(
            dp_rank=dp_rank.astype(np.int32),
            microbatch=microbatch.astype(np.int32),
            slot=slot,
            num_microbatches=num_microbatches,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellTimes:
    """Times of the cells of a placement: forward and backward int64 [R, M, S], present bool [R, M, S]."""

    forward_ns: Int64Array
    backward_ns: Int64Array
    present: NDArray[np.bool_]

    def reordered(self, order: Int64Array) -> "CellTimes":
        """The same with other orders of the micro-batches: order int64 [..., R, M] gives times [..., R, M, S]."""
        rank = np.arange(order.shape[-2])[:, np.newaxis]  # [R, 1], broadcast against [..., R, M]
        return CellTimes(
            forward_ns=self.forward_ns[rank, order],
            backward_ns=self.backward_ns[rank, order],
            present=self.present[rank, order],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementProblem:
    """One step to be placed.

    Attributes:
        counts: the selected samples.
        forward_ns, backward_ns: int64 [n, S], per sample.
        forward_constant_ns, backward_constant_ns: int64 [S], per micro-batch that runs the stage.
        dp_size: replicas R.
        stage_ranks: pipeline rank of every stage, [S].
        schedule: name of the pipeline schedule.
        sizes: int64 [n, d] in the units of the capacities.
        capacity: hard limit of a cell per unit, [d], and `capacity_names` their names.
        num_microbatches: M, or None for the least that fits.
        min_num_microbatches, num_microbatches_multiple: floor and granularity of M where it is free.
    """

    counts: StepCounts
    forward_ns: Int64Array
    backward_ns: Int64Array
    forward_constant_ns: Int64Array
    backward_constant_ns: Int64Array
    dp_size: int
    stage_ranks: tuple[int, ...]
    schedule: str
    sizes: Int64Array
    capacity: tuple[int, ...]
    capacity_names: tuple[str, ...]
    num_microbatches: int | None
    min_num_microbatches: int = 1
    num_microbatches_multiple: int = 1

    @property
    def num_samples(self) -> int:
        """n."""
        return len(self.counts)

    @property
    def num_pipeline_ranks(self) -> int:
        """P."""
        return self.stage_ranks[-1] + 1

    def rank_work_ns(self) -> Int64Array:
        """Forward and backward time of each sample on each pipeline rank, int64 [n, P]."""
        work = np.zeros((self.num_samples, self.num_pipeline_ranks), dtype=np.int64)
        for stage, rank in enumerate(self.stage_ranks):
            work[:, rank] += self.forward_ns[:, stage] + self.backward_ns[:, stage]
        return work

    def round_up(self, num_microbatches: int) -> int:
        """The least allowed M that is at least `num_microbatches`."""
        multiple = self.num_microbatches_multiple
        return -(-max(num_microbatches, self.min_num_microbatches) // multiple) * multiple

    def choose_num_microbatches(self, policy: str, least: int) -> int:
        """M for a policy that needs `least` micro-batches on every rank.

        Raises:
            PlanError: M is fixed and smaller; the text has the arithmetic.
        """
        if self.num_microbatches is None:
            return self.round_up(least)
        if self.num_microbatches < least:
            raise self.does_not_fit(policy, least)
        return self.num_microbatches

    def does_not_fit(self, policy: str, least: int) -> PlanError:
        """The error for a fixed M that is smaller than the `least` that `policy` finds room for."""
        fixed = self.num_microbatches or 0
        lines = [
            f"{int(total)} {name} into {self.dp_size} ranks x {fixed} micro-batches x {limit} = "
            f"{self.dp_size * fixed * limit}"
            for name, limit, total in zip(
                self.capacity_names, self.capacity, self.sizes.sum(axis=0).tolist(), strict=True
            )
        ]
        return PlanError(
            f"num_microbatches={fixed} does not hold the {self.num_samples} samples of the step: {'; '.join(lines)} "
            f"(samples are never cut). Policy {policy!r} fits them with num_microbatches={least}: set that, raise the "
            "capacity, lower the global batch size, or leave num_microbatches unset"
        )

    def cell_times(self, placement: Placement) -> CellTimes:
        """Times of all cells under `placement`."""
        shape = (self.dp_size, placement.num_microbatches)
        cell = placement.dp_rank.astype(np.int64) * placement.num_microbatches + placement.microbatch
        num_samples = sum_over_cells(cell, np.ones(self.num_samples, dtype=np.int64), shape)
        patches = sum_over_cells(cell, self.counts.patches, shape)
        present = np.repeat((num_samples > 0)[:, :, np.newaxis], len(self.stage_ranks), axis=2)
        present[:, :, 0] = patches > 0
        forward = sum_over_cells(cell, self.forward_ns, shape) + present * self.forward_constant_ns
        backward = sum_over_cells(cell, self.backward_ns, shape) + present * self.backward_constant_ns
        return CellTimes(forward_ns=forward, backward_ns=backward, present=present)

    def makespans_ns(self, times: CellTimes) -> Int64Array:
        """Simulated time of every replica, int64 [R]."""
        schedule = _schedule(self.schedule, self.stage_ranks, times.forward_ns.shape[1])
        return makespans_ns(schedule, times.forward_ns, times.backward_ns, times.present)


Place = Callable[[PlacementProblem], Placement]


@lru_cache(maxsize=64)
def _schedule(name: str, stage_ranks: tuple[int, ...], num_microbatches: int) -> Schedule:
    return build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches)


def sum_over_cells(cell: Int64Array, values: Int64Array, shape: tuple[int, int]) -> Int64Array:
    """Sums of `values` [n] or [n, S] over samples of the same cell (int64 [n]), int64 [R, M] or [R, M, S]."""
    sums = np.zeros((shape[0] * shape[1], *values.shape[1:]), dtype=np.int64)
    np.add.at(sums, cell, values)
    return sums.reshape(*shape, *values.shape[1:])


def even_bounds(num_items: int, num_groups: int) -> Int64Array:
    """Starts and end of contiguous groups whose counts differ by at most one, larger ones first; int64 [k + 1]."""
    base, extra = divmod(num_items, num_groups)
    groups = np.arange(num_groups + 1, dtype=np.int64)
    return groups * base + np.minimum(groups, extra)


def groups_of(bounds: Int64Array) -> Int64Array:
    """Group of every item for contiguous `bounds` [k + 1], int64 [n]."""
    return np.repeat(np.arange(len(bounds) - 1, dtype=np.int64), np.diff(bounds))
