"""What a data set has to offer to be indexed, planned and read: random access by sample id."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dataloaders.probe.reader import ByteReader
from dataloaders.record import Record
from dataloaders.record_parser import RecordLimits


@runtime_checkable
class SampleSource(Protocol):
    """Samples 0 .. len - 1, in a fixed order.

    A source is picklable and opens its files lazily in the process that reads: it travels to loader workers.
    `record` raises `RecordError` for a record that does not parse; failing storage raises `OSError` or `SourceError`.
    """

    @property
    def fingerprint(self) -> str:
        """Hex or other short text that changes when samples, their order or their sizes change."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def record(self, i: int) -> Record:
        """Sample `i`, parsed; its media are in the order of their placeholders."""
        ...

    def media_reader(self, i: int, j: int) -> ByteReader:
        """Ranges of medium `j` of sample `i`, for header probing."""
        ...

    def media_bytes(self, i: int, j: int) -> bytes:
        """All encoded bytes of medium `j` of sample `i`."""
        ...

    def place(self, i: int) -> str:
        """Where sample `i` lies, for messages: `shard FILE, key KEY`, FILE an absolute path or a URL as shown."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """A source that can start fetching samples before they are asked for."""

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        """Start fetching the texts of samples `ids`, and with `media` their media; returns at once."""
        ...


@runtime_checkable
class HeadPrefetching(Protocol):
    """A source that can start fetching the beginnings of media, where their headers are."""

    def prefetch_heads(self, ids: Sequence[int], num_bytes: int) -> None:
        """Start fetching the texts of samples `ids`, and up to `num_bytes` of each of their media; returns at once."""
        ...


@runtime_checkable
class Naming(Protocol):
    """A source that knows what its samples are called without parsing them."""

    def shard_and_key(self, i: int) -> tuple[str, str]:
        """What the record of sample `i` says as `shard` and `key`, also where it does not parse."""
        ...


def shard_and_key(source: SampleSource, i: int) -> tuple[str, str]:
    """(shard, key) of sample `i`, whatever its record holds; ("", its place) for sources without `shard_and_key`."""
    return source.shard_and_key(i) if isinstance(source, Naming) else ("", source.place(i))


def record_limits(source: SampleSource) -> RecordLimits:
    """Bounds on a record: `source.record_limits`, or the usual ones for sources without."""
    own = getattr(source, "record_limits", None)
    return own if isinstance(own, RecordLimits) else RecordLimits()


class Sharded(Protocol):
    """An index, as far as it knows which file every sample lies in."""

    @property
    def shard_numbers(self) -> NDArray[Any]:
        """int [n]: number of the file of every sample."""
        ...


def groups(source: SampleSource, index: Sharded) -> NDArray[np.int64]:
    """int64 [n]: samples of one number are cheap to read together; block shuffle deals in these.

    They are `source.groups` where a source has any (row groups of Parquet, files of JSON lines), else the files that
    the index knows. Numbers need not be consecutive; samples of one number need not be neighbours.
    """
    own: NDArray[np.int64] | None = getattr(source, "groups", None)
    return np.asarray(index.shard_numbers if own is None else own, dtype=np.int64)


def prefetch(source: SampleSource, ids: Sequence[int], *, media: bool = True) -> None:
    """Tell a source which samples are read next: a hint, which sources without `prefetch` do without.

    Args:
        ids: samples, in the order of reading.
        media: False: their texts alone are needed.
    """
    if isinstance(source, Prefetching):
        source.prefetch(ids, media=media)


def prefetch_heads(source: SampleSource, ids: Sequence[int], num_bytes: int) -> None:
    """Tell a source which samples are scanned next; one that fetches no beginnings of media is told of the texts.

    Args:
        ids: samples, in the order of reading.
        num_bytes: so much of every medium, at most.
    """
    if isinstance(source, HeadPrefetching):
        source.prefetch_heads(ids, num_bytes)
    else:
        prefetch(source, ids, media=False)
