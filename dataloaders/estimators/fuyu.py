"""Fuyu: patches of 30 px go straight into the LLM, row by row; each row ends with a newline token.

    (w, h) -> shrunk to fit 1920 x 1080 px (floor), never enlarged -> rounded up to multiples of 30
    LLM tokens = rows * (columns + 1); visual tokens = rows * columns

Source: `FuyuProcessor`, `FuyuImageProcessor` of transformers 5.24. There is no vision tower: patches are projected, and
attend to each other in the LLM only, so there are no segments here. A side that shrinks below one pixel fails there.
The start of the text that the processor writes behind the image is counted with the text.
"""

from dataclasses import dataclass

from dataloaders.counts import ItemCounts, SegmentStats
from dataloaders.errors import DataError
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.nearest_size import unfit_size
from dataloaders.estimators.options import (
    ImagesOnly,
    fingerprint,
    require_positive,
    require_resize,
    side,
    size_px,
)

_RULE = "fuyu/1"  # raise it whenever a count changes for some input: it is in the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class FuyuConfig:
    """The numbers that decide sizes. Defaults: those of transformers' classes.

    Attributes:
        patch_px: side of a patch.
        max_height_px, max_width_px: bounds of an image; multiples of a patch.
    """

    patch_px: int = 30
    max_height_px: int = 1080
    max_width_px: int = 1920

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "max_height_px", "max_width_px")
        if self.max_height_px % self.patch_px or self.max_width_px % self.patch_px:
            raise DataError(
                f"FuyuConfig.max_height_px={self.max_height_px}, max_width_px={self.max_width_px}: "
                f"not multiples of patch_px={self.patch_px}"
            )

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "FuyuConfig":
        """From the options of the image processor."""
        require_resize(files.image)
        height, width = size_px(files.image.get("size") or [1080, 1920], "size")
        patch = files.image.get("patch_size") or files.model.get("patch_size") or 30
        return cls(patch_px=side(patch, "patch_size"), max_height_px=height, max_width_px=width)


class FuyuEstimator(ImagesOnly):
    """`TokenEstimator` of Fuyu; immutable, picklable."""

    def __init__(self, config: FuyuConfig | None = None) -> None:
        self.config = config or FuyuConfig()
        self.rule = f"Fuyu, transformers 5.24 processor, patches of {self.config.patch_px} px"
        self.fingerprint = fingerprint(_RULE, self.config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; UnfitError where a side shrinks below a pixel."""
        height, width = self._resized(width_px, height_px)
        patch = self.config.patch_px
        rows, columns = -(-height // patch), -(-width // patch)
        return ItemCounts(
            llm_tokens=rows * (columns + 1),
            visual_tokens=rows * columns,
            patches=rows * columns,
            grid=(1, rows, columns),
            height_px=rows * patch,
            width_px=columns * patch,
            full=SegmentStats(),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        height, width = self._resized(width_px, height_px)
        counts = self.image(width_px, height_px)
        return (
            f"{width_px}x{height_px} px within {self.config.max_width_px}x{self.config.max_height_px} px "
            f"-> {width}x{height} px",
            f"up to multiples of {self.config.patch_px} px -> {counts.width_px}x{counts.height_px} px",
            f"{counts.grid[1]} rows x ({counts.grid[2]} patches + 1 newline) = {counts.llm_tokens} LLM tokens",
        )

    def _resized(self, width_px: int, height_px: int) -> tuple[int, int]:
        if min(width_px, height_px) < 1 or not self._fits(width_px, height_px):
            raise unfit_size(width_px, height_px, "a side shrinks below 1 px", self._fits)
        return self._shrunk(width_px, height_px)

    def _fits(self, width_px: int, height_px: int) -> bool:
        return min(self._shrunk(width_px, height_px)) >= 1

    def _shrunk(self, width_px: int, height_px: int) -> tuple[int, int]:
        config = self.config
        if width_px <= config.max_width_px and height_px <= config.max_height_px:
            return height_px, width_px
        scale = min(config.max_height_px / height_px, config.max_width_px / width_px)
        return int(height_px * scale), int(width_px * scale)


def _factory(files: ProcessorFiles) -> FuyuEstimator:
    return FuyuEstimator(FuyuConfig.from_files(files))


FACTORIES = dict.fromkeys(("fuyu", "FuyuProcessor", "FuyuImageProcessor"), _factory)
