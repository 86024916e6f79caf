"""Where balancing does not help, and what would: one sentence per limit that the sampled steps run into.

    facts of every step (work, largest samples, fill of each capacity)   \
    reports of all policies (bounds, bubbles, what binds)                 --> Limit(kind, text) ...
    the same steps on other layouts                                      /

A balancer moves samples between micro-batches and replicas. What it cannot do is make a stage smaller, a sample
shorter, a pipeline longer than its micro-batches fill, or room in full micro-batches; each has its own remedy, and
where the remedy was simulated its figure is in the sentence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from balancer.layout import ParallelSpec
from balancer.policies.base import PlacementProblem, total_over_stages
from dataloaders.index import CostIndex
from dataloaders.printable import printable
from tools.plan_inputs import PlanInputs
from tools.plan_measure import PolicyReport, StepMeasure, rank_work_ns
from tools.plan_memory import RankStates, device_memory_gib, too_large
from tools.plan_what_if import MICROBATCHES_PER_RANK, Alternative, is_trained

LimitKind = Literal[
    "does not fit",
    "nothing to gain",
    "stage split",
    "largest sample",
    "capacity",
    "pipeline fill",
    "idle replicas",
    "uneven steps",
]
SMALL = 0.02
"""A gain below this is none."""
UNEVEN_RANKS = 1.1
UNEVEN_STEPS = 1.25
FULL = 0.9
MUCH_BUBBLE = 0.2
NUM_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One thing that placement does not change.

    Attributes:
        kind: stable name.
        text: what, how much, and what would help.
    """

    kind: LimitKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeSample:
    """A sample of a step; `share` is that of the step's work."""

    sample_id: int
    share: float
    llm_tokens: int
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What a step holds, whatever the policy.

    Attributes:
        num_samples, num_tokens: of the step; tokens of the LLM.
        largest: those with the most work, heaviest first.
        fill: samples over every capacity, if each replica had one micro-batch; 3.2 takes four of them or more.
    """

    num_samples: int
    num_tokens: int
    largest: tuple[LargeSample, ...]
    fill: dict[str, float]


def facts_of(problem: PlacementProblem) -> StepFacts:
    """Facts of one step."""
    counts = problem.counts
    work = total_over_stages(problem.forward_ns + problem.backward_ns)
    total = int(work.sum())
    sizes = zip(problem.capacity_names, problem.capacity, problem.sizes.sum(axis=0).tolist(), strict=True)
    return StepFacts(
        num_samples=len(counts),
        num_tokens=int(counts.llm_tokens.sum()),
        largest=tuple(
            LargeSample(
                sample_id=int(counts.sample_ids[row]),
                share=int(work[row]) / total if total else 0.0,
                llm_tokens=int(counts.llm_tokens[row]),
                patches=int(counts.patches[row]),
            )
            for row in np.argsort(-work, kind="stable")[:NUM_NAMED].tolist()
        ),
        fill={name: size / (problem.dp_size * limit) for name, limit, size in sizes},
    )


def limits_of(
    inputs: PlanInputs,
    report: PolicyReport,
    measures: Sequence[StepMeasure],
    facts: Sequence[StepFacts],
    alternatives: Sequence[Alternative],
    *,
    states: Sequence[RankStates] | None = None,
) -> tuple[Limit, ...]:
    """Limits of the main policy's plans, the most telling first; () where none was found.

    Args:
        states: parameters of every pipeline rank; None where they are not known.
    """
    found = (
        _does_not_fit(inputs, report, states),
        _nothing_to_gain(report, measures),
        _stage_split(inputs, report, measures, alternatives),
        _largest_sample(inputs, report, measures, facts),
        _capacity(inputs, report, measures, facts),
        _pipeline_fill(inputs, report, alternatives),
        _idle_replicas(inputs, facts),
        _uneven_steps(inputs, report),
    )
    return tuple(limit for limit in found if limit is not None)


def _does_not_fit(inputs: PlanInputs, report: PolicyReport, states: Sequence[RankStates] | None) -> Limit | None:
    memory_gib, peaks = device_memory_gib(inputs.command), report.peak_activation_bytes
    if states is None or memory_gib is None or peaks is None:
        return None
    device, dp_size = inputs.command.hardware, inputs.choice.parallel.dp_size
    text = too_large(states, peaks, memory_gib, device=device, dp_size=dp_size)
    return Limit(kind="does not fit", text=text) if text else None


def _nothing_to_gain(report: PolicyReport, measures: Sequence[StepMeasure]) -> Limit | None:
    before, bound = (sum(getattr(m, name) for m in measures) for name in ("makespan_before_ns", "lower_bound_ns"))
    room = before / bound - 1 if bound else 0.0
    if room <= SMALL:
        said = f"nothing to gain: sequential is within {room:.1%} of the lower bound"
        return Limit(
            kind="nothing to gain", text=f"{said}, and its imbalance over replicas is {report.imbalance_before:.2f}"
        )
    gained = 1 - (report.relative_time if report.relative_time is not None else 1.0)
    if gained <= SMALL:
        return Limit(
            kind="nothing to gain",
            text=f"{report.policy} gains {max(gained, 0.0):.1%} over sequential, whose imbalance over replicas is "
            f"{report.imbalance_before:.2f} and which is {room:.1%} above the lower bound",
        )
    return None


def _stage_split(
    inputs: PlanInputs, report: PolicyReport, measures: Sequence[StepMeasure], alternatives: Sequence[Alternative]
) -> Limit | None:
    work, bound_steps = rank_work_ns(measures), _bound(report, "stage split")
    skew = max(work) * len(work) / sum(work) if sum(work) else 1.0
    if len(work) == 1 or (skew <= UNEVEN_RANKS and not bound_steps):
        return None
    rank = work.index(max(work))
    domains = " + ".join(sorted({stage.split()[0] for stage in stages_on(inputs.choice.parallel, rank)}))
    how = f"stage split binds in {bound_steps} of {len(measures)} steps" if bound_steps else "stage split is uneven"
    return Limit(
        kind="stage split",
        text=f"{how}: pipeline rank {rank} ({domains}) has {skew:.2f}x the mean work of a rank, which no placement of "
        f"samples changes; {_remedy(alternatives, inputs.choice.parallel.meet)}",
    )


def _remedy(alternatives: Sequence[Alternative], meet: str) -> str:
    others = [
        other
        for other in alternatives
        if not other.chosen and other.min_num_microbatches is None and other.relative_time is not None
    ]
    # Of equal times the layout that holds less, and nested, whose memory is bounded, before phased.
    best = min(
        reversed(others),
        key=lambda other: (round(other.relative_time or 0.0, 3), other.peak_activation_bytes or 0),
        default=None,
    )
    if best is None:
        return "move layers between stages (--layers-per-stage), or compare other places of the encoder"
    if best.relative_time is None or best.relative_time > 1 - SMALL:
        return "no other layout that was simulated is faster; move layers between stages (--layers-per-stage)"
    today = "" if is_trained(best.encoder, best.schedule, meet) else "; training does not execute it yet"
    said = f"--encoder {best.encoder} --schedule {best.schedule} would take {best.relative_time:.2f}x"
    return f"{said} (planned and simulated{today})"


def _largest_sample(
    inputs: PlanInputs, report: PolicyReport, measures: Sequence[StepMeasure], facts: Sequence[StepFacts]
) -> Limit | None:
    bound_steps = _bound(report, "largest sample")
    if not bound_steps:
        return None
    cells = [inputs.choice.parallel.dp_size * measure.num_microbatches for measure in measures]
    heaviest: dict[int, tuple[float, LargeSample]] = {}
    for num, step in zip(cells, facts, strict=True):
        for sample in step.largest:
            times = sample.share * num
            if times > heaviest.get(sample.sample_id, (-1.0, sample))[0]:
                heaviest[sample.sample_id] = times, sample
    named = sorted(heaviest.values(), key=lambda found: (-found[0], found[1].sample_id))[:NUM_NAMED]
    lines = "".join(f"\n    {named_sample(inputs.index, sample, times)}" for times, sample in named)
    return Limit(
        kind="largest sample",
        text=f"the largest sample binds in {bound_steps} of {report.num_steps} steps; alone it is up to "
        f"{named[0][0]:.1f}x a mean micro-batch: cap it (--capacity-tokens), shrink it (--oversize shrink), split it, "
        f"or take more samples per step. The heaviest:{lines}",
    )


def named_sample(index: CostIndex, sample: LargeSample, times: float) -> str:
    """One line about a sample of `times` mean micro-batches; its names are data."""
    i = sample.sample_id
    return (
        f"sample {i}, shard {printable(index.shard(i))}, key {printable(index.keys(i))}: {sample.llm_tokens:,} tokens, "
        f"{sample.patches:,} patches, {times:.1f}x a mean micro-batch"
    )


def _capacity(
    inputs: PlanInputs, report: PolicyReport, measures: Sequence[StepMeasure], facts: Sequence[StepFacts]
) -> Limit | None:
    numbers = [measure.num_microbatches for measure in measures]
    fill = {
        name: sum(step.fill.get(name, 0.0) / num for step, num in zip(facts, numbers, strict=True)) / len(facts)
        for name in facts[0].fill
    }
    name = max(fill, key=lambda key: fill[key])
    bound_steps = _bound(report, "capacity")
    if fill[name] < FULL and not bound_steps:
        return None
    free, found = inputs.choice.parallel.num_microbatches is None, _range((min(numbers), max(numbers)))
    decides = f"capacity in {name}, not time, decides M = {found}" if free else f"M = {found} leaves little to choose"
    binds = f" (binds in {bound_steps} of {report.num_steps} steps)" if bound_steps else ""
    more = "more micro-batches (--min-num-microbatches)" if free else "a larger --num-microbatches"
    return Limit(
        kind="capacity",
        text=f"{decides}{binds}: micro-batches are {fill[name]:.0%} full of {name}; a larger capacity or {more} would "
        "give room",
    )


def _pipeline_fill(inputs: PlanInputs, report: PolicyReport, alternatives: Sequence[Alternative]) -> Limit | None:
    share = (report.bubbles or {}).get("structural", 0.0)
    ranks, numbers = inputs.choice.parallel.num_ranks, report.num_microbatches or (0, 0)
    if share < MUCH_BUBBLE or ranks == 1:
        return None
    remedy = f"a larger step with M = {MICROBATCHES_PER_RANK * ranks} or more shrinks it"
    for other in alternatives:
        if other.min_num_microbatches is not None and other.relative_time is not None:
            helps = (
                "" if other.relative_time < 1 - SMALL else "; of these samples that is not faster, take a larger step"
            )
            remedy = (
                f"--min-num-microbatches {other.min_num_microbatches} would take {other.relative_time:.2f}x "
                f"(simulated){helps}"
            )
    return Limit(
        kind="pipeline fill",
        text=f"{share:.0%} of all rank time is the bubble that {inputs.choice.schedule} has even with equal "
        f"micro-batches: M = {_range(numbers)} on {ranks} pipeline ranks, which placement does not change; {remedy}",
    )


def _idle_replicas(inputs: PlanInputs, facts: Sequence[StepFacts]) -> Limit | None:
    replicas = inputs.choice.parallel.dp_size
    short = sum(step.num_samples < replicas for step in facts)
    if not short:
        return None
    fewest = min(step.num_samples for step in facts)
    return Limit(
        kind="idle replicas",
        text=f"{short} of {len(facts)} steps hold fewer samples ({fewest}) than there are replicas ({replicas}): some "
        "have nothing to do; take more samples per step",
    )


def _uneven_steps(inputs: PlanInputs, report: PolicyReport) -> Limit | None:
    times, lookahead = report.step_ms, inputs.command.lookahead_steps
    if times is None or times.p50 <= 0 or times.p99 <= UNEVEN_STEPS * times.p50:
        return None
    remedy = "exchange samples between steps (--lookahead-steps 4)" if lookahead == 1 else "look further ahead"
    return Limit(
        kind="uneven steps",
        text=f"steps differ: p99 takes {times.p99 / times.p50:.2f}x the median, which placement inside a step does not "
        f"change; {remedy}, or cut steps by tokens (--step-tokens)",
    )


def stages_on(parallel: ParallelSpec, rank: int) -> list[str]:
    """Stages that a pipeline rank holds, such as ["encoder", "llm 0", "llm 4"]."""
    number: Counter[str] = Counter()
    found = []
    for domain, home in zip(parallel.domain_of_stage, parallel.stage_ranks, strict=True):
        if home in (rank, -1):
            alone = parallel.domain_of_stage.count(domain) == 1
            found.append(domain + ("" if alone else f" {number[domain]}") + (" (spread)" if home < 0 else ""))
        number[domain] += 1
    return found


def _bound(report: PolicyReport, binding: str) -> int:
    return (report.binding or {}).get(binding, 0)


def _range(numbers: tuple[int, int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[1] else f"{numbers[0]} to {numbers[1]}"
