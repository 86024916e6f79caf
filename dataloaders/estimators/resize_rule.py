"""The resize rule of Qwen-VL, GLM-V and their relatives: sides become multiples of a factor, the area keeps to bounds.

    (h, w) --round each side--> multiples of factor --area above max: shrink, floor | below min: grow, ceil--> (h', w')

Four variants, told apart by what they do to thin pictures and to clips:
    transformers   the rule as it stands; bounds hold for one picture or frame
    qwen_vl_utils  each side is at least one factor before the area is looked at
    paddleocr      a picture with a side below one factor is first scaled up, sides rounded
    volume         likewise, sides cut off; the bounds hold for frames * h * w

Sources: `smart_resize` of the image and video processors in transformers 5.24, and of qwen-vl-utils 0.0.14. All refuse
a side that is more than 200 times the other. One deviation: qwen-vl-utils returns a side of 0 px for a narrow picture
under a small budget, which no library can resize to; here a side is at least one factor, so such a picture may exceed
the upper bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators.frames import too_few_frames

_MAX_ASPECT = 200

ResizeRule: TypeAlias = Literal["transformers", "qwen_vl_utils", "paddleocr", "volume"]
Size: TypeAlias = tuple[int, int]  # (height, width), as the processors order them


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One resize: the factor and the bounds of the area.

    Attributes:
        factor: resized sides are multiples of it, in pixels.
        min_pixels, max_pixels: bounds of h * w; of frames * h * w under the rule `volume`.
        rule: see the module.
        num_frames, temporal_factor: frames of the clip and frames per patch, under the rule `volume`.
    """

    factor: int
    min_pixels: float
    max_pixels: float
    rule: ResizeRule = "transformers"
    num_frames: int = 1
    temporal_factor: int = 1

    def resize(self, height: int, width: int) -> Size:
        """(height, width) after the resize.

        Raises:
            UnfitError: `extreme_aspect`, `too_small` for a side below 1 px, `too_few_frames` below `temporal_factor`.
        """
        if self.num_frames < self.temporal_factor:
            raise too_few_frames(self.num_frames, self.temporal_factor)
        scaled_height, scaled_width = scaled = self._scaled(height, width)
        new_height, new_width = self._rounded(scaled)
        frames, factor = self._bounded_frames(), self.factor
        if frames * new_height * new_width > self.max_pixels:
            beta = math.sqrt((self.num_frames * scaled_height * scaled_width) / self.max_pixels)
            new_height = max(factor, math.floor(scaled_height / beta / factor) * factor)
            new_width = max(factor, math.floor(scaled_width / beta / factor) * factor)
        elif frames * new_height * new_width < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (self.num_frames * scaled_height * scaled_width))
            new_height = math.ceil(scaled_height * beta / factor) * factor
            new_width = math.ceil(scaled_width * beta / factor) * factor
        return max(new_height, factor), max(new_width, factor)

    def steps(self, height: int, width: int) -> tuple[str, ...]:
        """The same as lines of text."""
        size = self.resize(height, width)
        scaled = self._scaled(height, width)
        rounded = self._rounded(scaled)
        frames = self._bounded_frames()
        area = frames * rounded[0] * rounded[1]
        lines = [] if scaled == (height, width) else [f"a side below {self.factor} px: scaled up to {_text(scaled)}"]
        lines.append(f"sides to the nearest multiples of {self.factor} px: {_text(rounded)}")
        product = f"{frames} x {rounded[1]} x {rounded[0]}" if self.rule == "volume" else f"{rounded[1]} x {rounded[0]}"
        if area > self.max_pixels:
            change = f"above the {self.max_pixels:.12g} allowed: shrunk to {_text(size)}"
        elif area < self.min_pixels:
            change = f"below the {self.min_pixels:.12g} required: grown to {_text(size)}"
        else:
            change = f"within {self.min_pixels:.12g} to {self.max_pixels:.12g}: kept"
        lines.append(f"{product} = {area} px, {change}")
        return tuple(lines)

    def _bounded_frames(self) -> int:
        # The frames are rounded, half to even, where the area is compared, and not where it is scaled.
        return round(self.num_frames / self.temporal_factor) * self.temporal_factor if self.rule == "volume" else 1

    def _rounded(self, size: Size) -> Size:
        factor = self.factor
        height, width = round(size[0] / factor) * factor, round(size[1] / factor) * factor
        if self.rule == "qwen_vl_utils":
            return max(factor, height), max(factor, width)
        return height, width

    def _scaled(self, height: int, width: int) -> Size:
        """The size before rounding, checked."""
        if min(height, width) < 1:
            raise UnfitError(
                Reason.TOO_SMALL,
                f"{width}x{height} px: a side is below 1 px",
                remedy="Drop the item.",
                nearest_size_px=nearest_size(max(width, 1), max(height, 1), self.fits),
            )
        scaled = _enlarged(height, width, self.factor, self.rule)
        if _too_thin(scaled):
            raise UnfitError(
                Reason.EXTREME_ASPECT,
                f"{width}x{height} px: one side is more than {_MAX_ASPECT} times the other",
                remedy="Crop or drop the item.",
                nearest_size_px=nearest_size(width, height, self.fits),
            )
        return scaled

    def fits(self, width: int, height: int) -> bool:
        """Whether a size of at least 1 x 1 px is accepted."""
        return not _too_thin(_enlarged(height, width, self.factor, self.rule))


