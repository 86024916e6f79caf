"""Qwen3-VL and Qwen3.5: native resolution in cells of 32 px; a budget for the whole video; a timestamp a position.

Image:  as Qwen2-VL, factor 32, bounds of the folder
Video:  n = clamp(int(num_frames / fps * 2), 4, 768, num_frames) frames -> one resize within bounds of n * h * w
        -> for each of ceil(n / 2) positions: "<12.3 seconds>" <|vision_start|> h * w / 4 tokens <|vision_end|>
Tokens: sum over positions of text + 2 + h * w / 4

The resize needs at least `temporal_patch` frames. `cap_pixels_per_frame` (null and false alike in transformers 5.24, to
become true later) lowers the upper bound to n * max(min(768 cells, max / n), 1.05 * min). The time of a position is the
mean of its first and last frame. Without video settings the processor reads the image settings in their place.

Sources: `Qwen2VLImageProcessor`, `Qwen3VLVideoProcessor` and `Qwen3VLProcessor` of transformers 5.24. The processor
takes a clip without a rate for one of 24 frames per second; here the rate follows from the duration.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.estimators.files import CountText, ProcessorFiles
from dataloaders.estimators.native import (
    CLIP_MEAN,
    CLIP_STD,
    Cells,
    PatchLayout,
    area_bounds,
    frame_rate,
    number,
    triple,
)
from dataloaders.estimators.options import fingerprint, require_positive, require_resize, vision_config
from dataloaders.estimators.qwen2_vl import cell_sizes, sampling_rate
from dataloaders.estimators.qwen_vl_utils import QwenVLUtilsEstimator
from dataloaders.estimators.resize_rule import Budget, check_bounds
from dataloaders.estimators.text import ROUGH, count_text_roughly

_RULE = "qwen3_vl/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig:
    """The numbers that decide sizes and pixels. Defaults: the class defaults of transformers.

    Attributes:
        min_pixels, max_pixels: area of a resized image.
        patch_px, merge_size, temporal_patch: side of a patch, patches per token and side, frames per patch.
        video_min_pixels, video_max_pixels: area of all resized frames.
        fps, min_frames, max_frames: sampling; no rate: as many frames as there are, within the bounds.
        num_frames: this many frames of every video instead.
        sample_frames: false: all frames.
        cap_pixels_per_frame, max_video_tokens: the cap on a frame, and its tokens.
        mean, std: normalisation of pixels in 0..1.
    """

    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    patch_px: int = 16
    merge_size: int = 2
    temporal_patch: int = 2
    video_min_pixels: int = 128 * 32 * 32
    video_max_pixels: int = 768 * 32 * 32
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int | None = None
    sample_frames: bool = True
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge_size", "temporal_patch", "fps", "max_frames", "max_video_tokens")
        check_bounds(
            "Qwen3VLConfig",
            pixels=(self.min_pixels, self.max_pixels),
            video_pixels=(self.video_min_pixels, self.video_max_pixels),
        )
        if self.num_frames is not None and self.num_frames < self.temporal_patch:
            raise DataError(f"Qwen3VLConfig.num_frames={self.num_frames} is below temporal_patch={self.temporal_patch}")
        if not min(self.std) > 0:
            raise DataError(f"Qwen3VLConfig.std={self.std}: must be above 0")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Qwen3VLConfig":
        """From a model folder; keys that are absent or null take the defaults of transformers' classes."""
        image, video = files.image, files.image if files.video is None else files.video
        require_resize(image, video)
        low, high = area_bounds(image, (56 * 56, 28 * 28 * 1280), pixel_keys=True)
        video_low, video_high = area_bounds(video, (128 * 32 * 32, 768 * 32 * 32), pixel_keys=False)
        fps, num_frames = sampling_rate(video, 2.0)
        return cls(
            min_pixels=low,
            max_pixels=high,
            **cell_sizes(image, video, vision_config(files), patch_px=16),
            video_min_pixels=video_low,
            video_max_pixels=video_high,
            fps=fps,
            min_frames=number(video, "min_frames", 4),
            max_frames=number(video, "max_frames", 768),
            num_frames=num_frames,
            sample_frames=video.get("do_sample_frames") is not False,
            cap_pixels_per_frame=bool(video.get("cap_pixels_per_frame")),
            max_video_tokens=number(video, "max_video_tokens", 768),
            mean=triple(image, "image_mean", CLIP_MEAN),
            std=triple(image, "image_std", CLIP_STD),
        )


