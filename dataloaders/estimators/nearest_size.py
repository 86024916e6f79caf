"""The size nearest to one that a processor fails on: the shorter side is enlarged until the processor takes it.

    1 x 4000, taken from an aspect ratio of 768 down  ->  6 x 4000

Failures here are failures of shape (a side that is resized to nothing), so a square always fits, and whatever fits
keeps fitting when its shorter side grows. What comes back has been tried, so it works even where that does not hold.
"""

from collections.abc import Callable

from dataloaders.errors import Reason, UnfitError


def unfit_size(width_px: int, height_px: int, cause: str, fits: Callable[[int, int], bool]) -> UnfitError:
    """The error of a size that does not fit, with the nearest one that does.

    Args:
        cause: why a shape fails, for people; a side below 1 px is named by itself.
        fits: whether a size of positive sides is taken.
    """
    small = min(width_px, height_px) < 1
    return UnfitError(
        Reason.TOO_SMALL if small else Reason.EXTREME_ASPECT,
        f"{width_px}x{height_px} px: {'a side is below 1 px' if small else cause}",
        remedy="Enlarge or drop the item." if small else "Crop or drop the item.",
        nearest_size_px=_nearest(max(width_px, 1), max(height_px, 1), fits),
    )


def _nearest(width_px: int, height_px: int, fits: Callable[[int, int], bool]) -> tuple[int, int] | None:
    short, long = sorted((width_px, height_px))
    if fits(width_px, height_px):
        return width_px, height_px

    def sized(short_px: int) -> tuple[int, int]:
        return (short_px, long) if width_px < height_px else (long, short_px)

    fails, works = short, long
    while works - fails > 1:
        middle = (fails + works) // 2
        fails, works = (fails, middle) if fits(*sized(middle)) else (middle, works)
    return sized(works) if fits(*sized(works)) else None
