"""The built-in vision-language model: small, packed, in the shape of Qwen2.5-VL, and split by canonical names.

Read in this order: `attention` (no attention across segments), `rope`, `vit`, `llm`, `vlm` (config, split, weights).
"""

from trainer.model.generate import generate
from trainer.model.llm import LLMConfig, LLMStage
from trainer.model.presets import PRESETS, preset
from trainer.model.vit import VisionConfig, VisionTower
from trainer.model.vlm import ModelConfig, build_pieces, llm_layers_per_stage

__all__ = [
    "PRESETS",
    "LLMConfig",
    "LLMStage",
    "ModelConfig",
    "VisionConfig",
    "VisionTower",
    "build_pieces",
    "generate",
    "llm_layers_per_stage",
    "preset",
]
