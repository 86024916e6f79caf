"""Model shapes from config files: public models by their parameters, families by their rules, bad files by name."""

import json
import os
from typing import Any

import pytest

from balancer.config_fields import MAX_CONFIG_BYTES
from balancer.errors import CostModelError
from balancer.model_config import model_shape, preset_names, shape_from_config
from balancer.model_shape import AttentionShape, DecoderShape, LayerShape, MLPShape, ModelShape, TowerShape

TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def text_shape(**changed: Any) -> DecoderShape:
    return shape_from_config({**TEXT, **changed}, name="test").llm


def windows(shape: DecoderShape) -> list[int]:
    return [layer.attention.window for layer in shape.layers]


# Millions of parameters, position tables, norms and biases included, as published.
PUBLIC = {
    "llama-3.1-8b": 8030.3,
    "llama-3.1-70b": 70553.7,
    "mistral-7b": 7241.7,
    "mixtral-8x7b": 46702.8,
    "qwen2.5-7b": 7615.6,
    "qwen3-8b": 8190.7,
    "qwen3-30b-a3b": 30532.1,
    "qwen2-vl-7b": 8291.4,
    "qwen2.5-vl-3b": 3754.6,
    "qwen2.5-vl-7b": 8292.2,
    "qwen2.5-vl-32b": 33452.7,
    "qwen2.5-vl-72b": 73410.8,
    "qwen3-vl-4b": 4437.8,
    "qwen3-vl-8b": 8767.1,
    "qwen3-vl-30b-a3b": 31070.8,
    "internvl3-8b": 7944.4,
    "internvl3-78b": 78408.3,
    "llava-1.5-7b": 7063.4,
    "llava-onevision-7b": 8029.9,
    "gemma-3-4b": 4300.1,
    "pixtral-12b": 12682.7,
}


@pytest.mark.parametrize("name", preset_names())
def test_presets_have_the_parameters_of_the_public_models(name: str) -> None:
    """Matrices only, so up to two parts in a thousand are missing (position tables, norms, biases)."""
    shape = model_shape(name)
    assert shape.note == ""
    assert 0.998 <= shape.num_parameters / (PUBLIC[name] * 1e6) <= 1.0001


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_folder_or_its_config_gives_the_shape(tmp_path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT), encoding="utf-8")
    source = tmp_path if kind == "folder" else tmp_path / "config.json"
    assert model_shape(source).llm == text_shape()
    assert model_shape(str(source)).name == str(source)


def test_a_shape_is_its_own_source() -> None:
    shape = model_shape("llama-3.1-8b")
    assert model_shape(shape) is shape
    assert model_shape("Llama-3.1-8B") == shape


def test_fields_that_a_config_leaves_out_are_those_of_its_class() -> None:
    """llava-1.5-7b-hf says `model_type: llama` and a vocabulary, nothing else."""
    config = {"model_type": "llava", "vision_config": model_config("llava-1.5-7b")["vision_config"]}
    shape = shape_from_config({**config, "text_config": {"model_type": "llama", "vocab_size": 32064}}, name="llava")
    assert (shape.llm, shape.encoder) == (model_shape("llava-1.5-7b").llm, model_shape("llava-1.5-7b").encoder)


def model_config(name: str) -> dict[str, Any]:
    from balancer.model_presets import PRESET_CONFIGS

    return dict(PRESET_CONFIGS[name])


def test_windows_follow_each_familys_rule() -> None:
    assert windows(text_shape(model_type="mistral", sliding_window=16)) == [16] * 6
    assert windows(text_shape(model_type="mistral", sliding_window=None)) == [0] * 6
    assert windows(text_shape(model_type="qwen2", sliding_window=16)) == [0] * 6
    sliding = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}
    assert windows(text_shape(model_type="qwen2", **sliding)) == [0, 0, 0, 0, 16, 16]
    assert windows(text_shape(model_type="gemma2", sliding_window=16)) == [16, 0] * 3
    assert windows(text_shape(model_type="gpt_oss", sliding_window=16)) == [16, 0] * 3
    assert windows(text_shape(model_type="gemma3_text", sliding_window=16)) == [16] * 5 + [0]
    types = ["full_attention", "sliding_attention"] * 3
    assert windows(text_shape(model_type="other", sliding_window=16, layer_types=types)) == [0, 16] * 3


