"""One sample, ready to be packed: what a loader worker makes of an id, in exactly the shape the index planned.

    index row (planned grids, frames)  +  record, encoded media (source)
        -> tokens [T], labels [T], position_ids [3, T], visual_index [V], patches [P, patch_dim], grids [n, 3]

The plan wins (law 6). Media that differ from their header are conformed by the decoder and reported; media that do not
decode are replaced: the sample keeps its shape, with pixels of zero and without labels, and says why in `replaced`.
A shard that cannot be read raises: a replacement would hide that everything behind it is lost.

A sample that was adjusted to fit (`dataloaders.adjusted_index`) is cut or decoded smaller, as it was counted there.

A sample that cannot even be tried (its loading takes for ever, or ends the process) is `stand_in_sample`: the planned
shape from the index alone. Price: its tokens are padding and its positions plain, which nothing can learn from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dataloaders.adjustment import adjusted_estimator, cut_sample
from dataloaders.chat import IGNORED_LABEL, EncodedSample
from dataloaders.counts import MediaKind
from dataloaders.decode import Allocate, Conformed, PixelConfig, PlannedItem, decode_media, new_patches
from dataloaders.encoder import ByteEncoder, RecordEncoder
from dataloaders.errors import DataError, IndexFormatError, MediaError, Reason, RecordError
from dataloaders.estimators.base import PatchEstimator, TokenEstimator
from dataloaders.index import Confidence, CostIndex
from dataloaders.positions import mrope_positions
from dataloaders.probe import ProbeLimits
from dataloaders.record import Record
from dataloaders.source import SampleSource
from dataloaders.tokenizer import Special


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedSample:
    """A sample of T positions, V visual tokens, P patches and n media items.

    Attributes:
        sample_id, place: row of the index, and where the sample lies.
        tokens: int32 [T]; labels: int32 [T], shifted, -100 where nothing is learned.
        position_ids: int64 [3, T], from 0.
        visual_index: int64 [V], positions that receive the visual embeddings, in media order.
        patches: float32 [P, patch_dim], media after media; [0, patch_dim] when loaded without pixels.
        grids: int64 [n, 3], (t, h, w) in patches.
        replaced: None, or reason and place of the medium that made this sample a zero-loss stand-in.
        conformed: report of each medium, in order; it is true where something had to be conformed.
    """

    sample_id: int
    place: str
    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    position_ids: NDArray[np.int64]
    visual_index: NDArray[np.int64]
    patches: NDArray[np.float32]
    grids: NDArray[np.int64]
    replaced: str | None = None
    conformed: tuple[Conformed, ...] = ()

    @property
    def num_conformed(self) -> int:
        """Media that differed from the plan and were made to fit it."""
        return sum(bool(report) for report in self.conformed)


def load_sample(
    source: SampleSource,
    index: CostIndex,
    sample_id: int,
    estimator: TokenEstimator,
    *,
    train_on: str = "assistant",
    encoder: RecordEncoder | None = None,
    apply_orientation: bool = True,
    with_pixels: bool = True,
    limits: ProbeLimits | None = None,
    video_decoder: str = "auto",
    allocate: Allocate = new_patches,
) -> LoadedSample:
    """Load sample `sample_id` in its planned shape.

    Args:
        train_on, encoder, apply_orientation, limits: as in the scan that made `index`.
        with_pixels: False reads and decodes no media; bad media then go unnoticed here.
        video_decoder: see `dataloaders.decode.decode_media`.
        allocate: (P, patch_dim) -> memory for the patches, contiguous float32; called once.

    Raises:
        IndexFormatError: the index is of another source, or the sample is unusable and was planned nevertheless.
        DataError: samples of this model can be costed, not loaded, see `check_loadable`.
        OSError, SourceError, RecordError: the shard is gone or has changed. A medium in a file of its own that is gone
            or cut since the scan makes a stand-in instead, like one that does not decode.
    """
    estimator = check_loadable(estimator)
    try:
        record = source.record(sample_id)
    except RecordError as error:
        reason = _replaceable(error)
        return stand_in_sample(
            index,
            sample_id,
            estimator,
            place=source.place(sample_id),
            reason=reason,
            with_pixels=with_pixels,
            allocate=allocate,
        )
    rows = _item_rows(index, sample_id, record)
    encoder = encoder or ByteEncoder(train_on=train_on)
    adjustment = index.adjustment(sample_id)
    encoded = encoder.encode(record, index.item_tokens(sample_id))
    encoded = cut_sample(encoded, None if adjustment is None else adjustment.keep_tokens)
    _check_planned(index, sample_id, record, encoded)
    items = planned_items(index, sample_id, estimator)
    grids = np.array([item.grid for item in items], dtype=np.int64).reshape(-1, 3)
    pixels = PixelConfig.of(estimator)
    patches = allocate(sum(item.num_patches for item in items) if with_pixels else 0, pixels.patch_dim)
    conformed: tuple[Conformed, ...] = ()
    replaced = None
    if with_pixels:
        conformed, replaced = _decode_all(
            source,
            sample_id,
            record,
            items,
            patches,
            pixels=pixels,
            apply_orientation=apply_orientation,
            limits=limits,
            video_decoder=video_decoder,
        )
        clamped = index.items["clamped"][rows.start : rows.stop]
        conformed = tuple(map(_unexpected, conformed, clamped))
    return LoadedSample(
        sample_id=sample_id,
        place=record.place,
        tokens=encoded.tokens,
        labels=encoded.labels if replaced is None else np.full_like(encoded.labels, IGNORED_LABEL),
        position_ids=mrope_positions(
            len(encoded.tokens),
            encoded.spans,
            grids,
            merge=estimator.merge,
            time_steps=_time_steps(index, rows, adjusted_estimator(estimator, adjustment)),
        ),
        visual_index=encoded.visual_index,
        patches=patches,
        grids=grids,
        replaced=replaced,
        conformed=conformed,
    )


def stand_in_sample(
    index: CostIndex,
    sample_id: int,
    estimator: TokenEstimator,
    *,
    place: str,
    reason: str,
    with_pixels: bool = True,
    allocate: Allocate = new_patches,
) -> LoadedSample:
    """A sample of the planned shape that teaches nothing and needs no byte of the data.

    Tokens are padding, labels -100, patches zero; the first V positions receive the visual embeddings; positions count
    up on all three axes.

    Args:
        place: where the sample lies, for the record of replaced samples.
        reason: why it is replaced, `code: text`.
        with_pixels, allocate: as in `load_sample`.

    Raises:
        DataError: samples of this model can be costed, not loaded, see `check_loadable`.
    """
    estimator = check_loadable(estimator)
    length, num_visual = (int(index.samples[name][sample_id]) for name in ("llm_tokens", "visual_tokens"))
    items, pixels = planned_items(index, sample_id, estimator), PixelConfig.of(estimator)
    patches = allocate(sum(item.num_patches for item in items) if with_pixels else 0, pixels.patch_dim)
    patches[...] = 0.0
    return LoadedSample(
        sample_id=sample_id,
        place=place,
        tokens=np.full(length, Special.PAD, dtype=np.int32),
        labels=np.full(length, IGNORED_LABEL, dtype=np.int32),
        position_ids=np.tile(np.arange(length, dtype=np.int64), (3, 1)),
        visual_index=np.arange(num_visual, dtype=np.int64),
        patches=patches,
        grids=np.array([item.grid for item in items], dtype=np.int64).reshape(-1, 3),
        replaced=reason,
    )


def check_loadable(estimator: TokenEstimator, index: CostIndex | None = None) -> PatchEstimator:
    """`estimator` as one whose patches can be laid out, for the media of `index` if it is given.

    Raises:
        DataError: samples of this model can be costed, but not loaded yet.
    """
    kind = type(estimator)
    if kind not in _LOADABLE:
        _LOADABLE[kind] = isinstance(estimator, PatchEstimator)
    if not _LOADABLE[kind]:
        raise _not_loadable(estimator, "its pixels are not laid out as patches of one grid")
    if index is not None and not np.array_equal(index.items["llm_tokens"], index.items["visual_tokens"]):
        raise _not_loadable(estimator, "its processor writes other tokens between the visual ones")
    return cast(PatchEstimator, estimator)


_LOADABLE: dict[type, bool] = {}  # the check of a protocol takes longer than the rest of a text sample


def _not_loadable(estimator: TokenEstimator, why: str) -> DataError:
    return DataError(
        f"samples of this model can be costed but not loaded: {why} ({estimator.rule})",
        place=type(estimator).__name__,
        remedy="Train with a model whose media are runs of visual tokens, such as Qwen2.5-VL; index with any.",
    )


def planned_items(index: CostIndex, sample_id: int, estimator: TokenEstimator) -> list[PlannedItem]:
    """The planned shapes of the media of a sample, from the index alone."""
    estimator = adjusted_estimator(estimator, index.adjustment(sample_id))
    return [_planned_item(index, row, estimator) for row in index.item_rows(sample_id)]


def _planned_item(index: CostIndex, row: int, estimator: TokenEstimator) -> PlannedItem:
    whole = {name: int(index.items[name][row]) for name in _PLANNED}
    kind, frame_indices = MediaKind(whole["kind"]), None
    if kind is MediaKind.VIDEO:
        frame_indices = estimator.frame_indices(*index.source_of(row))
    # A clamped medium is known to have another size than the planned one: nothing to compare with.
    source_px = (0, 0) if whole["clamped"] else (whole["height_px"], whole["width_px"])
    return PlannedItem(
        kind=kind,
        grid=(whole["grid_t"], whole["grid_h"], whole["grid_w"]),
        height_px=whole["resized_height_px"],
        width_px=whole["resized_width_px"],
        frames=whole["frames"],
        frame_indices=frame_indices,
        source_height_px=source_px[0],
        source_width_px=source_px[1],
    )


_PLANNED = (
    "kind",
    "grid_t",
    "grid_h",
    "grid_w",
    "resized_height_px",
    "resized_width_px",
    "frames",
    "height_px",
    "width_px",
    "clamped",
)


def _decode_all(
    source: SampleSource,
    sample_id: int,
    record: Record,
    items: Sequence[PlannedItem],
    patches: NDArray[np.float32],
    *,
    pixels: PixelConfig,
    apply_orientation: bool,
    limits: ProbeLimits | None,
    video_decoder: str,
) -> tuple[tuple[Conformed, ...], str | None]:
    """Fill `patches` [P, patch_dim]; (reports, reason for a replacement)."""
    reports: list[Conformed] = []
    at = 0
    for j, item in enumerate(items):
        place = f"{record.place}, member {record.media[j].member}"
        try:
            _, report = decode_media(
                source.media_bytes(sample_id, j),
                item,
                apply_orientation=apply_orientation,
                pixels=pixels,
                limits=limits,
                place=place,
                decoder=video_decoder,
                out=patches[at : at + item.num_patches],
            )
        except (MediaError, RecordError) as error:
            reason = _replaceable(error)
            patches[...] = 0.0
            return (), f"{reason} at {error.place or place}"
        reports.append(report)
        at += item.num_patches
    return tuple(reports), None


# A file that was there in the scan: one sample is hurt, and the others lie elsewhere.
_VANISHED = (Reason.MISSING_MEDIA, Reason.TRUNCATED)


def _replaceable(error: MediaError | RecordError) -> str:
    """Why a sample is replaced, `code: text`; raises the error itself where a replacement would hide more."""
    if isinstance(error, RecordError) and error.reason not in _VANISHED:
        raise error
    return f"{error.reason}: {error.cause}"


def _unexpected(report: Conformed, clamped: int) -> Conformed:
    """The report without what clamping made certain: a clamped clip repeats its frames."""
    return replace(report, frames_repeated=0) if clamped else report


def _time_steps(index: CostIndex, rows: range, estimator: PatchEstimator) -> list[float]:
    """Temporal indices per slice of each medium; 0 for images."""
    steps = []
    for row in rows:
        is_video = index.items["kind"][row] == MediaKind.VIDEO
        frames, fps, _ = index.source_of(row) if is_video else (1, 0.0, 0.0)
        steps.append(estimator.tokens_per_second * estimator.seconds_per_grid(frames, fps) if is_video else 0.0)
    return steps


def _item_rows(index: CostIndex, sample_id: int, record: Record) -> range:
    rows = index.item_rows(sample_id)
    if index.samples["confidence"][sample_id] == Confidence.UNUSABLE:
        raise IndexFormatError(
            f"sample {sample_id} is unusable and cannot be loaded",
            place=record.place,
            remedy="Leave out the samples in `CostIndex.bad` when planning.",
        )
    if len(rows) != len(record.media):
        raise _other_source(f"{len(record.media)} media where the index has {len(rows)}", record)
    return rows


def _check_planned(index: CostIndex, sample_id: int, record: Record, encoded: EncodedSample) -> None:
    planned = tuple(int(index.samples[name][sample_id]) for name in ("llm_tokens", "label_tokens"))
    found = (len(encoded.tokens), encoded.num_label_tokens)
    if planned != found:
        raise _other_source(f"(tokens, labels) are {found}, but the index has {planned}", record)


def _other_source(how: str, record: Record) -> IndexFormatError:
    return IndexFormatError(
        f"the record differs from the index: {how}",
        place=record.place,
        remedy="Build the index again from this source and with the same encoder and `train_on`.",
    )
