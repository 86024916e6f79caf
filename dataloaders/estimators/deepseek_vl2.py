"""DeepSeek-VL2: 384-px tiles of the best of a list of canvases, and a global view; a line break ends every row.

    (w, h) --at most `max_tiled_images` images in the sample: the canvas that keeps most pixels, then wastes least;
             more images: one tile--> canvas (384 i, 384 j)
           --each tile: 27 x 27 patches, 2 x 2 merged, edges padded--> n = ceil((384 // 14) / 2) = 14 tokens a side
    tokens: n * (n + 1) (global view) + 1 (separator) + (j * n) * (i * n + 1) (tiles)

Source of the formulas: `DeepseekVLV2Processor` of the DeepSeek-VL2 repository. A sample of more than two images is
never tiled, so the number of images is part of the question. DeepSeek-OCR folders carry the same `model_type` and
another processor: they are refused.

An image so long and thin that its fitted side rounds to 0 px becomes padding alone (with a Pillow that does not fail
on it); it costs what any other does.
"""

from dataclasses import dataclass
from typing import Any

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.anyres import best_canvas
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.options import ImagesOnly, check_sides, fingerprint, option, require_positive, size_px

_RULE = "deepseek_vl2/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_MAX_TILED_IMAGES = 2  # a constant of the processor's code, no option
# Tiles (across, down) of the published candidate resolutions, in their order, which decides ties.
_PUBLISHED_TILES = (
    *((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (1, 6), (6, 1)),
    *((2, 3), (3, 2), (1, 7), (7, 1), (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1), (3, 3)),
)
Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekVL2Config:
    """The numbers that decide counts. Defaults: the published ones, which all three sizes of the model share.

    Attributes:
        candidates: canvases (width, height) in pixels; a tile is a square of the first one's width.
        patch_px: side of a patch.
        downsample: patches per token along each side.
    """

    candidates: tuple[Size, ...] = tuple((384 * across, 384 * down) for across, down in _PUBLISHED_TILES)
    patch_px: int = 14
    downsample: int = 2

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "downsample")
        tile = self.tile_px
        for candidate in self.candidates:
            if min(candidate) < 1 or candidate[0] % tile or candidate[1] % tile:
                raise DataError(
                    f"DeepseekVL2Config.candidates: {candidate} is no multiple of the tile, {tile} px",
                    remedy="List canvases in multiples of the first one's width.",
                )
        if tile < self.patch_px:
            raise DataError(f"DeepseekVL2Config: a tile of {tile} px is below patch_px={self.patch_px}")

    @property
    def tile_px(self) -> int:
        """Side of a tile."""
        if not self.candidates:
            raise DataError("DeepseekVL2Config.candidates is empty", remedy="Name at least one canvas.")
        return self.candidates[0][0]

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "DeepseekVL2Config":
        """From the files of a model folder. Raises DataError for a folder of DeepSeek-OCR."""
        architectures = files.model.get("architectures") or ()
        if any("OCR" in str(name) for name in architectures):
            raise DataError(
                f"architectures={list(architectures)}: DeepSeek-OCR, whose processor counts otherwise",
                place=files.place,
                remedy="Add an estimator with dataloaders.estimators.register_estimator(kind, factory).",
            )
        default = cls()
        vision = files.model.get("vision_config") or {}
        projector = files.model.get("projector_config") or {}
        return cls(
            candidates=_sizes(option(files, "candidate_resolutions", default.candidates)),
            patch_px=size_px(option(files, "patch_size", vision.get("patch_size") or default.patch_px), "patch_size")[
                0
            ],
            downsample=option(files, "downsample_ratio", projector.get("downsample_ratio") or default.downsample),
        )


class DeepseekVL2Estimator(ImagesOnly):
    """`TokenEstimator` of DeepSeek-VL2; immutable, picklable, cheap to copy."""

    rule = "DeepSeek-VL2, processor code of its repository"

    def __init__(self, config: DeepseekVL2Config | None = None) -> None:
        self.config = config or DeepseekVL2Config()
        self.fingerprint = fingerprint(_RULE, self.config)
        self._patches = self.config.tile_px // self.config.patch_px  # along a tile
        self._tokens = -(-self._patches // self.config.downsample)  # along a tile
        self._canvases = tuple((height, width) for width, height in self.config.candidates)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; the size is that of the canvas, padding included.

        Raises:
            UnfitError: a side is below 1 px.
        """
        width, height = self._canvas(width_px, height_px, num_images)
        across, down = width // self.config.tile_px, height // self.config.tile_px
        tiles, patches_per_tile, n = across * down + 1, self._patches**2, self._tokens
        tokens = n * (n + 1) + 1 + down * n * (across * n + 1)
        return ItemCounts(
            llm_tokens=tokens,
            visual_tokens=tokens,
            patches=tiles * patches_per_tile,
            tiles=tiles,
            grid=(tiles, self._patches, self._patches),
            height_px=height,
            width_px=width,
            full=equal_segments(tiles, patches_per_tile),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts, n, tile = self.image(width_px, height_px, num_images=num_images), self._tokens, self.config.tile_px
        across, down = counts.width_px // tile, counts.height_px // tile
        if num_images > _MAX_TILED_IMAGES:
            choice = f"more than {_MAX_TILED_IMAGES} images in the sample: not tiled"
        else:
            choice = f"best of {len(self.config.candidates)} canvases"
        return (
            f"canvas for {width_px}x{height_px} px: {counts.width_px}x{counts.height_px} px ({choice})",
            f"tiles of {tile} px: {across} across, {down} down, and a global view: {counts.tiles}",
            f"patches of {self.config.patch_px} px: {counts.tiles} x {self._patches} x {self._patches} "
            f"= {counts.patches}; tokens a side of a tile: {n}",
            f"LLM tokens: {n} x ({n} + 1) + 1 + {down * n} x ({across * n} + 1) = {counts.llm_tokens}",
        )

    def _canvas(self, width: int, height: int, num_images: int) -> Size:
        check_sides(width, height)
        tile = self.config.tile_px
        if num_images > _MAX_TILED_IMAGES:
            return tile, tile
        height, width = best_canvas(width, height, self._canvases)
        return width, height


def _sizes(value: Any) -> tuple[Size, ...]:
    if not isinstance(value, list | tuple) or not all(
        isinstance(size, list | tuple) and len(size) == 2 for size in value
    ):
        raise DataError(f"candidate_resolutions={value!r}: not a list of (width, height)")
    return tuple((int(width), int(height)) for width, height in value)


def _factory(files: ProcessorFiles) -> DeepseekVL2Estimator:
    return DeepseekVL2Estimator(DeepseekVL2Config.from_files(files))


FACTORIES = dict.fromkeys(("deepseek_vl_v2", "deepseek_vl2", "DeepseekVLV2Processor"), _factory)
