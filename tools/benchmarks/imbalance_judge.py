"""The one judge of all placements: the time of every cell from the samples in it, then the simulator.

    Placed: rank, micro-batch [n]  -->  CellTimes [R, M, S]  --schedule, meeting rule-->  makespan, bubble, imbalance
                                                             --tokens-->  cells above the capacity, samples lost

Everything is recomputed from where the samples are; what a planner says of its own plan is not read. Times are those
of the cost model (see `imbalance_cases`): transfers between ranks, collectives and launches count as free, for every
method alike. Systems that exchange encoder data between ranks wait for the slowest encoder of each micro-batch, also
where replicas otherwise meet once a step; the transfer is free too.

A method may use more micro-batches than asked for; the schedule is then made for that many. A method that loses
samples is judged by the rest and marked: its makespan compares with nobody's. So is one that leaves micro-batches empty
where replicas meet inside the step: it runs fewer of them than the others, or hangs, and belongs to another M.
"""

from dataclasses import dataclass

import numpy as np

from balancer.counts import Int64Array
from balancer.layout import Meet
from balancer.policies import CellTimes, PlacementProblem
from balancer.policies.base import sum_over_cells
from balancer.simulate import meeting_makespan_ns
from tools.benchmarks.baseline_step import Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a placement is worth under one layout and meeting rule.

    Attributes:
        makespan_ns: simulated time of the step.
        bubble: 1 - busy / (ranks * makespan), over all pipeline ranks of all replicas.
        rank_ratio: largest over mean busy time of replicas.
        sync_ratio: sum over micro-batches of the busiest replica, over the mean busy time of a replica.
        label_ratio: largest over mean label tokens of replicas.
        num_microbatches: what the method used. lost: samples that do not run.
        cells_above: micro-batches above the token capacity, and the fullest over the capacity in `worst_load`.
        cells_short: empty micro-batches that other samples could fill, where replicas meet inside the step.
    """

    makespan_ns: int
    bubble: float
    rank_ratio: float
    sync_ratio: float
    label_ratio: float
    num_microbatches: int
    lost: int
    cells_above: int
    worst_load: float
    cells_short: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether every sample runs, no capacity is broken and all replicas run all micro-batches that they can."""
        return not self.lost and not self.cells_above and not self.cells_short


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Laid:
    """A placement under one layout, before it is known where replicas meet.

    Attributes:
        times: of all cells. exchanged: the encoder of a micro-batch ends with the slowest replica.
        labels: int64 [R]. tokens, held: int64 [R, M], tokens and samples. lost: number of samples that do not run.
    """

    times: CellTimes
    exchanged: bool
    labels: Int64Array
    tokens: Int64Array
    held: Int64Array
    lost: int


