"""The same steps on other layouts of the same ranks: what another place of the encoder or another schedule would do.

    own + 1f1b      encoder alone on rank 0, LLM on the others         memory-lean, the slowest stage sets the pace
    shared + 1f1b   encoder on rank 0 beside the first LLM stage
    spread + phased encoder on every rank, all of it before and after  even, encoder activations grow with M
    spread + nested encoder on every rank, in units inside 1F1B        even, encoder activations bounded
    as asked, M >= 4 P                                                 a smaller bubble, smaller micro-batches

Everything is simulated with the same policy on the same samples, nothing is measured; times are relative to the layout
that was asked for. A layout that cannot run says why.

Price: two plans per step and layout (the policy's own and `sequential`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from balancer.errors import BalancerError
from balancer.layout import EncoderPlace
from balancer.placement_problem import placement_problem
from tools.errors import UsageError
from tools.plan_inputs import LayoutChoice, PlanInputs, chosen_layout, default_schedule
from tools.plan_measure import PolicyReport, measure_plan, rank_work_ns, summarise

_WITH_ENCODER: tuple[tuple[EncoderPlace, str | None], ...] = (
    ("own", None),
    ("shared", None),
    ("spread", "phased"),
    ("spread", "nested"),
)
_ONE_CHUNK = ("1f1b", "gpipe", "zb-h1")
MICROBATCHES_PER_RANK = 4
TRAINED = (
    "training executes --encoder own with --schedule 1f1b or gpipe and --meet step today; the rest is planned and "
    "simulated"
)
"""What of all this is more than a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One layout on the compared steps.

    Attributes:
        chosen: it is the layout that was asked for.
        min_num_microbatches: where it has more micro-batches than the capacities ask for; None: as asked for.
        relative_time: simulated time over that of the layout that was asked for; None where it cannot run.
        bubble_ratio: idle share of all rank time.
        rank_skew: work of the busiest pipeline rank over the mean.
        num_microbatches: fewest and most of a step.
        peak_activation_bytes: modelled, of the fullest pipeline rank.
        error: why it cannot run; "" where it can.
    """

    encoder: str
    schedule: str
    chosen: bool
    min_num_microbatches: int | None = None
    relative_time: float | None = None
    bubble_ratio: float | None = None
    rank_skew: float | None = None
    num_microbatches: tuple[int, int] | None = None
    peak_activation_bytes: int | None = None
    error: str = ""


def what_if(
    inputs: PlanInputs, policy: str, steps: Sequence[int], advance: Callable[[], None] = lambda: None
) -> tuple[Alternative, ...]:
    """The layout that was asked for, then others on the same ranks; () where there is no other one.

    Args:
        policy: that places the samples on each of them.
        steps: to compare; none: ().
        advance: called after every planned step.
    """
    choices = layouts(inputs)
    if len(choices) < 2 or not steps:
        return ()
    found: list[Alternative] = []
    base_ns = 0
    for alternative, choice in choices:
        try:
            if isinstance(choice, UsageError):
                raise choice
            report, total_ns, skew = _simulated(inputs, choice, policy, steps, advance)
        except (UsageError, BalancerError) as error:
            found.append(replace(alternative, error=str(error)))
            continue
        base_ns = base_ns or total_ns
        found.append(
            replace(
                alternative,
                relative_time=total_ns / base_ns if base_ns else 1.0,
                bubble_ratio=report.bubble_ratio,
                rank_skew=skew,
                num_microbatches=report.num_microbatches,
                peak_activation_bytes=max(report.peak_activation_bytes) if report.peak_activation_bytes else None,
            )
        )
    return tuple(found)


def layouts(inputs: PlanInputs) -> list[tuple[Alternative, LayoutChoice | UsageError]]:
    """What is compared, each with its layout or why there is none: what was asked for first, and alone on one rank."""
    command, asked = inputs.command, inputs.choice
    first = Alternative(encoder=asked.encoder, schedule=asked.schedule, chosen=True)
    found: list[tuple[Alternative, LayoutChoice | UsageError]] = [(first, asked)]
    if command.pp_size == 1:
        return found
    wanted: list[tuple[EncoderPlace, str | None]] = []
    if inputs.shape is not None and inputs.shape.encoder is not None and asked.encoder != "none":
        wanted += _WITH_ENCODER
    elif asked.encoder != "spread" and command.num_chunks == 1:
        wanted += [(asked.encoder, name) for name in _ONE_CHUNK]
    for encoder, named in wanted:
        schedule = named or default_schedule(command, encoder)
        alternative = Alternative(encoder=encoder, schedule=schedule, chosen=False)
        if (encoder, schedule) == (asked.encoder, asked.schedule):
            continue
        try:
            found.append((alternative, chosen_layout(command, encoder=encoder, schedule=schedule)))
        except UsageError as error:
            found.append((alternative, error))
    more = MICROBATCHES_PER_RANK * command.pp_size
    if command.num_microbatches is None and command.min_num_microbatches < more:
        parallel = replace(asked.parallel, min_num_microbatches=more)
        found.append((replace(first, chosen=False, min_num_microbatches=more), replace(asked, parallel=parallel)))
    return found


def is_trained(encoder: str, schedule: str, meet: str) -> bool:
    """Whether training executes such a layout today."""
    return encoder == "own" and schedule in ("1f1b", "gpipe") and meet == "step"


def _simulated(
    inputs: PlanInputs, choice: LayoutChoice, policy: str, steps: Sequence[int], advance: Callable[[], None]
) -> tuple[PolicyReport, int, float]:
    """(summary, time of all steps in ns, work of the busiest pipeline rank over the mean) under the policy."""
    plans = inputs.sequence(choice)
    measures = []
    for step in steps:
        counts, plan = plans.counts(step), plans.plan(step, policy=policy)
        problem = placement_problem(
            counts,
            parallel=choice.parallel,
            cost_model=plans.cost_model,
            capacities=inputs.capacities,
            schedule=choice.schedule,
        )
        measures.append(measure_plan(plan, counts, problem, plans.cost_model))
        advance()
    work = rank_work_ns(measures)
    skew = max(work) * len(work) / sum(work) if sum(work) else 1.0
    return summarise(policy, measures), sum(measure.makespan_ns for measure in measures), skew
