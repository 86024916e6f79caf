"""What the rest of the data layer sees of storage: a file's state, ranges of a file, the options and the counters.

    urls --list--> files --states--> FileState(url, size, stamp) --open(expect)--> StoredFile --read--> bytes

Price: a file is told apart by its size and stamp (modification time, or the ETag of a server), never by its content.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Range = tuple[str, int, int]  # url, offset, size in bytes

MIB = 1024**2
SCHEMES = ("file", "http", "https", "s3", "gs", "gcs", "az", "abfs", "hf", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """A file as it was found.

    Attributes:
        url: as `Storage.list` names it: a path for local files.
        size: bytes.
        stamp: changes when the content does: modification time in ns of a local file, else ETag or date; "" if unknown.
    """

    url: str
    size: int
    stamp: str


@runtime_checkable
class StoredFile(Protocol):
    """An open file, local or remote; safe to share between threads."""

    @property
    def state(self) -> FileState:
        """The file as it was found when opened."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Exactly the bytes [offset, offset + size).

        Raises:
            SourceError: they are not in the file, the file has changed, or it cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How files are reached. Nothing here concerns local files except `schemes` and `max_open_files`.

    Attributes:
        schemes: of URLs that may be opened; "file" stands for local paths.
        protocol_options: arguments of fsspec's file system, by scheme, such as {"s3": {"anon": True}}.
        max_open_files: local files held open at once.
        max_in_flight: requests under way at once, in one process.
        max_request_bytes: of one request; longer ranges are split and fetched side by side.
        timeout_s: of one request, plus the time its bytes take at 1 MiB/s.
        max_tries: of one range, the first included.
        backoff_s: mean wait before the second try; doubles with every further one.
        hedge_factor: a second request is sent for a range when the first takes this many times the usual time.
        hedge_after_s: the least time before that.
        hedge_share: of such requests among all, at most.
        max_waste: bytes fetched to bridge gaps between ranges, as a share of the bytes asked for.
        cache_dir: folder of the local cache of ranges; None: no cache.
        cache_bytes: its bound on disk.
        prefetch_bytes: of ranges fetched ahead and not read yet, in one process.
    """

    schemes: tuple[str, ...] = SCHEMES
    protocol_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    max_open_files: int = 64
    max_in_flight: int = 32
    max_request_bytes: int = 16 * MIB
    timeout_s: float = 30.0
    max_tries: int = 8
    backoff_s: float = 0.1
    hedge_factor: float = 4.0
    hedge_after_s: float = 0.2
    hedge_share: float = 0.1
    max_waste: float = 0.08
    cache_dir: Path | None = None
    cache_bytes: int = 20 * 1024 * MIB
    prefetch_bytes: int = 256 * MIB

    def __post_init__(self) -> None:
        for name in ("max_open_files", "max_in_flight", "max_request_bytes", "max_tries", "cache_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("timeout_s", "hedge_factor", "hedge_after_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        for name in ("backoff_s", "hedge_share", "max_waste", "prefetch_bytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        # Plain copies, so that the options can be pickled and nobody changes them behind our back.
        object.__setattr__(self, "schemes", tuple(scheme.lower() for scheme in self.schemes))
        options = {scheme: dict(values) for scheme, values in self.protocol_options.items()}
        object.__setattr__(self, "protocol_options", options)


@dataclass(slots=True, kw_only=True)
class StorageCounters:
    """What one process has done since its storage was opened; local reads are not counted.

    Attributes:
        requests: sent, repeated and hedged ones included.
        bytes_read: of answers.
        retries: requests repeated after a failure.
        hedged: second requests sent because the first was late.
        cache_hits: ranges served from the local cache.
        cache_bytes_read: their bytes.
        prefetch_hits: ranges, or parts of ranges, served from what was fetched ahead.
        wasted_bytes: fetched to bridge gaps between ranges.
        max_in_flight: the most requests that were under way at once.
    """

    requests: int = 0
    bytes_read: int = 0
    retries: int = 0
    hedged: int = 0
    cache_hits: int = 0
    cache_bytes_read: int = 0
    prefetch_hits: int = 0
    wasted_bytes: int = 0
    max_in_flight: int = 0