def smart_resize(
    height: int, width: int, factor: int, min_pixels: float, max_pixels: float, *, rule: ResizeRule = "transformers"
) -> Size:
    """(height, width) nearest to the given one, in multiples of `factor`, with an area within the bounds.

    `round` is Python's, half to even: 70 px with factor 28 gives 56. Each side is at least `factor`; an extreme shape
    may therefore exceed `max_pixels`.

    Raises:
        UnfitError: `extreme_aspect` when one side is more than 200 times the other; `too_small` for a side below 1 px.
    """
    return Budget(factor=factor, min_pixels=min_pixels, max_pixels=max_pixels, rule=rule).resize(height, width)


def resize_all(height: int, width: int, budgets: tuple[Budget, ...]) -> Size:
    """The resizes one after the other. Raises UnfitError as they do, with the nearest size that passes them all."""
    if len(budgets) == 1:
        return budgets[0].resize(height, width)
    try:
        return _chained(height, width, budgets)
    except UnfitError as error:
        if error.nearest_size_px is None:
            raise
        raise UnfitError(
            error.reason,
            f"{width}x{height} px: {error.cause}" if error.reason == Reason.EXTREME_ASPECT else error.cause,
            remedy=error.remedy,
            nearest_size_px=nearest_size(max(width, 1), max(height, 1), lambda w, h: _passes(h, w, budgets)),
        ) from error


def nearest_size(width: int, height: int, fits: Callable[[int, int], bool]) -> tuple[int, int]:
    """(width, height) that fits, near the given one: the short side grows, as that moves a side the least."""
    longer = max(width, height)
    short = max(min(width, height), -(-longer // _MAX_ASPECT))
    while short < longer and not fits(*_oriented(short, longer, width < height)):
        short = min(longer, short + max(1, short // 64))
    return _oriented(short, longer, width < height)


def _oriented(short: int, longer: int, portrait: bool) -> tuple[int, int]:
    return (short, longer) if portrait else (longer, short)


def check_bounds(owner: str, **bounds: tuple[float, float]) -> None:
    """Raises DataError unless each pair is positive and ascending."""
    for name, (low, high) in bounds.items():
        if not low > 0:
            raise DataError(f"{owner}.{name}: the minimum {low!r} must be positive")
        if low > high:
            raise DataError(f"{owner}.{name}: the minimum {low} exceeds the maximum {high}")


def _chained(height: int, width: int, budgets: tuple[Budget, ...]) -> Size:
    size = (height, width)
    for budget in budgets:
        size = budget.resize(*size)
    return size


def _passes(height: int, width: int, budgets: tuple[Budget, ...]) -> bool:
    try:
        _chained(height, width, budgets)
    except UnfitError:
        return False
    return True


def _enlarged(height: int, width: int, factor: int, rule: ResizeRule) -> Size:
    if height >= factor and width >= factor:
        return height, width
    if rule == "volume":
        scale = max(factor / height, factor / width)
        return int(height * scale), int(width * scale)
    if rule == "paddleocr":
        if height < factor:
            height, width = factor, round((width * factor) / height)
        if width < factor:
            height, width = round((height * factor) / width), factor
    return height, width


def _too_thin(size: Size) -> bool:
    return max(size) / min(size) > _MAX_ASPECT


def _text(size: Size) -> str:
    return f"{size[1]}x{size[0]} px"
