"""From a source to its cost index: headers and text only, no pixel decoded.

    record --probe every medium--> sizes --estimator--> ItemCounts --encode--> label tokens --> rows of the index

A record or a medium that cannot be used becomes a row without counts and an entry in `CostIndex.bad`, never an
exception: the caller lists them all or leaves them out. A shard that cannot be read is an exception, because then
nothing behind it is known either.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataloaders.chat import encode_record
from dataloaders.counts import ItemCounts, MediaKind
from dataloaders.errors import IndexFormatError, MediaError, RecordError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import (
    ITEM_COLUMNS,
    SAMPLE_COLUMNS,
    BadSample,
    Confidence,
    CostIndex,
    IndexKey,
    write_index,
)
from dataloaders.probe import ProbeLimits, probe_image, probe_video
from dataloaders.record import MediaRef, Record
from dataloaders.source import SampleSource
from dataloaders.tokenizer import ByteTokenizer

Progress = Callable[[int, int], None]
MAX_MESSAGE = 1000
# Raise it with every change of what a scan accepts or counts; cached indices are then built again.
RULES_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Modalities:
    """How many samples and media of each kind an index holds.

    Attributes:
        text_only, image_only, video_only, mixed: usable samples by the media they have.
        unusable: samples in `CostIndex.bad`.
        images, videos: media of the usable samples.
    """

    text_only: int
    image_only: int
    video_only: int
    mixed: int
    unusable: int
    images: int
    videos: int


def index_key(
    source: SampleSource,
    estimator: TokenEstimator,
    *,
    train_on: str = "assistant",
    apply_orientation: bool = True,
    limits: ProbeLimits | None = None,
) -> IndexKey:
    """What an index of `source` under these options is made from."""
    return IndexKey(
        rules=RULES_VERSION,
        source=source.fingerprint,
        estimator=estimator.fingerprint,
        tokenizer=ByteTokenizer.fingerprint,
        train_on=train_on,
        apply_orientation=apply_orientation,
        limits=" ".join(f"{name}={value}" for name, value in asdict(limits or ProbeLimits()).items()),
    )


def build_index(
    source: SampleSource,
    estimator: TokenEstimator,
    folder: str | Path,
    *,
    train_on: str = "assistant",
    apply_orientation: bool = True,
    limits: ProbeLimits | None = None,
    progress: Progress | None = None,
) -> CostIndex:
    """The index of `source` in `folder`: opened if it is there and current, otherwise built and written whole.

    Raises:
        IndexFormatError: `folder` holds something that is not an index.
        OSError, SourceError: storage failed.
    """
    key = index_key(source, estimator, train_on=train_on, apply_orientation=apply_orientation, limits=limits)
    try:
        return CostIndex.open(folder, expect=key)
    except IndexFormatError:
        pass  # absent, stale or damaged: built again below, unless the folder is somebody else's
    index = scan_source(
        source,
        estimator,
        train_on=train_on,
        apply_orientation=apply_orientation,
        limits=limits,
        progress=progress,
    )
    return write_index(folder, index)


def scan_source(
    source: SampleSource,
    estimator: TokenEstimator,
    *,
    train_on: str = "assistant",
    apply_orientation: bool = True,
    limits: ProbeLimits | None = None,
    progress: Progress | None = None,
) -> CostIndex:
    """Cost every sample of `source`; the index is held in memory.

    Args:
        train_on: see `encode_record`; it decides the label tokens.
        apply_orientation: whether EXIF orientation will be applied when decoding.
        limits: ceilings on media, see `ProbeLimits`.
        progress: called with (samples done, samples in all) after each sample.

    Raises:
        OSError, SourceError: storage failed.
    """
    scanner = _Scanner(source, estimator, train_on, apply_orientation, limits or ProbeLimits())
    rows = _Rows()
    for i in range(len(source)):
        try:
            scanner.add(i, rows)
        except (MediaError, RecordError) as error:
            rows.add_bad(i, source.place(i), error)
        if progress is not None:
            progress(i + 1, len(source))
    key = index_key(source, estimator, train_on=train_on, apply_orientation=apply_orientation, limits=limits)
    return rows.to_index(key)


def count_modalities(index: CostIndex) -> Modalities:
    """Samples and media of `index` by kind."""
    num_samples = len(index)
    owner = np.repeat(np.arange(num_samples), index.samples["num_items"])
    is_video = index.items["kind"] == MediaKind.VIDEO
    videos = np.bincount(owner[is_video], minlength=num_samples) > 0
    images = np.bincount(owner[~is_video], minlength=num_samples) > 0
    usable = index.samples["confidence"] != Confidence.UNUSABLE
    return Modalities(
        text_only=int((usable & ~images & ~videos).sum()),
        image_only=int((images & ~videos).sum()),
        video_only=int((videos & ~images).sum()),
        mixed=int((images & videos).sum()),
        unusable=int((~usable).sum()),
        images=int((~is_video).sum()),
        videos=int(is_video.sum()),
    )


@dataclass(frozen=True, slots=True)
class _Probed:
    """One medium: its header and its counts."""

    kind: MediaKind
    width_px: int
    height_px: int
    source_frames: int
    fps: float
    duration_s: float
    confidence: Confidence
    counts: ItemCounts


@dataclass(frozen=True, slots=True)
class _Scanner:
    source: SampleSource
    estimator: TokenEstimator
    train_on: str
    apply_orientation: bool
    limits: ProbeLimits

    def add(self, i: int, rows: "_Rows") -> None:
        """Append sample `i`; raises before anything is appended."""
        record = self.source.record(i)
        probed = [self._probe(i, j, ref) for j, ref in enumerate(record.media)]
        encoded = encode_record(record, [item.counts.llm_tokens for item in probed], train_on=self.train_on)
        rows.add(record, probed, llm_tokens=len(encoded.tokens), label_tokens=encoded.num_label_tokens)

    def _probe(self, i: int, j: int, ref: MediaRef) -> _Probed:
        reader, place = self.source.media_reader(i, j), f"{self.source.place(i)}, member {ref.member}"
        try:
            if ref.kind is MediaKind.IMAGE:
                image = probe_image(reader, apply_orientation=self.apply_orientation, limits=self.limits, place=place)
                size = (image.width_px, image.height_px)
                counts = self.estimator.image(*size)
                return _Probed(ref.kind, *size, 1, 0.0, 0.0, Confidence[image.confidence.upper()], counts)
            video = probe_video(reader, limits=self.limits, place=place)
            size = (video.width_px, video.height_px)
            counts = self.estimator.video(*size, video.num_frames, video.fps, video.duration_s)
        except MediaError as error:
            error.place = error.place or place  # the estimator knows sizes, not files
            raise
        confidence = Confidence[video.confidence.upper()]
        return _Probed(ref.kind, *size, video.num_frames, video.fps, video.duration_s, confidence, counts)


@dataclass(slots=True)
class _Rows:
    """Growing columns of both tables."""

    samples: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SAMPLE_COLUMNS})
    items: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in ITEM_COLUMNS})
    shards: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    reasons: list[str] = field(default_factory=lambda: [""])

    def add(self, record: Record, probed: Sequence[_Probed], *, llm_tokens: int, label_tokens: int) -> None:
        visual_tokens = sum(item.counts.llm_tokens for item in probed)
        for item in probed:
            self._add_item(item)
        self._add_sample(
            record.shard,
            record.key,
            text_tokens=llm_tokens - visual_tokens,
            label_tokens=label_tokens,
            llm_tokens=llm_tokens,
            visual_tokens=visual_tokens,
            patches=sum(item.counts.patches for item in probed),
            num_items=len(probed),
            bytes=sum(ref.size_bytes for ref in record.media),
            confidence=max((item.confidence for item in probed), default=Confidence.HEADER),
        )

    def add_bad(self, sample_id: int, place: str, error: MediaError | RecordError) -> None:
        reason = str(error.reason)
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.bad.append(
            BadSample(sample_id=sample_id, place=error.place or place, reason=reason, message=str(error)[:MAX_MESSAGE])
        )
        self._add_sample("", place, confidence=Confidence.UNUSABLE, reason=self.reasons.index(reason))

    def to_index(self, key: IndexKey) -> CostIndex:
        """The columns as an index. Numbers that do not fit a column raise instead of wrapping."""
        return CostIndex(
            key=key,
            samples={name: np.array(self.samples[name], dtype=dtype) for name, dtype in SAMPLE_COLUMNS.items()},
            items={name: np.array(self.items[name], dtype=dtype) for name, dtype in ITEM_COLUMNS.items()},
            names=pa.table({"shard": pa.array(self.shards, pa.string()), "key": pa.array(self.keys, pa.string())}),
            bad=self.bad,
            reasons=self.reasons,
        )

    def _add_sample(self, shard: str, key: str, **values: int) -> None:
        self.shards.append(shard)
        self.keys.append(key)
        for name, column in self.samples.items():
            column.append(int(values.get(name, 0)))

    def _add_item(self, item: _Probed) -> None:
        counts = item.counts
        values = {
            "kind": int(item.kind),
            "width_px": item.width_px,
            "height_px": item.height_px,
            "grid_t": counts.grid[0],
            "grid_h": counts.grid[1],
            "grid_w": counts.grid[2],
            "resized_height_px": counts.height_px,
            "resized_width_px": counts.width_px,
            "frames": counts.frames,
            "source_frames": item.source_frames,
            "fps": item.fps,
            "duration_s": item.duration_s,
            "visual_tokens": counts.llm_tokens,
            "patches": counts.patches,
            "tiles": counts.tiles,
        }
        for name, segments in (("full", counts.full), ("window", counts.window)):
            values[f"{name}_count"], values[f"{name}_total"] = segments.count, segments.total
            values[f"{name}_total_sq"], values[f"{name}_longest"] = segments.total_sq, segments.longest
        for name, column in self.items.items():
            column.append(values[name])
