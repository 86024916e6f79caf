"""Where a loader stands, as a few integers: save it with the model, load it into a loader of any number of ranks.

    {"format": 1, "epoch": 2, "step": 17, "global_batch_size": 64, "seed": 0, ...}

`step` counts the finished steps of the epoch: those whose last micro-batch was handed out. A step that was interrupted
is loaded again from its first micro-batch, because the gradients of its first ones are gone with the process.

The state is the same on every rank. It may be loaded with other numbers of ranks, micro-batches or workers. Where that
changes the samples per step, the position must lie at the end of one of the new steps; otherwise it is refused, with
the numbers that fit.
"""

from collections.abc import Mapping
from typing import Any

from balancer.batch_sampler import BalancedBatchSampler
from balancer.epoch_plans import EpochPlans
from balancer.errors import LoaderStateError

FORMAT = 1


def state_of(sampler: BalancedBatchSampler, plans: EpochPlans, *, epoch: int, step: int) -> dict[str, Any]:
    """The state after `step` finished steps of an epoch that `plans` describe."""
    return {
        "format": FORMAT,
        "epoch": epoch,
        "step": step,
        "steps_per_epoch": plans.steps_per_epoch,
        "global_batch_size": sampler.options.global_batch_size,
        "lookahead_steps": sampler.options.lookahead_steps,
        "seed": sampler.options.seed,
        "shuffle": sampler.shuffle,
        "costs": sampler.fingerprint,
        "samples": sampler.eligible_digest,
        "order": plans.order_digest,
    }


def resume(sampler: BalancedBatchSampler, state: Mapping[str, Any]) -> tuple[int, int]:
    """(epoch, step) at which the sampler, which is set to it, goes on.

    Raises:
        LoaderStateError: a state of another format or run, or a position inside one of the new steps.
    """
    if state.get("format") != FORMAT:
        raise LoaderStateError(f"format {state.get('format')!r} is not {FORMAT}: no state of this version")
    epoch, step = _whole(state, "epoch"), _whole(state, "step")
    options = sampler.options
    for name, now, remedy in (
        ("costs", sampler.fingerprint, "the data or their costs have changed; give the loader the same"),
        ("samples", sampler.eligible_digest, "other samples are left out; pass the same capacities and oversize="),
        ("seed", options.seed, "pass the same seed="),
        ("shuffle", sampler.shuffle, "pass the same shuffle= or sampler="),
    ):
        if state.get(name) != now:
            raise LoaderStateError(f"the state was saved with {name}={state.get(name)!r}, not {now!r}: {remedy}")
    plans = sampler.plans(epoch)
    if step and state.get("order", "") != plans.order_digest:
        raise LoaderStateError(
            f"the sampler gives another order for epoch {epoch} than when the state was saved; it must be a function "
            f"of the epoch alone: give it a set_epoch(epoch), or a generator seeded anew for every epoch"
        )
    step = _step_now(step, state, plans)
    sampler.start_at(epoch, step)
    return epoch, step


def _step_now(step: int, state: Mapping[str, Any], plans: EpochPlans) -> int:
    """`step` in steps of the size that the loader has now."""
    before, now = _whole(state, "global_batch_size", least=1), plans.options.global_batch_size
    ahead = _whole(state, "lookahead_steps"), plans.options.lookahead_steps
    steps_before = _whole(state, "steps_per_epoch", least=1)
    if step > steps_before:
        raise LoaderStateError(f"the state stands behind step {step} of an epoch of {steps_before} steps")
    if step == steps_before:
        return plans.steps_per_epoch  # over is over, also where these ranks would not have left out its last samples
    if step == 0 or (before == now and ahead[0] == ahead[1]):
        return _inside(step, plans)
    if before != now and ahead == (1, 1) and step * before % now == 0:
        return _inside(step * before // now, plans)
    dp_size = plans.options.spec.dp_size
    micro = plans.options.spec.num_microbatches or plans.options.spec.min_num_microbatches
    fits = f"batch_size={before // (dp_size * micro)}" if before % (dp_size * micro) == 0 else "another batch_size"
    raise LoaderStateError(
        f"the state stands behind {step} steps of {before} samples (lookahead_steps={ahead[0]}), which is inside a "
        f"step of {now} samples (lookahead_steps={ahead[1]}): with {dp_size} ranks and {micro} micro-batches pass "
        f"{fits}, so that a step holds {before} again, and the same lookahead_steps"
    )


def _inside(step: int, plans: EpochPlans) -> int:
    if step > plans.steps_per_epoch:
        raise LoaderStateError(f"the state stands behind step {step} of an epoch of {plans.steps_per_epoch} steps")
    return step


def _whole(state: Mapping[str, Any], name: str, *, least: int = 0) -> int:
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LoaderStateError(f"{name}={value!r} of the state is no whole number from {least} on")
    return value
