"""Qwen2.5-VL: the counts of Qwen2-VL, a tower with window attention, and positions that follow time.

    (w, h | frames) --as Qwen2-VL--> grid (t, h/14, w/14) -> windows of 112 px: 8 x 8 patches, ragged at the edges

`dataloaders.estimators.qwen2_vl` states the rule and where it differs from the reference libraries.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from dataloaders.estimators.base import TokenEstimator
from dataloaders.estimators.files import Config, ProcessorFiles
from dataloaders.estimators.native import number
from dataloaders.estimators.qwen2_vl import Qwen2VLConfig, Qwen2VLEstimator
from dataloaders.estimators.qwen_vl_utils import QwenVLUtilsEstimator


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VLConfig(Qwen2VLConfig):
    """As `Qwen2VLConfig`, with the windows and the clock of Qwen2.5-VL."""

    window_px: int = 112
    tokens_per_second: float = 2

    @classmethod
    def tower(cls, vision: Config) -> dict[str, Any]:
        """Fields that the vision tower decides."""
        return {
            "window_px": number(vision, "window_size", 112),
            "tokens_per_second": number(vision, "tokens_per_second", 2),
        }


class Qwen25VLEstimator(Qwen2VLEstimator):
    """`PatchEstimator` of Qwen2.5-VL; immutable, picklable, cheap to copy."""

    counts_positions = False
    config_type: ClassVar[type[Qwen2VLConfig]] = Qwen25VLConfig
    rule_id: ClassVar[str] = "qwen2_5_vl/2"
    family: ClassVar[str] = "Qwen2.5-VL"


# Folders with the processors of media alone: images count alike in every model that has these classes.
_ONLY_MEDIA = ("Qwen2VLVideoProcessor", "Qwen2VLImageProcessor")


def _factory(files: ProcessorFiles) -> TokenEstimator:
    """Either model: a folder's processor class may be that of the other one, which counts alike."""
    kind = files.model.get("model_type") or files.kinds[0]
    older = kind in ("qwen2_vl", *_ONLY_MEDIA, "Qwen2VLProcessor")
    inner = (
        Qwen2VLEstimator(Qwen2VLConfig.from_files(files))
        if older
        else Qwen25VLEstimator(Qwen25VLConfig.from_files(files))
    )
    return QwenVLUtilsEstimator(inner) if files.preprocessing == "qwen_vl_utils" else inner


FACTORIES = {
    "qwen2_vl": _factory,
    "Qwen2VLProcessor": _factory,
    "qwen2_5_vl": _factory,
    "Qwen2_5_VLProcessor": _factory,
    **dict.fromkeys(_ONLY_MEDIA, _factory),
}
