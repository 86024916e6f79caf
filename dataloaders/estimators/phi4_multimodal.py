"""Phi-4-multimodal: 448-px crops of a canvas and a global view; a token for what is not padding.

    (w, h) --ceil(w / 448) x ceil(h / 448) crops; above `dynamic_hd` crops: the grid of nearest aspect ratio-->
           canvas (448 i, 448 j) --fitted into its top left corner, the rest padded--> mask over patches of 14 px
           --the padded last floor(padding / 14) rows or columns masked, every second patch of a crop kept-->
           rows x columns
    tokens: 256 + 16 (global view, its row ends) + 1 (separator) + rows * columns + rows (row ends)

Sources of the formulas: `Phi4MultimodalImageProcessor` of transformers 5.24 and the processor that the original model
folder carries (`Phi4MMProcessor`); both count alike.

The price: every image of a batch is padded to the number of crops of the largest, and the tower encodes the padding,
so `padded_patches` is `dynamic_hd` + 1 crops. Masked patches are encoded too (attention is dense under a mask), so they
are in `patches` and in the segments. An image that would be resized to a side below 10 px fails: `extreme_aspect`.
The 256 + 16 are constants of the processor: with crops of another size it counts them all the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.nearest_ratio import NearestRatio, grids
from dataloaders.estimators.nearest_size import unfit_size
from dataloaders.estimators.options import ImagesOnly, fingerprint, option, require_positive, size_px

_RULE = "phi4_multimodal/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_GLOBAL_TOKENS, _GLOBAL_ROWS, _SEPARATOR = 256, 16, 1
_LEAST_RESIZED_PX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi4MultimodalConfig:
    """The numbers that decide counts. Defaults: class defaults of transformers, which are the published ones.

    Attributes:
        crop_px: side of a crop.
        patch_px: side of a patch.
        max_crops: most crops of an image (`dynamic_hd`), the global view left out.
    """

    crop_px: int = 448
    patch_px: int = 14
    max_crops: int = 36

    def __post_init__(self) -> None:
        require_positive(self, "crop_px", "patch_px", "max_crops")
        if self.crop_px < self.patch_px:
            raise DataError(f"Phi4MultimodalConfig.crop_px={self.crop_px} is below patch_px={self.patch_px}")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Phi4MultimodalConfig":
        """From the files of a model folder. Raises DataError for a crop that is not square."""
        default = cls()
        return cls(
            crop_px=_side(files, "size", default.crop_px),
            patch_px=_side(files, "patch_size", default.patch_px),
            max_crops=option(files, "dynamic_hd", default.max_crops),
        )


class _Layout(NamedTuple):
    grid: tuple[int, int]  # crops (across, down)
    resized: tuple[int, int]  # (width, height) of the picture on the canvas
    kept: tuple[int, int]  # (rows, columns) of tokens that are not padding


class Phi4MultimodalEstimator(ImagesOnly):
    """`TokenEstimator` of Phi-4-multimodal; immutable, picklable, cheap to copy."""

    rule = "Phi-4-multimodal, transformers 5.24 processor"

    def __init__(self, config: Phi4MultimodalConfig | None = None) -> None:
        self.config = config or Phi4MultimodalConfig()
        self.fingerprint = fingerprint(_RULE, self.config)
        self._side = self.config.crop_px // self.config.patch_px  # patches along a crop
        self._grids = NearestRatio(grids(1, self.config.max_crops), self.config.crop_px**2)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; the size is that of the canvas, padding included.

        Raises:
            UnfitError: a side would be resized to less than 10 px.
        """
        layout = self._layout(width_px, height_px)
        (across, down), (rows, columns) = layout.grid, layout.kept
        tiles, patches_per_tile = across * down + 1, self._side * self._side
        tokens = _GLOBAL_TOKENS + _GLOBAL_ROWS + _SEPARATOR + rows * columns + rows
        return ItemCounts(
            llm_tokens=tokens,
            visual_tokens=tokens,
            patches=tiles * patches_per_tile,
            padded_patches=(self.config.max_crops + 1) * patches_per_tile,
            tiles=tiles,
            grid=(tiles, self._side, self._side),
            height_px=down * self.config.crop_px,
            width_px=across * self.config.crop_px,
            full=equal_segments(tiles, patches_per_tile),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.image(width_px, height_px)
        layout = self._layout(width_px, height_px)
        (across, down), (rows, columns) = layout.grid, layout.kept
        return (
            f"crops of {c.crop_px} px for {width_px}x{height_px} px: {across} across, {down} down "
            f"(at most {c.max_crops}), and a global view: {counts.tiles}",
            f"resized to {layout.resized[0]}x{layout.resized[1]}, padded to {counts.width_px}x{counts.height_px} px",
            f"patches of {c.patch_px} px: {counts.tiles} x {self._side} x {self._side} = {counts.patches} "
            f"(padded to batch mates: at most {counts.padded_patches})",
            f"tokens outside the padding, 2 patches apart: {rows} rows of {columns}",
            f"LLM tokens: {_GLOBAL_TOKENS} + {_GLOBAL_ROWS} + {_SEPARATOR} + {rows} x {columns} + {rows} "
            f"= {counts.llm_tokens}",
        )

    def _layout(self, width: int, height: int) -> _Layout:
        if width < 1 or height < 1:
            raise unfit_size(width, height, "", self._fits)
        crop, patch = self.config.crop_px, self.config.patch_px
        (across, down), (new_width, new_height) = self._fitted(width, height)
        if min(new_width, new_height) < _LEAST_RESIZED_PX:
            cause = f"resized to {new_width}x{new_height} px, where the processor needs {_LEAST_RESIZED_PX} px a side"
            raise unfit_size(width, height, cause, self._fits)
        rows = self._side * down - (crop * down - new_height) // patch
        columns = self._side * across - (crop * across - new_width) // patch
        kept = self._kept(rows), self._kept(columns)
        return _Layout((across, down), (new_width, new_height), kept if all(kept) else (0, 0))

    def _kept(self, patches: int) -> int:
        """Of the first `patches` along an axis of the canvas, those at even places of their crop."""
        full, rest = divmod(max(patches, 0), self._side)
        return full * ((self._side + 1) // 2) + (rest + 1) // 2

    def _fitted(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Crops (across, down), and the (width, height) that fits into their canvas."""
        crop = self.config.crop_px
        across, down = -(-width // crop), -(-height // crop)
        if across * down > self.config.max_crops:
            across, down = self._grids.nearest(width, height)
        scale_x, scale_y = across * crop / width, down * crop / height
        if scale_x < scale_y:
            return (across, down), (across * crop, int(height * scale_x))
        return (across, down), (int(width * scale_y), down * crop)

    def _fits(self, width: int, height: int) -> bool:
        return min(self._fitted(width, height)[1]) >= _LEAST_RESIZED_PX


def _side(files: ProcessorFiles, name: str, default: int) -> int:
    height, width = size_px(option(files, name, default), name)
    if height != width:
        raise DataError(f"{name}={option(files, name)!r}: the processor takes squares alone", place=files.place)
    return height


def _factory(files: ProcessorFiles) -> Phi4MultimodalEstimator:
    return Phi4MultimodalEstimator(Phi4MultimodalConfig.from_files(files))


_KINDS = (
    "phi4_multimodal",
    "phi4mm",
    "Phi4MultimodalProcessor",
    "Phi4MMProcessor",
    "Phi4MultimodalImageProcessor",
    "Phi4MMImageProcessor",
)
FACTORIES = dict.fromkeys(_KINDS, _factory)
