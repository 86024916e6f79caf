"""Samples that are larger than a micro-batch, made to fit before anything is planned: `shrink` and `truncate_text`.

    index --capacities--> samples too large --policy--> Adjustment of each --> AdjustedIndex   (planning and loading)
                                     |                                  --> why not, where nothing helps (error or drop)
    shrink         media get fewer pixels and frames, by the processor's own rule with smaller limits; aspect is kept
    truncate_text  text behind the last medium is cut; media are never cut

The adjusted index is the only view that planning, loading and stand-ins have, so a sample is decoded exactly as it was
counted. What is done to a sample is a pure function of the index (`truncate_text`: and of the sample's own text).

How far a sample is shrunk: every image keeps k / 1024 of the area that the sample's largest image has now, or less;
every video k / 1024 of its frames, and where frames cannot get fewer, of the area of a frame. k is the largest that
bisection finds to fit: the rounding of sides to patches makes sizes rise in steps, so the sample may end up to one step
smaller than it could be.

Price: `truncate_text` reads the record of every sample that is too large, once per start and process, since an index
does not know where labels lie; `shrink` reads nothing, about 1 ms a sample. Text that is cut is not learned: an answer
may end without its end token. Shrunk media are seen coarser than the model's users will show them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from balancer.errors import PlanError
from balancer.plan import MAX_CAPACITY, Capacities
from balancer.select import oversize_reasons
from dataloaders.adjusted_index import AdjustedIndex, AdjustedRows
from dataloaders.adjustment import Adjustment, cut_sample, media_end, shrinkable
from dataloaders.counts import ItemCounts, MediaKind
from dataloaders.encoder import RecordEncoder
from dataloaders.estimators.base import MediaLimits, ShrinkableEstimator, TokenEstimator
from dataloaders.index import Confidence, CostIndex
from dataloaders.source import SampleSource

OversizePolicy = Literal["error", "drop", "shrink", "truncate_text"]
OVERSIZE: tuple[OversizePolicy, ...] = get_args(OversizePolicy)
SHARES = 1024
_ITEM_COLUMNS = (
    *("llm_tokens", "visual_tokens", "patches", "tiles", "frames", "grid_t", "grid_h", "grid_w"),
    *("resized_height_px", "resized_width_px"),
    *(f"{kind}_{what}" for kind in ("full", "window") for what in ("count", "total", "total_sq", "longest")),
)
_SAMPLE_COLUMNS = ("llm_tokens", "label_tokens", "visual_tokens", "patches")


@dataclass(frozen=True, slots=True, kw_only=True)
class OversizeReport:
    """What became of the samples that were too large, in LLM tokens: `tokens_in = kept + cut + dropped`.

    Attributes:
        policy: that was applied.
        num_adjusted: samples that were made to fit; num_left: those that nothing helped.
        tokens_in: of all samples that were too large.
        tokens_kept, tokens_cut: of the adjusted ones; text that was cut, or visual tokens that shrinking saved.
        tokens_dropped: of those that nothing helped, which are dropped or an error.
    """

    policy: OversizePolicy
    num_adjusted: int = 0
    num_left: int = 0
    tokens_in: int = 0
    tokens_kept: int = 0
    tokens_cut: int = 0
    tokens_dropped: int = 0

    def text(self) -> str:
        """In words; "" where every sample fitted as it is."""
        if not self.num_adjusted + self.num_left:
            return ""
        done = {"shrink": "shrunk", "truncate_text": "cut"}.get(self.policy, "adjusted")
        return (
            f"{self.num_adjusted + self.num_left} samples of {self.tokens_in} tokens exceed the capacity of a "
            f"micro-batch: {self.num_adjusted} were {done} to fit ({self.tokens_kept} tokens kept, {self.tokens_cut} "
            f"cut), {self.num_left} could not be ({self.tokens_dropped} tokens)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedIndex:
    """An index whose samples fit as far as the policy could make them.

    Attributes:
        index: the index itself where nothing was adjusted, else an `AdjustedIndex` over it.
        why: sample -> why it could not be made to fit.
        report: tokens kept, cut and dropped.
    """

    index: CostIndex
    why: Mapping[int, str] = field(default_factory=dict)
    report: OversizeReport


def fit_oversize(
    index: CostIndex,
    capacities: Capacities,
    policy: OversizePolicy,
    *,
    source: SampleSource,
    estimator: TokenEstimator,
    encoder: RecordEncoder,
) -> FittedIndex:
    """Apply `shrink` or `truncate_text` to the samples above `capacities`; the other policies change nothing.

    Args:
        source, encoder: `truncate_text` reads samples and counts their labels with these.
        estimator: of the index; `shrink` asks it for smaller media.

    Raises:
        PlanError: no such policy.
        DataError: `shrink` with a token rule whose media cannot be limited, while some sample is too large.
        OSError, SourceError, RecordError: a record cannot be read.
    """
    if policy not in OVERSIZE:
        raise PlanError(f"oversize policy {policy!r} does not exist; available: {', '.join(OVERSIZE)}")
    confidence = np.asarray(index.samples["confidence"])
    too_large = oversize_reasons(index, capacities)
    ids = [i for i in too_large if confidence[i] != Confidence.UNUSABLE]
    if policy in ("error", "drop") or not ids:
        return FittedIndex(index=index, report=OversizeReport(policy=policy))
    fit: Callable[[int], _Fit | str]
    if policy == "shrink":
        fit = _Shrinker(index, capacities, shrinkable(estimator)).fit
    else:
        fit = _Cutter(index, capacities, source, encoder).fit
    fits, why = dict[int, _Fit](), dict[int, str]()
    for i in ids:
        found = fit(i)
        if isinstance(found, str):
            why[i] = found
        else:
            fits[i] = found
    tokens = {i: int(index.samples["llm_tokens"][i]) for i in ids}
    kept = sum(found.sample["llm_tokens"] for found in fits.values())
    report = OversizeReport(
        policy=policy,
        num_adjusted=len(fits),
        num_left=len(why),
        tokens_in=sum(tokens.values()),
        tokens_kept=kept,
        tokens_cut=sum(tokens[i] for i in fits) - kept,
        tokens_dropped=sum(tokens[i] for i in why),
    )
    return FittedIndex(index=_adjusted(index, fits) if fits else index, why=why, report=report)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """A sample that fits: what was done, and its counts.

    Attributes:
        sample: column -> value.
        items: the counts of its media, in order; None: they stay as they are.
    """

    adjustment: Adjustment
    sample: Mapping[str, int]
    items: tuple[ItemCounts, ...] | None = None


class _Cutter:
    """`truncate_text` of one sample after the other."""

    def __init__(self, index: CostIndex, capacities: Capacities, source: SampleSource, encoder: RecordEncoder) -> None:
        self._index, self._source, self._encoder = index, source, encoder
        self._keep = capacities.tokens
        self._others = Capacities(tokens=MAX_CAPACITY, patches=capacities.patches, items=capacities.items)

    def fit(self, i: int) -> _Fit | str:
        """The sample with its first `capacities.tokens` positions, or why that is not enough."""
        counts = self._index.samples
        media = [
            f"{int(counts[column][i])} {name} > {limit}"
            for name, column, limit in _limits(self._others)
            if int(counts[column][i]) > limit
        ]
        if media:
            return f"media alone need {', '.join(media)}"
        visual = sum(self._index.item_tokens(i))
        if visual > self._keep:
            return f"media alone needs {visual} tokens > {self._keep}"
        if not self._encoder.exact:
            return f"{int(counts['llm_tokens'][i])} tokens > {self._keep}, and an estimated text cannot be cut"
        encoded = self._encoder.encode(self._source.record(i), self._index.item_tokens(i))
        end = media_end(encoded)
        if end > self._keep:
            return f"media and the text before the last of them need {end} tokens > {self._keep}"
        cut = cut_sample(encoded, self._keep)
        sample = {
            "llm_tokens": len(cut.tokens),
            "label_tokens": cut.num_label_tokens,
            "visual_tokens": int(counts["visual_tokens"][i]),
            "patches": int(counts["patches"][i]),
        }
        return _Fit(adjustment=Adjustment(keep_tokens=self._keep), sample=sample)


class _Shrinker:
    """`shrink` of one sample after the other."""

    def __init__(self, index: CostIndex, capacities: Capacities, estimator: ShrinkableEstimator) -> None:
        self._index, self._capacities, self._estimator = index, capacities, estimator

    def fit(self, i: int) -> _Fit | str:
        """The sample with the largest media that fit, or why there are none."""
        samples, items = self._index.samples, self._index.items
        rows = self._index.item_rows(i)
        text = int(samples["llm_tokens"][i]) - sum(self._index.item_tokens(i))
        limit = self._capacities.tokens
        if text > limit:
            return f"text alone needs {text} tokens > {limit}"
        if self._capacities.items is not None and len(rows) > self._capacities.items:
            return f"{len(rows)} items > {self._capacities.items}, which shrinking does not change"
        if any(items["clamped"][row] for row in rows):
            return f"{int(samples['llm_tokens'][i])} tokens, and a clamped medium cannot be shrunk"
        found = self._largest(rows, text)
        if found is None:
            least = self._counts(rows, self._limits(rows, 1))
            tokens, patches = text + sum(c.llm_tokens for c in least), sum(c.encoded_patches for c in least)
            return f"media at their smallest need {tokens} tokens (text included) and {patches} patches"
        limits, counts = found
        sample = {
            "llm_tokens": text + sum(c.llm_tokens for c in counts),
            "label_tokens": int(samples["label_tokens"][i]),
            "visual_tokens": sum(c.visual_tokens for c in counts),
            "patches": sum(c.encoded_patches for c in counts),
        }
        return _Fit(adjustment=Adjustment(limits=limits), sample=sample, items=counts)

    def _largest(self, rows: range, text: int) -> tuple[MediaLimits, tuple[ItemCounts, ...]] | None:
        """The largest share that bisection finds to fit, as limits and counts; None: not even the smallest."""
        low, high, best = 1, SHARES, None
        while low <= high:
            share = (low + high) // 2
            limits = self._limits(rows, share)
            counts = self._counts(rows, limits)
            if self._fits(counts, text):
                best, low = (limits, counts), share + 1
            else:
                high = share - 1
        return best

    def _fits(self, counts: tuple[ItemCounts, ...], text: int) -> bool:
        tokens, patches = text + sum(c.llm_tokens for c in counts), sum(c.encoded_patches for c in counts)
        limit = self._capacities.patches
        return tokens <= self._capacities.tokens and (limit is None or patches <= limit)

    def _limits(self, rows: range, share: int) -> MediaLimits:
        """Limits that leave `share` / 1024 of the largest image and of the longest video."""
        items = self._index.items
        kinds: NDArray[np.int64] = np.asarray(items["kind"][rows.start : rows.stop], dtype=np.int64)
        area = np.asarray(items["resized_height_px"][rows.start : rows.stop], dtype=np.int64) * np.asarray(
            items["resized_width_px"][rows.start : rows.stop], dtype=np.int64
        )
        images, videos = kinds == MediaKind.IMAGE, kinds == MediaKind.VIDEO
        limits = MediaLimits()
        if images.any():
            limits = MediaLimits(image_pixels=max(1, int(area[images].max()) * share // SHARES))
        if not videos.any():
            return limits
        longest = int(np.asarray(items["frames"][rows.start : rows.stop])[videos].max())
        least = self._estimator.min_video_frames or longest
        frames = max(least, longest * share // SHARES)
        # What frames cannot give, their area gives.
        pixels = int(area[videos].max()) * min(longest * share, least * SHARES) // (least * SHARES)
        return MediaLimits(image_pixels=limits.image_pixels, video_frames=frames, frame_pixels=max(1, pixels))

    def _counts(self, rows: range, limits: MediaLimits) -> tuple[ItemCounts, ...]:
        """Counts of the media under `limits`, by the estimator's own rule."""
        estimator, items = self._estimator.shrunk(limits), self._index.items
        num_images = sum(int(items["kind"][row]) == MediaKind.IMAGE for row in rows)
        counts = []
        for row in rows:
            size = int(items["width_px"][row]), int(items["height_px"][row])
            if int(items["kind"][row]) == MediaKind.IMAGE:
                counts.append(estimator.image(*size, num_images=num_images))
            else:
                frames, fps, duration_s = self._index.source_of(row)
                counts.append(estimator.video(*size, frames, fps, duration_s))
        return tuple(counts)


