"""Grids of tiles, and the one whose aspect ratio is nearest to an image's: the rule of InternVL, Phi-4 and LFM2-VL.

    every grid (columns, rows) with min <= columns * rows <= max:  |w / h - columns / rows|  -> the least
    several grids equally near:  in order of their area, a later one wins while the image has more than half its pixels

Worked example, tiles of 448 px, at most 12: of 640x480 px (1.333) the grid 4 x 3 is nearest. Of 500x500 px all squares
are equally near: 1 x 1, since 2 x 2 tiles have 802,816 px, and 250,000 are not more than half of them.
"""

from bisect import bisect_left
from collections.abc import Sequence

Grid = tuple[int, int]  # (columns, rows)


def grids(min_tiles: int, max_tiles: int, *, remote_code: bool = False) -> tuple[Grid, ...]:
    """(columns, rows) of all grids with an allowed number of tiles, the smallest first.

    Grids of equal area keep the order of the code that is imitated: by columns, or that of a Python set.
    """
    fits = [
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if columns * rows >= min_tiles
    ]
    if remote_code:  # the remote code sorts a set that it fills by the larger side first
        fits = list({grid for n in range(1, max_tiles + 1) for grid in fits if n >= min_tiles and max(grid) <= n})
    return tuple(sorted(fits, key=lambda grid: grid[0] * grid[1]))


class NearestRatio:
    """The rule for one list of grids and one tile; immutable, picklable.

    Args:
        shapes: the grids; their order decides ties. There must be one.
        tile_area_px: pixels of a tile.
    """

    def __init__(self, shapes: Sequence[Grid], tile_area_px: int) -> None:
        self._by_ratio: dict[float, list[tuple[int, Grid, float]]] = {}
        for place, (columns, rows) in enumerate(shapes):
            half_px = 0.5 * tile_area_px * columns * rows
            self._by_ratio.setdefault(columns / rows, []).append((place, (columns, rows), half_px))
        self._ratios = sorted(self._by_ratio)

    def nearest(self, width_px: int, height_px: int) -> Grid:
        """(columns, rows) for an image of this size."""
        ratio = width_px / height_px
        above = bisect_left(self._ratios, ratio)
        near = self._ratios[max(above - 1, 0) : above + 1]
        if len(near) == 2:
            below_by, above_by = ratio - near[0], near[1] - ratio
            if below_by != above_by:
                near = near[:1] if below_by < above_by else near[1:]
        equal = self._by_ratio[near[0]]
        if len(near) == 2:  # one is as far below as the other is above
            equal = sorted(equal + self._by_ratio[near[1]])
        best, area = equal[0][1], width_px * height_px
        for _, grid, half_px in equal[1:]:
            if area > half_px:
                best = grid
        return best
