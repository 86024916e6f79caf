"""SmolVLM and SmolVLM2: images as in Idefics3; a video is one tile per sampled frame, with its time before it.

    images: see `idefics3`
    video:  n = clamp(round(seconds * 1 fps), 1, 64) frames, evenly spaced, within one second of both ends if it is long
            --each scaled to one square tile--> 81 tokens and 3 delimiters
    You are provided the following series of ten frames from a 0:00:10 [H:MM:SS] video.\\n
    \\nFrame from 00:01:<fake><global-img><image>*81<fake>   ...per frame...   \\n\\n

The texts are counted by the tokenizer, each up to the next special token; the last line end alone, whatever follows.

Sources of the formulas: `SmolVLMImageProcessor`, `SmolVLMVideoProcessor` and `SmolVLMProcessor` of transformers 5.24,
called through the chat template, which samples wherever the options say how many frames (`video_sampling`, or
`num_frames` and `fps`). Where they do not, all frames are taken.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import Config, CountText, ProcessorFiles
from dataloaders.estimators.frames import source_rate, usable_rate
from dataloaders.estimators.idefics3 import TileConfig, TileRule, tile_side
from dataloaders.estimators.options import (
    check_sides,
    fingerprint,
    require_positive,
    require_resize,
)

_RULE = "smolvlm/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_MOST_SECONDS = 1e9  # thirty years; the processor fails on what its clock cannot show
_SKIP_S = 1  # seconds that are left out at both ends of a long clip

_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_SMALL = tuple(f"zero one two three four five six seven eight nine {_TEENS}".split(" "))
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolVLMConfig:
    """Images, and how videos are sampled.

    Attributes:
        image: tiles of an image; `tokens` and `patch_px` serve for frames too.
        frame_px: side of the tile that a frame becomes.
        max_frames, video_fps: frames at most, frames per second; None: all frames are taken.
    """

    image: TileConfig
    frame_px: int = 364
    max_frames: int | None = None
    video_fps: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "frame_px")
        if (self.max_frames is None) != (self.video_fps is None):
            raise DataError(
                f"SmolVLMConfig: max_frames={self.max_frames}, video_fps={self.video_fps}: both are needed",
                remedy="Give num_frames and fps, or neither.",
            )
        if self.max_frames is not None:
            require_positive(self, "max_frames", "video_fps")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "SmolVLMConfig":
        """From the files of a model folder; without those of a video processor it is made from the image's."""
        video: Config = files.image if files.video is None else files.video
        require_resize(video)
        sampling: Config = video.get("video_sampling") or {}
        found: dict[str, Any] = {
            "max_frames": sampling.get("max_frames", video.get("num_frames")),
            "video_fps": sampling.get("fps", video.get("fps")),
        }
        return cls(image=TileConfig.from_files(files), frame_px=tile_side(video), **found)


