"""Three mixes of training samples, made in memory by a recipe: text, images with text, mostly video.

    name, n, seed  --Philox, public quantiles / scale-->  SampleShape (text tokens, labels, grids of media)
        |-- counts, index    what a planner knows                       StepCounts, SelectIndex
        '-- mix[i]           tokens, labels, positions, noise pixels    LoadedSample, made when it is asked for

Shapes follow `quantile_tables` (chat, captions, image sizes of five domains, clips and whole videos), made so much
smaller that a step of a model of a million parameters takes half a second on one core: a third to a sixteenth of the
text tokens, images of a third of the side, at most 144 visual tokens an image and 1,024 a video. What is kept is the
skew. Time does not depend on values, so tokens and pixels are noise, and all patches are parts of one pool.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.counts import ITEM_TABLE, SAMPLE_COLUMNS, SUM_OF_ITEMS, StepCounts
from dataloaders.chat import IGNORED_LABEL, MediaSpan
from dataloaders.estimators.base import full_segments, window_segments
from dataloaders.index import Confidence
from dataloaders.positions import mrope_positions
from dataloaders.sample import LoadedSample
from dataloaders.tokenizer import Special
from tools.benchmarks import quantile_tables as tables

Grid = tuple[int, int, int]
Generator = np.random.Generator

MERGE, WINDOW, PATCH_VALUES = 2, 8, 1176  # as in Qwen2.5-VL: patches a side of a token, of a window; numbers a patch
MAX_TEXT_TOKENS, MAX_IMAGE_TOKENS, MAX_VIDEO_TOKENS = 2048, 144, 1024
_CELL_PX = 3 * 28  # pixels a visual token stands for: three times fewer a side than in the model
_NUM_BYTES = 256
_SMALLEST_POOL = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """One sample: text tokens beside the visual ones, the last `label_tokens` of them learned; (t, h, w) in patches."""

    text_tokens: int
    label_tokens: int
    grids: tuple[Grid, ...] = ()

    @property
    def visual_tokens(self) -> int:
        """LLM positions of all media."""
        return sum(_visual_tokens(grid) for grid in self.grids)


class Mix:
    """`num_samples` samples of a mix; map-style, picklable, the same for the same arguments.

    Args:
        name: one of `MIXES`.
        seed: of shapes and values.
        with_pixels: False: patches [0, 1176], for those who only count.

    Raises:
        KeyError: no such mix.
    """

    def __init__(self, name: str, num_samples: int, *, seed: int = 0, with_pixels: bool = True) -> None:
        self.name, self._seed, self._with_pixels = name, seed, with_pixels
        key = [seed, sorted(MIXES).index(name) if name in MIXES else _unknown(name)]
        generator = np.random.Generator(np.random.Philox(key=key))
        self.shapes = tuple(MIXES[name](generator) for _ in range(num_samples))

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, i: int) -> LoadedSample:
        shape = self.shapes[i]
        generator = np.random.Generator(np.random.Philox(key=[self._seed, i]))
        length = shape.text_tokens + shape.visual_tokens
        tokens = generator.integers(0, _NUM_BYTES, length).astype(np.int32)
        spans = _spans(shape.grids)
        for span in spans:
            is_image = shape.grids[span.media_index][0] == 1
            tokens[span.start : span.start + span.count] = Special.IMAGE_PAD if is_image else Special.VIDEO_PAD
        labels = np.full(length, IGNORED_LABEL, dtype=np.int32)
        # Shifted: position i is to predict token i + 1; the last one predicts nothing.
        labels[length - 1 - shape.label_tokens : length - 1] = tokens[length - shape.label_tokens :]
        grids = np.array(shape.grids, dtype=np.int64).reshape(-1, 3)
        places = [np.arange(span.start, span.start + span.count) for span in spans]
        return LoadedSample(
            sample_id=i,
            place=f"{self.name}[{i}]",
            tokens=tokens,
            labels=labels,
            position_ids=mrope_positions(length, spans, grids, merge=MERGE, time_steps=[1.0] * len(grids)),
            visual_index=np.concatenate([np.zeros(0, np.int64), *places]),
            patches=self._patches(int(grids.prod(axis=1).sum()), generator),
            grids=grids,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_pool"}

    @cached_property
    def counts(self) -> StepCounts:
        """Counts of all samples, and of their media."""
        return counts_of(self.shapes)

    @cached_property
    def index(self) -> "MixIndex":
        """The same as a planner reads a data set."""
        return MixIndex(self.counts)

    @cached_property
    def _pool(self) -> NDArray[np.float32]:
        largest = int(self.counts.patches.max(initial=0))
        rows = max(2 * largest, min(_SMALLEST_POOL, int(self.counts.patches.sum())))
        return np.random.Generator(np.random.Philox(0)).standard_normal((rows, PATCH_VALUES), dtype=np.float32)

    def _patches(self, count: int, generator: Generator) -> NDArray[np.float32]:
        if not self._with_pixels or not count:
            return np.zeros((0, PATCH_VALUES), np.float32)
        start = int(generator.integers(0, len(self._pool) - count + 1))
        return self._pool[start : start + count]


class MixIndex:
    """Counts of all samples of a mix in the form of an index (a `balancer.select.SelectIndex`)."""

    def __init__(self, counts: StepCounts) -> None:
        columns: dict[str, NDArray[Any]] = {name: getattr(counts, name) for name in SAMPLE_COLUMNS}
        columns["confidence"] = np.full(len(counts), Confidence.COUNTED, np.uint8)
        self.samples: Mapping[str, NDArray[Any]] = columns
        self.items: Mapping[str, NDArray[Any]] = {total: getattr(counts, name) for name, total in SUM_OF_ITEMS.items()}
        self.item_offsets: NDArray[Any] = counts.item_offsets
        self.shard_numbers: NDArray[Any] = np.zeros(len(counts), np.int64)
        self.bad: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self.shard_numbers)

    def keys(self, i: int) -> object:
        """Name of sample i, for messages."""
        return f"sample {i}"

    def shard(self, i: int) -> object:
        """Where sample i lies, for messages."""
        return "memory"


def counts_of(shapes: Sequence[SampleShape]) -> StepCounts:
    """Counts of `shapes`, with their media as items; ids are their places."""
    grids = [grid for shape in shapes for grid in shape.grids]
    offsets = np.zeros(len(shapes) + 1, np.int64)
    np.cumsum([len(shape.grids) for shape in shapes], out=offsets[1:])
    visual = [shape.visual_tokens for shape in shapes]
    items = {
        "item_patches": [t * h * w for t, h, w in grids],
        "item_visual_tokens": [_visual_tokens(grid) for grid in grids],
        "item_full_sq": [full_segments(grid).total_sq for grid in grids],
        "item_window_sq": [window_segments(grid, WINDOW).total_sq for grid in grids],
    }
    table = {"item_offsets": offsets, **{name: np.array(values, np.int64) for name, values in items.items()}}
    if set(table) != set(ITEM_TABLE):
        raise RuntimeError(f"the item table has columns {ITEM_TABLE}")
    columns = {
        "llm_tokens": [shape.text_tokens + tokens for shape, tokens in zip(shapes, visual, strict=True)],
        "label_tokens": [shape.label_tokens for shape in shapes],
        "visual_tokens": visual,
        "num_items": [len(shape.grids) for shape in shapes],
    }
    sums = {total: np.add.reduceat(np.append(table[name], 0), offsets[:-1]) for name, total in SUM_OF_ITEMS.items()}
    empty = np.diff(offsets) == 0
    return StepCounts(
        sample_ids=np.arange(len(shapes), dtype=np.int64),
        **{name: np.array(values, np.int64) for name, values in columns.items()},
        **{total: np.where(empty, 0, values) for total, values in sums.items() if total not in columns},
        **table,
    )


def _visual_tokens(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2] // MERGE**2


def _spans(grids: Sequence[Grid]) -> list[MediaSpan]:
    """Media behind the first token, one token between two of them."""
    spans, start = [], 1
    for index, grid in enumerate(grids):
        spans.append(MediaSpan(start=start, count=_visual_tokens(grid), media_index=index))
        start += _visual_tokens(grid) + 1
    return spans


def _text(generator: Generator) -> SampleShape:
    """Documents: lognormal (median 130 tokens), 5 % of them Pareto (exponent 1.3 from 650 on)."""
    heavy = generator.random() < 0.05
    length = 650.0 * (1.0 - generator.random()) ** (-1.0 / 1.3) if heavy else generator.lognormal(np.log(130.0), 1.0)
    return _shape(min(MAX_TEXT_TOKENS, round(length)), ())


def _image_chat(generator: Generator) -> SampleShape:
    """0 to 6 images of the domains, and chat of a sixteenth of the length."""
    number = int(generator.choice(7, p=(0.10, 0.50, 0.16, 0.10, 0.07, 0.04, 0.03)))
    text = _drawn(generator, tables.LENGTH_LEVELS, tables.AZURE_CONVERSATION_TOKENS) / 16
    return _shape(round(text), [_image(generator) for _ in range(number)])


def _video_heavy(generator: Generator) -> SampleShape:
    """Half are videos with a caption, a quarter image chat, a quarter text."""
    kind = generator.random()
    if kind < 0.25:
        return _text(generator)
    if kind < 0.5:
        return _image_chat(generator)
    return _shape(round(_drawn(generator, tables.LENGTH_LEVELS, tables.CAPTION_TOKENS)), [_video(generator)])


def _image(generator: Generator) -> Grid:
    domains = list(tables.IMAGE_DOMAINS.values())
    domain = domains[int(generator.choice(len(domains), p=[entry.share for entry in domains]))]
    side = _drawn(generator, tables.SIZE_LEVELS, domain.side_px) / _CELL_PX
    root = np.sqrt(_drawn(generator, tables.SIZE_LEVELS, domain.aspect))
    side = min(side, float(np.sqrt(MAX_IMAGE_TOKENS)))
    height = int(np.clip(np.rint(side / root), 1, MAX_IMAGE_TOKENS))
    width = int(np.clip(np.rint(side * root), 1, MAX_IMAGE_TOKENS // height))
    return (1, MERGE * height, MERGE * width)


def _video(generator: Generator) -> Grid:
    """90 % trimmed clips, 10 % whole videos at a quarter of the frames: a slice is two frames, two frames a second."""
    if generator.random() < 0.1:
        slices = round(_drawn(generator, tables.DURATION_LEVELS, tables.VIDEO_SECONDS) / 4)
    else:
        slices = round(_drawn(generator, tables.DURATION_LEVELS, tables.CLIP_SECONDS))
    height, width = ((3, 5), (4, 7), (5, 7), (8, 11))[int(generator.choice(4, p=(0.2, 0.2, 0.4, 0.2)))]
    return (int(np.clip(slices, 2, MAX_VIDEO_TOKENS // (height * width))), MERGE * height, MERGE * width)


def _shape(text: int, grids: Sequence[Grid]) -> SampleShape:
    """Every medium has a text token before it, and the answer is the last third of the text."""
    text = max(text, len(grids) + 3)
    return SampleShape(text_tokens=text, label_tokens=max(1, (text - len(grids) - 1) // 3), grids=tuple(grids))


def _drawn(generator: Generator, levels: Sequence[float], values: Sequence[float]) -> float:
    """One draw from the distribution with quantiles `values` at `levels`; logarithmic in between."""
    return float(np.exp(np.interp(generator.random(), levels, np.log(values))))


def _unknown(name: str) -> int:
    raise KeyError(f"mix {name!r} does not exist; choose one of {', '.join(MIXES)}")


MIXES: Mapping[str, Callable[[Generator], SampleShape]] = MappingProxyType(
    {"text": _text, "vlm": _image_chat, "video": _video_heavy}
)
