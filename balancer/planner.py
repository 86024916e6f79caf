"""`plan_step`: from the counts of a step to its plan, the same on every rank.

    StepCounts [n] + cost model      -> forward, backward ns   [n, S]
    policy                           -> (dp_rank, microbatch, slot)  [n]      under hard capacities
                                        (encoder_rank, unit)         [k]      where the encoder is spread
    simulation                       -> makespan [R], the step is the largest, or what replicas that meet make of it
    bounds                           -> no placement takes less

A balancing policy is compared with `sequential` in every step and replaced by it where it would be slower: a balancer
must never cost anything. The comparison is by simulated time, in integers; equal times keep the balanced placement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from balancer.bounds import Bounds, lower_bounds
from balancer.cost_model import CostModel
from balancer.counts import COUNT_COLUMNS, ITEM_TABLE, Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.layout import ParallelSpec
from balancer.metrics import fill, imbalance
from balancer.placement_problem import placement_problem
from balancer.plan import Capacities, Int32Array, StepPlan, digest_fields
from balancer.plan_fields import WHOLE_FIELDS, dropped_field, text_field, whole_field
from balancer.policies import Placement, PlacementProblem, Policy, get_policy
from balancer.policies.aligned_media import with_aligned_media
from balancer.policies.base import CellTimes, sum_over_cells
from balancer.policies.empty_cells import without_empty_cells

DEFAULT_POLICY = "joint"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """Which step this is; part of the inputs digest."""

    seed: int
    step: int
    epoch: int
    cursor: int
    dropped: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Simulated:
    """A placement and what it takes."""

    placement: Placement
    times: CellTimes
    makespan_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """What is said about a plan, see `StepPlan`."""

    policy: str
    policy_used: str
    binding: str
    note: str


def plan_step(
    counts: StepCounts,
    *,
    parallel: ParallelSpec,
    cost_model: CostModel,
    capacities: Capacities,
    schedule: str = "1f1b",
    policy: str = DEFAULT_POLICY,
    seed: int = 0,
    step: int = 0,
    epoch: int = 0,
    cursor: int = 0,
    dropped: Sequence[tuple[int, str]] = (),
) -> StepPlan:
    """Plan one step; pure and in integers, so every rank and host gets the same plan.

    Args:
        counts: the samples of the step in selection order.
        parallel: replicas, stages, micro-batches, where ranks meet; its number of stages is the cost model's.
        capacities: hard limits of every micro-batch.
        schedule: what replicas are simulated with, see `balancer.schedule`.
        policy: see `balancer.policies`.
        seed, step, epoch, cursor: identity of the step, up to 2**64 - 1; part of the inputs digest.
        dropped: (sample id, reason) of what was selected and is not in `counts`; carried into the plan.

    Returns:
        The plan. A free number of micro-batches is the least that fits (for a `never_worse` policy on a pipeline also
        the number that `sequential` needs, where more micro-batches are faster), rounded up to the multiple that
        `parallel` asks for.

    Raises:
        PlanError: no samples, a sample or a fixed M that cannot fit, options that do not go together or are of another
            type.
        ScheduleError: a schedule that does not exist or cannot run these stages.
    """
    chosen = get_policy(text_field("policy", policy))
    text_field("schedule", schedule)
    identity = _Identity(
        seed=whole_field("seed", seed, -(2**63), 2**64 - 1),
        step=whole_field("step", step, *WHOLE_FIELDS["step"]),
        epoch=whole_field("epoch", epoch, *WHOLE_FIELDS["epoch"]),
        cursor=whole_field("cursor", cursor, *WHOLE_FIELDS["cursor"]),
        dropped=dropped_field(dropped),
    )
    problem = placement_problem(
        counts, parallel=parallel, cost_model=cost_model, capacities=capacities, schedule=schedule
    )
    inputs = _inputs_digest(problem, cost_model, capacities, policy, identity)
    baseline, baseline_note = _baseline(problem)
    found, used, note = _choose(problem, chosen, baseline, comparable=not baseline_note)
    bounds = lower_bounds(problem, found.placement.num_microbatches)
    binding, why = bounds.judge(problem, found.makespan_ns)
    notes = [text for text in (baseline_note, note, why) if text]
    return _assemble(
        problem,
        found,
        baseline,
        bounds,
        identity,
        verdict=_Verdict(policy=policy, policy_used=used, binding=binding, note="; ".join(notes)),
        inputs_digest=inputs,
    )


def _inputs_digest(
    problem: PlacementProblem, cost_model: CostModel, capacities: Capacities, policy: str, identity: _Identity
) -> str:
    counts, parallel = problem.counts, problem.parallel
    items = ITEM_TABLE if parallel.encoder_is_spread else ()
    return digest_fields(
        {
            **{name: getattr(counts, name) for name in ("sample_ids", *COUNT_COLUMNS, *items)},
            "cost_model": cost_model.fingerprint,
            "dp_size": parallel.dp_size,
            "stage_ranks": np.array(parallel.stage_ranks, dtype=np.int64),
            "stage_domains": ",".join(parallel.domain_of_stage),
            "meet": parallel.meet,
            **({"fill_cells": 1} if parallel.fill_cells else {}),
            **({"media_presence": parallel.media_presence} if parallel.media_presence != "any" else {}),
            **{f"capacity_{name}": limit for name, limit in capacities.limits()},
            "schedule": problem.schedule,
            "policy": policy,
            "num_microbatches": problem.num_microbatches or 0,
            "min_num_microbatches": problem.min_num_microbatches,
            "num_microbatches_multiple": problem.num_microbatches_multiple,
            "seed": identity.seed,
            "step": identity.step,
            "epoch": identity.epoch,
            "cursor": identity.cursor,
            "dropped": "\n".join(f"{sample} {reason}" for sample, reason in identity.dropped),
        }
    )


def _baseline(problem: PlacementProblem) -> tuple[_Simulated, str]:
    """The sequential placement, with its own M (and a note) where the fixed one is too small for it."""
    sequential = get_policy("sequential")
    try:
        return _placed(problem, sequential), ""
    except PlanError:
        found = _placed(replace(problem, num_microbatches=None), sequential)
        return found, f"sequential needs {found.placement.num_microbatches} micro-batches; 'before' is with these"


def _placed(problem: PlacementProblem, policy: Policy) -> _Simulated:
    """The policy's placement, without empty cells and with media where they are allowed, simulated."""
    placement = without_empty_cells(problem, policy.place(problem))
    placement = with_aligned_media(problem, placement, balanced=policy.never_worse)
    times = problem.cell_times(placement)
    return _Simulated(placement=placement, times=times, makespan_ns=problem.makespan_ns(times))


