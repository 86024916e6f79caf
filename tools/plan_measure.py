"""What the plans of one policy come to, over the sampled steps: times, bounds, bubbles by kind, fill, activations.

    StepPlan [R, M, S] --measure_plan--> StepMeasure            one step
    StepMeasure ...    --summarise-----> PolicyReport           all steps

Ratios over steps are ratios of sums, so long steps count as long as they last. Idle time by kind is that of
`balancer.bubbles` (replicas that meet at the end of the step); what replicas lose where they meet more often is the
kind `meeting`. Modelled activations are those of the fullest replica, act by act, as the schedule keeps them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancer.bubbles import BUBBLE_KINDS, bubbles_of
from balancer.cost_model import CostModel
from balancer.counts import Int64Array, StepCounts
from balancer.plan import BOUNDS, StepPlan
from balancer.policies.base import PlacementProblem, sum_over_cells
from balancer.schedule import Schedule
from balancer.schedules.program import FORWARD

KINDS = (*BUBBLE_KINDS, "meeting")
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Predicted step times in ms."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, makespans_ns: Sequence[int]) -> "Times":
        """Of the steps."""
        ms = np.array(makespans_ns, dtype=np.int64) / NS_PER_MS
        p50, p90, p99, largest = (float(value) for value in np.quantile(ms, [0.5, 0.9, 0.99, 1.0]))
        return cls(mean=math.fsum(ms.tolist()) / len(ms), p50=p50, p90=p90, p99=p99, max=largest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMeasure:
    """One planned step in a few numbers: a plan of many samples is not kept.

    Attributes:
        makespan_ns, makespan_before_ns, lower_bound_ns, num_microbatches, fill, binding: of the plan.
        bound: which lower bound is the largest.
        kept_sequential: whether `sequential` was taken instead.
        imbalances: before, after; of label tokens before, after.
        rank_time_ms, busy_ms: time and work of all ranks together.
        idle_ms: idle time of all ranks by kind.
        stage_work_ns: int64 [P], work of every pipeline rank over all replicas.
        peak_bytes: int64 [P], modelled activations of the fullest replica; None where the cost model knows no bytes.
        peak_live: int64 [P], forwards that a rank holds for a backward to come.
    """

    makespan_ns: int
    makespan_before_ns: int
    lower_bound_ns: int
    num_microbatches: int
    fill: float
    binding: str
    bound: str
    kept_sequential: bool
    imbalances: tuple[float, float, float, float]
    rank_time_ms: float
    busy_ms: float
    idle_ms: dict[str, float]
    stage_work_ns: Int64Array
    peak_bytes: Int64Array | None
    peak_live: Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """One policy over the sampled steps; numbers are None where it could not place some step (`error` says why).

    Attributes:
        step_ms: predicted times of the steps.
        relative_time: its time over that of `sequential` on the same samples without look-ahead; below 1 is faster.
        ratio_to_bound: its time over the lower bounds; None where nothing costs anything.
        imbalance_before, imbalance_after: max / mean over DP ranks of busy time, mean over steps; before: sequential.
        label_imbalance_before, label_imbalance_after: the same of label tokens.
        bubble_ratio: idle share of all rank time; `bubbles`: the same by kind.
        fill: share of the token capacity that is used, of micro-batches with samples.
        num_microbatches: fewest and most of a step.
        peak_activation_bytes: of every pipeline rank, the largest of all steps.
        peak_live_microbatches: of every pipeline rank, stages of micro-batches that wait for their backward.
        binding: what stands between the plans and even ones, by number of steps.
        bounds: which lower bound is the largest, by number of steps.
        kept_sequential: steps in which `sequential` was taken instead.
    """

    policy: str
    error: str = ""
    num_steps: int
    step_ms: Times | None = None
    relative_time: float | None = None
    ratio_to_bound: float | None = None
    imbalance_before: float | None = None
    imbalance_after: float | None = None
    label_imbalance_before: float | None = None
    label_imbalance_after: float | None = None
    bubble_ratio: float | None = None
    bubbles: dict[str, float] | None = None
    fill: float | None = None
    num_microbatches: tuple[int, int] | None = None
    peak_activation_bytes: tuple[int, ...] | None = None
    peak_live_microbatches: tuple[int, ...] | None = None
    binding: dict[str, int] | None = None
    bounds: dict[str, int] | None = None
    kept_sequential: int = 0


def measure_plan(plan: StepPlan, counts: StepCounts, problem: PlacementProblem, costs: CostModel) -> StepMeasure:
    """Idle time and activations of a plan of `problem`, whose samples are `counts`."""
    schedule = problem.schedule_for(plan.num_microbatches)
    present = present_acts(plan)
    bubbles = bubbles_of(
        schedule, plan.forward_ns, plan.backward_ns, present, weight_ns=plan.weight_ns, routed=plan.routed
    )
    idle: dict[str, float] = {kind: bubbles.of_kind(kind) for kind in BUBBLE_KINDS}
    idle["meeting"] = bubbles.num_ranks * (plan.makespan_ns / NS_PER_MS - bubbles.makespan_ms)
    return StepMeasure(
        makespan_ns=plan.makespan_ns,
        makespan_before_ns=plan.makespan_before_ns,
        lower_bound_ns=plan.lower_bound_ns,
        num_microbatches=plan.num_microbatches,
        fill=plan.fill,
        binding=plan.binding,
        bound=largest_bound(plan),
        kept_sequential=plan.policy_used != plan.policy,
        imbalances=(
            plan.imbalance_before,
            plan.imbalance_after,
            plan.label_imbalance_before,
            plan.label_imbalance_after,
        ),
        rank_time_ms=bubbles.num_ranks * plan.makespan_ns / NS_PER_MS,
        busy_ms=bubbles.busy_ms,
        idle_ms=idle,
        stage_work_ns=plan.stage_work_ns,
        peak_bytes=None if costs.memory is None else peaks(schedule, cell_bytes(plan, counts, costs)),
        peak_live=peaks(schedule, present.astype(np.int64)),
    )


def present_acts(plan: StepPlan) -> NDArray[np.bool_]:
    """Which acts run, bool [R, M, S]: no stage of an empty cell, no encoder without patches."""
    shape = (plan.dp_size, plan.num_microbatches, plan.num_stages)
    present = np.ascontiguousarray(np.broadcast_to((plan.num_samples > 0)[:, :, np.newaxis], shape))
    if plan.has_encoder:
        present[:, :, 0] = plan.encoder_patches > 0
    return present


def cell_bytes(plan: StepPlan, counts: StepCounts, costs: CostModel) -> Int64Array:
    """Modelled activations of every cell on every stage, int64 [R, M, S].

    Of routed media the bytes of a replica's encoder are shared out by patches.
    """
    cell = plan.dp_rank.astype(np.int64) * plan.num_microbatches + plan.microbatch
    sizes = sum_over_cells(cell, costs.activation_bytes(counts), (plan.dp_size, plan.num_microbatches))
    if plan.routed:
        patches = np.maximum(plan.patches.sum(axis=1, keepdims=True), 1)
        share = plan.encoder_patches / patches
        sizes[:, :, 0] = np.rint(sizes[:, :, 0].sum(axis=1, keepdims=True) * share).astype(np.int64)
    return sizes + present_acts(plan) * costs.activation_constant_bytes()


def peaks(schedule: Schedule, sizes: Int64Array) -> Int64Array:
    """Most that any replica holds on every pipeline rank, int64 [P], of sizes int64 [R, M, S] from forward to backward.

    The rule of `balancer.simulate.peak_live`, for all replicas at once.
    """
    op, cell = schedule.op, schedule.microbatch.astype(np.int64) * schedule.num_stages + schedule.stage
    size = sizes.reshape(len(sizes), -1)[:, cell]  # [R, A]
    last = np.zeros(schedule.num_microbatches * schedule.num_stages, dtype=np.int8)
    np.maximum.at(last, cell, op)  # code of the act that frees a cell: F < B < I < W
    freed = np.where(op == last[cell], size, 0)
    held = np.cumsum(np.where(op == FORWARD, size, 0) - freed, axis=1)
    found = np.zeros(schedule.num_ranks, dtype=np.int64)
    for rank, (first, end) in enumerate(zip(schedule.rank_offsets[:-1], schedule.rank_offsets[1:], strict=True)):
        if end > first:
            before = held[:, first - 1 : first] if first else 0
            # What an act frees is still held while it runs.
            found[rank] = int((held[:, first:end] + freed[:, first:end] - before).max())
    return found


def summarise(policy: str, measures: Sequence[StepMeasure]) -> PolicyReport:
    """All steps of one policy, at least one."""
    makespan = sum(measure.makespan_ns for measure in measures)
    total = math.fsum(measure.rank_time_ms for measure in measures)
    busy = math.fsum(measure.busy_ms for measure in measures)
    before, after, labels_before, labels_after = (
        _mean(values) for values in zip(*(measure.imbalances for measure in measures), strict=True)
    )
    bytes_of = [measure.peak_bytes for measure in measures if measure.peak_bytes is not None]
    numbers = [measure.num_microbatches for measure in measures]
    return PolicyReport(
        policy=policy,
        num_steps=len(measures),
        step_ms=Times.of([measure.makespan_ns for measure in measures]),
        relative_time=ratio(makespan, sum(measure.makespan_before_ns for measure in measures)),
        ratio_to_bound=ratio(makespan, sum(measure.lower_bound_ns for measure in measures)),
        imbalance_before=before,
        imbalance_after=after,
        label_imbalance_before=labels_before,
        label_imbalance_after=labels_after,
        bubble_ratio=_share(total - busy, total),
        bubbles={kind: _share(math.fsum(measure.idle_ms[kind] for measure in measures), total) for kind in KINDS},
        fill=_mean([measure.fill for measure in measures]),
        num_microbatches=(min(numbers), max(numbers)),
        peak_activation_bytes=tuple(np.max(bytes_of, axis=0).tolist()) if bytes_of else None,
        peak_live_microbatches=tuple(np.max([measure.peak_live for measure in measures], axis=0).tolist()),
        binding=_counted([measure.binding for measure in measures]),
        bounds=_counted([measure.bound for measure in measures]),
        kept_sequential=sum(measure.kept_sequential for measure in measures),
    )


def rank_work_ns(measures: Sequence[StepMeasure]) -> list[int]:
    """Work of every pipeline rank over all replicas and steps, [P]."""
    table = np.stack([measure.stage_work_ns for measure in measures])
    return [int(work) for work in table.sum(axis=0)]


def largest_bound(plan: StepPlan) -> str:
    """Name of the lower bound that decides: the first of equal ones."""
    return max(BOUNDS, key=lambda name: int(getattr(plan, name))).removesuffix("_bound_ns")


def _counted(names: Sequence[str]) -> dict[str, int]:
    """Most frequent first, then by name."""
    return dict(sorted(Counter(names).items(), key=lambda item: (-item[1], item[0])))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0


def ratio(value: int, base: int) -> float | None:
    """value / base; None for a base of 0."""
    return value / base if base else None
