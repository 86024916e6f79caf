"""Closed-form FLOPs against torch's own counter on real modules: forward and backward, equal to the last FLOP.

`FlopCounterMode` counts matrix products only, so modules run with eager attention, whose products it sees; it knows
neither causal masks nor windows, which `causal_pairs="all"` and `attention="math"` say too. The flash form is compared
with torch's own formulas for its fused kernels.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from balancer.counts import StepCounts
from balancer.flops import TrainOptions, attention_work, module_works
from balancer.model_config import model_shape, shape_from_config
from balancer.model_presets import PRESET_CONFIGS
from balancer.model_shape import AttentionShape, ModelShape

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

# Exact but for class tokens, which a patch embedding does not see: 1 in 17 patches here, 1 in 577 in a real tower.
EXACT, CLASS_TOKEN = 0.0, 0.01
AS_COUNTED = {"causal_pairs": "all", "attention": "math", "head_on": "all"}

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
QWEN_IDS = {"image_token_id": 200, "video_token_id": 201, "vision_start_token_id": 202, "vision_end_token_id": 203}


def one_sample(tokens: int, **columns: int) -> StepCounts:
    names = ("visual_tokens", "patches", "full_total_sq", "window_total_sq")
    rest = {name: np.array([columns.get(name, 0)]) for name in names}
    return StepCounts(
        sample_ids=np.array([0]),
        llm_tokens=np.array([tokens]),
        label_tokens=np.array([tokens]),
        num_items=np.array([int(columns.get("patches", 0) > 0)]),
        **rest,
    )


def counted(loss: Callable[[], Any]) -> tuple[int, int]:
    """(forward, backward) FLOPs by torch."""
    from torch.utils.flop_counter import FlopCounterMode

    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with forward:
        value = loss()
    with backward:
        value.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def closed_form(shape: ModelShape, counts: StepCounts, **options: Any) -> tuple[int, int]:
    works = module_works(shape, TrainOptions(**{**AS_COUNTED, **options}))
    return tuple(sum(int(getattr(work, part).of(counts)[0]) for work in works) for part in ("forward", "backward"))


def assert_close(ours: tuple[int, int], torchs: tuple[int, int], tolerance: float) -> None:
    assert min(torchs) > 0
    for mine, reference in zip(ours, torchs, strict=True):
        assert abs(mine - reference) <= tolerance * reference


@functools.cache
def transformers() -> Any:
    return pytest.importorskip("transformers")


def built(auto: str, kind: str, values: dict[str, Any]) -> tuple[Any, ModelShape]:
    """(a tiny model with random weights, the shape read from its config)."""
    hub = transformers()
    config = hub.AutoConfig.for_model(kind, **values)
    config._experts_implementation = "eager"  # grouped kernels are invisible to the counter
    torch.manual_seed(0)
    model = getattr(hub, auto).from_config(config, attn_implementation="eager").train()
    return model, shape_from_config(config.to_dict(), name=kind)


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
TEXT_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "sliding_window": 16, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 16},
    "deepseek_v3": {
        **MOE,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_text_models_cost_what_torch_counts(kind: str) -> None:
    model, shape = built("AutoModelForCausalLM", kind, {**TEXT, **TEXT_MODELS[kind]})
    ids = torch.randint(3, 300, (1, 64))
    torchs = counted(lambda: model(input_ids=ids, labels=ids).loss)
    assert_close(closed_form(shape, one_sample(64)), torchs, EXACT)
    assert shape.note == ""


def prompt(visual: int) -> dict[str, Any]:
    """Three tokens, the image's, twenty more."""
    ids = torch.cat([torch.arange(5, 8), torch.full((visual,), 200), torch.arange(10, 30)])[None]
    return {"input_ids": ids, "labels": ids}


