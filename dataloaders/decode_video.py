"""Videos: encoded bytes -> patches of the planned shape.

    bytes --VideoDecoder, one thread--> planned frames, RGB, turned --resized--> patches       video_decoders/

The frames are those that the estimator chose (`PlannedItem.frame_indices`); decoders only deliver them. The plan wins:
a frame that the stream does not hold is the last good one before it, a longer stream is trimmed, and every frame is
resized to the planned grid. A clip of which too much is damaged is refused, see `ProbeLimits.max_bad_frames`.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataloaders.decode_patches import Conformed, PixelConfig, PlannedItem, cut_patches, differs, target_size
from dataloaders.probe.limits import ProbeLimits
from dataloaders.video_decoders.base import Clip, Picture
from dataloaders.video_decoders.choice import take_frames


def decode_video(
    data: bytes,
    item: PlannedItem,
    *,
    pixels: PixelConfig | None = None,
    limits: ProbeLimits | None = None,
    place: str = "",
    decoder: str = "auto",
    out: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], Conformed]:
    """Decode a video to its planned patches.

    Args:
        decoder: "auto", "pyav", "decord" or "torchcodec"; what another one cannot decode, PyAV does.
        out: where to write the patches, see `cut_patches`.

    Returns:
        (float32 [t * h * w, patch_dim], what had to be conformed).

    Raises:
        MediaError: not one frame decodes (`truncated` or `corrupt`), the file cannot be opened, or too much of it is
            damaged; the caller puts zeros there.
        DataError: there is no such decoder here.
    """
    pixels, limits = pixels or PixelConfig(), limits or ProbeLimits()
    size_px, resized = target_size(item, pixels), False

    def keep(picture: Picture) -> NDArray[np.uint8]:
        nonlocal resized
        resized |= differs(item, picture.shape[1], picture.shape[0])
        shown = Image.fromarray(picture).resize(size_px, resample=Image.Resampling.BICUBIC)
        return np.asarray(shown, dtype=np.uint8)

    taken = take_frames(Clip(data=data, limits=limits, place=place), _wanted(item, pixels), keep, decoder=decoder)
    report = Conformed(
        frames_repeated=taken.repeated, resized=resized, bad_packets=taken.bad_packets, fallback=taken.fallback
    )
    return cut_patches(taken.frames, item.grid, pixels, out=out), report


def _wanted(item: PlannedItem, pixels: PixelConfig) -> list[int]:
    """Numbers of the planned source frames, ascending."""
    if item.frame_indices is None:
        return list(range(item.grid[0] * pixels.temporal_patch))
    indices: list[int] = item.frame_indices.tolist()
    return indices
