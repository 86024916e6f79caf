"""Samples to pack and to balance: seven generators that ship, and the real tables where their folder is given.

    name, n, seed  --Philox-->  text tokens, images, patches  -->  tokens per sample  -->  nanoseconds per stage

Generated workloads are drawn from quantiles (`quantile_tables`), between which values are interpolated on a
logarithmic scale: marginals are real, correlations between columns are not, beyond those stated at each generator.
Images are counted by the rule of Qwen2.5-VL at its default limit of 1,280 tokens an image; InternVL has 256 tokens
and 1,024 patches a tile.

Samples above a capacity are clipped to it (`clipped`), as in the comparison of public packers: all of them get the
same clipped sizes. A trainer must decide instead whether to drop, cut or refuse such a sample.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from balancer.cost_model import CostModel, EncoderDims, LLMDims
from balancer.counts import StepCounts
from tools.benchmarks import quantile_tables as tables
from tools.benchmarks.image_patches import PATCHES_PER_TOKEN, image_patches
from tools.benchmarks.real_tables import PATCHES_PER_TILE, REAL_TABLES, Rows, only_text

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

TOKENS_PER_TILE = 256
WINDOW_PATCHES = 64  # a window of 112 px holds 8 x 8 patches of 14 px
VIDEO_FPS = 2.0
VIDEO_MAX_TOKENS = 114_816  # of qwen-vl-utils: 128,000 * 0.9 rounded to what a frame grid allows
FRAME_TOKENS = (117, 221, 299, 736)  # 320 x 240, 480 x 360, 640 x 360 and 1280 x 720 under the limit of a frame
FRAME_SHARES = (0.2, 0.2, 0.4, 0.2)

# Qwen2.5-VL-7B at 400 TFLOP/s. Only the ratio of the stages matters for a partition.
ENCODER = EncoderDims(dim=1280, depth=32, mlp_dim=3420, num_full_layers=4, out_dim=3584)
LLM = LLMDims(dim=3584, depth=28, num_heads=28, num_kv_heads=4, mlp_dim=18944, vocab_size=152064)


def staged_costs(llm_layers_per_stage: Sequence[int]) -> CostModel:
    """The encoder as one stage and the LLM split over the following ones; layers add up to 28."""
    return CostModel.from_dims(
        ENCODER, LLM, llm_layers_per_stage=llm_layers_per_stage, flops_per_second=4e14, head_on="all"
    )


COSTS = staged_costs((LLM.depth,))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """n samples; all columns int64 [n].

    Attributes:
        name: as asked for. real: rows of a public table, not generated.
        tokens: LLM positions, text and visual tokens together; at least 1.
        text: the part of `tokens` that is text.
        images: pictures, or tiles, or pairs of video frames: what an encoder takes as one sequence.
        patches: encoder tokens.
        patch_squares: sum over `images` of patches squared.
    """

    name: str
    real: bool
    tokens: IntArray
    text: IntArray
    images: IntArray
    patches: IntArray
    patch_squares: IntArray

    def __len__(self) -> int:
        return int(self.tokens.shape[0])


def workload(name: str, n: int, seed: int = 0, *, data: Path | None = None, arrival: bool = False) -> Workload:
    """`n` samples of the workload `name`: a function of its arguments alone (and of the table).

    Real tables are drawn with replacement; with `arrival` their rows come in the order of the file instead, from the
    beginning again when it ends.

    Raises:
        KeyError: an unknown name. ValueError: a real table without `data`, or `arrival` for a generated one.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    if name in WORKLOADS:
        if arrival:
            raise ValueError(f"workload {name!r} is generated: it has no order of arrival")
        return _finish(name, False, WORKLOADS[name](generator, n))
    if data is None:
        raise ValueError(f"workload {name!r} is a real table: give the folder that holds it")
    rows = REAL_TABLES[name].read(data)
    chosen = np.arange(n) % len(rows.text) if arrival else generator.integers(0, len(rows.text), n)
    return _finish(name, True, rows.take(chosen))


def available(data: Path | None) -> list[str]:
    """Names of all workloads: the generated ones, and the real tables found in `data`."""
    found = [] if data is None else [name for name, table in REAL_TABLES.items() if table.is_in(data)]
    return [*WORKLOADS, *found]


