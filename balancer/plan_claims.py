"""What a plan says of itself, made again from its own cells: times, makespans, work, ratios.

    counts + cost model         --sums over cells-->  forward, backward, weight ns  [R, M, S]
    forward, backward, weight   --simulation------->  rank_makespan_ns [R], makespan_ns
                                --sums------------->  stage_work_ns [P], imbalance, label imbalance, fill

Exact: the same integers and the same divisions. Left unchecked is what needs other placements: the figures `before` and
the parts of the bound, which only have to go together.
"""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from balancer.cost_model import CostModel
from balancer.counts import Int64Array, StepCounts
from balancer.errors import PlanError, ScheduleError
from balancer.makespans import Meet, makespans_ns, meeting_makespan_ns
from balancer.metrics import fill, imbalance
from balancer.plan import BOUNDS, Capacities, StepPlan
from balancer.schedule import Schedule, build_schedule
from balancer.schedules.program import WEIGHT


def schedule_of(plan: StepPlan) -> Schedule:
    """The schedule of one replica.

    Raises:
        PlanError: there is none of that name for these stages.
    """
    try:
        return build_schedule(
            plan.schedule, stage_ranks=plan.stage_ranks.tolist(), num_microbatches=plan.num_microbatches
        )
    except ScheduleError as error:
        raise PlanError(f"plan of step {plan.step}: {error}") from error


def verify_claims(
    plan: StepPlan, counts: StepCounts, capacities: Capacities, cost_model: CostModel | None, acts: Int64Array
) -> None:
    """Check times (with the cost model only), makespans, work and ratios.

    Args:
        plan: whose places and sums are right already.
        counts, capacities, cost_model: what it was made from.
        acts: int64 [k], encoder act of every media item, dp_rank * M + entry; not read where nothing is routed.

    Raises:
        PlanError: a claim that does not follow; names the field, what it says and what follows.
    """
    schedule, present = schedule_of(plan), _present(plan)
    _verify_bounds(plan)
    if cost_model is not None:
        _verify_times(plan, counts, cost_model, schedule, acts)
    _verify_makespans(plan, schedule, present)
    busy = plan.forward_ns.sum(axis=(1, 2)) + plan.backward_ns.sum(axis=(1, 2))
    cells = int((plan.num_samples > 0).sum())
    _verify_equal(plan, "stage_work_ns", plan.stage_work_ns, _stage_work_ns(plan, schedule, present))
    for name, follows in (
        ("imbalance_after", imbalance(busy)),
        ("label_imbalance_after", imbalance(plan.label_tokens.sum(axis=1))),
        ("fill", fill(int(plan.llm_tokens.sum()), cells * capacities.tokens)),
    ):
        _verify_equal(plan, name, getattr(plan, name), follows)
    for name in ("imbalance_before", "label_imbalance_before"):
        if not 1.0 <= getattr(plan, name) <= plan.dp_size * (1.0 + 1e-9):
            raise PlanError(
                f"plan of step {plan.step}: {name}={getattr(plan, name)} is no max / mean over {plan.dp_size} ranks"
            )


def _verify_bounds(plan: StepPlan) -> None:
    if plan.lower_bound_ns != max(getattr(plan, name) for name in BOUNDS):
        raise PlanError(f"plan of step {plan.step}: lower_bound_ns is not the largest of its parts")
    if plan.lower_bound_ns > plan.makespan_ns:
        raise PlanError(
            f"plan of step {plan.step}: its lower bound of {plan.lower_bound_ns} ns is above its own makespan of "
            f"{plan.makespan_ns} ns"
        )
    if int(plan.rank_makespan_ns.max()) > plan.makespan_ns:
        raise PlanError(f"plan of step {plan.step}: a replica takes longer by itself than the step")


def _present(plan: StepPlan) -> NDArray[np.bool_]:
    """Which acts run, bool [R, M, S]; the same as `StepPlan.absent` says."""
    present = np.repeat((plan.num_samples > 0)[:, :, np.newaxis], plan.num_stages, axis=2)
    if plan.has_encoder:
        present[:, :, 0] = plan.encoder_patches > 0
    return present