def lay(problem: PlacementProblem, placed: Placed) -> Laid:
    """Cell times of a placement.

    Raises:
        ValueError: cells of another shape, or a rank or micro-batch that does not exist.
    """
    counts, num_ranks = problem.counts, problem.dp_size
    _check(placed.cells, problem, "cells")
    here = np.flatnonzero((placed.cells >= 0).all(axis=1))
    num_slots = max(problem.num_microbatches or 1, int(placed.cells[:, 1].max(initial=0)) + 1)
    shape = (num_ranks, num_slots)
    cell = placed.cells[here, 0] * num_slots + placed.cells[here, 1]
    held = _sums(cell, np.ones(len(here), dtype=np.int64), shape)
    present = np.repeat((held > 0)[:, :, np.newaxis], problem.num_stages, axis=2)
    forward, backward, weight = (
        _sums(cell, values[here], shape) for values in (problem.forward_ns, problem.backward_ns, problem.weight_ns)
    )
    media, where = counts.patches[here], cell
    encoder = [values[here, 0] for values in (problem.forward_ns, problem.backward_ns, problem.weight_ns)]
    if placed.encoder_cells is not None:
        _check(placed.encoder_cells, problem, "encoder_cells")
        where = placed.encoder_cells[here, 0] * num_slots + placed.encoder_cells[here, 1]
    elif placed.entries is not None:
        where, media = placed.entries[:, 0] * num_slots + placed.entries[:, 1], counts.item_patches
        encoder = [problem.item_forward_ns, problem.item_backward_ns]
    if problem.parallel.has_encoder:
        present[:, :, 0] = _sums(where, media, shape) > 0
        if where is not cell:
            sums = [_sums(where, values, shape) for values in encoder]
            forward[:, :, 0], backward[:, :, 0] = sums[0], sums[1]
            weight[:, :, 0] = sums[2] if len(sums) > 2 else sums[1] // 2
    times = CellTimes(
        forward_ns=forward + present * problem.forward_constant_ns,
        backward_ns=backward + present * problem.backward_constant_ns,
        weight_ns=weight + present * problem.weight_constant_ns,
        present=present,
        routed=placed.entries is not None,
    )
    return Laid(
        times=times,
        exchanged=placed.encoder_cells is not None,
        labels=_sums(cell, counts.label_tokens[here], shape).sum(axis=1),
        tokens=_sums(cell, counts.llm_tokens[here], shape),
        held=held,
        lost=len(counts) - len(here),
    )


def _sums(cell: Int64Array, values: Int64Array, shape: tuple[int, int]) -> Int64Array:
    """Sums of `values` [k] or [k, S] over cells, int64 [R, M] or [R, M, S]; of no samples too."""
    return sum_over_cells(cell, values, shape) if len(cell) else np.zeros((*shape, *values.shape[1:]), dtype=np.int64)


def _check(cells: Int64Array, problem: PlacementProblem, name: str) -> None:
    if cells.shape != (problem.num_samples, 2):
        raise ValueError(f"{name} has shape {cells.shape}; expected ({problem.num_samples}, 2)")
    outside = (cells[:, 0] >= problem.dp_size) | (cells < -1).any(axis=1) | ((cells[:, 0] < 0) != (cells[:, 1] < 0))
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(
            f"{name}: sample {row} is on rank {int(cells[row, 0])}, micro-batch {int(cells[row, 1])}; ranks are 0 to "
            f"{problem.dp_size - 1}, and -1, -1 stands for a sample that does not run"
        )


def judge(problem: PlacementProblem, laid: Laid, meet: Meet) -> Verdict:
    """Simulate the step and say what is broken."""
    times = laid.times
    rule: Meet = "unit" if laid.exchanged and meet == "step" else meet
    makespan = int(
        meeting_makespan_ns(
            problem.schedule_for(times.forward_ns.shape[1]),
            times.forward_ns,
            times.backward_ns,
            times.present,
            rule,
            weight_ns=times.weight_ns,
            routed=times.routed,
        )
    )
    work = (times.forward_ns + times.backward_ns).sum(axis=2)  # [R, M]
    mean = max(float(work.sum()) / problem.dp_size, 1.0)
    loads = laid.tokens / problem.capacity[0]
    return Verdict(
        makespan_ns=makespan,
        bubble=1.0 - float(work.sum()) / max(problem.dp_size * problem.num_pipeline_ranks * makespan, 1),
        rank_ratio=float(work.sum(axis=1).max()) / mean,
        sync_ratio=float(work.max(axis=0).sum()) / mean,
        label_ratio=float(laid.labels.max()) / max(float(laid.labels.mean()), 1.0),
        num_microbatches=work.shape[1],
        lost=laid.lost,
        cells_above=int((loads > 1.0).sum()),
        worst_load=float(loads.max()),
        cells_short=0 if meet == "step" else _cells_short(laid.held),
    )


def _cells_short(held: Int64Array) -> int:
    """Empty cells that could hold a sample of a cell with several."""
    return min(int((held == 0).sum()), int(np.maximum(held - 1, 0).sum()))