class Qwen3VLEstimator(PatchLayout):
    """`PatchEstimator` of Qwen3-VL: no windows; time is told by texts, so `tokens_per_second` is 0."""

    writes_texts = True
    delimiters = 2

    def __init__(
        self,
        config: Qwen3VLConfig | None = None,
        *,
        count_text: CountText = count_text_roughly,
        text_rule: str = ROUGH,
    ) -> None:
        self.config = c = config or Qwen3VLConfig()
        self.count_text = count_text
        self.fingerprint = fingerprint(_RULE, c, text_rule)
        self.rule = f"Qwen3-VL, processor of transformers 5.24, texts counted by {text_rule}"
        cells = Cells(patch_px=c.patch_px, merge=c.merge_size, temporal_patch=c.temporal_patch)
        self.lay_out(cells, mean=c.mean, std=c.std)
        self._factor = c.patch_px * c.merge_size
        self.image_budgets = (Budget(factor=self._factor, min_pixels=c.min_pixels, max_pixels=c.max_pixels),)

    def video_budgets(self, num_frames: int) -> tuple[Budget, ...]:
        """One resize, which bounds the area of all frames."""
        c = self.config
        most = c.video_max_pixels
        if c.cap_pixels_per_frame:
            cap = min(c.max_video_tokens * self._factor**2, c.video_max_pixels // num_frames)
            most = max(cap, int(c.video_min_pixels * 1.05)) * num_frames
        return (
            Budget(
                factor=self._factor,
                min_pixels=c.video_min_pixels,
                max_pixels=most,
                rule="volume",
                num_frames=num_frames,
                temporal_factor=c.temporal_patch,
            ),
        )

    def num_sampled(self, num_frames: int, fps: float, duration_s: float) -> int:
        """Frames that are sampled; a number that the temporal patch does not divide is padded later.

        Raises:
            MediaError: `too_few_frames` for 0 frames; `corrupt` without a usable rate.
        """
        c = self.config
        rate = frame_rate(num_frames, fps, duration_s)
        if not c.sample_frames:
            return num_frames
        if c.num_frames is not None:
            return c.num_frames
        return min(max(int(num_frames / rate * c.fps), c.min_frames), c.max_frames, num_frames)

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Evenly spaced from the first to the last frame: int64 [num_sampled]; repeated where there are fewer."""
        sampled = self.num_sampled(num_frames, fps, duration_s)
        return np.linspace(0, num_frames - 1, sampled).round().astype(np.int64)

    def group_texts(self, indices: NDArray[np.int64], fps: float) -> Sequence[str]:
        """Timestamps of temporal positions."""
        step = self.temporal_patch
        frames: list[int] = indices.tolist()
        frames += frames[-1:] * (-len(frames) % step)
        return [
            f"<{(frames[start] / fps + frames[start + step - 1] / fps) / 2:.1f} seconds>"
            for start in range(0, len(frames), step)
        ]


def _factory(files: ProcessorFiles) -> TokenEstimator:
    config = Qwen3VLConfig.from_files(files)
    inner = Qwen3VLEstimator(config, count_text=files.count_text, text_rule=files.text_rule)
    return QwenVLUtilsEstimator(inner, resizes_videos=False) if files.preprocessing == "qwen_vl_utils" else inner


_MODELS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp")
FACTORIES = dict.fromkeys((*_MODELS, "Qwen3VLProcessor", "Qwen3VLVideoProcessor"), _factory)
