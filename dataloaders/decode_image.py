"""Images: encoded bytes -> patches of the planned shape, over one path of 3 x 8 bits.

    header checked --> first frame --> turned --> RGB, 8 bits --> bicubic resize to the planned grid --> patches

Rules, in order (docs/decoding.md has them with their reasons):

1. the header is checked against the ceilings before anything is decoded; a file that ends early or is damaged raises,
   also where another package has set Pillow's `LOAD_TRUNCATED_IMAGES`;
2. the first frame of an animation or a multi-page file is taken;
3. orientation is applied when asked for, from the same header fields as in probing;
4. grey of 16 bits keeps its upper 8, beyond 16 bits it is refused; floats are clipped to 0..255;
5. any transparency (alpha, or one colour marked as transparent) is flattened on white, as transformers does;
6. everything else becomes RGB as Pillow converts it, CMYK of Adobe's inverted kind included; colour profiles and gamma
   are not applied;
7. the planned grid wins over whatever size the pixels have.
"""

import threading

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from dataloaders.decode_patches import Conformed, PixelConfig, PlannedItem, cut_patches, differs, target_size
from dataloaders.errors import MediaError, Reason
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
        MediaError: `truncated`, `corrupt`, `unknown_format`, `too_large`, ...; the caller puts zeros there.
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
    out: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], Conformed]:
    """As `decode_image`, with the report of what had to be conformed; `out` is where to write the patches."""
    pixels, limits = pixels or PixelConfig(), limits or ProbeLimits()
    with (
        open_source(data, limits=limits, place=place) as (file, size),
        open_image(file, size, place=place) as image,
        _strict,
    ):
        limits.check_size(*image.size, place=place)
        orientation = orientation_of(image) if apply_orientation and not turned_by_reader(image) else 1
        image.load()
        turned = image.transpose(_TURNS[orientation]) if orientation in _TURNS else image
        resized = differs(item, *turned.size)
        shown = to_rgb(turned, place=place).resize(target_size(item, pixels), resample=Image.Resampling.BICUBIC)
        frame = np.asarray(shown, dtype=np.uint8)
    return cut_patches([frame], item.grid, pixels, out=out), Conformed(resized=resized)


def to_rgb(image: Image.Image, *, place: str = "") -> Image.Image:
    """RGB of 8 bits: transparency flattened on white, 16-bit grey scaled.

    Raises:
        MediaError: `unsupported_media` for integers of more than 16 bits.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        return _grey_to_rgb(image, place)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")


def _grey_to_rgb(image: Image.Image, place: str) -> Image.Image:
    """Grey of more than 8 bits. Integers, which Pillow would clip to white above 255, keep the upper 8 of 16 bits (PNG
    and PNM have 16 bits as 32-bit integers as well); floats are levels of 0..255, as for Pillow."""
    values = np.asarray(image)
    if image.mode == "F":
        levels = np.clip(np.nan_to_num(values), 0, 255).astype(np.uint8)
    elif values.min() < 0 or values.max() > 0xFFFF:
        raise MediaError(
            Reason.UNSUPPORTED_MEDIA,
            f"grey of {values.min()} to {values.max()}: beyond 16 bits it is not known which value is white",
            place=place,
            remedy="Convert it to 8 or 16 bits a channel.",
        )
    else:
        levels = (values.astype(np.uint16) >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        levels[values == transparent] = 255
    return Image.fromarray(levels).convert("RGB")


class _Strict:
    """Makes Pillow refuse truncated files while images are decoded, whatever other packages have set.

    The switch is a global of Pillow, so overlapping threads share one change, undone by the last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._before = False

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._before


_strict = _Strict()
