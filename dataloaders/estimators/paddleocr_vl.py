"""PaddleOCR-VL: images alone, at native resolution, one token per 2 x 2 patches of 14 px.

    (w, h) --a side below 28 px: scaled up--> smart_resize to multiples of 28 within [min, max] -> h * w / 28^2 tokens

Sources: `PaddleOCRVLImageProcessor` and `PaddleOCRVLProcessor` of transformers 5.24.
"""

from dataclasses import dataclass

from dataloaders.estimators.base import TokenEstimator
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.native import Cells, NativeEstimator, area_bounds, number
from dataloaders.estimators.options import ImagesOnly, fingerprint, require_positive, require_resize
from dataloaders.estimators.resize_rule import Budget, check_bounds

_RULE = "paddleocr_vl/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_BOUNDS = (384 * 384, 1536 * 1536)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddleOCRVLConfig:
    """The numbers that decide sizes. Defaults: the class defaults of transformers.

    Attributes:
        min_pixels, max_pixels: area of a resized image.
        patch_px, merge_size: side of a patch, patches per token and side.
    """

    min_pixels: int = _BOUNDS[0]
    max_pixels: int = _BOUNDS[1]
    patch_px: int = 14
    merge_size: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge_size")
        check_bounds("PaddleOCRVLConfig", pixels=(self.min_pixels, self.max_pixels))


class PaddleOCRVLEstimator(ImagesOnly, NativeEstimator):
    """`TokenEstimator` of PaddleOCR-VL."""

    def __init__(self, config: PaddleOCRVLConfig | None = None) -> None:
        self.config = c = config or PaddleOCRVLConfig()
        self.fingerprint = fingerprint(_RULE, c)
        self.rule = "PaddleOCR-VL, processor of transformers 5.24"
        self.image_cells = Cells(patch_px=c.patch_px, merge=c.merge_size, temporal_patch=1)
        self.image_budgets = (
            Budget(
                factor=c.patch_px * c.merge_size,
                min_pixels=c.min_pixels,
                max_pixels=c.max_pixels,
                rule="paddleocr",
            ),
        )


def _factory(files: ProcessorFiles) -> TokenEstimator:
    require_resize(files.image)
    low, high = area_bounds(files.image, _BOUNDS, pixel_keys=True)
    return PaddleOCRVLEstimator(
        PaddleOCRVLConfig(
            min_pixels=low,
            max_pixels=high,
            patch_px=number(files.image, "patch_size", 14),
            merge_size=number(files.image, "merge_size", 2),
        )
    )


FACTORIES = dict.fromkeys(("paddleocr_vl", "PaddleOCRVLProcessor", "PaddleOCRVLImageProcessor"), _factory)
