"""Sizes of real media as quantile tables: what the demo corpus draws its pictures and clips from.

Numbers only, no media. How they were derived: each column is read at the probabilities `PROBABILITIES` (the 1st
percentile, the nine deciles, the 99th percentile, so that single damaged files do not set the ends). For pictures,
`side_px` is sqrt(width * height) and `aspect` is width / height, from header sizes of these public sets:

| domain        | pictures | source of the sizes                                                          |
|---------------|---------:|------------------------------------------------------------------------------|
| web photo     |   22,503 | PASCAL VOC 2007/2012 annotations (Flickr), ImageNet sample images             |
| product photo |    3,781 | clothing-dataset-small (CC0)                                                 |
| house photo   |    2,126 | Houses-dataset                                                               |
| phone photo   |    5,331 | TACO annotations, official and unofficial                                    |
| clip art      |    7,695 | Debian openclipart-png (CC0), tuxpaint-stamps                                |
| screenshot    |    6,279 | Debian gimp-help, opencv-doc                                                 |
| receipt       |      634 | SROIE scanned receipts                                                       |

Clips: durations between 1 and 12 s of MS-ASL (9,079 clips, weight 0.6) and of KoNViD-1k, LIVE-VQC and CVD2014 (1,791
clips, weight 0.4); frame rates of the same mixture; frame sizes of MS-ASL by share (the others do not state theirs).

The price of the form: side and aspect are drawn independently inside a domain, and between two quantiles the curve is a
straight line. The mixture over domains (`weight`) is ours: it stands for a mixed instruction set, not for a source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

PROBABILITIES = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureDomain:
    """Sizes of one kind of picture: quantiles at `PROBABILITIES`, and its share in the demo corpus."""

    name: str
    weight: float
    side_px: tuple[float, ...]
    aspect: tuple[float, ...]


PICTURE_DOMAINS = (
    PictureDomain(
        name="clip art",
        weight=0.22,
        side_px=(39, 60, 100, 100, 128, 171, 298, 438, 533, 885, 949),
        aspect=(0.39, 0.71, 0.8, 1.0, 1.0, 1.0, 1.0, 1.0, 1.08, 1.5, 2.67),
    ),
    PictureDomain(
        name="screenshot",
        weight=0.15,
        side_px=(16, 100, 138, 164, 192, 238, 280, 300, 366, 488, 933),
        aspect=(0.47, 0.81, 1.0, 1.0, 1.06, 1.32, 1.5, 1.92, 2.58, 3.9, 8.54),
    ),
    PictureDomain(
        name="web photo",
        weight=0.30,
        side_px=(277, 407, 408, 409, 430, 433, 433, 433, 433, 433, 499),
        aspect=(0.66, 0.75, 1.01, 1.33, 1.33, 1.33, 1.33, 1.36, 1.5, 1.5, 1.89),
    ),
    PictureDomain(
        name="product photo",
        weight=0.12,
        side_px=(400, 447, 462, 462, 462, 462, 462, 462, 462, 480, 534),
        aspect=(0.56, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 0.9, 1.33, 1.78),
    ),
    PictureDomain(
        name="house photo",
        weight=0.08,
        side_px=(391, 508, 523, 554, 600, 664, 734, 833, 836, 883, 887),
        aspect=(0.67, 1.33, 1.33, 1.34, 1.5, 1.5, 1.5, 1.5, 1.5, 1.51, 1.8),
    ),
    PictureDomain(
        name="receipt",
        weight=0.05,
        side_px=(603, 857, 929, 990, 1051, 1188, 1279, 1323, 1434, 5900, 5900),
        aspect=(0.29, 0.37, 0.41, 0.44, 0.48, 0.5, 0.52, 0.55, 0.71, 0.71, 1.21),
    ),
    PictureDomain(
        name="phone photo",
        weight=0.08,
        side_px=(554, 1774, 2701, 2827, 2827, 3464, 3464, 3464, 3492, 3492, 4032),
        aspect=(0.46, 0.56, 0.75, 0.75, 0.75, 0.75, 0.75, 1.0, 1.33, 1.33, 2.19),
    ),
)

CLIP_DURATION_S = (1.07, 1.54, 1.97, 2.47, 3.0, 3.72, 7.54, 8.01, 8.01, 10.01, 10.04)
# (frames per second as a fraction, upper end of its share of the clips)
CLIP_FPS = (((15, 1), 0.09), ((24_000, 1001), 0.18), ((25, 1), 0.27), ((30_000, 1001), 0.86), ((30, 1), 1.0))
# (width_px, height_px, upper end of its share of the clips)
CLIP_FRAME_PX = (
    ((1280, 720), 0.44),
    ((640, 360), 0.83),
    ((480, 360), 0.95),
    ((540, 360), 0.97),
    ((1280, 540), 0.98),
    ((406, 720), 0.99),
    ((360, 360), 1.0),
)


def value_at(quantiles: Sequence[float], probability: float) -> float:
    """The value at `probability` in [0, 1] on the line through the quantiles (constant beyond the outer two)."""
    if probability <= PROBABILITIES[0]:
        return float(quantiles[0])
    for index in range(1, len(PROBABILITIES)):
        low, high = PROBABILITIES[index - 1], PROBABILITIES[index]
        if probability <= high:
            part = (probability - low) / (high - low)
            return float(quantiles[index - 1] + part * (quantiles[index] - quantiles[index - 1]))
    return float(quantiles[-1])


def pick_share(shares: Sequence[tuple[T, float]], probability: float) -> T:
    """The first entry whose cumulative share reaches `probability`; the last one catches rounding."""
    for value, upto in shares:
        if probability <= upto:
            return value
    return shares[-1][0]


def domain_at(probability: float) -> PictureDomain:
    """The picture domain at `probability` in [0, 1] of the mixture."""
    upto = 0.0
    for domain in PICTURE_DOMAINS:
        upto += domain.weight
        if probability <= upto:
            return domain
    return PICTURE_DOMAINS[-1]
