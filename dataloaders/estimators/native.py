"""What estimators of native-resolution families share: a chain of resizes, a grid of patches, merged squares, texts.

    image   (w, h) --budgets--> (h', w') -> grid (1, h'/p, w'/p) -> patches / merge^2 tokens
    video   n sampled frames, (w, h) --budgets of n frames--> grid (ceil(n / T), h'/p, w'/p) -> likewise, and for each
            temporal position the text that the processor writes before it, and its delimiters

A family says which frames are sampled, with which budgets, and what is written; counts and explanations both follow
from that. The vision towers attend within each temporal position; Qwen2.5-VL also within windows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts, SegmentStats
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators.base import full_segments, temporal_grid, window_segments
from dataloaders.estimators.files import Config, CountText
from dataloaders.estimators.frames import source_rate
from dataloaders.estimators.resize_rule import Budget, Size, resize_all

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_CACHED_TEXTS = 100_000  # timestamps recur from clip to clip; the bound is for tables of clips that last for days

_MOST_FRAMES = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """How a resized picture is cut.

    Attributes:
        patch_px: side of a patch.
        merge: patches per visual token along each side.
        temporal_patch: frames per patch.
        window_px: side of an attention window; 0: none.
        merged_frames: temporal positions per visual token, where a resampler behind the tower joins them.
    """

    patch_px: int
    merge: int
    temporal_patch: int
    window_px: int = 0
    merged_frames: int = 1

    def counts(self, size: Size, num_frames: int = 0, text_tokens: int = 0) -> ItemCounts:
        """Counts of `num_frames` frames (0: an image) resized to `size`, with `text_tokens` written between them."""
        height_px, width_px = size
        positions = temporal_grid(num_frames, self.temporal_patch) if num_frames else 1
        grid = (positions, height_px // self.patch_px, width_px // self.patch_px)
        patches = grid[0] * grid[1] * grid[2]
        visual = patches // (self.merge**2 * self.merged_frames)
        return ItemCounts(
            llm_tokens=visual + text_tokens,
            visual_tokens=visual,
            patches=patches,
            frames=positions * self.temporal_patch if num_frames else 1,
            grid=grid,
            height_px=height_px,
            width_px=width_px,
            full=full_segments(grid),
            window=window_segments(grid, self.window_px // self.patch_px) if self.window_px else SegmentStats(),
        )


class NativeEstimator:
    """`TokenEstimator` over the hooks below; immutable but for a table of texts that it counted; picklable.

    Attributes:
        fingerprint, rule: see `TokenEstimator`.
        image_cells, video_cells: how both kinds of media are cut.
        image_budgets: resizes of an image, in order.
    """

    fingerprint: str
    rule: str
    image_cells: Cells
    video_cells: Cells
    image_budgets: tuple[Budget, ...]
    # Where the processor writes texts between temporal positions, `count_text` counts them; `delimiters` are the tokens
    # that it writes around each position beside its text.
    writes_texts = False
    count_text: CountText
    delimiters = 0

    def video_budgets(self, num_frames: int) -> tuple[Budget, ...]:
        """Resizes of each of `num_frames` sampled frames, in order."""
        raise NotImplementedError

    def num_sampled(self, num_frames: int, fps: float, duration_s: float) -> int:
        """Frames that are sampled. Raises as `frame_indices` does."""
        return len(self.frame_indices(num_frames, fps, duration_s))

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames that are sampled, ascending: int64 [num_sampled]. Raises UnfitError, MediaError."""
        raise NotImplementedError

    def group_texts(self, indices: NDArray[np.int64], fps: float) -> Sequence[str]:
        """The texts that the processor writes, one for each temporal position; none for a family without."""
        return ()

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image: one temporal position."""
        return self.image_cells.counts(resize_all(height_px, width_px, self.image_budgets))

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video; without a usable `fps`, the rate follows from `duration_s`."""
        try:
            indices = self.frame_indices(num_frames, fps, duration_s) if self.writes_texts else None
            sampled = self.num_sampled(num_frames, fps, duration_s) if indices is None else len(indices)
            size = resize_all(height_px, width_px, self.video_budgets(sampled))
        except UnfitError as error:
            if error.reason != Reason.TOO_FEW_FRAMES:
                raise
            error.nearest_frames = self._least_frames(num_frames, fps, duration_s)
            raise
        texts = 0 if indices is None else self._text_tokens(indices, frame_rate(num_frames, fps, duration_s))
        return self.video_cells.counts(size, sampled, texts)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps of the formula with their numbers."""
        counts = self.image(width_px, height_px, num_images=num_images)
        steps = _resizes(height_px, width_px, self.image_budgets)
        return (self.rule, f"image of {width_px}x{height_px} px", *steps, *_totals(counts, self.image_cells))

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps of the formula with their numbers."""
        counts = self.video(width_px, height_px, num_frames, fps, duration_s)
        indices = self.frame_indices(num_frames, fps, duration_s)
        rate = frame_rate(num_frames, fps, duration_s)
        texts = self.group_texts(indices, rate)
        lines = [
            self.rule,
            f"video of {width_px}x{height_px} px, {num_frames} frames at {rate:.6g} per second",
            f"{len(indices)} frames sampled, {self.video_cells.temporal_patch} per patch: "
            f"{counts.grid[0]} temporal positions of {counts.frames} frames",
            *_resizes(height_px, width_px, self.video_budgets(len(indices))),
            *_totals(counts, self.video_cells)[:-1],
        ]
        if texts:
            lines.append(
                f"{len(texts)} texts {texts[0]!r} to {texts[-1]!r} with {self.delimiters} delimiters each: "
                f"{counts.llm_tokens - counts.visual_tokens} tokens"
            )
        return (*lines, f"LLM tokens: {counts.llm_tokens}")

    def _least_frames(self, num_frames: int, fps: float, duration_s: float) -> int | None:
        """The least number above `num_frames` that is enough at this rate; None: there is none."""
        enough, short = num_frames + 1, num_frames
        while not self._takes(enough, fps, duration_s):
            enough, short = 2 * enough, enough
            if enough > _MOST_FRAMES:
                return None
        while enough - short > 1:
            middle = (enough + short) // 2
            enough, short = (middle, short) if self._takes(middle, fps, duration_s) else (enough, middle)
        return enough

    def _takes(self, num_frames: int, fps: float, duration_s: float) -> bool:
        try:
            resize_all(1, 1, self.video_budgets(self.num_sampled(num_frames, fps, duration_s)))
        except UnfitError:
            return False
        return True

    def _text_tokens(self, indices: NDArray[np.int64], fps: float) -> int:
        texts = self.group_texts(indices, fps)
        return sum(map(self._count, texts)) + self.delimiters * len(texts)

    def _count(self, text: str) -> int:
        known: dict[str, int] = self.__dict__.setdefault("_known", {})
        if text not in known:
            if len(known) >= _CACHED_TEXTS:
                known.clear()
            known[text] = self.count_text(text)
        return known[text]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_known"}


