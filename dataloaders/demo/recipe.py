"""What every sample of the demo corpus will be, decided before a pixel is drawn: a pure function of (seed, size).

    counts of kinds -> order of kinds -> per medium: size, format, orientation, colour and brightness aimed at, motion

Draws are *decks*: a class list repeated to length and shuffled, or one draw from each of n equal slices of [0, 1). So
even 24 samples have every colour, a thumbnail and a full-size picture, and no class of facts dominates. Only `random()`
of a Philox generator is used: that stream does not change between numpy versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

import numpy as np
from numpy.random import Generator, Philox

from dataloaders.demo.facts import BRIGHTNESS, COLOURS, MOTIONS
from dataloaders.demo.photos import PHOTOS
from dataloaders.demo.quantiles import (
    CLIP_DURATION_S,
    CLIP_FPS,
    CLIP_FRAME_PX,
    domain_at,
    pick_share,
    value_at,
)

T = TypeVar("T")
Kind = Literal["text", "image", "images", "clip"]

SHARES: dict[Kind, float] = {"text": 0.20, "images": 0.15, "clip": 0.20}
"""Shares of the kinds; single images take the rest (45 %)."""

# Real sizes are shrunk by one factor, so that their shape survives below the cap of 256 visual tokens; without it most
# photographs would sit on the cap.
SHRINK = 0.62
MIN_SIDE_PX, MAX_SIDE_PX = 24, 800
MAX_ASPECT = 6.0
CLIP_SHRINK = 0.3
CLIP_MIN_SIDE_PX, CLIP_MAX_SIDE_PX = 84, 224

# Seven colours and three brightnesses have no common factor: the 21 pairs in an order whose every prefix is balanced.
_CLASSES = tuple(
    (COLOURS[i % len(COLOURS)], BRIGHTNESS[i % len(BRIGHTNESS)]) for i in range(len(COLOURS) * len(BRIGHTNESS))
)
_NUM_PICTURES = ((2, 0.40), (3, 0.64), (4, 0.81), (5, 0.92), (6, 1.0))
_FORMATS = (("jpg", 0.62), ("png", 0.82), ("webp", 1.0))
# One JPEG in six carries an orientation; 6 and 8 (a phone held upright) are the common ones, as in real collections.
_ORIENTATIONS = (
    6,
    1,
    1,
    1,
    1,
    1,
    8,
    1,
    1,
    1,
    1,
    1,
    5,
    1,
    1,
    1,
    1,
    1,
    3,
    1,
    1,
    1,
    1,
    1,
    7,
    1,
    1,
    1,
    1,
    1,
    2,
    1,
    1,
    1,
    1,
    1,
    4,
)
# PNG and WebP of large pictures are slow to encode or decode for what they add; large files are JPEG.
_MAX_LOSSLESS_PX = 320 * 320


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSpec:
    """One picture: displayed size in px, file format, EXIF orientation, and the facts aimed at."""

    photo: int
    width_px: int
    height_px: int
    format: str
    orientation: int
    colour: str
    brightness: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSpec:
    """One clip: frame size in px, rate, number of frames, camera motion, and the facts aimed at."""

    photo: int
    width_px: int
    height_px: int
    fps: Fraction
    num_frames: int
    motion: str
    colour: str
    brightness: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """One sample: `question` picks a template, `parts_style` the JSON spelling, `length` in [0, 1) its size."""

    sample_id: int
    kind: Kind
    question: int
    parts_style: bool
    length: float
    pictures: tuple[PictureSpec, ...] = ()
    clip: ClipSpec | None = None


def rng_for(seed: int, stream: int) -> Generator:
    """Generator of one stream: 0 plans the corpus, 1 + sample_id draws the sample."""
    return Generator(Philox(key=np.array([seed, stream], dtype=np.uint64)))


def plan_samples(num_samples: int, seed: int) -> tuple[SampleSpec, ...]:
    """The recipe of all samples, in their order in the shards."""
    rng = rng_for(seed, 0)
    kinds = _kinds(num_samples, rng)
    widths = [pick_share(_NUM_PICTURES, u) for u in _slices(kinds.count("images"), rng)]
    pictures = iter(_pictures(kinds.count("image") + sum(widths), rng))
    clips = iter(_clips(kinds.count("clip"), rng))
    several, lengths = iter(widths), iter(_slices(kinds.count("text"), rng))
    questions = {kind: iter(_deck(range(12), kinds.count(kind), rng)) for kind in ("text", "image", "images", "clip")}
    styles = _deck((True, False), num_samples, rng)
    samples = []
    for sample_id, kind in enumerate(kinds):
        number = 1 if kind == "image" else next(several) if kind == "images" else 0
        samples.append(
            SampleSpec(
                sample_id=sample_id,
                kind=kind,
                question=next(questions[kind]),
                parts_style=styles[sample_id],
                length=next(lengths) if kind == "text" else 0.0,
                pictures=tuple(next(pictures) for _ in range(number)),
                clip=next(clips) if kind == "clip" else None,
            )
        )
    return tuple(samples)


def _kinds(num_samples: int, rng: Generator) -> list[Kind]:
    kinds: list[Kind] = []
    for kind, share in SHARES.items():
        kinds += [kind] * int(num_samples * share + 0.5)
    kinds = kinds[: num_samples - 1]
    kinds += ["image"] * (num_samples - len(kinds))
    return [kinds[i] for i in _order(num_samples, rng)]


def _pictures(number: int, rng: Generator) -> list[PictureSpec]:
    classes = _deck(_CLASSES, number, rng)
    photos = _deck(range(len(PHOTOS)), number, rng)
    domains, sides, aspects, formats = (_slices(number, rng) for _ in range(4))
    specs, num_jpegs = [], 0
    for i in range(number):
        width, height = picture_size(domains[i], sides[i], aspects[i])
        name = pick_share(_FORMATS, formats[i]) if width * height <= _MAX_LOSSLESS_PX else "jpg"
        orientation = _ORIENTATIONS[num_jpegs % len(_ORIENTATIONS)] if name == "jpg" else 1
        num_jpegs += name == "jpg"
        colour, brightness = classes[i]
        specs.append(
            PictureSpec(
                photo=photos[i],
                width_px=width,
                height_px=height,
                format=name,
                orientation=orientation,
                colour=colour,
                brightness=brightness,
            )
        )
    return specs


def picture_size(domain: float, side: float, aspect: float) -> tuple[int, int]:
    """Displayed (width, height) in px for three draws in [0, 1): domain, geometric mean side, aspect."""
    table = domain_at(domain)
    side_px = SHRINK * value_at(table.side_px, side)
    ratio = min(max(value_at(table.aspect, aspect), 1 / MAX_ASPECT), MAX_ASPECT)
    width, height = side_px * ratio**0.5, side_px / ratio**0.5
    scale = min(1.0, MAX_SIDE_PX / max(width, height))
    return max(MIN_SIDE_PX, round(width * scale)), max(MIN_SIDE_PX, round(height * scale))


def _clips(number: int, rng: Generator) -> list[ClipSpec]:
    classes = _deck(_CLASSES, number, rng)
    photos, motions = _deck(range(len(PHOTOS)), number, rng), _deck(MOTIONS, number, rng)
    durations, rates, sizes = (_slices(number, rng) for _ in range(3))
    specs = []
    for i in range(number):
        width, height = clip_size(sizes[i])
        numerator, denominator = pick_share(CLIP_FPS, rates[i])
        fps = Fraction(numerator, denominator)
        colour, brightness = classes[i]
        specs.append(
            ClipSpec(
                photo=photos[i],
                width_px=width,
                height_px=height,
                fps=fps,
                num_frames=max(1, round(value_at(CLIP_DURATION_S, durations[i]) * fps)),
                motion=motions[i],
                colour=colour,
                brightness=brightness,
            )
        )
    return specs


def clip_size(draw: float) -> tuple[int, int]:
    """Frame (width, height) in px for a draw in [0, 1); even, as 4:2:0 video demands."""
    width, height = pick_share(CLIP_FRAME_PX, draw)
    scale = min(CLIP_SHRINK, CLIP_MAX_SIDE_PX / max(width, height))
    return (_even(width * scale), _even(height * scale))


def _even(side: float) -> int:
    return max(CLIP_MIN_SIDE_PX, 2 * round(side / 2))


def _order(number: int, rng: Generator) -> list[int]:
    return [int(i) for i in np.argsort(rng.random(number), kind="stable")]


def _slices(number: int, rng: Generator) -> list[float]:
    """One draw from each of `number` equal slices of [0, 1), in random order."""
    order, inside = _order(number, rng), rng.random(number)
    return [(order[i] + float(inside[i])) / number for i in range(number)]


def _deck(classes: Sequence[T], number: int, rng: Generator) -> list[T]:
    """`number` cards: the classes in turn (so counts differ by at most one), shuffled."""
    return [classes[i % len(classes)] for i in _order(number, rng)]
