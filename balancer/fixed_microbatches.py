"""Whether every step fits into a fixed number of micro-batches, known before step 1 and mostly without planning it.

    sizes [n, d] of a step, capacity [d], R * M cells
      sum over d of total / (capacity - largest + 1), rounded down, + 1  <=  R * M    it fits, whatever the policy
      some total > R * M * capacity                                                   it does not, and no plan is tried
      else                                                                            plan it and see

Why the first line holds: whoever opens a new cell only when a sample does not fit leaves each closed cell filled above
capacity - largest in some dimension, and so much each total allows only so often. That covers filling in order (next
fit, `sequential`) and any-fit packing, which every other policy falls back on.

Price: the selection and the sums of every step of the run, 0.1 to 0.3 ms each, and the planning time of the steps that
are nearly full. Ranks share the steps.
"""

from collections.abc import Iterable

from balancer.counts import Int64Array
from balancer.errors import PlanError
from balancer.plan_sequence import PlanSequence


def check_steps_fit(plans: PlanSequence, steps: Iterable[int]) -> int:
    """Raise the error that planning one of `steps` would raise; returns how many of them had to be planned.

    Raises:
        PlanError: a step whose samples do not fit into the fixed number of micro-batches.
    """
    spec, num_planned = plans.spec, 0
    if spec.num_microbatches is None:
        return 0
    num_cells = spec.dp_size * spec.num_microbatches
    for step in steps:
        limits, sizes = plans.capacities.table(plans.counts(step), plans.cost_model)
        _check_sums(step, limits, sizes, num_cells, spec.num_microbatches)
        if not surely_fits(sizes, tuple(limit for _, limit in limits), num_cells):
            plans.plan(step)
            num_planned += 1
    return num_planned


def surely_fits(sizes: Int64Array, capacity: tuple[int, ...], num_cells: int) -> bool:
    """Whether samples of `sizes` [n, d] fit into `num_cells` cells however carelessly they are filled."""
    totals, largest = sizes.sum(axis=0).tolist(), sizes.max(axis=0).tolist()
    if any(most > limit for most, limit in zip(largest, capacity, strict=True)):
        return False
    closed = sum(total // (limit - most + 1) for total, most, limit in zip(totals, largest, capacity, strict=True))
    return bool(closed + 1 <= num_cells)


def _check_sums(
    step: int, limits: tuple[tuple[str, int], ...], sizes: Int64Array, num_cells: int, num_microbatches: int
) -> None:
    for (name, limit), total in zip(limits, sizes.sum(axis=0).tolist(), strict=True):
        if total > limit * num_cells:
            needed = -(-total // (limit * (num_cells // num_microbatches)))
            raise PlanError(
                f"num_microbatches={num_microbatches} does not hold step {step + 1}: it has {total} {name}, and "
                f"{num_cells} micro-batches ({num_cells // num_microbatches} replicas) of {limit} hold at most "
                f"{num_cells * limit}; it may fit with num_microbatches={needed} or more, a larger capacity, or fewer "
                f"samples per step"
            )