class PatchLayout(NativeEstimator):
    """What makes it a `PatchEstimator`: one layout of patches for images and videos, which `dataloaders.decode` cuts.

    Attributes:
        patch_px, merge, temporal_patch, window_px, tokens_per_second, mean, std: see `PatchEstimator`.
    """

    counts_positions = False  # position ids count temporal grid positions, one a position, whatever time they stand for
    patch_px: int
    merge: int
    temporal_patch: int
    window_px: int
    tokens_per_second: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def lay_out(
        self,
        cells: Cells,
        *,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        tokens_per_second: float = 0.0,
    ) -> None:
        """Set the attributes; called once, by the constructor."""
        self.image_cells = self.video_cells = cells
        self.patch_px, self.merge, self.temporal_patch = cells.patch_px, cells.merge, cells.temporal_patch
        self.window_px, self.tokens_per_second = cells.window_px, tokens_per_second
        self.mean, self.std = mean, std

    def seconds_per_grid(self, num_frames: int, fps: float) -> float:
        """temporal_patch / (rate of the sampled frames), as qwen-vl-utils hands it to the model; 1 without a clock."""
        if self.counts_positions:
            return 1.0
        return self.temporal_patch / (self.num_sampled(num_frames, fps, 0.0) / num_frames * fps)


def frame_rate(num_frames: int, fps: float, duration_s: float) -> float:
    """Frames per second. Raises MediaError: `too_few_frames` for no frame, `corrupt` without a usable rate."""
    if num_frames < 1:
        raise MediaError(Reason.TOO_FEW_FRAMES, f"num_frames={num_frames}", remedy="Drop the item.")
    return source_rate(num_frames, fps, duration_s)


