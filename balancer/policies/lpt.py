"""`lpt`: split the samples over DP ranks by predicted time, then each rank's share over its micro-batches.

    times 9 9 9 1 1 1, 2 ranks, M = 2   ->   rank 0: [9][9]   rank 1: [9][1 1 1]   (18; no split of three 9s beats it)

1. Ranks meet once per step, so the split over ranks minimises the largest total: on one pipeline rank the sum over
   stages, on several the busiest pipeline rank (and, as a second candidate, again the sum).
2. The split into micro-batches minimises the largest one, because a pipeline runs at the pace of its largest.
3. On a pipeline the order of micro-batches matters: orders are simulated (all of up to four micro-batches, else a few)
   and each replica keeps its best.

M is the least for which step 1 and 2 find room under the hard capacities. Where the two-level split finds none, samples
are packed into the fewest bins first and whole bins are balanced instead. Price: heuristics at every level; the
plan's lower bound says how much they may have left.
"""

from collections.abc import Iterator
from itertools import permutations

import numpy as np

from balancer.counts import Int64Array
from balancer.errors import PlanError
from balancer.policies.base import CellTimes, Placement, PlacementProblem, sum_over_cells
from packing import InfeasiblePartitionError, bin_lower_bound, pack, partition

# Up to this many micro-batches every order is simulated (4! = 24).
MOST_PERMUTED = 4


def place(problem: PlacementProblem) -> Placement:
    """The best of a few balanced placements, by simulated makespan.

    Raises:
        PlanError: a fixed number of micro-batches that is too small.
    """
    bins = pack(problem.sizes, capacity=problem.capacity).bin_of.astype(np.int64)
    num_microbatches = problem.num_microbatches or problem.check_size(_least(problem, bins))
    best: Placement | None = None
    best_makespan = 0
    for weights in _weights(problem):
        found = _split(problem, weights, bins, num_microbatches)
        if found is None:
            continue
        placement, times = _ordered(problem, found)
        makespan = problem.makespan_ns(times)
        if best is None or makespan < best_makespan:
            best, best_makespan = placement, makespan
    if best is None:
        raise problem.does_not_fit("lpt", _least(problem, bins))
    return best


def _weights(problem: PlacementProblem) -> Iterator[Int64Array]:
    """Objectives to try: int64 [n, 1] or [n, P]."""
    work = problem.rank_work_ns()
    if problem.num_pipeline_ranks > 1:
        yield work
    yield work.sum(axis=1, keepdims=True)


def _least(problem: PlacementProblem, bins: Int64Array) -> int:
    """The least allowed M for which a split is found; that of the packed bins always is one."""
    bound = bin_lower_bound(problem.sizes, capacity=problem.capacity)
    enough = problem.round_up(-(-(int(bins.max()) + 1) // problem.dp_size))
    least = problem.check_size(problem.round_up(-(-bound // problem.dp_size)))
    for num_microbatches in range(least, enough, problem.num_microbatches_multiple):
        if any(_split_directly(problem, weights, num_microbatches) is not None for weights in _weights(problem)):
            return num_microbatches
    return enough


def _split(problem: PlacementProblem, weights: Int64Array, bins: Int64Array, num_microbatches: int) -> Placement | None:
    return _split_directly(problem, weights, num_microbatches) or _split_bins(problem, weights, bins, num_microbatches)


def _split_directly(problem: PlacementProblem, weights: Int64Array, num_microbatches: int) -> Placement | None:
    """Samples over ranks, then over the micro-batches of each rank; None where capacities stop one of the two."""
    rank_capacity = problem.replica_capacity(num_microbatches)
    microbatch = np.zeros(problem.num_samples, dtype=np.int64)
    try:
        dp_rank = partition(weights, problem.dp_size, capacity=rank_capacity, sizes=problem.sizes).part_of
        for rank in range(problem.dp_size if num_microbatches > 1 else 0):
            mine = np.flatnonzero(dp_rank == rank)
            microbatch[mine] = partition(
                weights[mine], num_microbatches, capacity=problem.capacity, sizes=problem.sizes[mine]
            ).part_of
    except InfeasiblePartitionError:
        return None
    return Placement.from_cells(dp_rank.astype(np.int64), microbatch, num_microbatches)


def _split_bins(
    problem: PlacementProblem, weights: Int64Array, bins: Int64Array, num_microbatches: int
) -> Placement | None:
    """Whole packed bins over ranks, at most M each; None where there are too many."""
    num_bins = int(bins.max()) + 1
    if num_bins > problem.dp_size * num_microbatches:
        return None
    bin_weights = sum_over_cells(bins, weights, (num_bins, 1))[:, 0]
    ones = np.ones((num_bins, 1), dtype=np.int64)
    try:
        rank_of_bin = partition(bin_weights, problem.dp_size, capacity=(num_microbatches,), sizes=ones).part_of
    except InfeasiblePartitionError as error:
        raise PlanError(f"{num_bins} bins do not go to {problem.dp_size} ranks, {num_microbatches} each") from error
    microbatch_of_bin = Placement.from_cells(rank_of_bin.astype(np.int64), np.zeros(num_bins, dtype=np.int64), 1).slot
    return Placement.from_cells(
        rank_of_bin[bins].astype(np.int64), microbatch_of_bin[bins].astype(np.int64), num_microbatches
    )


def _ordered(problem: PlacementProblem, placement: Placement) -> tuple[Placement, CellTimes]:
    """The placement with the micro-batches of every replica in the order that simulates fastest."""
    times = problem.cell_times(placement)
    num_microbatches = placement.num_microbatches
    # Where ranks meet in every micro-batch, one replica's order alone decides nothing.
    if problem.num_pipeline_ranks == 1 or num_microbatches == 1 or problem.parallel.meet != "step":
        return placement, times
    orders = _orders(times)
    every = times.reordered(orders)
    # [K, R, M, S] -> [K * R, M, S]: all candidates of all replicas in one simulation.
    flat = (len(orders) * problem.dp_size, num_microbatches, problem.num_stages)
    stacked = CellTimes(
        forward_ns=every.forward_ns.reshape(flat),
        backward_ns=every.backward_ns.reshape(flat),
        weight_ns=every.weight_ns.reshape(flat),
        present=every.present.reshape(flat),
    )
    makespans = problem.makespans_ns(stacked).reshape(len(orders), problem.dp_size)
    chosen = orders[makespans.argmin(axis=0), np.arange(problem.dp_size)]  # [R, M]
    place_in_order = np.argsort(chosen, axis=1)  # inverse permutation: micro-batch -> its turn
    microbatch = place_in_order[placement.dp_rank, placement.microbatch].astype(np.int64)
    best = Placement.from_cells(placement.dp_rank.astype(np.int64), microbatch, num_microbatches)
    return best, times.reordered(chosen)


def _orders(times: CellTimes) -> Int64Array:
    """Orders to try, int64 [K, R, M]: entry [k, r, i] is the micro-batch that runs i-th.

    All permutations of few micro-batches; of many the order as it is, by total time and by time in the first stage.
    """
    num_ranks, num_microbatches = times.forward_ns.shape[:2]
    if num_microbatches <= MOST_PERMUTED:
        every = np.array(list(permutations(range(num_microbatches))), dtype=np.int64)
        return np.repeat(every[:, np.newaxis], num_ranks, axis=1)
    per_stage = times.forward_ns + times.backward_ns
    total, first = per_stage.sum(axis=2), per_stage[:, :, 0]
    keys = np.stack([np.zeros_like(total), -total, total, -first, first, 2 * first - total])
    return np.argsort(keys, axis=2, kind="stable")
