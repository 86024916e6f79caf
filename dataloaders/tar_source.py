"""WebDataset tar shards as a random-access source: a table of members, then reads by offset, wherever the shards lie.

    urls --Storage.list--> shards --states--> member_cache --> table of members --Storage--> records, headers, media
                                              (a folder, or a pass over the headers: dataloaders.tar_pass)

Price: the first opening reads the headers of all shards; with a folder for the table (`members`), later openings read
none. Shards must be uncompressed. A source travels to workers as the path of its table, or as the arrays of one that
was never written; each process opens its own files when it first reads.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import MediaKind
from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.member_cache import table_of
from dataloaders.member_file import TEXT
from dataloaders.member_table import MemberTable, ShardState
from dataloaders.printable import printable
from dataloaders.record import MediaRef, Record
from dataloaders.record_parser import RecordLimits, parse_record
from dataloaders.storage import FileState, Storage, absolute, is_local, repeated, shown
from dataloaders.tar_groups import TarReport
from dataloaders.tar_pass import check_plain, source_fingerprint

MAX_LISTED = 20
MAX_EXPECTED = 1024  # states of shards that are kept at hand


class TarSource:
    """Samples of WebDataset shards, local or remote (a `SampleSource`).

    Args:
        urls: a path or URL or several, each with optional braces (`shard-{000..015}.tar`), wildcards, `~`, or `file:`.
        limits: bounds on a record.
        storage: how files are reached; None: `Storage()`.
        members: folder where the table of members is kept; None: it is made anew each time.

    Raises:
        SourceError: no shard matches, a shard is missing, listed twice, empty, cut or no tar; a key is scattered.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        limits: RecordLimits | None = None,
        storage: Storage | None = None,
        members: Path | None = None,
    ) -> None:
        storage = storage or Storage()
        states = shard_states(storage.list(urls), storage)
        folder = None if members is None else Path(members).expanduser()
        self._set(table_of(states, storage, folder), storage, limits)

    @classmethod
    def of_table(cls, table: MemberTable, storage: Storage, *, limits: RecordLimits | None = None) -> "TarSource":
        """A source of the shards in a table, whose states were looked at by the caller."""
        source = cls.__new__(cls)
        source._set(table, storage, limits)
        return source

    def _set(self, table: MemberTable, storage: Storage, limits: RecordLimits | None) -> None:
        self.table, self.storage, self._limits = table, storage, limits or RecordLimits()
        self.fingerprint = source_fingerprint(table.fingerprints)
        self._expected: dict[int, FileState] = {}
        self._last_media: tuple[int, list[int]] = (-1, [])

    @property
    def shards(self) -> tuple[str, ...]:
        """Paths and URLs of the shards, in order; paths are absolute."""
        return tuple(self.table.url(k) for k in range(self.table.num_shards))

    @property
    def states(self) -> tuple[ShardState, ...]:
        """What the header pass found of every shard, in order."""
        return tuple(self.table.state(k) for k in range(self.table.num_shards))

    @cached_property
    def report(self) -> TarReport:
        """What the header pass saw besides good samples."""
        return self.table.report()

    @property
    def groups(self) -> NDArray[np.int64]:
        """int64 [n]: number of the shard of each sample."""
        sizes = [len(self.table.samples_of(k)) for k in range(self.table.num_shards)]
        return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)

    @property
    def record_limits(self) -> RecordLimits:
        """Bounds on a record."""
        return self._limits

    def __len__(self) -> int:
        return len(self.table)

    def record(self, i: int) -> Record:
        """Sample `i`, parsed.

        Raises:
            RecordError: it does not parse, or does not match its media.
            OSError, SourceError: the shard is gone or has changed.
        """
        self._check_id(i)
        table = self.table
        texts = {table.suffix(row).lower(): row for row in table.rows(i) if table.kind(row) == TEXT}
        media = [
            MediaRef(kind=MediaKind(table.kind(row)), member=self._member(i, row), size_bytes=table.size(row))
            for row in table.rows(i)
            if table.kind(row) != TEXT
        ]
        shard, key = self.shard_and_key(i)
        try:
            return parse_record(
                self._text(i, texts.get("json")),
                self._text(i, texts.get("txt")),
                media,
                shard=shard,
                key=key,
                limits=self._limits,
            )
        except RecordError as error:
            others = table.others(i) if error.reason is Reason.PLACEHOLDER_MISMATCH else ()
            if others:
                names = ", ".join(printable(f"{table.key(i)}.{suffix}") for suffix in others)
                error.cause += f"; members that are not read as media: {names}"
            raise

    def media_reader(self, i: int, j: int) -> "MemberReader":
        """Ranges of medium `j` (in placeholder order) of sample `i`."""
        row = self._media_row(i, j)
        return MemberReader(self.storage, self._shard(i), self.table.offset(row), self.table.size(row))

    def media_bytes(self, i: int, j: int) -> bytes:
        """All bytes of medium `j` (in placeholder order) of sample `i`."""
        row = self._media_row(i, j)
        return self._read(self._shard(i), self.table.offset(row), self.table.size(row))

    def place(self, i: int) -> str:
        """`shard, key` of sample `i`."""
        shard, key = self.shard_and_key(i)
        return f"shard {shard}, key {key}"

    def shard_and_key(self, i: int) -> tuple[str, str]:
        """Shard and key of sample `i` as messages may show them."""
        self._check_id(i)
        return shown(self._shard(i).url), printable(self.table.key(i))

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        """Start fetching the texts of samples `ids`, and with `media` their media; see `Storage.prefetch`."""
        self.storage.prefetch(list(self._ranges(ids, None if media else 0)))

    def prefetch_heads(self, ids: Sequence[int], num_bytes: int) -> None:
        """Start fetching the texts of samples `ids` and the first `num_bytes` of every medium of theirs."""
        self.storage.prefetch(list(self._ranges(ids, num_bytes)))

    def _ranges(self, ids: Sequence[int], most: int | None) -> Iterator[tuple[str, int, int]]:
        """(shard, offset, size) of texts whole, and of up to `most` bytes of each medium (None: all)."""
        table = self.table
        for i in map(int, ids):
            self._check_id(i)
            shard = self._shard(i)
            if is_local(shard.url):
                continue  # nothing is fetched ahead from a disk
            for row in table.rows(i):
                size = table.size(row)
                if table.kind(row) == TEXT:
                    size = size if size <= self._limits.max_bytes else 0  # it will be refused, not read
                elif most is not None:
                    size = min(size, most)
                if size:
                    yield shard.url, table.offset(row), size

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_expected": {}}

    def _check_id(self, i: int) -> None:
        # Python would read -1 as the last one, and an end of iteration would go unseen.
        if not 0 <= i < len(self.table):
            raise IndexError(f"sample {i} is not one of the {len(self.table)} samples of this source")

    def _member(self, i: int, row: int) -> str:
        return printable(f"{self.table.key(i)}.{self.table.suffix(row)}")

    def _shard(self, i: int) -> FileState:
        """The shard of sample `i`, as it has to be."""
        k = self.table.shard_of(i)
        state = self._expected.get(k)
        if state is None:
            if len(self._expected) >= MAX_EXPECTED:
                self._expected.clear()
            state = self._expected[k] = self.table.state(k).file
        return state

    def _media_row(self, i: int, j: int) -> int:
        """Table row of a medium."""
        self._check_id(i)
        sample, rows = self._last_media
        if sample != i:  # a scan asks for the media of a sample one after another, and there may be thousands
            rows = self._media_rows(i)
            self._last_media = (i, rows)
        if not 0 <= j < len(rows):
            raise IndexError(f"medium {j} is not one of the {len(rows)} media of {self.place(i)}")
        return rows[j]

    def _media_rows(self, i: int) -> list[int]:
        """Table rows in placeholder order. Rows keep the members' order; with both kinds, placeholders may interleave.

        Raises RecordError as `record` does, where there are both kinds.
        """
        kind_of = self.table.kind
        rows = [row for row in self.table.rows(i) if kind_of(row) != TEXT]
        kinds = {kind_of(row) for row in rows}
        if len(kinds) < 2:
            return rows
        queues = {kind: iter([row for row in rows if kind_of(row) == kind]) for kind in kinds}
        return [next(queues[int(ref.kind)]) for ref in self.record(i).media]

    def _text(self, i: int, row: int | None) -> bytes | None:
        if row is None:
            return None
        size = self.table.size(row)
        if size > self._limits.max_bytes:
            raise RecordError(
                Reason.BAD_RECORD,
                f"member {self._member(i, row)} has {size} bytes, above max_bytes={self._limits.max_bytes}",
                place=self.place(i),
                remedy="Raise RecordLimits.max_bytes if that is meant.",
            )
        return self._read(self._shard(i), self.table.offset(row), self.table.size(row))

    def _read(self, shard: FileState, offset: int, size: int) -> bytes:
        """Exactly `size` bytes of a shard."""
        return self.storage.open(shard.url, shard).read(offset, size) if size else b""


class MemberReader:
    """Byte ranges of one tar member (a `ByteReader`)."""

    def __init__(self, storage: Storage, shard: FileState, offset: int, size: int) -> None:
        self._storage, self._shard, self._offset, self.size = storage, shard, offset, size

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the member, fewer at its end."""
        start = min(max(offset, 0), self.size)
        want = min(max(size, 0), self.size - start)
        if not want:
            return b""
        return self._storage.open(self._shard.url, self._shard).read(self._offset + start, want)


def shard_states(urls: Iterable[str], storage: Storage) -> list[FileState]:
    """What the files of these shards are now, by their absolute names.

    Raises:
        SourceError: shards are missing, compressed, or one is listed twice under two names.
    """
    urls = list(urls)
    check_plain(urls)
    names = [absolute(url) for url in urls]
    if twice := repeated(names):
        listed = ", ".join(map(shown, twice[:MAX_LISTED]))
        raise SourceError(f"shards listed twice: {listed}", remedy="List every shard once.")
    return [replace(state, url=name) for state, name in zip(storage.states(urls), names, strict=True)]
