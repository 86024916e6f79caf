"""Qwen2.5-VL: native resolution; one token per 2 x 2 patches of 14 px; videos in pairs of frames.

Image:  (w, h) -> smart_resize to multiples of 28 within [min_pixels, max_pixels] -> grid (1, h/14, w/14)
Video:  n = floor_2(clamp(num_frames / fps * 2, 4, min(768, num_frames))) sampled frames -> smart_resize with per-frame
        bounds -> grid (ceil(n / 2), h/14, w/14)
Tokens: t * h * w / 4

Sources of the formulas: `Qwen2VLImageProcessor` and `Qwen2VLVideoProcessor` of transformers 5.24; `smart_nframes` and
`fetch_video` of qwen-vl-utils 0.0.14. The rule here differs in three places, where those fail:
  * a one-frame clip is one temporal position (its frame repeated), where qwen-vl-utils raises; 0 frames is an error;
  * a side is never resized below one factor, where qwen-vl-utils returns 0 px for narrow images under a small budget,
    so such an image may exceed `max_pixels`;
  * frame positions are rounded exactly, half to even, where qwen-vl-utils rounds a float32 `linspace` whose value
    depends on the CPU: single positions differ by one source frame, the counts never.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, MediaError, Reason
from dataloaders.estimators.base import full_segments, temporal_grid, window_segments
from dataloaders.estimators.files import Config, ProcessorFiles

_RULE = "qwen2_5_vl/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_MAX_ASPECT = 200
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

ResizeRule: TypeAlias = Literal["transformers", "qwen_vl_utils"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VLConfig:
    """The numbers that decide sizes and pixels. Defaults: the class defaults of transformers (images) and
    qwen-vl-utils (videos).

    Attributes:
        min_pixels, max_pixels: area of a resized image.
        patch_px, merge_size, temporal_patch: side of a patch, patches per token and side, frames per patch.
        window_px: side of an attention window.
        tokens_per_second: temporal positions per second (for position ids).
        video_fps, video_min_frames, video_max_frames: sampling.
        video_min_pixels, video_max_pixels: area of a resized frame.
        video_total_pixels: area over all frames, divided by temporal_patch; None: unbounded (`cap_pixels_per_frame`
            false in transformers).
        resize_rule: the two reference libraries differ for sides below half a factor (13 px) and in the rounding of
            a frame's share of `video_total_pixels`.
        mean, std: normalisation of pixels in 0..1.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch_px: int = 14
    merge_size: int = 2
    temporal_patch: int = 2
    window_px: int = 112
    tokens_per_second: int = 2
    video_fps: float = 2.0
    video_min_frames: int = 4
    video_max_frames: int = 768
    video_min_pixels: int = 128 * 28 * 28
    video_max_pixels: int = 768 * 28 * 28
    video_total_pixels: float | None = 128_000 * 28 * 28 * 0.9
    resize_rule: ResizeRule = "transformers"
    mean: tuple[float, float, float] = _CLIP_MEAN
    std: tuple[float, float, float] = _CLIP_STD

    def __post_init__(self) -> None:
        for name in ("patch_px", "merge_size", "temporal_patch", "min_pixels", "video_min_pixels", "video_fps"):
            if not getattr(self, name) > 0:
                raise DataError(f"Qwen25VLConfig.{name}={getattr(self, name)!r}: must be positive")
        for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise DataError(f"Qwen25VLConfig.{low}={getattr(self, low)} exceeds {high}={getattr(self, high)}")
        if self.video_max_frames < max(self.video_min_frames, self.temporal_patch):
            raise DataError(
                f"Qwen25VLConfig.video_max_frames={self.video_max_frames} is below video_min_frames="
                f"{self.video_min_frames} or temporal_patch={self.temporal_patch}"
            )
        if self.window_px < self.factor or self.window_px % self.factor:
            raise DataError(
                f"Qwen25VLConfig.window_px={self.window_px}: not a multiple of patch_px * merge_size = {self.factor}"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or not min(self.std) > 0:
            raise DataError(f"Qwen25VLConfig.mean={self.mean}, std={self.std}: three channels, std above 0")
        if self.resize_rule not in ("transformers", "qwen_vl_utils"):
            raise DataError(f"Qwen25VLConfig.resize_rule={self.resize_rule!r}: use 'transformers' or 'qwen_vl_utils'")

    @property
    def factor(self) -> int:
        """Resized sides are multiples of this many pixels."""
        return self.patch_px * self.merge_size

    @classmethod
    def from_hf(cls, model: Config, image: Config, video: Config | None = None) -> "Qwen25VLConfig":
        """From the mappings of `config.json`, `preprocessor_config.json` and `video_preprocessor_config.json`.

        Keys that are absent take the defaults above; without a video mapping, so do all video numbers.
        """
        for settings in (image, video or {}):
            if settings.get("do_resize", True) is False:
                raise DataError(
                    "do_resize is false: sizes would depend on the files alone", remedy="Set do_resize to true."
                )
        vision: Config = model.get("vision_config") or {}
        found: dict[str, Any] = {
            "patch_px": image.get("patch_size", vision.get("patch_size")),
            "merge_size": image.get("merge_size", vision.get("spatial_merge_size")),
            "temporal_patch": image.get("temporal_patch_size", vision.get("temporal_patch_size")),
            "window_px": vision.get("window_size"),
            "tokens_per_second": vision.get("tokens_per_second"),
            "mean": _floats(image.get("image_mean")),
            "std": _floats(image.get("image_std")),
        }
        found["min_pixels"], found["max_pixels"] = _pixel_bounds(image)
        if video is not None:
            found["video_min_pixels"], found["video_max_pixels"] = _pixel_bounds(video)
            found["video_fps"] = video.get("fps")
            found["video_min_frames"] = video.get("min_frames")
            found["video_max_frames"] = video.get("max_frames")
        settings = {name: value for name, value in found.items() if value is not None}
        if video is not None:
            settings["video_total_pixels"] = _total_pixels(video, settings)
        return cls(**settings)


def _pixel_bounds(settings: Config) -> tuple[int | None, int | None]:
    # transformers: explicit min_pixels / max_pixels override `size`.
    size: Config = settings.get("size") or {}
    low = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    high = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    return low, high


def _total_pixels(video: Config, settings: Config) -> float | None:
    if not video.get("cap_pixels_per_frame"):
        return None
    factor = settings.get("patch_px", 14) * settings.get("merge_size", 2)
    return float(int(video.get("max_video_tokens", 128_000) * factor * factor * 0.9))


def _floats(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(float(value) for value in values)


def smart_resize(
    height: int, width: int, factor: int, min_pixels: float, max_pixels: float, *, rule: ResizeRule = "transformers"
) -> tuple[int, int]:
    """(height, width) nearest to the given one, in multiples of `factor`, with an area within the bounds.

    `round` is Python's, half to even: 70 px with factor 28 gives 56. Each side is at least `factor`; an extreme shape
    may therefore exceed `max_pixels`.

    Raises:
        MediaError: `extreme_aspect` when one side is more than 200 times the other; `too_small` for a side below 1 px.
    """
    if min(height, width) < 1:
        raise MediaError(Reason.TOO_SMALL, f"{width}x{height} px: a side is below 1 px")
    if max(height, width) / min(height, width) > _MAX_ASPECT:
        raise MediaError(
            Reason.EXTREME_ASPECT,
            f"{width}x{height} px: one side is more than {_MAX_ASPECT} times the other",
            remedy="Crop or drop the item.",
        )
    least = factor if rule == "qwen_vl_utils" else 0
    new_height = max(least, round(height / factor) * factor)
    new_width = max(least, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return max(new_height, factor), max(new_width, factor)


class Qwen25VLEstimator:
    """`TokenEstimator` of Qwen2.5-VL; immutable, picklable, cheap to copy."""

    def __init__(self, config: Qwen25VLConfig | None = None) -> None:
        self.config = config or Qwen25VLConfig()
        self.patch_px = self.config.patch_px
        self.merge = self.config.merge_size
        self.temporal_patch = self.config.temporal_patch
        self.window_px = self.config.window_px
        self.tokens_per_second: float = self.config.tokens_per_second
        self.mean, self.std = self.config.mean, self.config.std
        text = json.dumps([_RULE, asdict(self.config)], sort_keys=True)
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image: one temporal position, as the processor repeats it to fill the temporal patch."""
        c = self.config
        size = smart_resize(height_px, width_px, c.factor, c.min_pixels, c.max_pixels, rule=c.resize_rule)
        return self._counts(size, 1)

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video; `duration_s` serves only where `fps` is unknown."""
        return self.sampled_video(width_px, height_px, self.num_sampled(num_frames, fps, duration_s))

    def sampled_video(self, width_px: int, height_px: int, sampled: int) -> ItemCounts:
        """Counts of `sampled` frames; the resize sees that number before temporal padding, as the reference does."""
        c = self.config
        if sampled < 1:
            raise MediaError(Reason.TOO_FEW_FRAMES, "the video has no frame", remedy="Drop the item.")
        max_pixels: float = c.video_max_pixels
        if c.video_total_pixels is not None:
            if c.resize_rule == "transformers":  # an integer share there, a float one in qwen-vl-utils
                share: float = int(c.video_total_pixels) * c.temporal_patch // sampled
            else:
                share = c.video_total_pixels / sampled * c.temporal_patch
            max_pixels = max(min(max_pixels, share), int(c.video_min_pixels * 1.05))
        size = smart_resize(height_px, width_px, c.factor, c.video_min_pixels, max_pixels, rule=c.resize_rule)
        return self._counts(size, temporal_grid(sampled, c.temporal_patch))

    def num_sampled(self, num_frames: int, fps: float, duration_s: float) -> int:
        """Frames that are sampled: `video_fps` per second within the bounds, a multiple of `temporal_patch`.

        A clip shorter than one temporal patch is taken whole.

        Raises:
            MediaError: `too_few_frames` for 0 frames; `corrupt` without a usable rate.
        """
        c = self.config
        if num_frames < 1:
            raise MediaError(Reason.TOO_FEW_FRAMES, f"num_frames={num_frames}", remedy="Drop the item.")
        step = c.temporal_patch
        if num_frames < step:
            return num_frames
        least = math.ceil(c.video_min_frames / step) * step
        most = math.floor(min(c.video_max_frames, num_frames) / step) * step
        wanted = num_frames / _rate(num_frames, fps, duration_s) * c.video_fps
        return math.floor(min(max(wanted, least), most) / step) * step

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Evenly spaced from the first to the last frame, rounded half to even: int64 [num_sampled]."""
        sampled = self.num_sampled(num_frames, fps, duration_s)
        if sampled == 1:
            return np.zeros(1, dtype=np.int64)
        below, rest = np.divmod(np.arange(sampled, dtype=np.int64) * (num_frames - 1), sampled - 1)
        up = (2 * rest > sampled - 1) | ((2 * rest == sampled - 1) & (below % 2 == 1))
        return np.asarray(below + up, dtype=np.int64)

    def seconds_per_grid(self, num_frames: int, fps: float) -> float:
        """temporal_patch / (rate of the sampled frames), as qwen-vl-utils hands it to the model."""
        sampled = self.num_sampled(num_frames, fps, 0.0)
        return self.temporal_patch / (sampled / num_frames * fps)

    def _counts(self, size: tuple[int, int], grid_t: int) -> ItemCounts:
        height_px, width_px = size
        grid = (grid_t, height_px // self.patch_px, width_px // self.patch_px)
        patches = grid[0] * grid[1] * grid[2]
        return ItemCounts(
            llm_tokens=patches // self.merge**2,
            visual_tokens=patches // self.merge**2,
            patches=patches,
            tiles=1,
            frames=grid_t * self.temporal_patch,
            grid=grid,
            height_px=height_px,
            width_px=width_px,
            full=full_segments(grid),
            window=window_segments(grid, self.window_px // self.patch_px),
        )


def _rate(num_frames: int, fps: float, duration_s: float) -> float:
    if math.isfinite(fps) and fps > 0:
        return fps
    if math.isfinite(duration_s) and duration_s > 0:
        return num_frames / duration_s
    raise MediaError(
        Reason.CORRUPT, f"fps={fps}, duration_s={duration_s}: no usable frame rate", remedy="Drop the item."
    )


def _factory(files: ProcessorFiles) -> Qwen25VLEstimator:
    return Qwen25VLEstimator(Qwen25VLConfig.from_hf(files.model, files.image, files.video))


FACTORIES = {"qwen2_5_vl": _factory}