def _choose(
    problem: PlacementProblem, policy: Policy, baseline: _Simulated, *, comparable: bool
) -> tuple[_Simulated, str, str]:
    """(placement, policy used, note): the policy's own, unless `sequential` would be faster and is allowed to win."""
    if policy.name == "sequential" and comparable:
        return baseline, policy.name, ""
    fallback = baseline if policy.never_worse and comparable else None
    try:
        found = _placed(problem, policy)
    except PlanError:
        # A heuristic may miss a fit that the order of selection happens to have.
        if fallback is None:
            raise
        return fallback, "sequential", f"kept sequential: {policy.name} found no room in its micro-batches"
    if fallback is None or found.makespan_ns <= fallback.makespan_ns:
        return found, policy.name, ""
    more = _with_num_microbatches(problem, policy, fallback.placement.num_microbatches, instead_of=found.placement)
    if more is not None and more.makespan_ns <= fallback.makespan_ns:
        fewer, now = found.placement.num_microbatches, more.placement.num_microbatches
        return more, policy.name, f"num_microbatches={now} simulates faster than {fewer}"
    note = (
        f"kept sequential: {policy.name} simulates to {found.makespan_ns} ns, sequential to {fallback.makespan_ns} ns"
    )
    return fallback, "sequential", note


def _with_num_microbatches(
    problem: PlacementProblem, policy: Policy, num_microbatches: int, *, instead_of: Placement
) -> _Simulated | None:
    """The policy with as many micro-batches as `sequential`: on a pipeline more can be faster, so compare alike."""
    if num_microbatches == instead_of.num_microbatches:
        return None
    try:
        return _placed(replace(problem, num_microbatches=num_microbatches), policy)
    except PlanError:
        return None


