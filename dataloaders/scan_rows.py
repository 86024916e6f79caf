"""The rows of a scan: one sample after another, from its record and the headers of its media to two tables.

    record --probe every medium--> sizes --estimator--> ItemCounts --encoder.count--> tokens, labels --> rows

`ScanOptions` is everything that decides a number besides the source and the estimator; its `key` marks the index.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from dataloaders.counts import ItemCounts, MediaKind
from dataloaders.encoder import ByteEncoder, RecordEncoder, TextCounts
from dataloaders.errors import DataError, MediaError, Reason, RecordError, UnfitError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, BadSample, Confidence, CostIndex, IndexKey
from dataloaders.index_format import ShardRows
from dataloaders.probe import ProbeLimits, probe_image, probe_video
from dataloaders.record import MediaRef, Record
from dataloaders.record_parser import RecordLimits
from dataloaders.source import SampleSource, prefetch_heads, shard_and_key

Progress = Callable[[int, int], None]
Unfit: TypeAlias = Literal["skip", "clamp", "error"]
UNFIT: tuple[Unfit, ...] = ("skip", "clamp", "error")
MAX_MESSAGE = 1000
MAX_LISTED = 20
AHEAD = 256  # samples whose texts and first bytes of media are fetched ahead from remote storage
HEAD_BYTES = 16 * 1024  # of every medium
# Raise it with every change of what a scan accepts, counts or names; cached indices are then built again.
RULES_VERSION = 3

_MAX_CLAMPS = 4  # a size, a number of frames, and again for a rule in which one decides the other
_INT32, _INT64 = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """How a source is scanned; all of it is in the key of the index.

    Attributes:
        encoder: counts text and labels.
        apply_orientation: whether EXIF orientation will be applied when decoding.
        limits: ceilings on media. record_limits: bounds on a record.
        unfit: what becomes of media that the processor would fail on, see the module.
    """

    encoder: RecordEncoder = field(default_factory=ByteEncoder)
    apply_orientation: bool = True
    limits: ProbeLimits = field(default_factory=ProbeLimits)
    record_limits: RecordLimits = field(default_factory=RecordLimits)
    unfit: Unfit = "skip"

    def __post_init__(self) -> None:
        if self.unfit not in UNFIT:
            raise DataError(f"unfit={self.unfit!r}", place="ScanOptions", remedy=f"Choose one of {', '.join(UNFIT)}.")

    def key(self, source: str, estimator: TokenEstimator) -> IndexKey:
        """Key of an index of the source with fingerprint `source`."""
        ceilings = {**asdict(self.limits), **{f"record.{k}": v for k, v in asdict(self.record_limits).items()}}
        return IndexKey(
            rules=RULES_VERSION,
            source=source,
            estimator=estimator.fingerprint,
            tokenizer=self.encoder.fingerprint,
            train_on=self.encoder.train_on,
            apply_orientation=self.apply_orientation,
            limits=" ".join(f"{name}={value}" for name, value in ceilings.items()),
            unfit=self.unfit,
        )


def scan_rows(
    source: SampleSource,
    estimator: TokenEstimator,
    options: ScanOptions,
    *,
    shards: Sequence[ShardRows] = (),
    progress: Progress | None = None,
) -> CostIndex:
    """As `scan_source`, but unfit media are rows under every policy: a part of a source does not know the others."""
    scanner, rows = _Scanner(source, estimator, options), _Rows()
    _fetch_ahead(source, 0)
    for i in range(len(source)):
        if i % AHEAD == 0:
            _fetch_ahead(source, i + AHEAD)
        try:
            scanner.add(i, rows)
        except (MediaError, RecordError) as error:
            rows.add_bad(i, source, error)
        if progress is not None:
            progress(i + 1, len(source))
    rules = rules_in_words(estimator, options.encoder)
    return rows.to_index(options.key(source.fingerprint, estimator), rules, shards)


def _fetch_ahead(source: SampleSource, start: int) -> None:
    ids = range(start, min(start + AHEAD, len(source)))
    if ids:
        prefetch_heads(source, ids, HEAD_BYTES)


def rules_in_words(estimator: TokenEstimator, encoder: RecordEncoder) -> dict[str, str]:
    """What `CostIndex.rules` holds."""
    return {"media": estimator.rule, "text": text_rule(encoder)}


def check_source(source: object) -> None:
    """Raise DataError for a path where a source is needed."""
    if isinstance(source, (str, os.PathLike, list, tuple)):
        raise DataError(
            f"{source!r} is a {type(source).__name__} where a source of samples is needed",
            remedy="Open the shards with dataloaders.tar_source.TarSource(...) and pass that.",
        )


def check_estimator(estimator: object) -> None:
    """Raise DataError for a model folder or a configuration where an estimator is needed."""
    if isinstance(estimator, (str, os.PathLike, Mapping)):
        raise DataError(
            f"{str(estimator)[:80]!r} is a {type(estimator).__name__} where an estimator is needed",
            remedy="Make one with dataloaders.estimators.estimator_from_config(...) and pass that.",
        )


def raise_unfit(index: CostIndex, *, kept: Path | None = None) -> None:
    """Under the policy `error`: raise one DataError that names the unfit samples, if there are any.

    Args:
        kept: where what was scanned is kept for the next try; None: nowhere.
    """
    unfit = [bad for bad in index.bad if bad.unfit] if index.key.unfit == "error" else []
    if not unfit:
        return
    more = [f"  and {len(unfit) - MAX_LISTED} more"] if len(unfit) > MAX_LISTED else []
    where = "" if kept is None else f". Finished shards are kept in {kept}"
    raise DataError(
        "\n".join(
            [
                f"the model's processor would fail on the media of {len(unfit)} of {len(index)} samples:",
                *(f"  {bad.message}" for bad in unfit[:MAX_LISTED]),
                *more,
                "Repair them, or choose unfit=skip (leave these samples out) or unfit=clamp (plan and decode the media "
                f"at the nearest size that the processor takes){where}",
            ]
        )
    )


def text_rule(encoder: RecordEncoder) -> str:
    """The rule of an encoder in words: its `rule` if it has one, or its class; and its fingerprint, shortened."""
    name, digits = encoder.fingerprint, set("0123456789abcdef")
    said = f"{getattr(encoder, 'rule', '') or type(encoder).__name__} ({name[:16] if set(name) <= digits else name})"
    return said if encoder.exact else f"{said}, estimated"


def _storable(text: str) -> str:
    """`text` without lone surrogates, which no table of texts takes."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class _Header:
    """One medium as it will be planned: what its header says, or what it was clamped to."""

    kind: MediaKind
    width_px: int
    height_px: int
    frames: int
    fps: float
    duration_s: float
    confidence: Confidence
    clamped: bool = False

    def clamp(self, error: UnfitError) -> "_Header":
        """The nearest header that the processor takes, as far as the error names it."""
        width_px, height_px = error.nearest_size_px or (self.width_px, self.height_px)
        frames = error.nearest_frames or self.frames
        return replace(self, width_px=width_px, height_px=height_px, frames=frames, clamped=True)


