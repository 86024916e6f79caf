"""MiniCPM-V 4.6: an overview and slices as in 2.6, with tokens in proportion to their patches; videos frame by frame.

Image:  (w, h) --SliceRule(max_slice_nums, scale_resolution, 4 patches)--> overview, rows x columns slices
        tokens of a tile: 2 + patches / 16; line breaks between rows: rows - 1; [<image_id>n</image_id>]
Video:  a frame each second (longer than `max_num_frames` s: so many, spread over a grid of 0.1 s)
        --each cut as an image is--> tokens: the sum over frames; [<image_id>n</image_id>]
        `stack_frames` k > 1: each second's k - 1 frames in between are drawn on one canvas, a frame more

`downsample_mode` "4x": sides in multiples of 2 patches, patches / 4. Sources of the formulas:
`MiniCPMV4_6ImageProcessor`, `MiniCPMV4_6VideoProcessor` and `MiniCPMV4_6Processor` of transformers 5.24.

The prices: the id of an item is counted as in `minicpmv`, and only where the configuration itself says
`use_image_id`. The processor's class default is true, and every file that it saves says so; a bare configuration is
counted as `replace_image_token` writes it, before ids are put in front. A video whose duration points
past its last frame fails: `too_few_frames`.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators.base import segments_of
from dataloaders.estimators.files import Config, CountText, ProcessorFiles
from dataloaders.estimators.frames import source_rate
from dataloaders.estimators.minicpm_slices import Size, SliceRule, Slices, given, slice_options
from dataloaders.estimators.minicpmv import count_image_id, explain_slices
from dataloaders.estimators.options import check_sides, fingerprint, require_positive, require_resize
from dataloaders.estimators.text import ROUGH, count_text_roughly

_RULE = "minicpmv4_6/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_DELIMITERS = 2  # around a tile
_MERGES = {"16x": 4, "4x": 2}  # downsample_mode -> patches per token along each side
_LINE_PX = 6  # between the pictures of a canvas
_LONG_STEP_S = 0.1  # grid of a long video
_MOST_SECONDS = 1e9  # thirty years: no header tells the truth there


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOptions:
    """What decides the tiles of an image, or of a video's frames. Defaults: class defaults of transformers.

    Attributes:
        max_slices, scale_px, slice_mode: see `SliceRule`.
        patch_px: side of a patch.
        merge: patches per token along each side: 4 ("16x") or 2 ("4x").
    """

    max_slices: int = 9
    scale_px: int = 448
    patch_px: int = 14
    slice_mode: bool = True
    merge: int = 4

    def __post_init__(self) -> None:
        require_positive(self, "max_slices", "scale_px", "patch_px", "merge")

    @property
    def slicing(self) -> SliceRule:
        """The rule of these numbers."""
        return SliceRule(
            max_slices=self.max_slices,
            scale_px=self.scale_px,
            unit_px=self.patch_px * self.merge,
            enabled=self.slice_mode,
        )

    @classmethod
    def from_options(cls, options: Config) -> "TileOptions":
        """From `preprocessor_config.json` or `video_preprocessor_config.json`."""
        require_resize(options)
        mode = options.get("downsample_mode") or "16x"
        if mode not in _MERGES:
            raise DataError(f"downsample_mode={mode!r}", remedy=f"Use one of {', '.join(_MERGES)}.")
        return cls(merge=_MERGES[mode], **slice_options(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMV46Config:
    """The numbers that decide counts and frames.

    Attributes:
        image, video: how images and frames are cut.
        max_frames: most frames of a video, canvases left out.
        stack_frames: frames of a second, all but the first of which are drawn on one canvas; 1: no canvas.
        sample_frames: false: every frame of a video is used.
        use_image_id: whether the processor numbers the images and the videos of a sample.
    """

    image: TileOptions = field(default_factory=TileOptions)
    video: TileOptions = field(default_factory=TileOptions)
    max_frames: int = 128
    stack_frames: int = 1
    sample_frames: bool = True
    use_image_id: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "max_frames", "stack_frames")
        if not self.sample_frames and self.stack_frames > 1:
            raise DataError(
                f"stack_frames={self.stack_frames} with do_sample_frames false: which frames are stacked is not known",
                remedy="Set do_sample_frames to true.",
            )

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "MiniCPMV46Config":
        """From the files of a model folder; without a video file, videos take the defaults."""
        video = files.video or {}
        return cls(
            image=TileOptions.from_options(files.image),
            video=TileOptions.from_options(video),
            **given(video, max_frames="max_num_frames", stack_frames="stack_frames", sample_frames="do_sample_frames"),
            **(given(files.processor, use_image_id="use_image_id") or given(files.image, use_image_id="use_image_id")),
        )


class _Frames(NamedTuple):
    """Sampled frames: those that stand alone, and, by second, how many are drawn on the canvas after it."""

    main: tuple[int, ...]
    stacked: tuple[int, ...]
    per_canvas: tuple[int, ...]


class MiniCPMV46Estimator:
    """`TokenEstimator` of MiniCPM-V 4.6; immutable, picklable, cheap to copy."""

    def __init__(
        self,
        config: MiniCPMV46Config | None = None,
        *,
        count_text: CountText = count_text_roughly,
        text_rule: str = ROUGH,
    ) -> None:
        self.config = config or MiniCPMV46Config()
        self.fingerprint = fingerprint(_RULE, self.config, text_rule)
        self.rule = f"MiniCPM-V 4.6, transformers 5.24 processor, texts counted by {text_rule}"
        self._count_text = count_text
        self._break = count_text("\n")
        self._first_id = count_image_id(1, count_text) if self.config.use_image_id else 0
        self._image_slicing, self._video_slicing = self.config.image.slicing, self.config.video.slicing

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image; the size is that of the overview.

        Raises:
            UnfitError: a side is below 1 px.
        """
        check_sides(width_px, height_px)
        cut = self._image_slicing.cut(width_px, height_px)
        return self._counts([cut], self.config.image, self._image_id(num_images))

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video; the size is that of a frame's overview, `frames` counts a canvas as one.

        Raises:
            UnfitError: a side is below 1 px; a duration that points past the last frame.
            MediaError: `corrupt` without a usable rate.
        """
        check_sides(width_px, height_px)
        frames = self._frames(num_frames, fps, duration_s)
        return self._counts(self._cut_frames((width_px, height_px), frames), self.config.video, self._first_id)

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """Source frames in ascending order, those on canvases included: int64 [n]."""
        frames = self._frames(num_frames, fps, duration_s)
        return np.asarray(sorted(frames.main + frames.stacked), dtype=np.int64)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.image(width_px, height_px, num_images=num_images)
        cut, merge = self._image_slicing.cut(width_px, height_px), self.config.image.merge
        breaks, image_id = max(cut.rows - 1, 0) * self._break, self._image_id(num_images)
        return (
            *explain_slices(width_px, height_px, cut, self._image_slicing),
            f"patches of {self.config.image.patch_px} px: {counts.patches}; {merge} x {merge} a token: "
            f"{counts.visual_tokens}",
            f"LLM tokens: {counts.visual_tokens} + {_DELIMITERS} x {counts.tiles} tiles + line breaks {breaks} "
            f"+ image id {image_id} = {counts.llm_tokens}",
        )

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.video(width_px, height_px, num_frames, fps, duration_s)
        frames = self._frames(num_frames, fps, duration_s)
        canvases = sum(1 for size in frames.per_canvas if size)
        merge, cut = self.config.video.merge, self._video_slicing.cut(width_px, height_px)
        return (
            f"frames of {duration_s:g} s at {fps:g} a second: {len(frames.main)} (at most {self.config.max_frames}), "
            f"and {canvases} canvases of {len(frames.stacked)} frames",
            *explain_slices(width_px, height_px, cut, self._video_slicing),
            f"patches of {self.config.video.patch_px} px: {counts.patches} in {counts.tiles} tiles; "
            f"{merge} x {merge} a token: {counts.visual_tokens}",
            f"LLM tokens: {counts.visual_tokens} + delimiters, line breaks and id "
            f"{counts.llm_tokens - counts.visual_tokens} = {counts.llm_tokens}",
        )

    def _image_id(self, num_images: int) -> int:
        if not self.config.use_image_id or num_images <= 1:
            return self._first_id
        return count_image_id(num_images, self._count_text)

    def _counts(self, cuts: list[Slices], options: TileOptions, item_id: int) -> ItemCounts:
        """Counts of pictures that were cut so; the size is that of the first one's overview."""
        lengths: list[int] = []
        tokens, visual, square = item_id, 0, options.merge**2
        for cut, times in Counter(cuts).items():
            overview, piece = _patches(cut.overview, options), _patches(cut.slice, options)
            seen = overview // square + cut.num_slices * (piece // square)
            visual += times * seen
            tokens += times * (seen + _DELIMITERS * (1 + cut.num_slices) + max(cut.rows - 1, 0) * self._break)
            lengths += ([overview] + [piece] * cut.num_slices) * times
        width, height = cuts[0].overview
        grid = (len(lengths), height // options.patch_px, width // options.patch_px)
        return ItemCounts(
            llm_tokens=tokens,
            visual_tokens=visual,
            patches=sum(lengths),
            tiles=len(lengths),
            frames=len(cuts),
            grid=grid if min(lengths) == max(lengths) else (0, 0, 0),
            height_px=height,
            width_px=width,
            full=segments_of(lengths),
        )

    def _cut_frames(self, size: Size, frames: _Frames) -> list[Slices]:
        sizes = [size] * len(frames.main)
        # A second's canvas follows the main frame of the same number, as long as there are main frames.
        sizes += [_canvas(size, stacked) for stacked in frames.per_canvas if stacked]
        cuts = {size: self._video_slicing.cut(*size) for size in dict.fromkeys(sizes)}
        return [cuts[size] for size in sizes]

    def _frames(self, num_frames: int, fps: float, duration_s: float) -> _Frames:
        last, rate = max(num_frames, 1) - 1, source_rate(max(num_frames, 1), fps, duration_s)
        duration = duration_s if math.isfinite(duration_s) and duration_s > 0 else (last + 1) / rate
        if not duration < _MOST_SECONDS:
            raise MediaError(Reason.CORRUPT, f"a video of {duration:g} s", remedy="Drop the item.")
        main = self._main_frames(last, rate, duration) if self.config.sample_frames else list(range(last + 1))
        if main[-1] >= num_frames:
            raise UnfitError(
                Reason.TOO_FEW_FRAMES,
                f"{duration:g} s at {rate:g} frames a second need frame {main[-1]}, there are {num_frames}",
                remedy="Drop the item, or write its duration anew.",
                nearest_frames=main[-1] + 1,
            )
        times = self._stacked_times(duration)
        per_second = Counter(int(time) for time in times)
        return _Frames(
            tuple(main),
            tuple(min(int(time * rate), last) for time in times),
            tuple(per_second[second] for second in range(min(len(main), math.ceil(duration)))),
        )

    def _main_frames(self, last: int, rate: float, duration: float) -> list[int]:
        """One a second; of a long video, so many as there may be, none after `last`."""
        if duration > self.config.max_frames:
            steps = _places(int(duration / _LONG_STEP_S), self.config.max_frames)
            return [min(int(round(step * _LONG_STEP_S, 1) * rate), last) for step in steps]
        return [int(second * rate) for second in range(math.ceil(duration))]

    def _stacked_times(self, duration: float) -> list[float]:
        """Seconds at which the frames between the main ones are taken."""
        between, whole = self.config.stack_frames - 1, int(duration)
        if not between:
            return []
        rest = sum(whole + part / (between + 1) < duration for part in range(1, between + 1))
        places = _places(whole * between + rest, self.config.max_frames * between)
        return [place // between + (place % between + 1) / (between + 1) for place in places]


def _patches(size: Size, options: TileOptions) -> int:
    return (size[0] // options.patch_px) * (size[1] // options.patch_px)


def _places(count: int, most: int) -> list[int]:
    """`most` of `count` places, evenly spread from the first to the last, rounded down; all where they are fewer."""
    if count <= most:
        return list(range(count))
    return [int(place) for place in np.linspace(0, count - 1, most, dtype=int)]


def _canvas(size: Size, pictures: int) -> Size:
    """(width, height) of a canvas of so many pictures: 2 x 2; 2 or 3 in a row or a column, the squarer; else a row."""
    width, height = size

    def drawn(rows: int, columns: int) -> Size:
        return columns * width + (columns - 1) * _LINE_PX, rows * height + (rows - 1) * _LINE_PX

    if pictures == 4:
        return drawn(2, 2)
    row, column = drawn(1, pictures), drawn(pictures, 1)
    if pictures not in (2, 3):
        return row
    off_row, off_column = abs(row[0] / row[1] - 1.0), abs(column[0] / column[1] - 1.0)
    if pictures == 2 and off_row == off_column:
        return row if width >= height else column
    return row if off_row <= off_column else column


def _factory(files: ProcessorFiles) -> MiniCPMV46Estimator:
    return MiniCPMV46Estimator(
        MiniCPMV46Config.from_files(files), count_text=files.count_text, text_rule=files.text_rule
    )


_KINDS = ("minicpmv4_6", "MiniCPMV4_6Processor", "MiniCPMV4_6ImageProcessor")
FACTORIES = dict.fromkeys(_KINDS, _factory)