def test_layers_that_are_no_attention_are_refused() -> None:
    types = ["linear_attention"] * 5 + ["full_attention"]
    with pytest.raises(CostModelError, match=r"layer_types has 'linear_attention'.*fit a cost model"):
        text_shape(layer_types=types)
    with pytest.raises(CostModelError, match="layer_types has 2 entries for 6 layers"):
        text_shape(layer_types=types[:2])


# Fields of published configs that list no `layer_types`, and what is said of them.
HYBRIDS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": ({"full_attention_interval": 4}, "full_attention_interval=4 tells of layers of several kinds"),
    "qwen3_next_gates": ({"linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}, "linear attention"),
    "kimi_linear": ({"linear_attn_config": {"num_heads": 32}}, "linear attention"),
    "minimax_text_01": ({"attn_type_list": [0, 0, 1]}, "attn_type_list=.* tells of layers of several kinds"),
    "jamba": ({"attn_layer_period": 8, "attn_layer_offset": 4}, "attn_layer_period=8"),
    "bamba": ({"attn_layer_indices": [3, 5]}, "attn_layer_indices"),
    "falcon_h1": ({"mamba_d_ssm": 1024}, "mamba_d_ssm=1024 tells of state-space layers"),
    "nemotron_h": ({"hybrid_override_pattern": "M-M*-"}, "several kinds"),
    "nemotron_h_states": ({"ssm_state_size": 128}, "state-space layers"),
    "mamba2": ({"state_size": 128, "num_attention_heads": None}, "state_size=128 tells of state-space layers"),
    "zamba2": ({"layers_block_type": ["mamba", "hybrid"]}, "several kinds"),
    "recurrent_gemma": ({"block_types": ["recurrent", "attention"], "lru_width": 64}, "recurrent"),
    "lfm2": ({"conv_L_cache": 3}, "conv_L_cache=3 tells of recurrent or convolution layers"),
    "rwkv": ({"rescale_every": 6, "num_attention_heads": None}, "recurrent"),
    "rwkv7": ({"num_attention_heads": None}, "model_type 'rwkv7' has no attention"),
    "t5": (
        {"is_encoder_decoder": True, "hidden_size": None},
        "is_encoder_decoder=True tells of an encoder and a decoder",
    ),
    "mllama_text_model": (
        {"cross_attention_layers": [1, 3]},
        r"cross_attention_layers=\[1, 3\] tells of cross-attention",
    ),
    "gpt2": ({"add_cross_attention": True}, "cross-attention"),
    "llama4_text": ({"attention_chunk_size": 8192}, "attention in chunks"),
    "deepseek_v32": ({"index_topk": 2048}, "sparse attention"),
    "modernbert": ({"global_attn_every_n_layers": 3}, "several kinds"),
}


FAMILIES = {
    "state-space layers": ["jamba", "bamba", "zamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"],
    "linear attention": ["qwen3_next", "qwen3_5_text", "minimax", "kimi_linear", "olmo_hybrid", "bailing_hybrid"],
    "recurrent or convolution layers": ["recurrent_gemma", "lfm2", "lfm2_moe"],
    "attention in chunks": ["llama4_text", "llama4"],
    "no attention": ["mamba2", "falcon_mamba", "rwkv7"],
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("meaning", "kind"), [(meaning, kind) for meaning, kinds in FAMILIES.items() for kind in kinds]
)
def test_a_hybrid_without_any_field_that_tells_is_refused_by_its_family(
    kind: str, meaning: str, *, nested: bool
) -> None:
    config = {**TEXT, "model_type": kind}
    if nested:
        config = {"model_type": "some_vl", "text_config": config}
    with pytest.raises(CostModelError, match=rf"model_type '{kind}' has {meaning}: only .*fit a cost model"):
        shape_from_config(config, name="test")


@pytest.mark.parametrize("kind", ["qwen3_next", "llama4_text", "lfm2", "minimax"])
def test_layer_types_say_more_than_the_family_where_they_are_all_of_it(kind: str) -> None:
    types = ["full_attention"] * TEXT["num_hidden_layers"]
    shape = shape_from_config({**TEXT, "model_type": kind, "layer_types": types}, name="test")
    assert {layer.attention.window for layer in shape.llm.layers} == {0}


@pytest.mark.parametrize("kind", ["minimax_m2", "qwen3", "llama", "granitemoe", "gemma2", "nemotron", "idefics3"])
def test_families_of_plain_attention_with_like_names_are_read(kind: str) -> None:
    assert len(shape_from_config({**TEXT, "model_type": kind}, name="test").llm.layers) == TEXT["num_hidden_layers"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_that_lists_no_layer_types_is_refused_by_its_fields(kind: str, *, nested: bool) -> None:
    fields, reason = HYBRIDS[kind]
    config = {**TEXT, **fields, "model_type": kind}
    with pytest.raises(CostModelError, match=rf"{reason}.*fit a cost model to measurements"):
        shape_from_config({"model_type": "a_vlm", "text_config": config} if nested else config, name="test")


def test_an_encoder_decoder_is_refused_wherever_the_config_says_so() -> None:
    with pytest.raises(CostModelError, match="an encoder and a decoder"):
        shape_from_config({"model_type": "florence2", "is_encoder_decoder": True, "text_config": TEXT}, name="test")


def test_switches_of_what_a_model_does_not_have_are_no_reason_to_refuse_it() -> None:
    """Configs that transformers wrote hold the fields of its base class; layer_types says all that an interval does."""
    off = {"is_encoder_decoder": False, "add_cross_attention": False, "cross_attention_hidden_size": None}
    empty = {"cross_attention_layers": [], "attention_chunk_size": None, "index_topk": 0, "linear_attn_config": {}}
    assert text_shape(**off, **empty) == text_shape()
    types = ["full_attention", "sliding_attention"] * 3
    listed = text_shape(layer_types=types, sliding_window=16, global_attn_every_n_layers=2)
    assert windows(listed) == [0, 16] * 3


def experts(shape: DecoderShape) -> list[int]:
    return [layer.mlp.num_experts for layer in shape.layers]


def test_dense_layers_of_mixtures_are_where_the_family_says() -> None:
    assert experts(text_shape(model_type="qwen3_moe", **MOE)) == [8] * 6
    assert experts(text_shape(model_type="qwen3_moe", **MOE, mlp_only_layers=[1, 3])) == [8, 0, 8, 0, 8, 8]
    assert experts(text_shape(model_type="qwen3_moe", **MOE, decoder_sparse_step=2)) == [0, 8] * 3
    deepseek = {**MOE, "n_routed_experts": 8, "num_experts": None, "first_k_dense_replace": 2, "n_shared_experts": 2}
    shape = text_shape(model_type="deepseek_v2", **deepseek)
    assert experts(shape) == [0, 0, 8, 8, 8, 8]
    assert shape.layers[-1].mlp.shared_hidden == 64
    assert shape.layers[0].mlp.hidden == 96


def test_a_mixture_counts_active_experts_for_flops_and_all_for_parameters() -> None:
    mlp = text_shape(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2).layers[0].mlp
    assert sum(linear.copies for linear in mlp.linears("tokens") if linear.name.startswith("expert")) == 2 * 3
    assert mlp.num_parameters == 4 * 3 * 64 * 96 + 64 * 4


def test_an_unknown_family_is_read_by_the_fields_that_families_share() -> None:
    shape = shape_from_config({**TEXT, "model_type": "brand_new"}, name="new")
    assert shape.llm == text_shape()
    assert shape.note == "model_type 'brand_new' read by its generic fields"


def test_an_unknown_multimodal_family_says_what_was_assumed() -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    shape = shape_from_config({"model_type": "new_vl", "text_config": TEXT, "vision_config": vision}, name="new")
    assert shape.encoder is not None
    assert "projector assumed" in shape.note


def test_windowed_and_full_layers_of_a_tower_are_told_apart() -> None:
    encoder = model_shape("qwen2.5-vl-7b").encoder
    full = [index for index, layer in enumerate(encoder.layers) if layer.attention.span == "full"]
    assert full == [7, 15, 23, 31]
    assert {layer.attention.span for layer in model_shape("qwen2-vl-7b").encoder.layers} == {"full"}


def test_a_layer_that_llava_does_not_read_is_idle() -> None:
    assert model_shape("llava-1.5-7b").encoder.idle_layers == 1
    assert model_shape("llava-onevision-7b").encoder.idle_layers == 0


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_missing_field_is_named_with_its_place(field: str) -> None:
    config = {name: value for name, value in TEXT.items() if name != field}
    with pytest.raises(CostModelError, match=rf"config of test .*'new'.* has no {field}"):
        shape_from_config({**config, "model_type": "new"}, name="test")
    nested = {"model_type": "new_vl", "text_config": {**config, "model_type": "new"}}
    with pytest.raises(CostModelError, match=rf"text_config .* has no {field}"):
        shape_from_config(nested, name="test")


@pytest.mark.parametrize("value", ["64", -1, 0, 1.5, True, 2**50, [1, 2]])
def test_a_field_that_is_no_dimension_is_refused(value: object) -> None:
    with pytest.raises(CostModelError, match=r"hidden_size=.*an integer from 1 on"):
        text_shape(hidden_size=value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "holds a list, not an object"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "no model config"),
    ],
)
def test_files_that_are_no_config_are_refused(tmp_path, content: bytes, text: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CostModelError, match=text):
        model_shape(tmp_path)


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_pipe_or_a_device_is_no_config_and_is_not_waited_for(tmp_path, *, as_folder: bool) -> None:
    pipe = tmp_path / "config.json"
    os.mkfifo(pipe)
    with pytest.raises(CostModelError, match="is no regular file"):
        model_shape(tmp_path if as_folder else pipe)
    with pytest.raises(CostModelError, match="is no regular file"):
        model_shape("/dev/zero")


