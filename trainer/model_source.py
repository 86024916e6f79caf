"""What `--model` names: a preset, or a folder that `balancer-train export` wrote (config, processor, weights)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from balancer.cost_model import CostModel
from balancer.layout import Layout, ParallelSpec
from balancer.model_config import shape_from_config
from dataloaders.demo import DEMO_PROCESSOR
from dataloaders.errors import DataError
from dataloaders.estimators import estimator_from_config
from trainer.errors import ConfigError
from trainer.model import PRESETS, ModelConfig, llm_layers_per_stage, preset

CONFIG_FILE, PROCESSOR_FILE, WEIGHTS_FILE = "config.json", "processor.json", "model.safetensors"
_FLOAT32_BYTES = 4


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


def cost_model_for(config: ModelConfig, layout: Layout | ParallelSpec) -> CostModel:
    """Closed-form cost of the model's stages in a layout; ratios are what matters, the rate is nominal.

    The loss makes its logits again in the backward (`trainer.loss`), so the head counts as recomputed.
    """
    spec = layout if isinstance(layout, ParallelSpec) else ParallelSpec.of(layout)
    return CostModel.from_config(
        shape_from_config(json.loads(config.to_json()), name="model"),
        spec,
        layers_per_stage=llm_layers_per_stage(config.llm.depth, spec.domain_of_stage.count("llm")),
        recompute=("head",),
        dtype_bytes=_FLOAT32_BYTES,
    )


def lookahead_cost_for(config: ModelConfig) -> CostModel:
    """What look-ahead evens: of one layout and in closed form, so that a resume with other ranks or a measured model
    selects alike.
    """
    return cost_model_for(config, Layout())
