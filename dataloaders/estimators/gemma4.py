"""Gemma 4: the image is resized, up or down, to the most pixels that a budget of tokens allows; frames likewise.

    (w, h) -> sqrt(budget / (w * h)) -> sides down to multiples of f = pooling * patch = 48 px, at least one f
    budget: soft tokens * f * f pixels (280 an image, 70 a frame)
    image   rows * columns visual + 2 delimiters
    video   for each of 32 frames "mm:ss " + the same, joined by spaces

Sources: `Gemma4Processor`, `Gemma4ImageProcessor`, `Gemma4VideoProcessor` of transformers 5.24. Patches are those of
the image; the processor always pads them to the budget, and the tower masks that (`padded_patches`). A clip of fewer
frames than are sampled fails there.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import full_segments
from dataloaders.estimators.files import Config, CountText, ProcessorFiles
from dataloaders.estimators.frames import FrameSampling, source_rate
from dataloaders.estimators.options import check_sides, fingerprint, require_positive, require_resize, side

_RULE = "gemma4/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_DELIMITERS = 2
_BUDGETS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Budget:
    """What an image, or a frame, is resized to.

    Attributes:
        patch_px: side of a patch.
        pooling: patches per visual token along each side.
        soft_tokens: the most visual tokens.
    """

    patch_px: int = 16
    pooling: int = 3
    soft_tokens: int = 280

    def __post_init__(self) -> None:
        require_positive(self, "patch_px", "pooling")
        if self.soft_tokens not in _BUDGETS:
            raise DataError(f"max_soft_tokens={self.soft_tokens!r}: use one of {_BUDGETS}")

    @classmethod
    def from_settings(cls, settings: Config, *, soft_tokens: int) -> "Gemma4Budget":
        """From the options of an image or a video processor."""
        require_resize(settings)
        return cls(
            patch_px=side(settings.get("patch_size") or 16, "patch_size"),
            pooling=settings.get("pooling_kernel_size") or 3,
            soft_tokens=settings.get("max_soft_tokens") or soft_tokens,
        )

    def tokens(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(rows, columns) of visual tokens."""
        unit = self.pooling * self.patch_px
        factor = math.sqrt(self.soft_tokens * self.pooling**2 * self.patch_px**2 / (height_px * width_px))
        rows, columns = math.floor(factor * height_px / unit), math.floor(factor * width_px / unit)
        if rows == 0:
            return 1, min(width_px // height_px, self.soft_tokens)
        if columns == 0:
            return min(height_px // width_px, self.soft_tokens), 1
        return rows, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    """The numbers that decide sizes and frames. Defaults: those of transformers' classes."""

    image: Gemma4Budget = field(default_factory=Gemma4Budget)
    frame: Gemma4Budget = field(default_factory=lambda: Gemma4Budget(soft_tokens=70))
    sampling: FrameSampling = field(default_factory=lambda: FrameSampling(num_frames=32))

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Gemma4Config":
        """From the options of the image and the video processor."""
        return cls(
            image=Gemma4Budget.from_settings(files.image, soft_tokens=280),
            frame=Gemma4Budget.from_settings(files.video or {}, soft_tokens=70),
            sampling=FrameSampling.from_video(files.video, num_frames=32),
        )


class Gemma4Estimator:
    """`TokenEstimator` of Gemma 4; immutable, picklable."""

    def __init__(self, config: Gemma4Config, count_text: CountText, text_rule: str) -> None:
        self.config = config
        self.rule = f"Gemma 4, transformers 5.24 processor, timestamps counted by {text_rule}"
        self.fingerprint = fingerprint(_RULE, config, text_rule)
        self._count_text = count_text

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        check_sides(width_px, height_px)
        return self._counts(self.config.image, width_px, height_px, 1, _DELIMITERS)

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video: each frame with its time."""
        check_sides(width_px, height_px)
        frames = len(self.frame_indices(num_frames, fps, duration_s))
        written = self._timestamp_tokens(num_frames, fps, duration_s) + _DELIMITERS * frames
        return self._counts(self.config.frame, width_px, height_px, frames, written)

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames that are taken: int64 [n]."""
        source_rate(max(num_frames, 1), fps, duration_s)  # times are written, so it must be known
        return self.config.sampling.indices(num_frames, fps, duration_s)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.image(width_px, height_px)
        return (
            self._resized(counts, width_px, height_px),
            f"grid {counts.grid[1]} x {counts.grid[2]} = {counts.patches} patches, padded to {counts.padded_patches}",
            f"{counts.visual_tokens} visual + {_DELIMITERS} delimiters = {counts.llm_tokens} LLM tokens",
        )

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.video(width_px, height_px, num_frames, fps, duration_s)
        return (
            f"{num_frames} frames -> {counts.frames} sampled",
            self._resized(counts, width_px, height_px),
            f"grid {counts.grid[1]} x {counts.grid[2]} each = {counts.patches} patches",
            f"{self._timestamp_tokens(num_frames, fps, duration_s)} tokens of timestamps, "
            f"{_DELIMITERS * counts.frames} delimiters",
            f"{counts.visual_tokens} visual + these = {counts.llm_tokens} LLM tokens",
        )

    def _resized(self, counts: ItemCounts, width_px: int, height_px: int) -> str:
        return f"{width_px}x{height_px} px -> {counts.width_px}x{counts.height_px} px"

    def _timestamp_tokens(self, num_frames: int, fps: float, duration_s: float) -> int:
        # A timestamp is between two delimiters, so each is counted by itself, with the spaces around it.
        rate = source_rate(num_frames, fps, duration_s)
        total = 0
        for number, index in enumerate(self.frame_indices(num_frames, fps, duration_s).tolist()):
            seconds = index / rate
            text = f"{int(seconds // 60):02d}:{int(seconds % 60):02d} "
            total += self._count_text(text if number == 0 else " " + text)
        return total

    def _counts(self, budget: Gemma4Budget, width_px: int, height_px: int, frames: int, written: int) -> ItemCounts:
        rows, columns = budget.tokens(width_px, height_px)
        grid = (frames, rows * budget.pooling, columns * budget.pooling)
        visual = frames * rows * columns
        return ItemCounts(
            llm_tokens=visual + written,
            visual_tokens=visual,
            patches=visual * budget.pooling**2,
            padded_patches=frames * budget.soft_tokens * budget.pooling**2,
            frames=frames,
            grid=grid,
            height_px=grid[1] * budget.patch_px,
            width_px=grid[2] * budget.patch_px,
            full=full_segments(grid),
        )


def _factory(files: ProcessorFiles) -> Gemma4Estimator:
    return Gemma4Estimator(Gemma4Config.from_files(files), files.count_text, files.text_rule)


FACTORIES = dict.fromkeys(("gemma4", "Gemma4Processor", "Gemma4ImageProcessor"), _factory)
