"""Cost model: closed forms worked out by hand, integers that add up, and the terms that token counts miss."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.cost_model import CostModel, EncoderDims, LLMDims, StageCost, StageMemory, StageTerms
from balancer.cost_terms import COEFFICIENTS
from balancer.counts import StepCounts
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
    assert cost_model.fingerprint == "412fe5326d04cce783dfd4ce8c7863e989cda5c9056371f7cff7c7be5892831e"


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


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("value", [1e300, 10**400, "1", None, True, 2.0**59], ids=lambda value: str(value)[:5])
def test_no_coefficient_leaves_the_range_of_integer_nanoseconds(name: str, value: object) -> None:
    with pytest.raises(CostModelError, match=f"{name}=.*finite and not negative, at most"):
        StageTerms(**{name: value})


def test_the_largest_constant_adds_up_over_thousands_of_micro_batches() -> None:
    terms = StageTerms(constant_ns=2.0**48)
    (constant,) = CostModel(stages=(StageCost(forward=terms, backward=terms),)).forward_constant_ns().tolist()
    assert constant * 2**14 < 2**63
    with pytest.raises(CostModelError, match="constant_ns="):
        StageTerms(constant_ns=2.0**49)


@pytest.mark.parametrize("window", ["x", 1.5, True, -4, 2**40])
@pytest.mark.parametrize("cost", [0.0, 1.0])
def test_a_window_is_a_number_of_tokens(window: object, cost: float) -> None:
    with pytest.raises(CostModelError, match=r"causal_window=.*a window is a positive number of tokens"):
        StageTerms(per_causal_window_ns=cost, causal_window=window)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flops_per_second": "fast"}, "flops_per_second=fast"),
        ({"flops_per_second": 10**400}, "flops_per_second=1000"),
        ({"backward_factor": float("nan")}, "backward_factor=nan"),
        ({"backward_factor": -1.0}, "backward_factor=-1.0"),
        ({"head_on": "x"}, "head_on='x': choose labels or all"),
        ({"llm_layers_per_stage": 3}, "llm_layers_per_stage=3; the LLM has 3 layers"),
        ({"llm_layers_per_stage": [4, -1]}, "llm_layers_per_stage="),
        ({"llm_layers_per_stage": [1.5, 1.5]}, "llm_layers_per_stage="),
    ],
)
def test_options_of_a_sketch_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        model(**options)


@pytest.mark.parametrize("dim", ["8", 1.5, None, 2**50])
def test_a_dimension_is_a_bounded_whole_number(dim: object) -> None:
    with pytest.raises(CostModelError, match="a model dimension is a positive number"):
        replace(LLM, dim=dim)


@pytest.mark.parametrize(
    "changed",
    [{"domains": ("llm",)}, {"domains": ("llm", "x", "llm")}, {"layers": (1, 2, -1)}, {"layers": (1, 2)}],
)
def test_domains_and_layers_are_one_per_stage(changed: dict[str, object]) -> None:
    with pytest.raises(CostModelError, match=r"one per stage, 3, each"):
        replace(model(), **changed)


def test_impossible_dimensions_are_refused() -> None:
    with pytest.raises(CostModelError, match="dim=0: a model dimension is a positive number"):
        LLMDims(dim=0, depth=1, num_heads=1, num_kv_heads=1, mlp_dim=1, vocab_size=1)
    with pytest.raises(CostModelError, match="num_full_layers=4 of depth=3 layers"):
        EncoderDims(dim=8, depth=3, mlp_dim=16, num_full_layers=4, out_dim=4)
    with pytest.raises(CostModelError, match="at least one stage"):
        CostModel(stages=())


def one_stage(forward: StageTerms, **changed: object) -> CostModel:
    return CostModel(stages=(StageCost(forward=forward, backward=forward.scaled(2.0), **changed),))


def test_every_coefficient_multiplies_its_own_count(counts_of) -> None:
    counts = counts_of([30], patches=[64])
    expected = {
        "per_patch_ns": 64,
        "per_token_ns": 30,
        "per_label_ns": 15,
        "per_full_sq_ns": 64 * 64,
        "per_window_sq_ns": 64 * 64,
        "per_token_sq_ns": 900,
        "per_sample_ns": 1,
        "per_item_ns": 1,
        "per_visual_ns": 16,
        "per_causal_window_ns": 900 - 20 * 20,
        "constant_ns": 0,
    }
    assert set(expected) == set(COEFFICIENTS)
    for name, count in expected.items():
        times = one_stage(StageTerms(**{name: 3.0}, causal_window=10)).forward_ns(counts)
        assert times.tolist() == [[3 * count]], name


def test_a_window_no_shorter_than_the_sample_costs_what_full_causal_attention_costs(counts_of) -> None:
    counts = counts_of([1, 10, 37])
    windowed, full = StageTerms(per_causal_window_ns=0.7, causal_window=37), StageTerms(per_token_sq_ns=0.7)
    np.testing.assert_array_equal(one_stage(windowed).forward_ns(counts), one_stage(full).forward_ns(counts))


def test_the_weight_part_is_half_of_the_backward_unless_it_is_given(counts_of) -> None:
    counts, terms = counts_of([7, 8]), StageTerms(constant_ns=10.0, per_token_ns=1.0)
    model = one_stage(terms)
    assert model.weight_ns(counts).tolist() == [[7], [8]]
    assert model.weight_constant_ns().tolist() == [10]
    frozen = one_stage(terms, weight=StageTerms())
    assert frozen.weight_ns(counts).tolist() == [[0], [0]]
    assert frozen.backward_ns(counts).tolist() == [[14], [16]]


def test_a_weight_part_beyond_its_backward_is_refused() -> None:
    terms = StageTerms(per_token_ns=1.0)
    with pytest.raises(CostModelError, match=r"weight part per_token_ns=1.5 exceeds the backward"):
        StageCost(forward=terms, backward=terms, weight=StageTerms(per_token_ns=1.5))
    windowed = StageTerms(per_causal_window_ns=1.0, causal_window=8)
    with pytest.raises(CostModelError, match=r"weight part with causal_window=4; the backward has 8"):
        StageCost(forward=windowed, backward=windowed, weight=replace(windowed, causal_window=4))


@given(coefficient=st.floats(0.0, 1e4), share=st.floats(0.0, 1.0), tokens=st.lists(st.integers(0, 10**6), min_size=1))
def test_weight_times_never_exceed_backward_times(counts_of, coefficient: float, share: float, tokens) -> None:
    backward = StageTerms(per_token_ns=coefficient, per_token_sq_ns=coefficient / 1e6)
    model = CostModel(stages=(StageCost(forward=backward, backward=backward, weight=backward.scaled(share)),))
    counts = counts_of(tokens)
    assert (model.weight_ns(counts) <= model.backward_ns(counts)).all()


def item_counts(rng: np.random.Generator, num_items: list[int]) -> StepCounts:
    """Counts with a table of media items; a sample's columns are the sums over its items."""
    offsets = np.concatenate([[0], np.cumsum(num_items)])
    patches = 4 * rng.integers(1, 3000, offsets[-1])
    columns = {
        "patches": patches,
        "visual_tokens": patches // 4,
        "full_sq": patches * patches,
        "window_sq": 64 * patches,
    }
    sums = {name: np.array([part.sum() for part in np.split(value, offsets[1:-1])]) for name, value in columns.items()}
    return StepCounts(
        sample_ids=np.arange(len(num_items)),
        llm_tokens=sums["visual_tokens"] + 50,
        label_tokens=np.full(len(num_items), 20),
        visual_tokens=sums["visual_tokens"],
        patches=sums["patches"],
        num_items=np.array(num_items),
        full_total_sq=sums["full_sq"],
        window_total_sq=sums["window_sq"],
        item_offsets=offsets,
        **{f"item_{name}": value for name, value in columns.items()},
    )


