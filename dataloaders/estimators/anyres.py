"""Any-resolution tiling of the LLaVA families: the canvas that fits best, and the features left of it without padding.

    (w, h) -> best of the allowed canvases: the most of the image's pixels, then the least waste
           -> the image is fitted into it and padded; tiles of it, and the whole image as one more, are encoded
           -> features of the canvas, rows x columns, less those that are padding only, + 1 row end for each row

Sources: `select_best_resolution`, `_get_unpadded_features`, `unpad_image` of transformers 5.24; the expressions keep
their order of operations, since 10^-7 decides whether a row is kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataloaders.errors import DataError
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.options import size_px, switch, tile_px, tower_px

Pinpoints = tuple[tuple[int, int], ...]


def best_canvas(width_px: int, height_px: int, canvases: Pinpoints) -> tuple[int, int]:
    """(height, width) of the canvas for an image of this size."""
    best, most, least_waste = canvases[0], -1, 0
    area = width_px * height_px
    for height, width in canvases:
        scale = min(width / width_px, height / height_px)
        used = min(int(width_px * scale) * int(height_px * scale), area)
        waste = width * height - used
        if used > most or (used == most and waste < least_waste):
            best, most, least_waste = (height, width), used, waste
    return best


def unpadded(width_px: int, height_px: int, rows: int, columns: int) -> tuple[int, int]:
    """(rows, columns) of features that are left when the padding around the fitted image is cut off."""
    if width_px / height_px > columns / rows:
        kept = int(round(height_px * (columns / width_px), 7))
        return rows - (rows - kept) // 2 * 2, columns
    kept = int(round(width_px * (rows / height_px), 7))
    return rows, columns - (columns - kept) // 2 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyresTiles:
    """How an image becomes tiles.

    Attributes:
        canvases: (height, width) of the allowed ones, in the order of the configuration (it decides ties).
        height_px, width_px: one tile as encoded.
        split_px: side of the tiles that a canvas is cut into.
    """

    canvases: Pinpoints
    height_px: int
    width_px: int
    split_px: int

    def __post_init__(self) -> None:
        if not self.canvases:
            raise DataError("image_grid_pinpoints is empty: there must be a canvas")
        for height, width in self.canvases:
            if height < self.height_px or width < self.width_px:
                raise DataError(
                    f"image_grid_pinpoints has [{height}, {width}], below one tile of "
                    f"[{self.height_px}, {self.width_px}]"
                )

    @classmethod
    def from_files(cls, files: ProcessorFiles, *, default: int, crops: bool, canvases: Pinpoints) -> "AnyresTiles":
        """From `image_grid_pinpoints`, `size` and `crop_size`."""
        found = files.image.get("image_grid_pinpoints") or files.model.get("image_grid_pinpoints")
        height, width = tile_px(files, default=default, crops=crops, square=True)
        crop, size = files.image.get("crop_size"), files.image.get("size")
        if crop is not None:
            split = size_px(crop, "crop_size")[0]
        elif crops or size is None:  # the class has a crop size of its own, whether it crops or not
            split = tower_px(files, (default, default))[0]
        else:
            split = size_px(size, "size")[0]
        if not switch(files.image, "do_resize", True) and split != height:
            raise DataError("do_resize is false: tiles would differ in size", remedy="Set do_resize to true.")
        return cls(
            canvases=canvases if found is None else pinpoints(found), height_px=height, width_px=width, split_px=split
        )

    def num_tiles(self, canvas: tuple[int, int]) -> int:
        """Tiles of a canvas, and the whole image as one more."""
        height, width = canvas
        return 1 + -(-height // self.split_px) * -(-width // self.split_px)


def pinpoints(found: Sequence[Iterable[int]], name: str = "image_grid_pinpoints") -> Pinpoints:
    """The canvases of an option, as pairs (height, width)."""
    if isinstance(found, str):
        raise DataError(f"{name}={found!r}: needs a list of [height, width]")
    return tuple(size_px(list(canvas), name) for canvas in found)
