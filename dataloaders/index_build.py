"""Building an index shard by shard: in parallel, resumable, incremental, and in parts on several machines.

    shards (of this part) --unchanged in the old index?--> its rows
                          --unit finished earlier?-------> its rows     (folder.building/, also after kill -9)
                          --otherwise: a worker scans it--> unit
    all rows in the order of the shards --concatenate--> index, written whole, folder.building/ removed

A shard is unchanged when path, size and stamp (modification time, ETag) are; an edit that restores both is not seen.
Price: a unit is six small files until the build ends, and the rows of all shards are in memory once when they are put
together.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_field
from pathlib import Path

from dataloaders import member_cache
from dataloaders.build_folder import OTHERWISE, build_folder, check_none_lost, remove_units
from dataloaders.build_progress import BuildProgress, Tracker
from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import CostIndex, foreign, overwritable, write_index
from dataloaders.index_format import PartOf
from dataloaders.index_merge import concatenate, shard_pieces
from dataloaders.index_workers import Report, num_cpus, scan_here, scan_in_workers
from dataloaders.member_table import MemberTable
from dataloaders.scan_rows import ScanOptions, check_estimator, raise_unfit, rules_in_words
from dataloaders.shard_scan import (
    MEMBERS,
    ScanContext,
    ShardJob,
    finished_unit,
    open_unit,
    shard_job,
    table_of_unit,
)
from dataloaders.storage import FileState, Storage
from dataloaders.tar_pass import base_name, source_fingerprint
from dataloaders.tar_source import TarSource, shard_states

_logger = logging.getLogger(__name__)
SMALL_BYTES = 256 * 1024**2  # below it, starting processes takes longer than scanning


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
        names = "\n".join(map(base_name, shards))
        digest = hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()
        return PartOf(number=self.number, count=self.count, num_shards=len(shards), shards=digest)


def _no_part(text: str) -> DataError:
    remedy = "Write i/n with i from 0 to n - 1: 0/4, 1/4, 2/4 and 3/4 on four machines."
    return DataError(f"there is no part {text}", remedy=remedy)


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
    storage: Storage | None = None,
    table: MemberTable | None = None,
    members: Path | None = None,
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
        storage: how shards are reached; None: `Storage()`.
        table: members of shards that were passed over already, such as `TarSource.table`: their headers are not read
            again while they are unchanged.
        members: folder of such tables: what is in it is used, and the table of these shards is kept in it; where it
            cannot be written to, a warning is logged.

    Raises:
        IndexFormatError: `folder` holds something else, an index of other options or of shards that would be lost, or
            is being built already; or nothing can be written there.
        SourceError, OSError: shards cannot be read (all are tried, finished ones are kept), or a worker was lost.
        DataError: unfit media under the policy `error`, listing them.
    """
    check_estimator(estimator)
    folder, options = overwritable(folder), options or ScanOptions()
    storage = storage or Storage()
    names = storage.list(urls)
    states = shard_states(names if part is None else names[part.number :: part.count], storage)
    part_of = None if part is None else part.of(names)
    if table is None and members is not None:
        table = member_cache.known_rows(states, members)
    with build_folder(folder, wait=wait) as building:
        context = ScanContext(
            estimator=estimator,
            options=options,
            folder=building,
            storage=storage,
            table=table,
            keep_tables=members is not None,
        )
        old = _old_index(folder, options, estimator, replace=replace)
        if old is not None and not replace:
            _check_kept(old, [state.url for state in states], part_of)
        jobs = [shard_job(state) for state in states]
        if old is not None and old.part == part_of and [s.state for s in old.shards] == [job.state for job in jobs]:
            _tell_unchanged(old, jobs, progress)
        else:
            pieces = _pieces(jobs, context, old, workers=workers, progress=progress)
            source = source_fingerprint(piece.shards[0].fingerprint for piece in pieces)
            whole = concatenate(pieces, options.key(source, estimator), part=part_of)
            raise_unfit(whole, kept=building)
            old = write_index(folder, whole, scratch=building)
        if members is not None:
            _keep_members(states, context, members)
        remove_units(building)
    return old


def _keep_members(states: Sequence[FileState], context: ScanContext, folder: Path) -> None:
    """Keep the table of the shards, unless rows of the old index stand for shards that no table holds."""
    found = [context.table, *(table_of_unit(shard_job(state), context) for state in states)]
    try:
        member_cache.keep_rows(states, [table for table in found if table is not None], folder)
    except SourceError as error:  # the index is complete; the table only saves a pass
        _logger.warning("%s", error)


def is_current(index: CostIndex, source: TarSource) -> bool:
    """Whether the shards have the stamps that the index saw; the rest is in the fingerprint of the key."""
    found = [(base_name(state.path), state.stamp) for state in source.states]
    return found == [(base_name(shard.path), shard.stamp) for shard in index.shards]


def _pieces(
    jobs: Sequence[ShardJob],
    context: ScanContext,
    old: CostIndex | None,
    *,
    workers: int | None,
    progress: Callable[[BuildProgress], None] | None,
) -> list[CostIndex]:
    """The rows of every shard: from the old index, from an earlier try, or scanned now."""
    tracker = Tracker(BuildProgress(num_shards=len(jobs), num_bytes=sum(job.size for job in jobs)), progress)
    # One without shards is of another kind of source, and is replaced.
    kept = {} if old is None or not old.shards else {piece.shards[0].state: piece for piece in shard_pieces(old)}
    found: dict[str, CostIndex] = {}
    for job in jobs:
        index = kept[job.state] if job.state in kept else finished_unit(job, context)
        if index is not None:
            found[job.path] = index
            tracker.reuse(job, len(index))
    _scan([job for job in jobs if job.path not in found], context, tracker.hear, workers)
    tracker.raise_failed()
    return [found[job.path] if job.path in found else open_unit(job, context) for job in jobs]


def _scan(jobs: Sequence[ShardJob], context: ScanContext, report: Report, workers: int | None) -> None:
    if workers is None:
        workers = 1 if sum(job.size for job in jobs) < SMALL_BYTES else num_cpus()
    if min(workers, len(jobs)) <= 1:
        scan_here(jobs, context, report)
    else:
        if context.table is not None and context.table.path is None:
            # In a file, so that workers share its pages instead of getting a copy each.
            context = replace_field(context, table=context.table.write(context.folder / MEMBERS / "table.members"))
        # The largest first, so that no worker begins one when the others are done.
        jobs = sorted(jobs, key=lambda job: job.size, reverse=True)
        scan_in_workers(jobs, context, report, workers=workers)


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
    """Refuse to make another part of an index, or to lose shards or samples that are in it."""
    remedy = OTHERWISE[0].upper() + OTHERWISE[1:]
    was, now = (None if each is None else (each.number, each.count) for each in (old.part, part))
    if was != now:
        of, to = ("an index of all shards" if each is None else f"part {each}" for each in (old.part, part))
        raise IndexFormatError(f"this is {of}, and would become {to}", place=str(old.folder), remedy=remedy)
    if not old.shards and len(old):
        raise IndexFormatError(
            f"this is an index of {len(old)} samples that are not in tar shards",
            place=str(old.folder),
            remedy=remedy,
        )
    check_none_lost(old.folder, [shard.path for shard in old.shards], set(paths), noun="shard")


def _tell_unchanged(
    index: CostIndex, jobs: Sequence[ShardJob], progress: Callable[[BuildProgress], None] | None
) -> None:
    if progress is not None:
        size = sum(job.size for job in jobs)
        num = len(jobs)
        progress(BuildProgress(num_shards=num, num_bytes=size, shards=num, reused=num, bytes=size, samples=len(index)))
