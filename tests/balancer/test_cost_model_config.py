"""Cost models of real configs on layouts: stages that add up to the model, training choices, hardware, bytes."""

import dataclasses

import numpy as np
import pytest

from balancer.cost_model import CostModel
from balancer.errors import CostModelError
from balancer.flops import TrainOptions, module_works
from balancer.hardware import Efficiency, Hardware
from balancer.layout import Layout, ParallelSpec
from balancer.model_config import model_shape, preset_names
from balancer.model_shape import ModelShape
from balancer.stage_costs import layers_of_stages

MODEL = "qwen2.5-vl-7b"
PAIR = ParallelSpec.pipeline(pp_size=2, encoder="shared")
LAYOUTS = {
    "one rank": ParallelSpec.pipeline(),
    "own": ParallelSpec.pipeline(pp_size=4),
    "shared": ParallelSpec.pipeline(pp_size=4, encoder="shared"),
    "spread": ParallelSpec.pipeline(pp_size=4, encoder="spread"),
    "chunks": ParallelSpec.pipeline(pp_size=3, encoder="shared", num_chunks=2),
    "trainer": ParallelSpec.of(Layout(dp_size=2, pp_size=3)),
}


@pytest.fixture
def counts(counts_of):
    """Text only, an image with a short text, and a long document."""
    return counts_of([900, 700, 9000], patches=[0, 2304, 0])


def work_ns(shape: ModelShape, counts, part: str, options: TrainOptions | None = None) -> np.ndarray:
    """FLOPs of a whole model at the nominal 1e12 per second, in nanoseconds [n]."""
    works = module_works(shape, options or TrainOptions())
    return sum(getattr(work, part).of(counts) for work in works) / 1e3


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_of_every_layout_add_up_to_the_model(counts, name: str) -> None:
    parallel = LAYOUTS[name]
    model = CostModel.from_config(MODEL, parallel)
    assert model.num_stages == parallel.num_stages == len(model.memory)
    for part, times in (
        ("forward", model.forward_ns(counts)),
        ("backward", model.backward_ns(counts)),
        ("weight_grad", model.weight_ns(counts)),
    ):
        expected = work_ns(model_shape(MODEL), counts, part)
        np.testing.assert_allclose(times.sum(axis=1), expected, rtol=0, atol=4 * parallel.num_stages)
    forward = model.forward_ns(counts)
    assert forward[0, 0] == 0
    assert (forward[:, 1:] > 0).all()


def test_bl_05_one_long_document_costs_more_than_two_halves(counts_of) -> None:
    for source in (MODEL, "llama-3.1-8b"):
        encoder = "none" if source == "llama-3.1-8b" else "own"
        model = CostModel.from_config(source, ParallelSpec.pipeline(encoder=encoder))
        long, halves = (model.forward_ns(counts_of(tokens)).sum() for tokens in ([1024], [512, 512]))
        assert long > halves
        shape = model_shape(source).llm
        pairs = (1024**2 - 2 * 512**2) // 2
        expected = len(shape.layers) * 4 * shape.layers[0].attention.query_width * pairs / 1e3
        assert abs((long - halves) - expected) <= 4


def test_a_text_layout_leaves_the_tower_out(counts) -> None:
    text = CostModel.from_config(MODEL, ParallelSpec.pipeline(pp_size=2, encoder="none"))
    both = CostModel.from_config(MODEL, PAIR)
    assert text.num_stages == 2
    np.testing.assert_array_equal(text.forward_ns(counts), both.forward_ns(counts)[:, 1:])


def test_layers_are_split_evenly_with_the_larger_parts_first() -> None:
    assert layers_of_stages(28, 3) == (10, 9, 9)
    assert layers_of_stages(4, 4) == (1, 1, 1, 1)
    assert layers_of_stages(4, 2, [1, 3]) == (1, 3)


def test_given_layers_move_work_between_stages(counts) -> None:
    even, given = (CostModel.from_config(MODEL, PAIR, layers_per_stage=split) for split in (None, [20, 8]))
    assert given.stages[1].forward.per_token_ns == pytest.approx(even.stages[1].forward.per_token_ns * 20 / 14)
    np.testing.assert_allclose(
        even.forward_ns(counts).sum(axis=1), given.forward_ns(counts).sum(axis=1), rtol=0, atol=8
    )


def test_a_sliding_window_gives_long_documents_linear_cost(counts_of) -> None:
    model = CostModel.from_config("mistral-7b", ParallelSpec.pipeline(encoder="none"))
    times = model.forward_ns(counts_of([4096, 8192, 12288, 16384]))[:, 0]
    assert np.ptp(np.diff(times)) <= 4
    assert model.stages[0].forward.causal_window == 4096


