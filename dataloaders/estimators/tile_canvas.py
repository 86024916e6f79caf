"""The canvas of whole tiles that an image is fitted into without distortion: the rule of Llama 4 and Mllama.

    every canvas of at most n tiles:  scale = min(canvas_w / w, canvas_h / h)
    any scale >= 1:  the least of them (or the greatest: `enlarge`);  none:  the greatest below 1
    several canvases of that scale:  the least area, the first of equals

Worked example, tiles of 224 px, at most 3: a 300x200 image fits 224x224 at 0.75, 448x224 (w x h) at 1.12, 672x224 at
1.12; enlarging is possible, both have the least scale, and 448x224 has the least area: 1 row, 2 columns.

Llama 4 computes scales in single precision, so canvases tie there that differ in double precision. Quotients of two
integers below 2^24 that are rounded to double and then to single equal those rounded to single at once.
"""

from array import array


class TileCanvas:
    """The rule for one size of tile and one number of tiles; immutable, picklable.

    Args:
        tile_px: side of a tile.
        max_tiles: tiles of the largest canvas.
        single_precision: whether scales are rounded to 32 bits.
        enlarge: whether the greatest scale is taken where enlarging is possible.
    """

    def __init__(self, tile_px: int, max_tiles: int, *, single_precision: bool = False, enlarge: bool = False) -> None:
        shapes = [(rows, cols) for rows in range(1, max_tiles + 1) for cols in range(1, max_tiles // rows + 1)]
        self._shapes = tuple(sorted(shapes, key=lambda shape: shape[0] * shape[1]))
        self._edges_px = tuple(tile_px * count for count in range(max_tiles + 1))
        self._single_precision, self._enlarge = single_precision, enlarge

    def fit(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(rows, cols) of the canvas for an image of this size."""
        by_row = [edge / height_px for edge in self._edges_px]
        by_col = [edge / width_px for edge in self._edges_px]
        if self._single_precision:
            by_row, by_col = array("f", by_row).tolist(), array("f", by_col).tolist()
        best_scale, best = 0.0, self._shapes[0]
        for shape in self._shapes:  # by area, so that of equal scales the first has the least
            scale = min(by_row[shape[0]], by_col[shape[1]])
            if scale == best_scale:
                continue
            shrink = scale >= 1 and best_scale >= 1 and not self._enlarge
            if (scale < best_scale) if shrink else (scale > best_scale):
                best_scale, best = scale, shape
        return best
