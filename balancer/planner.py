"""`plan_step`: from the counts of a step to its plan, the same on every rank.

    StepCounts [n] + cost model      -> forward, backward ns   [n, S]
    policy                           -> (dp_rank, microbatch, slot)  [n]      under hard capacities
    simulation of every replica      -> makespan [R], the step is the largest
    bounds                           -> no placement takes less

`lpt` is compared with `sequential` in every step and replaced by it where it would be slower: a balancer must never
cost anything. The comparison is by simulated time, in integers; equal times keep the balanced placement.
"""

from dataclasses import replace

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import COUNT_COLUMNS, Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.layout import Layout
from balancer.metrics import fill, imbalance
from balancer.plan import Capacities, StepPlan, digest_fields
from balancer.policies import Placement, PlacementProblem, Policy, get_policy
from balancer.policies.base import CellTimes, sum_over_cells
from balancer.schedule import GENERATORS, schedule_names


def plan_step(
    counts: StepCounts,
    *,
    layout: Layout,
    cost_model: CostModel,
    capacities: Capacities,
    schedule: str = "1f1b",
    policy: str = "lpt",
    num_microbatches: int | None = None,
    min_num_microbatches: int = 1,
    num_microbatches_multiple: int = 1,
    seed: int = 0,
    step: int = 0,
    epoch: int = 0,
    cursor: int = 0,
) -> StepPlan:
    """Plan one step; pure and in integers, so every rank and host gets the same plan.

    Args:
        counts: the samples of the step in selection order.
        layout: DP and pipeline degrees; its number of stages is the cost model's.
        capacities: hard limits of every micro-batch.
        schedule: `1f1b` or `gpipe`; what replicas are simulated with.
        policy: see `balancer.policies`.
        num_microbatches: fixed M, or None for the least that fits (for a `never_worse` policy on a pipeline also the
            number that `sequential` needs, where more micro-batches are faster).
        min_num_microbatches, num_microbatches_multiple: floor and granularity of a free M.
        seed, step, epoch, cursor: identity of the step; part of the inputs digest.

    Raises:
        PlanError: no samples, a sample or a fixed M that cannot fit, or options that do not go together.
    """
    chosen = get_policy(policy)
    _check_inputs(counts, layout, cost_model, schedule)
    _check_num_microbatches(num_microbatches, min_num_microbatches, num_microbatches_multiple)
    _check_sizes(counts, capacities)
    problem = PlacementProblem(
        counts=counts,
        forward_ns=cost_model.forward_ns(counts),
        backward_ns=cost_model.backward_ns(counts),
        forward_constant_ns=cost_model.forward_constant_ns(),
        backward_constant_ns=cost_model.backward_constant_ns(),
        dp_size=layout.dp_size,
        stage_ranks=tuple(layout.stage_ranks()),
        schedule=schedule,
        sizes=capacities.sizes(counts),
        capacity=tuple(limit for _, limit in capacities.limits()),
        capacity_names=tuple(name for name, _ in capacities.limits()),
        num_microbatches=num_microbatches,
        min_num_microbatches=min_num_microbatches,
        num_microbatches_multiple=num_microbatches_multiple,
    )
    inputs_digest = digest_fields(
        {
            **{name: getattr(counts, name) for name in ("sample_ids", *COUNT_COLUMNS)},
            "cost_model": cost_model.fingerprint,
            "dp_size": layout.dp_size,
            "stage_ranks": np.array(problem.stage_ranks, dtype=np.int64),
            **{f"capacity_{name}": limit for name, limit in capacities.limits()},
            "schedule": schedule,
            "policy": policy,
            "num_microbatches": num_microbatches or 0,
            "min_num_microbatches": min_num_microbatches,
            "num_microbatches_multiple": num_microbatches_multiple,
            "seed": seed,
            "step": step,
            "epoch": epoch,
            "cursor": cursor,
        }
    )
    return _plan(problem, chosen, step=step, epoch=epoch, cursor=cursor, inputs_digest=inputs_digest)


