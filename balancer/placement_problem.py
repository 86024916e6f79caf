"""From counts, layout and cost model to the problem that policies are asked.

    StepCounts [n] --cost model--> times [n, S], items [k]     Capacities --> sizes [n, d], limits [d]
    ParallelSpec + schedule --> stages, ranks, allowed numbers of micro-batches

Everything that cannot work is refused here, before any placement: no samples, another number of stages, stages that the
schedule cannot run, a sample above a capacity. Every schedule runs any number of micro-batches, so a fixed one is only
held against what `ParallelSpec` asks for, which has refused it already.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.exact_sums import check_counts, check_problem
from balancer.item_limits import item_limits
from balancer.layout import ParallelSpec
from balancer.plan import Capacities
from balancer.policies.base import PlacementProblem
from balancer.schedule import build_schedule, canonical_name
from balancer.schedules.program import WEIGHT


def placement_problem(
    counts: StepCounts, *, parallel: ParallelSpec, cost_model: CostModel, capacities: Capacities, schedule: str
) -> PlacementProblem:
    """What policies are asked; arguments as in `balancer.planner.plan_step`.

    Raises:
        PlanError, ScheduleError: as `plan_step`.
    """
    if not len(counts):
        raise PlanError(
            "a step without samples cannot be planned: the selection is empty (no data, or every sample was dropped)"
        )
    check_counts(counts)
    name = canonical_name(schedule)
    if cost_model.num_stages != parallel.num_stages:
        raise PlanError(
            f"the cost model has {cost_model.num_stages} stages, the layout {parallel.num_stages} "
            f"({', '.join(parallel.domain_of_stage)} on pipeline ranks {list(parallel.stage_ranks)})"
        )
    splits = splits_backward(name, parallel.stage_ranks)
    limits, sizes = capacities.table(counts, cost_model)
    _check_sizes(counts, limits, sizes)
    forward, backward = cost_model.forward_ns(counts), cost_model.backward_ns(counts)
    weight = cost_model.weight_ns(counts) if splits else np.zeros_like(backward)
    if parallel.has_encoder:
        # The encoder does not run for a sample without patches, whatever its terms say.
        textual = counts.patches == 0
        for times in (forward, backward, weight):
            times[textual, 0] = 0
    nothing = np.zeros(0, dtype=np.int64)
    spread = parallel.encoder_is_spread
    of_items, item_sizes = item_limits(counts, capacities, cost_model) if spread else ((), nothing.reshape(0, 0))
    problem = PlacementProblem(
        counts=counts,
        forward_ns=forward,
        backward_ns=backward,
        weight_ns=weight,
        forward_constant_ns=cost_model.forward_constant_ns(),
        backward_constant_ns=cost_model.backward_constant_ns(),
        weight_constant_ns=cost_model.weight_constant_ns(),
        item_forward_ns=cost_model.item_forward_ns(counts) if spread else nothing,
        item_backward_ns=cost_model.item_backward_ns(counts) if spread else nothing,
        parallel=parallel,
        schedule=name,
        sizes=sizes,
        capacity=tuple(limit for _, limit in limits),
        capacity_names=tuple(name for name, _ in limits),
        num_microbatches=parallel.num_microbatches,
        min_num_microbatches=parallel.min_num_microbatches,
        num_microbatches_multiple=parallel.num_microbatches_multiple,
        splits_backward=splits,
        item_sizes=item_sizes,
        item_capacity=tuple(limit for _, limit in of_items),
    )
    check_problem(problem)
    return problem


@lru_cache(maxsize=64)
def splits_backward(schedule: str, stage_ranks: tuple[int, ...]) -> bool:
    """Whether the schedule runs weight gradients by themselves.

    Raises:
        ScheduleError: stages this schedule cannot run, with whatever number of micro-batches.
    """
    num_ranks = max(stage_ranks) + 1
    built = build_schedule(schedule, stage_ranks=stage_ranks, num_microbatches=num_ranks)
    return bool((built.op == WEIGHT).any())


def _check_sizes(counts: StepCounts, limits: Sequence[tuple[str, int]], sizes: Int64Array) -> None:
    for (name, limit), column in zip(limits, sizes.T, strict=True):
        too_large = np.flatnonzero(column > limit)
        if len(too_large):
            found = ", ".join(f"sample {int(counts.sample_ids[row])}: {int(column[row])}" for row in too_large)
            raise PlanError(
                f"samples larger than the capacity of {limit} {name} of a micro-batch: {found}. "
                "Raise the capacity or leave them out with the oversize policy 'drop'"
            )
