"""Idefics3, and the images of SmolVLM: every image is scaled to one longest edge and cut into square tiles.

    (w, h) --longest edge = 1456, up or down; the other side made even; at most 4096-->
           --each side up to a multiple of the tile's side, 364--> rows x cols tiles, and the image as one more tile
    <fake><row_1_col_1><image>*169 <fake><row_1_col_2><image>*169 \n   ...   \n\n<fake><global-img><image>*169<fake>

Tokens: (tiles - 1) * (169 + 2) + row ends + 169 + 3; an image within one tile, or with splitting off: 169 + 3.
Worked example: 640x480 -> 1456x1092 -> 4 x 3 tiles and 1: 12 * 171 + 3 + 172 = 2227. The price of scaling up: a 1x1
image costs 2912.

Sources of the formulas: `Idefics3ImageProcessor`, `Idefics3Processor` and their SmolVLM twins of transformers 5.24.
Row ends are texts, counted by the tokenizer: the last one and the "\\n" before the whole image make "\\n\\n".
Tags are single tokens up to <row_6_col_6>; beyond that the tokenizer has none and they are counted as texts.

`get_number_of_image_patches` there rounds both sides up on their own, where the processor itself scales one side from
the other: they differ when the longest edge is no multiple of a tile's side. Here the processor is right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import Config, CountText, ProcessorFiles
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    option,
    patch_px,
    require_positive,
    require_resize,
    side,
    switch,
    vision_config,
)

_RULE = "idefics3/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_MAX_SIDE_PX = 4096
_TAGGED = 6  # rows and columns for which the tokenizers have a tag


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """The numbers that decide an image's counts. Defaults: class defaults of transformers, patches of the weights.

    Attributes:
        longest_px: longest edge that every image is scaled to.
        tile_px: side of a tile.
        split: whether tiles are cut; else the image is one tile.
        patch_px: side of a patch; a rest below one patch at a tile's edge is dropped.
        tokens: tokens of a tile (`image_seq_len`).
    """

    longest_px: int = 4 * 364
    tile_px: int = 364
    split: bool = True
    patch_px: int = 14
    tokens: int = 169

    def __post_init__(self) -> None:
        require_positive(self, "longest_px", "tile_px", "patch_px", "tokens")
        if self.tile_px < self.patch_px:
            raise DataError(f"TileConfig.tile_px={self.tile_px} is below patch_px={self.patch_px}")

    @property
    def tile_patches(self) -> int:
        """Patches of a tile."""
        return (self.tile_px // self.patch_px) ** 2

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "TileConfig":
        """From the files of a model folder. Raises DataError for options that this rule does not cover."""
        require_resize(files.image)
        found: dict[str, Any] = {"split": switch(files.image, "do_image_splitting", True)}
        size = files.image.get("size")
        if size is not None:
            if not isinstance(size, Mapping) or not size.get("longest_edge"):
                raise DataError(f"size={size!r}: this family needs longest_edge", place=files.place)
            found["longest_px"] = size["longest_edge"]
        found["tile_px"] = tile_side(files.image)
        found["patch_px"] = patch_px(files, cls().patch_px)
        tokens = option(files, "image_seq_len")
        if tokens is None and vision_config(files):  # the only number that fits the model's own pixel shuffle
            tokens = (found["tile_px"] // found["patch_px"]) ** 2 // option(files, "scale_factor", 2) ** 2
        if tokens is not None:
            found["tokens"] = tokens
        return cls(**found)


def tile_side(settings: Config) -> int:
    """Side of a tile in pixels, from the options of an image or a video processor."""
    return side(settings.get("max_image_size") or 364, "max_image_size")


def tile_rows_cols(width_px: int, height_px: int, config: TileConfig) -> tuple[int, int]:
    """(rows, cols) of tiles beside the whole image; (0, 0) where the image is one tile.

    Raises:
        UnfitError: `too_small` for a side below 1 px.
    """
    check_sides(width_px, height_px)
    if not config.split:
        return 0, 0
    width, height = _to_tiles(*scaled_to_edge(width_px, height_px, config.longest_px), config.tile_px)
    if width <= config.tile_px and height <= config.tile_px:
        return 0, 0
    return height // config.tile_px, width // config.tile_px


def scaled_to_edge(width: int, height: int, longest: int) -> tuple[int, int]:
    """(width, height) with that longest edge, the other side made even; then at most 4096 px."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        width, height = int(longest * aspect), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    if longest > _MAX_SIDE_PX:
        aspect = width / height
        if width >= height:
            width, height = _MAX_SIDE_PX, int(_MAX_SIDE_PX / aspect)
        else:
            width, height = int(_MAX_SIDE_PX * aspect), _MAX_SIDE_PX
    return max(width, 1), max(height, 1)


