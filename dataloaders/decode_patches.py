"""Planned shapes and the patch layout: the part of decoding that images and videos share.

    frames uint8 [F, H, W, 3] --pad to t * T--normalise--cut--> patches float32 [t * h * w, 3 * T * p * p]

Rows run over t, then over merge blocks (h/m, w/m), then inside a block (m, m); columns over channel, frame in the
temporal patch, row and column of the patch: the order of Qwen2VLImageProcessor of transformers, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import MediaKind


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
    """

    frames_repeated: int = 0
    resized: bool = False
    bad_packets: int = 0

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


def cut_patches(
    frames: Sequence[NDArray[np.uint8]], grid: tuple[int, int, int], pixels: PixelConfig
) -> NDArray[np.float32]:
    """Cut resized frames into normalised patches.

    Args:
        frames: at least one uint8 [h * p, w * p, 3]; the last is repeated up to t * temporal_patch, more are cut off.
        grid: (t, h, w) in patches; h and w are multiples of `pixels.merge`.

    Returns:
        float32 [t * h * w, patch_dim].
    """
    (grid_t, grid_h, grid_w), merge, patch, depth = grid, pixels.merge, pixels.patch_px, pixels.temporal_patch
    if grid_h % merge or grid_w % merge:
        raise ValueError(f"grid {grid}: h and w must be multiples of merge={merge}")
    table = _normalised(pixels)
    out = np.empty((grid_t, grid_h // merge, grid_w // merge, merge, merge, 3, depth, patch, patch), dtype=np.float32)
    for index in range(grid_t * depth):
        frame = frames[min(index, len(frames) - 1)]
        if frame.shape != (grid_h * patch, grid_w * patch, 3):
            raise ValueError(f"frame of shape {frame.shape} for grid {grid} with patch_px={patch}")
        # axes: (h/m, m, p, w/m, m, p, C) -> (h/m, w/m, m, m, C, p, p)
        cut = frame.reshape(grid_h // merge, merge, patch, grid_w // merge, merge, patch, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)
        for channel in range(3):
            out[index // depth, ..., channel, index % depth, :, :] = table[channel][cut[..., channel, :, :]]
    return out.reshape(grid_t * grid_h * grid_w, pixels.patch_dim)


def _normalised(pixels: PixelConfig) -> NDArray[np.float32]:
    """float32 [3, 256]: the normalised value of every byte, rounded as transformers rounds it."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = np.array(pixels.mean, dtype=np.float32), np.array(pixels.std, dtype=np.float32)
    return np.asarray((scaled[None, :] - mean[:, None]) / std[:, None], dtype=np.float32)
