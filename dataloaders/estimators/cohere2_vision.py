"""Command A Vision (Cohere 2): the grid of tiles that needs the least enlarging, and a thumbnail; a line break a tile.

    scale of a grid = min(columns * tile / w, rows * tile / h)
    grid   = the least scale of at least 1 among those of at most max_tiles; the largest scale where all are below 1
    tiles  = columns * rows + 1, or 1 where the grid is (1, 1)
    tokens = tiles * (tokens_per_tile + 1) + 2 (start and end of the image)

Source: `Cohere2VisionProcessor`, `Cohere2VisionImageProcessor` of transformers 5.24 (which ignores `min_patches`). The
image processor's `patch_size` of 16 is there the side of a tile in tokens.
"""

from dataclasses import dataclass

from dataloaders.counts import ItemCounts
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.nearest_ratio import grids
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    require_positive,
    require_resize,
    side,
    switch,
    vision_config,
)

_RULE = "cohere2_vision/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_DELIMITERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohere2VisionConfig:
    """The numbers that decide tiles and tokens. Defaults: those of transformers' classes.

    Attributes:
        tile_px: side of a tile.
        patch_px: side of a patch.
        tokens_per_side: visual tokens along the side of a tile.
        max_tiles: bound of the grid, thumbnail not counted; 1: nothing is cut.
    """

    tile_px: int = 512
    patch_px: int = 16
    tokens_per_side: int = 16
    max_tiles: int = 12

    def __post_init__(self) -> None:
        require_positive(self, "tile_px", "patch_px", "tokens_per_side", "max_tiles")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Cohere2VisionConfig":
        """From the options of the image processor and the vision tower."""
        require_resize(files.image)
        default, image = cls(), files.image
        cuts = switch(image, "crop_to_patches", True)
        return cls(
            tile_px=side(image.get("size") or default.tile_px, "size"),
            patch_px=side(vision_config(files).get("patch_size") or default.patch_px, "vision_config.patch_size"),
            tokens_per_side=side(image.get("patch_size") or default.tokens_per_side, "patch_size"),
            max_tiles=(image.get("max_patches") or default.max_tiles) if cuts else 1,
        )


class Cohere2VisionEstimator(ImagesOnly):
    """`TokenEstimator` of Command A Vision; immutable, picklable."""

    def __init__(self, config: Cohere2VisionConfig | None = None) -> None:
        self.config = config or Cohere2VisionConfig()
        self.rule = f"Command A Vision, transformers 5.24 processor, at most {self.config.max_tiles} tiles"
        self.fingerprint = fingerprint(_RULE, self.config)
        self._grids = grids(1, self.config.max_tiles)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        config = self.config
        columns, rows = self.grid(width_px, height_px)
        tiles = columns * rows + (columns * rows > 1)
        patches, tokens = config.tile_px // config.patch_px, config.tokens_per_side**2
        return ItemCounts(
            llm_tokens=tiles * (tokens + 1) + _DELIMITERS,
            visual_tokens=tiles * tokens,
            patches=tiles * patches * patches,
            tiles=tiles,
            grid=(tiles, patches, patches),
            height_px=config.tile_px,
            width_px=config.tile_px,
            full=equal_segments(tiles, patches * patches),
        )

    def grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(columns, rows) of the tiles."""
        check_sides(width_px, height_px)
        tile = self.config.tile_px
        enlarging, shrinking = float("inf"), 0.0
        least, most = None, (1, 1)
        for grid in self._grids:
            scale = min(grid[0] * tile / width_px, grid[1] * tile / height_px)
            if scale >= 1:
                if scale < enlarging:
                    enlarging, least = scale, grid
            elif scale > shrinking:
                shrinking, most = scale, grid
        return most if least is None else least

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        columns, rows = self.grid(width_px, height_px)
        counts = self.image(width_px, height_px)
        return (
            f"{width_px}x{height_px} px -> grid of {columns} x {rows} tiles of {self.config.tile_px} px",
            f"{columns * rows} tiles + {counts.tiles - columns * rows} thumbnail = {counts.tiles}",
            f"grid {counts.grid[1]} x {counts.grid[2]} each = {counts.patches} patches",
            f"{counts.tiles} x ({self.config.tokens_per_side**2} visual + 1 line break) + {_DELIMITERS} delimiters "
            f"= {counts.llm_tokens} LLM tokens",
        )


def _factory(files: ProcessorFiles) -> Cohere2VisionEstimator:
    return Cohere2VisionEstimator(Cohere2VisionConfig.from_files(files))


FACTORIES = dict.fromkeys(("cohere2_vision", "Cohere2VisionProcessor", "Cohere2VisionImageProcessor"), _factory)
