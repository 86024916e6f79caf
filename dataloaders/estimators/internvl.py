"""InternVL 2 to 3.5 and GOT-OCR 2: an image is cut into a grid of tiles of about its shape, and a thumbnail is added.

    w / h -> the grid (columns, rows) of nearest aspect ratio with min <= columns * rows <= max
    tiles  = columns * rows + 1, or 1 where the grid is (1, 1)
    tokens = tiles * tokens_per_tile + 2 (start and end of the image)

Of grids equally near, a larger one wins while the image has more than half its pixels: so 640 x 480 px becomes 4 x 3
tiles, more than 1920 x 1080 px does. A video is one tile a frame, each with "FrameN: " before it, joined by line ends.

Two kinds of folders have the same rule. transformers' own (`internvl`): the image processor's `size`, `min_patches`,
`max_patches`. The original with remote code (`internvl_chat`): `force_image_size`, `dynamic_image_size`,
`min_dynamic_patch`, `max_dynamic_patch`, `use_thumbnail`, `downsample_ratio`; its `max_dynamic_patch` holds for each
image, as in the published usage (some training scripts divide it by the number of images; state the quotient then).

Sources: `InternVLProcessor`, `GotOcr2ImageProcessor` of transformers 5.24; `dynamic_preprocess` of the remote code.
`InternVLProcessor` cuts whatever `crop_to_patches` in `preprocessor_config.json` says (published folders say false);
GOT-OCR 2 does not cut unless that is true, and writes its image's start and end into the prompt. Patches are counted
without the class token of the tower.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError
from dataloaders.estimators.base import equal_segments
from dataloaders.estimators.files import CountText, ProcessorFiles
from dataloaders.estimators.frames import FrameSampling
from dataloaders.estimators.nearest_ratio import NearestRatio, grids
from dataloaders.estimators.options import (
    ImagesOnly,
    check_sides,
    fingerprint,
    option,
    patch_px,
    require_positive,
    require_resize,
    size_px,
    switch,
    tower_px,
    vision_config,
)

_RULE = "internvl/1"  # raise it whenever a count or a frame index changes for some input: it is in the fingerprint
_DELIMITERS = 2
_KEPT_LABELS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLConfig:
    """The numbers that decide tiles and tokens. Defaults: the published ones of InternVL 2 to 3.5.

    Attributes:
        family: name for people.
        tile_height_px, tile_width_px: one tile.
        patch_px: side of a patch.
        tokens_per_tile: visual tokens of a tile.
        min_tiles, max_tiles: bounds of the grid, thumbnail not counted; max_tiles 1: nothing is cut.
        thumbnail: a thumbnail joins grids of more than one tile.
        remote_code: order of grids of equal area as the remote code has it (it matters with min_tiles > 1 only).
        sampling: frames of a video; None: the folder does not say.
    """

    family: str = "InternVL"
    tile_height_px: int = 448
    tile_width_px: int = 448
    patch_px: int = 14
    tokens_per_tile: int = 256
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    remote_code: bool = False
    sampling: FrameSampling | None = None

    def __post_init__(self) -> None:
        require_positive(self, "tile_height_px", "tile_width_px", "patch_px", "tokens_per_tile", "min_tiles")
        if self.max_tiles < self.min_tiles:
            raise DataError(f"InternVLConfig.max_tiles={self.max_tiles} is below min_tiles={self.min_tiles}")

    @classmethod
    def from_files(cls, files: ProcessorFiles) -> "InternVLConfig":
        """From either kind of folder."""
        if files.model.get("model_type") == "internvl_chat":
            return cls._from_remote_code(files)
        require_resize(files.image)
        return cls(
            **_tiling(files, tile=384, patch=14),
            tokens_per_tile=option(files, "image_seq_length", 256),
            sampling=_sampling(files),
        )

    @classmethod
    def _from_remote_code(cls, files: ProcessorFiles) -> "InternVLConfig":
        model = files.model
        size, patch = model.get("force_image_size"), patch_px(files, 14)
        height, width = tower_px(files, (448, 448)) if size is None else size_px(size, "force_image_size")
        ratio = model.get("downsample_ratio")
        cuts = switch(model, "dynamic_image_size", False)
        return cls(
            tile_height_px=height,
            tile_width_px=width,
            patch_px=patch,
            tokens_per_tile=int((height // patch) ** 2 * ((0.5 if ratio is None else ratio) ** 2)),
            min_tiles=(model.get("min_dynamic_patch") or 1) if cuts else 1,
            max_tiles=(model.get("max_dynamic_patch") or 6) if cuts else 1,
            thumbnail=switch(model, "use_thumbnail", False),
            remote_code=True,
            sampling=None if files.video is None else _sampling(files),
        )


def _tiling(files: ProcessorFiles, *, tile: int, patch: int) -> dict[str, Any]:
    size = files.image.get("size")
    height, width = tower_px(files, (tile, tile)) if size is None else size_px(size, "size")
    return {
        "tile_height_px": height,
        "tile_width_px": width,
        "patch_px": size_px(vision_config(files).get("patch_size") or patch, "vision_config.patch_size")[0],
        "min_tiles": files.image.get("min_patches") or 1,
        "max_tiles": files.image.get("max_patches") or 12,
    }


def _sampling(files: ProcessorFiles) -> FrameSampling:
    video = files.video or {}
    if video.get("initial_shift") not in (None, True):
        raise DataError(f"initial_shift={video['initial_shift']!r}: only true, the default, is supported")
    return FrameSampling.from_video(video, middle=True)


class InternVLEstimator(ImagesOnly):
    """`TokenEstimator` of families that cut by the nearest aspect ratio; immutable, picklable."""

    def __init__(self, config: InternVLConfig, count_text: CountText | None = None, text_rule: str = "") -> None:
        self.config = config
        imitated = "remote code" if config.remote_code else "transformers 5.24 processor"
        self.rule = f"{config.family}, {imitated}, at most {config.max_tiles} tiles of {config.tile_width_px} px"
        if config.sampling is not None:
            self.rule += f", frame labels counted by {text_rule}"
        self.fingerprint = fingerprint(_RULE, config, text_rule)
        shapes = grids(config.min_tiles, config.max_tiles, remote_code=config.remote_code)
        self._grids = NearestRatio(shapes, config.tile_height_px * config.tile_width_px)
        self._count_text = count_text
        self._label_sums = [0]

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        """Counts of an image."""
        columns, rows = self.grid(width_px, height_px)
        tiles = columns * rows
        if tiles > 1 and self.config.thumbnail:
            tiles += 1
        return self._counts(tiles, tiles, 1, _DELIMITERS)

    def grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """(columns, rows) of the nearest aspect ratio; (1, 1) where nothing is cut."""
        check_sides(width_px, height_px)
        if self.config.max_tiles == 1:
            return 1, 1
        return self._grids.nearest(width_px, height_px)

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        """Counts of a video: one tile a frame."""
        sampling = self._sampling()
        check_sides(width_px, height_px)
        frames = sampling.count(num_frames, fps, duration_s)
        return self._counts(frames, 1, frames, _DELIMITERS * frames + self._label_tokens(frames))

    def frame_indices(self, num_frames: int, fps: float, duration_s: float) -> NDArray[np.int64]:
        """The middle of each part of the clip: int64 [n]."""
        return self._sampling().indices(num_frames, fps, duration_s)

    def explain_image(self, width_px: int, height_px: int, *, num_images: int = 1) -> tuple[str, ...]:
        """The steps with their numbers."""
        columns, rows = self.grid(width_px, height_px)
        counts = self.image(width_px, height_px)
        return (
            f"{width_px}x{height_px} px, aspect {width_px / height_px:.4g} -> grid of {columns} x {rows} tiles",
            f"{columns * rows} tiles + {counts.tiles - columns * rows} thumbnail = {counts.tiles}",
            f"grid {counts.grid[1]} x {counts.grid[2]} each = {counts.patches} patches",
            f"{counts.tiles} x {self.config.tokens_per_tile} visual + {_DELIMITERS} delimiters "
            f"= {counts.llm_tokens} LLM tokens",
        )

    def explain_video(
        self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float
    ) -> tuple[str, ...]:
        """The steps with their numbers."""
        counts = self.video(width_px, height_px, num_frames, fps, duration_s)
        return (
            f"{num_frames} frames -> {counts.frames} sampled, one tile each",
            f"grid {counts.grid[1]} x {counts.grid[2]} each = {counts.patches} patches",
            f"{self._label_tokens(counts.frames)} tokens of frame labels, {_DELIMITERS * counts.frames} delimiters",
            f"{counts.frames} x {self.config.tokens_per_tile} visual + these = {counts.llm_tokens} LLM tokens",
        )

    def _counts(self, pieces: int, tiles: int, frames: int, written: int) -> ItemCounts:
        config = self.config
        rows, columns = config.tile_height_px // config.patch_px, config.tile_width_px // config.patch_px
        visual = pieces * config.tokens_per_tile
        return ItemCounts(
            llm_tokens=visual + written,
            visual_tokens=visual,
            patches=pieces * rows * columns,
            tiles=tiles,
            frames=frames,
            grid=(pieces, rows, columns),
            height_px=config.tile_height_px,
            width_px=config.tile_width_px,
            full=equal_segments(pieces, rows * columns),
        )

    def _sampling(self) -> FrameSampling:
        if self.config.sampling is None or self._count_text is None:
            raise self._no_videos()
        return self.config.sampling

    def _label_tokens(self, frames: int) -> int:
        # A label is between two special tokens, so each is counted by itself, with the line end before it. Sums over
        # the first labels are kept: clips without sampling have thousands of frames.
        count_text, sums = self._count_text, self._label_sums
        if count_text is None:
            raise self._no_videos()
        for number in range(len(sums), min(frames, _KEPT_LABELS) + 1):
            sums.append(sums[-1] + count_text(f"\nFrame{number}: " if number > 1 else "Frame1: "))
        beyond = range(_KEPT_LABELS + 1, frames + 1)
        return sums[min(frames, _KEPT_LABELS)] + sum(count_text(f"\nFrame{number}: ") for number in beyond)


def _factory(files: ProcessorFiles) -> InternVLEstimator:
    config = InternVLConfig.from_files(files)
    return InternVLEstimator(config, files.count_text, "" if config.sampling is None else files.text_rule)


def _got_ocr2(files: ProcessorFiles) -> InternVLEstimator:
    tiling = _tiling(files, tile=1024, patch=16)
    if not switch(files.image, "crop_to_patches", False):
        tiling |= {"min_tiles": 1, "max_tiles": 1}
    tokens = option(files, "num_image_tokens", 256)
    return InternVLEstimator(InternVLConfig(family="GOT-OCR 2", tokens_per_tile=tokens, **tiling))


FACTORIES = {
    "internvl": _factory,
    "internvl_chat": _factory,
    "InternVLProcessor": _factory,
    "InternVLVideoProcessor": _factory,
    "got_ocr2": _got_ocr2,
    "GotOcr2Processor": _got_ocr2,
}