def _assemble(
    problem: PlacementProblem,
    found: _Simulated,
    baseline: _Simulated,
    bounds: Bounds,
    identity: _Identity,
    *,
    verdict: _Verdict,
    inputs_digest: str,
) -> StepPlan:
    parallel, placement, times = problem.parallel, found.placement, found.times
    shape = (problem.dp_size, placement.num_microbatches)
    sums = sum_over_cells(problem.cells_of(placement), _columns(problem.counts), shape)
    tokens, patches, visual, labels, samples = np.moveaxis(sums, 2, 0)
    item_row, encoder_rank, unit, encoder_patches = _encoder_places(problem, placement, patches)
    return StepPlan(
        step=identity.step,
        epoch=identity.epoch,
        cursor=identity.cursor,
        dp_size=problem.dp_size,
        num_microbatches=placement.num_microbatches,
        num_stages=problem.num_stages,
        num_pipeline_ranks=problem.num_pipeline_ranks,
        policy=verdict.policy,
        policy_used=verdict.policy_used,
        binding=verdict.binding,
        note=verdict.note,
        schedule=problem.schedule,
        meet=parallel.meet,
        stage_domains=",".join(parallel.domain_of_stage),
        routed=placement.routed,
        sample_ids=problem.counts.sample_ids,
        dp_rank=placement.dp_rank,
        microbatch=placement.microbatch,
        slot=placement.slot,
        cp_first_rank=placement.dp_rank if placement.cp_first_rank is None else placement.cp_first_rank,
        cp_degree=np.ones(problem.num_samples, np.int32) if placement.cp_degree is None else placement.cp_degree,
        item_row=item_row,
        encoder_rank=encoder_rank,
        unit=unit,
        stage_ranks=np.array(parallel.stage_ranks, dtype=np.int32),
        llm_tokens=tokens,
        patches=patches,
        encoder_patches=encoder_patches,
        visual_tokens=visual,
        label_tokens=labels,
        num_samples=samples,
        forward_ns=times.forward_ns,
        backward_ns=times.backward_ns,
        weight_ns=times.weight_ns,
        rank_makespan_ns=problem.makespans_ns(times),
        stage_work_ns=_stage_work_ns(problem, times),
        makespan_ns=found.makespan_ns,
        work_bound_ns=bounds.work_ns,
        longest_bound_ns=bounds.longest_ns,
        granularity_bound_ns=bounds.granularity_ns,
        pipeline_bound_ns=bounds.pipeline_ns,
        lower_bound_ns=bounds.lower_ns,
        makespan_before_ns=baseline.makespan_ns,
        imbalance_before=imbalance(_busy_ns(baseline.times)),
        imbalance_after=imbalance(_busy_ns(times)),
        label_imbalance_before=imbalance(_label_tokens(problem, baseline.placement)),
        label_imbalance_after=imbalance(labels.sum(axis=1)),
        fill=fill(int(tokens.sum()), int((samples > 0).sum()) * problem.capacity[0]),
        dropped=identity.dropped,
        inputs_digest=inputs_digest,
    )


def _columns(counts: StepCounts) -> Int64Array:
    """What a cell is summed over: tokens, patches, visual tokens, labels, samples, int64 [n, 5]."""
    ones = np.ones(len(counts), dtype=np.int64)
    return np.stack([counts.llm_tokens, counts.patches, counts.visual_tokens, counts.label_tokens, ones], axis=1)


def _encoder_places(
    problem: PlacementProblem, placement: Placement, patches: Int64Array
) -> tuple[Int32Array, Int32Array, Int32Array, Int64Array]:
    """(item_row [k], encoder_rank [k], unit [k], encoder_patches [R, M]) as the plan stores them."""
    if not problem.parallel.encoder_is_spread:
        nothing = np.zeros(0, dtype=np.int32)
        return nothing, nothing, nothing, patches
    rows = problem.counts.item_rows()
    if placement.encoder_rank is not None and placement.unit is not None:
        entries = problem.encoder_entries(placement)
        shape = (problem.dp_size, placement.num_microbatches)
        encoded = sum_over_cells(entries, problem.counts.item_patches, shape)
        return rows.astype(np.int32), placement.encoder_rank, placement.unit, encoded
    own = placement.microbatch[rows]
    unit_size = problem.schedule_for(placement.num_microbatches).unit_size
    return rows.astype(np.int32), own % problem.num_pipeline_ranks, own // unit_size, patches


def _stage_work_ns(problem: PlacementProblem, times: CellTimes) -> Int64Array:
    """Work of every pipeline rank over all replicas, int64 [P]; a spread stage goes where its acts run."""
    num_microbatches = times.forward_ns.shape[1]
    per_stage = np.where(times.present, times.forward_ns + times.backward_ns, 0).sum(axis=0)  # [M, S]
    work = np.zeros(problem.num_pipeline_ranks, dtype=np.int64)
    np.add.at(work, problem.schedule_for(num_microbatches).place, per_stage.T)
    return work


def _busy_ns(times: CellTimes) -> Int64Array:
    """Busy time of every replica over all its stages, int64 [R]."""
    busy: Int64Array = times.forward_ns.sum(axis=(1, 2)) + times.backward_ns.sum(axis=(1, 2))
    return busy


def _label_tokens(problem: PlacementProblem, placement: Placement) -> Int64Array:
    """Label tokens of every replica, int64 [R]."""
    return sum_over_cells(placement.dp_rank.astype(np.int64), problem.counts.label_tokens, (problem.dp_size, 1))[:, 0]
