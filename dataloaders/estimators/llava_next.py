"""LLaVA-NeXT and LLaVA-NeXT-Video: any-resolution tiles, their padding cut off, one row end for each row of features.

    tokens = base + rows * columns + rows - (1 where the first token is dropped)
    base   = features of one tile + num_additional_image_tokens
    video  = frames * (features of one tile // 4)

Sources: `LlavaNextProcessor`, `LlavaNextVideoProcessor` and their image and video processors in transformers 5.24. The
processor pads a batch to its largest number of tiles; the model drops those before the tower: nothing is padded here.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.estimators.anyres import AnyresTiles, best_canvas, unpadded
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.fixed import added_tokens, dropped_tokens, has_class_token
from dataloaders.estimators.frames import FrameSampling
from dataloaders.estimators.options import ImagesOnly, check_sides, fingerprint, patch_px, require_positive, size_px

_RULE = "llava_next/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextConfig:
    """The numbers that decide tiles and tokens.

    Attributes:
        tiles: canvases and tiles.
        patch_px: side of a patch.
        class_tokens: tokens of the tower beside the patches.
        added_tokens: `num_additional_image_tokens`.
        dropped_tokens: 1 where the first token is dropped.
        sampling: frames of a video; None: no videos.
        frame_height_px, frame_width_px: a frame as encoded.
    """

    tiles: AnyresTiles
    patch_px: int = 14
    class_tokens: int = 1
    added_tokens: int = 1
    dropped_tokens: int = 1
    sampling: FrameSampling | None = None
    frame_height_px: int = 336
    frame_width_px: int = 336

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "frame_height_px", "frame_width_px")

    @classmethod
    def from_files(cls, files: ProcessorFiles, *, videos: bool) -> "LlavaNextConfig":
        """From the options of the processor, its image and its video processor."""
        tiles = AnyresTiles.from_files(files, default=224, crops=True, canvases=_CANVASES)
        video = files.video or {}
        frame = video.get("crop_size") or video.get("size") or [tiles.height_px, tiles.width_px]
        height, width = size_px(frame, "crop_size of videos")
        return cls(
            tiles=tiles,
            patch_px=patch_px(files, 14),
            class_tokens=int(has_class_token(files)),
            added_tokens=added_tokens(files),
            dropped_tokens=dropped_tokens(files, "default"),
            sampling=FrameSampling.from_video(files.video) if videos else None,
            frame_height_px=height,
            frame_width_px=width,
        )


class LlavaNextEstimator(ImagesOnly):
    """`TokenEstimator` of LLaVA-NeXT and LLaVA-NeXT-Video; immutable, picklable."""

    def __init__(self, config: LlavaNextConfig) -> None:
        self.config = config
        self.rule = f"LLaVA-NeXT, transformers 5.24 processor, {len(config.tiles.canvases)} canvases"
        self.fingerprint = fingerprint(_RULE, config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        canvas, rows, columns = self._features(width_px, height_px)
        config, tiles = self.config, self.config.tiles
        grid = (tiles.num_tiles(canvas), tiles.height_px // config.patch_px, tiles.width_px // config.patch_px)
        each = grid[1] * grid[2] + config.class_tokens
        tokens = self._base_tokens() + rows * (columns + 1)
        return ItemCounts(
            llm_tokens=tokens,
            visual_tokens=tokens,
            patches=grid[0] * each,
            tiles=grid[0],
            grid=grid,
            height_px=tiles.height_px,
            width_px=tiles.width_px,
            full=equal_segments(grid[0], each),
        )

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video: each frame one tile, pooled 2 x 2."""
        config, sampling = self.config, self._sampling()
        check_sides(width_px, height_px)
        frames = sampling.count(num_frames, fps, duration_s)
        grid = (frames, config.frame_height_px // config.patch_px, config.frame_width_px // config.patch_px)
        each = grid[1] * grid[2] + config.class_tokens
        tokens = frames * (grid[1] * grid[2] // 4)
        return ItemCounts(
            llm_tokens=tokens,
            visual_tokens=tokens,
            patches=frames * each,
            frames=frames,
            grid=grid,
            height_px=config.frame_height_px,
            width_px=config.frame_width_px,
            full=equal_segments(frames, each),
        )

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames that are taken: int64 [n]."""
        return self._sampling().indices(num_frames, fps, duration_s)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        canvas, rows, columns = self._features(width_px, height_px)
        counts = self.image(width_px, height_px)
        return (
            f"{width_px}x{height_px} px -> canvas of {canvas[1]}x{canvas[0]} px",
            f"{counts.tiles - 1} tiles + the whole image, grid {counts.grid[1]} x {counts.grid[2]} "
            f"+ {self.config.class_tokens} class tokens each = {counts.patches} patches",
            f"without padding {rows} rows x {columns} columns of features",
            f"{self._base_tokens()} of the whole image + {rows} x ({columns} + 1 row end) "
            f"= {counts.llm_tokens} LLM tokens",
        )

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.video(width_px, height_px, num_frames, fps, duration_s)
        return (
            f"{num_frames} frames -> {counts.frames} sampled, {counts.width_px}x{counts.height_px} px each",
            f"grid {counts.grid[1]} x {counts.grid[2]} + {self.config.class_tokens} class tokens each "
            f"= {counts.patches} patches",
            f"{counts.frames} x ({counts.grid[1] * counts.grid[2]} // 4) = {counts.llm_tokens} LLM tokens",
        )

    def _features(self, width_px: int, height_px: int) -> tuple[tuple[int, int], int, int]:
        check_sides(width_px, height_px)
        tiles, patch = self.config.tiles, self.config.patch_px
        canvas = best_canvas(width_px, height_px, tiles.canvases)
        rows = tiles.height_px // patch * (canvas[0] // tiles.height_px)
        columns = tiles.width_px // patch * (canvas[1] // tiles.width_px)
        return canvas, *unpadded(width_px, height_px, rows, columns)

    def _base_tokens(self) -> int:
        config, tiles = self.config, self.config.tiles
        features = (tiles.height_px // config.patch_px) * (tiles.width_px // config.patch_px)
        return features + config.added_tokens - config.dropped_tokens

    def _sampling(self) -> FrameSampling:
        if self.config.sampling is None:
            raise self._no_videos()
        return self.config.sampling


def _factory(files: ProcessorFiles) -> LlavaNextEstimator:
    return LlavaNextEstimator(LlavaNextConfig.from_files(files, videos=False))


def _video_factory(files: ProcessorFiles) -> LlavaNextEstimator:
    return LlavaNextEstimator(LlavaNextConfig.from_files(files, videos=True))


FACTORIES = {
    **dict.fromkeys(("LlavaNextProcessor", "llava_next", "LlavaNextImageProcessor"), _factory),
    **dict.fromkeys(("LlavaNextVideoProcessor", "llava_next_video"), _video_factory),
}
