"""Public model configs by name: the fields of each published `config.json` that decide cost, in the same spelling.

Sources: the `config.json` of the repositories named beside each entry, on huggingface.co. `model_config` reads them as
it reads a folder, so a preset and a downloaded folder of the same model give the same shape.
"""

from collections.abc import Mapping
from typing import Any


def _text(kind: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    """Sizes: width, layers, heads, key/value heads, hidden width of the MLP, vocabulary."""
    dim, layers, heads, kv_heads, hidden, vocab = sizes
    return {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": hidden,
        "vocab_size": vocab,
        **more,
    }


def _qwen2_5_vl(vision_hidden: int, *, tied: bool, text: dict[str, Any]) -> dict[str, Any]:
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": vision_hidden,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }
    return {**text, "model_type": "qwen2_5_vl", "tie_word_embeddings": tied, "vision_config": vision}


def _qwen3_vl(
    vision: tuple[int, int, int], deepstack: list[int], *, tied: bool, text: dict[str, Any], kind: str = "qwen3_vl"
) -> dict[str, Any]:
    width, depth, hidden = vision
    tower = {
        "hidden_size": width,
        "depth": depth,
        "intermediate_size": hidden,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": deepstack,
    }
    return {"model_type": kind, "tie_word_embeddings": tied, "text_config": text, "vision_config": tower}


def _internvl3(vision: tuple[int, int, int, int], text: dict[str, Any]) -> dict[str, Any]:
    width, depth, heads, hidden = vision
    tower = {
        "model_type": "intern_vit_6b",
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "image_size": 448,
        "patch_size": 14,
    }
    return {"model_type": "internvl_chat", "downsample_ratio": 0.5, "llm_config": text, "vision_config": tower}


_CLIP_L_336 = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 336,
    "patch_size": 14,
}
_SIGLIP_SO400M = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 14,
    "vision_use_head": False,
}
_QWEN3_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}

PRESET_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # meta-llama/Llama-3.1-8B, Llama-3.1-70B
    "llama-3.1-8b": _text("llama", (4096, 32, 32, 8, 14336, 128256)),
    "llama-3.1-70b": _text("llama", (8192, 80, 64, 8, 28672, 128256)),
    # mistralai/Mistral-7B-v0.1, Mixtral-8x7B-v0.1
    "mistral-7b": _text("mistral", (4096, 32, 32, 8, 14336, 32000), sliding_window=4096),
    "mixtral-8x7b": _text(
        "mixtral", (4096, 32, 32, 8, 14336, 32000), num_local_experts=8, num_experts_per_tok=2, sliding_window=None
    ),
    # Qwen/Qwen2.5-7B, Qwen3-8B, Qwen3-30B-A3B
    "qwen2.5-7b": _text("qwen2", (3584, 28, 28, 4, 18944, 152064), use_sliding_window=False),
    "qwen3-8b": _text("qwen3", (4096, 36, 32, 8, 12288, 151936), head_dim=128),
    "qwen3-30b-a3b": _text("qwen3_moe", (2048, 48, 32, 4, 6144, 151936), **_QWEN3_MOE),
    # Qwen/Qwen2-VL-7B-Instruct
    "qwen2-vl-7b": {
        **_text("qwen2_vl", (3584, 28, 28, 4, 18944, 152064), use_sliding_window=False, tie_word_embeddings=False),
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "mlp_ratio": 4,
            "num_heads": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    # Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct
    "qwen2.5-vl-3b": _qwen2_5_vl(3420, tied=True, text=_text("qwen2_5_vl", (2048, 36, 16, 2, 11008, 151936))),
    "qwen2.5-vl-7b": _qwen2_5_vl(3420, tied=False, text=_text("qwen2_5_vl", (3584, 28, 28, 4, 18944, 152064))),
    "qwen2.5-vl-32b": _qwen2_5_vl(3456, tied=False, text=_text("qwen2_5_vl", (5120, 64, 40, 8, 27648, 152064))),
    "qwen2.5-vl-72b": _qwen2_5_vl(3456, tied=False, text=_text("qwen2_5_vl", (8192, 80, 64, 8, 29568, 152064))),
    # Qwen/Qwen3-VL-{4B,8B,30B-A3B}-Instruct
    "qwen3-vl-4b": _qwen3_vl(
        (1024, 24, 4096),
        [5, 11, 17],
        tied=True,
        text=_text("qwen3_vl_text", (2560, 36, 32, 8, 9728, 151936), head_dim=128),
    ),
    "qwen3-vl-8b": _qwen3_vl(
        (1152, 27, 4304),
        [8, 16, 24],
        tied=False,
        text=_text("qwen3_vl_text", (4096, 36, 32, 8, 12288, 151936), head_dim=128),
    ),
    "qwen3-vl-30b-a3b": _qwen3_vl(
        (1152, 27, 4304),
        [8, 16, 24],
        tied=False,
        text=_text("qwen3_vl_moe_text", (2048, 48, 32, 4, 6144, 151936), **_QWEN3_MOE),
        kind="qwen3_vl_moe",
    ),
    # OpenGVLab/InternVL3-8B, InternVL3-78B
    "internvl3-8b": _internvl3((1024, 24, 16, 4096), _text("qwen2", (3584, 28, 28, 4, 18944, 151674))),
    "internvl3-78b": _internvl3((3200, 45, 25, 12800), _text("qwen2", (8192, 80, 64, 8, 29568, 151674))),
    # llava-hf/llava-1.5-7b-hf, llava-onevision-qwen2-7b-ov-hf
    "llava-1.5-7b": {
        "model_type": "llava",
        "vision_feature_layer": -2,
        "text_config": _text("llama", (4096, 32, 32, 32, 11008, 32064)),
        "vision_config": _CLIP_L_336,
    },
    "llava-onevision-7b": {
        "model_type": "llava_onevision",
        "vision_feature_layer": -1,
        "text_config": _text("qwen2", (3584, 28, 28, 4, 18944, 152000)),
        "vision_config": {**_SIGLIP_SO400M, "num_hidden_layers": 26, "image_size": 384},
    },
    # google/gemma-3-4b-it
    "gemma-3-4b": {
        "model_type": "gemma3",
        "text_config": _text(
            "gemma3_text", (2560, 34, 8, 4, 10240, 262208), head_dim=256, sliding_window=1024, sliding_window_pattern=6
        ),
        "vision_config": {**_SIGLIP_SO400M, "num_hidden_layers": 27, "image_size": 896},
    },
    # mistral-community/pixtral-12b
    "pixtral-12b": {
        "model_type": "llava",
        "vision_feature_layer": -1,
        "text_config": _text("mistral", (5120, 40, 32, 8, 14336, 131072), head_dim=128, sliding_window=None),
        "vision_config": {"model_type": "pixtral", "head_dim": 64, "image_size": 1024, "patch_size": 16},
    },
}
