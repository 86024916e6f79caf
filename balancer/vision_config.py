"""The vision tower of a `config.json` as a TowerShape: one small reader per family.

    qwen2_vl, qwen2_5_vl, qwen3_vl(_moe), glm4v    native resolution, a merger on 2 x 2 patches
    internvl(_chat), llava*, gemma3                tiles of one size, an MLP
    pixtral (llava), mistral3, idefics3, smolvlm   native resolution or tiles, merging before or inside the projector
    kimi_vl, kimi_k25                              native resolution, merger as in Qwen

Rows of a projector are visual tokens, or patches where the family projects before it pools or trims. Defaults are
those of the configuration classes in transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any

from balancer.config_fields import ConfigFields
from balancer.cost_terms import Column
from balancer.model_shape import AttentionShape, LayerShape, LinearShape, MLPShape, Span, TowerShape

TowerReader = Callable[[ConfigFields, int], TowerShape]

_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_CLIP_VISION = {**_CLIP, "patch_size": 32}
_SIGLIP_VISION = {**_CLIP, "patch_size": 16}
_PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "patch_size": 16,
}
_INTERNVIT = {**_PIXTRAL, "patch_size": 14}
_IDEFICS = {**_CLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_MOONVIT = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
}
_BY_TYPE: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": _CLIP_VISION,
    "siglip_vision_model": _SIGLIP_VISION,
    "pixtral": _PIXTRAL,
    "intern_vit_6b": _INTERNVIT,
    "internvl_vision": _INTERNVIT,
    "idefics3": _IDEFICS,
    "idefics3_vision": _IDEFICS,
    "smolvlm_vision": _IDEFICS,
    "moonvit": _MOONVIT,
    "kimi_k25_vision": _MOONVIT,
}
_QWEN2_VISION = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
_QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "deepstack_visual_indexes": [8, 16, 24],
}
_GLM4V_VISION = {"depth": 24, "hidden_size": 1536, "num_heads": 12}


def tower_shape(root: ConfigFields, dim: int) -> TowerShape | None:
    """The tower of a model whose LLM is `dim` wide; None for a text model.

    Raises:
        CostModelError: a missing field, or a tower of a family that has no reader.
    """
    if not root.has("vision_config"):
        return None
    reader = _READERS.get(root.model_type, _generic)
    return reader(root, dim)


def _layers(
    *, dim: int, depth: int, num_heads: int, hidden: int, gated: bool, spans: tuple[Span, ...] = (), head_dim: int = 0
) -> tuple[LayerShape, ...]:
    """Plain transformer layers; `spans` says where they attend (default: everywhere in a segment)."""
    mlp = MLPShape(dim=dim, hidden=hidden, gated=gated)
    width = head_dim or max(dim // num_heads, 1)

    def layer(span: Span) -> LayerShape:
        attention = AttentionShape(dim=dim, num_heads=num_heads, num_kv_heads=num_heads, head_dim=width, span=span)
        return LayerShape(attention=attention, mlp=mlp)

    if not spans:
        return (layer("full"),) * depth
    return tuple(layer(span) for span in spans)


def _pair(first: int, hidden: int, out: int, *, rows: Column, norm: bool = True) -> tuple[LinearShape, ...]:
    """A two-layer MLP; `norm`: with a trained norm in front."""
    return (
        LinearShape(name="linear_1", in_dim=first, out_dim=hidden, rows=rows, reads_stream=norm),
        LinearShape(name="linear_2", in_dim=hidden, out_dim=out, rows=rows),
    )


def _patch_dim(vision: ConfigFields, temporal: int = 1) -> int:
    channels = vision.integer("num_channels", "in_channels", "in_chans", default=3)
    return channels * temporal * vision.integer("patch_size", default=14) ** 2


def _qwen2(root: ConfigFields, dim: int) -> TowerShape:
    vision = root.section("vision_config", defaults=_QWEN2_VISION)
    width, merge = vision.integer("embed_dim"), vision.integer("spatial_merge_size", default=2)
    return TowerShape(
        layers=_layers(
            dim=width,
            depth=vision.integer("depth"),
            num_heads=vision.integer("num_heads"),
            hidden=int(width * vision.number("mlp_ratio")),
            gated=False,
        ),
        patch_dim=_patch_dim(vision, vision.integer("temporal_patch_size", default=2)),
        projector=_pair(width * merge**2, width * merge**2, dim, rows="visual"),
    )


def _qwen2_5(root: ConfigFields, dim: int) -> TowerShape:
    vision = root.section("vision_config", defaults=_QWEN2_5_VISION)
    width, merge = vision.integer("hidden_size"), vision.integer("spatial_merge_size", default=2)
    depth, full = vision.integer("depth"), set(vision.integers("fullatt_block_indexes"))
    return TowerShape(
        layers=_layers(
            dim=width,
            depth=depth,
            num_heads=vision.integer("num_heads"),
            hidden=vision.integer("intermediate_size"),
            gated=True,
            spans=tuple("full" if index in full else "window" for index in range(depth)),
        ),
        patch_dim=_patch_dim(vision, vision.integer("temporal_patch_size", default=2)),
        projector=_pair(width * merge**2, width * merge**2, dim, rows="visual"),
    )


def _qwen3(root: ConfigFields, dim: int) -> TowerShape:
    """Each deep-stack layer has a merger of its own, whose rows go into an early LLM layer."""
    vision = root.section("vision_config", defaults=_QWEN3_VISION)
    width, merge = vision.integer("hidden_size"), vision.integer("spatial_merge_size", default=2)
    mergers = 1 + len(vision.integers("deepstack_visual_indexes"))
    return TowerShape(
        layers=_layers(
            dim=width,
            depth=vision.integer("depth"),
            num_heads=vision.integer("num_heads"),
            hidden=vision.integer("intermediate_size"),
            gated=False,
        ),
        patch_dim=_patch_dim(vision, vision.integer("temporal_patch_size", default=2)),
        projector=_pair(width * merge**2, width * merge**2, dim, rows="visual") * mergers,
    )


def _glm4v(root: ConfigFields, dim: int) -> TowerShape:
    """A 2 x 2 convolution to the LLM's width, then a projection and a gated MLP; tower MLPs are as wide as the LLM."""
    vision = root.section("vision_config", defaults=_GLM4V_VISION)
    width, merge = vision.integer("hidden_size"), vision.integer("spatial_merge_size", default=2)
    hidden = vision.integer("intermediate_size")
    gated = MLPShape(dim=dim, hidden=hidden).linears("visual")
    return TowerShape(
        layers=_layers(
            dim=width,
            depth=vision.integer("depth"),
            num_heads=vision.integer("num_heads"),
            hidden=vision.integer("out_hidden_size", default=dim),
            gated=True,
        ),
        patch_dim=_patch_dim(vision, vision.integer("temporal_patch_size", default=2)),
        projector=(
            LinearShape(name="downsample", in_dim=width * merge**2, out_dim=dim, rows="visual", reads_stream=True),
            LinearShape(name="proj", in_dim=dim, out_dim=dim, rows="visual"),
            *gated,
        ),
    )