def _plan(
    problem: PlacementProblem, policy: Policy, *, step: int, epoch: int, cursor: int, inputs_digest: str
) -> StepPlan:
    baseline, baseline_note = _baseline(problem)
    before = problem.cell_times(baseline)
    makespan_before = int(problem.makespans_ns(before).max())
    placement, used, note = _choose(problem, policy, baseline, makespan_before, comparable=not baseline_note)
    times = problem.cell_times(placement)
    rank_makespan = problem.makespans_ns(times)
    sums = _cell_sums(problem, placement)
    num_cells = int((sums["num_samples"] > 0).sum())
    return StepPlan(
        step=step,
        epoch=epoch,
        cursor=cursor,
        dp_size=problem.dp_size,
        num_microbatches=placement.num_microbatches,
        num_stages=len(problem.stage_ranks),
        policy=policy.name,
        policy_used=used,
        schedule=problem.schedule,
        note="; ".join(text for text in (baseline_note, note) if text),
        sample_ids=problem.counts.sample_ids,
        dp_rank=placement.dp_rank,
        microbatch=placement.microbatch,
        slot=placement.slot,
        llm_tokens=sums["llm_tokens"],
        patches=sums["patches"],
        visual_tokens=sums["visual_tokens"],
        label_tokens=sums["label_tokens"],
        num_samples=sums["num_samples"],
        forward_ns=times.forward_ns,
        backward_ns=times.backward_ns,
        rank_makespan_ns=rank_makespan,
        makespan_ns=int(rank_makespan.max()),
        lower_bound_ns=lower_bound_ns(problem),
        makespan_before_ns=makespan_before,
        imbalance_before=imbalance(_busy_ns(before)),
        imbalance_after=imbalance(_busy_ns(times)),
        fill=fill(int(sums["llm_tokens"].sum()), num_cells * problem.capacity[0]),
        inputs_digest=inputs_digest,
    )


def _baseline(problem: PlacementProblem) -> tuple[Placement, str]:
    """The sequential placement, with its own M (and a note) where the fixed one is too small for it."""
    sequential = get_policy("sequential")
    try:
        return sequential.place(problem), ""
    except PlanError:
        placement = sequential.place(replace(problem, num_microbatches=None))
        return placement, f"sequential needs {placement.num_microbatches} micro-batches; 'before' is with these"


def _choose(
    problem: PlacementProblem, policy: Policy, baseline: Placement, makespan_before: int, *, comparable: bool
) -> tuple[Placement, str, str]:
    """(placement, policy used, note): the policy's own, unless `sequential` would be faster and is allowed to win."""
    if policy.name == "sequential" and comparable:
        return baseline, policy.name, ""
    fallback = baseline if policy.never_worse and comparable else None
    try:
        placement = policy.place(problem)
    except PlanError:
        # A heuristic may miss a fit that the order of selection happens to have.
        if fallback is None:
            raise
        return fallback, "sequential", f"kept sequential: {policy.name} found no room in its micro-batches"
    makespan = _makespan(problem, placement)
    if fallback is None or makespan <= makespan_before:
        return placement, policy.name, ""
    more = _with_num_microbatches(problem, policy, fallback.num_microbatches, instead_of=placement)
    if more is not None and _makespan(problem, more) <= makespan_before:
        note = f"num_microbatches={more.num_microbatches} simulates faster than {placement.num_microbatches}"
        return more, policy.name, note
    note = f"kept sequential: {policy.name} simulates to {makespan} ns, sequential to {makespan_before} ns"
    return fallback, "sequential", note


def _with_num_microbatches(
    problem: PlacementProblem, policy: Policy, num_microbatches: int, *, instead_of: Placement
) -> Placement | None:
    """The policy with as many micro-batches as `sequential`: on a pipeline more can be faster, so compare alike."""
    if num_microbatches == instead_of.num_microbatches:
        return None
    try:
        return policy.place(replace(problem, num_microbatches=num_microbatches))
    except PlanError:
        return None


