"""What `--model` names: a preset, or a folder that `balancer-train export` wrote (config, processor, weights)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balancer.cost_model import CostModel, EncoderDims, LLMDims
from balancer.layout import Layout
from dataloaders.demo import DEMO_PROCESSOR
from dataloaders.errors import DataError
from dataloaders.estimators import estimator_from_config
from trainer.errors import ConfigError
from trainer.model import PRESETS, ModelConfig, llm_layers_per_stage, preset

CONFIG_FILE, PROCESSOR_FILE, WEIGHTS_FILE = "config.json", "processor.json", "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A resolved `--model`.

    Attributes:
        name: as given.
        config: sizes.
        processor: config mapping of the token rule (see `dataloaders.estimators.estimator_from_config`).
        weights: safetensors file to start from; None draws them from the seed.
    """

    name: str
    config: ModelConfig
    processor: Mapping[str, Any]
    weights: Path | None = None


def load_model_source(name: str) -> ModelSource:
    """Resolve a preset name or a folder.

    Raises:
        ConfigError: neither, or a folder whose config this version cannot read.
    """
    if name in PRESETS:
        return ModelSource(name=name, config=preset(name), processor=DEMO_PROCESSOR)
    folder = Path(name).expanduser()
    if not (folder / CONFIG_FILE).is_file():
        presets = ", ".join(sorted(PRESETS))
        raise ConfigError(
            f"model={name!r} is neither a preset ({presets}) nor a folder with a {CONFIG_FILE}. Folders come from "
            f"balancer-train export."
        )
    weights = folder / WEIGHTS_FILE
    return ModelSource(
        name=name,
        config=_model_config(folder / CONFIG_FILE),
        processor=_processor(folder / PROCESSOR_FILE),
        weights=weights if weights.is_file() else None,
    )


def _model_config(path: Path) -> ModelConfig:
    try:
        return ModelConfig.from_json(path.read_text(encoding="utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}. Folders for --model come from balancer-train export.") from None


def _processor(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} is missing: it holds the rule that turns pixels into tokens. Export the run again.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}. Export the run again.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object with processor options")
    try:
        estimator_from_config(content)
    except DataError as error:
        raise ConfigError(f"{path}: {str(error).rstrip('.')}. Export the run again.") from None
    return content


def cost_model_for(config: ModelConfig, layout: Layout) -> CostModel:
    """Closed-form cost of the model's stages in a layout; ratios are what matters, the rate is nominal."""
    vision, llm = config.vision, config.llm
    return CostModel.from_dims(
        EncoderDims(
            dim=vision.dim,
            depth=vision.depth,
            mlp_dim=vision.mlp_dim,
            num_full_layers=len(vision.full_attention_layers),
            out_dim=vision.out_dim,
            patch_dim=vision.patch_values,
            merge=vision.merge,
        ),
        LLMDims(
            dim=llm.dim,
            depth=llm.depth,
            num_heads=llm.num_heads,
            num_kv_heads=llm.num_kv_heads,
            mlp_dim=llm.mlp_dim,
            vocab_size=llm.vocab_size,
        ),
        llm_layers_per_stage=llm_layers_per_stage(llm.depth, layout.num_stages - 1),
        head_on="labels",
    )
