"""The guard at the door of planning: sums that leave 64 bits are refused before any is made.

    counts [n], times [n, S] + constants [S] x R x M   --every column summed-->   below 2^62, or an error that names it

numpy integers wrap in silence, so two samples of 2^62 patches would give a cell of -2^63. Every number of a plan is a
sum of these columns over some samples, stages and constants, or a simulated time, which is at most their total: where
the totals stay below 2^62, so does everything that follows. The same limit is that of `packing`.

Price: one sum in float64 per column; exact integers only where that comes near the limit.
"""

import numpy as np

from balancer.counts import COUNT_COLUMNS, Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.policies.base import PlacementProblem

MAX_TOTAL = 2**62
# A float64 sum of n terms is off by less than n * 2^-53 of itself: far less than a quarter for any n in memory.
_NEAR = 0.75 * MAX_TOTAL


def exact_total(column: Int64Array) -> int:
    """Sum of a column of non-negative integers, any shape, as a Python int; exact where it is 2^62 or more, too."""
    if float(column.sum(dtype=np.float64)) < _NEAR:
        return int(column.sum())
    # Halves of 32 bits: their sums stay in 64 bits for up to 2^31 rows.
    return (int((column >> 32).sum()) << 32) + int((column & 0xFFFFFFFF).sum())


def check_total(name: str, column: Int64Array, sample_ids: Int64Array) -> int:
    """Total of a column [n] of the samples, checked.

    Raises:
        PlanError: 2^62 or more; names the column and the largest sample.
    """
    total = exact_total(column)
    if total >= MAX_TOTAL:
        row = int(column.argmax())
        raise PlanError(
            f"{name} of the step add up to {total}, beyond the 2^62 that plans count in; the largest is "
            f"{int(column[row])} of sample {int(sample_ids[row])}: check its counts, or use fewer samples in a step"
        )
    return total


def check_counts(counts: StepCounts) -> None:
    """Check every column of the counts.

    Raises:
        PlanError: as `check_total`.
    """
    for name in COUNT_COLUMNS:
        check_total(name, getattr(counts, name), counts.sample_ids)


def check_problem(problem: PlacementProblem) -> None:
    """Check sizes and times of a problem; constants count as often as micro-batches are possible.

    Raises:
        PlanError: as `check_total`, or constants per micro-batch that add up to 2^62 together with the times.
    """
    ids = problem.counts.sample_ids
    for name, column in zip(problem.capacity_names, problem.sizes.T, strict=True):
        check_total(name, column, ids)
    total = 0
    for what, times in (("forward_ns", problem.forward_ns), ("backward_ns", problem.backward_ns)):
        for stage in range(problem.num_stages):
            total += check_total(f"{what} of stage {stage}", times[:, stage], ids)
    # Items round by themselves, so their times are not quite the share of stage 0.
    total += exact_total(problem.item_forward_ns) + exact_total(problem.item_backward_ns)
    # A free M never exceeds one micro-batch per sample, rounded up.
    most = problem.num_microbatches or problem.round_up(problem.num_samples)
    constants = problem.forward_constant_ns.tolist() + problem.backward_constant_ns.tolist()
    # A cell without samples runs nothing, so there are at most n cells that cost their constants; where replicas meet
    # in every micro-batch they last as long on all, which M counts.
    cells = min(problem.dp_size * most, max(problem.num_samples, most))
    total += sum(constants) * cells
    if total >= MAX_TOTAL:
        stage = constants.index(max(constants)) % problem.num_stages
        times = problem.forward_ns.sum(axis=1, dtype=np.float64) + problem.backward_ns.sum(axis=1, dtype=np.float64)
        row = int(times.argmax())
        raise PlanError(
            f"the times of the step add up to {total} ns, beyond the 2^62 that plans count in: sample "
            f"{int(ids[row])} takes {times[row]:.3g} ns, the largest, and {cells} micro-batches take up to "
            f"{max(constants)} ns each on stage {stage} whatever they hold; check the cost model and the counts"
        )
