"""Images: encoded bytes -> patches of the planned shape.

Rules, in order: the header is checked against the ceilings before anything is decoded; the first frame of an animation
or a multi-page file is taken; orientation is applied when asked for, from the same header fields as in probing;
16-bit grey is scaled to 8 bits; any transparency is flattened on white (as transformers does); everything becomes RGB;
bicubic resize to the planned grid, which wins over whatever size the pixels have.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataloaders.decode_patches import Conformed, PixelConfig, PlannedItem, cut_patches, differs, target_size
from dataloaders.probe.image import open_image, orientation_of, turned_by_reader
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import open_source

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(
    data: bytes,
    item: PlannedItem,
    *,
    apply_orientation: bool = True,
    pixels: PixelConfig | None = None,
    limits: ProbeLimits | None = None,
    place: str = "",
) -> NDArray[np.float32]:
    """Decode an image to its planned patches: float32 [t * h * w, patch_dim] (1176 for Qwen2.5-VL).

    Raises:
        MediaError: `truncated`, `corrupt`, `unknown_format`, `too_large`, ...; the caller substitutes `stand_in`.
    """
    return decode_image_report(
        data, item, apply_orientation=apply_orientation, pixels=pixels, limits=limits, place=place
    )[0]


def decode_image_report(
    data: bytes,
    item: PlannedItem,
    *,
    apply_orientation: bool = True,
    pixels: PixelConfig | None = None,
    limits: ProbeLimits | None = None,
    place: str = "",
) -> tuple[NDArray[np.float32], Conformed]:
    """As `decode_image`, with the report of what had to be conformed."""
    pixels, limits = pixels or PixelConfig(), limits or ProbeLimits()
    with open_source(data, limits=limits, place=place) as (file, size), open_image(file, size, place=place) as image:
        limits.check_size(*image.size, place=place)
        orientation = orientation_of(image) if apply_orientation and not turned_by_reader(image) else 1
        image.load()
        turned = image.transpose(_TURNS[orientation]) if orientation in _TURNS else image
        resized = differs(item, *turned.size)
        shown = to_rgb(turned).resize(target_size(item, pixels), resample=Image.Resampling.BICUBIC)
        frame = np.asarray(shown, dtype=np.uint8)
    return cut_patches([frame], item.grid, pixels), Conformed(resized=resized)


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB, transparency flattened on white, 16-bit grey scaled to 8 bits."""
    if image.mode.startswith("I;16"):
        # Pillow would clip everything above 255 to white.
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")
