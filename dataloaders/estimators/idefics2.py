"""Idefics2: 64 tokens for an image of any size, or five times 64 where it is split into quarters.

    (w, h) --do_image_splitting--> 4 quarters and the image itself  (else the image alone)
           --each: longest edge at most 980, then every side at least 378--> ceil(h / 14) * ceil(w / 14) patches
           --perceiver--> 64 tokens each;  tokens: n * 64 + n + 1, a <fake_token_around_image> around each

Sources of the formulas: `Idefics2ImageProcessor` and `Idefics2Processor` of transformers 5.24.

The price: the processor pads all crops of a batch to the tallest and the widest of them, so `padded_patches` gives the
most that the options permit. `patches` counts every patch that holds a pixel of the image; of a last row or column
that is cut by the edge (a side that is no multiple of 14) the tower's convolution sees nothing when the image is
alone, at most one row and one column of at least 27. Two images without text between them share one delimiter; the
count here is that of an image alone. Splitting leaves
quarters empty where a side has one pixel: `too_small` (the torchvision processor fails on both sides; the one for
Pillow fails on a height of 1, and of a width of 1 it makes a picture of nothing).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import segments_of
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    option,
    patch_px,
    require_positive,
    require_resize,
    switch,
)

_RULE = "idefics2/1"  # raise it whenever a count changes for some input: it is in the fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics2Config:
    """The numbers that decide counts. Defaults: class defaults of transformers; `patch_px` of the published weights.

    Attributes:
        shortest_px, longest_px: bounds of the sides of a resized crop.
        split: whether quarters are added.
        patch_px: side of a patch.
        tokens: latents of the perceiver, tokens of a crop.
    """

    shortest_px: int = 378
    longest_px: int = 980
    split: bool = False
    patch_px: int = 14
    tokens: int = 64

    def __post_init__(self) -> None:
        require_positive(self, "shortest_px", "longest_px", "patch_px", "tokens")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Idefics2Config":
        """From the files of a model folder. Raises DataError for options that this rule does not cover."""
        require_resize(files.image)
        found: dict[str, Any] = {}
        size = files.image.get("size")
        if size is not None:
            if not isinstance(size, Mapping) or not (size.get("shortest_edge") and size.get("longest_edge")):
                raise DataError(f"size={size!r}: Idefics2 needs shortest_edge and longest_edge", place=files.place)
            found |= {"shortest_px": size["shortest_edge"], "longest_px": size["longest_edge"]}
        latents = (files.model.get("perceiver_config") or {}).get("resampler_n_latents", cls().tokens)
        found["patch_px"] = patch_px(files, cls().patch_px)
        found["tokens"] = option(files, "image_seq_len", latents)
        found["split"] = switch(files.image, "do_image_splitting", False)
        return cls(**found)


class Idefics2Estimator(ImagesOnly):
    """`TokenEstimator` of Idefics2; immutable, picklable, cheap to copy."""

    rule = "Idefics2, transformers 5.24 processor"

    def __init__(self, config: Idefics2Config | None = None) -> None:
        self.config = config or Idefics2Config()
        self.fingerprint = fingerprint(_RULE, self.config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; `grid` and size are those of the whole image, quarters left out."""
        c = self.config
        sizes = [self._resized(width, height) for width, height in self._crops(width_px, height_px)]
        lengths = [-(-width // c.patch_px) * -(-height // c.patch_px) for width, height in sizes]
        whole_width, whole_height = sizes[-1]
        most = max(c.longest_px, c.shortest_px) // c.patch_px
        return ItemCounts(
            llm_tokens=len(sizes) * (c.tokens + 1) + 1,
            visual_tokens=len(sizes) * c.tokens,
            patches=sum(lengths),
            padded_patches=max(len(sizes) * most * most, sum(lengths)),
            tiles=len(sizes),
            grid=(1, -(-whole_height // c.patch_px), -(-whole_width // c.patch_px)),
            height_px=whole_height,
            width_px=whole_width,
            full=segments_of(lengths),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        c, counts = self.config, self.image(width_px, height_px)
        crops = self._crops(width_px, height_px)
        sizes = [self._resized(width, height) for width, height in crops]
        return (
            f"crops of {width_px}x{height_px} px: {', '.join(f'{width}x{height}' for width, height in crops)}",
            f"longest edge at most {c.longest_px}, sides at least {c.shortest_px}: "
            f"{', '.join(f'{width}x{height}' for width, height in sizes)}",
            f"patches of {c.patch_px} px, edges rounded up: {counts.patches} "
            f"(padded to batch mates: at most {counts.padded_patches})",
            f"LLM tokens: {len(crops)} x ({c.tokens} + 1) + 1 = {counts.llm_tokens}",
        )

    def _crops(self, width_px: int, height_px: int) -> list[tuple[int, int]]:
        if not self.config.split:
            check_sides(width_px, height_px)
            return [(width_px, height_px)]
        check_sides(width_px, height_px, least_px=2)  # a side of 1 px has no two halves
        left, top = width_px // 2, height_px // 2
        right, bottom = width_px - left, height_px - top
        return [(left, top), (right, top), (left, bottom), (right, bottom), (width_px, height_px)]

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        c = self.config
        aspect = width / height
        if width >= height and width > c.longest_px:
            width, height = c.longest_px, int(c.longest_px / aspect)
        elif height > width and height > c.longest_px:
            width, height = int(c.longest_px * aspect), c.longest_px
        return max(width, c.shortest_px), max(height, c.shortest_px)


def _factory(files: ProcessorFiles) -> Idefics2Estimator:
    return Idefics2Estimator(Idefics2Config.from_files(files))


FACTORIES = {"idefics2": _factory, "Idefics2Processor": _factory, "Idefics2ImageProcessor": _factory}
