"""Decoding: encoded bytes and a planned shape -> patches of exactly that shape. The front of the `decode_*` modules.

    item = planned_item(MediaKind.IMAGE, estimator.image(640, 480))
    patches = decode_image(data, item)                            float32 [P, patch_dim]
    patches, report = decode_media(data, item)                    images and videos alike

What cannot be decoded raises `MediaError`; `stand_in(item)` has the planned shape to take its place.
"""

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import ItemCounts, MediaKind
from dataloaders.decode_image import decode_image, decode_image_report
from dataloaders.decode_patches import Allocate, Conformed, PixelConfig, PlannedItem, new_patches, stand_in
from dataloaders.decode_video import decode_video
from dataloaders.probe.limits import ProbeLimits

__all__ = [
    "Allocate",
    "Conformed",
    "PixelConfig",
    "PlannedItem",
    "decode_image",
    "decode_media",
    "decode_video",
    "new_patches",
    "planned_item",
    "stand_in",
]


def planned_item(
    kind: MediaKind,
    counts: ItemCounts,
    *,
    frame_indices: NDArray[np.int64] | None = None,
    width_px: int = 0,
    height_px: int = 0,
) -> PlannedItem:
    """The planned shape of an item from its counts; `width_px` and `height_px` are the probed display size."""
    return PlannedItem(
        kind=kind,
        grid=counts.grid,
        height_px=counts.height_px,
        width_px=counts.width_px,
        frames=counts.frames,
        frame_indices=frame_indices,
        source_height_px=height_px,
        source_width_px=width_px,
    )


def decode_media(
    data: bytes,
    item: PlannedItem,
    *,
    apply_orientation: bool = True,
    pixels: PixelConfig | None = None,
    limits: ProbeLimits | None = None,
    place: str = "",
    decoder: str = "auto",
    out: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], Conformed]:
    """Decode an image or a video, with the report of what had to be conformed.

    Args:
        decoder: of videos, see `decode_video`.
        out: where to write the patches, contiguous float32 [P, patch_dim]; None: an array of its own.

    Raises:
        MediaError: nothing usable could be decoded.
        DataError: there is no such decoder here.
    """
    if item.kind == MediaKind.VIDEO:
        return decode_video(data, item, pixels=pixels, limits=limits, place=place, decoder=decoder, out=out)
    return decode_image_report(
        data, item, apply_orientation=apply_orientation, pixels=pixels, limits=limits, place=place, out=out
    )
