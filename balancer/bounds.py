"""The certificate of a plan: times that no placement and no order of these samples beats.

    times [n, S], R replicas, M micro-batches  -->  Bounds: work, longest, granularity, pipeline    (int64 ns)

Every bound holds for all placements into R x M cells, empty, tapered and text-only micro-batches included, and for
every schedule in which the forwards of a stage run in the order of micro-batches, and so do its backwards.

work         A pipeline rank p has W[p] work over all replicas; min(R, n) replicas can hold samples, so one of them has
             ceil(W[p] / min(R, n)) or more. Constants of micro-batches count for as many cells as capacities force. A
             spread encoder may be shared out evenly: a replica has P ranks for all its work, ceil(total / P).
longest      A sample runs through all stages forward and then back, one after the other. Items of a spread encoder may
             be encoded side by side, so they count as the longest item or as 1/min(P, M) of their sum, whichever is
             more.
granularity  Samples are not divided: `packing.makespan_bounds` for each pipeline rank: longest, pigeonhole, units.
             Where replicas meet in every micro-batch a rank pays the slowest replica M times: bound of
             `packing.grid_bounds` for ranks x slots, which also knows what capacities force together. With `unit` that
             holds for the encoder alone.
pipeline     balancer/pipeline_bound.py: warm-up, work and drain of all ranks together, and how little capacities let
             micro-batches differ; a spread encoder's work included.

Price: the first three look at ranks one by one; the last counts samples as if they could be divided. The largest of
the four is the plan's lower bound; `gap` is what may be left.
"""

from dataclasses import dataclass

import numpy as np

from balancer.counts import Int64Array
from balancer.pipeline_bound import pipeline_bound_ns
from balancer.policies.base import PlacementProblem, total_over_stages
from packing.bin_bounds import packing_bound
from packing.grid_bounds import grid_bound
from packing.makespan_bounds import partition_bound

NEAR = 0.02
"""Relative distance to a bound within which a plan counts as at it."""
UNEVEN = 1.1
"""A stage split with max / mean above this is called uneven."""
FULL = 0.95
"""Fill of all cells of a capacity from which on it leaves no room to choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds on the makespan of a step, in nanoseconds; see the module.

    Attributes:
        work_ns, longest_ns, granularity_ns, pipeline_ns: the four.
        num_microbatches: M for which they hold.
        rank_work_ns: work of every pipeline rank over all replicas without spread stages, [P].
        total_work_ns: work of all ranks with spread stages.
        largest_row: the sample with the most work.
    """

    work_ns: int
    longest_ns: int
    granularity_ns: int
    pipeline_ns: int
    num_microbatches: int
    rank_work_ns: tuple[int, ...]
    total_work_ns: int
    largest_row: int

    @property
    def lower_ns(self) -> int:
        """The largest of them."""
        return max(self.work_ns, self.longest_ns, self.granularity_ns, self.pipeline_ns)

    def judge(self, problem: PlacementProblem, makespan_ns: int) -> tuple[str, str]:
        """(binding, note): what stands between this makespan and an even one, and a sentence about it.

        none            within NEAR of perfectly even work on all ranks, or of a bound that nothing below explains
        stage split     one pipeline rank has more work than the others and the plan is near what that rank needs
        largest sample  near what the largest sample takes alone
        capacity        cells are full, so there is nothing to choose
        data            the rest: the room of placement
        """
        num_ranks, replicas = problem.num_pipeline_ranks, problem.dp_size
        even = self.total_work_ns / (replicas * num_ranks)
        if makespan_ns <= (1 + NEAR) * even:
            return "none", ""
        others = max(self.work_ns, self.pipeline_ns)
        if self.longest_ns > (1 + NEAR) * others and makespan_ns <= (1 + 5 * NEAR) * self.longest_ns:
            return "largest sample", (
                f"sample {int(problem.counts.sample_ids[self.largest_row])} alone takes {self.longest_ns} ns of "
                f"{makespan_ns} ns: a larger global batch, a cap on its size or splitting it would help, another "
                "placement would not"
            )
        busiest = int(np.argmax(self.rank_work_ns))
        excess = self.rank_work_ns[busiest] / replicas / even if even else 1.0
        if num_ranks > 1 and excess > UNEVEN and makespan_ns <= (1 + 5 * NEAR) * self.work_ns:
            return "stage split", (
                f"pipeline rank {busiest} has {excess:.2f} x the mean work of a rank: move layers or spread the "
                "encoder, another placement would not help"
            )
        if makespan_ns <= (1 + NEAR) * self.lower_ns:
            return "none", ""
        return self._judge_capacity(problem)

    def _judge_capacity(self, problem: PlacementProblem) -> tuple[str, str]:
        cells = problem.dp_size * self.num_microbatches
        totals = [int(column.sum()) for column in problem.sizes.T]
        for name, limit, total in zip(problem.capacity_names, problem.capacity, totals, strict=True):
            if total >= FULL * cells * limit:
                return "capacity", (
                    f"micro-batches are {total / (cells * limit):.0%} full of {name}: more of them, or a larger "
                    "capacity, would give room"
                )
        return "data", ""


