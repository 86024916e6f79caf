"""What every placement policy gets and gives.

    PlacementProblem: n samples, times [n, S], sizes [n, d]  --place-->  Placement: (dp_rank, microbatch, slot) [n]
                      k media items, times [k]                                      (encoder_rank, unit) [k], if spread

A policy is a pure function of the problem. Capacities are hard; the number of micro-batches is given, or the least
that the policy finds room for, and is the same on every DP rank.

An encoder that is *spread* (every pipeline rank holds it) has a placement of its own. Encoder act (unit u, rank j) of
a replica is entry u * unit_size + j of the encoder's row of times, for j < P; entries must be below M. A placement that
says nothing encodes every micro-batch where the schedule puts it (micro-batch m on rank m % P), which is entry m.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.layout import ParallelSpec, check_num_cells
from balancer.schedule import Schedule, build_schedule
from balancer.simulate import makespans_ns, meeting_makespan_ns
from packing.grouping import group_by_bin

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Where each sample goes, and where each media item is encoded.

    Attributes:
        dp_rank, microbatch, slot: int32 [n] aligned with the counts; `slot` is the place inside the cell.
        num_microbatches: M of every rank; a cell (rank, micro-batch) may be empty.
        encoder_rank, unit: int32 [k] aligned with the item table of the counts: pipeline rank inside the sample's
            replica that encodes the item, and the unit in which it does. The unit is that of the item's micro-batch.
            None: nothing is routed, every micro-batch is encoded whole.
        cp_first_rank, cp_degree: int32 [n], the DP ranks that share a sample; None: no sample is split.
    """

    dp_rank: Int32Array
    microbatch: Int32Array
    slot: Int32Array
    num_microbatches: int
    encoder_rank: Int32Array | None = None
    unit: Int32Array | None = None
    cp_first_rank: Int32Array | None = None
    cp_degree: Int32Array | None = None

    @property
    def routed(self) -> bool:
        """Whether media items are encoded elsewhere than with their micro-batch."""
        return self.encoder_rank is not None

    @classmethod
    def from_cells(cls, dp_rank: Int64Array, microbatch: Int64Array, num_microbatches: int) -> "Placement":
        """Placement whose slots follow the order of the samples."""
        cell = dp_rank.astype(np.int64) * num_microbatches + microbatch
        num_cells = int(cell.max(initial=-1)) + 1
        order, offsets, _ = group_by_bin(cell.astype(np.int32), np.empty((len(cell), 0), dtype=np.int64), num_cells)
        slot = np.empty(len(cell), dtype=np.int32)
        slot[order] = np.arange(len(cell)) - np.repeat(offsets[:-1], np.diff(offsets))
        return cls(
            dp_rank=dp_rank.astype(np.int32),
            microbatch=microbatch.astype(np.int32),
            slot=slot,
            num_microbatches=num_microbatches,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellTimes:
    """Times of the cells of a placement.

    Attributes:
        forward_ns, backward_ns, weight_ns: int64 [R, M, S]; `weight_ns` is the weight-gradient part of the backward.
            With a spread encoder entry [:, m, 0] belongs to the encoder act of micro-batch m, see the module.
        present: bool [R, M, S].
        routed: media items are exchanged inside units.
    """

    forward_ns: Int64Array
    backward_ns: Int64Array
    weight_ns: Int64Array
    present: NDArray[np.bool_]
    routed: bool = False

    def reordered(self, order: Int64Array) -> "CellTimes":
        """The same with other orders of the micro-batches: order int64 [..., R, M] gives times [..., R, M, S]."""
        rank = np.arange(order.shape[-2])[:, np.newaxis]  # [R, 1], broadcast against [..., R, M]
        return CellTimes(
            forward_ns=self.forward_ns[rank, order],
            backward_ns=self.backward_ns[rank, order],
            weight_ns=self.weight_ns[rank, order],
            present=self.present[rank, order],
            routed=self.routed,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementProblem:
    """One step to be placed.

    Attributes:
        counts: the selected samples.
        forward_ns, backward_ns, weight_ns: int64 [n, S], per sample; `weight_ns` is part of `backward_ns`.
        forward_constant_ns, backward_constant_ns, weight_constant_ns: int64 [S], per micro-batch that runs the stage.
        item_forward_ns, item_backward_ns: int64 [k], encoder times per media item where the encoder is spread; [0]
            where it is a stage and no item moves.
        parallel: replicas, stages, where ranks meet.
        schedule: name of the pipeline schedule.
        sizes: int64 [n, d] in the units of the capacities.
        capacity: hard limit of a cell per unit, [d], and `capacity_names` their names.
        num_microbatches: M, or None for the least that fits.
        min_num_microbatches, num_microbatches_multiple: floor and granularity of M where it is free.
        splits_backward: whether the schedule has weight gradients of their own; else `weight_ns` is not read.
        item_sizes: int64 [k, e], of media items where the encoder is spread, in the units of `item_capacity` [e]: hard
            limits of an encoder act to which items are routed; [0, 0] without limits.
    """

    counts: StepCounts
    forward_ns: Int64Array
    backward_ns: Int64Array
    weight_ns: Int64Array
    forward_constant_ns: Int64Array
    backward_constant_ns: Int64Array
    weight_constant_ns: Int64Array
    item_forward_ns: Int64Array
    item_backward_ns: Int64Array
    parallel: ParallelSpec
    schedule: str
    sizes: Int64Array
    capacity: tuple[int, ...]
    capacity_names: tuple[str, ...]
    num_microbatches: int | None
    min_num_microbatches: int = 1
    num_microbatches_multiple: int = 1
    splits_backward: bool = True
    item_sizes: Int64Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    item_capacity: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """n."""
        return len(self.counts)

    @property
    def dp_size(self) -> int:
        """R."""
        return self.parallel.dp_size

    @property
    def fills_cells(self) -> bool:
        """Whether every replica needs a sample in every micro-batch, so that one may take samples of others."""
        return self.parallel.meet != "step" or self.parallel.fill_cells

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every stage, [S]; -1 for a spread one."""
        return self.parallel.stage_ranks

    @property
    def num_stages(self) -> int:
        """S."""
        return self.parallel.num_stages

    @property
    def num_pipeline_ranks(self) -> int:
        """P."""
        return self.parallel.num_ranks

    def rank_work_ns(self) -> Int64Array:
        """Forward and backward time of each sample on each pipeline rank, int64 [n, P].

        A spread stage counts as an equal share on every rank, rounded down: what routing can reach at best.
        """
        num_ranks = self.num_pipeline_ranks
        work = np.zeros((self.num_samples, num_ranks), dtype=np.int64)
        for stage, rank in enumerate(self.stage_ranks):
            times = self.forward_ns[:, stage] + self.backward_ns[:, stage]
            if rank >= 0:
                work[:, rank] += times
            else:
                work += (times // num_ranks)[:, np.newaxis]
        return work

    def round_up(self, num_microbatches: int) -> int:
        """The least allowed M that is at least `num_microbatches`; whether a plan of it can be held is not asked."""
        multiple = self.num_microbatches_multiple
        return -(-max(num_microbatches, self.min_num_microbatches) // multiple) * multiple

    def choose_num_microbatches(self, policy: str, least: int) -> int:
        """M for a policy that needs `least` micro-batches on every rank.

        Raises:
            PlanError: M is fixed and smaller; the text has the arithmetic.
            LayoutError: M is free, and as large as it has to be beyond the limits of a layout.
        """
        if self.num_microbatches is None:
            return self.check_size(self.round_up(least))
        if self.num_microbatches < least:
            raise self.does_not_fit(policy, least)
        return self.num_microbatches

    def replica_capacity(self, num_microbatches: int) -> tuple[int, ...]:
        """What the M cells of one replica hold together, per unit [d], but never more than there is.

        Nothing needs more, and `packing` counts capacities in 62 bits.
        """
        totals = self.sizes.sum(axis=0).tolist()
        return tuple(
            min(limit * num_microbatches, max(total, 1)) for limit, total in zip(self.capacity, totals, strict=True)
        )

    def check_size(self, num_microbatches: int) -> int:
        """`num_microbatches`, if tables [R, M, S] of so many can be made; a free M is checked as soon as it is chosen.

        Raises:
            LayoutError: they cannot.
        """
        check_num_cells(self.dp_size, num_microbatches, self.num_stages)
        return num_microbatches

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

    def schedule_for(self, num_microbatches: int) -> Schedule:
        """The schedule of one replica with M micro-batches.

        Raises:
            LayoutError: see `check_size`.
        """
        return _schedule(self.schedule, self.parallel, num_microbatches)

    def cells_of(self, placement: Placement) -> Int64Array:
        """Number of the cell of every sample, dp_rank * M + microbatch, int64 [n]."""
        return placement.dp_rank.astype(np.int64) * placement.num_microbatches + placement.microbatch

    def cell_times(self, placement: Placement) -> CellTimes:
        """Times of all cells under `placement`."""
        shape = (self.dp_size, placement.num_microbatches)
        cell = self.cells_of(placement)
        present = np.empty((*shape, self.num_stages), dtype=np.bool_)
        present[:] = (sum_over_cells(cell, np.ones(self.num_samples, dtype=np.int64), shape) > 0)[:, :, np.newaxis]
        if self.parallel.has_encoder:
            present[:, :, 0] = sum_over_cells(cell, self.counts.patches, shape) > 0
        forward = sum_over_cells(cell, self.forward_ns, shape)
        backward = sum_over_cells(cell, self.backward_ns, shape)
        weight = sum_over_cells(cell, self.weight_ns, shape) if self.splits_backward else np.zeros_like(backward)
        if placement.encoder_rank is not None and placement.unit is not None:
            entry = self.encoder_entries(placement)
            present[:, :, 0] = sum_over_cells(entry, self.counts.item_patches, shape) > 0
            forward[:, :, 0] = sum_over_cells(entry, self.item_forward_ns, shape)
            backward[:, :, 0] = sum_over_cells(entry, self.item_backward_ns, shape)
            if self.splits_backward:
                weight[:, :, 0] = backward[:, :, 0] // 2
        forward += present * self.forward_constant_ns
        backward += present * self.backward_constant_ns
        if self.splits_backward:
            weight += present * self.weight_constant_ns
        return CellTimes(
            forward_ns=forward, backward_ns=backward, weight_ns=weight, present=present, routed=placement.routed
        )

    def encoder_entries(self, placement: Placement) -> Int64Array:
        """Number of the encoder act of every media item, dp_rank * M + unit * unit_size + encoder_rank, int64 [k].

        Raises:
            PlanError: the placement routes nothing.
        """
        if placement.encoder_rank is None or placement.unit is None:
            raise PlanError("a placement without encoder ranks has no encoder entries")
        unit_size = self.schedule_for(placement.num_microbatches).unit_size
        rows = self.counts.item_rows()
        entry = placement.unit.astype(np.int64) * unit_size + placement.encoder_rank
        return placement.dp_rank[rows].astype(np.int64) * placement.num_microbatches + entry

    def makespans_ns(self, times: CellTimes) -> Int64Array:
        """Simulated time of every replica by itself, int64 [R]; times may hold other replicas than the problem."""
        return makespans_ns(
            self.schedule_for(times.forward_ns.shape[1]),
            times.forward_ns,
            times.backward_ns,
            times.present,
            weight_ns=times.weight_ns,
            routed=times.routed,
        )

    def makespan_ns(self, times: CellTimes) -> int:
        """Simulated time of the step: all replicas, waiting for one another where `parallel.meet` says."""
        return int(
            meeting_makespan_ns(
                self.schedule_for(times.forward_ns.shape[1]),
                times.forward_ns,
                times.backward_ns,
                times.present,
                self.parallel.meet,
                weight_ns=times.weight_ns,
                routed=times.routed,
            )
        )


Place = Callable[[PlacementProblem], Placement]


@lru_cache(maxsize=64)
def _schedule(name: str, parallel: ParallelSpec, num_microbatches: int) -> Schedule:
    # Every policy asks for a schedule before it tries an M, so none builds tables beyond the limits.
    check_num_cells(parallel.dp_size, num_microbatches, parallel.num_stages)
    return build_schedule(name, stage_ranks=parallel.stage_ranks, num_microbatches=num_microbatches)


def sum_over_cells(cell: Int64Array, values: Int64Array, shape: tuple[int, int]) -> Int64Array:
    """Sums of `values` [n] or [n, S] over samples of the same cell (int64 [n]), int64 [R, M] or [R, M, S]."""
    table = np.ascontiguousarray(values.reshape(len(cell), -1))
    _, _, sums = group_by_bin(cell.astype(np.int32), table, shape[0] * shape[1])
    return sums.reshape(*shape, *values.shape[1:])


def total_over_stages(times: Int64Array) -> Int64Array:
    """Sums of times [n, S] over stages, int64 [n]; several times faster than a sum along the short axis."""
    total: Int64Array = times[:, 0].copy()
    for stage in range(1, times.shape[1]):
        total += times[:, stage]
    return total


def even_bounds(num_items: int, num_groups: int) -> Int64Array:
    """Starts and end of contiguous groups whose counts differ by at most one, larger ones first; int64 [k + 1]."""
    base, extra = divmod(num_items, num_groups)
    groups = np.arange(num_groups + 1, dtype=np.int64)
    return groups * base + np.minimum(groups, extra)


def groups_of(bounds: Int64Array) -> Int64Array:
    """Group of every item for contiguous `bounds` [k + 1], int64 [n]."""
    return np.repeat(np.arange(len(bounds) - 1, dtype=np.int64), np.diff(bounds))
