"""Drawing of demo pictures: crop a photograph, resize, tint towards the facts aimed at, encode, look at the result.

    photo -> crop [h, w, 3] -> tint(strength) -> file bytes -> decode as displayed -> measure
                                  ^                                                  |
                                  +------- stronger, until the facts are clear <-----+

The caption states what was *measured* in the decoded file, never what was aimed at. The price: colours are those of
tinted prints, not of nature. Without the tint most photographs are brownish, and a colour question has one answer.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageOps

from dataloaders.demo.facts import BRIGHTNESS, HUES, NEUTRAL, Measure, measure
from dataloaders.demo.photos import load_photo
from dataloaders.demo.recipe import PictureSpec

# Mean V aimed at: the middle of each brightness class of `facts`.
_TARGET_VALUE = dict(zip(BRIGHTNESS, (0.22, 0.50, 0.78), strict=True))
_STRENGTHS = (0.65, 0.8, 0.92, 1.0)
_HUE_JITTER_DEG = 12.0
_EXIF_ORIENTATION = 0x0112
# What a camera that notes this orientation has stored: the inverse of what a viewer does to show it.
_STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def render_picture(spec: PictureSpec, rng: Generator) -> tuple[bytes, Measure]:
    """File bytes of one picture and the facts measured in them."""
    crop = crop_photo(spec.photo, spec.width_px, spec.height_px, rng)
    hue, quality = hue_draw(rng), 80 + int(rng.random() * 15)

    def attempt(strength: float) -> tuple[bytes, Measure]:
        data = _encode(tint(crop, spec.colour, spec.brightness, strength, hue), spec, quality)
        return data, measure(displayed(data))

    return first_clear(attempt, spec.colour, spec.brightness)


def first_clear(
    attempt: Callable[[float], tuple[bytes, Measure]], colour: str, brightness: str
) -> tuple[bytes, Measure]:
    """The weakest tint whose measured facts are clear and as aimed at; the strongest one when none is."""
    for strength in _STRENGTHS:
        data, facts = attempt(strength)
        if facts.clear and (facts.colour, facts.brightness) == (colour, brightness):
            break
    return data, facts


def hue_draw(rng: Generator) -> float:
    """Offset from the centre of a hue sector, in degrees."""
    return (2 * float(rng.random()) - 1) * _HUE_JITTER_DEG


def crop_photo(photo: int, width_px: int, height_px: int, rng: Generator) -> NDArray[np.uint8]:
    """A window of the photograph with the aspect asked for, resized: uint8 [height_px, width_px, 3]."""
    source = load_photo(photo)
    fit = min(source.width / width_px, source.height / height_px)
    # A window of 55-100 % of what fits: the same photograph looks different in every sample.
    scale = fit * (0.55 + 0.45 * float(rng.random()))
    width, height = scale * width_px, scale * height_px
    left = float(rng.random()) * (source.width - width)
    top = float(rng.random()) * (source.height - height)
    box = (left, top, min(left + width, source.width), min(top + height, source.height))
    resized = source.resize((width_px, height_px), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    return np.asarray(resized, dtype=np.uint8)


def tint(
    rgb: NDArray[np.uint8], colour: str, brightness: str, strength: float, hue_offset_deg: float
) -> NDArray[np.uint8]:
    """Move `rgb` [h, w, 3] towards a colour (`strength` 0 keeps the photograph, 1 is monochrome) and a brightness."""
    photo = rgb.astype(np.float32) / 255
    grey = photo @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    low, high = (float(x) for x in np.quantile(grey[::4, ::4], (0.02, 0.98)))
    grey = 0.25 + 0.75 * np.clip((grey - low) / max(high - low, 0.02), 0, 1)
    if colour == NEUTRAL:
        mixed = np.repeat(grey[:, :, None], 3, axis=2)
    else:
        pure = _rgb_of_hue(60.0 * HUES.index(colour) + hue_offset_deg)
        printed = grey[:, :, None] * (0.15 + 0.85 * pure)
        mixed = photo + np.float32(strength) * (printed - photo)
    return _to_mean_value(mixed, _TARGET_VALUE[brightness])


def _rgb_of_hue(hue_deg: float) -> NDArray[np.float32]:
    """Fully saturated RGB of a hue."""
    offsets = (hue_deg / 60 + np.array([0.0, 4.0, 2.0])) % 6
    return np.asarray(np.clip(np.abs(offsets - 3) - 1, 0, 1), dtype=np.float32)


def _to_mean_value(rgb: NDArray[np.floating[Any]], target: float) -> NDArray[np.uint8]:
    """Apply the gamma to V that brings its mean to `target`; hue and saturation stay."""
    # Channel by channel: numpy reduces an axis of length 3 many times slower.
    value = np.maximum(np.maximum(np.maximum(rgb[..., 0], rgb[..., 1]), rgb[..., 2]), 1 / 255)
    sample = value[::2, ::2] if value.size > 10_000 else value
    counts = np.bincount((sample * 127.99).astype(np.int64).ravel(), minlength=128)
    centres = (np.arange(128) + 0.5) / 128
    low, high = 0.05, 12.0
    for _ in range(24):
        gamma = (low * high) ** 0.5
        if float((counts * centres**gamma).sum()) / sample.size > target:
            low = gamma
        else:
            high = gamma
    out = rgb * (value ** (gamma - 1))[:, :, None]
    return np.asarray(np.clip(out * 255 + 0.5, 0, 255), dtype=np.uint8)


def _encode(rgb: NDArray[np.uint8], spec: PictureSpec, quality: int) -> bytes:
    picture = Image.fromarray(rgb)
    if spec.colour == NEUTRAL and spec.format != "webp":
        picture = picture.convert("L")  # some files of one channel, as in any real collection
    buffer = BytesIO()
    if spec.format == "png":
        picture.save(buffer, "PNG", compress_level=3)
    elif spec.format == "webp":
        picture.save(buffer, "WEBP", quality=quality, method=1)
    else:
        exif = Image.Exif()
        if spec.orientation != 1:
            exif[_EXIF_ORIENTATION] = spec.orientation
            picture = picture.transpose(_STORED[spec.orientation])
        picture.save(buffer, "JPEG", quality=quality, exif=exif)
    return buffer.getvalue()


def displayed(data: bytes) -> NDArray[np.uint8]:
    """Pixels as a viewer shows them, orientation applied: uint8 [height, width, 3]."""
    with Image.open(BytesIO(data)) as opened:
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"), dtype=np.uint8)
