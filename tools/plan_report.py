"""`balancer-analyze plan`: what every policy does on a data set, what binds, and where balancing does not help.

    PlanCommand --tools.plan_inputs--> PlanInputs --sampled steps x policies-------> PolicyReport ...
                                          |------> the same steps on other layouts -> Alternative ...
                                          '------> facts of steps and all of these -> Limit ...

The same command gives the same report to the letter: nothing is measured, times are predicted by the cost model.

Price: (policies + layouts compared) x steps plans, each with the simulation of `sequential` beside it: seconds for
steps of thousands of samples.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from balancer.errors import PlanError
from balancer.observations import plan_cells
from balancer.placement_problem import placement_problem
from balancer.plan_sequence import PlanSequence
from tools.errors import AnalyzeError
from tools.plan_before import (
    LookaheadEffect,
    StepBefore,
    before_report,
    compared_with,
    lookahead_effect,
    sampled,
    without_lookahead,
)
from tools.plan_command import PlanCommand
from tools.plan_inputs import PlanInputs
from tools.plan_limits import Limit, StepFacts, facts_of, limits_of, stages_on
from tools.plan_measure import PolicyReport, StepMeasure, measure_plan, rank_work_ns, ratio, summarise
from tools.plan_memory import RankStates, device_memory_gib, rank_states
from tools.plan_what_if import TRAINED, Alternative, is_trained, layouts, what_if

COUNTS = {"llm_tokens": "LLM tokens", "label_tokens": "label tokens", "patches": "patches", "num_items": "media items"}
NOT_BEFORE = "without look-ahead these steps cannot be placed, so sequential is compared with it"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountSummary:
    """One count over the samples that are planned."""

    p50: int
    p90: int
    p99: int
    max: int
    mean: float
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A sample that no step holds, where it is and why."""

    sample_id: int
    shard: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """The samples.

    Attributes:
        name: as given. num_samples: all; num_planned: those that steps are made of.
        rules: what media and text were counted by, in words; "" where an index does not say.
        counts: by name of `COUNTS`, of the planned ones.
        reasons: samples that are left out, by what a reason begins with.
        left_out: all of them.
    """

    name: str
    num_samples: int
    num_planned: int
    rules: dict[str, str]
    counts: dict[str, CountSummary]
    reasons: dict[str, int]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One pipeline rank under the main policy.

    Attributes:
        stages: what it holds.
        work_share: of the work of all ranks; relative_work: over the mean of a rank.
        peak_activation_bytes: modelled; None where the cost model knows none.
        state_bytes: weights, gradients and optimizer, see `tools.plan_memory`; None with measured costs.
    """

    rank: int
    stages: tuple[str, ...]
    work_share: float
    relative_work: float | None
    peak_activation_bytes: int | None
    state_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSummary:
    """The layout that was asked for; `capacities` are the hard limits of a micro-batch, `device_memory_gib` is that of
    one accelerator (None without `--hardware`)."""

    model: str
    cost_source: str
    cost_fingerprint: str
    measured_costs: bool
    absolute_times: bool
    dp_size: int
    pp_size: int
    encoder: str
    num_chunks: int
    schedule: str
    meet: str
    capacities: dict[str, int]
    hardware: str
    device_memory_gib: float | None
    ranks: tuple[RankSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """How much the planned steps hold."""

    mean: float
    min: int
    max: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "StepSizes":
        """Of the steps."""
        return cls(mean=sum(sizes) / len(sizes), min=min(sizes), max=max(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What was planned and what came of it.

    Attributes:
        warnings: what the reader must know first.
        step_size: of a step as it was asked for, in words; step_samples, step_tokens: of the planned steps as they are.
        steps_per_epoch: of the run; steps: those that were planned, from 0.
        before: `sequential` without look-ahead, which policies with look-ahead are compared with; None without it.
        lookahead: what look-ahead adds to the main policy; None without it.
        main_policy: the policy that the layout, the comparison of layouts and the limits are about.
        policies: in the order of rising effort; sequential first.
        what_if: the same steps on other layouts; what_if_steps: how many of them.
        limits: where balancing does not help.
        notes: what the reader must know.
    """

    warnings: tuple[str, ...]
    data: DataSummary
    layout: LayoutSummary
    step_size: str
    step_samples: StepSizes
    step_tokens: StepSizes
    steps_per_epoch: int
    steps: tuple[int, ...]
    main_policy: str
    before: PolicyReport | None
    lookahead: LookaheadEffect | None
    policies: tuple[PolicyReport, ...]
    what_if: tuple[Alternative, ...]
    what_if_steps: int
    limits: tuple[Limit, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def report_on(inputs: PlanInputs, progress: Progress | None = None) -> PlanReport:
    """Plan the steps and summarise them.

    Args:
        progress: called with (plans done, plans in all).

    Raises:
        AnalyzeError: no policy can place the samples; the text says why.
    """
    command = inputs.command
    plans = inputs.sequence()
    steps = sampled(plans.steps_per_epoch, command.plan_steps, command.lookahead_steps)
    compared = sampled_of(steps, command.what_if_steps)
    runs_of_all = len(inputs.policies) + (command.lookahead_steps > 1)
    advance = _Counted(len(steps) * runs_of_all + len(compared) * len(layouts(inputs)), progress)
    before = without_lookahead(inputs, steps, advance)
    runs, facts, main_plans = _measured(inputs, plans, steps, before, advance)
    reports = tuple(_reported(name, found, len(steps)) for name, found in runs.items())
    placed = [report.policy for report in reports if not report.error]
    if not placed:
        raise AnalyzeError(f"no policy can place these steps; {reports[-1].policy} {reports[-1].error}")
    main = inputs.main_policy if inputs.main_policy in placed else placed[-1]
    report = next(report for report in reports if report.policy == main)
    measures = [found for found in runs[main] if isinstance(found, StepMeasure)]
    alternatives = what_if(inputs, main, compared, advance)
    choice = inputs.choice
    states = None if inputs.shape is None else rank_states(command, inputs.shape, choice.parallel)
    simulated = () if is_trained(choice.encoder, choice.schedule, choice.parallel.meet) else (TRAINED,)
    unmatched = () if command.lookahead_steps == 1 or before else (NOT_BEFORE,)
    return PlanReport(
        warnings=inputs.warnings,
        data=_data(inputs),
        layout=_layout(inputs, measures, report, states),
        step_size=_step_size(command),
        step_samples=StepSizes.of([step.num_samples for step in facts]),
        step_tokens=StepSizes.of([step.num_tokens for step in facts]),
        steps_per_epoch=plans.steps_per_epoch,
        steps=tuple(steps),
        main_policy=main,
        before=before_report(before) if before else None,
        lookahead=lookahead_effect(inputs, main, before, measures) if before and main == inputs.main_policy else None,
        policies=reports,
        what_if=alternatives,
        what_if_steps=len(compared) if alternatives else 0,
        limits=limits_of(inputs, report, measures, facts, alternatives, states=states),
        notes=(*inputs.notes, *plans.selection_notes(), *unmatched, *main_plans, *simulated),
    )


def sampled_of(steps: Sequence[int], count: int) -> list[int]:
    """`count` of the steps, evenly."""
    return [steps[i] for i in sampled(len(steps), count)] if count else []


class _Counted:
    """Plans done of plans in all."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, max(self._total, self._done))


def _measured(
    inputs: PlanInputs,
    plans: PlanSequence,
    steps: Sequence[int],
    before: Sequence[StepBefore] | None,
    advance: Callable[[], None],
) -> tuple[dict[str, list[StepMeasure | str]], list[StepFacts], list[str]]:
    """(policy -> every step, or why it cannot be placed; facts of every step; notes about the range of a calibration).

    One step after the other, so that its costs are computed once and no plan is kept.
    """
    runs: dict[str, list[StepMeasure | str]] = {policy: [] for policy in inputs.policies}
    facts: list[StepFacts] = []
    outside: dict[str, str] = {}
    for position, step in enumerate(steps):
        counts = plans.counts(step)
        problem = placement_problem(
            counts,
            parallel=plans.spec,
            cost_model=inputs.costs,
            capacities=inputs.capacities,
            schedule=inputs.choice.schedule,
        )
        facts.append(facts_of(problem))
        for policy, found in runs.items():
            try:
                plan = plans.plan(step, policy=policy)
            except PlanError as error:
                found.append(str(error))
            else:
                measure = measure_plan(plan, counts, problem, inputs.costs)
                found.append(compared_with(measure, before[position]) if before else measure)
                if policy == inputs.main_policy and inputs.fit is not None:
                    for sentence in inputs.fit.extrapolates(
                        plan_cells(plan, counts, causal_window=inputs.fit.causal_window)
                    ):
                        outside.setdefault(sentence.partition(":")[0], sentence)
            advance()
    return runs, facts, [f"planned beyond the calibration: {sentence}" for sentence in outside.values()]


def _reported(policy: str, found: Sequence[StepMeasure | str], num_steps: int) -> PolicyReport:
    errors = [step for step in found if isinstance(step, str)]
    if errors:
        return PolicyReport(
            policy=policy, num_steps=num_steps, error=f"cannot place {len(errors)} of {num_steps} steps: {errors[0]}"
        )
    return summarise(policy, [step for step in found if isinstance(step, StepMeasure)])


def _step_size(command: PlanCommand) -> str:
    if command.step_tokens is not None:
        return f"about {command.step_tokens:,} tokens"
    return f"{command.step_samples:,} samples"


def _data(inputs: PlanInputs) -> DataSummary:
    index, ids, dropped = inputs.index, inputs.eligibility.ids, inputs.eligibility.dropped
    return DataSummary(
        name=inputs.data,
        num_samples=len(index),
        num_planned=len(ids),
        rules={name: index.rules.get(name, "") for name in ("media", "text")},
        counts={name: _summary(np.asarray(index.samples[name])[ids]) for name in COUNTS},
        reasons=dict(Counter(_kind_of(drop.reason) for drop in dropped).most_common()),
        left_out=tuple(
            LeftOut(
                sample_id=drop.sample_id,
                shard=index.shard(drop.sample_id),
                key=index.keys(drop.sample_id),
                reason=drop.reason,
            )
            for drop in dropped
        ),
    )


def _kind_of(reason: str) -> str:
    """`unusable: corrupt` as it is, and `oversize` without its numbers."""
    return "oversize" if reason.startswith("oversize") else reason


def _summary(values: NDArray[np.int64]) -> CountSummary:
    p50, p90, p99, largest = (int(value) for value in np.quantile(values, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf"))
    total = int(values.sum(dtype=np.int64))
    return CountSummary(p50=p50, p90=p90, p99=p99, max=largest, mean=total / len(values), total=total)


def _layout(
    inputs: PlanInputs,
    measures: Sequence[StepMeasure],
    report: PolicyReport,
    states: Sequence[RankStates] | None,
) -> LayoutSummary:
    command, costs, parallel = inputs.command, inputs.costs, inputs.choice.parallel
    work, held = rank_work_ns(measures), report.peak_activation_bytes
    return LayoutSummary(
        model=command.model or str(command.cost_model),
        cost_source=costs.source,
        cost_fingerprint=costs.fingerprint,
        measured_costs=inputs.shape is None,
        absolute_times=costs.absolute,
        dp_size=parallel.dp_size,
        pp_size=parallel.num_ranks,
        encoder=inputs.choice.encoder,
        num_chunks=parallel.num_chunks,
        schedule=inputs.choice.schedule,
        meet=parallel.meet,
        capacities=dict(inputs.capacities.limits()),
        hardware=command.hardware,
        device_memory_gib=device_memory_gib(command),
        ranks=tuple(
            RankSummary(
                rank=rank,
                stages=tuple(stages_on(parallel, rank)),
                work_share=ratio(own, sum(work)) or 0.0,
                relative_work=ratio(own * len(work), sum(work)),
                peak_activation_bytes=None if held is None else held[rank],
                state_bytes=None if states is None else states[rank].state_bytes(),
            )
            for rank, own in enumerate(work)
        ),
    )
