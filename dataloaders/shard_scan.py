"""One shard, from its headers to a small index of its own: the unit of work of a build.

    shard --TarSource--> samples --scan_rows--> CostIndex --write_index--> folder/<digest of path>
          (its rows of a table of members where there is one: headers are passed over once)

A unit is written whole or not at all and says what the shard was, so that a build which starts again takes it as it
is. What happens inside a unit depends on that shard and the options alone, never on who scans it or when.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import CostIndex, write_index
from dataloaders.index_format import AGAIN, ShardRows
from dataloaders.member_table import MemberTable, selected
from dataloaders.scan_rows import ScanOptions, scan_rows
from dataloaders.source import SampleSource
from dataloaders.storage import FileState, Storage, shown
from dataloaders.tar_groups import TarReport, add_report, report_json
from dataloaders.tar_source import TarSource

MEMBERS = "members"  # folder of tables beside the units
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """A shard to scan: its path or URL, and what the file was when the build began."""

    path: str
    size: int
    stamp: str

    @property
    def state(self) -> tuple[str, int, str]:
        """What decides whether rows of it may be kept, see `ShardRows.state`."""
        return self.path, self.size, self.stamp

    @property
    def file(self) -> FileState:
        """The shard as storage has to find it."""
        return FileState(url=self.path, size=self.size, stamp=self.stamp)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"shard {shown(self.path)}"

    def scan(self, context: "ScanContext", progress: Progress | None = None) -> int:
        """Scan the shard and write its unit, see `scan_shard`."""
        return scan_shard(self, context, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanContext:
    """What is the same for all shards; it travels to the workers.

    Attributes:
        folder: where the units go.
        storage: how shards are reached.
        table: members of shards that were passed over already.
        keep_tables: keep the members of shards that are passed over now, see `table_of_unit`.
    """

    estimator: TokenEstimator
    options: ScanOptions
    folder: Path
    storage: Storage = field(default_factory=Storage)
    table: MemberTable | None = None
    keep_tables: bool = False

    def unit(self, job: ShardJob) -> Path:
        """Folder of the unit of a shard."""
        return self.folder / _digest(job)

    def members(self, job: ShardJob) -> Path:
        """File of its table of members."""
        return self.folder / MEMBERS / f"{_digest(job)}.members"


def _digest(job: ShardJob) -> str:
    return hashlib.sha256(os.fsencode(job.path)).hexdigest()[:32]


def shard_job(state: FileState) -> ShardJob:
    """The job for a shard in this state."""
    return ShardJob(path=state.url, size=state.size, stamp=state.stamp)


def open_unit(job: ShardJob, context: ScanContext) -> CostIndex:
    """The unit of a shard. Raises IndexFormatError where there is none."""
    return CostIndex.open(context.unit(job), map_small=False)


def finished_unit(job: ShardJob, context: ScanContext) -> CostIndex | None:
    """The unit of a shard if it is there, made with these options from the file as it is now."""
    try:
        index = open_unit(job, context)
    except IndexFormatError:
        return None
    expected = context.options.key("", context.estimator)
    current = [shard.state for shard in index.shards] == [job.state]
    return index if current and not index.key.differences(expected, but=("source",)) else None


def scan_shard(job: ShardJob, context: ScanContext, progress: Progress | None = None) -> int:
    """Scan a shard and write its unit; returns the number of samples.

    Raises:
        OSError, SourceError: it cannot be read, or changed meanwhile, or memory ran out.
        DataError: a fault in the estimator or the encoder, with the place.
    """
    source = _source(job, context)
    (state,) = source.states
    shard = ShardRows(
        path=job.path,
        size=state.size,
        stamp=state.stamp,
        fingerprint=state.fingerprint,
        num_samples=state.num_samples,
        report=report_json(source.report) if source.report.lines() else "",
    )
    index = scan_piece(source, context.estimator, context.options, shards=[shard], progress=progress)
    if shard.state != job.state or context.storage.states([job.path]) != [job.file]:
        raise SourceError(
            "the shard changed while it was scanned",
            place=job.name,
            remedy="Start again when the shards are complete.",
        )
    write_index(context.unit(job), index)
    return len(index)


def _source(job: ShardJob, context: ScanContext) -> TarSource:
    """The shard as a source: from the rows of a table if they are there, otherwise by passing over its headers."""
    table, limits = context.table, context.options.record_limits
    if table is not None and (k := table.find(job.file)) is not None:
        return TarSource.of_table(selected(table, [k]), context.storage, limits=limits)
    kept = table_of_unit(job, context) if context.keep_tables else None
    if kept is not None:
        return TarSource.of_table(kept, context.storage, limits=limits)
    source = TarSource([job.path], limits=limits, storage=context.storage)
    if context.keep_tables:
        with suppress(OSError):  # it only saves a pass; where the disk is full, writing the unit says so
            source.table.write(context.members(job))
    return source


def table_of_unit(job: ShardJob, context: ScanContext) -> MemberTable | None:
    """The members of a shard, kept by a pass of this build; None where there are none of its present state."""
    try:
        table = MemberTable.open(context.members(job))
    except (OSError, SourceError):
        return None
    return table if table.find(job.file) is not None else None


def scan_piece(
    source: SampleSource,
    estimator: TokenEstimator,
    options: ScanOptions,
    *,
    shards: Sequence[ShardRows] = (),
    progress: Progress | None = None,
) -> CostIndex:
    """`scan_rows` of a piece; what fails in it, other than storage and data, comes with the place of the sample.

    Raises:
        SourceError: memory ran out.
        DataError: a fault of the estimator or the encoder.
    """
    done = 0

    def count(samples: int, total: int) -> None:
        nonlocal done
        done = samples
        if progress is not None:
            progress(samples, total)

    def place() -> str:
        return source.place(min(done, len(source) - 1))

    try:
        return scan_rows(source, estimator, options, shards=shards, progress=count)
    except (OSError, DataError):
        raise
    except MemoryError as error:
        raise SourceError(
            "memory ran out",
            place=place(),
            remedy="Take fewer workers, or shards of fewer samples; what was finished is kept.",
        ) from error
    except Exception as error:
        raise DataError(
            f"the scan failed with {type(error).__name__}: {error}",
            place=place(),
            remedy="This is a fault of the estimator or the encoder; please report it with that sample.",
        ) from error


def shard_notes(shards: Iterable[ShardRows]) -> list[str]:
    """What the header passes found besides good samples, over all shards, as short sentences.

    Raises:
        IndexFormatError: a damaged report.
    """
    whole = TarReport()
    for shard in shards:
        if shard.report:
            try:
                add_report(whole, shard.report)
            except (AttributeError, RecursionError, TypeError, ValueError) as error:
                raise IndexFormatError(
                    f"damaged: the report on {shard.path}: {error!r}", place="index", remedy=AGAIN
                ) from error
        else:
            whole.num_samples += shard.num_samples
    return whole.lines()
