"""The planner's kernels, compiled once a node before a rank waits for another one's plan."""

import os
from collections.abc import Callable

from balancer.warm_up import warm_up
from trainer.comm import Comm

_LONG_WARM_UP_S = 2.0  # loading takes less


def ready_planner(comm: Comm, report: Callable[[str], None], *, pipeline: bool) -> None:
    """Have the kernels ready before a step needs them: compiled by the first rank of a node, loaded by its others.

    Args:
        report: takes one line of text, where it took long.
        pipeline: see `balancer.warm_up`.
    """
    first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    if first_of_node:
        seconds = warm_up(pipeline=pipeline)
        if seconds > _LONG_WARM_UP_S:
            report(f"Compiled the planner's kernels in {seconds:.0f} s; later starts load them.")
    comm.barrier()
    if not first_of_node:
        warm_up(pipeline=pipeline)
