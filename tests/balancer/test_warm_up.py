"""After `warm_up` no step of any kind or size compiles a kernel, or loads one."""

import json
import subprocess
import sys

import numba
import pytest

PLANS = """
import itertools, json, sys
import numpy as np
from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from balancer.layout import ParallelSpec
from balancer.plan import Capacities
from balancer.planner import plan_step
from balancer.warm_up import warm_up
from packing._kernel_cache import counts

CASES = {
    "one rank": dict(dp_size=4),
    "one rank, M fixed": dict(dp_size=4, num_microbatches=4),
    "one rank, spread encoder": dict(dp_size=2, encoder="spread", num_microbatches=4),
    "meet in micro-batches": dict(dp_size=4, num_microbatches=3, meet="microbatch"),
    "pipeline": dict(dp_size=3, pp_size=2, min_num_microbatches=4),
    "shared encoder": dict(dp_size=2, pp_size=3, encoder="shared", num_microbatches=6),
    "spread encoder": dict(dp_size=2, pp_size=2, encoder="spread", num_microbatches=6),
}
PIPELINES = {"meet in micro-batches", "pipeline", "shared encoder", "spread encoder"}
SCHEDULES = {
    "one rank, spread encoder": ("nested",),
    "pipeline": ("1f1b", "gpipe"),
    "shared encoder": ("zb-h1",),
    "spread encoder": ("nested", "phased"),
}


def counts_of(num_samples, with_media):
    rng = np.random.Generator(np.random.Philox(num_samples))
    tokens = np.minimum(rng.lognormal(5, 1, num_samples).astype(np.int64) + 1, 2000)
    patches = np.where(rng.random(num_samples) < 0.6, 5 * tokens, 0) if with_media else np.zeros_like(tokens)
    nothing = np.zeros_like(tokens)
    return StepCounts(
        sample_ids=np.arange(num_samples), llm_tokens=tokens, label_tokens=tokens, visual_tokens=nothing,
        patches=patches, num_items=(patches > 0).astype(np.int64), full_total_sq=nothing, window_total_sq=nothing,
    )


def model_of(num_stages, constant_ns):
    encoder = StageCost(forward=StageTerms(per_patch_ns=3.0), backward=StageTerms(per_patch_ns=6.0))
    terms = StageTerms(per_token_ns=3.0, constant_ns=constant_ns)
    return CostModel(stages=(encoder, *[StageCost(forward=terms, backward=terms)] * (num_stages - 1)))


def plan_all(pipeline):
    made = 0
    limits = (Capacities(tokens=2**18), Capacities(tokens=2**18, patches=2**20), Capacities(tokens=2**33))
    for name, fields in CASES.items():
        if name in PIPELINES and not pipeline:
            continue
        spec = ParallelSpec.pipeline(**fields)
        for num_samples, media, capacities, schedule, policy in itertools.product(
            (5, 14, 60, 500), (False, True), limits, SCHEDULES.get(name, ("1f1b",)), ("joint", "lpt", "length_grouped")
        ):
            plan_step(
                counts_of(num_samples, media), parallel=spec, cost_model=model_of(spec.num_stages, 5.0 * media),
                capacities=capacities, schedule=schedule, policy=policy,
            )
            made += 1
    return made


pipeline = "pipeline" in sys.argv
if "cold" not in sys.argv:
    warm_up(pipeline=pipeline)
before = dict(counts)
print(json.dumps([plan_all(pipeline), before, dict(counts)]))
"""

LOADER = """
import json
import numpy as np
from balancer.layout import Layout
from balancer.loader import BalancedBatchSampler
from packing._kernel_cache import counts

assert not counts
costs = np.random.Generator(np.random.Philox(3)).integers(0, 900, (400, 2))
samplers = [BalancedBatchSampler(costs, 5, parallel=Layout(dp_size=4), dp_rank=rank, shuffle=True) for rank in range(2)]
made = dict(counts)
batches = sum(len(list(sampler)) for sampler in samplers)
print(json.dumps([batches, made, dict(counts)]))
"""


def run(script: str, *arguments: str) -> tuple[int, dict[str, int], dict[str, int]]:
    """(plans made, kernels so far, kernels afterwards) of a fresh process."""
    if numba.config.DISABLE_JIT:
        pytest.skip("nothing is compiled")
    answer = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    made, before, after = json.loads(answer.stdout)
    return made, before, after


@pytest.mark.parametrize("kinds", [[], ["pipeline"]])
def test_after_warm_up_no_step_of_any_kind_or_size_compiles_or_loads_a_kernel(kinds: list[str]) -> None:
    made, warm, after = run(PLANS, *kinds)
    assert made >= 70
    assert after == warm, "warm_up leaves out kernels"
    # The very steps need them: without warm_up they load most (not `simulate`, nor what thousands of samples take).
    _, before, loaded = run(PLANS, "cold", *kinds)
    assert not before
    assert 0.7 * sum(warm.values()) <= sum(loaded.values()) <= sum(warm.values())


@pytest.mark.torch
def test_a_loader_has_its_kernels_before_the_first_batch() -> None:
    batches, made, after = run(LOADER)
    assert batches == 40
    assert made
    assert after == made