def _verify_times(
    plan: StepPlan, counts: StepCounts, cost_model: CostModel, schedule: Schedule, acts: Int64Array
) -> None:
    if cost_model.num_stages != plan.num_stages:
        raise PlanError(
            f"plan of step {plan.step} has {plan.num_stages} stages, the cost model {cost_model.num_stages}"
        )
    forward = cost_model.forward_ns(counts), cost_model.forward_constant_ns()
    backward = cost_model.backward_ns(counts), cost_model.backward_constant_ns()
    weight = cost_model.weight_ns(counts), cost_model.weight_constant_ns()
    of_items: dict[str, Int64Array] = {}
    if plan.routed:
        shape = (plan.dp_size, plan.num_microbatches)
        of_items["forward_ns"] = sums_of(acts, cost_model.item_forward_ns(counts), shape)
        of_items["backward_ns"] = sums_of(acts, cost_model.item_backward_ns(counts), shape)
        of_items["weight_ns"] = of_items["backward_ns"] // 2
    splits = bool((schedule.op == WEIGHT).any())
    for name, (times, constant) in (("forward_ns", forward), ("backward_ns", backward), ("weight_ns", weight)):
        follows = np.zeros_like(plan.weight_ns)
        if splits or name != "weight_ns":
            follows = _cell_times(plan, counts, times)
            if name in of_items:
                follows[:, :, 0] = of_items[name]
            follows += _present(plan) * constant
        _verify_equal(plan, name, getattr(plan, name), follows)


def _cell_times(plan: StepPlan, counts: StepCounts, times: Int64Array) -> Int64Array:
    """Sums of times [n, S] over the samples of every cell, int64 [R, M, S], without constants."""
    if plan.has_encoder:
        times[counts.patches == 0, 0] = 0  # it does not run for them, whatever its terms say
    cell = plan.dp_rank.astype(np.int64) * plan.num_microbatches + plan.microbatch
    return sums_of(cell, times, (plan.dp_size, plan.num_microbatches))


def _verify_makespans(plan: StepPlan, schedule: Schedule, present: NDArray[np.bool_]) -> None:
    times = schedule, plan.forward_ns, plan.backward_ns, present
    try:
        ranks = makespans_ns(*times, weight_ns=plan.weight_ns, routed=plan.routed)
        meet = cast(Meet, plan.meet)  # a name that there is not is refused there
        step = meeting_makespan_ns(*times, meet, weight_ns=plan.weight_ns, routed=plan.routed)
    except ScheduleError as error:
        raise PlanError(f"plan of step {plan.step}: {error}") from error
    _verify_equal(plan, "rank_makespan_ns", plan.rank_makespan_ns, ranks)
    _verify_equal(plan, "makespan_ns", plan.makespan_ns, int(step))


def _stage_work_ns(plan: StepPlan, schedule: Schedule, present: NDArray[np.bool_]) -> Int64Array:
    """Work of every pipeline rank over all replicas, int64 [P]; a spread stage goes where its acts run."""
    per_stage = np.where(present, plan.forward_ns + plan.backward_ns, 0).sum(axis=0)  # [M, S]
    work = np.zeros(plan.num_pipeline_ranks, dtype=np.int64)
    np.add.at(work, schedule.place, per_stage.T)
    return work


def _verify_equal(plan: StepPlan, name: str, says: object, follows: object) -> None:
    """A number or an array against what follows from the plan; the first place where they differ is named."""
    given, made = np.asarray(says), np.asarray(follows)
    differs = np.flatnonzero(given != made)
    if len(differs):
        place = [int(index) for index in np.unravel_index(int(differs[0]), made.shape)] if made.ndim else []
        raise PlanError(
            f"plan of step {plan.step}: {name}{place or ''} is {given.flat[differs[0]]}, but "
            f"{made.flat[differs[0]]} follows from what the plan holds"
        )


def sums_of(cell: Int64Array, column: Int64Array, shape: tuple[int, int]) -> Int64Array:
    """Sums of `column` [n] or [n, S] over rows with the same cell, int64 [R, M] or [R, M, S]."""
    sums = np.zeros((shape[0] * shape[1], *column.shape[1:]), dtype=np.int64)
    np.add.at(sums, cell, column)
    return sums.reshape(*shape, *column.shape[1:])
