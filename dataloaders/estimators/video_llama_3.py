"""VideoLLaMA 3: native resolution; images keep every patch of 14 px, frames merge 2 x 2; a text before each frame.

Image:  smart_resize to multiples of 14 within [min, max] -> h/14 * w/14 tokens
Video:  frames sampled at `fps` (1 per second, at most 180, where the folder does not say) -> each resized within
        [min, max // n] to multiples of 28 -> "Time 1.0s:" h * w / 4 tokens "," ...
Tokens: sum over frames of text + h * w / 4

`use_token_compression` drops the tokens of a frame that looks like the one before it. That depends on pixels, so counts
are those without it: exact where it is off, an upper bound where it is on (the rule says which).

Sources: `VideoLlama3ImageProcessor`, `VideoLlama3VideoProcessor` and `VideoLlama3Processor` of transformers 5.24, which
hands over every frame where `do_sample_frames` is false. That is its class default, and then callers give a rate; so an
explicit `preprocessing="transformers"` follows it, and otherwise frames are sampled.

The reference table of this project counts patches / 4 tokens for an image under options that say `merge_size` 1. The
processor does not: `replace_image_token` writes prod(grid) / merge_size^2, with the class default 1 every patch, and
`VideoLlama3Model` splits the output of its tower by the same `image_merge_sizes`. A grid of 6 x 13 patches (180x90 px,
78 patches, 19 tokens in the table) could not be merged in squares of 2. With `merge_size` 2 in the file, it is / 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.estimators.files import CountText, ProcessorFiles
from dataloaders.estimators.frames import too_few_frames
from dataloaders.estimators.native import Cells, NativeEstimator, area_bounds, floored_positions, frame_rate, number
from dataloaders.estimators.options import fingerprint, require_positive, require_resize
from dataloaders.estimators.qwen2_vl import sampling_rate
from dataloaders.estimators.resize_rule import Budget, check_bounds
from dataloaders.estimators.text import ROUGH, count_text_roughly

_RULE = "video_llama_3/1"  # raise it whenever a count or a frame index changes for some input
_IMAGE_BOUNDS = (56 * 56, 28 * 28 * 1280)
_VIDEO_BOUNDS = (128 * 28 * 28, 768 * 28 * 28)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLlama3Config:
    """The numbers that decide sizes. Defaults: the class defaults of transformers, and one frame per second.

    Attributes:
        min_pixels, max_pixels: area of a resized image.
        patch_px: side of a patch.
        merge_size, video_merge_size: patches per token and side, of images and of frames.
        video_min_pixels, video_max_pixels: least area of a frame, and most of all frames.
        fps, min_frames, max_frames, num_frames: sampling.
        sample_frames: false: all frames.
        use_token_compression: the counts are an upper bound.
    """

    min_pixels: int = _IMAGE_BOUNDS[0]
    max_pixels: int = _IMAGE_BOUNDS[1]
    patch_px: int = 14
    merge_size: int = 1
    video_merge_size: int = 2
    video_min_pixels: int = _VIDEO_BOUNDS[0]
    video_max_pixels: int = _VIDEO_BOUNDS[1]
    fps: float = 1.0
    min_frames: int = 4
    max_frames: int = 180
    num_frames: int | None = None
    sample_frames: bool = True
    use_token_compression: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge_size", "video_merge_size", "fps", "min_frames", "max_frames")
        check_bounds(
            "VideoLlama3Config",
            pixels=(self.min_pixels, self.max_pixels),
            video_pixels=(self.video_min_pixels, self.video_max_pixels),
        )
        if self.num_frames is not None and self.num_frames < 1:
            raise DataError(f"VideoLlama3Config.num_frames={self.num_frames}: must be positive")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "VideoLlama3Config":
        """From a model folder; keys that are absent or null take the defaults of transformers' classes."""
        image, video = files.image, files.image if files.video is None else files.video
        require_resize(image, video)
        low, high = area_bounds(image, _IMAGE_BOUNDS, pixel_keys=True)
        video_low, video_high = area_bounds(video, _VIDEO_BOUNDS, pixel_keys=True)
        fps, num_frames = sampling_rate(video, 1.0)
        patch_px = number(image, "patch_size", number(video, "patch_size", 14))
        if number(video, "patch_size", patch_px) != patch_px:
            raise DataError(f"patch_size={patch_px} for images and {video['patch_size']} for videos: one vision tower")
        if number(video, "temporal_patch_size", 1) != 1:
            raise DataError(
                f"temporal_patch_size={video['temporal_patch_size']}: the processor writes tokens frame by frame"
            )
        return cls(
            min_pixels=low,
            max_pixels=high,
            patch_px=patch_px,
            merge_size=number(image, "merge_size", 1),
            video_merge_size=number(video, "merge_size", 2),
            video_min_pixels=video_low,
            video_max_pixels=video_high,
            fps=fps,
            min_frames=number(video, "min_frames", 4),
            max_frames=number(video, "max_frames", 180),
            num_frames=num_frames,
            sample_frames=files.preprocessing is None or video.get("do_sample_frames") is not False,
            use_token_compression=video.get("use_token_compression") is not False,
        )


