"""Kimi-VL and Kimi-K2.5: native resolution, scaled down only, padded to whole 2 x 2 patches of 14 px.

Image:  (w, h) --scale = min(1, sqrt(max_patches / (w // 14 * h // 14)), 512 * 14 / w, 512 * 14 / h), rounded down-->
               --padded up to multiples of 28--> grid (1, h/14, w/14), h * w / 4 tokens
Video:  K2.5 alone: 2 frames per second in chunks of 4; a chunk's patches attend to each other and are averaged over its
        frames, so a chunk costs the tokens of one frame
        00:00:00.000<|media_begin|>video<|media_content|> tokens <|media_end|>   per chunk

Worked example: a 640x480 image -> 644x504 -> 36 x 46 patches -> 414 tokens.

Sources of the formulas: `Kimi_K25ImageProcessor`, `Kimi_K25VideoProcessor`, `Kimi_K25Processor` and
`Kimi_K25VisionModel` of transformers 5.24; for Kimi-VL, which is not in transformers, its published image processor:
the same arithmetic without the limit of a side, instead of which it raises where a padded side has 512 patches or more
(`extreme_aspect` here). A Kimi-VL configuration with `size.max_height` is one for the K2.5 processor, and follows it.

The K2.5 processor samples fps * seconds frames and raises where the clip has fewer (a rate below 2 frames per second).
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts, SegmentStats
from dataloaders.errors import DataError
from dataloaders.estimators.base import full_segments
from dataloaders.estimators.files import Config, CountText, ProcessorFiles
from dataloaders.estimators.frames import FrameSampling, source_rate
from dataloaders.estimators.nearest_size import unfit_size
from dataloaders.estimators.options import (
    ImagesOnly,
    fingerprint,
    require_absent,
    require_positive,
    require_resize,
    side,
)

_RULE = "kimi/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_MOST_POSITIONS = 512
_MARKERS = 3  # <|media_begin|>, <|media_content|>, <|media_end|>


@dataclass(frozen=True, slots=True, kw_only=True)
class NavitConfig:
    """The numbers that decide a size.

    Attributes:
        patch_px, merge: side of a patch, patches per token and side.
        max_patches: patches of an image or a frame, before padding.
        max_side: patches of a side; None: a side of 512 or more is refused, not scaled (Kimi-VL).
    """

    patch_px: int = 14
    merge: int = 2
    max_patches: int = 16_384
    max_side: int | None = _MOST_POSITIONS

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge", "max_patches")
        if self.max_side is not None:
            require_positive(self, "max_side")

    @classmethod
    def from_settings(cls, settings: Config, *, limit_names: tuple[str, ...], **defaults: Any) -> "NavitConfig":
        """From the options of an image or a video processor; `limit_names` are the spellings of `max_patches`."""
        require_resize(settings)
        require_absent(settings, "fixed_output_tokens")
        found = dict(defaults)
        limit = next((settings[name] for name in limit_names if settings.get(name) is not None), None)
        if limit is not None:
            found["max_patches"] = limit
        merge = settings.get("merge_size") or settings.get("merge_kernel_size")
        for name, value in (("patch_px", settings.get("patch_size")), ("merge", merge)):
            if value is not None:
                found[name] = side(value, name)
        size = settings.get("size")
        if size is not None:
            if not size.get("max_height") or size.get("max_height") != size.get("max_width"):
                raise DataError(f"size={size!r}: max_height and max_width must be given and equal")
            found["max_side"] = size["max_height"]
        elif settings.get("patch_limit_on_one_side") is not None:
            found["max_side"] = settings["patch_limit_on_one_side"]
        return cls(**found)


_FRAME = NavitConfig(max_patches=4096)
_SAMPLING = FrameSampling(fps=2.0)


def navit_resize(width_px: int, height_px: int, config: NavitConfig) -> tuple[int, int]:
    """(height, width) in pixels after scaling and padding.

    Raises:
        UnfitError: `too_small` for a side below 1 px; `extreme_aspect` for a side of 512 patches where that is refused.
    """
    if min(width_px, height_px) < 1 or not _has_positions(width_px, height_px, config):
        raise unfit_size(
            width_px,
            height_px,
            f"a padded side of {_MOST_POSITIONS} patches or more, which have no position",
            lambda width, height: _has_positions(width, height, config),
        )
    return _scaled_and_padded(width_px, height_px, config)


def _scaled_and_padded(width_px: int, height_px: int, config: NavitConfig) -> tuple[int, int]:
    c = config
    scale = math.sqrt(c.max_patches / (max(1, height_px // c.patch_px) * max(1, width_px // c.patch_px)))
    most_px = max(height_px, width_px) if c.max_side is None else c.max_side * c.patch_px
    scale = min(1.0, scale, most_px / height_px, most_px / width_px)
    height = min(max(1, int(height_px * scale)), most_px)
    width = min(max(1, int(width_px * scale)), most_px)
    factor = c.merge * c.patch_px
    return -(-height // factor) * factor, -(-width // factor) * factor


def _has_positions(width_px: int, height_px: int, config: NavitConfig) -> bool:
    if config.max_side is not None:
        return True
    return max(_scaled_and_padded(width_px, height_px, config)) // config.patch_px < _MOST_POSITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK25Config:
    """Images, and videos: `video` decides the size of a frame. Defaults: class defaults of transformers.

    Attributes:
        image, video: sizes.
        temporal_patch: frames of a chunk.
        sampling: frames that are taken of a clip.
    """

    image: NavitConfig = NavitConfig()
    video: NavitConfig = _FRAME
    temporal_patch: int = 4
    sampling: FrameSampling = _SAMPLING

    def __post_init__(self) -> None:
        require_positive(self, "temporal_patch")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "KimiK25Config":
        """From the files of a model folder, also those for remote code, with all options under `media_proc_cfg`."""
        image: Config = files.image.get("media_proc_cfg") or files.image
        remote = image is not files.image or "in_patch_limit" in image
        video: Config = image if remote or files.video is None else files.video  # as transformers loads them
        require_absent(video, "in_patch_limit_video", "max_num_frames_each_video")
        if video.get("timestamp_mode", "hh:mm:ss.fff") != "hh:mm:ss.fff":
            raise DataError(f"timestamp_mode={video['timestamp_mode']!r} is not supported by this estimator")
        chunk = video.get("temporal_patch_size") or video.get("temporal_merge_kernel_size") or cls().temporal_patch
        rate = video.get("fps", video.get("sample_fps", cls().sampling.fps))
        limit = "in_patch_limit_each_frame" if remote else "max_patches"
        return cls(
            image=NavitConfig.from_settings(image, limit_names=("max_patches", "in_patch_limit")),
            video=NavitConfig.from_settings(video, limit_names=(limit,), max_patches=cls().video.max_patches),
            temporal_patch=chunk,
            sampling=FrameSampling.from_video({**video, "fps": None if rate is None else float(rate)}),
        )


class KimiVLEstimator(ImagesOnly):
    """`TokenEstimator` of Kimi-VL; immutable, picklable, cheap to copy."""

    rule = "Kimi-VL, its published image processor"

    def __init__(self, config: NavitConfig) -> None:
        self.config = config
        self.fingerprint = fingerprint(f"{_RULE} kimi_vl", config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        return _image_counts(width_px, height_px, self.config)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        return _explain_image(width_px, height_px, self.config)


class KimiK25Estimator:
    """`TokenEstimator` of Kimi-K2.5; immutable, cheap to copy."""

    def __init__(self, config: KimiK25Config, count_text: CountText, text_rule: str) -> None:
        self.config = config
        self.rule = f"Kimi-K2.5, transformers 5.24 processor, timestamps counted by {text_rule}"
        self.fingerprint = fingerprint(f"{_RULE} kimi_k25", config, text_rule)
        self._count_text = count_text
        self._chunk_delimiters = _MARKERS + count_text("video")

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        return _image_counts(width_px, height_px, self.config.image)

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video; `grid` is (chunks, h, w), and a chunk holds up to `temporal_patch` frames' patches."""
        c = self.config
        height, width = navit_resize(width_px, height_px, c.video)
        stamps = self._timestamps(num_frames, fps, duration_s)
        frames = c.sampling.count(num_frames, fps, duration_s)
        grid_h, grid_w = height // c.video.patch_px, width // c.video.patch_px
        visual_tokens = len(stamps) * (grid_h * grid_w // c.video.merge**2)
        texts = sum(map(self._count_text, stamps)) + len(stamps) * self._chunk_delimiters
        return ItemCounts(
            llm_tokens=visual_tokens + texts,
            visual_tokens=visual_tokens,
            patches=frames * grid_h * grid_w,
            frames=frames,
            grid=(len(stamps), grid_h, grid_w),
            height_px=height,
            width_px=width,
            full=_chunk_segments(frames, c.temporal_patch, grid_h * grid_w),
        )

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Every num_frames / n-th frame from the first on, rounded down: int64 [n]."""
        return self.config.sampling.indices(num_frames, fps, duration_s)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        return _explain_image(width_px, height_px, self.config.image)

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.video(width_px, height_px, num_frames, fps, duration_s)
        chunks, grid_h, grid_w = counts.grid
        return (
            f"{counts.frames} of {num_frames} frames, in {chunks} chunks of {c.temporal_patch}",
            f"{width_px}x{height_px} px, at most {c.video.max_patches} patches: {counts.width_px}x{counts.height_px}",
            f"patches: {counts.frames} x {grid_h} x {grid_w} = {counts.patches}",
            f"visual tokens: {chunks} x {grid_h} x {grid_w} / {c.video.merge**2} = {counts.visual_tokens}",
            f"timestamps and markers: {counts.llm_tokens - counts.visual_tokens}",
            f"LLM tokens: {counts.llm_tokens}",
        )

    def _timestamps(self, num_frames: int, fps: float, duration_s: float) -> list[str]:
        """The texts before the chunks: the time of a chunk's first frame, hours modulo one day."""
        rate = source_rate(num_frames, fps, duration_s)
        starts = self.frame_indices(num_frames, fps, duration_s)[:: self.config.temporal_patch].tolist()
        seconds = [start / rate for start in starts]
        return [time.strftime("%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}" for at in seconds]


def _image_counts(width_px: int, height_px: int, config: NavitConfig) -> ItemCounts:
    height, width = navit_resize(width_px, height_px, config)
    grid = (1, height // config.patch_px, width // config.patch_px)
    patches = grid[1] * grid[2]
    return ItemCounts(
        llm_tokens=patches // config.merge**2,
        visual_tokens=patches // config.merge**2,
        patches=patches,
        grid=grid,
        height_px=height,
        width_px=width,
        full=full_segments(grid),
    )


def _explain_image(width_px: int, height_px: int, config: NavitConfig) -> tuple[str, ...]:
    counts = _image_counts(width_px, height_px, config)
    _, grid_h, grid_w = counts.grid
    return (
        f"{width_px}x{height_px} px, at most {config.max_patches} patches, padded to multiples of "
        f"{config.patch_px * config.merge}: {counts.width_px}x{counts.height_px}",
        f"patches: {grid_h} x {grid_w} = {counts.patches}",
        f"LLM tokens: {counts.patches} / {config.merge**2} = {counts.llm_tokens}",
    )


def _chunk_segments(frames: int, chunk: int, frame_patches: int) -> SegmentStats:
    full, rest = divmod(frames, chunk)
    return SegmentStats(
        count=full + (rest > 0),
        total=frames * frame_patches,
        total_sq=(full * chunk * chunk + rest * rest) * frame_patches**2,
        longest=min(frames, chunk) * frame_patches,
    )


def _vl_factory(files: ProcessorFiles) -> KimiVLEstimator:
    if files.image.get("pad_input", True) is False:
        raise DataError("pad_input is false: cropping is not supported by this estimator", place=files.place)
    names = ("in_token_limit", "max_patches")
    return KimiVLEstimator(NavitConfig.from_settings(files.image, limit_names=names, max_patches=4096, max_side=None))


def _k25_factory(files: ProcessorFiles) -> KimiK25Estimator:
    return KimiK25Estimator(KimiK25Config.from_files(files), files.count_text, files.text_rule)


FACTORIES = {
    "kimi_vl": _vl_factory,
    "KimiVLProcessor": _vl_factory,
    "KimiVLImageProcessor": _vl_factory,
    "kimi_k25": _k25_factory,
    "Kimi_K25Processor": _k25_factory,
    "Kimi_K25ImageProcessor": _k25_factory,
    "KimiK25Processor": _k25_factory,
    "KimiK25VisionProcessor": _k25_factory,
}
