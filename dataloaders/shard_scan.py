"""One shard, from its headers to a small index of its own: the unit of work of a build.

    shard --TarSource--> samples --scan_rows--> CostIndex --write_index--> folder/<digest of path>

A unit is written whole or not at all and says what the shard was, so that a build which starts again takes it as it
is. What happens inside a unit depends on that shard and the options alone, never on who scans it or when.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import CostIndex, write_index
from dataloaders.index_format import AGAIN, ShardRows
from dataloaders.scan_rows import ScanOptions, scan_rows
from dataloaders.tar_groups import TarReport
from dataloaders.tar_source import TarSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob:
    """A shard to scan: its path and what the file was when the build began."""

    path: str
    size: int
    mtime_ns: int

    @property
    def state(self) -> tuple[str, int, int]:
        """What decides whether rows of it may be kept, see `ShardRows.state`."""
        return self.path, self.size, self.mtime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanContext:
    """What is the same for all shards; it travels to the workers.

    Attributes:
        folder: where the units go.
    """

    estimator: TokenEstimator
    options: ScanOptions
    folder: Path

    def unit(self, job: ShardJob) -> Path:
        """Folder of the unit of a shard."""
        return self.folder / hashlib.sha256(os.fsencode(job.path)).hexdigest()[:32]


def shard_job(path: str) -> ShardJob:
    """The job for a shard as it is now."""
    status = os.stat(path)
    return ShardJob(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns)


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


def scan_shard(job: ShardJob, context: ScanContext, progress: Callable[[int, int], None] | None = None) -> int:
    """Scan a shard and write its unit; returns the number of samples.

    Raises:
        OSError, SourceError: it cannot be read, or changed meanwhile, or memory ran out.
        DataError: a fault in the estimator or the encoder, with the place.
    """
    source = TarSource([job.path], limits=context.options.record_limits)
    (state,) = source.states
    shard = ShardRows(
        path=job.path,
        size=state.size,
        mtime_ns=state.mtime_ns,
        fingerprint=state.fingerprint,
        num_samples=state.num_samples,
        report=_report_json(source.report) if source.report.lines() else "",
    )
    done = [0]

    def count(samples: int, total: int) -> None:
        done[0] = samples
        if progress is not None:
            progress(samples, total)

    try:
        index = scan_rows(source, context.estimator, context.options, shards=[shard], progress=count)
    except (OSError, DataError):
        raise
    except MemoryError as error:
        raise SourceError(
            "memory ran out",
            place=source.place(done[0]),
            remedy="Take fewer workers, or shards of fewer samples; shards that were finished are kept.",
        ) from error
    except Exception as error:
        raise DataError(
            f"the scan failed with {type(error).__name__}: {error}",
            place=source.place(done[0]),
            remedy="This is a fault of the estimator or the encoder; please report it with that sample.",
        ) from error
    if shard.state != job.state or shard_job(job.path) != job:
        raise SourceError(
            "the shard changed while it was scanned",
            place=f"shard {job.path}",
            remedy="Start again when the shards are complete.",
        )
    write_index(context.unit(job), index)
    return len(index)


def shard_notes(shards: Iterable[ShardRows]) -> list[str]:
    """What the header passes found besides good samples, over all shards, as short sentences.

    Raises:
        IndexFormatError: a damaged report.
    """
    whole = TarReport()
    for shard in shards:
        if shard.report:
            try:
                _add(whole, json.loads(shard.report))
            except (AttributeError, RecursionError, TypeError, ValueError) as error:
                raise IndexFormatError(
                    f"damaged: the report on {shard.path}: {error!r}", place="index", remedy=AGAIN
                ) from error
        else:
            whole.num_samples += shard.num_samples
    return whole.lines()


def _report_json(report: TarReport) -> str:
    # Not `asdict`: it makes a Counter of pairs out of a Counter.
    return json.dumps({field.name: getattr(report, field.name) for field in fields(report)})


def _add(whole: TarReport, found: dict[str, object]) -> None:
    other = TarReport(**found)  # type: ignore[arg-type]
    for name in ("num_shards", "num_members", "num_samples", "num_incomplete"):
        setattr(whole, name, getattr(whole, name) + getattr(other, name))
    whole.ignored += Counter(other.ignored)
    whole.unexpected += Counter(other.unexpected)
    whole.incomplete = (whole.incomplete + other.incomplete)[:20]