class VideoLlama3Estimator(NativeEstimator):
    """`TokenEstimator` of VideoLLaMA 3; no `PatchEstimator`, as images and videos merge patches differently."""

    writes_texts = True

    def __init__(
        self,
        config: VideoLlama3Config | None = None,
        *,
        count_text: CountText = count_text_roughly,
        text_rule: str = ROUGH,
    ) -> None:
        self.config = c = config or VideoLlama3Config()
        self.count_text = count_text
        self.fingerprint = fingerprint(_RULE, c, text_rule)
        bound = ", an upper bound for videos (use_token_compression)" if c.use_token_compression else ""
        self.rule = f"VideoLLaMA 3, processor of transformers 5.24, texts counted by {text_rule}{bound}"
        self.image_cells = Cells(patch_px=c.patch_px, merge=c.merge_size, temporal_patch=1)
        self.video_cells = Cells(patch_px=c.patch_px, merge=c.video_merge_size, temporal_patch=1)
        self.image_budgets = (
            Budget(factor=c.patch_px * c.merge_size, min_pixels=c.min_pixels, max_pixels=c.max_pixels),
        )

    def video_budgets(self, num_frames: int) -> tuple[Budget, ...]:
        """One resize a frame, within its share of the area of all. Raises UnfitError where that is no pixel."""
        c = self.config
        most = c.video_max_pixels // num_frames
        if most < 1:
            raise UnfitError(Reason.TOO_LARGE, f"{num_frames} frames share {c.video_max_pixels} px", remedy="Drop it.")
        return (Budget(factor=c.patch_px * c.video_merge_size, min_pixels=c.video_min_pixels, max_pixels=most),)

    def num_sampled(self, num_frames: int, fps: float, duration_s: float) -> int:
        """Frames that are sampled.

        Raises:
            UnfitError: `too_few_frames` for fewer than `num_frames` of the config.
            MediaError: `too_few_frames` for 0 frames; `corrupt` without a usable rate.
        """
        c = self.config
        rate = frame_rate(num_frames, fps, duration_s)
        if not c.sample_frames:
            return num_frames
        if c.num_frames is None:
            wanted = num_frames / rate * c.fps
            return math.floor(min(max(wanted, c.min_frames), c.max_frames, num_frames))
        if c.num_frames > num_frames:
            raise too_few_frames(num_frames, c.num_frames)
        return c.num_frames

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames, ascending: int64 [num_sampled]. Raises as `num_sampled` does."""
        return floored_positions(num_frames, self.num_sampled(num_frames, fps, duration_s))

    def group_texts(self, indices: NDArray[np.int64], fps: float) -> Sequence[str]:
        """One text a frame; the commas between them stand at the front of the next."""
        times = [f"Time {frame / fps:.1f}s:" for frame in indices.tolist()]
        return times[:1] + [f",{time}" for time in times[1:]]


def _factory(files: ProcessorFiles) -> TokenEstimator:
    config = VideoLlama3Config.from_files(files)
    return VideoLlama3Estimator(config, count_text=files.count_text, text_rule=files.text_rule)


FACTORIES = dict.fromkeys(("video_llama_3", "VideoLlama3Processor", "VideoLlama3ImageProcessor"), _factory)
