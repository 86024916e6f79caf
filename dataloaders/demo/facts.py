"""Facts that can be measured from displayed pixels, and how clearly they hold: the ground truth of the demo captions.

Definitions, for a picture or a stack of frames (RGB as displayed; as in HSV, V = max / 255 and S = (max - min) / max):

- *colour*: a pixel counts as coloured when S >= 0.25 and V >= 0.06. If fewer than 35 % of the pixels are coloured the
  colour is `neutral`, otherwise that of the fullest of six hue sectors, each 60 degrees wide, centred on red, yellow,
  green, cyan, blue, magenta. The names begin with different letters: a byte-level model decides in one step.
- *brightness*: mean of V: `dark` below 0.38, `bright` from 0.62, `medium` between. V, not luma: blue can be bright.

`Measure.clear` says that every decision is far from its border, so another decoder, scaler or colour rounding agrees.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HUES = ("red", "yellow", "green", "cyan", "blue", "magenta")
NEUTRAL = "neutral"
COLOURS = (*HUES, NEUTRAL)
BRIGHTNESS = ("dark", "medium", "bright")
MOTIONS = ("left", "right", "up", "down", "in", "out")

MIN_SATURATION = 0.25
MIN_VALUE = 0.06
MIN_COLOURED_SHARE = 0.35
DARK_BELOW = 0.38
BRIGHT_FROM = 0.62

_MARGIN_COLOURED_SHARE = 0.08
_MARGIN_VALUE = 0.04
_MIN_LEAD = 1.4
_MAX_SIDE_PX = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Facts of a picture or a clip.

    Attributes:
        colour: one of `COLOURS`; brightness: one of `BRIGHTNESS`.
        coloured_share: share of coloured pixels, 0..1.
        lead: pixels of the fullest hue sector over those of the second (inf when there is no second).
        mean_value: mean of V, 0..1.
    """

    colour: str
    brightness: str
    coloured_share: float
    lead: float
    mean_value: float

    @property
    def clear(self) -> bool:
        """Whether colour and brightness both hold with a margin."""
        value_gap = min(abs(self.mean_value - DARK_BELOW), abs(self.mean_value - BRIGHT_FROM))
        share_gap = abs(self.coloured_share - MIN_COLOURED_SHARE)
        hue_clear = self.colour == NEUTRAL or self.lead >= _MIN_LEAD
        return hue_clear and share_gap >= _MARGIN_COLOURED_SHARE and value_gap >= _MARGIN_VALUE


def measure(rgb: NDArray[np.uint8]) -> Measure:
    """Measure displayed pixels `rgb`, uint8 [..., height, width, 3]; large pictures are read on a regular grid."""
    step_h, step_w = -(-rgb.shape[-3] // _MAX_SIDE_PX), -(-rgb.shape[-2] // _MAX_SIDE_PX)
    pixels = rgb[..., ::step_h, ::step_w, :].reshape(-1, 3).astype(np.int32)
    red, green, blue = pixels.T
    # Channel by channel: numpy reduces an axis of length 3 many times slower.
    high, low = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    chroma = high - low
    coloured = (chroma >= MIN_SATURATION * high) & (high >= MIN_VALUE * 255) & (chroma > 0)
    counts = np.bincount(_sectors(pixels[coloured], high[coloured], chroma[coloured]), minlength=6)
    share = float(coloured.mean())
    second, first = np.sort(counts)[-2:]
    value = float(high.mean()) / 255
    return Measure(
        colour=HUES[int(counts.argmax())] if share >= MIN_COLOURED_SHARE else NEUTRAL,
        brightness=BRIGHTNESS[int(value >= DARK_BELOW) + int(value >= BRIGHT_FROM)],
        coloured_share=share,
        lead=float(first / second) if second else float("inf"),
        mean_value=value,
    )


def _sectors(pixels: NDArray[np.int32], high: NDArray[np.int32], chroma: NDArray[np.int32]) -> NDArray[np.int64]:
    """Index into `HUES` of the nearest hue, for pixels [n, 3] with chroma > 0."""
    red, green, blue = pixels[:, 0], pixels[:, 1], pixels[:, 2]
    # Hue in units of 60 degrees: 0 red, 2 green, 4 blue, by which channel is the largest.
    hue = np.where(
        high == red,
        (green - blue) / chroma,
        np.where(high == green, 2 + (blue - red) / chroma, 4 + (red - green) / chroma),
    )
    return (np.floor(hue + 0.5).astype(np.int64)) % 6