def test_local_and_global_layers_share_a_stage(counts_of) -> None:
    """gemma-3: five layers with a window of 1,024, then one without."""
    terms = CostModel.from_config("gemma-3-4b", ParallelSpec.pipeline(pp_size=2)).stages[1].forward
    layers = model_shape("gemma-3-4b").llm.layers
    num_global = sum(layer.attention.window == 0 for layer in layers)
    assert terms.per_causal_window_ns / terms.per_token_sq_ns == pytest.approx((len(layers) - num_global) / num_global)


def test_frozen_and_recomputed_modules_change_the_backward_only(counts) -> None:
    plain = CostModel.from_config(MODEL, PAIR)
    frozen = CostModel.from_config(MODEL, PAIR, frozen=("encoder", "projector"), recompute=("llm",))
    np.testing.assert_array_equal(plain.forward_ns(counts), frozen.forward_ns(counts))
    assert (frozen.backward_ns(counts)[:, 0] == 0).all()
    extra = frozen.backward_ns(counts)[:, 1:] - plain.backward_ns(counts)[:, 1:]
    forward = plain.forward_ns(counts)[:, 1:]
    head = plain.stages[-1].forward.per_label_ns * counts.label_tokens
    np.testing.assert_allclose(extra[:, 0], forward[:, 0], rtol=0, atol=4)
    np.testing.assert_allclose(extra[:, 1], forward[:, 1] - head, rtol=0, atol=4)


@pytest.mark.parametrize("option", ["frozen", "recompute"])
def test_one_text_in_place_of_a_tuple_of_names_is_refused_with_the_tuple(option: str) -> None:
    with pytest.raises(CostModelError, match=rf"{option}='encoder' is one text.*{option}=\('encoder',\)"):
        CostModel.from_config(MODEL, PAIR, **{option: "encoder"})
    assert CostModel.from_config(MODEL, PAIR, **{option: ["encoder"]}) == CostModel.from_config(
        MODEL, PAIR, **{option: ("encoder",)}
    )


def test_a_frozen_stage_has_no_weight_part(counts) -> None:
    model = CostModel.from_config(MODEL, PAIR, frozen=("encoder", "llm"))
    assert (model.weight_ns(counts)[:, 1:] == 0).all()
    assert (model.backward_ns(counts)[:, 1:] > 0).all()
    assert model.weight_ns(counts)[1, 0] > 0


def test_adapters_add_little_and_leave_the_weights_alone(counts) -> None:
    plain = CostModel.from_config(MODEL, PAIR, frozen=("encoder", "projector"))
    adapted = CostModel.from_config(MODEL, PAIR, frozen=("encoder", "projector"), lora_rank=16)
    ratio = adapted.forward_ns(counts)[:, 1:] / plain.forward_ns(counts)[:, 1:]
    assert ((ratio > 1.0) & (ratio < 1.02)).all()
    assert (adapted.weight_ns(counts)[:, 1:] < 0.02 * plain.weight_ns(counts)[:, 1:]).all()


def test_known_hardware_gives_nanoseconds_and_says_what_it_assumes(counts) -> None:
    model = CostModel.from_config("llama-3.1-8b", ParallelSpec.pipeline(encoder="none"), "h100-sxm")
    assert model.absolute
    assert "assumes 0.6 of peak in products and 0.5 in attention" in model.note
    assert model.source == "closed form of llama-3.1-8b on h100-sxm"
    ideal = CostModel.from_config(
        "llama-3.1-8b", ParallelSpec.pipeline(encoder="none"), "h100-sxm", efficiency=Efficiency(linear=1, attention=1)
    )
    # 2 x 7.5e9 matrix entries per token of an 8B, at 989 TFLOP/s.
    assert ideal.stages[0].forward.per_token_ns == pytest.approx(2 * 6.979e9 / 989e12 * 1e9, rel=1e-3)
    assert model.stages[0].forward.per_token_ns == pytest.approx(ideal.stages[0].forward.per_token_ns / 0.6)
    assert model.stages[0].forward.per_token_sq_ns == pytest.approx(ideal.stages[0].forward.per_token_sq_ns / 0.5)


def test_unknown_hardware_gives_ratios_and_says_so(counts) -> None:
    unknown, nominal = (CostModel.from_config(MODEL, PAIR, name) for name in ("future-1", "nominal"))
    assert not unknown.absolute
    assert "'future-1' is not known" in unknown.note
    assert unknown.fingerprint == nominal.fingerprint
    assert not nominal.absolute


