"""GLM-4.1V, GLM-4.5V (glm4v, glm4v_moe) and GLM-4.6V (glm46v): bounds on the volume of pixels; a time per position.

Image:  one temporal patch of frames * h * w within the bounds -> grid (1, h/14, w/14) -> h * w / 4 tokens
Video:  frames sampled by rate, duplicates dropped, the last repeated to an even number -> one resize of the volume
        -> for each temporal position: <|begin_of_image|> h * w / 4 tokens <|end_of_image|> text

              sampling                                                         text after a position
    GLM-4.1V  2 per second up to 300 s; above, 600 over the whole clip         "12"
    GLM-4.6V  6, 2 or 1 per second for up to 30 s, 300 s, longer; at most 640  "12.5 seconds"

The text is the time of every second sampled frame, whatever the temporal patch is. GLM-4.6V takes no frame of a clip
that is shorter than 1/6 s, and then fails. A side below 28 px is scaled up before its ratio is judged.

Sources: `Glm4vImageProcessor`, `Glm4vVideoProcessor`, `Glm4vProcessor`, `Glm46VVideoProcessor` and `Glm46VProcessor` of
transformers 5.24. They know no `min_pixels` and `max_pixels`, and pass over `num_frames`. Their helper for numbers of
tokens leaves the texts and delimiters out; the prompt has them, and so have the counts here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.estimators.files import CountText, ProcessorFiles
from dataloaders.estimators.frames import usable_duration
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
from dataloaders.estimators.qwen2_vl import cell_sizes
from dataloaders.estimators.resize_rule import Budget, check_bounds
from dataloaders.estimators.text import ROUGH, count_text_roughly

_MOST_FRAMES_46 = 640  # GLM-4.6V
_LONGEST_46_S = 2400


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4vConfig:
    """The numbers that decide sizes and pixels. Defaults: the class defaults of transformers.

    Attributes:
        min_pixels, max_pixels: temporal_patch times the area of a resized image.
        patch_px, merge_size, temporal_patch: side of a patch, patches per token and side, frames per patch.
        video_min_pixels, video_max_pixels: area of all resized frames.
        fps, max_duration_s: sampling in GLM-4.1V.
        sample_frames: false: all frames.
        mean, std: normalisation of pixels in 0..1.
    """

    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 15_000
    patch_px: int = 14
    merge_size: int = 2
    temporal_patch: int = 2
    video_min_pixels: int = 112 * 112
    video_max_pixels: int = 28 * 28 * 2 * 30_000
    fps: float = 2.0
    max_duration_s: float = 300
    sample_frames: bool = True
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "merge_size", "temporal_patch", "fps", "max_duration_s")
        check_bounds(
            "Glm4vConfig",
            pixels=(self.min_pixels, self.max_pixels),
            video_pixels=(self.video_min_pixels, self.video_max_pixels),
        )
        if not min(self.std) > 0:
            raise DataError(f"Glm4vConfig.std={self.std}: must be above 0")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Glm4vConfig":
        """From a model folder; keys that are absent or null take the defaults of transformers' classes."""
        image, video = files.image, files.image if files.video is None else files.video
        require_resize(image, video)
        low, high = area_bounds(image, (112 * 112, 28 * 28 * 15_000), pixel_keys=False)
        video_low, video_high = area_bounds(video, (112 * 112, 28 * 28 * 2 * 30_000), pixel_keys=False)
        return cls(
            min_pixels=low,
            max_pixels=high,
            **cell_sizes(image, video, vision_config(files), patch_px=14),
            video_min_pixels=video_low,
            video_max_pixels=video_high,
            fps=number(video, "fps", 2.0),
            max_duration_s=number(video, "max_duration", 300),
            sample_frames=video.get("do_sample_frames") is not False,
            mean=triple(image, "image_mean", CLIP_MEAN),
            std=triple(image, "image_std", CLIP_STD),
        )


