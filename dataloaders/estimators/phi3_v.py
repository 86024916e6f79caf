"""Phi-3-vision and Phi-3.5-vision: an image is enlarged to as many 336-px crops as allowed, and a global view is added.

    (w, h) --turned so that w >= h; ratio = w / h; the largest s with s * ceil(s / ratio) <= num_crops-->
           (336 s, int(336 s / ratio)) --the height padded to a multiple of 336, turned back--> i x j crops
    tokens: (i * j + 1) * 144 + 1 (separator) + (j + 1) * 12 (row ends of the j rows of crops and of the global view)

Source of the formulas: `Phi3VImageProcessor`, the code that the model folders carry.

The price: even a 1 x 1 image is enlarged to the most crops. The processor pads the crops of every image to `num_crops`
+ 1, and the tower encodes the padding: `padded_patches`. A side that would be resized to nothing fails
(`extreme_aspect`). A crop is 24 x 24 patches and a class token: 577.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.nearest_size import unfit_size
from dataloaders.estimators.options import ImagesOnly, fingerprint, option, require_positive

_RULE = "phi3_v/1"  # raise it whenever a count changes for some input: it is in the fingerprint
# Constants of the processor's code, no options.
_CROP_PX, _PATCHES_PER_SIDE, _CROP_TOKENS, _CROP_ROWS = 336, 24, 144, 12
_CROP_PATCHES = _PATCHES_PER_SIDE**2 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3VConfig:
    """The number that decides counts.

    Attributes:
        num_crops: most crops of an image, the global view left out. Published: 16 for single images, 4 for several;
            the class default is 1.
    """

    num_crops: int = 1

    def __post_init__(self) -> None:
        require_positive(self, "num_crops")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Phi3VConfig":
        """From the files of a model folder. Raises DataError for `num_img_tokens` other than 144."""
        tokens = option(files, "num_img_tokens", _CROP_TOKENS)
        if tokens != _CROP_TOKENS:
            raise DataError(
                f"num_img_tokens={tokens!r}: the processor counts {_CROP_TOKENS} for a crop whatever it says",
                place=files.place,
                remedy=f"Set it to {_CROP_TOKENS}.",
            )
        return cls(num_crops=option(files, "num_crops", cls().num_crops))


class _Layout(NamedTuple):
    turned: bool  # taller than wide
    long_crops: int  # crops along the longer side
    short_crops: int  # along the shorter one
    short_px: int  # the shorter side before padding


class Phi3VEstimator(ImagesOnly):
    """`TokenEstimator` of Phi-3(.5)-vision; immutable, picklable, cheap to copy."""

    rule = "Phi-3-vision, processor code of the model folder"

    def __init__(self, config: Phi3VConfig | None = None) -> None:
        self.config = config or Phi3VConfig()
        self.fingerprint = fingerprint(_RULE, self.config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; the size is that of the canvas, padding included.

        Raises:
            UnfitError: a side would be resized to nothing.
        """
        across, down = self._grid(self._checked(width_px, height_px))
        tiles = across * down + 1
        tokens = tiles * _CROP_TOKENS + 1 + (down + 1) * _CROP_ROWS
        return ItemCounts(
            llm_tokens=tokens,
            visual_tokens=tokens,
            patches=tiles * _CROP_PATCHES,
            padded_patches=(self.config.num_crops + 1) * _CROP_PATCHES,
            tiles=tiles,
            grid=(tiles, _PATCHES_PER_SIDE, _PATCHES_PER_SIDE),
            height_px=down * _CROP_PX,
            width_px=across * _CROP_PX,
            full=equal_segments(tiles, _CROP_PATCHES),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts, layout = self.image(width_px, height_px), self._checked(width_px, height_px)
        across, down = self._grid(layout)
        resized = (layout.long_crops * _CROP_PX, layout.short_px)
        width, height = reversed(resized) if layout.turned else resized
        return (
            f"{width_px}x{height_px} px enlarged or shrunk to {layout.long_crops} crops of {_CROP_PX} px along the "
            f"longer side: {width}x{height}, padded to {counts.width_px}x{counts.height_px} px",
            f"crops: {across} across, {down} down (at most {self.config.num_crops}), and a global view: {counts.tiles}",
            f"patches with a class token: {counts.tiles} x {_CROP_PATCHES} = {counts.patches} "
            f"(the processor pads to {counts.padded_patches})",
            f"LLM tokens: {counts.tiles} x {_CROP_TOKENS} + 1 + ({down} + 1) x {_CROP_ROWS} = {counts.llm_tokens}",
        )

    def _checked(self, width: int, height: int) -> _Layout:
        if width < 1 or height < 1:
            raise unfit_size(width, height, "", self._fits)
        layout = self._layout(width, height)
        if layout.short_px < 1:
            raise unfit_size(width, height, "its shorter side would be resized to nothing", self._fits)
        return layout

    def _layout(self, width: int, height: int) -> _Layout:
        turned = width < height
        ratio = height / width if turned else width / height
        scale = 1
        while scale * math.ceil(scale / ratio) <= self.config.num_crops:
            scale += 1
        scale -= 1
        short = int(scale * _CROP_PX / ratio)
        return _Layout(turned, scale, -(-short // _CROP_PX), short)

    def _fits(self, width: int, height: int) -> bool:
        return self._layout(width, height).short_px >= 1

    @staticmethod
    def _grid(layout: _Layout) -> tuple[int, int]:
        """Crops (across, down)."""
        across, down = layout.long_crops, layout.short_crops
        return (down, across) if layout.turned else (across, down)


def _factory(files: ProcessorFiles) -> Phi3VEstimator:
    return Phi3VEstimator(Phi3VConfig.from_files(files))


FACTORIES = dict.fromkeys(("phi3_v", "Phi3VProcessor", "Phi3VImageProcessor"), _factory)
