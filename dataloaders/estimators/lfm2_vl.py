"""LFM2-VL: native resolution up to 256 tokens; a larger image is cut into a grid of tiles, and a thumbnail is added.

    (w, h) --sides to multiples of 32 px, area 64 to 256 tokens of 32 x 32 px--> resized
    area of the rounded sides above twice the largest:  grid of nearest aspect ratio, 2 to 10 tiles of 512 px
        <|image_start|> <|img_row_1_col_1|> 256 ... <|img_thumbnail|> resized <|image_end|>
    else: <|image_start|> resized <|image_end|>

Worked example: 1024x768 is 32 x 24 = 768 tokens, above 512: 3 x 2 tiles and a thumbnail of 18 x 13 tokens:
6 * 257 + 235 + 2 = 1779.

The price: every tile and thumbnail is padded to the longest sequence that the options permit (1024 patches), and the
tower runs all of it (`padded_patches`, and the segments). A long and thin image that is resized to more patches than
that is refused (`extreme_aspect`): the processor fails on its thumbnail, or gives it a mask that is too short.

Sources of the formulas: `Lfm2VlImageProcessor` and `Lfm2VlProcessor` of transformers 5.24.
"""

import math
from dataclasses import dataclass
from typing import Any

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.nearest_ratio import NearestRatio, grids
from dataloaders.estimators.nearest_size import unfit_size
from dataloaders.estimators.options import ImagesOnly, fingerprint, option, require_positive, switch

