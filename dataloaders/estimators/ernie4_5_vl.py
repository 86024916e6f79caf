"""ERNIE 4.5 VL: native resolution in cells of 28 px; videos of even length, two frames per token behind the tower.

Image:  smart_resize to multiples of 28 within [min, max] -> h/14 * w/14 / 4 tokens
Video:  n sampled frames, the last repeated to an even number -> each resized within [min, max]
        -> n * h/14 * w/14 patches, which the tower encodes frame by frame -> / 4 / 2 tokens

Timestamps are drawn on the frames, not written. Without `fps` and `num_frames` in the video settings as many frames as
there are, 16 to 180, are taken.

Sources: `Ernie4_5_VLMoeImageProcessor`, `Ernie4_5_VLMoeVideoProcessor` and `Ernie4_5_VLMoeProcessor` of transformers
5.24. They pass over `min_pixels` and `max_pixels`, which the model's remote code obeys; such a folder is refused.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.frames import too_few_frames
from dataloaders.estimators.native import Cells, NativeEstimator, area_bounds, frame_rate, number
from dataloaders.estimators.options import fingerprint, require_positive, require_resize
from dataloaders.estimators.qwen2_vl import sampling_rate
from dataloaders.estimators.resize_rule import Budget, check_bounds

_RULE = "ernie4_5_vl/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_IMAGE_BOUNDS = (56 * 56, 28 * 28 * 6177)
_VIDEO_BOUNDS = (299 * 28 * 28, 1196 * 28 * 28)
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ernie45VLConfig:
    """The numbers that decide sizes. Defaults: the class defaults of transformers.

    Attributes:
        min_pixels, max_pixels: area of a resized image.
        video_min_pixels, video_max_pixels: area of a resized frame.
        patch_px, merge_size: side of a patch, patches per token and side.
        fps, num_frames, min_frames, max_frames: sampling.
        sample_frames: false: all frames.
    """

    min_pixels: int = _IMAGE_BOUNDS[0]
    max_pixels: int = _IMAGE_BOUNDS[1]
    video_min_pixels: int = _VIDEO_BOUNDS[0]
    video_max_pixels: int = _VIDEO_BOUNDS[1]
    patch_px: int = 14
    merge_size: int = 2
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 16
    max_frames: int = 180
    sample_frames: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge_size", "min_frames")
        check_bounds(
            "Ernie45VLConfig",
            pixels=(self.min_pixels, self.max_pixels),
            video_pixels=(self.video_min_pixels, self.video_max_pixels),
            frames=(self.min_frames, self.max_frames),
        )
        if self.fps is not None and not self.fps > 0:
            raise DataError(f"Ernie45VLConfig.fps={self.fps}: must be positive")
        if self.num_frames is not None and not self.min_frames <= self.num_frames <= self.max_frames:
            raise DataError(
                f"Ernie45VLConfig.num_frames={self.num_frames} is not within {self.min_frames} to {self.max_frames}"
            )

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Ernie45VLConfig":
        """From a model folder; keys that are absent or null take the defaults of transformers' classes."""
        image, video = files.image, files.image if files.video is None else files.video
        require_resize(image, video)
        for key in ("min_pixels", "max_pixels"):
            if any(settings.get(key) is not None for settings in (image, video)):
                raise DataError(
                    f"{key}: the processor of transformers passes over it, and the model's remote code obeys it",
                    place=files.place,
                    remedy="Give size: {shortest_edge, longest_edge}.",
                )
        if number(video, "temporal_patch_size", _PAIR) != _PAIR and files.video is not None:
            raise DataError(f"temporal_patch_size={video['temporal_patch_size']}: ERNIE 4.5 VL joins pairs of frames")
        low, high = area_bounds(image, _IMAGE_BOUNDS, pixel_keys=False)
        video_low, video_high = area_bounds(video, _VIDEO_BOUNDS, pixel_keys=False)
        fps, num_frames = sampling_rate(video, 0.0)
        return cls(
            min_pixels=low,
            max_pixels=high,
            video_min_pixels=video_low,
            video_max_pixels=video_high,
            patch_px=number(image, "patch_size", number(video, "patch_size", 14)),
            merge_size=number(image, "merge_size", number(video, "merge_size", 2)),
            fps=fps or None,
            num_frames=num_frames,
            min_frames=number(video, "min_frames", 16),
            max_frames=number(video, "max_frames", 180),
            sample_frames=video.get("do_sample_frames") is not False,
        )


class Ernie45VLEstimator(NativeEstimator):
    """`TokenEstimator` of ERNIE 4.5 VL."""

    def __init__(self, config: Ernie45VLConfig | None = None) -> None:
        self.config = c = config or Ernie45VLConfig()
        self.fingerprint = fingerprint(_RULE, c)
        self.rule = "ERNIE 4.5 VL, processor of transformers 5.24"
        self.image_cells = Cells(patch_px=c.patch_px, merge=c.merge_size, temporal_patch=1)
        self.video_cells = Cells(patch_px=c.patch_px, merge=c.merge_size, temporal_patch=1, merged_frames=_PAIR)
        factor = c.patch_px * c.merge_size
        self.image_budgets = (Budget(factor=factor, min_pixels=c.min_pixels, max_pixels=c.max_pixels),)
        self._frame = Budget(factor=factor, min_pixels=c.video_min_pixels, max_pixels=c.video_max_pixels)

    def video_budgets(self, num_frames: int) -> tuple[Budget, ...]:
        """One resize a frame, whatever their number."""
        return (self._frame,)

    def num_sampled(self, num_frames: int, fps: float, duration_s: float) -> int:
        """An even number of frames.

        Raises:
            UnfitError: `too_few_frames` below `num_frames` of the config.
            MediaError: `too_few_frames` for 0 frames; `corrupt` without a usable rate.
        """
        sampled = self._distinct(num_frames, fps, duration_s)
        return sampled + sampled % _PAIR

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames, ascending, the last one twice where their number would be odd: int64 [num_sampled]."""
        wanted = self._wanted(num_frames, fps, duration_s)
        steps = np.arange(self._distinct(num_frames, fps, duration_s), dtype=np.float64) * (num_frames / wanted)
        taken = np.minimum(steps.astype(np.float32).astype(np.int64), num_frames - 1)
        return np.concatenate([taken, taken[-1:]]) if len(taken) % _PAIR else taken

    def _wanted(self, num_frames: int, fps: float, duration_s: float) -> float:
        """Frames that are asked for; by rate they need not be a whole number."""
        c = self.config
        rate = frame_rate(num_frames, fps, duration_s)
        if not c.sample_frames:
            return num_frames
        if c.num_frames is None:
            return min(
                max(num_frames if c.fps is None else num_frames / rate * c.fps, c.min_frames), c.max_frames, num_frames
            )
        if c.num_frames > num_frames:
            raise too_few_frames(num_frames, c.num_frames)
        return c.num_frames

    def _distinct(self, num_frames: int, fps: float, duration_s: float) -> int:
        return math.ceil(self._wanted(num_frames, fps, duration_s))


def _factory(files: ProcessorFiles) -> TokenEstimator:
    return Ernie45VLEstimator(Ernie45VLConfig.from_files(files))


_KINDS = ("ernie4_5_vl_moe", "ernie4_5_vl", "Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeImageProcessor")
FACTORIES = dict.fromkeys(_KINDS, _factory)