class Glm4vEstimator(PatchLayout):
    """`PatchEstimator` of GLM-4.1V and GLM-4.5V: no windows; time is told by texts, so `tokens_per_second` is 0."""

    rule_id = "glm4v/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
    family = "GLM-4.1V"
    writes_texts = True
    delimiters = 2

    def __init__(
        self,
        config: Glm4vConfig | None = None,
        *,
        count_text: CountText = count_text_roughly,
        text_rule: str = ROUGH,
    ) -> None:
        self.config = c = config or Glm4vConfig()
        self.count_text = count_text
        self.fingerprint = fingerprint(self.rule_id, c, text_rule)
        self.rule = f"{self.family}, processor of transformers 5.24, texts counted by {text_rule}"
        cells = Cells(patch_px=c.patch_px, merge=c.merge_size, temporal_patch=c.temporal_patch)
        self.lay_out(cells, mean=c.mean, std=c.std)
        self.image_budgets = (self._budget(c.temporal_patch, c.min_pixels, c.max_pixels),)

    def video_budgets(self, num_frames: int) -> tuple[Budget, ...]:
        """One resize, which bounds the area of all frames."""
        return (self._budget(num_frames, self.config.video_min_pixels, self.config.video_max_pixels),)

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames, ascending, the last one twice where their number would be odd: int64 [num_sampled].

        Raises:
            UnfitError: `too_few_frames` for a clip so short that no frame is taken.
            MediaError: `too_few_frames` for 0 frames; `corrupt` without a usable rate.
        """
        rate = frame_rate(num_frames, fps, duration_s)
        if not self.config.sample_frames:
            return np.arange(num_frames, dtype=np.int64)
        known = usable_duration(num_frames, duration_s)
        wanted = self._wanted(num_frames, rate, duration_s if known else round((num_frames - 1) / rate) + 1)
        taken = list(dict.fromkeys(wanted))
        return np.array(taken + taken[-1:] * (len(taken) % 2), dtype=np.int64)

    def group_texts(self, indices: NDArray[np.int64], fps: float) -> Sequence[str]:
        """Times of temporal positions: of every second frame; the last time serves those that are left."""
        times = [frame / fps for frame in indices.tolist()[::2]]
        positions = -(-len(indices) // self.temporal_patch)
        times = times[:positions] + times[-1:] * (positions - len(times))
        return [self._text(time) for time in times]

    def _wanted(self, num_frames: int, rate: float, duration_s: float) -> list[int]:
        """Frames in the order they are asked for, duplicates included."""
        c, last = self.config, num_frames - 1
        if duration_s <= c.max_duration_s:
            asked = max(math.floor(duration_s * c.fps), 1)
            return [min(last, math.ceil(index * rate / c.fps)) for index in range(asked)]
        asked = int(c.max_duration_s * c.fps)
        if asked >= num_frames:
            return list(range(num_frames))
        return [min(last, math.ceil(time * rate)) for time in np.linspace(0, duration_s, asked).tolist()]

    def _text(self, time_s: float) -> str:
        return str(int(time_s))

    def _budget(self, num_frames: int, min_pixels: int, max_pixels: int) -> Budget:
        c = self.config
        return Budget(
            factor=c.patch_px * c.merge_size,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            rule="volume",
            num_frames=num_frames,
            temporal_factor=c.temporal_patch,
        )


class Glm46VEstimator(Glm4vEstimator):
    """`PatchEstimator` of GLM-4.6V."""

    rule_id = "glm46v/1"
    family = "GLM-4.6V"

    def _wanted(self, num_frames: int, rate: float, duration_s: float) -> list[int]:
        step = self.temporal_patch
        asked, per_second = _asked(duration_s, step)
        if asked < 1:
            # A clip that repeats frames to become long enough may still state its old duration.
            duration_s = num_frames / rate
            asked, per_second = _asked(duration_s, step)
        if asked < 1:
            needed = math.floor(rate / (per_second * step)) + 2
            raise UnfitError(
                Reason.TOO_FEW_FRAMES,
                f"{num_frames} frames in {duration_s:.3g} s, of which the processor takes none",
                remedy="Drop the item, or repeat its frames.",
                nearest_frames=needed,
            )
        if num_frames < asked:
            return _whole_linspace(0, num_frames - 1, asked)
        taken = _first_after(num_frames, 1 / rate, 1 / (step * per_second), int(duration_s), asked + 1)
        if len(taken) < asked:
            return _whole_linspace(taken[0], taken[-1], asked)
        return taken if len(taken) == asked else _whole_linspace(0, num_frames - 1, asked)

    def _text(self, time_s: float) -> str:
        return f"{time_s:.1f} seconds"


def _asked(duration_s: float, temporal_patch: int) -> tuple[int, float]:
    """(frames, pairs per second) that GLM-4.6V asks of a clip."""
    effective = min(duration_s, _LONGEST_46_S)
    per_second = 3 if effective <= 30 else 1 if effective <= 300 else 0.5
    return min(int(effective * per_second * temporal_patch), _MOST_FRAMES_46), per_second


def _first_after(num_frames: int, frame_s: float, step_s: float, until_s: int, most: int) -> list[int]:
    """The first frame at or after each multiple of `step_s`, at most one multiple a frame, until `until_s` is reached.

    No more than `most`: a clip with more is sampled evenly, whatever they are.
    Sums and products of floats as the processor forms them, so that frames on a boundary fall on the same side.
    """
    taken: list[int] = []
    frame, due = 0, 0.0
    while True:
        frame = max(frame, math.ceil(due / frame_s) - 2)
        while frame < num_frames and frame * frame_s < due:
            frame += 1
        if frame >= num_frames:
            return taken
        taken.append(frame)
        frame, due = frame + 1, due + step_s
        if due >= until_s or len(taken) == most:
            return taken


def _whole_linspace(first: int, last: int, count: int) -> list[int]:
    found: list[int] = np.linspace(first, last, count, dtype=int).tolist()
    return found


def _glm4v(files: ProcessorFiles) -> TokenEstimator:
    return Glm4vEstimator(Glm4vConfig.from_files(files), count_text=files.count_text, text_rule=files.text_rule)


def _glm46v(files: ProcessorFiles) -> TokenEstimator:
    return Glm46VEstimator(Glm4vConfig.from_files(files), count_text=files.count_text, text_rule=files.text_rule)


FACTORIES = {
    **dict.fromkeys(("glm4v", "glm4v_moe", "Glm4vProcessor", "Glm4vVideoProcessor", "Glm4vImageProcessor"), _glm4v),
    **dict.fromkeys(("glm46v", "Glm46VProcessor", "Glm46VVideoProcessor", "Glm46VImageProcessor"), _glm46v),
}
