"""Micro-batches to measure a model on: drawn to spread the terms of cost apart, or drawn like data to check the fit.

    designed_set   corners, Latin hypercube over tokens, samples, visual share, side, labels -> fit
    workload_set   lognormal texts, some images each, packed in order up to a random fill   -> check, never fitted
        |
    MicroBatchShape ((text tokens, grids, labels) per sample)
        |-- counts   StepCounts of all samples + micro-batch of each         what the planner would know
        '-- build    MicroBatch in memory: random tokens, pixels of one pool  what the pieces run

In data, tokens and patches rise together and long texts are rare, so a fit on data cannot tell the terms apart. Here
every factor falls once into each of `count` slices of its range, in an order independent of the other factors.
Time does not depend on values, so pixels and tokens are noise; a video is several slices of one grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from balancer.batch import MicroBatch
from balancer.counts import StepCounts
from balancer.packed_cell import pack_samples
from dataloaders.chat import IGNORED_LABEL, MediaSpan
from dataloaders.estimators.base import full_segments, window_segments
from dataloaders.positions import mrope_positions
from dataloaders.sample import LoadedSample
from trainer.errors import ConfigError
from trainer.model import ModelConfig
from trainer.option_checks import GIB

Grid = tuple[int, int, int]

MIN_CAPACITY_TOKENS = 64
MAX_POOL_BYTES = 16 * GIB
_SMALLEST_SHARE = 1 / 64  # of the capacity, in the smallest micro-batch
_TOKENS_PER_SAMPLE = 24  # the most samples a micro-batch is cut into: one per so many tokens
_TEXT_PER_SAMPLE = 2  # text tokens of the emptiest sample, media aside
_TEXT_ONLY_SHARE = 0.2
_VIDEO_SHARE = 0.2
_NUM_IDS = 256  # plain bytes: every model of this trainer has them
_LONGEST_SIDE = 64  # of an image, in patches
# (tokens, samples, visual share, image side, label share), each 0 to 1: the ends of the ranges.
_CORNERS = (
    (1.0, 0.0, 0.0, 0.0, 1.0),  # one text as long as a micro-batch
    (1.0, 1.0, 0.0, 0.0, 0.0),  # as many short texts as fit
    (1.0, 0.5, 1.0, 1.0, 0.0),  # large images
    (1.0, 1.0, 1.0, 0.0, 0.5),  # small ones
    (0.0, 0.0, 0.5, 0.5, 0.0),  # next to nothing
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """One sample: `text_tokens` positions beside the visual ones, the last `label_tokens` of them trained.

    Attributes:
        grids: (t, h, w) in patches of every media item.
    """

    text_tokens: int
    label_tokens: int
    grids: tuple[Grid, ...] = ()

    def visual_tokens(self, merge: int) -> int:
        """LLM positions of all media items."""
        return sum(_item_tokens(grid, merge) for grid in self.grids)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchShape:
    """The samples of one micro-batch, in slot order."""

    samples: tuple[SampleShape, ...]

    @property
    def num_patches(self) -> int:
        """Patches of all samples."""
        return sum(t * h * w for sample in self.samples for t, h, w in sample.grids)


def designed_set(
    *, count: int, capacity_tokens: int, capacity_patches: int, merge: int, seed: int
) -> tuple[MicroBatchShape, ...]:
    """`count` micro-batches that cover the space below the capacities.

    Raises:
        ConfigError: a capacity too small for anything to vary.
    """
    if capacity_tokens < MIN_CAPACITY_TOKENS:
        raise ConfigError(f"capacity_tokens={capacity_tokens}: profiling needs at least {MIN_CAPACITY_TOKENS}.")
    rng = np.random.Generator(np.random.Philox(seed))
    # axes: (factor, micro-batch); each row is a random order of `count` slices, and a place inside the slice
    places = (np.stack([rng.permutation(count) for _ in range(5)]) + rng.random((5, count))) / count
    low = max(_SMALLEST_SHARE * capacity_tokens, 16)
    shapes = []
    for tokens_at, samples_at, visual_at, side_at, labels_at in (*_CORNERS, *places.T[len(_CORNERS) :]):
        tokens = round(low * (capacity_tokens / low) ** tokens_at)
        most = max(1.0, tokens / _TOKENS_PER_SAMPLE)
        share = 0.95 * max(0.0, (visual_at - _TEXT_ONLY_SHARE) / (1 - _TEXT_ONLY_SHARE))
        num_samples = round(most**samples_at)
        visual = min(round(share * tokens), capacity_patches // merge**2)
        room = tokens - _TEXT_PER_SAMPLE * num_samples
        grids = _grids(rng, visual, float(side_at), merge, room=room)
        shapes.append(
            _cut(rng, grids, tokens=tokens, num_samples=num_samples, label_share=float(labels_at), merge=merge)
        )
    return tuple(shapes)


def workload_set(
    *, count: int, capacity_tokens: int, capacity_patches: int, merge: int, seed: int
) -> tuple[MicroBatchShape, ...]:
    """`count` micro-batches as a loader would pack them from skewed data; no slice of any range is promised."""
    rng = np.random.Generator(np.random.Philox(seed))
    shapes = []
    for fill in rng.uniform(0.25, 1.0, size=count):
        samples: list[SampleShape] = []
        tokens = patches = 0
        while True:
            sample = _drawn(rng, capacity_tokens, merge)
            tokens += sample.text_tokens + sample.visual_tokens(merge)
            patches += sum(t * h * w for t, h, w in sample.grids)
            if samples and (tokens > fill * capacity_tokens or patches > fill * capacity_patches):
                break
            samples.append(sample)
            if tokens > capacity_tokens or patches > capacity_patches:
                samples = [SampleShape(text_tokens=max(2, capacity_tokens // 2), label_tokens=1)]
                break
        shapes.append(MicroBatchShape(samples=tuple(samples)))
    return tuple(shapes)


def counts(shapes: Sequence[MicroBatchShape], config: ModelConfig) -> tuple[StepCounts, np.ndarray]:
    """Counts of all samples as the index would have them, and the micro-batch of each, int64 [n]."""
    merge, window = config.vision.merge, config.vision.window_px // config.vision.patch_px
    rows, where = [], []
    for microbatch, shape in enumerate(shapes):
        for sample in shape.samples:
            visual = sample.visual_tokens(merge)
            rows.append(
                (
                    sample.text_tokens + visual,
                    sample.label_tokens,
                    visual,
                    visual * merge**2,
                    len(sample.grids),
                    sum(full_segments(grid).total_sq for grid in sample.grids),
                    sum(window_segments(grid, window).total_sq for grid in sample.grids),
                )
            )
            where.append(microbatch)
    names = ("llm_tokens", "label_tokens", "visual_tokens", "patches", "num_items", "full_total_sq", "window_total_sq")
    columns = np.array(rows, dtype=np.int64).reshape(-1, len(names))
    by_name = {name: columns[:, i] for i, name in enumerate(names)}
    return StepCounts(sample_ids=np.arange(len(rows)), **by_name), np.array(where, dtype=np.int64)


def pixel_pool(shapes: Sequence[MicroBatchShape], config: ModelConfig) -> NDArray[np.float32]:
    """Pixels that all `shapes` take their patches from, [P, patch_values]: memory for one large micro-batch, not all.

    Half as many again as the largest needs, so that two micro-batches rarely start at the same patch.

    Raises:
        ConfigError: more than `MAX_POOL_BYTES`, or than there is.
    """
    largest = max((shape.num_patches for shape in shapes), default=0)
    rows = largest + largest // 2
    size = rows * config.vision.patch_values * np.dtype(np.float32).itemsize
    rng = np.random.Generator(np.random.Philox(0))
    try:
        if size > MAX_POOL_BYTES:
            raise MemoryError
        return rng.standard_normal((rows, config.vision.patch_values), dtype=np.float32)
    except MemoryError:
        raise ConfigError(
            f"micro-batches of {largest} patches need {size / GIB:.3g} GiB for pixels alone. Lower capacity_patches or "
            f"capacity_tokens to what training will use."
        ) from None


def build(shape: MicroBatchShape, config: ModelConfig, *, seed: int, pixels: NDArray[np.float32]) -> MicroBatch:
    """The micro-batch in memory, on the CPU; its patches are a part of `pixels`, not a copy."""
    rng = np.random.Generator(np.random.Philox(seed))
    loaded = [_loaded(rng, sample, config, row) for row, sample in enumerate(shape.samples)]
    start = int(rng.integers(0, len(pixels) - shape.num_patches + 1))
    patches = torch.from_numpy(pixels[start : start + shape.num_patches])
    return replace(MicroBatch.of(pack_samples(loaded)), patches=patches)


def _loaded(rng: np.random.Generator, sample: SampleShape, config: ModelConfig, row: int) -> LoadedSample:
    """Media behind the first token, a token between two of them, the rest of the text at the end; without pixels."""
    merge = config.vision.merge
    spans, start = [], 1
    for index, grid in enumerate(sample.grids):
        spans.append(MediaSpan(start=start, count=_item_tokens(grid, merge), media_index=index))
        start = spans[-1].start + spans[-1].count + 1
    length = sample.text_tokens + sample.visual_tokens(merge)
    tokens = rng.integers(0, min(_NUM_IDS, config.llm.vocab_size), size=length).astype(np.int32)
    labels = np.full(length, IGNORED_LABEL, dtype=np.int32)
    if sample.label_tokens:
        labels[length - sample.label_tokens :] = tokens[length - sample.label_tokens :]
    grids = np.array(sample.grids, dtype=np.int64).reshape(-1, 3)
    visual = [np.arange(span.start, span.start + span.count) for span in spans]
    return LoadedSample(
        sample_id=row,
        place=f"profile sample {row}",
        tokens=tokens,
        labels=labels,
        position_ids=mrope_positions(length, spans, grids, merge=merge, time_steps=[1.0] * len(spans)),
        visual_index=np.concatenate(visual).astype(np.int64) if visual else np.empty(0, dtype=np.int64),
        patches=np.empty((0, config.vision.patch_values), dtype=np.float32),
        grids=grids,
    )


def _item_tokens(grid: Grid, merge: int) -> int:
    return grid[0] * grid[1] * grid[2] // merge**2


def _grids(rng: np.random.Generator, visual_tokens: int, side_at: float, merge: int, *, room: int) -> list[Grid]:
    """Items of about one size: at most `visual_tokens`, and with a text token behind each at most `room` tokens."""
    grids: list[Grid] = []
    left = visual_tokens
    while (left := min(left, room - 1)) > 0:
        longest = min(int(left**0.5), _LONGEST_SIDE // merge)
        side = max(1.0, longest**side_at * rng.uniform(0.8, 1.25))
        aspect = rng.uniform(0.6, 1.6)
        rows, columns = max(1, round(side * aspect**0.5)), max(1, round(side / aspect**0.5))
        slices = int(rng.integers(2, 5)) if rng.random() < _VIDEO_SHARE else 1
        while slices * rows * columns > left:
            slices, rows, columns = (1, rows, columns) if slices > 1 else (1, max(1, rows // 2), max(1, columns // 2))
        grids.append((slices, rows * merge, columns * merge))
        left -= slices * rows * columns
        room -= slices * rows * columns + 1
    return grids


def _cut(
    rng: np.random.Generator, grids: list[Grid], *, tokens: int, num_samples: int, label_share: float, merge: int
) -> MicroBatchShape:
    """Spread items and text over `num_samples` samples of unequal length."""
    owner = np.sort(rng.integers(0, num_samples, size=len(grids)))
    visual = sum(_item_tokens(grid, merge) for grid in grids)
    text = max(0, tokens - visual - _TEXT_PER_SAMPLE * num_samples - len(grids))
    cuts = np.sort(rng.integers(0, text + 1, size=num_samples - 1))
    lengths = np.diff(np.concatenate([[0], cuts, [text]]))
    samples = []
    for row, length in enumerate(lengths.tolist()):
        own = tuple(grid for grid, sample in zip(grids, owner.tolist(), strict=True) if sample == row)
        samples.append(
            SampleShape(
                text_tokens=length + _TEXT_PER_SAMPLE + len(own),
                label_tokens=max(1, round(label_share * length)),
                grids=own,
            )
        )
    return MicroBatchShape(samples=tuple(samples))


def _drawn(rng: np.random.Generator, capacity_tokens: int, merge: int) -> SampleShape:
    """A sample of skewed data: median text of a thirtieth of a micro-batch, two in three with images."""
    text = int(min(rng.lognormal(np.log(capacity_tokens / 30), 1.0), capacity_tokens / 2)) + 8
    grids = []
    num_items = int(rng.choice([0, 1, 2, 4], p=[0.35, 0.4, 0.15, 0.1]))
    for _ in range(num_items):
        side = min(rng.lognormal(np.log(max(2.0, capacity_tokens**0.5 / 6)), 0.5), capacity_tokens**0.5 / 2)
        aspect = rng.uniform(0.5, 2.0)
        rows, columns = (max(1, round(side * factor)) for factor in (aspect**0.5, aspect**-0.5))
        grids.append((1, rows * merge, columns * merge))
    return SampleShape(
        text_tokens=text + num_items, label_tokens=max(1, round(rng.uniform(0.2, 0.8) * text)), grids=tuple(grids)
    )
