"""Planned shapes and the patch layout: the part of decoding that images and videos share.

    frames uint8 [F, H, W, 3] --pad to t * T--normalise--cut--> patches float32 [t * h * w, 3 * T * p * p]

Rows run over t, then over merge blocks (h/m, w/m), then inside a block (m, m); columns over channel, frame in the
temporal patch, row and column of the patch: the order of Qwen2VLImageProcessor of transformers, bit for bit. Patches
may be written to memory of the caller's (`out`): fresh pages cost more than filling them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import MediaKind

# (num_patches, patch_dim) -> memory for patches, contiguous, not filled
Allocate = Callable[[int, int], NDArray[np.float32]]


class _PixelSource(Protocol):
    @property
    def patch_px(self) -> int: ...
    @property
    def merge(self) -> int: ...
    @property
    def temporal_patch(self) -> int: ...
    @property
    def mean(self) -> tuple[float, float, float]: ...
    @property
    def std(self) -> tuple[float, float, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelConfig:
    """How pixels become patches. Defaults are those of Qwen2.5-VL.

    Attributes:
        patch_px, merge, temporal_patch: side of a patch, patches per token and side, frames per patch.
        mean, std: per-channel normalisation of pixels in 0..1.
    """

    patch_px: int = 14
    merge: int = 2
    temporal_patch: int = 2
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def of(cls, estimator: _PixelSource) -> "PixelConfig":
        """The layout that belongs to an estimator."""
        return cls(
            patch_px=estimator.patch_px,
            merge=estimator.merge,
            temporal_patch=estimator.temporal_patch,
            mean=estimator.mean,
            std=estimator.std,
        )

    @property
    def patch_dim(self) -> int:
        """Numbers per patch: 3 channels x temporal_patch x patch_px x patch_px."""
        return 3 * self.temporal_patch * self.patch_px**2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedItem:
    """The shape that the plan promises for one media item; decoding conforms to it whatever the file holds.

    Attributes:
        kind: image or video.
        grid: (t, h, w) in patches; it decides the shape alone.
        height_px, width_px: the resized size, h and w times the patch (informative).
        frames: frames handed to the vision tower, padding included.
        frame_indices: source frames to take, ascending (videos; None takes the first ones).
        source_height_px, source_width_px: display size the index has seen; 0: unknown.
    """

    kind: MediaKind
    grid: tuple[int, int, int]
    height_px: int
    width_px: int
    frames: int = 1
    frame_indices: NDArray[np.int64] | None = None
    source_height_px: int = 0
    source_width_px: int = 0

    def __post_init__(self) -> None:
        if len(self.grid) != 3 or min(self.grid) < 1:
            raise ValueError(f"PlannedItem.grid={self.grid}: three numbers of at least 1")
        indices = self.frame_indices
        if indices is not None and (len(indices) < 1 or indices[0] < 0 or bool((np.diff(indices) < 0).any())):
            raise ValueError(f"PlannedItem.frame_indices={indices}: at least one, from 0 on, ascending")

    @property
    def num_patches(self) -> int:
        """Rows of the decoded array: t * h * w."""
        return self.grid[0] * self.grid[1] * self.grid[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformed:
    """Where a file lied and what was done about it.

    Attributes:
        frames_repeated: sampled frames that the stream did not hold; its last good frame stands there.
        resized: the pixels have another size than the index saw; they were resized to the planned grid.
        bad_packets: packets that did not decode and were passed over.
        fallback: the decoder that was asked for and why it could not: PyAV decoded instead. Nothing was conformed by
            that, so it does not make a report true.
    """

    frames_repeated: int = 0
    resized: bool = False
    bad_packets: int = 0
    fallback: str = ""

    def __bool__(self) -> bool:
        """Whether anything had to be conformed."""
        return bool(self.frames_repeated or self.resized or self.bad_packets)


def target_size(item: PlannedItem, pixels: PixelConfig) -> tuple[int, int]:
    """(width_px, height_px) that frames are resized to: the planned grid, in Pillow's order."""
    return item.grid[2] * pixels.patch_px, item.grid[1] * pixels.patch_px


def stand_in(item: PlannedItem, *, pixels: PixelConfig | None = None) -> NDArray[np.float32]:
    """Zeros of the planned shape, float32 [P, patch_dim], for an item that cannot be decoded."""
    return np.zeros((item.num_patches, (pixels or PixelConfig()).patch_dim), dtype=np.float32)


