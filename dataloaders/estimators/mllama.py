"""Mllama (Llama 3.2 Vision): a canvas of at most four tiles; the LLM attends to them across, by extra layers.

    (w, h) --canvas of rows x cols tiles of 560 px--> 1601 patches a tile, its class token included
    LLM sequence: <|image|>, one token;  cross attention: tiles * 1601 keys and values (`visual_tokens`)

The price: the processor pads every image to four tiles, and the vision tower runs all four of them in one attention
segment. `padded_patches` is therefore the same for every image, 4 * 1601, while `patches` and `tiles` are those in
use. (The tower also rounds a tile up to a multiple of 8 positions, 1608; these are left out.)

Sources of the formulas: `MllamaImageProcessor`, `MllamaProcessor` and `MllamaVisionModel` of transformers 5.24.
"""

from dataclasses import dataclass
from typing import Any

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.llama4 import tile_px
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    first,
    patch_px,
    require_positive,
    require_resize,
    switch,
    vision_config,
)
from dataloaders.estimators.tile_canvas import TileCanvas

_RULE = "mllama/1"  # raise it whenever a count changes for some input: it is in the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class MllamaConfig:
    """The numbers that decide counts. Defaults: class defaults of transformers (published weights: tiles of 560 px).

    Attributes:
        tile_px: side of a tile.
        max_tiles: tiles of the largest canvas, and the number that every image is padded to.
        patch_px: side of a patch.
    """

    tile_px: int = 224
    max_tiles: int = 4
    patch_px: int = 14

    def __post_init__(self) -> None:
        require_positive(self, "tile_px", "max_tiles", "patch_px")

    @property
    def tile_patches(self) -> int:
        """Patches of a tile and its class token."""
        return (self.tile_px // self.patch_px) ** 2 + 1

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "MllamaConfig":
        """From the files of a model folder. Raises DataError for options that this rule does not cover."""
        require_resize(files.image)
        if not switch(files.image, "do_pad", True):
            raise DataError("do_pad is false: the processor of Mllama refuses it", remedy="Set do_pad to true.")
        tiles = first("max_image_tiles", files.image, default=vision_config(files).get("max_num_tiles"))
        found: dict[str, Any] = {
            "patch_px": patch_px(files, cls().patch_px),
            "max_tiles": tiles,
            "tile_px": tile_px(files),
        }
        return cls(**{name: value for name, value in found.items() if value is not None})


class MllamaEstimator(ImagesOnly):
    """`TokenEstimator` of Mllama; immutable, picklable, cheap to copy."""

    rule = "Mllama (Llama 3.2 Vision), transformers 5.24 processor"

    def __init__(self, config: MllamaConfig | None = None) -> None:
        self.config = config or MllamaConfig()
        self.fingerprint = fingerprint(_RULE, self.config)
        self._canvas = TileCanvas(self.config.tile_px, self.config.max_tiles)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; `grid` is (tiles in use, h, w) of a tile's patches, its class token left out."""
        check_sides(width_px, height_px)
        c = self.config
        rows, cols = self._canvas.fit(width_px, height_px)
        per_side = c.tile_px // c.patch_px
        patches, padded = rows * cols * c.tile_patches, c.max_tiles * c.tile_patches
        return ItemCounts(
            llm_tokens=1,
            visual_tokens=patches,
            patches=patches,
            padded_patches=padded,
            tiles=rows * cols,
            grid=(rows * cols, per_side, per_side),
            height_px=rows * c.tile_px,
            width_px=cols * c.tile_px,
            full=equal_segments(1, padded),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.image(width_px, height_px)
        rows, cols = self._canvas.fit(width_px, height_px)
        return (
            f"{width_px}x{height_px} px on a canvas of {rows} x {cols} tiles of {c.tile_px} px (at most {c.max_tiles})",
            f"patches: {counts.tiles} tiles x (({c.tile_px} // {c.patch_px})^2 + 1) = {counts.patches}; "
            f"padded to {c.max_tiles} tiles: {counts.padded_patches}",
            f"keys of the cross attention: {counts.tiles} x {c.tile_patches} = {counts.visual_tokens}",
            f"LLM tokens: the placeholder = {counts.llm_tokens}",
        )


def _factory(files: ProcessorFiles) -> MllamaEstimator:
    return MllamaEstimator(MllamaConfig.from_files(files))


FACTORIES = {"mllama": _factory, "MllamaProcessor": _factory, "MllamaImageProcessor": _factory}
