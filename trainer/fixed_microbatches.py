"""A number of micro-batches that does not fit some step is an error before step 1, on every rank, with one that does.

Ranks share the steps and tell each other what they found. Price: that of `balancer.fixed_microbatches`; where a step
does not fit, once more for every number that is tried, so that the answer holds for the run and not for one step.
"""

from collections.abc import Sequence
from dataclasses import replace

from balancer.errors import BalancerError, PlanError
from balancer.fixed_microbatches import check_steps_fit
from balancer.plan_sequence import PlanSequence
from trainer.comm import Comm


def check_fixed_microbatches(plans: PlanSequence, num_steps: int, comm: Comm) -> None:
    """Check all steps of a run; the same outcome on every rank.

    Raises:
        PlanError: a step that does not fit; the text says which number holds all of them.
    """
    steps, found = range(comm.rank, num_steps, comm.world_size), ""
    try:
        check_steps_fit(plans, steps)
    except BalancerError as error:
        found = str(error)
    errors = [text for text in comm.gather(found) if text]
    if not errors:
        return
    least = comm.gather(least_num_microbatches(plans, steps))
    # Zero: a rank has a step that no number holds, so there is none to name.
    hint = f". The least that holds all {num_steps} steps of the run is --num-microbatches {max(least)}"
    raise PlanError(errors[0] + (hint if min(least) else ""))


def least_num_microbatches(plans: PlanSequence, steps: Sequence[int]) -> int:
    """The least number from the fixed one on that holds each of `steps`; 0: some step fits into none."""
    number = plans.num_microbatches or 1
    tried = plans
    for step in steps:
        while not _fits(tried, step):
            number += 1
            if number > len(plans.sample_ids(step)):  # not even with one sample in each
                return 0
            tried = replace(plans, num_microbatches=number)
    return number


def _fits(plans: PlanSequence, step: int) -> bool:
    try:
        check_steps_fit(plans, [step])
    except BalancerError:
        return False
    return True