def _makespan(problem: PlacementProblem, placement: Placement) -> int:
    return int(problem.makespans_ns(problem.cell_times(placement)).max())


def lower_bound_ns(problem: PlacementProblem) -> int:
    """A time that no placement of these samples beats: the larger of two bounds.

    1. Work: some replica has at least the mean work of a pipeline rank; that rank can start only after the forward of
       some sample upstream of it and must leave time for some sample's backward upstream after it ends.
    2. Longest sample: its forward through all stages and its backward, one after the other.

    Micro-batch constants are left out, which keeps both valid.
    """
    stage_ranks = np.asarray(problem.stage_ranks)
    bound = int((problem.forward_ns + problem.backward_ns).sum(axis=1).max())
    for rank in range(problem.num_pipeline_ranks):
        work = sum(int(times[:, stage_ranks == rank].sum()) for times in (problem.forward_ns, problem.backward_ns))
        # The first forward and the last backward may belong to different samples, so each has its own minimum.
        ends = sum(
            int(times[:, stage_ranks < rank].sum(axis=1).min()) for times in (problem.forward_ns, problem.backward_ns)
        )
        bound = max(bound, -(-work // problem.dp_size) + ends)
    return bound


def _cell_sums(problem: PlacementProblem, placement: Placement) -> dict[str, Int64Array]:
    shape = (problem.dp_size, placement.num_microbatches)
    cell = placement.dp_rank.astype(np.int64) * placement.num_microbatches + placement.microbatch
    names = ("llm_tokens", "patches", "visual_tokens", "label_tokens")
    sums = {name: sum_over_cells(cell, getattr(problem.counts, name), shape) for name in names}
    return sums | {"num_samples": sum_over_cells(cell, np.ones(problem.num_samples, dtype=np.int64), shape)}


def _busy_ns(times: CellTimes) -> Int64Array:
    """Busy time of every replica over all its stages, int64 [R]."""
    busy: Int64Array = (times.forward_ns + times.backward_ns).sum(axis=(1, 2))
    return busy


def _check_inputs(counts: StepCounts, layout: Layout, cost_model: CostModel, schedule: str) -> None:
    if not len(counts):
        raise PlanError(
            "a step without samples cannot be planned: the selection is empty (no data, or every sample was dropped)"
        )
    if schedule not in GENERATORS:
        raise PlanError(f"schedule {schedule!r} is not available; available: {', '.join(schedule_names())}")
    if cost_model.num_stages != layout.num_stages:
        raise PlanError(
            f"the cost model has {cost_model.num_stages} stages, the layout {layout.num_stages} "
            f"(pp_size={layout.pp_size}: encoder and {layout.num_stages - 1} LLM stages)"
        )


def _check_num_microbatches(num_microbatches: int | None, minimum: int, multiple: int) -> None:
    if minimum < 1 or multiple < 1:
        raise PlanError(f"min_num_microbatches={minimum}, num_microbatches_multiple={multiple}: both are at least 1")
    if num_microbatches is None:
        return
    if num_microbatches < minimum:
        raise PlanError(f"num_microbatches={num_microbatches} is below the minimum of {minimum}")
    if num_microbatches % multiple:
        nearest = -(-num_microbatches // multiple) * multiple
        raise PlanError(
            f"num_microbatches={num_microbatches} is no multiple of {multiple} "
            f"({num_microbatches} = {num_microbatches // multiple} x {multiple} + {num_microbatches % multiple}); "
            f"use {nearest}"
        )


def _check_sizes(counts: StepCounts, capacities: Capacities) -> None:
    for (name, limit), column in zip(capacities.limits(), capacities.sizes(counts).T, strict=True):
        too_large = np.flatnonzero(column > limit)
        if len(too_large):
            found = ", ".join(f"sample {int(counts.sample_ids[row])}: {int(column[row])}" for row in too_large)
            raise PlanError(
                f"samples larger than the capacity of {limit} {name} of a micro-batch: {found}. "
                "Raise the capacity or leave them out with the oversize policy 'drop'"
            )