def test_items_of_a_sample_add_up_to_its_encoder_time() -> None:
    num_items = [0, 3, 1, 0, 7, 0]
    counts = item_counts(np.random.default_rng(3), num_items)
    cost_model = model(flops_per_second=3.3e9)
    for item_ns, sample_ns in (
        (cost_model.item_forward_ns(counts), cost_model.forward_ns(counts)[:, 0]),
        (cost_model.item_backward_ns(counts), cost_model.backward_ns(counts)[:, 0]),
    ):
        assert item_ns.dtype == np.int64
        assert item_ns.shape == (sum(num_items),)
        sums = [part.sum() for part in np.split(item_ns, counts.item_offsets[1:-1])]
        np.testing.assert_allclose(sums, sample_ns, rtol=0, atol=0.5 * 3 * (max(num_items) + 1))


def test_equal_stages_and_any_number_of_rows_give_the_same_times(counts_of) -> None:
    """Terms are shared between stages and computed in blocks; neither may show."""
    rng = np.random.default_rng(5)
    tokens, patches = rng.integers(1, 5000, 40_000), rng.integers(0, 9000, 40_000)
    split = model(llm_layers_per_stage=[1, 1, 1], flops_per_second=3.3e11)
    times = split.backward_ns(counts_of(tokens, patches=patches))
    np.testing.assert_array_equal(times[:, 1], times[:, 2])
    for start, stop in ((0, 3), (16_380, 16_390), (39_999, 40_000)):
        rows = slice(start, stop)
        np.testing.assert_array_equal(times[rows], split.backward_ns(counts_of(tokens[rows], patches=patches[rows])))


MEMORY = (StageMemory(per_patch_bytes=10, per_visual_bytes=3), StageMemory(per_token_bytes=7, constant_bytes=100))


def test_activation_bytes_are_exact_integers_per_sample(counts_of) -> None:
    terms = StageCost(forward=StageTerms(per_token_ns=1.0), backward=StageTerms(per_token_ns=1.0))
    remembering = CostModel(stages=(terms, terms), memory=MEMORY)
    counts = counts_of([30, 5], patches=[64, 0])
    assert remembering.activation_bytes(counts).tolist() == [[640 + 48, 210], [0, 35]]
    assert remembering.activation_bytes(counts).dtype == np.int64
    assert remembering.activation_constant_bytes().tolist() == [0, 100]


