"""Builders of planner inputs, shared by the tests of this folder."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import settings

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts

# The first example of a run may compile kernels; nothing here is about wall time.
settings.register_profile("balancer", deadline=None, max_examples=60)
settings.load_profile("balancer")

CountsOf = Callable[..., StepCounts]


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
