"""Building the index of a source without tar shards: in slices, in parallel, and resumable.

    source --slice_jobs--> slices --unit finished earlier?--> its rows     (folder.building/, also after kill -9)
                                  --otherwise: a worker scans it--> unit
    all rows in order --concatenate--> index, written whole, folder.building/ removed

The index is the one that a scan in one process makes, byte for byte. It is not incremental: where a file of the source
changed, the fingerprint of the source did, and all of it is scanned again.

Price: a unit is seven small files until the build ends, and all rows are in memory once when they are put together.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dataloaders.build_folder import OTHERWISE, build_folder, check_none_lost, remove_units
from dataloaders.build_progress import BuildProgress, Tracker
from dataloaders.errors import IndexFormatError, Reason, RecordError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import Confidence, CostIndex, foreign, overwritable, write_index
from dataloaders.index_merge import concatenate
from dataloaders.index_workers import Report, TravelError, num_cpus, scan_here, scan_in_workers
from dataloaders.scan_rows import ScanOptions, check_estimator, check_source, raise_unfit, rules_in_words
from dataloaders.slice_scan import SLICE_SAMPLES, SliceContext, SliceJob, finished_slice, open_slice, slice_jobs
from dataloaders.source import SampleSource, shard_and_key

SMALL_SAMPLES = 10_000  # below it, starting processes takes longer than scanning
MAX_SPOTS = 1000  # samples whose media are looked at before an index is taken as it is
_logger = logging.getLogger(__name__)


def build_slices(
    source: SampleSource,
    estimator: TokenEstimator,
    folder: str | Path,
    options: ScanOptions | None = None,
    *,
    workers: int | None = 1,
    replace: bool = False,
    wait: bool = False,
    progress: Callable[[BuildProgress], None] | None = None,
    slice_samples: int = SLICE_SAMPLES,
) -> CostIndex:
    """The index of `source` in `folder`: opened if it is there and current, otherwise built.

    Args:
        workers: processes; 1: this one alone; None: as many as there are CPUs, if there is enough to do. Where the
            source, the estimator or the encoder does not travel to other processes, it is this one, and a warning of
            the logger `dataloaders.index_slices` says so.
        replace: an index in `folder` may be replaced by one of other rules or options, or of other files; False: that
            is an error. One of the same files that have changed is brought up to date either way.
        wait: while another process builds it, wait for that one; False: it is an error.
        progress: called after every slice, and now and then in between.
        slice_samples: about so many samples make a slice; finished ones of another size are scanned again.

    Raises:
        IndexFormatError: `folder` holds something else, or an index that would be lost, or is being built already; or
            nothing can be written there.
        SourceError, OSError: the source cannot be read (all slices are tried, finished ones are kept), or a worker was
            lost.
        DataError: unfit media under the policy `error`, listing them.
    """
    check_source(source)
    check_estimator(estimator)
    folder, options = overwritable(folder), options or ScanOptions()
    key = options.key(source.fingerprint, estimator)
    with build_folder(folder, wait=wait) as building:
        context = SliceContext(source=source, estimator=estimator, options=options, folder=building)
        old = _old_index(folder, context, replace=replace)
        if old is None or old.key != key or not has_its_media(old, source):
            jobs = slice_jobs(source, slice_samples)
            _scan_missing(jobs, context, workers, progress)
            whole = concatenate([open_slice(job, context) for job in jobs], key)
            whole.rules = rules_in_words(estimator, options.encoder)  # also of no slice at all
            raise_unfit(whole, kept=building)
            old = write_index(folder, whole, scratch=building)
        remove_units(building)
    return old


def has_its_media(index: CostIndex, source: SampleSource) -> bool:
    """Whether media in files of their own (`source.media_apart`) are as the index saw them, as far as sizes tell.

    The fingerprint of such a source is that of its records. Samples whose media were missing may be whole by now, and
    of the others `MAX_SPOTS`, spread evenly, are looked at: another folder of media does not go unseen. Price: a scan
    at every start while a medium is missing, and about 0.1 ms per sample that is looked at.
    """
    if not getattr(source, "media_apart", False):
        return True
    if any(bad.reason == Reason.MISSING_MEDIA for bad in index.bad):
        return False
    usable = np.flatnonzero(index.samples["confidence"] != Confidence.UNUSABLE)
    for i in usable[np.linspace(0, len(usable) - 1, min(MAX_SPOTS, len(usable)), dtype=np.int64)].tolist():
        try:
            found = sum(medium.size_bytes for medium in source.record(i).media)
        except RecordError:
            return False
        if found != index.samples["bytes"][i]:
            return False
    return True


def _scan_missing(
    jobs: Sequence[SliceJob],
    context: SliceContext,
    workers: int | None,
    progress: Callable[[BuildProgress], None] | None,
) -> None:
    """Scan the slices that no earlier try has finished."""
    state = BuildProgress(noun="slice", num_shards=len(jobs), num_samples=len(context.source))
    tracker, missing = Tracker(state, progress), []
    for job in jobs:
        if finished_slice(job, context) is None:
            missing.append(job)
        else:
            tracker.reuse(job, job.size)
    _scan(missing, context, tracker.hear, workers)
    tracker.raise_failed()


def _scan(jobs: Sequence[SliceJob], context: SliceContext, report: Report, workers: int | None) -> None:
    if workers is None:
        workers = 1 if sum(job.size for job in jobs) < SMALL_SAMPLES else num_cpus()
    if min(workers, len(jobs)) > 1:
        try:
            # In order: neighbours may share a row group that is decoded.
            scan_in_workers(jobs, context, report, workers=workers)
            return
        except TravelError as error:  # before anything was scanned
            _logger.warning("one process scans: %s", error)
    scan_here(jobs, context, report)


def _old_index(folder: Path, context: SliceContext, *, replace: bool) -> CostIndex | None:
    """The index that is there.

    Raises:
        IndexFormatError: it must not be replaced: not an index, of other rules or options, or of other data.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        index = CostIndex.open(folder)
    except IndexFormatError:
        if replace:
            return None
        raise
    if not replace:
        _check_replaceable(index, context)
    return index


def _check_replaceable(old: CostIndex, context: SliceContext) -> None:
    expected = context.options.key(context.source.fingerprint, context.estimator)
    differing = old.key.differences(
        expected,
        but=("source",),
        rules=old.rules,
        expected_rules=rules_in_words(context.estimator, context.options.encoder),
    )
    if differing:
        raise foreign(str(old.folder), differing, OTHERWISE[0].upper() + OTHERWISE[1:])
    if old.key.source == expected.source:
        return
    kept = {shard_and_key(context.source, i)[0] for i in range(len(context.source))}
    files = sorted(set(old.names["shard"].unique().to_pylist()) - {""})
    check_none_lost(old.folder, files, kept, noun="file")
