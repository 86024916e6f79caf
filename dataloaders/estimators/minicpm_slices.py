"""How MiniCPM-V cuts an image into slices: the rule that its versions share.

    (w, h) --ceil(w h / scale^2) slices, one more or one less, at most max_slices--> grid of nearest log aspect ratio
           --the image itself, resized to scale^2 pixels, sides in multiples of `unit`----> overview
           --the image resized so that each cell of the grid has scale^2 pixels, likewise-> slices

An image of at most scale^2 pixels has no slices; its overview is enlarged to scale^2. Sources of the formulas:
`MiniCPMVImageProcessor` of the model folders (2.6) and `MiniCPMV4_6ImageProcessor` of transformers 5.24. They look
through the grids in different orders, which can matter for ties alone, and the only ties between whole-numbered sizes
are between the two directions of one number of slices, where both take more rows.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from dataloaders.estimators.files import Config
from dataloaders.estimators.options import require_positive, size_px

Size = tuple[int, int]


class Slices(NamedTuple):
    """Sizes are (width, height) in pixels.

    Attributes:
        rows, columns: the grid of slices; (0, 0): none.
        overview: size of the resized image.
        slice: size of each slice; (0, 0) without slices.
    """

    rows: int
    columns: int
    overview: Size
    slice: Size

    @property
    def num_slices(self) -> int:
        """Slices, the overview left out."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRule:
    """The numbers that decide how an image is cut.

    Attributes:
        max_slices: most slices, the overview left out.
        scale_px: side of a square with as many pixels as a slice has.
        unit_px: resized sides are multiples of it.
        enabled: whether there are slices at all.
    """

    max_slices: int
    scale_px: int
    unit_px: int
    enabled: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "max_slices", "scale_px", "unit_px")

    def cut(self, width: int, height: int) -> Slices:
        """The slices of an image of this size; width, height >= 1."""
        rows, columns = self._grid(width, height) if self.enabled else (0, 0)
        if not rows:
            return Slices(0, 0, self._resized(width, height), (0, 0))
        # A side is first rounded to a multiple of its number of slices, so that all slices are equal.
        refined_width, refined_height = _multiple(width, columns), _multiple(height, rows)
        return Slices(
            rows, columns, self._resized(width, height), self._resized(refined_width / columns, refined_height / rows)
        )

    def _grid(self, width: int, height: int) -> Size:
        """(rows, columns); (0, 0): too small to be cut."""
        most = min(math.ceil(width * height / (self.scale_px * self.scale_px)), self.max_slices)
        if most <= 1:
            return 0, 0
        log_ratio, best, least = math.log(width / height), (1, 1), math.inf
        for rows, columns, log_grid in _grids(most, self.max_slices):
            error = abs(log_ratio - log_grid)
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, columns), error
        return best

    def _resized(self, width: float, height: float) -> Size:
        ratio = width / height
        new_height = int(self.scale_px / math.sqrt(ratio))
        return _multiple(int(new_height * ratio), self.unit_px), _multiple(new_height, self.unit_px)


@cache
def _grids(most: int, max_slices: int) -> tuple[tuple[int, int, float], ...]:
    """(rows, columns, log aspect ratio) of all grids of `most` slices, one more or one less; never of one slice."""
    counts = range(max(most - 1, 2), min(most + 1, max_slices) + 1)
    pairs = [(rows, count // rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
    return tuple((rows, columns, math.log(columns / rows)) for rows, columns in pairs)


def _multiple(length: int, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def given(options: Config, **names: str) -> dict[str, Any]:
    """Those of `names` (ours = theirs) that the options have and that are not null."""
    return {ours: options[theirs] for ours, theirs in names.items() if options.get(theirs) is not None}


def slice_options(options: Config) -> dict[str, Any]:
    """The keywords of a configuration that decide slices: `max_slices`, `scale_px`, `slice_mode`, `patch_px`."""
    found = given(
        options,
        max_slices="max_slice_nums",
        scale_px="scale_resolution",
        slice_mode="slice_mode",
        patch_px="patch_size",
    )
    if "patch_px" in found:
        found["patch_px"] = size_px(found["patch_px"], "patch_size")[0]
    return found
