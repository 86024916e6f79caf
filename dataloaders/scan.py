"""From a source to its cost index: headers and text only, no pixel decoded.

    record --probe every medium--> sizes --estimator--> ItemCounts --encoder--> tokens, labels --> rows of the index

A record or a medium that cannot be used becomes a row without counts and an entry in `CostIndex.bad`, never an
exception: the caller lists them all or leaves them out. A shard that cannot be read is an exception, because then
nothing behind it is known either. Media that are sound but that the model's processor would fail on (`UnfitError`: too
long and thin, too few frames) follow the policy `unfit`, here and nowhere later:

    skip    such a sample is unusable, like a damaged one
    clamp   it is planned at the nearest size or number of frames that the processor takes, and decoded to that
    error   the scan goes to its end and then raises one error that lists them all
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dataloaders.build_progress import BuildProgress
from dataloaders.counts import MediaKind
from dataloaders.encoder import ByteEncoder, RecordEncoder
from dataloaders.errors import IndexFormatError, SourceError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import Confidence, CostIndex, IndexKey
from dataloaders.index_build import build_shards, is_current
from dataloaders.index_slices import build_slices, has_its_media
from dataloaders.probe import ProbeLimits
from dataloaders.scan_rows import ScanOptions, Unfit, check_estimator, check_source, raise_unfit, scan_rows
from dataloaders.source import SampleSource, record_limits
from dataloaders.tar_source import TarSource

Progress = Callable[[int, int], None]


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
    encoder: RecordEncoder | None = None,
    apply_orientation: bool = True,
    limits: ProbeLimits | None = None,
    unfit: Unfit = "skip",
) -> IndexKey:
    """What an index of `source` under these options is made from."""
    check_estimator(estimator)
    options = _options(
        source, train_on=train_on, encoder=encoder, apply_orientation=apply_orientation, limits=limits, unfit=unfit
    )
    return options.key(source.fingerprint, estimator)


def build_index(
    source: SampleSource,
    estimator: TokenEstimator,
    folder: str | Path,
    *,
    train_on: str = "assistant",
    encoder: RecordEncoder | None = None,
    apply_orientation: bool = True,
    limits: ProbeLimits | None = None,
    unfit: Unfit = "skip",
    workers: int | None = 1,
    progress: Progress | None = None,
) -> CostIndex:
    """The index of `source` in `folder`: opened if it is there and current, otherwise built and written whole.

    A build that was interrupted goes on where it was. Of a `TarSource`, only shards that changed are scanned, see
    `dataloaders.index_build`; any other source is scanned again when its fingerprint changes, see
    `dataloaders.index_slices`.

    Args:
        workers: processes that scan; 1: this one; None: as many as there are CPUs, if there is enough to do. A script
            that asks for several needs `if __name__ == "__main__":` around what it does. A source that does not travel
            to other processes is scanned in this one, and a warning is logged.
        progress: called with (samples done, samples in all). Others: see `scan_source`.

    Raises:
        IndexFormatError: `folder` holds something that is not an index.
        DataError: unfit media under `unfit="error"`, listing them.
        OSError, SourceError: storage failed.
    """
    check_estimator(estimator)
    options = _options(
        source, train_on=train_on, encoder=encoder, apply_orientation=apply_orientation, limits=limits, unfit=unfit
    )
    key = options.key(source.fingerprint, estimator)
    try:
        index = CostIndex.open(folder, expect=key)
        if is_current(index, source) if type(source) is TarSource else has_its_media(index, source):
            return index
    except IndexFormatError:
        pass  # absent, stale or damaged: built again below, unless the folder is somebody else's
    tell = None if progress is None else _in_samples(progress, len(source))
    if type(source) is not TarSource:
        return build_slices(source, estimator, folder, options, workers=workers, replace=True, wait=True, progress=tell)
    index = build_shards(
        source.shards,
        estimator,
        Path(folder),
        options,
        workers=workers,
        replace=True,
        wait=True,
        progress=tell,
        storage=source.storage,
        table=source.table,
    )
    if index.key != key:
        raise SourceError(
            "shards have changed since the source was opened",
            place=str(folder),
            remedy="Start again when the shards are complete.",
        )
    return index


def scan_source(
    source: SampleSource,
    estimator: TokenEstimator,
    *,
    train_on: str = "assistant",
    encoder: RecordEncoder | None = None,
    apply_orientation: bool = True,
    limits: ProbeLimits | None = None,
    unfit: Unfit = "skip",
    progress: Progress | None = None,
) -> CostIndex:
    """Cost every sample of `source`; the index is held in memory.

    Args:
        train_on: see `encode_record`; it decides the label tokens. Unused where an encoder is given.
        encoder: counts text and labels; None: bytes (`ByteEncoder`).
        apply_orientation: whether EXIF orientation will be applied when decoding.
        limits: ceilings on media, see `ProbeLimits`.
        unfit: what becomes of media that the processor would fail on: `skip`, `clamp` or `error`.
        progress: called with (samples done, samples in all) after each sample.

    Raises:
        DataError: unfit media under `unfit="error"`, listing them.
        OSError, SourceError: storage failed.
    """
    check_estimator(estimator)
    options = _options(
        source, train_on=train_on, encoder=encoder, apply_orientation=apply_orientation, limits=limits, unfit=unfit
    )
    return _scan(source, estimator, options, progress)


def _scan(
    source: SampleSource, estimator: TokenEstimator, options: ScanOptions, progress: Progress | None
) -> CostIndex:
    index = scan_rows(source, estimator, options, progress=progress)
    raise_unfit(index)
    return index


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


def _options(
    source: SampleSource,
    *,
    train_on: str,
    encoder: RecordEncoder | None,
    apply_orientation: bool,
    limits: ProbeLimits | None,
    unfit: Unfit,
) -> ScanOptions:
    check_source(source)
    return ScanOptions(
        encoder=encoder or ByteEncoder(train_on=train_on),
        apply_orientation=apply_orientation,
        limits=limits or ProbeLimits(),
        record_limits=record_limits(source),
        unfit=unfit,
    )


def _in_samples(progress: Progress, total: int) -> Callable[[BuildProgress], None]:
    return lambda state: progress(min(state.samples, total), total)
