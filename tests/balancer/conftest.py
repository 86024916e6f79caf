"""Builders of planner inputs, shared by the tests of this folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

import balancer
from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts

# The first example of a run may compile kernels; nothing here is about wall time.
settings.register_profile("balancer", deadline=None, max_examples=60)
settings.load_profile("balancer")

CountsOf = Callable[..., StepCounts]
TwoRanks = Callable[..., None]


@pytest.fixture(scope="session")
def counts_of() -> CountsOf:
    """`counts_of([tokens, ...], patches=[...])`: a quarter of the patches are visual tokens, one item if any."""

    def build(
        llm_tokens: Sequence[int], *, patches: Sequence[int] | None = None, sample_ids: Sequence[int] | None = None
    ) -> StepCounts:
        tokens = np.asarray(llm_tokens, dtype=np.int64)
        pixels = np.zeros_like(tokens) if patches is None else np.asarray(patches, dtype=np.int64)
        return StepCounts(
            sample_ids=np.arange(len(tokens)) if sample_ids is None else np.asarray(sample_ids, dtype=np.int64),
            llm_tokens=tokens,
            label_tokens=tokens // 2,
            visual_tokens=pixels // 4,
            patches=pixels,
            num_items=(pixels > 0).astype(np.int64),
            full_total_sq=pixels * pixels,
            window_total_sq=pixels * 64,
        )

    return build


@pytest.fixture(scope="session")
def plain_model() -> Callable[[int], CostModel]:
    """`plain_model(num_stages)`: 1 ns per patch in the encoder, 1 ns per token in each LLM stage, backward doubled."""

    def build(num_stages: int = 2) -> CostModel:
        encoder, llm = StageTerms(per_patch_ns=1.0), StageTerms(per_token_ns=1.0)
        terms = [encoder] + [llm] * (num_stages - 1)
        return CostModel(stages=tuple(StageCost(forward=term, backward=term.scaled(2.0)) for term in terms))

    return build


@pytest.fixture(scope="session")
def run_two_ranks() -> TwoRanks:
    """`run_two_ranks(worker, *arguments)`: a script under torchrun, in two processes with one thread each.

    What is tested must not be found through the folder of the script (`-P`), nor hash strings alike on both ranks.
    """

    def run(worker: Path, *arguments: str) -> None:
        home = str(Path(balancer.__file__).parents[1])
        path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONHASHSEED", None)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
        done = subprocess.run(
            [*launcher, sys.executable, "-P", str(worker), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]

    return run