def test_a_device_of_ones_own_is_taken_as_it_is() -> None:
    chip = Hardware(
        name="mine",
        peak_flops_per_second=2e12,
        memory_bytes_per_second=1e12,
        memory_gib=8,
        link_bytes_per_second=1e10,
    )
    model = CostModel.from_config(MODEL, PAIR, chip, efficiency=Efficiency(linear=0.5, attention=0.5))
    nominal = CostModel.from_config(MODEL, PAIR)
    assert model.fingerprint == nominal.fingerprint
    assert model.absolute


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_on": "x"}, "head_on='x': choose labels or all"),
        ({"layers_per_stage": 28}, "layers_per_stage=28 for 2 llm stages of 28 layers"),
        ({"layers_per_stage": "28"}, "layers_per_stage=28 for 2 llm stages"),
        ({"layers_per_stage": [14.0, 14.0]}, r"layers_per_stage=\[14.0, 14.0\]"),
        ({"layers_per_stage": [29, -1]}, r"layers_per_stage=\[29, -1\]"),
        ({"lora_rank": 1.5}, "lora_rank=1.5"),
        ({"lora_rank": 10**400}, "lora_rank=1000"),
        ({"dtype_bytes": 0}, "dtype_bytes=0: 2 for bf16"),
        ({"dtype_bytes": "2"}, "dtype_bytes=2: 2 for bf16"),
        ({"hardware": None}, "hardware None: a name as text"),
        ({"hardware": 3}, "hardware 3: a name as text"),
        ({"efficiency": 0.5}, r"efficiency=0.5: an Efficiency\("),
        ({"frozen": "llm"}, "frozen='llm' is one text"),
    ],
)
def test_an_option_that_means_nothing_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        CostModel.from_config(MODEL, PAIR, **options)


def test_a_model_knows_the_split_it_is_of() -> None:
    own = CostModel.from_config(MODEL, ParallelSpec.pipeline(pp_size=2))
    assert (own.domains, own.layers) == (("encoder", "llm"), (32, 28))
    assert own.other_split(("encoder", "llm"), (32, 28)) == ""
    assert own.other_split(("encoder", "llm")) == ""
    assert CostModel.from_json(own.to_json()) == own
    text = CostModel.from_config(MODEL, ParallelSpec.pipeline(pp_size=2, encoder="none"))
    assert own.fingerprint != text.fingerprint
    said = own.other_split(text.domains, text.layers)
    assert said == (
        "is of 2 stages: encoder (32 layers), llm (28 layers), the layout is 2 stages: llm (14 layers), llm (14 layers)"
    )
    moved = CostModel.from_config(MODEL, PAIR, layers_per_stage=[20, 8])
    assert "llm (20 layers), llm (8 layers), the layout is 3 stages: encoder (32 layers), llm (14 layers)" in (
        moved.other_split(("encoder", "llm", "llm"), (32, 14, 14))
    )
    bare = dataclasses.replace(own, domains=(), layers=())
    assert bare.other_split(("encoder", "llm")) == ""
    assert bare.other_split(("llm",)) == "is of 2 stages, the layout is 1 stages: llm"
    assert bare.fingerprint == own.fingerprint


def test_one_rank_and_two_have_the_same_stages() -> None:
    one, two = (CostModel.from_config(MODEL, ParallelSpec.of(Layout(pp_size=size))) for size in (1, 2))
    assert one.other_split(two.domains, two.layers) == ""


def test_recomputation_keeps_the_inputs_of_layers_and_one_working_set(counts) -> None:
    plain, again = (CostModel.from_config(MODEL, PAIR, recompute=names) for names in ((), ("encoder", "llm")))
    kept, small = plain.activation_bytes(counts), again.activation_bytes(counts)
    assert (small[:, 1] < 0.2 * kept[:, 1]).all()
    width, layers = 3584, 14
    # Inputs of 14 layers, the output of the stage, and one layer's working set.
    per_layer = (kept[0, 1] - small[0, 1]) / (layers - 1) / 900 + width * 2
    assert small[0, 1] == pytest.approx(900 * (layers * width * 2 + per_layer + width * 2), rel=0.01)


def test_a_layer_keeps_what_the_formula_of_a_gated_model_says() -> None:
    """Llama-3.1-8B in bf16: 4 d + q + kv + o + 4 m elements, 34 heads and norms in float32 (about 163 kB)."""
    shape = model_shape("llama-3.1-8b")
    model = CostModel.from_config(shape, ParallelSpec.pipeline(encoder="none"), recompute=("head",))
    layer = 2 * (4 * 4096 + 4096 + 2048 + 4096 + 4 * 14336) + 4 * 34
    beside = 2 * 4096 + 4 * 128 + 8  # output, cosines and sines, ids
    head = 2 * 4096 + 4
    assert model.memory[0].per_token_bytes == 32 * layer + beside + head
    assert model.memory[0].per_label_bytes == 2 * 4096 + 4 + 24
    assert model.memory[0].constant_bytes == 1024 * 128256 * 10


