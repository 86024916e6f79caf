"""Cost model: closed forms worked out by hand, integers that add up, and the terms that token counts miss."""

import numpy as np
import pytest

from balancer.cost_model import CostModel, EncoderDims, LLMDims, StageCost, StageTerms
from balancer.errors import CostModelError

ENCODER = EncoderDims(dim=8, depth=3, mlp_dim=16, num_full_layers=1, out_dim=4, patch_dim=12, merge=2)
LLM = LLMDims(dim=8, depth=3, num_heads=2, num_kv_heads=1, mlp_dim=16, vocab_size=32)


def model(**changed: object) -> CostModel:
    options = {"llm_layers_per_stage": [1, 2], "flops_per_second": 1e9, **changed}
    return CostModel.from_dims(ENCODER, LLM, **options)


def test_one_ns_per_flop_gives_the_flops_of_a_plain_count(counts_of) -> None:
    """At 1e9 FLOP/s a nanosecond is a FLOP; the numbers below follow the matrix shapes one by one."""
    counts = counts_of([10], patches=[8])
    patches, tokens, labels = 8, 10, 5
    embed = 2 * 12 * 8 * patches
    encoder_layer = patches * (2 * 8 * 24 + 2 * 8 * 8 + 3 * 2 * 8 * 16)
    merger = (patches // 4) * (2 * 32 * 32 + 2 * 32 * 4)
    full, window = 1 * 2 * 2 * 8 * 64, 2 * 2 * 2 * 8 * 512
    llm_layer = tokens * (2 * 8 * 8 + 2 * 2 * 8 * 4 + 2 * 8 * 8 + 3 * 2 * 8 * 16) + 2 * 2 * 8 * tokens**2 // 2
    head = 2 * 8 * 32 * labels
    expected = [embed + 3 * encoder_layer + merger + full + window, llm_layer, 2 * llm_layer + head]
    assert model().forward_ns(counts).tolist() == [expected]
    assert model().backward_ns(counts).tolist() == [[2 * value for value in expected]]


def test_the_head_may_run_on_all_positions(counts_of) -> None:
    counts = counts_of([10])
    difference = model(head_on="all").forward_ns(counts) - model().forward_ns(counts)
    assert difference.tolist() == [[0, 0, 2 * 8 * 32 * 5]]


def test_text_costs_the_encoder_nothing(counts_of) -> None:
    assert model().forward_ns(counts_of([10]))[0, 0] == 0


def test_splitting_the_layers_moves_work_and_keeps_the_sum(counts_of) -> None:
    counts = counts_of([10, 300], patches=[8, 400])
    split = model(llm_layers_per_stage=[1, 1, 1]).forward_ns(counts)
    whole = model(llm_layers_per_stage=[3]).forward_ns(counts)
    assert split.shape == (2, 4)
    np.testing.assert_array_equal(split[:, 1:].sum(axis=1), whole[:, 1])


def test_equal_tokens_in_longer_documents_cost_more(counts_of) -> None:
    """BL-05: one document of 1024 is not two of 512."""
    long, short = model().forward_ns(counts_of([1024])), model().forward_ns(counts_of([512, 512]))
    extra = long.sum(axis=0) - short.sum(axis=0)
    pairs = (1024**2 - 2 * 512**2) // 2
    assert extra.tolist() == [0, 4 * 8 * pairs, 2 * 4 * 8 * pairs]


def test_times_are_integers_and_the_same_in_any_order_of_samples(counts_of) -> None:
    rng = np.random.default_rng(1)
    tokens, patches = rng.integers(1, 5000, 64), rng.integers(0, 9000, 64)
    order = rng.permutation(64)
    cost_model = model(flops_per_second=3.3e11)
    times = cost_model.forward_ns(counts_of(tokens, patches=patches))
    assert times.dtype == np.int64
    np.testing.assert_array_equal(times[order], cost_model.forward_ns(counts_of(tokens[order], patches=patches[order])))


def test_known_values_stay_what_they_are(counts_of) -> None:
    """A change here changes every plan: it belongs in the changelog under PLAN."""
    cost_model = model(flops_per_second=3.3e9)
    times = cost_model.forward_ns(counts_of([777, 12345], patches=[1000, 0]))
    assert times.tolist() == [[12_334_546, 3_198_415, 6_457_028], [0, 743_213_891, 1_487_385_377]]
    assert cost_model.fingerprint == "ea0c3c371f02e05a9629f78429a4fabd04bc950055e9dec8af05fee9e5a04f58"


def test_fingerprints_tell_models_apart() -> None:
    models = [model(), model(flops_per_second=2e9), model(backward_factor=3.0), model(head_on="all")]
    assert len({cost_model.fingerprint for cost_model in models}) == len(models)


def test_constants_are_per_micro_batch_and_not_part_of_a_sample(counts_of) -> None:
    terms = StageTerms(constant_ns=50.0, per_token_ns=1.0)
    cost_model = CostModel(stages=(StageCost(forward=terms, backward=terms.scaled(2.0)),))
    assert cost_model.forward_ns(counts_of([7])).tolist() == [[7]]
    assert cost_model.forward_constant_ns().tolist() == [50]
    assert cost_model.backward_constant_ns().tolist() == [100]


def test_no_samples_have_no_times(counts_of) -> None:
    assert model().forward_ns(counts_of([])).shape == (0, 3)


def test_layers_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(CostModelError, match=r"llm_layers_per_stage=\[1, 1\] adds up to 2; the LLM has 3 layers"):
        model(llm_layers_per_stage=[1, 1])


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_positive_number_is_refused(rate: float) -> None:
    with pytest.raises(CostModelError, match="flops_per_second="):
        model(flops_per_second=rate)


def test_a_time_beyond_integer_nanoseconds_names_the_sample(counts_of) -> None:
    with pytest.raises(CostModelError, match=r"sample 5 costs .* beyond what integer nanoseconds hold"):
        model(flops_per_second=1.0).forward_ns(counts_of([10**9], sample_ids=[5]))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_coefficient_that_is_no_cost_is_refused(value: float) -> None:
    with pytest.raises(CostModelError, match=r"per_token_ns=.*finite and not negative"):
        StageTerms(per_token_ns=value)


def test_impossible_dimensions_are_refused() -> None:
    with pytest.raises(CostModelError, match="dim=0: a model dimension is a positive number"):
        LLMDims(dim=0, depth=1, num_heads=1, num_kv_heads=1, mlp_dim=1, vocab_size=1)
    with pytest.raises(CostModelError, match="num_full_layers=4 of depth=3 layers"):
        EncoderDims(dim=8, depth=3, mlp_dim=16, num_full_layers=4, out_dim=4)
    with pytest.raises(CostModelError, match="at least one stage"):
        CostModel(stages=())