def lower_bounds(problem: PlacementProblem, num_microbatches: int) -> Bounds:
    """Bounds for any placement of the problem's samples with that number of micro-batches."""
    work = stage_work_ns(problem)
    columns = rank_columns(problem, work)
    total = total_over_stages(work)
    return Bounds(
        work_ns=_work_bound(problem, work),
        longest_ns=_longest_bound(problem, total, num_microbatches),
        granularity_ns=_granularity_bound(problem, work, columns, total, num_microbatches),
        pipeline_ns=pipeline_bound_ns(problem, num_microbatches),
        num_microbatches=num_microbatches,
        rank_work_ns=tuple(int(column.sum()) for column in columns),
        total_work_ns=int(total.sum()),
        largest_row=int(total.argmax()),
    )


def stage_work_ns(problem: PlacementProblem) -> Int64Array:
    """Forward and backward of every sample on every stage, int64 [n, S]; a spread encoder at the cheaper of what the
    sample and what its items say, since a placement may route or not."""
    work = problem.forward_ns + problem.backward_ns
    if problem.parallel.encoder_is_spread:
        work[:, 0] = np.minimum(
            work[:, 0], problem.counts.sum_of_items(problem.item_forward_ns + problem.item_backward_ns)
        )
    return work


def rank_columns(problem: PlacementProblem, work: Int64Array) -> Int64Array:
    """Work of samples int64 [n, S] on each pipeline rank, without spread stages, int64 [P, n]."""
    columns = np.zeros((problem.num_pipeline_ranks, problem.num_samples), dtype=np.int64)
    for stage, rank in enumerate(problem.stage_ranks):
        if rank >= 0:
            columns[rank] += work[:, stage]
    return columns


def _work_bound(problem: PlacementProblem, work: Int64Array) -> int:
    replicas = min(problem.dp_size, problem.num_samples)
    constants = _least_constants(problem, replicas)
    totals = work.sum(axis=0) + constants
    per_rank = [0] * problem.num_pipeline_ranks
    for stage, rank in enumerate(problem.stage_ranks):
        if rank >= 0:
            per_rank[rank] += int(totals[stage])
    everything = -(-int(totals.sum()) // (replicas * problem.num_pipeline_ranks))
    return max(everything, -(-max(per_rank) // replicas))


def _least_constants(problem: PlacementProblem, replicas: int) -> Int64Array:
    """Constants of micro-batches that no placement avoids, over all replicas, int64 [S].

    With r <= replicas replicas in use, a rank has (W + max(r, cells) * constant) / r or more, which falls as r grows;
    so `replicas` of them and as many cells as the capacities ask for are the least.
    """
    constant = problem.forward_constant_ns + problem.backward_constant_ns
    if not constant.any():
        return constant
    limits = np.asarray(problem.capacity, dtype=np.int64)
    total: Int64Array = constant * max(replicas, packing_bound(problem.sizes, limits))
    if problem.parallel.has_encoder:
        with_media = problem.counts.patches > 0
        total[0] = constant[0] * packing_bound(problem.sizes[with_media], limits)
    return total


def _longest_bound(problem: PlacementProblem, total: Int64Array, num_microbatches: int) -> int:
    chain = total.copy()
    constants = problem.forward_constant_ns + problem.backward_constant_ns
    if problem.splits_backward:
        # Weight gradients leave the chain, but for those of stage 0, which follow its end.
        chain -= total_over_stages(problem.weight_ns) - problem.weight_ns[:, 0]
        constants = constants - problem.weight_constant_ns
    chain += int(constants[int(problem.parallel.has_encoder) :].sum())
    if problem.parallel.has_encoder and constants[0]:
        chain += np.where(problem.counts.patches > 0, constants[0], 0)
    if problem.parallel.encoder_is_spread:
        chain -= stage_work_ns(problem)[:, 0]
        for own, items in (
            (problem.forward_ns[:, 0], problem.item_forward_ns),
            (problem.backward_ns[:, 0], problem.item_backward_ns),
        ):
            # A unit has a place for every rank, but no more than there are micro-batches.
            places = min(problem.num_pipeline_ranks, num_microbatches)
            shared = -(-problem.counts.sum_of_items(items) // places)
            chain += np.minimum(own, np.maximum(shared, problem.counts.longest_of_items(items)))
    return int(chain.max())


def _granularity_bound(
    problem: PlacementProblem, work: Int64Array, columns: Int64Array, total: Int64Array, num_microbatches: int
) -> int:
    spread = [stage for stage, rank in enumerate(problem.stage_ranks) if rank < 0]
    meet, num_ranks = problem.parallel.meet, problem.dp_size
    limits = np.asarray(problem.capacity, dtype=np.int64)

    def slots(column: Int64Array) -> int:
        """Sum over micro-batches of the slowest replica."""
        used = min(num_microbatches, problem.num_samples)
        return grid_bound(column[:, np.newaxis], num_ranks, used, problem.sizes, limits, per_slot=True)

    bound = 0
    for column in columns:
        if column.any():
            alone = partition_bound(column[:, np.newaxis], num_ranks)
            bound = max(bound, alone, slots(column) if meet == "microbatch" else 0)
    if spread:
        bound = max(bound, -(-partition_bound(total[:, np.newaxis], num_ranks) // problem.num_pipeline_ranks))
    elif meet == "unit" and problem.parallel.has_encoder:
        beside = columns[problem.stage_ranks[0]] - work[:, 0]
        bound = max(bound, slots(work[:, 0]) + partition_bound(beside[:, np.newaxis], num_ranks))
    return bound
