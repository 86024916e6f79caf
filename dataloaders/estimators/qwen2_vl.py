"""Qwen2-VL, and what Qwen2.5-VL shares with it: one token per 2 x 2 patches of 14 px; videos in pairs of frames.

Image:  (w, h) -> smart_resize to multiples of 28 within [min_pixels, max_pixels] -> grid (1, h/14, w/14)
Video:  n = floor_2(clamp(num_frames / fps * 2, 4, min(768, num_frames))) sampled frames -> smart_resize with per-frame
        bounds -> grid (ceil(n / 2), h/14, w/14)
Tokens: t * h * w / 4

Three ways to prepare a video (`ProcessorFiles.preprocessing`):
  None           as these models are trained: sampled like qwen-vl-utils, 2 frames per second unless the video settings
                 say otherwise, whatever their `do_sample_frames` says (it is false in every saved processor). Bounds of
                 a frame are those of the video settings; of qwen-vl-utils where the folder has none.
  transformers   the processor alone. Without video settings it reads the image settings in their place, as
                 transformers does. `do_sample_frames: false` hands over every frame.
  qwen_vl_utils  see `dataloaders.estimators.qwen_vl_utils`: resized there, and then once more by the processor.

Sources: `Qwen2VLImageProcessor`, `Qwen2VLVideoProcessor` and `Qwen2VLProcessor` of transformers 5.24; `smart_nframes`
and `fetch_video` of qwen-vl-utils 0.0.14. What transformers does wrong and is not imitated:
  * for some pairs of frame counts (17 -> 14, 30 -> 26: 4 % of them) its float `arange` has one index too many, which
    lies behind the last frame, and the processor fails; here that index is left out;
  * its helper for the number of video patches forgets `cap_pixels_per_frame`, which its own processing applies.
Frame positions are exact under None, half to even, where qwen-vl-utils rounds a float32 `linspace` whose value depends
on the CPU: single positions differ by one source frame, the counts never.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators.base import MediaLimits
from dataloaders.estimators.files import Config, ProcessorFiles
from dataloaders.estimators.frames import too_few_frames
from dataloaders.estimators.native import (
    CLIP_MEAN,
    CLIP_STD,
    Cells,
    PatchLayout,
    area_bounds,
    even_positions,
    floored_positions,
    frame_rate,
    number,
    triple,
)
from dataloaders.estimators.options import fingerprint, require_positive, require_resize, vision_config
from dataloaders.estimators.resize_rule import Budget, resize_all

_IMAGE_BOUNDS = (56 * 56, 28 * 28 * 1280)
_VIDEO_BOUNDS = (128 * 28 * 28, 768 * 28 * 28)
_VIDEO_KEYS = (
    "fps",
    "num_frames",
    "min_frames",
    "max_frames",
    "do_sample_frames",
    "cap_pixels_per_frame",
    "max_video_tokens",
    "video_processor_type",
)

Sampling: TypeAlias = Literal["even", "floor", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VLConfig:
    """The numbers that decide sizes and pixels. Defaults: the class defaults of transformers (images) and
    qwen-vl-utils (videos).

    Attributes:
        min_pixels, max_pixels: area of a resized image.
        patch_px, merge_size, temporal_patch: side of a patch, patches per token and side, frames per patch.
        window_px: side of an attention window; 0: the tower has none.
        tokens_per_second: temporal positions per second (for position ids).
        video_fps, video_min_frames, video_max_frames: sampling.
        video_num_frames: this many frames of every video instead; None: by rate.
        sampling: positions of sampled frames: `even` from first to last as in qwen-vl-utils, `floor` as in
            transformers, `all` frames.
        video_min_pixels, video_max_pixels: area of a resized frame.
        video_total_pixels: area over all frames, divided by temporal_patch; None: unbounded (`cap_pixels_per_frame`
            false in transformers).
        mean, std: normalisation of pixels in 0..1.
    """

    min_pixels: int = _IMAGE_BOUNDS[0]
    max_pixels: int = _IMAGE_BOUNDS[1]
    patch_px: int = 14
    merge_size: int = 2
    temporal_patch: int = 2
    window_px: int = 0
    tokens_per_second: float = 1.0
    video_fps: float = 2.0
    video_num_frames: int | None = None
    video_min_frames: int = 4
    video_max_frames: int = 768
    sampling: Sampling = "even"
    video_min_pixels: int = _VIDEO_BOUNDS[0]
    video_max_pixels: int = _VIDEO_BOUNDS[1]
    video_total_pixels: float | None = 128_000 * 28 * 28 * 0.9
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_positive(self, "patch_px", "merge_size", "temporal_patch", "min_pixels", "video_min_pixels")
        require_positive(self, "video_fps", "video_min_frames")
        for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise DataError(f"{name}.{low}={getattr(self, low)} exceeds {high}={getattr(self, high)}")
        if self.video_max_frames < max(self.video_min_frames, self.temporal_patch):
            raise DataError(
                f"{name}.video_max_frames={self.video_max_frames} is below video_min_frames="
                f"{self.video_min_frames} or temporal_patch={self.temporal_patch}"
            )
        if self.video_num_frames is not None and round(self.video_num_frames / self.temporal_patch) < 1:
            raise DataError(
                f"{name}.video_num_frames={self.video_num_frames} rounds to no multiple of {self.temporal_patch}"
            )
        if self.window_px and (self.window_px < self.factor or self.window_px % self.factor):
            raise DataError(
                f"{name}.window_px={self.window_px}: not a multiple of patch_px * merge_size = {self.factor}"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or not min(self.std) > 0:
            raise DataError(f"{name}.mean={self.mean}, std={self.std}: three channels, std above 0")
        if self.sampling not in ("even", "floor", "all"):
            raise DataError(f"{name}.sampling={self.sampling!r}: use 'even', 'floor' or 'all'")

    @property
    def factor(self) -> int:
        """Resized sides are multiples of this many pixels."""
        return self.patch_px * self.merge_size

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> Self:
        """From a model folder; keys that are absent or null take the defaults of transformers' classes."""
        video = video_settings(files)
        vision = vision_config(files)
        require_resize(files.image, video or {})
        low, high = area_bounds(files.image, _IMAGE_BOUNDS, pixel_keys=True)
        found: dict[str, Any] = {
            "min_pixels": low,
            "max_pixels": high,
            **cell_sizes(files.image, video or {}, vision, patch_px=14),
            "mean": triple(files.image, "image_mean", CLIP_MEAN),
            "std": triple(files.image, "image_std", CLIP_STD),
            **cls.tower(vision),
        }
        if video is not None:
            found |= _video_numbers(video, found["patch_px"] * found["merge_size"])
        if files.preprocessing is not None:
            found["sampling"] = "all" if (video or {}).get("do_sample_frames") is False else "floor"
        return cls(**found)

    @classmethod
    def tower(cls, vision: Config) -> dict[str, Any]:
        """Fields that the vision tower decides."""
        return {}


