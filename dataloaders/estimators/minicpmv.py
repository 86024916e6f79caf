"""MiniCPM-V 2.6, 4.0, 4.5 and MiniCPM-o: an overview and slices, each of a fixed number of tokens, whatever their size.

    (w, h) --SliceRule(max_slice_nums, scale_resolution, patch_size)--> overview, rows x columns slices
    tokens: q + 2 (overview in <image></image>) + rows * columns * (q + 2) (each in <slice></slice>)
            + (rows - 1) line breaks + [<image_id>n</image_id> where use_image_id]

q = `image_feature_size`, 64 queries of the resampler for each tile. Sources of the formulas: `MiniCPMVImageProcessor`
and `MiniCPMVProcessor`, the code that the model folders carry. Versions before 2.6 delimit slices otherwise and are
refused. Videos are given as frames, that is as images; the processor knows none.

The price: the id of an image is its place in the sample, of which an item's counts know nothing; it is counted as the
longest of the sample's, so images before the tenth cost a token less than counted where a sample has more than ten.
Patches are those of the resized tiles; the tower pads them to the longest of the batch, which no option bounds (all
have about scale_resolution^2 pixels), so `padded_patches` is None.
"""

from dataclasses import dataclass
from typing import NamedTuple

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import segments_of
from dataloaders.estimators.files import CountText, ProcessorFiles
from dataloaders.estimators.minicpm_slices import SliceRule, Slices, given, slice_options
from dataloaders.estimators.options import ImagesOnly, check_sides, fingerprint, require_positive
from dataloaders.estimators.text import ROUGH, count_text_roughly

_RULE = "minicpmv/1"  # raise it whenever a count changes for some input: it is in the fingerprint
_OLDEST_VERSION = 2.6
_DELIMITERS = 2  # around a tile, and around an id


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMVConfig:
    """The numbers that decide counts. Defaults: class defaults of the processor.

    Attributes:
        max_slices, scale_px, slice_mode: see `SliceRule`.
        patch_px: side of a patch; resized sides are multiples of it.
        queries: tokens of a tile.
        use_image_id: whether the processor numbers the images of a sample.
    """

    max_slices: int = 9
    scale_px: int = 448
    patch_px: int = 14
    queries: int = 64
    slice_mode: bool = True
    use_image_id: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "max_slices", "scale_px", "patch_px", "queries")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "MiniCPMVConfig":
        """From the files of a model folder. Raises DataError for a version before 2.6."""
        version = files.model.get("version")
        if version is not None and "minicpmv" in files.kinds and float(version) < _OLDEST_VERSION:
            raise DataError(
                f"version={version!r}: MiniCPM-V before {_OLDEST_VERSION} delimits slices otherwise",
                place=files.place,
                remedy="Add an estimator with dataloaders.estimators.register_estimator(kind, factory).",
            )
        return cls(
            **slice_options(files.image),
            **given(files.image, queries="image_feature_size", use_image_id="use_image_id"),
        )


def count_image_id(num_images: int, count_text: CountText) -> int:
    """Tokens of `<image_id>n</image_id>`, n counting from 0: of the last image of the sample, the longest."""
    return _DELIMITERS + count_text(str(max(num_images, 1) - 1))


class _Tokens(NamedTuple):
    image_id: int
    overview: int
    slices: int
    breaks: int


class MiniCPMVEstimator(ImagesOnly):
    """`TokenEstimator` of MiniCPM-V 2.6 to 4.5 and MiniCPM-o; immutable, picklable, cheap to copy."""

    def __init__(
        self,
        config: MiniCPMVConfig | None = None,
        *,
        count_text: CountText = count_text_roughly,
        text_rule: str = ROUGH,
    ) -> None:
        self.config = config or MiniCPMVConfig()
        c = self.config
        self.fingerprint = fingerprint(_RULE, c, text_rule)
        self.rule = f"MiniCPM-V, processor code of the model folder (2.6), texts counted by {text_rule}"
        self._slicing = SliceRule(
            max_slices=c.max_slices, scale_px=c.scale_px, unit_px=c.patch_px, enabled=c.slice_mode
        )
        self._count_text = count_text
        self._first_id = count_image_id(1, count_text)
        self._break = count_text("\n")

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; the size is that of the overview.

        Raises:
            UnfitError: a side is below 1 px; without slicing, where nothing is resized, below a patch.
        """
        cut = self._cut(width_px, height_px)
        tokens, patch = self._tokens(cut, num_images), self.config.patch_px
        (width, height), (slice_width, slice_height) = cut.overview, cut.slice
        grid = (1 + cut.num_slices, height // patch, width // patch)
        slice_patches = (slice_height // patch) * (slice_width // patch)
        lengths = [grid[1] * grid[2], *[slice_patches] * cut.num_slices]
        return ItemCounts(
            llm_tokens=sum(tokens),
            visual_tokens=self.config.queries * len(lengths),
            patches=sum(lengths),
            tiles=len(lengths),
            grid=grid if min(lengths) == max(lengths) else (0, 0, 0),
            height_px=height,
            width_px=width,
            full=segments_of(lengths),
        )

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        cut, counts = self._cut(width_px, height_px), self.image(width_px, height_px, num_images=num_images)
        tokens = self._tokens(cut, num_images)
        return (
            *explain_slices(width_px, height_px, cut, self._slicing),
            f"patches of {self.config.patch_px} px: {counts.patches} in {counts.tiles} tiles; "
            f"{self.config.queries} tokens a tile: {counts.visual_tokens}",
            f"LLM tokens: overview {tokens.overview} + slices {tokens.slices} + line breaks {tokens.breaks} "
            f"+ image id {tokens.image_id} = {counts.llm_tokens}",
        )

    def _cut(self, width: int, height: int) -> Slices:
        if self.config.slice_mode:
            check_sides(width, height)
            return self._slicing.cut(width, height)
        check_sides(width, height, least_px=self.config.patch_px)
        # The image as it is; edges that fill no patch are lost.
        return Slices(0, 0, (width, height), (0, 0))

    def _tokens(self, cut: Slices, num_images: int) -> _Tokens:
        tile = self.config.queries + _DELIMITERS
        image_id = 0
        if self.config.use_image_id:
            image_id = self._first_id if num_images <= 1 else count_image_id(num_images, self._count_text)
        return _Tokens(image_id, tile, cut.num_slices * tile, max(cut.rows - 1, 0) * self._break)


def explain_slices(width_px: int, height_px: int, cut: Slices, slicing: SliceRule) -> tuple[str, ...]:
    """Lines that say how an image of this size was cut."""
    overview = f"overview: {cut.overview[0]}x{cut.overview[1]} px"
    if not cut.num_slices:
        return (f"{width_px}x{height_px} px: no slices; {overview}",)
    return (
        f"slices of about {slicing.scale_px}^2 px for {width_px}x{height_px} px: {cut.rows} rows of {cut.columns} "
        f"(at most {slicing.max_slices})",
        f"{overview}; slices: {cut.num_slices} of {cut.slice[0]}x{cut.slice[1]} px",
    )


def _factory(files: ProcessorFiles) -> MiniCPMVEstimator:
    return MiniCPMVEstimator(MiniCPMVConfig.from_files(files), count_text=files.count_text, text_rule=files.text_rule)


_KINDS = ("minicpmv", "minicpmo", "MiniCPMVProcessor", "MiniCPMOProcessor", "MiniCPMVImageProcessor")
FACTORIES = dict.fromkeys(_KINDS, _factory)