def native(patch_dim: int, rows: int = 12, columns: int = 16) -> dict[str, Any]:
    """Inputs of the Qwen family: one image of rows x columns patches."""
    inputs = prompt(rows * columns // 4)
    return {
        **inputs,
        "pixel_values": torch.randn(rows * columns, patch_dim),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
        "mm_token_type_ids": (inputs["input_ids"] == 200).int(),
    }


# 12 x 16 patches: windows of 8 x 8 patches are 8 x 8 (two) and 4 x 8 (two).
NATIVE = one_sample(71, visual_tokens=48, patches=192, full_total_sq=192**2, window_total_sq=2 * 64**2 + 2 * 32**2)
QWEN_TEXT = {**TEXT, "rope_parameters": ROPE}
QWEN2_5_VL = {
    **QWEN_IDS,
    "text_config": QWEN_TEXT,
    "vision_config": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1, 3],
    },
}
QWEN3_VISION = {**QWEN2_5_VL["vision_config"], "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
QWEN3_VISION.pop("fullatt_block_indexes")

VISION_MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], StepCounts, float]] = {
    "qwen2_5_vl": (QWEN2_5_VL, lambda: native(1176), NATIVE, EXACT),
    "qwen2_vl": (
        {
            **QWEN_IDS,
            "text_config": QWEN_TEXT,
            "vision_config": {"depth": 4, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 3},
        },
        lambda: native(1176),
        NATIVE,
        EXACT,
    ),
    "qwen3_vl": (
        {
            **QWEN_IDS,
            "text_config": {**TEXT, "head_dim": 16, "rope_parameters": ROPE},
            "vision_config": QWEN3_VISION,
        },
        lambda: native(1536),
        NATIVE,
        EXACT,
    ),
    "llava": (
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "clip_vision_model", **TOWER},
            "image_token_id": 200,
        },
        lambda: {**prompt(16), "pixel_values": torch.randn(1, 3, 56, 56)},
        one_sample(39, visual_tokens=16, patches=17, full_total_sq=17**2),
        CLASS_TOKEN,
    ),
    "internvl": (
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {"model_type": "internvl_vision", **TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
            "image_token_id": 200,
        },
        lambda: {**prompt(4), "pixel_values": torch.randn(1, 3, 56, 56)},
        one_sample(27, visual_tokens=4, patches=17, full_total_sq=17**2),
        CLASS_TOKEN,
    ),
    "gemma3": (
        {
            "text_config": {"model_type": "gemma3_text", **TEXT, "head_dim": 16, "sliding_window": 8},
            "vision_config": {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_id": 200,
        },
        lambda: {
            **prompt(4),
            "pixel_values": torch.randn(1, 3, 56, 56),
            "token_type_ids": (prompt(4)["input_ids"] == 200).int(),
        },
        one_sample(27, visual_tokens=4, patches=16, full_total_sq=256),
        EXACT,
    ),
    "idefics3": (
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {"model_type": "idefics3_vision", **TOWER},
            "scale_factor": 2,
            "image_token_id": 200,
        },
        lambda: {**prompt(4), "pixel_values": torch.randn(1, 1, 3, 56, 56)},
        one_sample(27, visual_tokens=4, patches=16, full_total_sq=256),
        EXACT,
    ),
    "mistral3": (
        {
            "text_config": {"model_type": "mistral", **TEXT, "head_dim": 16},
            "vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 16},
            "spatial_merge_size": 2,
            "image_token_id": 200,
        },
        lambda: {
            **prompt(4),
            "pixel_values": torch.randn(1, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]]),
        },
        one_sample(27, visual_tokens=4, patches=16, full_total_sq=256),
        EXACT,
    ),
    "llava_onevision": (
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
            "image_grid_pinpoints": [[56, 56]],
            "vision_feature_select_strategy": "full",
            "image_token_id": 200,
        },
        lambda: {
            **prompt(36),
            "pixel_values": torch.randn(1, 2, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]]),
        },
        one_sample(59, visual_tokens=36, patches=32, full_total_sq=2 * 256),
        EXACT,
    ),
    "glm4v": (
        {
            "text_config": {"model_type": "glm4v_text", **TEXT, "rope_parameters": ROPE},
            "vision_config": {
                "depth": 4,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "image_size": 112,
            },
            "image_token_id": 200,
        },
        lambda: native(1176, 8, 8),
        one_sample(39, visual_tokens=16, patches=64, full_total_sq=64**2),
        EXACT,
    ),
}


@pytest.mark.parametrize("kind", VISION_MODELS)
def test_multimodal_models_cost_what_torch_counts(kind: str) -> None:
    values, inputs, counts, tolerance = VISION_MODELS[kind]
    model, shape = built("AutoModelForImageTextToText", kind, values)
    given = inputs()
    torchs = counted(lambda: model(**given).loss)
    assert_close(closed_form(shape, counts), torchs, tolerance)
    assert shape.note == ""


def parts(model: Any) -> dict[str, list[Any]]:
    """Modules of Qwen2.5-VL by the names that freezing knows."""
    visual, llm = model.model.visual, model.model.language_model
    return {
        "patch_embed": [visual.patch_embed],
        "encoder": [visual.patch_embed, visual.blocks],
        "projector": [visual.merger],
        "embedding": [llm.embed_tokens],
        "llm": [llm, model.lm_head],
        "head": [model.lm_head],
    }


