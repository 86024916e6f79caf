"""What a plan with look-ahead is compared with: the same steps without it, so that its own gain is not hidden.

    steps of whole blocks --PlanSequence, lookahead_steps 1--> sequential: "before" of every comparison
                                                          '--> the main policy: what look-ahead adds to it

Look-ahead moves samples between the steps of a block, so the same samples are compared only where blocks are whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from balancer.errors import PlanError
from tools.plan_inputs import PlanInputs
from tools.plan_measure import PolicyReport, StepMeasure, Times, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBefore:
    """One step without look-ahead: `sequential`, and the main policy.

    Attributes:
        sequential_ns, policy_ns: simulated times.
        imbalance, label_imbalance: of `sequential` over DP ranks.
    """

    sequential_ns: int
    policy_ns: int
    imbalance: float
    label_imbalance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadEffect:
    """Times of the main policy with look-ahead over those without it, on the same samples; below 1 is faster.

    Attributes:
        lookahead_steps: L.
        policy: that placed both.
        mean, p99, max: of the step time.
    """

    lookahead_steps: int
    policy: str
    mean: float | None
    p99: float | None
    max: float | None


def sampled(steps_per_epoch: int, count: int, block: int = 1) -> list[int]:
    """`count` steps of the first epoch, evenly, each from the middle of its share; all where there are no more.

    With a `block` above 1: whole blocks of so many steps, as many as `count` steps hold and at least one.
    """
    if block > 1:
        blocks = sampled(-(-steps_per_epoch // block), max(1, count // block))
        return [step for i in blocks for step in range(i * block, min((i + 1) * block, steps_per_epoch))]
    count = min(count, steps_per_epoch)
    return [(2 * i + 1) * steps_per_epoch // (2 * count) for i in range(count)]


def without_lookahead(
    inputs: PlanInputs, steps: Sequence[int], advance: Callable[[], None] = lambda: None
) -> list[StepBefore] | None:
    """The steps without look-ahead; None where there is none, or where the policy cannot place them.

    Args:
        advance: called after every planned step.
    """
    if inputs.command.lookahead_steps == 1:
        return None
    plans = inputs.sequence(lookahead_steps=1)
    found = []
    for step in steps:
        try:
            plan = plans.plan(step, policy=inputs.main_policy)
        except PlanError:
            return None
        found.append(
            StepBefore(
                sequential_ns=plan.makespan_before_ns,
                policy_ns=plan.makespan_ns,
                imbalance=plan.imbalance_before,
                label_imbalance=plan.label_imbalance_before,
            )
        )
        advance()
    return found


def compared_with(measure: StepMeasure, before: StepBefore) -> StepMeasure:
    """The measure with another "before"."""
    _, after, _, labels_after = measure.imbalances
    imbalances = (before.imbalance, after, before.label_imbalance, labels_after)
    return replace(measure, makespan_before_ns=before.sequential_ns, imbalances=imbalances)


def before_report(before: Sequence[StepBefore]) -> PolicyReport:
    """The row of `sequential` without look-ahead."""
    imbalance = sum(step.imbalance for step in before) / len(before)
    labels = sum(step.label_imbalance for step in before) / len(before)
    return PolicyReport(
        policy="sequential, no look-ahead",
        num_steps=len(before),
        step_ms=Times.of([step.sequential_ns for step in before]),
        relative_time=1.0,
        imbalance_before=imbalance,
        imbalance_after=imbalance,
        label_imbalance_before=labels,
        label_imbalance_after=labels,
    )


def lookahead_effect(
    inputs: PlanInputs, policy: str, before: Sequence[StepBefore], measures: Sequence[StepMeasure]
) -> LookaheadEffect:
    """With over without."""
    alone, times = (
        Times.of(values)
        for values in ([step.policy_ns for step in before], [measure.makespan_ns for measure in measures])
    )
    total = ratio(sum(measure.makespan_ns for measure in measures), sum(step.policy_ns for step in before))
    return LookaheadEffect(
        lookahead_steps=inputs.command.lookahead_steps,
        policy=policy,
        mean=total,
        p99=times.p99 / alone.p99 if alone.p99 else None,
        max=times.max / alone.max if alone.max else None,
    )