def differs(item: PlannedItem, width_px: int, height_px: int) -> bool:
    """Whether decoded pixels have another size than the index saw (unknown sizes do not differ)."""
    seen = (item.source_width_px, item.source_height_px)
    return min(seen) > 0 and seen != (width_px, height_px)


def new_patches(num_patches: int, patch_dim: int) -> NDArray[np.float32]:
    """Memory for patches, float32 [num_patches, patch_dim], not filled yet."""
    return np.empty((num_patches, patch_dim), dtype=np.float32)


def cut_patches(
    frames: Sequence[NDArray[np.uint8]],
    grid: tuple[int, int, int],
    pixels: PixelConfig,
    *,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Cut resized frames into normalised patches.

    Args:
        frames: at least one uint8 [h * p, w * p, 3]; the last is repeated up to t * temporal_patch, more are cut off.
        grid: (t, h, w) in patches; h and w are multiples of `pixels.merge`.
        out: where to write the patches, contiguous; None: an array of its own.

    Returns:
        float32 [t * h * w, patch_dim].
    """
    (grid_t, grid_h, grid_w), merge, patch, depth = grid, pixels.merge, pixels.patch_px, pixels.temporal_patch
    shape = (grid_t * grid_h * grid_w, pixels.patch_dim)
    if grid_h % merge or grid_w % merge:
        raise ValueError(f"grid {grid}: h and w must be multiples of merge={merge}")
    if out is None:
        out = new_patches(*shape)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
        raise ValueError(f"out of {out.dtype} {out.shape}: contiguous float32 {shape} is needed")
    # Copied in whole rows of a patch and in whole patches of a channel, each as one opaque item.
    rows = out.view(_opaque(patch)).reshape(grid_t, grid_h // merge, grid_w // merge, merge, merge, 3, depth, patch)
    squares = out.view(_opaque(patch * patch)).reshape(grid_t, grid_h // merge, grid_w * merge, 3, depth)
    used = frames[: grid_t * depth]
    for index, frame in enumerate(used):
        if frame.shape != (grid_h * patch, grid_w * patch, 3):
            raise ValueError(f"frame of shape {frame.shape} for grid {grid} with patch_px={patch}")
        t, slot = divmod(index, depth)
        end = slot + 1 if index + 1 < len(used) else depth
        _cut_frame(frame, rows[t, ..., slot, :], squares[t, ..., slot:end], pixels)
    squares[t + 1 :] = squares[t, ..., -1:]
    return out


def _cut_frame(frame: NDArray[np.uint8], rows: np.ndarray, squares: np.ndarray, pixels: PixelConfig) -> None:
    """Cut one frame a row of merge blocks at a time: so much stays in the cache.

    Args:
        rows: [h/m, w/m, m, m, C, p], rows of patches that the frame fills.
        squares: [h/m, w * m, C, n], its patches; the first are those of `rows`, the others become equal to them.
    """
    height = pixels.merge * pixels.patch_px
    mean, std = (np.array(values, dtype=np.float32)[:, None, None] for values in (pixels.mean, pixels.std))
    strip = np.empty((3, height, frame.shape[1]), dtype=np.float32)
    # axes: (C, m * p, w * p) -> (C, m, p, w/m, m) -> (w/m, m, m, C, p), of items of p pixels
    cut = strip.view(_opaque(pixels.patch_px)).reshape(3, pixels.merge, pixels.patch_px, -1, pixels.merge)
    cut = cut.transpose(3, 1, 4, 0, 2)
    for block, (block_rows, block_squares) in enumerate(zip(rows, squares, strict=True)):
        # axes: height, width, channel -> channel, height, width
        planes = np.ascontiguousarray(frame[block * height : (block + 1) * height].transpose(2, 0, 1))
        # For every byte this is what transformers computes, which scales in float64 and rounds to float32.
        np.divide(planes, np.float32(255), out=strip, dtype=np.float32)
        np.subtract(strip, mean, out=strip)
        np.divide(strip, std, out=strip)
        block_rows[...] = cut
        block_squares[..., 1:] = block_squares[..., :1]


def _opaque(num_floats: int) -> np.dtype:
    """An item of so many float32, which is only copied."""
    return np.dtype((np.void, 4 * num_floats))