def _vit(root: ConfigFields, *, gated: bool = False) -> tuple[ConfigFields, tuple[LayerShape, ...]]:
    """(section, layers) of a tower with the usual names."""
    section = root.section("vision_config")
    vision = section.with_defaults(_BY_TYPE.get(section.model_type or root.model_type, {}))
    layers = _layers(
        dim=vision.integer("hidden_size"),
        depth=vision.integer("num_hidden_layers"),
        num_heads=vision.integer("num_attention_heads"),
        hidden=vision.integer("intermediate_size"),
        gated=gated,
        head_dim=vision.integer("head_dim", default=0, minimum=0),
    )
    return vision, layers


def _internvl(root: ConfigFields, dim: int) -> TowerShape:
    vision, layers = _vit(root)
    ratio = root.number("downsample_ratio") if root.has("downsample_ratio") else 0.5
    merged = round(layers[0].attention.dim / ratio**2)
    return TowerShape(layers=layers, patch_dim=_patch_dim(vision), projector=_pair(merged, dim, dim, rows="visual"))


def _llava(root: ConfigFields, dim: int) -> TowerShape:
    """LLaVA 1.5 projects what it keeps; its successors project whole tiles and trim or pool afterwards."""
    pixtral = root.section("vision_config").model_type == "pixtral"
    vision, layers = _vit(root, gated=pixtral)
    chosen = root.values.get("vision_feature_layer", -1 if root.model_type == "llava_onevision" else -2)
    chosen = max(chosen) if isinstance(chosen, list) and chosen else chosen
    idle = 0
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        idle = -1 - chosen if chosen < 0 else len(layers) - chosen
    rows: Column = "visual" if root.model_type == "llava" else "patches"
    return TowerShape(
        layers=layers,
        patch_dim=_patch_dim(vision),
        projector=_pair(layers[0].attention.dim, dim, dim, rows=rows, norm=False),
        idle_layers=min(max(idle, 0), len(layers) - 1),
    )


def _gemma3(root: ConfigFields, dim: int) -> TowerShape:
    vision, layers = _vit(root)
    matrix = LinearShape(
        name="projection", in_dim=layers[0].attention.dim, out_dim=dim, rows="visual", reads_stream=True
    )
    return TowerShape(layers=layers, patch_dim=_patch_dim(vision), projector=(matrix,))


def _mistral3(root: ConfigFields, dim: int) -> TowerShape:
    vision, layers = _vit(root, gated=True)
    width, merge = layers[0].attention.dim, root.integer("spatial_merge_size", default=2)
    merger = LinearShape(name="merger", in_dim=width * merge**2, out_dim=width, rows="visual", reads_stream=True)
    return TowerShape(
        layers=layers, patch_dim=_patch_dim(vision), projector=(merger, *_pair(width, dim, dim, rows="visual"))
    )


def _idefics3(root: ConfigFields, dim: int) -> TowerShape:
    vision, layers = _vit(root)
    scale = root.integer("scale_factor", default=2)
    matrix = LinearShape(
        name="modality_projection", in_dim=layers[0].attention.dim * scale**2, out_dim=dim, rows="visual"
    )
    return TowerShape(layers=layers, patch_dim=_patch_dim(vision), projector=(matrix,))


def _kimi(root: ConfigFields, dim: int) -> TowerShape:
    vision, layers = _vit(root)
    merged = layers[0].attention.dim * vision.integer("merge_kernel_size", default=2) ** 2
    return TowerShape(layers=layers, patch_dim=_patch_dim(vision), projector=_pair(merged, merged, dim, rows="visual"))


def _generic(root: ConfigFields, dim: int) -> TowerShape:
    """A tower by its usual field names, with a two-layer projector of the LLM's width on visual tokens."""
    vision, layers = _vit(root)
    return TowerShape(
        layers=layers,
        patch_dim=_patch_dim(vision),
        projector=_pair(layers[0].attention.dim, dim, dim, rows="visual"),
    )


_READERS: Mapping[str, TowerReader] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "glm4v": _glm4v,
    "internvl": _internvl,
    "internvl_chat": _internvl,
    "llava": _llava,
    "llava_next": _llava,
    "llava_next_video": _llava,
    "llava_onevision": _llava,
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "kimi_vl": _kimi,
    "kimi_k25": _kimi,
}
KNOWN_FAMILIES = frozenset(_READERS)
