"""Frames that a transformers video processor takes evenly from a clip.

    n = num_frames, or max(1, int(N / rate * fps)), or all N frames where the configuration names neither
    frame i = i * N // n                    the first of each n-th part
            = (2 * i + 1) * N // (2 * n)    the middle of each n-th part (InternVL)

Source: `default_sample_indices_fn`, `BaseVideoProcessor`, `InternVLVideoProcessor` of transformers 5.24. They fail on a
clip of fewer than n frames. A processor samples only where it is told to, so one whose configuration says nothing takes
every frame. InternVL's positions are exact here; there they are float32 sums that depend on the CPU: single positions
may differ by one source frame, the counts never.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators.files import Config

# A header that states another rate is damaged; times computed from one would overflow.
_SLOWEST_PER_S, _FASTEST_PER_S = 1e-6, 1e6


def too_few_frames(num_frames: int, needed: int) -> UnfitError:
    """The error for a clip of fewer frames than a processor asks for."""
    return UnfitError(
        Reason.TOO_FEW_FRAMES,
        f"{num_frames} frames, where the processor needs at least {needed}",
        remedy="Drop the item, or repeat its frames.",
        nearest_frames=max(needed, num_frames + 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """How many frames are taken, and where.

    Attributes:
        num_frames: this many.
        fps: or so many a second.
        middle: the middle of each part, and no frame at all where `fps` gives none (InternVL).
    """

    num_frames: int | None = None
    fps: float | None = None
    middle: bool = False

    def __post_init__(self) -> None:
        for name, value in (("num_frames", self.num_frames), ("fps", self.fps)):
            if value is not None and not value > 0:
                raise DataError(f"{name}={value!r}: must be positive")

    @classmethod
    def from_video(
        cls, video: Config | None, *, num_frames: int | None = None, middle: bool = False
    ) -> "FrameSampling":
        """From a video processor's options; `num_frames`: of its class, where it samples by itself.

        Raises:
            DataError: both `num_frames` and `fps`, which the processor refuses (InternVL takes the first).
        """
        video = video or {}
        if video.get("do_sample_frames") is False:
            return cls(middle=middle)
        count, fps = video.get("num_frames"), video.get("fps")
        count = num_frames if count is None else count
        if count is not None and fps is not None:
            if not middle:
                raise DataError(f"num_frames={count} and fps={fps}: the processor takes one", remedy="Remove one.")
            fps = None
        return cls(num_frames=count, fps=fps, middle=middle)

    def count(self, num_frames: int, fps: float, duration_s: float) -> int:
        """Frames taken of a clip.

        Raises:
            UnfitError: `too_few_frames`.
            MediaError: `corrupt` where the rate is needed and unknown.
        """
        wanted, helps = self.num_frames or 1, True
        if num_frames >= 1 and self.num_frames is None:
            if self.fps is None:
                return num_frames
            helps = False  # more frames at the same rate want more again
            wanted = int(num_frames / source_rate(num_frames, fps, duration_s) * self.fps)
            wanted = wanted if self.middle else max(1, wanted)
        if 1 <= wanted <= num_frames:
            return wanted
        raise UnfitError(
            Reason.TOO_FEW_FRAMES,
            f"{num_frames} frames where the processor takes {wanted}",
            remedy="Drop the item, or repeat its last frame.",
            nearest_frames=wanted if helps and self._takes(wanted, fps, duration_s) else None,
        )

    def _takes(self, num_frames: int, fps: float, duration_s: float) -> bool:
        if self.num_frames is not None or self.fps is None:
            return True
        known = usable_rate(num_frames, fps, duration_s)
        return known and int(num_frames / source_rate(num_frames, fps, duration_s) * self.fps) <= num_frames

    def indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames that are taken, ascending: int64 [n]. Raises as `count` does."""
        count = self.count(num_frames, fps, duration_s)
        taken = np.arange(count, dtype=np.int64)
        if self.middle and not (self.num_frames is None and self.fps is None):
            return (2 * taken + 1) * num_frames // (2 * count)
        return taken * num_frames // count


def usable_duration(num_frames: int, duration_s: float) -> bool:
    """Whether `num_frames` in this time is a rate that a clip can have."""
    return duration_s > 0 and _SLOWEST_PER_S <= num_frames / duration_s <= _FASTEST_PER_S


def usable_rate(num_frames: int, fps: float, duration_s: float) -> bool:
    """Whether `source_rate` would have an answer."""
    return _SLOWEST_PER_S <= fps <= _FASTEST_PER_S or usable_duration(num_frames, duration_s)


def source_rate(num_frames: int, fps: float, duration_s: float) -> float:
    """Frames a second of a clip; `duration_s` serves where `fps` is unknown or absurd.

    Raises:
        MediaError: `corrupt` without a usable rate.
    """
    if _SLOWEST_PER_S <= fps <= _FASTEST_PER_S:
        return fps
    if usable_duration(num_frames, duration_s):
        return num_frames / duration_s
    raise MediaError(
        Reason.CORRUPT, f"fps={fps}, duration_s={duration_s}: no usable frame rate", remedy="Drop the item."
    )
