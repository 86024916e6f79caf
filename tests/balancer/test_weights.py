"""Loss weights: what a sample weighs, and that a step's weight does not depend on how it is packed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.weights import LOSS_REDUCTIONS, planned_weight_sum, sample_weight


def test_a_sample_weighs_its_tokens_one_or_the_square_root_of_its_tokens() -> None:
    weights = {reduction: sample_weight(9, reduction) for reduction in LOSS_REDUCTIONS}
    assert weights == {"token_mean": 9.0, "sample_mean": 1.0, "sqrt": 3.0}


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_a_sample_without_labels_weighs_nothing(reduction: str) -> None:
    assert sample_weight(0, reduction) == 0.0
    assert planned_weight_sum([0, 0], reduction) == 0.0


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
@given(counts=st.lists(st.integers(0, 5000), max_size=40), seed=st.randoms(use_true_random=False))
def test_the_weight_of_a_step_is_exact_in_any_order(reduction: str, counts: list[int], seed: object) -> None:
    shuffled = list(counts)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    total = planned_weight_sum(counts, reduction)
    assert total == planned_weight_sum(shuffled, reduction)
    assert total == math.fsum(sample_weight(count, reduction) for count in counts)


def test_an_empty_step_weighs_nothing() -> None:
    assert planned_weight_sum([], "token_mean") == 0.0
