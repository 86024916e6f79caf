"""Aria: one square canvas an image; with `split_image` the crops of the canvas that fits best instead.

    crop (w, h) -> longer side 980 px, the shorter at least 336 px, padded to 980 x 980 px -> 256 tokens
    tokens = crops * 256 (128 with a side of 490 px)

Source: `AriaProcessor`, `AriaImageProcessor` of transformers 5.24. `patches` are those that are not padding, and
attend to each other; the tower computes the others too and masks them (`padded_patches`). Two faults there: images
beside one that has more crops are counted with as many as it (here each by itself), and `split_image` in
`preprocessor_config.json` is overruled by the processor's own default, false, so a user turns it on in the call; here
the file says it, there is no call.
"""

from dataclasses import dataclass

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.anyres import Pinpoints, best_canvas, pinpoints
from dataloaders.estimators.base import segments_of
from dataloaders.estimators.files import ProcessorFiles
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    require_positive,
    side,
    switch,
    vision_config,
)

_RULE = "aria/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_SHAPES = "12 13 14 15 16 17 18 24 23 22 21 31 32 41 42 51 61 71 81"
_CANVASES = tuple((int(shape[0]) * 490, int(shape[1]) * 490) for shape in _SHAPES.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class AriaConfig:
    """The numbers that decide crops and tokens. Defaults: those of transformers' classes.

    Attributes:
        side_px: side of the canvas of a crop.
        least_px: least side of what is drawn on it.
        patch_px: side of a patch.
        tokens_per_crop: visual tokens of a crop.
        canvases: (height, width) of the allowed ones where images are split; empty: they are not.
    """

    side_px: int = 980
    least_px: int = 336
    patch_px: int = 14
    tokens_per_crop: int = 256
    canvases: Pinpoints = ()

    def __post_init__(self) -> None:
        require_positive(self, "side_px", "least_px", "patch_px", "tokens_per_crop")
        if self.side_px not in (490, 980):
            raise DataError(f"AriaConfig.side_px={self.side_px}: use 490 or 980")
        if self.least_px > self.side_px:
            raise DataError(f"AriaConfig.least_px={self.least_px} exceeds side_px={self.side_px}")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "AriaConfig":
        """From the options of the processor and its image processor."""
        image, side_px = files.image, files.image.get("max_image_size") or 980
        tokens = files.processor.get("size_conversion") or {490: 128, 980: 256}
        per_crop = {int(key): value for key, value in tokens.items()}
        if side_px not in per_crop:
            raise DataError(f"size_conversion={tokens!r} has no tokens for max_image_size={side_px}")
        found = image.get("split_resolutions")
        canvases = _CANVASES if found is None else pinpoints(found, "split_resolutions")
        return cls(
            side_px=side_px,
            least_px=image.get("min_image_size") or 336,
            patch_px=side(vision_config(files).get("patch_size") or 14, "vision_config.patch_size"),
            tokens_per_crop=per_crop[side_px],
            canvases=canvases if switch(image, "split_image", False) else (),
        )


class AriaEstimator(ImagesOnly):
    """`TokenEstimator` of Aria; immutable, picklable."""

    def __init__(self, config: AriaConfig | None = None) -> None:
        self.config = config or AriaConfig()
        split = "split" if self.config.canvases else "not split"
        self.rule = f"Aria, transformers 5.24 processor, images {split}"
        self.fingerprint = fingerprint(_RULE, self.config)

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        lengths = [self._patches(*crop) for crop in self._crops(width_px, height_px)]
        crops, config = len(lengths), self.config
        return ItemCounts(
            llm_tokens=crops * config.tokens_per_crop,
            visual_tokens=crops * config.tokens_per_crop,
            patches=sum(lengths),
            padded_patches=crops * (config.side_px // config.patch_px) ** 2,
            tiles=crops,
            height_px=config.side_px,
            width_px=config.side_px,
            full=segments_of(lengths),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        crops, counts = self._crops(width_px, height_px), self.image(width_px, height_px)
        sizes = ", ".join(f"{width}x{height}" for width, height in dict.fromkeys(crops))
        return (
            f"{width_px}x{height_px} px -> {counts.tiles} crops ({sizes} px)",
            f"each to a longer side of {self.config.side_px} px = {counts.patches} patches "
            f"(padded to squares: {counts.padded_patches})",
            f"{counts.tiles} x {self.config.tokens_per_crop} = {counts.llm_tokens} LLM tokens",
        )

    def _crops(self, width_px: int, height_px: int) -> list[tuple[int, int]]:
        check_sides(width_px, height_px)
        if not self.config.canvases:
            return [(width_px, height_px)]
        height, width = best_canvas(width_px, height_px, self.config.canvases)
        return [(w, h) for h in _cuts(height, self.config.side_px) for w in _cuts(width, self.config.side_px)]

    def _patches(self, width_px: int, height_px: int) -> int:
        side_px, patch = self.config.side_px, self.config.patch_px
        scale = side_px / max(height_px, width_px)
        shorter = max(int(min(height_px, width_px) * scale), self.config.least_px)
        return -(-shorter // patch) * -(-side_px // patch)


def _cuts(length: int, piece: int) -> list[int]:
    return [min(piece, length - start) for start in range(0, length, piece)]


def _factory(files: ProcessorFiles) -> AriaEstimator:
    return AriaEstimator(AriaConfig.from_files(files))


FACTORIES = dict.fromkeys(("aria", "AriaProcessor", "AriaImageProcessor"), _factory)
