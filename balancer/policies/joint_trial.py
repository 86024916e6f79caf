"""A candidate of the `joint` policy and its simulated time.

cell of every sample [n]  --one pass of sums-->  times [R, M, S]  --simulation under `meet`-->  makespan
"""

from dataclasses import dataclass

import numpy as np

from balancer.counts import Int64Array
from balancer.makespans import meeting_makespans_ns
from balancer.policies.base import CellTimes, Int32Array, Placement, PlacementProblem
from balancer.policies.empty_cells import can_fill, without_empty_cells
from balancer.policies.item_routing import route_items
from packing.grouping import group_by_bin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A candidate.

    Attributes:
        cell_of: dp_rank * M + micro-batch of every sample, int32 [n].
        items, offsets: samples of cell c are items[offsets[c] : offsets[c + 1]]; int64 [n] and [R * M + 1].
        times: of all cells. makespan_ns: of the step, simulated.
        encoder_rank, unit: int32 [k] of every media item where these are routed, else None.
    """

    cell_of: Int32Array
    items: Int64Array
    offsets: Int64Array
    times: CellTimes
    makespan_ns: int
    encoder_rank: Int32Array | None = None
    unit: Int32Array | None = None

    def placement(self, num_microbatches: int) -> Placement:
        """The candidate as a placement; the slots of a cell follow the order of the samples."""
        cell = self.cell_of
        slot = np.empty(len(cell), dtype=np.int32)
        slot[self.items] = np.arange(len(cell)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return Placement(
            dp_rank=cell // np.int32(num_microbatches),
            microbatch=cell % np.int32(num_microbatches),
            slot=slot,
            num_microbatches=num_microbatches,
            encoder_rank=self.encoder_rank,
            unit=self.unit,
        )


class Trials:
    """Evaluates candidates of one problem with one number of micro-batches.

    Attributes:
        values: int64 [n, kinds * S + d + 1]: forward and backward times (and weight-gradient times where the schedule
            splits the backward), sizes, and whether the sample has media: what cells add up.
        constants: int64 [kinds, S], of a micro-batch that runs the stage.
    """

    def __init__(self, problem: PlacementProblem, num_microbatches: int) -> None:
        self._problem = problem
        self._num_microbatches = num_microbatches
        times = [problem.forward_ns, problem.backward_ns]
        constants = [problem.forward_constant_ns, problem.backward_constant_ns]
        if problem.splits_backward:
            times.append(problem.weight_ns)
            constants.append(problem.weight_constant_ns)
        has_media = (problem.counts.patches > 0).astype(np.int64)[:, np.newaxis]
        self.values = np.concatenate([*times, problem.sizes, has_media], axis=1)
        self.constants = np.stack(constants)

    def evaluate(self, cell_of: Int32Array) -> Trial:
        """The candidate as it will run: empty cells filled, media items routed where that simulates faster."""
        problem, num_microbatches = self._problem, self._num_microbatches
        shape = (problem.dp_size, num_microbatches)
        items, offsets, sums = group_by_bin(cell_of, self.values, shape[0] * shape[1])
        if can_fill(problem, np.diff(offsets).reshape(shape)):
            cell_of = self._filled(cell_of)
            items, offsets, sums = group_by_bin(cell_of, self.values, shape[0] * shape[1])
        times = self._times(sums.reshape(*shape, -1), np.diff(offsets).reshape(shape) > 0)
        plain = Trial(
            cell_of=cell_of, items=items, offsets=offsets, times=times, makespan_ns=problem.makespan_ns(times)
        )
        if not (problem.parallel.encoder_is_spread and len(problem.item_forward_ns)):
            return plain
        encoder_rank, unit = route_items(problem, cell_of, num_microbatches)
        routed = self._routed(times, cell_of, encoder_rank, unit)
        makespan = problem.makespan_ns(routed)
        if makespan >= plain.makespan_ns:
            return plain
        return Trial(
            cell_of=cell_of,
            items=items,
            offsets=offsets,
            times=routed,
            makespan_ns=makespan,
            encoder_rank=encoder_rank,
            unit=unit,
        )

    def _filled(self, cell_of: Int32Array) -> Int32Array:
        """The candidate without empty cells that could be filled."""
        replica, microbatch = np.divmod(cell_of.astype(np.int64), self._num_microbatches)
        placement = Placement.from_cells(replica, microbatch, self._num_microbatches)
        return self._problem.cells_of(without_empty_cells(self._problem, placement)).astype(np.int32)

    def times_of(self, cell_of: Int32Array) -> CellTimes:
        """Times of all cells, without routing."""
        shape = (self._problem.dp_size, self._num_microbatches)
        _, offsets, sums = group_by_bin(cell_of, self.values, shape[0] * shape[1])
        return self._times(sums.reshape(*shape, -1), np.diff(offsets).reshape(shape) > 0)

    def makespans_ns(self, cells: Int32Array) -> Int64Array:
        """Makespans of C candidates [C, n] at once, without routing, int64 [C]."""
        problem, num_candidates = self._problem, len(cells)
        shape = (num_candidates, problem.dp_size, self._num_microbatches)
        first = np.arange(num_candidates, dtype=np.int32)[:, np.newaxis] * np.int32(shape[1] * shape[2])
        values = np.tile(self.values, (num_candidates, 1))
        _, offsets, sums = group_by_bin((cells + first).reshape(-1), values, shape[0] * shape[1] * shape[2])
        flat = (shape[0] * shape[1], shape[2])
        times = self._times(sums.reshape(*flat, -1), np.diff(offsets).reshape(flat) > 0)
        return meeting_makespans_ns(
            problem.schedule_for(shape[2]),
            times.forward_ns.reshape(*shape, -1),
            times.backward_ns.reshape(*shape, -1),
            times.present.reshape(*shape, -1),
            problem.parallel.meet,
            weight_ns=times.weight_ns.reshape(*shape, -1),
        )

    def _times(self, sums: Int64Array, holds_samples: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> CellTimes:
        """Times of cells with these sums [R, M, columns of `values`]."""
        num_kinds, num_stages = self.constants.shape
        present = np.repeat(holds_samples[:, :, np.newaxis], num_stages, axis=2)
        if self._problem.parallel.has_encoder:
            present[:, :, 0] = sums[:, :, -1] > 0
        kinds = [
            np.ascontiguousarray(sums[:, :, kind * num_stages : (kind + 1) * num_stages]) for kind in range(num_kinds)
        ]
        if self.constants.any():
            kinds = [kind + present * constant for kind, constant in zip(kinds, self.constants, strict=True)]
        weight = kinds[2] if num_kinds > 2 else np.zeros_like(kinds[1])
        return CellTimes(forward_ns=kinds[0], backward_ns=kinds[1], weight_ns=weight, present=present)

    def _routed(self, times: CellTimes, cell_of: Int32Array, encoder_rank: Int32Array, unit: Int32Array) -> CellTimes:
        """The times with those of stage 0 replaced by the shares of the encoder ranks."""
        problem, num_microbatches = self._problem, self._num_microbatches
        unit_size = problem.schedule_for(num_microbatches).unit_size
        replica = cell_of[problem.counts.item_rows()] // np.int32(num_microbatches)
        entry = replica * np.int32(num_microbatches) + unit * np.int32(unit_size) + encoder_rank
        shares = np.stack([problem.item_forward_ns, problem.item_backward_ns, problem.counts.item_patches], axis=1)
        _, _, sums = group_by_bin(entry, shares, problem.dp_size * num_microbatches)
        share = sums.reshape(problem.dp_size, num_microbatches, 3)
        present, forward, backward = times.present.copy(), times.forward_ns.copy(), times.backward_ns.copy()
        weight = times.weight_ns.copy()
        present[:, :, 0] = share[:, :, 2] > 0
        forward[:, :, 0] = share[:, :, 0] + present[:, :, 0] * self.constants[0, 0]
        backward[:, :, 0] = share[:, :, 1] + present[:, :, 0] * self.constants[1, 0]
        if problem.splits_backward:
            weight[:, :, 0] = share[:, :, 1] // 2 + present[:, :, 0] * self.constants[2, 0]
        return CellTimes(forward_ns=forward, backward_ns=backward, weight_ns=weight, present=present, routed=True)
