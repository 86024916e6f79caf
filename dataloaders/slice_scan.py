"""One slice, consecutive samples of a source without shards: the unit of work of a build.

    source [n samples] --slice_jobs--> [0, 2000) [2000, 4000) ... --scan_rows--> CostIndex --> folder/<digest of slice>

A slice goes by the fingerprint of its source, so what was scanned of other data is never taken. Slices end where files
or row groups end (`source.groups`) as far as that leaves them about as large: a row group is then decoded once.

Price: the source travels to every worker. One that holds its data in memory is there as often as there are workers.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dataloaders.errors import IndexFormatError
from dataloaders.estimators.base import TokenEstimator
from dataloaders.index import CostIndex, IndexKey, write_index
from dataloaders.probe.reader import ByteReader
from dataloaders.record import Record
from dataloaders.scan_rows import ScanOptions
from dataloaders.shard_scan import scan_piece
from dataloaders.source import SampleSource, prefetch_heads, shard_and_key

SLICE_SAMPLES = 2000
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceContext:
    """What is the same for all slices; it travels to the workers.

    Attributes:
        folder: where the units go.
    """

    source: SampleSource
    estimator: TokenEstimator
    options: ScanOptions
    folder: Path

    def unit(self, job: "SliceJob") -> Path:
        """Folder of the unit of a slice."""
        return self.folder / job.fingerprint[:32]

    def key(self, job: "SliceJob") -> IndexKey:
        """What marks the unit of a slice."""
        return self.options.key(job.fingerprint, self.estimator)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceJob:
    """Samples [start, stop) of the source with this fingerprint."""

    source: str
    start: int
    stop: int

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"samples {self.start} to {self.stop - 1}"

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    @property
    def fingerprint(self) -> str:
        """Hex text of the source and the bounds."""
        return hashlib.sha256(f"slice-1\n{self.source}\n{self.start}\n{self.stop}".encode()).hexdigest()

    def scan(self, context: SliceContext, progress: Progress | None = None) -> int:
        """Scan the samples and write the unit.

        Raises:
            OSError, SourceError: the source cannot be read, or memory ran out.
            DataError: a fault in the estimator or the encoder, with the place.
        """
        part = SourceSlice(context.source, self)
        index = scan_piece(part, context.estimator, context.options, progress=progress)
        write_index(context.unit(self), index)
        return len(index)


class SourceSlice:
    """The samples of a slice as a source of their own, numbered from 0 (a `SampleSource`)."""

    def __init__(self, source: SampleSource, job: SliceJob) -> None:
        self._source, self._start, self._size = source, job.start, job.size
        self.fingerprint = job.fingerprint

    def __len__(self) -> int:
        return self._size

    def record(self, i: int) -> Record:
        """Sample `i` of the slice."""
        return self._source.record(self._start + i)

    def media_reader(self, i: int, j: int) -> ByteReader:
        """Ranges of medium `j` of sample `i` of the slice."""
        return self._source.media_reader(self._start + i, j)

    def media_bytes(self, i: int, j: int) -> bytes:
        """Bytes of medium `j` of sample `i` of the slice."""
        return self._source.media_bytes(self._start + i, j)

    def place(self, i: int) -> str:
        """Where sample `i` of the slice lies."""
        return self._source.place(self._start + i)

    def shard_and_key(self, i: int) -> tuple[str, str]:
        """Shard and key of sample `i` of the slice."""
        return shard_and_key(self._source, self._start + i)

    def prefetch_heads(self, ids: Sequence[int], num_bytes: int) -> None:
        """Pass the hint on."""
        prefetch_heads(self._source, [self._start + i for i in ids], num_bytes)


def slice_jobs(source: SampleSource, size: int = SLICE_SAMPLES) -> list[SliceJob]:
    """Slices of about `size` samples, in order; never more than twice that.

    Small groups are put together, a group of more than twice the size is cut evenly.
    """
    num_samples, bounds, start = len(source), [0], 0
    for end in _group_ends(source, num_samples):
        if end - bounds[-1] > 2 * size and start > bounds[-1]:
            bounds.append(start)
        if end - bounds[-1] >= size:
            count = round((end - start) / size) if end - start > 2 * size else 1
            first = bounds[-1]
            bounds += [first + (end - first) * k // count for k in range(1, count + 1)]
        start = end
    if bounds[-1] < num_samples:
        bounds.append(num_samples)
    return [SliceJob(source=source.fingerprint, start=first, stop=last) for first, last in pairwise(bounds)]


def _group_ends(source: SampleSource, num_samples: int) -> list[int]:
    """Where files or row groups end; one end where a source has neither."""
    groups = getattr(source, "groups", None)
    if groups is None or not num_samples:
        return [num_samples] if num_samples else []
    numbers = np.asarray(groups)
    return [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), num_samples]


def finished_slice(job: SliceJob, context: SliceContext) -> CostIndex | None:
    """The unit of a slice if it is there."""
    try:
        return open_slice(job, context)
    except IndexFormatError:
        return None


def open_slice(job: SliceJob, context: SliceContext) -> CostIndex:
    """The unit of a slice. Raises IndexFormatError where there is none that was made with these options."""
    return CostIndex.open(context.unit(job), context.key(job), map_small=False)