def test_logits_are_kept_per_label_or_per_position_unless_recomputed() -> None:
    text = ParallelSpec.pipeline(encoder="none")
    labels, everything = (CostModel.from_config("llama-3.1-8b", text, head_on=where) for where in ("labels", "all"))
    logits = 128256 * (2 + 4 + 4)
    assert labels.memory[0].per_label_bytes - logits == 2 * 4096 + 4 + 24
    assert everything.memory[0].per_label_bytes == 0
    assert everything.memory[0].per_token_bytes - labels.memory[0].per_token_bytes == logits


def test_float32_keeps_about_twice_the_bytes(counts) -> None:
    half, full = (CostModel.from_config(MODEL, PAIR, dtype_bytes=size).activation_bytes(counts) for size in (2, 4))
    assert (full <= 2 * half).all()
    assert (full[:, 1] > 1.95 * half[:, 1]).all()
    with pytest.raises(CostModelError, match="dtype_bytes=3"):
        CostModel.from_config(MODEL, PAIR, dtype_bytes=3)


def test_a_frozen_tower_keeps_one_working_set_and_a_frozen_llm_less(counts) -> None:
    plain, frozen = (CostModel.from_config(MODEL, PAIR, frozen=names) for names in ((), ("encoder", "llm")))
    kept, small = plain.activation_bytes(counts)[1], frozen.activation_bytes(counts)[1]
    assert small[0] < kept[0] / 16
    assert 0.5 * kept[1] < small[1] < 0.9 * kept[1]


def test_a_generator_has_stages_of_its_own(counts) -> None:
    parallel = ParallelSpec.pipeline(pp_size=2, encoder="spread", generator=True)
    shape = model_shape(MODEL)
    with pytest.raises(CostModelError, match=r"has generator stages, but model .* has no generator"):
        CostModel.from_config(shape, parallel)
    whole = dataclasses.replace(shape, generator=dataclasses.replace(shape.encoder, projector=()))
    model = CostModel.from_config(whole, parallel)
    assert model.num_stages == parallel.num_stages
    assert model.stages[-1].forward.per_patch_ns == model.stages[0].forward.per_patch_ns
    assert model.stages[-1].forward.per_visual_ns == 0.0


def test_a_text_model_on_a_layout_with_an_encoder_says_what_to_do() -> None:
    with pytest.raises(CostModelError, match="has no encoder: use encoder='none'"):
        CostModel.from_config("llama-3.1-8b", ParallelSpec.pipeline(pp_size=2))


@pytest.mark.parametrize("layers", [[28], [14, 13], [29, -1], [10, 10, 8]])
def test_layers_that_do_not_add_up_are_refused(layers: list[int]) -> None:
    with pytest.raises(CostModelError, match=r"layers_per_stage=.* for 2 llm stages of 28 layers"):
        CostModel.from_config(MODEL, PAIR, layers_per_stage=layers)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(CostModelError, match="28 llm layers cannot fill 32 stages"):
        CostModel.from_config(MODEL, ParallelSpec.pipeline(pp_size=32, encoder="shared"))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_gives_a_model_that_survives_storage(counts, name: str) -> None:
    encoder = "none" if model_shape(name).encoder is None else "shared"
    model = CostModel.from_config(name, ParallelSpec.pipeline(pp_size=4, encoder=encoder), "a100", recompute=("all",))
    assert CostModel.from_json(model.to_json()) == model
    assert (model.forward_ns(counts)[1] > 0).all()
    assert (model.backward_ns(counts)[1] > 1.9 * model.forward_ns(counts)[1]).all()
    assert (model.activation_bytes(counts)[1] > 0).all()


def test_a_known_model_stays_what_it_is(counts) -> None:
    """A change here changes plans: it belongs in the changelog under PLAN."""
    model = CostModel.from_config(MODEL, PAIR, "h100-sxm")
    assert model.forward_ns(counts).tolist() == [
        [0, 10_061_175, 10_887_764],
        [5_252_745, 7_796_948, 8_439_850],
        [0, 115_405_814, 123_671_699],
    ]
    assert model.backward_ns(counts)[1].tolist() == [10_625_102, 15_643_615, 16_929_419]
    assert model.fingerprint == "674c680baa167d4b42bc461728397641e22fa7356d610899de7be922a3305e5b"