class Qwen2VLEstimator(PatchLayout):
    """`PatchEstimator` of Qwen2-VL; immutable, picklable, cheap to copy.

    Its position ids count temporal grid positions, not time: one a position, so `seconds_per_grid` is 1.
    """

    counts_positions = True
    config_type: ClassVar[type[Qwen2VLConfig]] = Qwen2VLConfig
    rule_id: ClassVar[str] = "qwen2_vl/1"  # raise it whenever a count or a frame index changes for some input
    family: ClassVar[str] = "Qwen2-VL"

    def __init__(self, config: Qwen2VLConfig | None = None) -> None:
        self.config = c = config or self.config_type()
        self.fingerprint = fingerprint(self.rule_id, c)
        self.rule = f"{self.family}, processor of transformers 5.24, frames sampled: {c.sampling}"
        cells = Cells(patch_px=c.patch_px, merge=c.merge_size, temporal_patch=c.temporal_patch, window_px=c.window_px)
        self.lay_out(cells, mean=c.mean, std=c.std, tokens_per_second=float(c.tokens_per_second))
        self.image_budgets = (Budget(factor=c.factor, min_pixels=c.min_pixels, max_pixels=c.max_pixels),)

    def video_budgets(self, num_frames: int) -> tuple[Budget, ...]:
        """One resize a frame; it sees their number before temporal padding, as the reference does."""
        c = self.config
        most = c.video_max_pixels
        if c.video_total_pixels is not None:
            share = int(c.video_total_pixels) * c.temporal_patch // num_frames
            most = max(min(most, share), int(c.video_min_pixels * 1.05))
        return (Budget(factor=c.factor, min_pixels=c.video_min_pixels, max_pixels=most),)

    def sampled_video(self, width_px: int, height_px: int, sampled: int) -> ItemCounts:
        """Counts of `sampled` frames, however they were sampled. Raises UnfitError for none."""
        if sampled < 1:
            raise UnfitError(Reason.TOO_FEW_FRAMES, "the video has no frame", remedy="Drop the item.", nearest_frames=1)
        return self.video_cells.counts(resize_all(height_px, width_px, self.video_budgets(sampled)), sampled)

    def num_sampled(self, num_frames: int, fps: float, duration_s: float) -> int:
        """Frames that are sampled: `video_fps` per second within the bounds, a multiple of `temporal_patch`.

        Raises:
            UnfitError: `too_few_frames` for a clip shorter than one temporal patch, or than `video_num_frames`.
            MediaError: `too_few_frames` for 0 frames; `corrupt` without a usable rate.
        """
        c = self.config
        rate = frame_rate(num_frames, fps, duration_s)
        if c.sampling == "all":
            return num_frames
        step = c.temporal_patch
        if c.video_num_frames is not None:
            wanted = round(c.video_num_frames / step) * step
            if wanted > num_frames:
                raise too_few_frames(num_frames, wanted)
            return wanted
        least = math.ceil(c.video_min_frames / step) * step if c.sampling == "even" else c.video_min_frames
        most = math.floor(min(c.video_max_frames, num_frames) / step) * step
        sampled = math.floor(min(max(num_frames / rate * c.video_fps, least), most) / step) * step
        if sampled < step:
            # More frames at the same rate last longer, until the rate gives a whole patch of them.
            raise too_few_frames(num_frames, step if num_frames < step else math.ceil(step * rate / c.video_fps) + 1)
        return sampled

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames, ascending: int64 [num_sampled]. Raises as `num_sampled` does."""
        sampled = self.num_sampled(num_frames, fps, duration_s)
        return (even_positions if self.config.sampling == "even" else floored_positions)(num_frames, sampled)

    @property
    def min_video_frames(self) -> int | None:
        """A whole temporal patch, and the processor's own minimum where it samples by rate."""
        c = self.config
        if c.sampling == "all":
            return None
        least = c.temporal_patch if c.video_num_frames is not None else max(c.video_min_frames, c.temporal_patch)
        return -(-least // c.temporal_patch) * c.temporal_patch

    def shrunk(self, limits: MediaLimits) -> Self:
        """The estimator under `limits`, see `ShrinkableEstimator`."""
        c, changed = self.config, dict[str, Any]()
        if limits.image_pixels is not None:
            changed["max_pixels"] = max(c.min_pixels, min(c.max_pixels, limits.image_pixels))
        if limits.frame_pixels is not None:
            changed["video_max_pixels"] = max(c.video_min_pixels, min(c.video_max_pixels, limits.frame_pixels))
        least = self.min_video_frames
        if limits.video_frames is not None and least is not None:
            most = max(least, limits.video_frames)
            if c.video_num_frames is None:
                changed["video_max_frames"] = min(c.video_max_frames, most)
            else:
                changed["video_num_frames"] = min(c.video_num_frames, most // c.temporal_patch * c.temporal_patch)
        return type(self)(replace(c, **changed))


def video_settings(files: ProcessorFiles) -> Config | None:
    """The mapping that the video processor reads; None where the folder has none and nothing stands in for it."""
    if files.video is not None:
        return files.video
    if files.preprocessing is not None or any(files.image.get(key) is not None for key in _VIDEO_KEYS):
        return files.image
    return None


def cell_sizes(image: Config, video: Config, vision: Config, *, patch_px: int) -> dict[str, int]:
    """Sizes of patches and squares of patches: of the image settings, else the video settings, else the tower.

    Raises:
        DataError: the settings of both media differ: one vision tower cannot serve both.
    """
    found: dict[str, int] = {}
    for field, key, tower_key, default in (
        ("patch_px", "patch_size", "patch_size", patch_px),
        ("merge_size", "merge_size", "spatial_merge_size", 2),
        ("temporal_patch", "temporal_patch_size", "temporal_patch_size", 2),
    ):
        of_image, of_video = number(image, key), number(video, key)
        if of_image is not None and of_video is not None and of_image != of_video:
            raise DataError(
                f"{key}={of_image} for images and {of_video} for videos: one vision tower cannot serve both"
            )
        known = next((value for value in (of_image, of_video, number(vision, tower_key)) if value is not None), default)
        found[field] = known
    return found


def sampling_rate(video: Config, default: float) -> tuple[float, int | None]:
    """(frames per second, number of frames or None). Raises DataError for both at once, as transformers does."""
    num_frames = number(video, "num_frames")
    if num_frames is not None and number(video, "fps") is not None:
        raise DataError(f"fps={video['fps']} and num_frames={num_frames}: give one of them")
    return number(video, "fps", default), num_frames


def _video_numbers(video: Config, factor: int) -> dict[str, Any]:
    low, high = area_bounds(video, _VIDEO_BOUNDS, pixel_keys=True)
    fps, num_frames = sampling_rate(video, 2.0)
    tokens = number(video, "max_video_tokens", 128_000)
    return {
        "video_fps": fps,
        "video_num_frames": num_frames,
        "video_min_frames": number(video, "min_frames", 4),
        "video_max_frames": number(video, "max_frames", 768),
        "video_min_pixels": low,
        "video_max_pixels": high,
        "video_total_pixels": float(int(tokens * factor * factor * 0.9)) if video.get("cap_pixels_per_frame") else None,
    }