_RULE = "lfm2_vl/1"  # raise it whenever a count changes for some input: it is in the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VLConfig:
    """The numbers that decide counts. Defaults: class defaults of transformers.

    Attributes:
        patch_px, merge: side of a patch, patches per token and side.
        min_tokens, max_tokens: of a resized image.
        tolerance: an image is cut when it is more than this many times too large.
        split: whether large images are cut.
        tile_px: side of a tile.
        min_tiles, max_tiles: tiles of a grid, the thumbnail not counted.
        thumbnail: whether the resized image is added to the tiles.
        markers: whether start, end, tiles and thumbnail have tokens of their own.
    """

    patch_px: int = 16
    merge: int = 2
    min_tokens: int = 64
    max_tokens: int = 256
    tolerance: float = 2.0
    split: bool = True
    tile_px: int = 512
    min_tiles: int = 2
    max_tiles: int = 10
    thumbnail: bool = True
    markers: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge", "min_tokens", "tolerance", "tile_px", "min_tiles")
        for low, high in (("min_tokens", "max_tokens"), ("min_tiles", "max_tiles")):
            if getattr(self, low) > getattr(self, high):
                raise DataError(f"Lfm2VLConfig.{low}={getattr(self, low)} exceeds {high}={getattr(self, high)}")

    @property
    def cuts(self) -> bool:
        """Whether any image is cut."""
        return self.split and self.max_tiles > 1

    @property
    def slots(self) -> int:
        """Patches that a tile, or an image that is not cut, is padded to."""
        tile = (self.tile_px // self.patch_px) ** 2 if self.split else 0
        return max(self.max_tokens * self.merge**2, tile)

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Lfm2VLConfig":
        """From the files of a model folder. Raises DataError for options that this rule does not cover."""
        if not switch(files.image, "do_pad", True):
            raise DataError(
                "do_pad is false: the model needs the mask that padding makes", remedy="Set do_pad to true."
            )
        spellings = {
            "patch_px": "encoder_patch_size",
            "merge": "downsample_factor",
            "min_tokens": "min_image_tokens",
            "max_tokens": "max_image_tokens",
            "tolerance": "max_pixels_tolerance",
            "split": "do_image_splitting",
            "tile_px": "tile_size",
            "min_tiles": "min_tiles",
            "max_tiles": "max_tiles",
            "thumbnail": "use_thumbnail",
        }
        found: dict[str, Any] = {name: files.image.get(key) for name, key in spellings.items()}
        found["markers"] = option(files, "use_image_special_tokens")
        return cls(**{name: value for name, value in found.items() if value is not None})


class Lfm2VLEstimator(ImagesOnly):
    """`TokenEstimator` of LFM2-VL; immutable, picklable, cheap to copy."""

    rule = "LFM2-VL, transformers 5.24 processor"

    def __init__(self, config: Lfm2VLConfig | None = None) -> None:
        self.config = config or Lfm2VLConfig()
        self.fingerprint = fingerprint(_RULE, self.config)
        shapes = grids(self.config.min_tiles, self.config.max_tiles, remote_code=True) if self.config.cuts else ()
        self._grids = NearestRatio(shapes, self.config.tile_px**2) if shapes else None

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; `grid` and size are those of the resized image, or of the thumbnail."""
        c = self.config
        height, width = self._resized(width_px, height_px)
        cols, rows = self._grid(width_px, height_px)
        cut = cols * rows if cols * rows > 1 else 0
        whole = 1 if c.thumbnail or not cut else 0
        visual_tokens = cut * self._tile_tokens() + whole * self._tokens(height, width)
        pieces = cut + whole
        return ItemCounts(
            llm_tokens=visual_tokens + (2 + (pieces if cut else 0) if c.markers else 0),
            visual_tokens=visual_tokens,
            patches=cut * (c.tile_px // c.patch_px) ** 2 + whole * (height // c.patch_px) * (width // c.patch_px),
            padded_patches=pieces * c.slots,
            tiles=pieces,
            grid=(1, height // c.patch_px, width // c.patch_px),
            height_px=height,
            width_px=width,
            full=equal_segments(pieces, c.slots),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.image(width_px, height_px)
        cols, rows = self._grid(width_px, height_px)
        cut = f"{rows} x {cols} tiles of {self._tile_tokens()} tokens" if cols * rows > 1 else "not cut"
        return (
            f"{width_px}x{height_px} px to {c.min_tokens}-{c.max_tokens} tokens: {counts.width_px}x{counts.height_px}, "
            f"{self._tokens(counts.height_px, counts.width_px)} tokens",
            f"cut when above {c.tolerance:g} times {c.max_tokens} tokens: {cut}; pieces: {counts.tiles}",
            f"patches: {counts.patches}, padded to {counts.tiles} x {c.slots} = {counts.padded_patches}",
            f"LLM tokens: {counts.visual_tokens} + {counts.llm_tokens - counts.visual_tokens} = {counts.llm_tokens}",
        )

    def _grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(cols, rows); (1, 1) where nothing is cut."""
        c = self.config
        factor = c.patch_px * c.merge
        area = max(c.patch_px, round(height_px / factor) * factor) * max(c.patch_px, round(width_px / factor) * factor)
        if self._grids is None or area <= c.max_tokens * factor**2 * c.tolerance:
            return 1, 1
        return self._grids.nearest(width_px, height_px)

    def _resized(self, width_px: int, height_px: int) -> tuple[int, int]:
        if min(width_px, height_px) < 1 or not self._fits(width_px, height_px):
            cause = f"resized to more than {self.config.slots} patches"
            raise unfit_size(width_px, height_px, cause, self._fits)
        return self._smart_resize(width_px, height_px)

    def _fits(self, width_px: int, height_px: int) -> bool:
        height, width = self._smart_resize(width_px, height_px)
        return (height // self.config.patch_px) * (width // self.config.patch_px) <= self.config.slots

    def _smart_resize(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(height, width) in pixels, multiples of a token's side."""
        c = self.config
        factor = c.patch_px * c.merge
        least, most = c.min_tokens * factor**2, c.max_tokens * factor**2
        height = max(factor, round(height_px / factor) * factor)
        width = max(factor, round(width_px / factor) * factor)
        if height * width > most:
            beta = math.sqrt((height_px * width_px) / most)
            height = max(factor, math.floor(height_px / beta / factor) * factor)
            width = max(factor, math.floor(width_px / beta / factor) * factor)
        elif height * width < least:
            beta = math.sqrt(least / (height_px * width_px))
            height = math.ceil(height_px * beta / factor) * factor
            width = math.ceil(width_px * beta / factor) * factor
        return height, width

    def _tile_tokens(self) -> int:
        return self._tokens(self.config.tile_px, self.config.tile_px)

    def _tokens(self, height: int, width: int) -> int:
        c = self.config
        return -(-(height // c.patch_px) // c.merge) * -(-(width // c.patch_px) // c.merge)


def _factory(files: ProcessorFiles) -> Lfm2VLEstimator:
    return Lfm2VLEstimator(Lfm2VLConfig.from_files(files))


FACTORIES = dict.fromkeys(("lfm2_vl", "lfm2-vl", "Lfm2VlProcessor", "Lfm2VlImageProcessor"), _factory)
