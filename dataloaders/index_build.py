"""Building an index shard by shard: in parallel, resumable, incremental, and in parts on several machines.

    shards (of this part) --unchanged in the old index?--> its rows
                          --unit finished earlier?-------> its rows     (folder.building/, also after kill -9)
                          --otherwise: a worker scans it--> unit
    all rows in the order of the shards --concatenate--> index, written whole, folder.building/ removed

A shard is unchanged when path, size and modification time are; an edit that restores both is not seen. Price: a unit is
six small files until the build ends, and the rows of all shards are in memory once when they are put together.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import CostIndex, foreign, overwritable, unwritable, write_index
from dataloaders.index_format import PartOf
from dataloaders.index_merge import concatenate, shard_pieces
from dataloaders.index_workers import Report, ShardEvent, num_cpus, scan_here, scan_in_workers
from dataloaders.scan_rows import ScanOptions, check_estimator, raise_unfit, rules_in_words
from dataloaders.shard_scan import ScanContext, ShardJob, finished_unit, open_unit, shard_job
from dataloaders.tar_source import TarSource, check_shards, list_urls, repeated, source_fingerprint

MAX_LISTED = 20
MAX_NAMED = 5
SMALL_BYTES = 256 * 1024**2  # below it, starting processes takes longer than scanning
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part `number` of `count`: the shards k with k mod count = number, from 0."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.number < self.count:
            raise _no_part(f"{self.number}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> "Part":
        """From `i/n`, i counted from 0."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if match is None:
            raise _no_part(repr(text))
        return cls(number=int(match[1]), count=int(match[2]))

    def of(self, shards: Sequence[str]) -> PartOf:
        """What is stored, so that parts of other lists of shards are not merged."""
        names = "\n".join(os.path.basename(path) for path in shards)
        digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
        return PartOf(number=self.number, count=self.count, num_shards=len(shards), shards=digest)


def _no_part(text: str) -> DataError:
    remedy = "Write i/n with i from 0 to n - 1: 0/4, 1/4, 2/4 and 3/4 on four machines."
    return DataError(f"there is no part {text}", remedy=remedy)


@dataclass(slots=True, kw_only=True)
class BuildProgress:
    """How far a build is.

    Attributes:
        shards, num_shards: done, in all. reused: of those done, how many were not read.
        bytes, num_bytes: of the shards.
        samples: scanned or taken over.
        failed: shards that could not be scanned.
    """

    num_shards: int
    num_bytes: int
    shards: int = 0
    reused: int = 0
    bytes: int = 0
    samples: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Tracker:
    """Adds up the news of the shards, and keeps their errors."""

    state: BuildProgress
    tell: Callable[[BuildProgress], None] | None
    partly: dict[str, tuple[int, int]] = field(default_factory=dict)
    errors: list[tuple[ShardJob, Exception]] = field(default_factory=list)

    def reuse(self, job: ShardJob, index: CostIndex) -> None:
        self.state.reused += 1
        self.hear(ShardEvent(job=job, samples=len(index), total=len(index), finished=True))

    def hear(self, event: ShardEvent) -> None:
        job, state = event.job, self.state
        share = 1.0 if event.finished else event.samples / event.total if event.total else 0.0
        now = (event.samples, int(share * job.size))
        before = self.partly.pop(job.path, (0, 0))
        state.samples, state.bytes = state.samples + now[0] - before[0], state.bytes + now[1] - before[1]
        if event.error is not None:
            self.errors.append((job, event.error))
            state.failed += 1
        elif event.finished:
            state.shards += 1
        else:
            self.partly[job.path] = now
        if self.tell is not None:
            self.tell(state)


def build_shards(
    urls: str | Sequence[str],
    estimator: TokenEstimator,
    folder: str | Path,
    options: ScanOptions | None = None,
    *,
    workers: int | None = 1,
    part: Part | None = None,
    replace: bool = False,
    wait: bool = False,
    progress: Callable[[BuildProgress], None] | None = None,
) -> CostIndex:
    """The index of tar shards in `folder`: shards that it holds unchanged are kept, others are scanned.

    Args:
        urls: shards, see `TarSource`.
        workers: processes; 1: this one alone; None: as many as there are CPUs, if there is enough to do.
        part: build the index of a part of the shards, for `merge_parts`.
        replace: an index in `folder` may be replaced by one of other rules, options or part, or by one that lacks
            shards of it; False: that is an error.
        wait: while another process builds it, wait for that one; False: it is an error.
        progress: called after every shard, and now and then in between.

    Raises:
        IndexFormatError: `folder` holds something else, an index of other options or of shards that would be lost, or
            is being built already; or nothing can be written there.
        SourceError, OSError: shards cannot be read (all are tried, finished ones are kept), or a worker was lost.
        DataError: unfit media under the policy `error`, listing them.
    """
    check_estimator(estimator)
    folder, options = overwritable(folder), options or ScanOptions()
    names = list_urls(urls)
    own = names if part is None else names[part.number :: part.count]
    check_shards(own)
    part_of = None if part is None else part.of(names)
    paths = [os.path.abspath(path) for path in own]
    if twice := repeated(paths):
        raise SourceError(f"shards listed twice: {', '.join(twice[:MAX_LISTED])}", remedy="List every shard once.")
    with _locked(folder, wait=wait) as building:
        context = ScanContext(estimator=estimator, options=options, folder=building)
        old = _old_index(folder, options, estimator, replace=replace)
        if old is not None and not replace:
            _check_kept(old, paths, part_of)
        jobs = [shard_job(path) for path in paths]
        if old is not None and old.part == part_of and [s.state for s in old.shards] == [job.state for job in jobs]:
            _tell_unchanged(old, jobs, progress)
        else:
            pieces = _pieces(jobs, context, old, workers=workers, progress=progress)
            source = source_fingerprint(piece.shards[0].fingerprint for piece in pieces)
            whole = concatenate(pieces, options.key(source, estimator), part=part_of)
            raise_unfit(whole, kept=building)
            old = write_index(folder, whole, scratch=building)
        _remove_units(building)
    return old


