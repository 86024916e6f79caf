"""Media that qwen-vl-utils 0.0.14 prepares before the processor of Qwen2-VL, Qwen2.5-VL or Qwen3-VL sees them.

    image   (w, h) --fetch_image: 4 to 16,384 tokens--> processor
    video   n = floor_2(clamp(num_frames / fps * 2, 4, min(768, num_frames))) --fetch_video: 128 to 768 tokens a frame,
            and an even share of 90 % of 128,000 tokens--> processor, which takes all n frames

The processor resizes once more, by its own bounds. With the published ones of Qwen2-VL and Qwen2.5-VL that changes
nothing; Qwen3-VL's grow an image to 64 tokens. Videos of Qwen3-VL are the exception: their processor is told not to
(`do_resize=False`), as its published usage says, since it bounds all frames together; it gets the positions of the
frames, from which it writes timestamps. Numbers that a message may carry (`max_pixels` beside an image, `fps` beside a
video) are fields of the config here.

Sources: `fetch_image`, `smart_nframes`, `fetch_video` of qwen-vl-utils 0.0.14. Frame positions are exact, half to even;
theirs round a float32 `linspace` whose value depends on the CPU, so single positions differ by one source frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators.base import MediaLimits
from dataloaders.estimators.native import PatchLayout, even_positions, frame_rate
from dataloaders.estimators.options import fingerprint, require_positive
from dataloaders.estimators.resize_rule import Budget

_RULE = "qwen_vl_utils/1"
_FRAME_FACTOR = 2
_MERGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVLUtilsConfig:
    """Constants of qwen-vl-utils 0.0.14.

    Attributes:
        image_min_tokens, image_max_tokens: of an image, in squares of 2 x 2 patches.
        frame_min_tokens, frame_max_tokens: of a frame.
        total_tokens: of all frames of a video, before the share of 90 %.
        fps, min_frames, max_frames: sampling.
        num_frames: this many frames of every video instead; None: by rate.
    """

    image_min_tokens: int = 4
    image_max_tokens: int = 16_384
    frame_min_tokens: int = 128
    frame_max_tokens: int = 768
    total_tokens: int = 128_000
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    num_frames: int | None = None

    def __post_init__(self) -> None:
        require_positive(self, "image_min_tokens", "frame_min_tokens", "total_tokens", "fps", "min_frames")
        for low, high in (("image_min_tokens", "image_max_tokens"), ("frame_min_tokens", "frame_max_tokens")):
            if getattr(self, low) > getattr(self, high):
                raise DataError(f"QwenVLUtilsConfig.{low}={getattr(self, low)} exceeds {high}={getattr(self, high)}")
        if self.max_frames < max(self.min_frames, _FRAME_FACTOR):
            raise DataError(f"QwenVLUtilsConfig.max_frames={self.max_frames} is below min_frames={self.min_frames}")
        if self.num_frames is not None and round(self.num_frames / _FRAME_FACTOR) < 1:
            raise DataError(f"QwenVLUtilsConfig.num_frames={self.num_frames} rounds to no pair of frames")


class QwenVLUtilsEstimator(PatchLayout):
    """`PatchEstimator`: qwen-vl-utils in front of the estimator of a processor.

    Args:
        inner: the processor's.
        resizes_videos: the processor resizes videos again.
    """

    def __init__(
        self, inner: PatchLayout, config: QwenVLUtilsConfig | None = None, *, resizes_videos: bool = True
    ) -> None:
        if inner.merge != _MERGE and not resizes_videos:
            raise DataError(
                f"merge_size={inner.merge}: qwen-vl-utils resizes to squares of {_MERGE} x {_MERGE} patches"
            )
        self.inner, self.config, self.resizes_videos = inner, config or QwenVLUtilsConfig(), resizes_videos
        self.fingerprint = fingerprint(f"{_RULE} {inner.fingerprint} {resizes_videos}", self.config)
        self.rule = f"qwen-vl-utils 0.0.14, then {inner.rule.split(', frames sampled')[0]}"
        self.lay_out(inner.image_cells, mean=inner.mean, std=inner.std, tokens_per_second=inner.tokens_per_second)
        self._factor = inner.patch_px * _MERGE
        first = self._budget(self.config.image_min_tokens, self.config.image_max_tokens * self._factor**2)
        self.image_budgets = (first, *inner.image_budgets)
        self.counts_positions = inner.counts_positions
        self.writes_texts, self.delimiters = inner.writes_texts, inner.delimiters
        if inner.writes_texts:
            self.count_text = inner.count_text

    def video_budgets(self, num_frames: int) -> tuple[Budget, ...]:
        """Of `fetch_video`, then of the processor."""
        c, cell = self.config, self._factor**2
        share = c.total_tokens * cell * 0.9 / num_frames * _FRAME_FACTOR
        most = max(min(c.frame_max_tokens * cell, share), int(c.frame_min_tokens * cell * 1.05))
        first = self._budget(c.frame_min_tokens, most)
        return (first, *(self.inner.video_budgets(num_frames) if self.resizes_videos else ()))

    def num_sampled(self, num_frames: int, fps: float, duration_s: float) -> int:
        """`smart_nframes`: an even number. Raises UnfitError: `too_few_frames` below 2 or `num_frames`."""
        c = self.config
        rate = frame_rate(num_frames, fps, duration_s)
        if c.num_frames is not None:
            sampled = needed = round(c.num_frames / _FRAME_FACTOR) * _FRAME_FACTOR
        else:
            needed = _FRAME_FACTOR
            least = math.ceil(c.min_frames / _FRAME_FACTOR) * _FRAME_FACTOR
            most = math.floor(min(c.max_frames, num_frames) / _FRAME_FACTOR) * _FRAME_FACTOR
            sampled = math.floor(min(max(num_frames / rate * c.fps, least), most) / _FRAME_FACTOR) * _FRAME_FACTOR
        if not _FRAME_FACTOR <= sampled <= num_frames:
            raise UnfitError(
                Reason.TOO_FEW_FRAMES,
                f"{num_frames} frames, where qwen-vl-utils needs at least {needed}",
                remedy="Drop the item, or repeat its frames.",
                nearest_frames=needed,
            )
        return sampled

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Evenly spaced from the first to the last frame: int64 [num_sampled]. Raises as `num_sampled` does."""
        return even_positions(num_frames, self.num_sampled(num_frames, fps, duration_s))

    @property
    def min_video_frames(self) -> int | None:
        """A pair, and `min_frames` where frames are sampled by rate."""
        c = self.config
        least = _FRAME_FACTOR if c.num_frames is not None else max(c.min_frames, _FRAME_FACTOR)
        return -(-least // _FRAME_FACTOR) * _FRAME_FACTOR

    def shrunk(self, limits: MediaLimits) -> Self:
        """The estimator under `limits`, see `ShrinkableEstimator`; areas are cut to whole tokens."""
        c, cell, changed = self.config, self._factor**2, dict[str, int]()
        if limits.image_pixels is not None:
            tokens = limits.image_pixels // cell
            changed["image_max_tokens"] = max(c.image_min_tokens, min(c.image_max_tokens, tokens))
        if limits.frame_pixels is not None:
            tokens = limits.frame_pixels // cell
            changed["frame_max_tokens"] = max(c.frame_min_tokens, min(c.frame_max_tokens, tokens))
        least = self.min_video_frames
        if limits.video_frames is not None and least is not None:
            most = max(least, limits.video_frames)
            name = "max_frames" if c.num_frames is None else "num_frames"
            changed[name] = min(c.max_frames if c.num_frames is None else c.num_frames, most)
        return type(self)(self.inner, replace(c, **changed), resizes_videos=self.resizes_videos)

    def group_texts(self, indices: NDArray[np.int64], fps: float) -> Sequence[str]:
        """As the processor writes them for these frames."""
        return self.inner.group_texts(indices, fps)

    def _budget(self, min_tokens: int, max_pixels: float) -> Budget:
        return Budget(
            factor=self._factor,
            min_pixels=min_tokens * self._factor**2,
            max_pixels=max_pixels,
            rule="qwen_vl_utils",
        )