def test_a_model_without_memory_has_no_columns_of_bytes(counts_of) -> None:
    assert model().activation_bytes(counts_of([30, 5])).shape == (2, 0)
    assert model().activation_constant_bytes().shape == (0,)


def test_memory_that_does_not_fit_is_refused(counts_of) -> None:
    with pytest.raises(CostModelError, match="memory of 1 stages for a cost model of 3"):
        replace(model(), memory=MEMORY[:1])
    with pytest.raises(CostModelError, match=r"per_token_bytes=1.5: bytes are integers from 0"):
        StageMemory(per_token_bytes=1.5)
    huge = replace(model(), memory=(StageMemory(per_token_bytes=2**60),) * 3)
    with pytest.raises(CostModelError, match=r"sample 9 costs .* beyond what integer bytes hold"):
        huge.activation_bytes(counts_of([10], sample_ids=[9]))


def test_a_stored_model_is_the_same_to_the_bit(counts_of) -> None:
    forward = StageTerms(per_token_ns=0.1, per_causal_window_ns=1 / 3, causal_window=512)
    stages = (
        StageCost(forward=forward, backward=forward.scaled(2.0), weight=StageTerms()),
        StageCost(forward=StageTerms(), backward=StageTerms()),
    )
    stored = CostModel(stages=stages, memory=MEMORY, absolute=True, note="a note", source="a test")
    read = CostModel.from_json(stored.to_json())
    assert read == stored
    assert read.fingerprint == stored.fingerprint
    assert CostModel.from_json(model().to_json()) == model()


def test_the_fingerprint_knows_every_coefficient_and_no_text() -> None:
    base = replace(model(), memory=(StageMemory(),) * 3)
    changed = [
        replace(base, stages=(replace(base.stages[0], weight=StageTerms()), *base.stages[1:])),
        replace(base, memory=(StageMemory(per_token_bytes=1), *base.memory[1:])),
        replace(base, memory=None),
    ]
    for name in COEFFICIENTS:
        first = replace(base.stages[0], forward=StageTerms(**{name: 1e-9}, causal_window=1))
        changed.append(replace(base, stages=(first, *base.stages[1:])))
    assert len({one.fingerprint for one in (base, *changed)}) == len(changed) + 1
    assert replace(base, note="x", source="y", absolute=True).fingerprint == base.fingerprint


def edited(**changed: object) -> str:
    return json.dumps({**json.loads(model().to_json()), **changed})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (edited(stages=[{"forward": {"per_token_ns": 10**400}, "backward": {}}]), "finite and not negative"),
        (edited(stages=[{"forward": {"per_token_ns": float("inf")}, "backward": {}}]), "finite and not negative"),
        (edited(stages=[{"forward": {"causal_window": "x"}, "backward": {}}]), "numbers by name"),
        (edited(stages=5), "cannot be read"),
        (edited(memory=5), "cannot be read"),
        (edited(memory=[{"per_token_bytes": 10**400}] * 3), "bytes are integers"),
        (edited(domains=5), "cannot be read"),
        (edited(domains=["llm"]), "one per stage"),
        (edited(layers=["x"] * 3), "one per stage"),
        (edited(absolute=1), "cannot be read"),
        (edited(note=5), "cannot be read"),
        (edited(format_version=1), "format 1; this version reads 2"),
        (edited(stages=[]), "at least one stage"),
        (
            edited(stages=[{"forward": {"per_token_ns": 1.0}, "backward": {}}], domains=[], layers=[]),
            "edited by hand",
        ),
        (edited(stages=[{"forward": {"per_token_ns": "1"}, "backward": {}}]), "numbers by name"),
        (edited(stages=[{"forward": {"per_token_ns": float("nan")}, "backward": {}}]), "finite and not negative"),
        (edited(stages=[{"forward": {"unknown": 1.0}, "backward": {}}]), "cannot be read"),
        (edited(memory=[{"per_token_bytes": 1.5}] * 3), "bytes are integers"),
        (edited(absolute="yes"), "absolute is true or false"),
        (edited(fingerprint="0" * 64), "edited by hand"),
        (edited(extra=1), "cannot be read"),
    ],
)
def test_a_stored_model_that_was_damaged_is_refused(text: str, message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        CostModel.from_json(text)


def test_a_windowed_term_needs_a_window() -> None:
    with pytest.raises(CostModelError, match="a window is a positive number of tokens"):
        StageTerms(per_causal_window_ns=1.0)


def test_a_sample_whose_square_leaves_int64_is_named(counts_of) -> None:
    with pytest.raises(CostModelError, match=r"sample 5 has 9000000000 tokens: its square leaves int64"):
        model(flops_per_second=1e15).forward_ns(counts_of([9_000_000_000], sample_ids=[5]))
