"""LLaVA-OneVision: any-resolution tiles for an image that is alone in its sample, one tile for each of several.

    alone    tokens = T + rows * columns + rows     (T = 729: the whole image; the rest: its canvas without padding)
             above 1.1 * 1.1 * 9 * T features (`anyres_max_9`) the canvas is scaled down to about 9 * T
    several  tokens = T + 1 row end each
    video    tokens = frames * ceil(sqrt(T) / 2) ** 2 + 1 row end

Sources: `LlavaOnevisionProcessor` and its image and video processors in transformers 5.24. The processor pads a batch
to its largest number of tiles; the model drops those before the tower, so nothing is padded here.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.anyres import AnyresTiles, best_canvas, unpadded
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.fixed import dropped_tokens, has_class_token
from dataloaders.estimators.frames import FrameSampling
from dataloaders.estimators.options import check_sides, fingerprint, option, patch_px, require_positive, size_px

_RULE = "llava_onevision/1"  # raise it whenever a count or a frame index changes for some input
_CANVASES = tuple((rows * 384, columns * 384) for rows in range(1, 7) for columns in range(1, 7))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevisionConfig:
    """The numbers that decide tiles and tokens.

    Attributes:
        tiles: canvases and tiles.
        patch_px: side of a patch.
        class_tokens: tokens of the tower beside the patches.
        tokens_per_tile: features of a tile, T above.
        max_tiles: 9 of `anyres_max_9`.
        dropped_tokens: 1 where the first token is dropped.
        sampling: frames of a video.
        frame_height_px, frame_width_px: a frame as encoded.
    """

    tiles: AnyresTiles
    patch_px: int = 14
    class_tokens: int = 0
    tokens_per_tile: int = 729
    max_tiles: int = 9
    dropped_tokens: int = 0
    sampling: FrameSampling = field(default_factory=FrameSampling)
    frame_height_px: int = 384
    frame_width_px: int = 384

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "tokens_per_tile", "max_tiles", "frame_height_px", "frame_width_px")

    @property
    def side(self) -> int:
        """Features of a tile along a side."""
        return int(math.sqrt(self.tokens_per_tile))

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "LlavaOnevisionConfig":
        """From the options of the processor, its image and its video processor."""
        tiles = AnyresTiles.from_files(files, default=384, crops=False, canvases=_CANVASES)
        patch = patch_px(files, 14)
        made = (tiles.height_px // patch) * (tiles.width_px // patch)
        ratio = option(files, "vision_aspect_ratio", "anyres_max_9")
        number = str(ratio).removeprefix("anyres_max_")
        if not number.isdecimal():
            raise DataError(f"vision_aspect_ratio={ratio!r}: needs the form 'anyres_max_9'")
        frame = size_px((files.video or {}).get("size") or [tiles.height_px, tiles.width_px], "size of videos")
        return cls(
            tiles=tiles,
            patch_px=patch,
            class_tokens=int(has_class_token(files, default=False)),
            tokens_per_tile=option(files, "num_image_tokens", made),
            max_tiles=int(number),
            dropped_tokens=dropped_tokens(files, "full"),
            sampling=FrameSampling.from_video(files.video),
            frame_height_px=frame[0],
            frame_width_px=frame[1],
        )


class LlavaOnevisionEstimator:
    """`TokenEstimator` of LLaVA-OneVision; immutable, picklable."""

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        self.config = config
        self.rule = f"LLaVA-OneVision, transformers 5.24 processor, anyres_max_{config.max_tiles}"
        self.fingerprint = fingerprint(_RULE, config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; one of several in a sample is one tile."""
        config = self.config
        if num_images > 1:
            check_sides(width_px, height_px)
            return self._counts(1, config.tokens_per_tile + 1 - config.dropped_tokens, 1, 1)
        canvas, rows, columns = self._features(width_px, height_px)
        tokens = config.tokens_per_tile + rows * columns + rows - config.dropped_tokens
        tiles = config.tiles.num_tiles(canvas)
        return self._counts(tiles, tokens, tiles, 1)

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video: each frame one tile, pooled 2 x 2."""
        check_sides(width_px, height_px)
        frames = self.config.sampling.count(num_frames, fps, duration_s)
        return self._counts(frames, frames * self._tokens_per_frame() + 1, 1, frames, video=True)

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames that are taken: int64 [n]."""
        return self.config.sampling.indices(num_frames, fps, duration_s)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        config, counts = self.config, self.image(width_px, height_px, num_images=num_images)
        patches = f"grid {counts.grid[1]} x {counts.grid[2]} each = {counts.patches} patches"
        if num_images > 1:
            return (
                f"{width_px}x{height_px} px, one of {num_images} images -> one tile",
                patches,
                f"{config.tokens_per_tile} visual + 1 row end - {config.dropped_tokens} dropped "
                f"= {counts.llm_tokens} LLM tokens",
            )
        canvas, rows, columns = self._features(width_px, height_px)
        return (
            f"{width_px}x{height_px} px -> canvas of {canvas[1]}x{canvas[0]} px",
            f"{counts.tiles - 1} tiles + the whole image, {patches}",
            f"without padding, and at most about {config.max_tiles} tiles: {rows} rows x {columns} columns of features",
            f"{config.tokens_per_tile - config.dropped_tokens} of the whole image + {rows} x ({columns} + 1 row end) "
            f"= {counts.llm_tokens} LLM tokens",
        )

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.video(width_px, height_px, num_frames, fps, duration_s)
        return (
            f"{num_frames} frames -> {counts.frames} sampled, one tile each",
            f"grid {counts.grid[1]} x {counts.grid[2]} each = {counts.patches} patches",
            f"{counts.frames} x {self._tokens_per_frame()} pooled + 1 row end = {counts.llm_tokens} LLM tokens",
        )

    def _features(self, width_px: int, height_px: int) -> tuple[tuple[int, int], int, int]:
        check_sides(width_px, height_px)
        config, tiles, side = self.config, self.config.tiles, self.config.side
        canvas = best_canvas(width_px, height_px, tiles.canvases)
        rows, columns = side * (canvas[0] // tiles.height_px), side * (canvas[1] // tiles.width_px)
        rows, columns = unpadded(width_px, height_px, rows, columns)
        ratio = math.sqrt(rows * columns / (config.max_tiles * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return canvas, rows, columns

    def _tokens_per_frame(self) -> int:
        return int(math.ceil(self.config.side / 2) ** 2)

    def _counts(self, pieces: int, tokens: int, tiles: int, frames: int, *, video: bool = False) -> ItemCounts:
        config, tile = self.config, self.config.tiles
        still = (tile.height_px, tile.width_px)
        height, width = (config.frame_height_px, config.frame_width_px) if video else still
        rows, columns = height // config.patch_px, width // config.patch_px
        each = rows * columns + config.class_tokens
        return ItemCounts(
            llm_tokens=tokens,
            visual_tokens=tokens,
            patches=pieces * each,
            tiles=tiles,
            frames=frames,
            grid=(pieces, rows, columns),
            height_px=height,
            width_px=width,
            full=equal_segments(pieces, each),
        )


def _factory(files: ProcessorFiles) -> LlavaOnevisionEstimator:
    return LlavaOnevisionEstimator(LlavaOnevisionConfig.from_files(files))


FACTORIES = {
    "llava_onevision": _factory,
    "LlavaOnevisionProcessor": _factory,
    "LlavaOnevisionImageProcessor": _factory,
    "LlavaOnevisionVideoProcessor": _factory,
}