def _to_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    aspect = width / height
    if width >= height:
        width = -(-width // tile) * tile
        return width, -(-int(width / aspect) // tile) * tile
    height = -(-height // tile) * tile
    return -(-int(height * aspect) // tile) * tile, height


class TileRule:
    """Counts of an image of these families: what `Idefics3Estimator` and `SmolVLMEstimator` share."""

    def __init__(self, config: TileConfig, count_text: CountText) -> None:
        self.config = config
        self._row_end, self._last_row_end = count_text("\n"), count_text("\n\n")
        # Tags beyond the tokenizer's own, as texts: what they cost beyond one token, by row and column.
        most = -(-min(config.longest_px, _MAX_SIDE_PX) // config.tile_px) if config.split else 0
        self._untagged = {
            (row, col): count_text(f"<row_{row}_col_{col}>") - 1
            for row in range(1, most + 1)
            for col in range(1, most + 1)
            if max(row, col) > _TAGGED
        }

    def counts(self, width_px: int, height_px: int) -> ItemCounts:
        """Counts of an image; `grid` is (tiles, h, w) of a tile's patches."""
        c = self.config
        rows, cols = tile_rows_cols(width_px, height_px, c)
        tiles = rows * cols + 1
        per_side = c.tile_px // c.patch_px
        return ItemCounts(
            llm_tokens=tiles * c.tokens + self.delimiters(rows, cols),
            visual_tokens=tiles * c.tokens,
            patches=tiles * c.tile_patches,
            tiles=tiles,
            grid=(tiles, per_side, per_side),
            height_px=max(rows, 1) * c.tile_px,
            width_px=max(cols, 1) * c.tile_px,
            full=equal_segments(tiles, c.tile_patches),
        )

    def delimiters(self, rows: int, cols: int) -> int:
        """Tokens around the visual tokens: a delimiter and a tag per tile, row ends, a closing delimiter."""
        if rows == 0:
            return 3
        tags = 2 * rows * cols
        if max(rows, cols) > _TAGGED:
            tags += sum(extra for (row, col), extra in self._untagged.items() if row <= rows and col <= cols)
        return tags + (rows - 1) * self._row_end + self._last_row_end + 3

    def explain(self, width_px: int, height_px: int) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.counts(width_px, height_px)
        rows, cols = tile_rows_cols(width_px, height_px, c)
        width, height = scaled_to_edge(width_px, height_px, c.longest_px)
        cut = f"{rows} x {cols} tiles of {c.tile_px} px and the image as one more" if rows else "one tile"
        return (
            f"{width_px}x{height_px} px, longest edge to {c.longest_px}: {width}x{height}",
            f"splitting {'on' if c.split else 'off'}: {cut}",
            f"patches: {counts.tiles} x ({c.tile_px} // {c.patch_px})^2 = {counts.patches}",
            f"delimiters, tags and row ends: {self.delimiters(rows, cols)}",
            f"LLM tokens: {counts.tiles} x {c.tokens} + {self.delimiters(rows, cols)} = {counts.llm_tokens}",
        )


class Idefics3Estimator(ImagesOnly):
    """`TokenEstimator` of Idefics3; immutable, cheap to copy."""

    def __init__(self, config: TileConfig, count_text: CountText, text_rule: str) -> None:
        self.config = config
        self.rule = f"Idefics3, transformers 5.24 processor, row ends counted by {text_rule}"
        self.fingerprint = fingerprint(_RULE, config, text_rule)
        self._tiles = TileRule(config, count_text)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        return self._tiles.counts(width_px, height_px)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        return self._tiles.explain(width_px, height_px)


def _factory(files: ProcessorFiles) -> Idefics3Estimator:
    return Idefics3Estimator(TileConfig.from_files(files), files.count_text, files.text_rule)


FACTORIES = {"idefics3": _factory, "Idefics3Processor": _factory, "Idefics3ImageProcessor": _factory}
