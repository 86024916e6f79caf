"""Gemma 3: one square tile of 256 tokens an image; with pan-and-scan also crops along the longer side.

    ratio = longer / shorter side; none below `min_ratio`
    n = min(max_crops, max(2, min(longer // min_crop_px, floor(ratio + 1/2)))); none where a crop is under min_crop_px
    without crops: "\\n\\n" <start> 256 visual <end> "\\n\\n"  = 260 tokens
    with n crops:  "Here is the original image " that " and here are some crops to help you see better "
                   and that once more for each crop, with a space between

Sources: `Gemma3Processor`, `Gemma3ImageProcessor` of transformers 5.24. Published folders leave the pan-and-scan
options null, and the processor then takes its own: off, 256 px, 4 crops, 1.2. In 5.24 these also win over what
`preprocessor_config.json` says, so a user turns pan-and-scan on in the call; here the file says it, there is no call.
"""

import math
from dataclasses import dataclass

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import CountText, ProcessorFiles
from dataloaders.estimators.fixed import PARAGRAPH
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    option,
    patch_px,
    require_positive,
    switch,
    tile_px,
)

_RULE = "gemma3/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_BEFORE_IMAGE = "Here is the original image " + PARAGRAPH
_BEFORE_CROPS = PARAGRAPH + " and here are some crops to help you see better " + PARAGRAPH
# Between two crops the text is "\n\n \n\n". No vocabulary has a token across its space: the halves are counted apart.
_BETWEEN_CROPS = (PARAGRAPH, " " + PARAGRAPH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config:
    """The numbers that decide crops and tokens. Defaults: the published ones.

    Attributes:
        height_px, width_px: the tile that an image and each crop are resized to.
        patch_px: side of a patch.
        tokens_per_tile: visual tokens of a tile.
        pan_and_scan: whether long images are cropped.
        min_crop_px: the least side of a crop.
        max_crops: the most crops of an image.
        min_ratio: the least ratio of the sides for crops.
    """

    height_px: int = 896
    width_px: int = 896
    patch_px: int = 14
    tokens_per_tile: int = 256
    pan_and_scan: bool = False
    min_crop_px: int = 256
    max_crops: int = 4
    min_ratio: float = 1.2

    def __post_init__(self) -> None:
        require_positive(
            self, "height_px", "width_px", "patch_px", "tokens_per_tile", "min_crop_px", "max_crops", "min_ratio"
        )
        if self.min_crop_px < self.max_crops:  # the last crop could be empty, on which the processor fails
            raise DataError(f"Gemma3Config.min_crop_px={self.min_crop_px} is below max_crops={self.max_crops}")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "Gemma3Config":
        """From the options of the processor and its image processor."""
        height, width = tile_px(files, default=224, crops=False, square=False)
        image = files.image
        return cls(
            height_px=height,
            width_px=width,
            patch_px=patch_px(files, 14),
            tokens_per_tile=option(files, "image_seq_length", files.model.get("mm_tokens_per_image") or 256),
            pan_and_scan=switch(image, "do_pan_and_scan", False),
            min_crop_px=image.get("pan_and_scan_min_crop_size") or 256,
            max_crops=image.get("pan_and_scan_max_num_crops") or 4,
            min_ratio=image.get("pan_and_scan_min_ratio_to_activate") or 1.2,
        )


class Gemma3Estimator(ImagesOnly):
    """`TokenEstimator` of Gemma 3; immutable, picklable."""

    def __init__(self, config: Gemma3Config, count_text: CountText, text_rule: str) -> None:
        self.config = config
        scanned = "on" if config.pan_and_scan else "off"
        self.rule = f"Gemma 3, transformers 5.24 processor, pan-and-scan {scanned}, texts counted by {text_rule}"
        self.fingerprint = fingerprint(_RULE, config, text_rule)
        around = count_text(PARAGRAPH)
        between = sum(map(count_text, _BETWEEN_CROPS))
        first = count_text(_BEFORE_IMAGE) + count_text(_BEFORE_CROPS) + around
        # Tokens written into an image with 0, 1, 2, ... crops, beside the two delimiters of each tile.
        crops = range(1, config.max_crops + 1) if config.pan_and_scan else ()
        self._text_tokens = (2 * around, *(first + between * (count - 1) for count in crops))

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        config, crops = self.config, self.num_crops(width_px, height_px)
        tiles, rows, columns = 1 + crops, config.height_px // config.patch_px, config.width_px // config.patch_px
        return ItemCounts(
            llm_tokens=tiles * (config.tokens_per_tile + 2) + self._text_tokens[crops],
            visual_tokens=tiles * config.tokens_per_tile,
            patches=tiles * rows * columns,
            tiles=tiles,
            grid=(tiles, rows, columns),
            height_px=config.height_px,
            width_px=config.width_px,
            full=equal_segments(tiles, rows * columns),
        )

    def num_crops(self, width_px: int, height_px: int) -> int:
        """Crops that pan-and-scan adds to the image."""
        check_sides(width_px, height_px)
        config = self.config
        longer, shorter = max(width_px, height_px), min(width_px, height_px)
        if not config.pan_and_scan or longer / shorter < config.min_ratio:
            return 0
        crops = min(longer // config.min_crop_px, math.floor(longer / shorter + 0.5))
        crops = min(config.max_crops, max(2, crops))
        return crops if min(math.ceil(longer / crops), shorter) >= config.min_crop_px else 0

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts, config = self.image(width_px, height_px), self.config
        return (
            f"{width_px}x{height_px} px, pan-and-scan {'on' if config.pan_and_scan else 'off'} "
            f"-> the image + {counts.tiles - 1} crops, each {config.width_px}x{config.height_px} px",
            f"grid {counts.grid[1]} x {counts.grid[2]} each = {counts.patches} patches",
            f"{counts.tiles} x ({config.tokens_per_tile} visual + 2 delimiters) "
            f"+ {self._text_tokens[counts.tiles - 1]} of text = {counts.llm_tokens} LLM tokens",
        )


def _factory(files: ProcessorFiles) -> Gemma3Estimator:
    return Gemma3Estimator(Gemma3Config.from_files(files), files.count_text, files.text_rule)


FACTORIES = dict.fromkeys(("gemma3", "Gemma3Processor", "Gemma3ImageProcessor"), _factory)