@pytest.mark.parametrize(
    "frozen",
    [
        ("encoder",),
        ("encoder", "projector"),
        ("encoder", "llm"),
        ("llm",),
        ("patch_embed",),
        ("embedding",),
        ("head",),
        ("encoder", "projector", "embedding"),
    ],
)
def test_frozen_modules_cost_what_torch_counts(frozen: tuple[str, ...]) -> None:
    model, shape = built("AutoModelForImageTextToText", "qwen2_5_vl", QWEN2_5_VL)
    for name in frozen:
        for module in parts(model)[name]:
            module.requires_grad_(False)
    given = native(1176)
    torchs = counted(lambda: model(**given).loss)
    assert_close(closed_form(shape, NATIVE, frozen=frozen), torchs, EXACT)


class Adapted(torch.nn.Module):
    """W x + B (A x), W frozen."""

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.first = torch.nn.Linear(base.in_features, rank, bias=False)
        self.second = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.second(self.first(x))


@pytest.mark.parametrize("frozen", [("encoder", "projector"), ("encoder",)])
def test_adapters_cost_what_torch_counts(frozen: tuple[str, ...]) -> None:
    rank = 4
    model, shape = built("AutoModelForImageTextToText", "qwen2_5_vl", QWEN2_5_VL)
    for name in (*frozen, "llm"):
        for module in parts(model)[name]:
            module.requires_grad_(False)
    for layer in model.model.language_model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, module in [*block.named_children()]:
                if isinstance(module, torch.nn.Linear):
                    setattr(block, name, Adapted(module, rank))
    given = native(1176)
    torchs = counted(lambda: model(**given).loss)
    assert_close(closed_form(shape, NATIVE, frozen=frozen, lora_rank=rank), torchs, EXACT)


def test_checkpointed_layers_cost_what_torch_counts() -> None:
    """Reentrant checkpointing runs the whole layer again; the other kind stops before the last product of each."""
    model, shape = built("AutoModelForCausalLM", "llama", TEXT)
    ids = torch.randint(3, 300, (1, 64))
    for layer in model.model.layers:
        run = layer.forward
        layer.forward = lambda x, run=run, **options: torch.utils.checkpoint.checkpoint(
            functools.partial(run, **options), x, use_reentrant=True
        )
    torchs = counted(lambda: model(input_ids=ids, labels=ids, use_cache=False).loss)
    assert_close(closed_form(shape, one_sample(64), recompute=("llm",)), torchs, EXACT)


HUB_PRESETS = [name for name in PRESET_CONFIGS if not name.startswith("internvl")]  # their code is not in transformers
POSITION_TABLES = ("position_embedding.weight", "pos_embed.weight")


@pytest.mark.parametrize("name", HUB_PRESETS)
def test_presets_have_the_matrices_of_the_real_models(name: str) -> None:
    hub, values = transformers(), dict(PRESET_CONFIGS[name])
    kind = values.pop("model_type")
    if "vision_config" in values and "text_config" not in values:  # the older flat layout of Qwen2-VL
        vision, tied = values.pop("vision_config"), values.pop("tie_word_embeddings")
        values = {"text_config": values, "vision_config": vision, "tie_word_embeddings": tied}
    values = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    auto = hub.AutoModelForImageTextToText if "vision_config" in values else hub.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(hub.AutoConfig.for_model(kind, **values))
    model.tie_weights()
    matrices = sum(
        parameter.numel()
        for path, parameter in model.named_parameters()
        if parameter.dim() > 1 and not path.endswith(POSITION_TABLES)
    )
    assert model_shape(name).num_parameters == matrices


@pytest.mark.parametrize("head_dim", [16, 128])
def test_flash_attention_costs_what_torch_says_of_its_kernels(head_dim: int) -> None:
    from torch.utils import flop_counter

    heads, rows = 4, 96
    shape = (1, heads, rows, head_dim)
    attention = AttentionShape(dim=64, num_heads=heads, num_kv_heads=heads, head_dim=head_dim, span="full")
    counts = one_sample(1, patches=rows, full_total_sq=rows**2)
    forward = int(attention_work(attention).of(counts)[0])
    assert forward == flop_counter.sdpa_flop_count(shape, shape, shape)
    assert forward * 5 // 2 == flop_counter.sdpa_backward_flop_count(shape, shape, shape, shape)