def clipped(column: IntArray, capacity: int) -> IntArray:
    """The column with values above the capacity set to it."""
    return np.minimum(column, capacity)


def limited(samples: Workload, max_tokens: int) -> Workload:
    """The samples with at most `max_tokens` tokens: longer ones are cut in all columns in proportion."""
    keep = np.minimum(samples.tokens, max_tokens)
    tokens = samples.tokens
    return Workload(
        name=samples.name,
        real=samples.real,
        tokens=keep,
        text=samples.text * keep // tokens,
        images=-(-samples.images * keep // tokens),
        patches=samples.patches * keep // tokens,
        patch_squares=samples.patch_squares // tokens * keep,
    )


def counts_of(samples: Workload) -> StepCounts:
    """The samples as the planner sees them; the media of a sample are one item."""
    return StepCounts(
        sample_ids=np.arange(len(samples), dtype=np.int64),
        llm_tokens=samples.tokens,
        label_tokens=samples.text,
        visual_tokens=samples.tokens - samples.text,
        patches=samples.patches,
        num_items=samples.images,
        full_total_sq=samples.patch_squares,
        window_total_sq=samples.patches * WINDOW_PATCHES,
    )


def costs(samples: Workload) -> IntArray:
    """int64 [n, 2]: forward plus backward nanoseconds in the encoder and in the LLM, linear and attention terms."""
    counts = counts_of(samples)
    return COSTS.forward_ns(counts) + COSTS.backward_ns(counts)


def _finish(name: str, real: bool, rows: Rows) -> Workload:
    tokens = np.maximum(rows.text + rows.visual, 1)
    return Workload(
        name=name,
        real=real,
        tokens=tokens,
        text=tokens - rows.visual,
        images=rows.images,
        patches=rows.patches,
        patch_squares=rows.patch_squares,
    )


def _draw(
    generator: np.random.Generator, n: int, levels: Sequence[float], values: Sequence[float], *, whole: bool = True
) -> FloatArray:
    """n draws from the distribution with quantiles `values` at `levels`; logarithmic in between."""
    drawn = np.exp(np.interp(generator.random(n), levels, np.log(values)))
    return np.maximum(np.rint(drawn), 1) if whole else drawn


def _lengths(generator: np.random.Generator, n: int, values: Sequence[int]) -> IntArray:
    return _draw(generator, n, tables.LENGTH_LEVELS, values).astype(np.int64)


def _sum_by_owner(owner: IntArray, values: IntArray, n: int) -> IntArray:
    """Sums of `values` [m] over owners 0..n-1, which ascend."""
    running = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
    return np.diff(running[np.searchsorted(owner, np.arange(n + 1))])


def _with_images(text: IntArray, images: IntArray, owner: IntArray, patches: IntArray) -> Rows:
    n = len(text)
    total = _sum_by_owner(owner, patches, n)
    squares = _sum_by_owner(owner, patches * patches, n)
    return Rows(text=text, visual=total // PATCHES_PER_TOKEN, images=images, patches=total, patch_squares=squares)


def _text(generator: np.random.Generator, n: int) -> Rows:
    """Documents: lognormal (median 400 tokens), 5 % of them Pareto (exponent 1.3 from 2,000 on), cut at 131,072."""
    body = generator.lognormal(np.log(400.0), 1.0, n)
    tail = 2000.0 * (1.0 - generator.random(n)) ** (-1.0 / 1.3)
    lengths = np.where(generator.random(n) < 0.05, tail, body)
    return only_text(np.clip(np.rint(lengths), 8, 2**17).astype(np.int64))


def _azure_conversations(generator: np.random.Generator, n: int) -> Rows:
    """Prompt and response of chat requests."""
    return only_text(_lengths(generator, n, tables.AZURE_CONVERSATION_TOKENS))


def _long_conversations(generator: np.random.Generator, n: int) -> Rows:
    """Mooncake: chat with long contexts, median 7,255 tokens."""
    return only_text(_lengths(generator, n, tables.MOONCAKE_CONVERSATION_TOKENS))


def _vlm(generator: np.random.Generator, n: int) -> Rows:
    """0 to 6 images of one domain a sample (domain, size and count independent), text of chat length over 4."""
    images = generator.choice(7, n, p=(0.10, 0.50, 0.16, 0.10, 0.07, 0.04, 0.03)).astype(np.int64)
    owner = np.repeat(np.arange(n), images)
    shares = [domain.share for domain in tables.IMAGE_DOMAINS.values()]
    domain_of = generator.choice(len(shares), n, p=shares)[owner]
    patches = np.zeros(len(owner), np.int64)
    for index, domain in enumerate(tables.IMAGE_DOMAINS.values()):
        here = np.flatnonzero(domain_of == index)
        side = _draw(generator, len(here), tables.SIZE_LEVELS, domain.side_px, whole=False)
        root = np.sqrt(_draw(generator, len(here), tables.SIZE_LEVELS, domain.aspect, whole=False))
        patches[here] = image_patches(np.rint(side * root), np.rint(side / root))
    text = _lengths(generator, n, tables.AZURE_CONVERSATION_TOKENS) // 4 + 1
    return _with_images(text, images, owner, patches)


def _video(generator: np.random.Generator, n: int) -> Rows:
    """95 % trimmed clips of seconds, 5 % whole videos: two frames a second, at most 768 frames and 114,816 tokens.

    Longer videos have smaller frames. Text is a caption."""
    whole = generator.random(n) < 0.05
    clips = _draw(generator, n, tables.DURATION_LEVELS, tables.CLIP_SECONDS, whole=False)
    videos = _draw(generator, n, tables.DURATION_LEVELS, tables.VIDEO_SECONDS, whole=False)
    frames = np.clip(np.floor(np.where(whole, videos, clips) * VIDEO_FPS), 4, 768)
    pairs = (frames // 2).astype(np.int64)
    patches_each = (
        np.minimum(generator.choice(FRAME_TOKENS, n, p=FRAME_SHARES), VIDEO_MAX_TOKENS // pairs) * PATCHES_PER_TOKEN
    )
    patches = pairs * patches_each
    return Rows(
        text=_lengths(generator, n, tables.CAPTION_TOKENS),
        visual=patches // PATCHES_PER_TOKEN,
        images=pairs,
        patches=patches,
        patch_squares=pairs * patches_each * patches_each,
    )


def _servegen(generator: np.random.Generator, n: int) -> Rows:
    """Production requests with images: counts, text and output as published, drawn independently of each other."""
    images = generator.choice(tables.SERVEGEN_IMAGES, n, p=tables.SERVEGEN_IMAGE_SHARES).astype(np.int64)
    owner = np.repeat(np.arange(n), images)
    single = _draw(generator, len(owner), tables.SERVEGEN_LEVELS, tables.SERVEGEN_SINGLE_IMAGE_TOKENS)
    other = _draw(generator, len(owner), tables.SERVEGEN_LEVELS, tables.SERVEGEN_OTHER_IMAGE_TOKENS)
    patches = np.where(images[owner] == 1, single, other).astype(np.int64) * PATCHES_PER_TOKEN
    text = _draw(generator, n, tables.SERVEGEN_LEVELS, tables.SERVEGEN_TEXT_TOKENS)
    output = _draw(generator, n, tables.SERVEGEN_LEVELS, tables.SERVEGEN_OUTPUT_TOKENS)
    return _with_images((text + output).astype(np.int64), images, owner, patches)


def _internvl(generator: np.random.Generator, n: int) -> Rows:
    """One image of 1, 3, 4 or 5 tiles and a short text: few distinct, large sizes."""
    tiles = generator.choice(tables.INTERNVL_TILES, n, p=tables.INTERNVL_TILE_SHARES).astype(np.int64)
    return Rows(
        text=_draw(generator, n, tables.INTERNVL_LEVELS, tables.INTERNVL_TEXT_TOKENS).astype(np.int64),
        visual=tiles * TOKENS_PER_TILE,
        images=tiles,
        patches=tiles * PATCHES_PER_TILE,
        patch_squares=tiles * PATCHES_PER_TILE**2,
    )


WORKLOADS: Mapping[str, Callable[[np.random.Generator, int], Rows]] = MappingProxyType(
    {
        "text": _text,
        "vlm": _vlm,
        "video": _video,
        "servegen": _servegen,
        "internvl": _internvl,
        "azure_conversations": _azure_conversations,
        "long_conversations": _long_conversations,
    }
)
