"""`warm_up`: the kernels that planning needs are compiled, or loaded from their cache, before the first step.

Planning packs, partitions, searches and simulates; see packing/warm_up.py for when to call it. Small steps of every
kind are planned: one pipeline rank, a pipeline, an encoder spread over it, replicas that meet in every micro-batch.
What a policy runs only where its first answer leaves much to gain is called by name, as no small step is sure to ask
for it.

Price: half a minute of one core on the first start of an installation, 24 s where no pipeline is planned; later
0.4 s. The local searches of `joint` take most of it (`joint_core.shorten` 5 s, `joint_even` 4 s), then
packing under several capacities and exchanges between cells (3 and 2 s).
"""

import logging
import threading
import time
from functools import cache

import numpy as np

import packing
from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import Int64Array, StepCounts
from balancer.layout import ParallelSpec
from balancer.makespans import makespans_of_orders_ns
from balancer.plan import Capacities
from balancer.planner import plan_step
from balancer.schedule import build_schedule
from balancer.simulate import simulate
from packing._kernel_cache import counts

_log = logging.getLogger("balancer")

# Sizes of which no two divide each other, so that no placement is perfectly even and the searches run.
_TOKENS = np.array([61, 53, 47, 43, 37, 31, 29, 23, 19, 17, 13, 11])
_PATCHES = np.array([0, 71, 0, 7, 0, 83, 5, 0, 67, 0, 59, 3])
_TABLE, _WIDE = 512, 2**40  # tokens of a capacity that packing looks up in a table, and of one that it searches
_LONG_S = 5.0  # loading from the cache takes less
_LATE_PARTITIONERS = ("karmarkar_karp", "even_mix")


def warm_up(*, pipeline: bool = True) -> float:
    """Plan and simulate on small inputs, so that no kernel is left to compile.

    Args:
        pipeline: plan pipelines too; without, replicas of one rank, which is all that a data-parallel loader needs.

    Returns:
        Seconds it took. They are logged (logger `balancer`, level info) when a kernel was compiled or loaded.
    """
    start = time.perf_counter()
    before = counts.copy()
    packing.warm_up(grid=True)
    _partition()
    _simulate()
    _plan(pipeline=pipeline)
    seconds = time.perf_counter() - start
    new = counts - before
    if new:
        _log.info("planner ready in %.2f s (%d kernels compiled, %d loaded)", seconds, new["compiled"], new["loaded"])
    return seconds


@cache
def warm_up_once() -> None:
    """`warm_up` for loaders without pipelines, the first time in this process: a program may make many.

    Where that takes long, because the cache is empty, a warning says so while it lasts.
    """
    told = threading.Timer(_LONG_S, _log.warning, ["compiling the planner, once per machine: about half a minute"])
    told.daemon = True
    told.start()
    try:
        warm_up(pipeline=False)
    finally:
        told.cancel()


def _partition() -> None:
    costs = np.stack([_TOKENS, _PATCHES], axis=1)
    for name in _LATE_PARTITIONERS:
        for weights in (costs[:, :1], costs):
            packing.partition(weights, 3, algorithm=name, target_gap=0)


def _simulate() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=2)
    times = np.ones((2, 2))
    simulate(schedule, forward_ms=times, backward_ms=times)
    whole = np.ones((1, 2, 2), dtype=np.int64)
    makespans_of_orders_ns(schedule, whole, whole, whole > 0, np.array([[[0, 1]], [[1, 0]]]))


def _plan(*, pipeline: bool) -> None:
    table = Capacities(tokens=_TABLE)
    alone = ParallelSpec.pipeline(dp_size=2, num_microbatches=2)
    for limits in (table, Capacities(tokens=_WIDE), Capacities(tokens=_TABLE, patches=_TABLE)):
        _plan_one(alone, limits)
    _plan_one(ParallelSpec.pipeline(dp_size=2, num_microbatches=2, encoder="spread"), table, schedule="nested")
    _plan_one(ParallelSpec.pipeline(dp_size=2, num_microbatches=2, meet="microbatch"), table)
    if pipeline:
        _plan_one(ParallelSpec.pipeline(dp_size=2, pp_size=2, num_microbatches=4), table)
        spread = ParallelSpec.pipeline(dp_size=2, pp_size=2, num_microbatches=4, encoder="spread")
        for patches in (_PATCHES, 0 * _PATCHES):  # bounds take another way where no sample has media
            _plan_one(spread, table, schedule="nested", patches=patches)


def _plan_one(
    parallel: ParallelSpec, capacities: Capacities, *, schedule: str = "1f1b", patches: Int64Array = _PATCHES
) -> None:
    encoder = StageCost(forward=StageTerms(per_patch_ns=1.0), backward=StageTerms(per_patch_ns=2.0))
    llm = StageCost(forward=StageTerms(per_token_ns=1.0), backward=StageTerms(per_token_ns=2.0))
    nothing = np.zeros(len(_TOKENS), dtype=np.int64)
    plan_step(
        StepCounts(
            sample_ids=np.arange(len(_TOKENS)),
            llm_tokens=_TOKENS,
            label_tokens=_TOKENS,
            visual_tokens=nothing,
            patches=patches,
            num_items=(patches > 0).astype(np.int64),
            full_total_sq=nothing,
            window_total_sq=nothing,
        ),
        parallel=parallel,
        cost_model=CostModel(stages=(encoder, *[llm] * (parallel.num_stages - 1))),
        capacities=capacities,
        schedule=schedule,
    )