@dataclass(frozen=True, slots=True)
class _Scanner:
    source: SampleSource
    estimator: TokenEstimator
    options: ScanOptions

    def add(self, i: int, rows: "_Rows") -> None:
        """Append sample `i`; raises before anything is appended."""
        record = self.source.record(i)
        num_images = sum(ref.kind is MediaKind.IMAGE for ref in record.media)
        items = [self._item(i, j, ref, num_images) for j, ref in enumerate(record.media)]
        encoder = self.options.encoder
        text = encoder.count(record, [counts.llm_tokens for _, counts in items])
        rows.add(record, items, text, Confidence.HEADER if encoder.exact else Confidence.ESTIMATED)

    def _item(self, i: int, j: int, ref: MediaRef, num_images: int) -> tuple[_Header, ItemCounts]:
        place = f"{self.source.place(i)}, member {ref.member}"
        try:
            return self._fitted(self._header(i, j, ref, place), num_images)
        except DataError as error:
            error.place = error.place or place  # the estimator knows sizes, not files
            raise

    def _header(self, i: int, j: int, ref: MediaRef, place: str) -> _Header:
        reader, limits = self.source.media_reader(i, j), self.options.limits
        if ref.kind is MediaKind.IMAGE:
            image = probe_image(reader, apply_orientation=self.options.apply_orientation, limits=limits, place=place)
            if not image.decodable:
                raise MediaError(
                    Reason.UNSUPPORTED_MEDIA,
                    f"{image.width_px}x{image.height_px} px, but nothing here decodes {image.format}",
                    place=place,
                    remedy="Convert it to JPEG, PNG or WebP.",
                )
            confidence = Confidence[image.confidence.upper()]
            return _Header(ref.kind, image.width_px, image.height_px, 1, 0.0, 0.0, confidence)
        video = probe_video(reader, limits=limits, place=place)
        confidence = Confidence[video.confidence.upper()]
        size = (video.width_px, video.height_px)
        return _Header(ref.kind, *size, video.num_frames, video.fps, video.duration_s, confidence)

    def _fitted(self, header: _Header, num_images: int) -> tuple[_Header, ItemCounts]:
        """The header to plan with and its counts; under `clamp`, the nearest one that the processor takes."""
        for _ in range(_MAX_CLAMPS if self.options.unfit == "clamp" else 0):
            try:
                return header, self._counts(header, num_images)
            except UnfitError as error:
                nearest = header.clamp(error)
                if replace(nearest, clamped=header.clamped) == header:
                    raise
                header = nearest
        return header, self._counts(header, num_images)

    def _counts(self, header: _Header, num_images: int) -> ItemCounts:
        if header.kind is MediaKind.IMAGE:
            counts = self.estimator.image(header.width_px, header.height_px, num_images=num_images)
        else:
            counts = self.estimator.video(
                header.width_px, header.height_px, header.frames, header.fps, header.duration_s
            )
        segments = (counts.full, counts.window)
        squares = [s.total_sq for s in segments]
        numbers = [
            *(counts.llm_tokens, counts.visual_tokens, counts.encoded_patches, counts.tiles, counts.frames),
            *(*counts.grid, counts.height_px, counts.width_px, header.frames),
            *(number for s in segments for number in (s.count, s.total, s.longest)),
        ]
        _check_numbers([*numbers, *squares], "the estimator")
        most = max(numbers)
        if most > _INT32 or max(squares) > _INT64:
            raise MediaError(
                Reason.TOO_LARGE,
                f"counts of up to {most} do not fit the index",
                remedy="Bound the pixels or frames in the processor's configuration.",
            )
        return counts