@pytest.mark.parametrize("name", ["~no_such_user_at_all/x", "a" * 5000, "a\0b", "~\0"])
def test_a_name_that_can_be_no_path_is_nothing_either(name: str) -> None:
    with pytest.raises(CostModelError, match="neither a preset"):
        model_shape(name)


def test_names_that_are_nothing_list_the_presets(tmp_path) -> None:
    with pytest.raises(CostModelError, match=r"neither a preset \(.*llama-3.1-8b.*\) nor a path"):
        model_shape("llama-9-8b")
    with pytest.raises(CostModelError, match="cannot be read"):
        model_shape(tmp_path)


def test_too_many_layers_are_no_model() -> None:
    with pytest.raises(CostModelError, match="no number of layers"):
        text_shape(num_hidden_layers=10**9)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: AttentionShape(dim=8, num_heads=0, num_kv_heads=1, head_dim=4), "attention: num_heads=0"),
        (lambda: AttentionShape(dim=8, num_heads=2, num_kv_heads=1, head_dim=4, window=-1), "window=-1"),
        (lambda: MLPShape(dim=8, hidden=0), "mlp: hidden=0"),
        (lambda: MLPShape(dim=8, hidden=4, num_experts=2, active_experts=3), "active_experts=3 of num_experts=2"),
        (lambda: TowerShape(layers=()), "a tower of 0 layers"),
        (lambda: DecoderShape(layers=(), vocab_size=5), "at least one layer"),
    ],
)
def test_impossible_shapes_are_refused(build, text: str) -> None:
    with pytest.raises(CostModelError, match=text):
        build()


def test_a_generator_counts_like_a_tower() -> None:
    layer = LayerShape(
        attention=AttentionShape(dim=8, num_heads=2, num_kv_heads=2, head_dim=4, span="full"),
        mlp=MLPShape(dim=8, hidden=16, gated=False),
    )
    llm = text_shape()
    shape = ModelShape(name="x", llm=llm, generator=TowerShape(layers=(layer,) * 2, patch_dim=12))
    extra = shape.num_parameters - ModelShape(name="x", llm=llm).num_parameters
    assert extra == 12 * 8 + 2 * (4 * 64 + 2 * 8 * 16)
