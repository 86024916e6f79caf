"""Molmo2: overlapping crops of a canvas and a global view, patches pooled 2 x 2; videos frame by frame, pooled 3 x 3.

Image:  (w, h) --the canvas of at most `max_crops` windows that needs the least enlarging, or else the least shrinking
           --> rows x columns of pooled patches, and those of the global view
        tokens: (start, end) + rows * (columns + [row end])  for the canvas, and likewise for the global view
Video:  min(num_frames, 2 a second) frames, evenly spread, each a global view with its time before it
        tokens: for each frame 2 + rows * (columns + [row end]) + those of " 1.5 "

Sources of the formulas: `Molmo2ImageProcessor`, `Molmo2VideoProcessor` and `Molmo2Processor` of transformers 5.24. A
crop overlaps its neighbours, so it brings fewer new patches than are encoded. Canvases are compared in single
precision, as there.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import Config, CountText, ProcessorFiles
from dataloaders.estimators.frames import source_rate, usable_rate
from dataloaders.estimators.native import floored_positions
from dataloaders.estimators.options import check_sides, fingerprint, require_positive, size_px
from dataloaders.estimators.text import ROUGH, count_text_roughly

_RULE = "molmo2/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_DELIMITERS = 2  # around a view
_NOT_ENOUGH = np.float32(10e9)  # stands for a canvas smaller than the image, where another is not


@dataclass(frozen=True, slots=True, kw_only=True)
class Molmo2Config:
    """The numbers that decide counts and frames. Defaults: class defaults of transformers.

    Attributes:
        crop_px, patch_px: sides of a crop and of a patch.
        max_crops: most crops of an image, the global view left out.
        margin_patches: patches of a crop that its neighbours have too: left or top, right or bottom.
        pooling: patches per token (down, across) of an image.
        row_ends, global_row_ends: whether rows end with a token, in the canvas and in the global view.
        video_crop_px, video_patch_px, video_pooling, video_row_ends: the same for frames.
        num_frames, max_fps: most frames of a video, and most a second; None: no limit of the second kind.
        fps: frames a second in place of both.
    """

    crop_px: int = 378
    patch_px: int = 14
    max_crops: int = 8
    margin_patches: tuple[int, int] = (4, 4)
    pooling: tuple[int, int] = (2, 2)
    row_ends: bool = True
    global_row_ends: bool = True
    video_crop_px: int = 378
    video_patch_px: int = 14
    video_pooling: tuple[int, int] = (3, 3)
    video_row_ends: bool = False
    num_frames: int = 64
    max_fps: float = 2.0
    fps: float | None = None

    def __post_init__(self) -> None:
        require_positive(
            self, "crop_px", "patch_px", "max_crops", "video_crop_px", "video_patch_px", "num_frames", "max_fps"
        )
        if min(*self.pooling, *self.video_pooling) < 1:
            raise DataError(f"Molmo2Config: pooling={self.pooling}, video_pooling={self.video_pooling}: at least 1")
        if self.window_patches < 1 or min(self.margin_patches) < 0:
            raise DataError(
                f"Molmo2Config: crops of {self.crop_px} px with margins of {self.margin_patches} patches of "
                f"{self.patch_px} px leave nothing"
            )

    @property
    def window_patches(self) -> int:
        """Patches along a crop that are its own."""
        return self.crop_px // self.patch_px - sum(self.margin_patches)

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Molmo2Config":
        """From the files of a model folder. Raises DataError for `fps` together with `num_frames`."""
        image, video, own = files.image, files.video or {}, cls()
        if video.get("fps") is not None and video.get("num_frames") is not None:
            raise DataError(
                f"num_frames={video['num_frames']} and fps={video['fps']}: the processor takes one", place=files.place
            )
        if video.get("do_sample_frames") is False:
            raise DataError("do_sample_frames is false: every frame would be encoded", remedy="Set it to true.")
        row_ends = _flag(files.processor, "image_use_col_tokens", own.row_ends)
        return cls(
            crop_px=_square(image, "size", own.crop_px),
            patch_px=_square(image, "patch_size", own.patch_px),
            max_crops=image.get("max_crops") or own.max_crops,
            margin_patches=_pair(image, "overlap_margins", own.margin_patches),
            pooling=_pair(image, "pooling_size", own.pooling),
            row_ends=row_ends,
            global_row_ends=_flag(files.processor, "use_single_crop_col_tokens", row_ends),
            video_crop_px=_square(video, "size", own.video_crop_px),
            video_patch_px=_square(video, "patch_size", own.video_patch_px),
            video_pooling=_pair(video, "pooling_size", own.video_pooling),
            video_row_ends=_flag(files.processor, "video_use_col_tokens", own.video_row_ends),
            num_frames=video.get("num_frames") or own.num_frames,
            max_fps=video.get("max_fps") or own.max_fps,
            fps=video.get("fps"),
        )


class _View(NamedTuple):
    rows: int
    columns: int
    row_ends: bool

    @property
    def visual(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        return _DELIMITERS + self.rows * (self.columns + self.row_ends)


class Molmo2Estimator:
    """`TokenEstimator` of Molmo2; immutable, picklable, cheap to copy."""

    def __init__(
        self,
        config: Molmo2Config | None = None,
        *,
        count_text: CountText = count_text_roughly,
        text_rule: str = ROUGH,
    ) -> None:
        c = self.config = config or Molmo2Config()
        self.fingerprint = fingerprint(_RULE, c, text_rule)
        self.rule = f"Molmo2, transformers 5.24 processor, times counted by {text_rule}"
        self._count_text = count_text
        self._grids = sorted(
            ((rows, cols) for rows in range(1, c.max_crops + 1) for cols in range(1, c.max_crops // rows + 1)),
            key=lambda grid: (grid[0] * grid[1], grid[0]),
        )
        self._grids_px = np.array(self._grids, dtype=np.float32) * np.float32(c.window_patches * c.patch_px)
        self._global = _view(c.crop_px // c.patch_px, c.crop_px // c.patch_px, c.pooling, c.global_row_ends)
        side = c.video_crop_px // c.video_patch_px
        self._frame = _view(side, side, c.video_pooling, c.video_row_ends)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; the size is that of the canvas.

        Raises:
            UnfitError: a side is below 1 px.
        """
        c, (rows, columns) = self.config, self._grid(width_px, height_px)
        canvas, tiles, side = self._canvas(rows, columns), rows * columns + 1, c.crop_px // c.patch_px
        margin = sum(c.margin_patches)
        return ItemCounts(
            llm_tokens=self._global.tokens + canvas.tokens,
            visual_tokens=self._global.visual + canvas.visual,
            patches=tiles * side * side,
            tiles=tiles,
            grid=(tiles, side, side),
            height_px=(rows * c.window_patches + margin) * c.patch_px,
            width_px=(columns * c.window_patches + margin) * c.patch_px,
            full=equal_segments(tiles, side * side),
        )

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video, which its size does not decide.

        Raises:
            UnfitError: a side is below 1 px, or there is no frame.
        """
        check_sides(width_px, height_px)
        frames = self.frame_indices(num_frames, fps, duration_s)
        c, side, count = self.config, self.config.video_crop_px // self.config.video_patch_px, len(frames)
        return ItemCounts(
            llm_tokens=count * self._frame.tokens + self._time_tokens(frames, num_frames, fps, duration_s),
            visual_tokens=count * self._frame.visual,
            patches=count * side * side,
            tiles=count,
            frames=count,
            grid=(count, side, side),
            height_px=c.video_crop_px,
            width_px=c.video_crop_px,
            full=equal_segments(count, side * side),
        )

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Evenly spread from the first frame on: int64 [n]."""
        if num_frames < 1:
            nearest = 1 if usable_rate(1, fps, duration_s) else None
            raise UnfitError(
                Reason.TOO_FEW_FRAMES, f"num_frames={num_frames}", remedy="Drop the item.", nearest_frames=nearest
            )
        c, rate = self.config, source_rate(num_frames, fps, duration_s)
        duration = duration_s if math.isfinite(duration_s) and duration_s > 0 else num_frames / rate
        if c.fps is not None:
            wanted = int(duration * c.fps)
        else:
            wanted = min(c.num_frames, int(duration * c.max_fps)) if rate > c.max_fps else c.num_frames
        # Where the processor's float step falls short by a rounding (300 frames, 7 wanted), it asks for the frame
        # behind the last as well and fails; here that one is left out.
        return floored_positions(num_frames, max(min(wanted, num_frames), 1))

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts, (rows, columns) = self.image(width_px, height_px), self._grid(width_px, height_px)
        canvas, c, overview = self._canvas(rows, columns), self.config, self._global
        return (
            f"crops of {c.crop_px} px for {width_px}x{height_px} px, {sum(c.margin_patches)} patches shared: "
            f"{rows} rows of {columns} (at most {c.max_crops}) and a global view: {counts.tiles}",
            f"patches of {c.patch_px} px: {counts.patches}; pooled {c.pooling[0]} x {c.pooling[1]}: "
            f"{canvas.rows} rows of {canvas.columns} and {overview.rows} of {overview.columns}: {counts.visual_tokens}",
            f"LLM tokens with delimiters and row ends: {canvas.tokens} + {overview.tokens} = {counts.llm_tokens}",
        )

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.video(width_px, height_px, num_frames, fps, duration_s)
        c, frame = self.config, self._frame
        return (
            f"frames of {num_frames} at {fps:g} a second: {counts.frames} "
            f"(at most {c.num_frames}, {c.max_fps:g} a second)",
            f"each {c.video_crop_px}x{c.video_crop_px} px, pooled {c.video_pooling[0]} x {c.video_pooling[1]}: "
            f"{frame.rows} rows of {frame.columns}; patches: {counts.patches}",
            f"LLM tokens: {counts.frames} x {frame.tokens} + times "
            f"{counts.llm_tokens - counts.frames * frame.tokens} = {counts.llm_tokens}",
        )

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of crops."""
        check_sides(width, height)
        margin = sum(self.config.margin_patches) * self.config.patch_px
        # A side within the margin gives a scale that is negative or infinite, in the processor too.
        with np.errstate(divide="ignore"):
            scales = (self._grids_px / np.array([height - margin, width - margin], dtype=np.float32)).min(axis=1)
        enough = scales >= 1
        best = np.where(enough, scales, _NOT_ENOUGH).argmin() if enough.any() else scales.argmax()
        return self._grids[int(best)]

    def _canvas(self, rows: int, columns: int) -> _View:
        window, margin = self.config.window_patches, sum(self.config.margin_patches)
        return _view(rows * window + margin, columns * window + margin, self.config.pooling, self.config.row_ends)

    def _time_tokens(self, frames: NDArray[np.int64], num_frames: int, fps: float, duration_s: float) -> int:
        rate = source_rate(num_frames, fps, duration_s)
        times = [f"{frame / rate:.1f} " for frame in frames.tolist()]
        return sum(self._count_text(time if number == 0 else f" {time}") for number, time in enumerate(times))


def _view(rows: int, columns: int, pooling: tuple[int, int], row_ends: bool) -> _View:
    return _View(-(-rows // pooling[0]), -(-columns // pooling[1]), row_ends)


def _flag(settings: Config, name: str, default: bool) -> bool:
    value = settings.get(name)
    return default if value is None else bool(value)


def _square(settings: Config, name: str, default: int) -> int:
    value = settings.get(name)
    height, width = size_px(default if value is None else value, name)
    if height != width:
        raise DataError(f"{name}={value!r}: the processor takes squares alone")
    return height


def _pair(settings: Config, name: str, default: tuple[int, int]) -> tuple[int, int]:
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise DataError(f"{name}={value!r}: needs two numbers")
    return int(value[0]), int(value[1])


def _factory(files: ProcessorFiles) -> Molmo2Estimator:
    # A flat mapping has the processor's own switches beside the others.
    processor = files.processor or files.image
    flat = ProcessorFiles(model=files.model, image=files.image, video=files.video, processor=processor)
    return Molmo2Estimator(Molmo2Config.from_files(flat), count_text=files.count_text, text_rule=files.text_rule)


FACTORIES = dict.fromkeys(("molmo2", "Molmo2Processor", "Molmo2ImageProcessor"), _factory)