class SmolVLMEstimator:
    """`TokenEstimator` of SmolVLM and SmolVLM2; immutable, cheap to copy."""

    def __init__(self, config: SmolVLMConfig, count_text: CountText, text_rule: str) -> None:
        self.config = config
        self.rule = f"SmolVLM, transformers 5.24 processor, texts counted by {text_rule}"
        self.fingerprint = fingerprint(_RULE, config, text_rule)
        self._tiles = TileRule(config.image, count_text)
        self._count_text = count_text

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        return self._tiles.counts(width_px, height_px)

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video; `tiles` are its frames, `grid` is (frames, h, w) in patches."""
        check_sides(width_px, height_px)
        c = self.config
        indices = self.frame_indices(num_frames, fps, duration_s)
        frames = len(indices)
        per_side = c.frame_px // c.image.patch_px
        texts = sum(map(self._count_text, self._texts(indices, num_frames, fps, duration_s)))
        return ItemCounts(
            llm_tokens=frames * (c.image.tokens + self._tiles.delimiters(0, 0)) + texts,
            visual_tokens=frames * c.image.tokens,
            patches=frames * per_side * per_side,
            tiles=frames,
            frames=frames,
            grid=(frames, per_side, per_side),
            height_px=c.frame_px,
            width_px=c.frame_px,
            full=equal_segments(frames, per_side * per_side),
        )

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Evenly spaced, rounded down, without repeats: int64 [n].

        Raises:
            UnfitError: `too_few_frames` for a video without a frame.
        """
        if num_frames < 1:
            known = usable_rate(1, fps, duration_s) and not duration_s > _MOST_SECONDS
            raise UnfitError(
                Reason.TOO_FEW_FRAMES,
                "the video has no frame",
                remedy="Drop the item.",
                nearest_frames=1 if known else None,
            )
        c = self.config
        if c.max_frames is None or c.video_fps is None:
            return np.arange(num_frames, dtype=np.int64)
        rate, seconds = source_rate(num_frames, fps, duration_s), _seconds(num_frames, fps, duration_s)
        wanted = max(min(round(c.video_fps * seconds), c.max_frames), 1)
        start, end = 0, num_frames - 1
        if seconds - 2 * _SKIP_S > c.max_frames * c.video_fps:
            start, end = max(0, int(_SKIP_S * rate)), min(int(num_frames - _SKIP_S * rate), end)
            if start >= end:
                start, end = 0, num_frames - 1
        return np.unique(np.linspace(start, end, wanted, dtype=np.int64))

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        return self._tiles.explain(width_px, height_px)

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.video(width_px, height_px, num_frames, fps, duration_s)
        delimiters = self._tiles.delimiters(0, 0)
        texts = counts.llm_tokens - counts.frames * (c.image.tokens + delimiters)
        bounds = f"{c.video_fps:g} per second, at most {c.max_frames}" if c.max_frames else "all"
        return (
            f"{counts.frames} of {num_frames} frames ({bounds})",
            f"each one tile of {c.frame_px} px; patches: {counts.frames} x ({c.frame_px} // {c.image.patch_px})^2"
            f" = {counts.patches}",
            f"texts (introduction, {counts.frames} times, end): {texts}",
            f"LLM tokens: {counts.frames} x ({c.image.tokens} + {delimiters}) + {texts} = {counts.llm_tokens}",
        )

    def _texts(self, indices: NDArray[np.int64], num_frames: int, fps: float, duration_s: float) -> list[str]:
        """The texts between special tokens: the introduction goes with the first frame's time."""
        rate = source_rate(num_frames, fps, duration_s)
        clock = timedelta(seconds=int(_seconds(num_frames, fps, duration_s)))
        times = [index / rate for index in indices.tolist()]
        texts = [f"\nFrame from {int(at // 60):02d}:{int(at % 60):02d}:" for at in times]
        intro = (
            f"You are provided the following series of {number_in_words(len(times))} frames "
            f"from a {clock} [H:MM:SS] video.\n"
        )
        return [intro + texts[0], *texts[1:], "\n\n"]


def number_in_words(number: int) -> str:
    """A number below a million in English, as the processor writes it: 123 is "one hundred and twenty-three"."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        return _TENS[number // 10 - 2] + (f"-{_SMALL[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    words, rest = f"{number_in_words(number // unit)} {name}", number % unit
    if not rest:
        return words
    return f"{words}{' and' if rest < 100 else ','} {number_in_words(rest)}"


def _seconds(num_frames: int, fps: float, duration_s: float) -> float:
    known = math.isfinite(duration_s) and duration_s > 0
    seconds = duration_s if known else num_frames / source_rate(num_frames, fps, duration_s)
    if seconds > _MOST_SECONDS:
        raise MediaError(Reason.CORRUPT, f"a video of {seconds:g} s", remedy="Drop the item.")
    return seconds


def _factory(files: ProcessorFiles) -> SmolVLMEstimator:
    return SmolVLMEstimator(SmolVLMConfig.from_files(files), files.count_text, files.text_rule)


FACTORIES = {"smolvlm": _factory, "SmolVLMProcessor": _factory, "SmolVLMImageProcessor": _factory}
