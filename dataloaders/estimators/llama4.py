"""Llama 4: a canvas of square tiles, and the whole image as one more tile where there are several.

    (w, h) --canvas of at most 16 tiles, rows x cols--> 577 patches a tile, its class token included
           --pixel shuffle 2 x 2--> 144 tokens a tile
    <|image_start|> row: 144 <|tile_x_separator|> 144 ... <|tile_y_separator|> ... <|image|> 144 <|image_end|>

Tokens: (rows * cols + 1) * 144 + rows * (cols - 1) + rows + 3; one tile: 144 + 3.
Worked example: 640x480 -> 2 x 2 tiles of 336 px: 5 * 144 + 2 + 2 + 3 = 727.

Sources of the formulas: `Llama4ImageProcessor`, `Llama4Processor` and `Llama4VisionModel` of transformers 5.24.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    option,
    patch_px,
    require_positive,
    require_resize,
    side,
    vision_config,
)
from dataloaders.estimators.tile_canvas import TileCanvas

_RULE = "llama4/1"  # raise it whenever a count changes for some input: it is in the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Config:
    """The numbers that decide counts. Defaults: class defaults of transformers.

    Attributes:
        tile_px: side of a tile.
        max_tiles: tiles of the largest canvas, the whole image not counted (`max_patches` of the processor).
        enlarge: `resize_to_max_canvas`: the greatest canvas that fits, in place of the least.
        patch_px: side of a patch.
        shuffle_ratio: `pixel_shuffle_ratio`: 0.5 makes one token of 2 x 2 patches.
    """

    tile_px: int = 336
    max_tiles: int = 16
    enlarge: bool = False
    patch_px: int = 14
    shuffle_ratio: float = 0.5

    def __post_init__(self) -> None:
        require_positive(self, "tile_px", "max_tiles", "patch_px", "shuffle_ratio")

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return (self.tile_px // self.patch_px) ** 2 // round(1.0 / self.shuffle_ratio**2)

    @property
    def tile_patches(self) -> int:
        """Patches of a tile and its class token."""
        return (self.tile_px // self.patch_px) ** 2 + 1

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Llama4Config":
        """From the files of a model folder. Raises DataError for options that this rule does not cover."""
        require_resize(files.image)
        found: dict[str, Any] = {
            "patch_px": patch_px(files, cls().patch_px),
            "max_tiles": files.image.get("max_patches"),
            "enlarge": files.image.get("resize_to_max_canvas"),
            "shuffle_ratio": option(files, "pixel_shuffle_ratio", vision_config(files).get("pixel_shuffle_ratio")),
        }
        found["tile_px"] = tile_px(files)
        return cls(**{name: value for name, value in found.items() if value is not None})


def tile_px(files: ProcessorFiles) -> int | None:
    """Side in pixels of `size`, which these processors want as an equal height and width; else that of the tower."""
    size, place = files.image.get("size"), files.place
    if size is None:
        tower = vision_config(files).get("image_size")
        return None if tower is None else side(tower, "vision_config.image_size")
    if isinstance(size, Mapping) and not (size.get("height") and size.get("height") == size.get("width")):
        raise DataError(f"size={size!r}: height and width must be given and equal", place=place)
    return side(size, "size")


class Llama4Estimator(ImagesOnly):
    """`TokenEstimator` of Llama 4; immutable, picklable, cheap to copy."""

    rule = "Llama 4, transformers 5.24 processor"

    def __init__(self, config: Llama4Config | None = None) -> None:
        self.config = config or Llama4Config()
        self.fingerprint = fingerprint(_RULE, self.config)
        c = self.config
        self._canvas = TileCanvas(c.tile_px, c.max_tiles, single_precision=True, enlarge=c.enlarge)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; `grid` is (tiles, h, w) of a tile's patches, its class token left out."""
        check_sides(width_px, height_px)
        c = self.config
        rows, cols = self._canvas.fit(width_px, height_px)
        tiles = rows * cols + 1 if rows * cols > 1 else 1
        per_side = c.tile_px // c.patch_px
        return ItemCounts(
            llm_tokens=tiles * c.tile_tokens + self._separators(rows, cols) + 3,
            visual_tokens=tiles * c.tile_tokens,
            patches=tiles * c.tile_patches,
            tiles=tiles,
            grid=(tiles, per_side, per_side),
            height_px=rows * c.tile_px,
            width_px=cols * c.tile_px,
            full=equal_segments(tiles, c.tile_patches),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.image(width_px, height_px)
        rows, cols = self._canvas.fit(width_px, height_px)
        return (
            f"{width_px}x{height_px} px on a canvas of {rows} x {cols} tiles of {c.tile_px} px (at most {c.max_tiles})",
            f"tiles, the whole image included where there are several: {counts.tiles}",
            f"patches: {counts.tiles} x (({c.tile_px} // {c.patch_px})^2 + 1) = {counts.patches}",
            f"separators: {self._separators(rows, cols)}; start, end and <|image|>: 3",
            f"LLM tokens: {counts.tiles} x {c.tile_tokens} + {self._separators(rows, cols)} + 3 = {counts.llm_tokens}",
        )

    def _separators(self, rows: int, cols: int) -> int:
        return rows * cols if rows * cols > 1 else 0  # cols - 1 between the tiles of a row, one at its end


def _factory(files: ProcessorFiles) -> Llama4Estimator:
    return Llama4Estimator(Llama4Config.from_files(files))


FACTORIES = {"llama4": _factory, "Llama4Processor": _factory, "Llama4ImageProcessor": _factory}