def _limits(capacities: Capacities) -> list[tuple[str, str, int]]:
    """(name, sample column, limit) of the capacities beside tokens."""
    named = (("patches", "patches", capacities.patches), ("items", "num_items", capacities.items))
    return [(name, column, limit) for name, column, limit in named if limit is not None]


def _adjusted(index: CostIndex, fits: Mapping[int, _Fit]) -> AdjustedIndex:
    ids = sorted(fits)
    samples = {name: np.array([fits[i].sample[name] for i in ids], dtype=np.int64) for name in _SAMPLE_COLUMNS}
    rows, values = list[int](), list[list[int]]()
    for i in ids:
        for row, counts in zip(index.item_rows(i), fits[i].items or (), strict=False):
            rows.append(row)
            values.append(_item_values(counts))
    table = np.array(values, dtype=np.int64).reshape(len(rows), len(_ITEM_COLUMNS))
    return AdjustedIndex(
        index,
        {i: fits[i].adjustment for i in ids},
        sample_rows=AdjustedRows(rows=np.array(ids, dtype=np.int64), columns=samples),
        item_rows=AdjustedRows(
            rows=np.array(rows, dtype=np.int64),
            columns={name: table[:, column] for column, name in enumerate(_ITEM_COLUMNS)} if rows else {},
        ),
    )


def _item_values(counts: ItemCounts) -> list[int]:
    """In the order of `_ITEM_COLUMNS`."""
    segments = (counts.full, counts.window)
    return [
        *(counts.llm_tokens, counts.visual_tokens, counts.encoded_patches, counts.tiles, counts.frames),
        *(*counts.grid, counts.height_px, counts.width_px),
        *(number for s in segments for number in (s.count, s.total, s.total_sq, s.longest)),
    ]
