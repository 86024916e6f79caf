"""Pixtral and Mistral 3: native resolution up to a longest edge, row by row; each row of tokens ends with a separator.

    (w, h) -> shrunk so that no side exceeds `longest_edge` (floor) -> rounded up to multiples of f = patch * merge
    LLM tokens = rows * (columns + 1) with rows = h / f, columns = w / f; visual tokens = rows * columns

Sources: `PixtralProcessor`, `PixtralImageProcessor` of transformers 5.24; the tower attends within one image, and
padding to batch mates is cut off before it. A side that shrinks below one pixel fails there ("size must contain ..."),
so such a shape is refused here with the nearest one that fits.

Upstream bug that is not imitated: the processor's helper for counts takes an image of 1 or 3 px height for channels and
counts another shape than the processor itself makes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import full_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.nearest_size import unfit_size
from dataloaders.estimators.options import (
    ImagesOnly,
    fingerprint,
    option,
    patch_px,
    require_positive,
    require_resize,
    size_px,
    switch,
)

_RULE = "pixtral/1"  # raise it whenever a count changes for some input: it is in the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralConfig:
    """The numbers that decide sizes. Defaults: those of transformers' classes.

    Attributes:
        patch_px: side of a patch.
        merge_size: patches per token along each side (Mistral 3: 2).
        max_height_px, max_width_px: bounds of a resized image, before rounding up.
    """

    patch_px: int = 16
    merge_size: int = 1
    max_height_px: int = 1024
    max_width_px: int = 1024

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge_size", "max_height_px", "max_width_px")

    @property
    def factor(self) -> int:
        """Sides of a resized image are multiples of this many pixels."""
        return self.patch_px * self.merge_size

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "PixtralConfig":
        """From the processor's options; patch and merge also from the model's."""
        require_resize(files.image)
        if switch(files.image, "do_center_crop", False):
            raise DataError("do_center_crop is true: not supported for Pixtral")
        size = files.image.get("size") or {"longest_edge": 1024}
        if isinstance(size, Mapping) and size.get("longest_edge") is not None:
            size = size["longest_edge"]  # the processor looks at it first
        height, width = size_px(size, "size")
        merge = option(files, "spatial_merge_size", 2 if files.model.get("model_type") == "mistral3" else 1)
        return cls(patch_px=patch_px(files, 16), merge_size=merge, max_height_px=height, max_width_px=width)


class PixtralEstimator(ImagesOnly):
    """`TokenEstimator` of Pixtral and Mistral 3; immutable, picklable."""

    def __init__(self, config: PixtralConfig | None = None) -> None:
        self.config = config or PixtralConfig()
        self.rule = f"Pixtral, transformers 5.24 processor, {self.config.merge_size} x {self.config.merge_size} merge"
        self.fingerprint = fingerprint(_RULE, self.config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; UnfitError where a side shrinks below a pixel."""
        height, width = self._shrunk(width_px, height_px)
        config = self.config
        rows, columns = -(-height // config.factor), -(-width // config.factor)
        merge = config.merge_size
        grid = (1, rows * merge, columns * merge)
        return ItemCounts(
            llm_tokens=rows * (columns + 1),
            visual_tokens=rows * columns,
            patches=grid[1] * grid[2],
            grid=grid,
            height_px=rows * config.factor,
            width_px=columns * config.factor,
            full=full_segments(grid),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        height, width = self._shrunk(width_px, height_px)
        counts, merge = self.image(width_px, height_px), self.config.merge_size
        rows, columns = counts.grid[1] // merge, counts.grid[2] // merge
        return (
            f"{width_px}x{height_px} px within {self.config.max_width_px}x{self.config.max_height_px} px "
            f"-> {width}x{height} px",
            f"up to multiples of {self.config.factor} px -> {counts.width_px}x{counts.height_px} px",
            f"grid {counts.grid[1]} x {counts.grid[2]} = {counts.patches} patches",
            f"{rows} rows x ({columns} visual + 1 row end) = {counts.llm_tokens} LLM tokens",
        )

    def _shrunk(self, width_px: int, height_px: int) -> tuple[int, int]:
        if min(width_px, height_px) < 1 or not self._fits(width_px, height_px):
            raise unfit_size(width_px, height_px, "a side shrinks below 1 px", self._fits)
        return self._floor(width_px, height_px)

    def _fits(self, width_px: int, height_px: int) -> bool:
        return min(self._floor(width_px, height_px)) >= 1

    def _floor(self, width_px: int, height_px: int) -> tuple[int, int]:
        ratio = max(height_px / self.config.max_height_px, width_px / self.config.max_width_px)
        if ratio > 1:
            return math.floor(height_px / ratio), math.floor(width_px / ratio)
        return height_px, width_px


def _factory(files: ProcessorFiles) -> PixtralEstimator:
    return PixtralEstimator(PixtralConfig.from_files(files))


FACTORIES = dict.fromkeys(("pixtral", "mistral3", "PixtralProcessor", "PixtralImageProcessor"), _factory)
