"""What an estimator is: the exact processor's arithmetic as pure functions of sizes, one object per configuration.

    header (w, h | frames, fps, duration) --TokenEstimator--> ItemCounts(llm_tokens, patches, tiles, segments)

`PatchEstimator` adds what the decoder needs to lay out patches, so what is estimated is what is decoded (law 6).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts, SegmentStats


@runtime_checkable
class TokenEstimator(Protocol):
    """Counts of one media item, from its header and one exact processor configuration.

    Attributes:
        fingerprint: hex digest of the configuration and of the rule's version; it keys the index.
        rule: the rule in words that a person can check: family, version of the processor it imitates.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def rule(self) -> str: ...

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image of this display size in a sample of `num_images` images.

        Raises:
            UnfitError: the processor would fail on it.
        """
        ...

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video of this display size.

        Raises:
            UnfitError: the processor would fail on it.
            MediaError: `unsupported_media` where the processor takes no videos.
        """
        ...

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames that are sampled, ascending, before temporal padding: int64 [n]. Raises as `video` does."""
        ...

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps of the formula with their numbers, one line each; the last gives the LLM tokens."""
        ...

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The same for a video."""
        ...


@runtime_checkable
class PatchEstimator(TokenEstimator, Protocol):
    """An estimator whose patches `dataloaders.decode` can lay out: native resolution, merged squares of patches.

    Attributes:
        patch_px: side of a patch.
        merge: patches per visual token along each side.
        temporal_patch: frames per patch.
        window_px: side of an attention window (0: the family has none).
        tokens_per_second: temporal positions per second of video, for position ids (0: time is not encoded).
        mean, std: per-channel normalisation of pixels in 0..1.
    """

    @property
    def patch_px(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def temporal_patch(self) -> int: ...
    @property
    def window_px(self) -> int: ...
    @property
    def tokens_per_second(self) -> float: ...
    @property
    def mean(self) -> tuple[float, float, float]: ...
    @property
    def std(self) -> tuple[float, float, float]: ...

    def seconds_per_grid(self, num_frames: int, fps: float) -> float:
        """Seconds between consecutive temporal grid positions of the sampled video."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Upper bounds put on top of a processor's own, so that a sample fits; None: no other bound.

    Attributes:
        image_pixels: area of a resized image, in pixels.
        video_frames: sampled frames of a video.
        frame_pixels: area of a resized frame, in pixels.
    """

    image_pixels: int | None = None
    video_frames: int | None = None
    frame_pixels: int | None = None


@runtime_checkable
class ShrinkableEstimator(PatchEstimator, Protocol):
    """An estimator that can be told to give less, by the processor's own rule with other numbers.

    Attributes:
        min_video_frames: frames of a video that it cannot go below; None: their number cannot be limited.
    """

    @property
    def min_video_frames(self) -> int | None: ...

    def shrunk(self, limits: MediaLimits) -> Self:
        """The estimator under `limits`; a bound below the processor's own minimum is raised to it."""
        ...


def temporal_grid(num_frames: int, temporal_patch: int) -> int:
    """Temporal positions: ceil(num_frames / temporal_patch); the last frame is repeated to fill the last one."""
    return -(-num_frames // temporal_patch)


def equal_segments(count: int, length: int) -> SegmentStats:
    """`count` segments of `length` patches each: full attention within each tile or temporal position."""
    return SegmentStats(count=count, total=count * length, total_sq=count * length * length, longest=length)


def full_segments(grid: tuple[int, int, int]) -> SegmentStats:
    """Full attention within each temporal position: t segments of h * w patches."""
    return equal_segments(grid[0], grid[1] * grid[2])


def segments_of(lengths: Sequence[int]) -> SegmentStats:
    """Segments of these lengths, for tiles that differ in size."""
    return SegmentStats(
        count=len(lengths),
        total=sum(lengths),
        total_sq=sum(length * length for length in lengths),
        longest=max(lengths, default=0),
    )


def window_segments(grid: tuple[int, int, int], window: int) -> SegmentStats:
    """Window attention: each temporal position is cut into windows of `window` x `window` patches, ragged at the edges.

    Worked example: grid (1, 10, 8), window 8: segments of 8*8 and 2*8 patches: count 2, total 80, total_sq 4352.
    """
    grid_t, grid_h, grid_w = grid
    heights, widths = _cuts(grid_h, window), _cuts(grid_w, window)
    # A window's length is height * width, so sums over all windows are products of sums over both axes.
    return SegmentStats(
        count=grid_t * len(heights) * len(widths),
        total=grid_t * grid_h * grid_w,
        total_sq=grid_t * sum(h * h for h in heights) * sum(w * w for w in widths),
        longest=max(heights) * max(widths),
    )


def _cuts(length: int, window: int) -> list[int]:
    full, rest = divmod(length, window)
    return [window] * full + [rest] * (rest > 0)
