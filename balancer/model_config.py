"""A model by name: a preset, a Hugging Face folder, a `config.json`, or a folder that `balancer-train export` wrote.

    "qwen2.5-vl-7b" | folder | config.json | ModelShape  --model_shape-->  ModelShape

A `model_type` that is not known is read by the fields that families share, and the shape says so in its note; where a
field is missing, the error names it. Nothing is downloaded and no code of a folder runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from balancer.config_fields import ConfigFields
from balancer.decoder_config import decoder_shape
from balancer.errors import CostModelError
from balancer.model_presets import PRESET_CONFIGS
from balancer.model_shape import (
    AttentionShape,
    DecoderShape,
    LayerShape,
    LinearShape,
    MLPShape,
    ModelShape,
    TowerShape,
)
from balancer.vision_config import KNOWN_FAMILIES, tower_shape

_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")


def preset_names() -> tuple[str, ...]:
    """Names of the built-in public configs, sorted."""
    return tuple(sorted(PRESET_CONFIGS))


def model_shape(source: str | Path | ModelShape) -> ModelShape:
    """The shape of a model.

    Args:
        source: a preset's name, a folder with a `config.json`, such a file, or a shape (returned as it is).

    Raises:
        CostModelError: neither preset nor path, a file that is no config, or a field that is missing.
    """
    if isinstance(source, ModelShape):
        return source
    name = str(source)
    if name.lower() in PRESET_CONFIGS:
        return shape_from_config(PRESET_CONFIGS[name.lower()], name=name.lower())
    path = _path_of(name)
    if path is None:
        raise CostModelError(
            f"model {name[:200]!r} is neither a preset ({', '.join(preset_names())}) nor a path to a folder with a "
            "config.json"
        )
    return _shape(ConfigFields.from_path(path), name)


def _path_of(name: str) -> Path | None:
    """The path of that name, `~` expanded; None where there is none, or where it can be no path."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, `~` of an unknown user, a NUL
        return None


def shape_from_config(values: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape described by the content of a `config.json`.

    Raises:
        CostModelError: a field that is missing or of the wrong type.
    """
    return _shape(ConfigFields(values, f"config of {name}"), name)


def _shape(root: ConfigFields, name: str) -> ModelShape:
    if root.has("format_version") and root.has("vision") and root.has("llm"):
        return _own_shape(root, name)
    nested = any(root.has(section) for section in _TEXT_SECTIONS)
    text = root.section(*_TEXT_SECTIONS) if nested else root
    llm, note = decoder_shape(text, root)
    encoder = tower_shape(root, llm.dim)
    if encoder is not None and root.model_type not in KNOWN_FAMILIES:
        unknown = f"vision tower of model_type {root.model_type!r} read by its generic fields, projector assumed"
        note = f"{note}; {unknown}" if note else unknown
    return ModelShape(name=name, llm=llm, encoder=encoder, note=note)


def _own_shape(root: ConfigFields, name: str) -> ModelShape:
    """The config of this package's own model (`trainer.model.ModelConfig.to_json`)."""
    vision, llm = root.section("vision"), root.section("llm")
    width, depth, merge = vision.integer("dim"), vision.integer("depth"), vision.integer("merge", default=2)
    heads, full = vision.integer("num_heads"), set(vision.integers("full_attention_layers"))
    block = MLPShape(dim=width, hidden=vision.integer("mlp_dim"))

    def patches(index: int) -> LayerShape:
        attention = AttentionShape(
            dim=width,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=max(width // heads, 1),
            span="full" if index in full else "window",
        )
        return LayerShape(attention=attention, mlp=block)

    merged, out = width * merge**2, vision.integer("out_dim")
    encoder = TowerShape(
        layers=tuple(patches(index) for index in range(depth)),
        patch_dim=3 * vision.integer("temporal_patch", default=2) * vision.integer("patch_px", default=14) ** 2,
        projector=(
            LinearShape(name="merger_1", in_dim=merged, out_dim=merged, rows="visual", reads_stream=True),
            LinearShape(name="merger_2", in_dim=merged, out_dim=out, rows="visual"),
        ),
    )
    dim, num_heads = llm.integer("dim"), llm.integer("num_heads")
    layer = LayerShape(
        attention=AttentionShape(
            dim=dim,
            num_heads=num_heads,
            num_kv_heads=llm.integer("num_kv_heads"),
            head_dim=max(dim // num_heads, 1),
        ),
        mlp=MLPShape(dim=dim, hidden=llm.integer("mlp_dim")),
    )
    decoder = DecoderShape(
        layers=(layer,) * llm.integer("depth"),
        vocab_size=llm.integer("vocab_size"),
        tied=llm.flag("tie_embeddings", default=False),
    )
    return ModelShape(name=name, llm=decoder, encoder=encoder)
