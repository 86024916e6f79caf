"""Processor config of the demo: the Qwen2.5-VL rule with limits sized for two CPU cores.

An image costs 4 to 256 visual tokens (28-px cells). A clip is sampled at two frames per second, at most 24 frames, in
pairs: up to 12 temporal slices of 16 to 64 tokens, which for the clips of the demo corpus is up to 320 tokens.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_CELL_PX = 28 * 28
_CELLS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_PIXELS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

DEMO_PROCESSOR: Mapping[str, Any] = MappingProxyType(
    {
        "config": {"model_type": "qwen2_5_vl", "vision_config": {"window_size": 112, "tokens_per_second": 2}},
        "preprocessor_config": {**_CELLS, **_PIXELS, "min_pixels": 4 * _CELL_PX, "max_pixels": 256 * _CELL_PX},
        "video_preprocessor_config": {
            **_CELLS,
            **_PIXELS,
            "min_pixels": 16 * _CELL_PX,
            "max_pixels": 64 * _CELL_PX,
            "fps": 2.0,
            "min_frames": 4,
            "max_frames": 24,
        },
    }
)
"""For `dataloaders.estimators.estimator_from_config`: file name without `.json` -> content, as in a model folder."""