def _check_numbers(numbers: Sequence[object], author: str, place: str = "") -> None:
    """Raise DataError for what no column may hold: it would be cut to an integer, or bring sums out of order."""
    wrong = next((n for n in numbers if not isinstance(n, (int, np.integer)) or n < 0), None)
    if wrong is not None:
        raise DataError(
            f"{author} gives {wrong!r} where a count is needed",
            place=place,
            remedy="Counts are integers of at least 0: this is a fault of the class that gives it.",
        )


@dataclass(slots=True)
class _Rows:
    """Growing columns of both tables."""

    samples: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in SAMPLE_COLUMNS})
    items: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in ITEM_COLUMNS})
    shards: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    reasons: list[str] = field(default_factory=lambda: [""])

    def add(
        self, record: Record, items: Sequence[tuple[_Header, ItemCounts]], text: TextCounts, confidence: Confidence
    ) -> None:
        media_tokens = sum(counts.llm_tokens for _, counts in items)
        patches = sum(counts.encoded_patches for _, counts in items)
        _check_numbers([text.llm_tokens - media_tokens, text.label_tokens], "the encoder", record.place)
        if max(text.llm_tokens, patches) > _INT32:
            raise RecordError(
                Reason.TOO_LARGE,
                f"{text.llm_tokens} tokens and {patches} patches do not fit the index",
                place=record.place,
                remedy="Split the sample.",
            )
        for header, counts in items:
            self._add_item(header, counts)
        self._add_sample(
            record.shard,
            record.key,
            text_tokens=text.llm_tokens - media_tokens,
            label_tokens=text.label_tokens,
            llm_tokens=text.llm_tokens,
            visual_tokens=sum(counts.visual_tokens for _, counts in items),
            patches=patches,
            num_items=len(items),
            bytes=sum(ref.size_bytes for ref in record.media),
            confidence=max(confidence, *(header.confidence for header, _ in items)) if items else confidence,
            clamped=any(header.clamped for header, _ in items),
        )

    def add_bad(self, sample_id: int, source: SampleSource, error: MediaError | RecordError) -> None:
        reason = str(error.reason)
        if reason not in self.reasons:
            self.reasons.append(reason)
        self.bad.append(
            BadSample(
                sample_id=sample_id,
                place=_storable(error.place or source.place(sample_id)),
                reason=reason,
                message=_storable(str(error)[:MAX_MESSAGE]),
                unfit=isinstance(error, UnfitError),
            )
        )
        shard, key = (_storable(name) for name in shard_and_key(source, sample_id))
        self._add_sample(shard, key, confidence=Confidence.UNUSABLE, reason=self.reasons.index(reason))

    def to_index(self, key: IndexKey, rules: dict[str, str], shards: Sequence[ShardRows]) -> CostIndex:
        """The columns as an index. Numbers that do not fit a column raise instead of wrapping."""
        return CostIndex(
            key=key,
            samples={name: np.array(self.samples[name], dtype=dtype) for name, dtype in SAMPLE_COLUMNS.items()},
            items={name: np.array(self.items[name], dtype=dtype) for name, dtype in ITEM_COLUMNS.items()},
            names=pa.table({"shard": pa.array(self.shards, pa.string()), "key": pa.array(self.keys, pa.string())}),
            bad=self.bad,
            reasons=self.reasons,
            rules=rules,
            shards=shards,
        )

    def _add_sample(self, shard: str, key: str, **values: int) -> None:
        self.shards.append(shard)
        self.keys.append(key)
        for name, column in self.samples.items():
            column.append(int(values.get(name, 0)))

    def _add_item(self, header: _Header, counts: ItemCounts) -> None:
        values = {
            "kind": int(header.kind),
            "width_px": header.width_px,
            "height_px": header.height_px,
            "grid_t": counts.grid[0],
            "grid_h": counts.grid[1],
            "grid_w": counts.grid[2],
            "resized_height_px": counts.height_px,
            "resized_width_px": counts.width_px,
            "frames": counts.frames,
            "source_frames": header.frames,
            "fps": header.fps,
            "duration_s": header.duration_s,
            "visual_tokens": counts.visual_tokens,
            "llm_tokens": counts.llm_tokens,
            "patches": counts.encoded_patches,
            "tiles": counts.tiles,
            "clamped": int(header.clamped),
        }
        for name, segments in (("full", counts.full), ("window", counts.window)):
            values[f"{name}_count"], values[f"{name}_total"] = segments.count, segments.total
            values[f"{name}_total_sq"], values[f"{name}_longest"] = segments.total_sq, segments.longest
        for name, column in self.items.items():
            column.append(values[name])