def _remove_units(building: Path) -> None:
    for path in building.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def is_current(index: CostIndex, source: TarSource) -> bool:
    """Whether the shards have the modification times that the index saw; the rest is in the fingerprint of the key."""
    found = [(os.path.basename(state.path), state.mtime_ns) for state in source.states]
    return found == [(os.path.basename(shard.path), shard.mtime_ns) for shard in index.shards]


def _pieces(
    jobs: Sequence[ShardJob],
    context: ScanContext,
    old: CostIndex | None,
    *,
    workers: int | None,
    progress: Callable[[BuildProgress], None] | None,
) -> list[CostIndex]:
    """The rows of every shard: from the old index, from an earlier try, or scanned now."""
    tracker = _Tracker(BuildProgress(num_shards=len(jobs), num_bytes=sum(job.size for job in jobs)), progress)
    kept = {} if old is None else {piece.shards[0].state: piece for piece in shard_pieces(old)}
    found: dict[str, CostIndex] = {}
    for job in jobs:
        index = kept[job.state] if job.state in kept else finished_unit(job, context)
        if index is not None:
            found[job.path] = index
            tracker.reuse(job, index)
    _scan([job for job in jobs if job.path not in found], context, tracker.hear, workers)
    _raise_failed(tracker.errors, len(jobs))
    return [found[job.path] if job.path in found else open_unit(job, context) for job in jobs]


def _scan(jobs: Sequence[ShardJob], context: ScanContext, report: Report, workers: int | None) -> None:
    if workers is None:
        workers = 1 if sum(job.size for job in jobs) < SMALL_BYTES else num_cpus()
    if min(workers, len(jobs)) <= 1:
        scan_here(jobs, context, report)
    else:
        scan_in_workers(jobs, context, report, workers=workers)


def _raise_failed(errors: Sequence[tuple[ShardJob, Exception]], num_shards: int) -> None:
    """Raise the error of a shard as it is, or one error that lists those of several."""
    if len(errors) == 1:
        raise errors[0][1]
    if errors:
        more = [f"  and {len(errors) - MAX_LISTED} more"] if len(errors) > MAX_LISTED else []
        told = (f"  {job.path}: {error}" for job, error in sorted(errors[:MAX_LISTED], key=lambda pair: pair[0].path))
        raise SourceError(
            "\n".join([f"{len(errors)} of {num_shards} shards cannot be scanned:", *told, *more]),
            remedy="Repair or leave them out and start again: the others are kept.",
        )


def _old_index(folder: Path, options: ScanOptions, estimator: TokenEstimator, *, replace: bool) -> CostIndex | None:
    """The index that is there, if rows of it may be kept."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    try:
        index = CostIndex.open(folder)
        differing = index.key.differences(
            options.key("", estimator),
            but=("source",),
            rules=index.rules,
            expected_rules=rules_in_words(estimator, options.encoder),
        )
        if differing:
            raise foreign(folder, differing, "Choose another folder, or replace this index with --replace.")
    except IndexFormatError:
        if replace:
            return None
        raise
    return index


def _check_kept(old: CostIndex, paths: Sequence[str], part: PartOf | None) -> None:
    """Refuse to make another part of an index, or to lose shards that are in it."""
    remedy = "choose another folder, or replace this index with --replace (in Python: replace=True)."
    was, now = (None if each is None else (each.number, each.count) for each in (old.part, part))
    if was != now:
        of, to = ("an index of all shards" if each is None else f"part {each}" for each in (old.part, part))
        raise IndexFormatError(
            f"this is {of}, and would become {to}", place=str(old.folder), remedy=remedy[0].upper() + remedy[1:]
        )
    kept = set(paths)
    lost = [shard.path for shard in old.shards if shard.path not in kept]
    if lost:
        more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
        raise IndexFormatError(
            f"{len(lost)} of the {len(old.shards)} shards in this index are not among those that are named: "
            f"{', '.join(lost[:MAX_NAMED])}{more}",
            place=str(old.folder),
            remedy=f"Name them too, {remedy}",
        )


def _tell_unchanged(
    index: CostIndex, jobs: Sequence[ShardJob], progress: Callable[[BuildProgress], None] | None
) -> None:
    if progress is not None:
        size = sum(job.size for job in jobs)
        num = len(jobs)
        progress(BuildProgress(num_shards=num, num_bytes=size, shards=num, reused=num, bytes=size, samples=len(index)))


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[Path]:
    """The folder for units beside `folder`, held by this process alone; the system lets go of it when we die."""
    building = folder.parent / f"{folder.name}.building"
    with _lock_file(building / _LOCK, folder, wait=wait):
        try:
            yield building
        finally:
            if [path.name for path in building.iterdir()] == [_LOCK]:
                shutil.rmtree(building, ignore_errors=True)


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def _lock_file(path: Path, folder: Path, *, wait: bool) -> Iterator[None]:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = path.open("a")
        except FileNotFoundError:  # a build that ended just now has removed the folder
            continue
        except OSError as error:
            raise unwritable(folder, error) from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise IndexFormatError(
                    "another process is building this index", place=str(folder), remedy="Wait for it, or end it."
                ) from None
            # A build that ended just now has removed the file under our hands: then the lock means nothing.
            if _is_same(path, handle.fileno()):
                yield
                return