def even_positions(num_frames: int, sampled: int) -> NDArray[np.int64]:
    """Evenly spaced from the first to the last frame, rounded half to even: int64 [sampled]."""
    if sampled == 1:
        return np.zeros(1, dtype=np.int64)
    below, rest = np.divmod(np.arange(sampled, dtype=np.int64) * (num_frames - 1), sampled - 1)
    up = (2 * rest > sampled - 1) | ((2 * rest == sampled - 1) & (below % 2 == 1))
    return np.asarray(below + up, dtype=np.int64)


def floored_positions(num_frames: int, sampled: int) -> NDArray[np.int64]:
    """i * num_frames / sampled, cut off, as a torch.arange in float32 gives them: int64 [sampled]."""
    steps = np.arange(sampled, dtype=np.float64) * (num_frames / sampled)
    return np.minimum(steps.astype(np.float32).astype(np.int64), num_frames - 1)


def number(settings: Config, name: str, default: Any = None) -> Any:
    """An option that must be a number; null and absent give the default, as in transformers.

    Raises:
        TypeError: it is something else; `estimator_from_config` tells the user.
    """
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: needs a number")
    return value


def triple(settings: Config, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    """An option of one number a channel."""
    value = settings.get(name)
    if value is None:
        return default
    channels = tuple(float(channel) for channel in value)
    if len(channels) != 3:
        raise DataError(f"{name}={value!r}: needs three numbers")
    return channels[0], channels[1], channels[2]


def area_bounds(settings: Config, default: tuple[int, int], *, pixel_keys: bool) -> tuple[int, int]:
    """(min, max) of an area: `size`'s shortest and longest edge; `min_pixels` and `max_pixels` override them.

    Args:
        pixel_keys: the processor's class knows `min_pixels` and `max_pixels`; the others pass them over.

    Raises:
        DataError: a `size` that lacks one of them, as the processor would raise.
    """
    size = settings.get("size")
    low, high = default if size is None else (None, None)
    if isinstance(size, Mapping):
        low = number(size, "shortest_edge", number(size, "min_pixels"))
        high = number(size, "longest_edge", number(size, "max_pixels"))
    if pixel_keys:
        low, high = number(settings, "min_pixels", low), number(settings, "max_pixels", high)
    if low is None or high is None:
        raise DataError(f"size={size!r}: needs shortest_edge and longest_edge, the areas of the smallest and largest")
    return low, high


def _resizes(height: int, width: int, budgets: tuple[Budget, ...]) -> list[str]:
    lines: list[str] = []
    size = (height, width)
    for budget in budgets:
        lines += budget.steps(*size)
        size = budget.resize(*size)
    return lines


def _totals(counts: ItemCounts, cells: Cells) -> list[str]:
    t, h, w = counts.grid
    joined = f" / {cells.merged_frames}" if cells.merged_frames > 1 else ""
    return [
        f"patches of {cells.patch_px} px: {t} x {h} x {w} = {counts.patches}",
        f"{cells.merge} x {cells.merge} patches are a token: {counts.patches} / {cells.merge**2}{joined} = "
        f"{counts.visual_tokens} visual tokens",
        f"LLM tokens: {counts.llm_tokens}",
    ]
