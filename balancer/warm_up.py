"""`warm_up`: the kernels that planning needs are compiled, or loaded from their cache, before the first step.

Planning packs, partitions and simulates; see packing/warm_up.py for when to call it. Price: about ten seconds on the
first start of an installation, a fraction of a second later.
"""

import logging
import time

import numpy as np

import packing
from balancer.makespans import makespans_of_orders_ns
from balancer.schedule import build_schedule
from balancer.simulate import simulate
from packing._kernel_cache import counts

_log = logging.getLogger("balancer")


def warm_up() -> float:
    """Plan and simulate on small inputs, so that no kernel is left to compile.

    Returns:
        Seconds it took. They are logged (logger `balancer`, level info) when a kernel was compiled or loaded.
    """
    start = time.perf_counter()
    before = counts.copy()
    packing.warm_up(grid=True)
    _simulate()
    seconds = time.perf_counter() - start
    new = counts - before
    if new:
        _log.info("planner ready in %.2f s (%d kernels compiled, %d loaded)", seconds, new["compiled"], new["loaded"])
    return seconds


def _simulate() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=2)
    times = np.ones((2, 2))
    simulate(schedule, forward_ms=times, backward_ms=times)
    whole = np.ones((1, 2, 2), dtype=np.int64)
    makespans_of_orders_ns(schedule, whole, whole, whole > 0, np.array([[[0, 1]], [[1, 0]]]))
