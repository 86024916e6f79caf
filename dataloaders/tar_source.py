"""WebDataset tar shards as a random-access source: one pass over the headers, then reads by offset.

    urls --braces--> shards --tar_headers--> members --tar_groups--> sample table --pread--> records, headers, media

Price: opening reads 512 bytes per member (about 20 us each on a local disk), and shards must be local and uncompressed.
The table travels to workers by pickle; file handles do not, each process opens its own when it first reads.
"""

import glob
import hashlib
import os
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import braceexpand

from dataloaders.counts import MediaKind
from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.record import MediaRef, Record
from dataloaders.record_parser import RecordLimits, parse_record
from dataloaders.tar_groups import SampleField, SampleMembers, TarReport, group_members
from dataloaders.tar_headers import TarHeaders, printable

MAX_SHARDS = 1_000_000
MAX_OPEN_FILES = 64
MAX_LISTED = 20
MAX_COMBINATIONS = 1000  # of suffixes that are not read; rarer ones are not named in errors
_TEXT = -1  # kind code of a text member in the table


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """A shard as its header pass found it.

    Attributes:
        path, size, mtime_ns: of the file.
        fingerprint: hex digest over its base name, its size and its table of members.
        num_samples: samples in it; a source has the samples of its shards one after another.
    """

    path: str
    size: int
    mtime_ns: int
    fingerprint: str
    num_samples: int


class TarSource:
    """Samples of local WebDataset shards (a `SampleSource`).

    Args:
        urls: a path or several, each with optional braces (`shard-{000..015}.tar`), wildcards, `~`, or `file:`.
        limits: bounds on a record.

    Raises:
        SourceError: no shard matches, a shard is missing, listed twice, empty, cut or no tar; a key is scattered.
    """

    def __init__(self, urls: str | Sequence[str], *, limits: RecordLimits | None = None) -> None:
        self._limits = limits or RecordLimits()
        self._shards = expand_urls(urls)
        self._shard_sizes: list[int] = []
        self._states: list[ShardState] = []
        self.report = TarReport()
        # Samples: shard and key; members of sample i are rows first[i] to first[i + 1] of the member table.
        self._sample_shard, self._first = array("l"), array("q", [0])
        self._keys: list[str] = []
        self._offset, self._size, self._kind = array("q"), array("q"), array("b")
        self._suffix: list[str] = []
        # What stands beside sample i and is not read: row others[i] of the combinations of suffixes that occur.
        self._others = array("h")
        self._combinations: dict[tuple[str, ...], int] = {(): 0}
        self._files: OrderedDict[int, _File] = OrderedDict()
        self._last_media: tuple[int, list[int]] = (-1, [])
        for number, path in enumerate(self._shards):
            self._read_headers(number, path)
        self.fingerprint = source_fingerprint(state.fingerprint for state in self._states)

    @property
    def shards(self) -> tuple[str, ...]:
        """Paths of the shards, in order."""
        return tuple(self._shards)

    @property
    def states(self) -> tuple[ShardState, ...]:
        """What the header pass found of every shard, in order."""
        return tuple(self._states)

    @property
    def record_limits(self) -> RecordLimits:
        """Bounds on a record."""
        return self._limits

    def __len__(self) -> int:
        return len(self._keys)

    def record(self, i: int) -> Record:
        """Sample `i`, parsed.

        Raises:
            RecordError: it does not parse, or does not match its media.
            OSError, SourceError: the shard is gone or has changed.
        """
        self._check_id(i)
        texts = {self._suffix[row].lower(): row for row in self._rows(i) if self._kind[row] == _TEXT}
        media = [
            MediaRef(kind=MediaKind(self._kind[row]), member=self._member(i, row), size_bytes=self._size[row])
            for row in self._rows(i)
            if self._kind[row] != _TEXT
        ]
        try:
            return parse_record(
                self._text(i, texts.get("json")),
                self._text(i, texts.get("txt")),
                media,
                shard=self._shard_name(i),
                key=printable(self._keys[i]),
                limits=self._limits,
            )
        except RecordError as error:
            if error.reason is Reason.PLACEHOLDER_MISMATCH and self._others[i]:
                others = list(self._combinations)[self._others[i]]
                names = ", ".join(printable(f"{self._keys[i]}.{suffix}") for suffix in others)
                error.cause += f"; members that are not read as media: {names}"
            raise

    def media_reader(self, i: int, j: int) -> "MemberReader":
        """Ranges of medium `j` (in placeholder order) of sample `i`."""
        row = self._media_row(i, j)
        return MemberReader(self, self._sample_shard[i], self._offset[row], self._size[row])

    def media_bytes(self, i: int, j: int) -> bytes:
        """All bytes of medium `j` (in placeholder order) of sample `i`."""
        row = self._media_row(i, j)
        return self._pread(self._sample_shard[i], self._offset[row], self._size[row])

    def place(self, i: int) -> str:
        """`shard, key` of sample `i`."""
        self._check_id(i)
        return f"shard {self._shard_name(i)}, key {printable(self._keys[i])}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def _read_headers(self, number: int, path: str) -> None:
        """Add the samples of one shard to the table."""
        file = _File(path)
        self._shard_sizes.append(file.size)
        digest = hashlib.sha256(f"tar-shard-1\n{os.path.basename(path)}\0{file.size}".encode("utf-8", "surrogatepass"))
        headers = TarHeaders(file.fd, file.size, place=f"shard {path}")
        before = len(self._keys)
        for sample in group_members(headers.members(), place=f"shard {path}", report=self.report):
            self._add_sample(number, sample)
            digest.update(_table_line(sample).encode("utf-8", "surrogatepass"))
        if len(self._keys) == before:
            raise SourceError(
                "the shard holds no sample",
                place=f"shard {path}",
                remedy="Remove it, or put members like 0001.json in.",
            )
        self._states.append(
            ShardState(
                path=path,
                size=file.size,
                mtime_ns=file.mtime_ns,
                fingerprint=digest.hexdigest(),
                num_samples=len(self._keys) - before,
            )
        )

    def _add_sample(self, shard: int, sample: SampleMembers) -> None:
        self._keys.append(sample.key)
        self._sample_shard.append(shard)
        if len(self._combinations) < MAX_COMBINATIONS:
            self._combinations.setdefault(sample.others, len(self._combinations))
        self._others.append(self._combinations.get(sample.others, 0))
        entry: SampleField
        for entry in (*sample.texts, *sample.media):
            self._offset.append(entry.offset)
            self._size.append(entry.size)
            self._kind.append(_TEXT if entry.kind is None else int(entry.kind))
            self._suffix.append(entry.suffix)
        self._first.append(len(self._suffix))

    def _check_id(self, i: int) -> None:
        # Python would read -1 as the last one, and an end of iteration would go unseen.
        if not 0 <= i < len(self._keys):
            raise IndexError(f"sample {i} is not one of the {len(self._keys)} samples of this source")

    def _rows(self, i: int) -> range:
        return range(self._first[i], self._first[i + 1])

    def _member(self, i: int, row: int) -> str:
        return printable(f"{self._keys[i]}.{self._suffix[row]}")

    def _shard_name(self, i: int) -> str:
        return self._shards[self._sample_shard[i]]

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
        rows = [row for row in self._rows(i) if self._kind[row] != _TEXT]
        kinds = {self._kind[row] for row in rows}
        if len(kinds) < 2:
            return rows
        queues = {kind: iter([row for row in rows if self._kind[row] == kind]) for kind in kinds}
        return [next(queues[int(ref.kind)]) for ref in self.record(i).media]

    def _text(self, i: int, row: int | None) -> bytes | None:
        if row is None:
            return None
        if self._size[row] > self._limits.max_bytes:
            raise RecordError(
                Reason.BAD_RECORD,
                f"member {self._member(i, row)} has {self._size[row]} bytes, above max_bytes={self._limits.max_bytes}",
                place=self.place(i),
                remedy="Raise RecordLimits.max_bytes if that is meant.",
            )
        return self._pread(self._sample_shard[i], self._offset[row], self._size[row])

    def _pread(self, shard: int, offset: int, size: int) -> bytes:
        """Exactly `size` bytes; safe from several threads and after a fork, since no file position is shared."""
        file = self._file(shard)
        chunks: list[bytes] = []
        while size > 0:
            chunk = os.pread(file.fd, size, offset)
            if not chunk:
                raise self._changed(shard, f"it ends {size} bytes early")
            chunks.append(chunk)
            offset, size = offset + len(chunk), size - len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _file(self, shard: int) -> "_File":
        file = self._files.pop(shard, None)
        if file is None:
            file = _File(self._shards[shard])
            if file.size != self._shard_sizes[shard]:
                raise self._changed(shard, f"it had {self._shard_sizes[shard]} bytes and has {file.size}")
        self._files[shard] = file
        while len(self._files) > MAX_OPEN_FILES:
            self._files.popitem(last=False)  # closed when the last reader lets go of it
        return file

    def _changed(self, shard: int, how: str) -> SourceError:
        return SourceError(
            f"the shard has changed since it was opened: {how}",
            place=f"shard {self._shards[shard]}",
            remedy="Start again when the shards are complete.",
        )


class MemberReader:
    """Byte ranges of one tar member (a `ByteReader`)."""

    def __init__(self, source: TarSource, shard: int, offset: int, size: int) -> None:
        self._source, self._shard, self._offset, self.size = source, shard, offset, size

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the member, fewer at its end."""
        start = min(max(offset, 0), self.size)
        want = min(max(size, 0), self.size - start)
        return self._source._pread(self._shard, self._offset + start, want) if want else b""


class _File:
    """A file descriptor that is closed with its last reference, so that no reader loses it to the cache's limit."""

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(self.fd)
        self.size, self.mtime_ns = status.st_size, status.st_mtime_ns

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def _table_line(sample: SampleMembers) -> str:
    """One sample of the member table as text, for the fingerprint."""
    fields = (f"{field.suffix}\0{field.offset}\0{field.size}" for field in (*sample.texts, *sample.media))
    return "\n".join((sample.key, *fields, ""))


def source_fingerprint(shard_fingerprints: Iterable[str]) -> str:
    """Fingerprint of a source of these shards, in order: of names, sizes and members, not of folders or contents."""
    return hashlib.sha256("\n".join(["tar-source-2", *shard_fingerprints]).encode()).hexdigest()


def expand_urls(urls: str | Sequence[str]) -> list[str]:
    """Existing local files that `urls` name, in order.

    Raises:
        SourceError: nothing matches, files are missing (all are listed), one is listed twice, or the scheme is remote.
    """
    shards = list_urls(urls)
    check_shards(shards)
    return shards


def list_urls(urls: str | Sequence[str]) -> list[str]:
    """The files that `urls` name, in order, whether they exist on this machine or not.

    Raises:
        SourceError: nothing matches, one is listed twice, or the scheme is remote.
    """
    shards = [shard for url in ([urls] if isinstance(urls, str) else urls) for shard in _expand(os.fspath(url))]
    if not shards:
        if not urls:
            raise SourceError("no shard is named", remedy="Name tar files, with braces or wildcards if there are many.")
        named = ", ".join(repr(os.fspath(url)) for url in ([urls] if isinstance(urls, str) else urls))
        raise SourceError(f"no shard matches {named}", remedy="Check the path and its wildcards.")
    twice = repeated(shards)
    if twice:
        raise SourceError(f"shards listed twice: {', '.join(twice[:MAX_LISTED])}", remedy="List every shard once.")
    unspeakable = [shard for shard in shards if shard.encode("utf-8", "replace").decode() != shard or "\0" in shard]
    if unspeakable:  # an index and its reports are UTF-8, and name every shard
        raise SourceError(
            f"paths of shards that are not UTF-8 text: {', '.join(map(ascii, unspeakable[:MAX_LISTED]))}",
            remedy="Rename them, or name them by links.",
        )
    return shards


def repeated(names: Iterable[str]) -> list[str]:
    """Those that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def check_shards(shards: Sequence[str]) -> None:
    """Raise SourceError that lists those of `shards` that are not there."""
    missing = [shard for shard in shards if not os.path.isfile(shard)]
    if missing:
        more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        folder = next((shard for shard in missing if os.path.isdir(shard)), None)
        raise SourceError(
            f"{len(missing)} of {len(shards)} shards are missing or no files: {', '.join(missing[:MAX_LISTED])}{more}",
            remedy=f"For a folder write {folder}/*.tar."
            if folder
            else "Check the path, the braces and the working folder.",
        )


def _expand(url: str) -> Iterator[str]:
    if url.startswith("pipe:") or "://" in url:
        raise SourceError(
            f"{url!r} is not a local file",
            remedy="Copy the shards to local disk; commands are not run.",
        )
    path = os.path.expanduser(url.removeprefix("file:"))
    if os.path.exists(path):  # a file whose name happens to hold braces or brackets
        yield path
        return
    try:
        expanded = [] if _too_many(path) else list(islice(braceexpand.braceexpand(path), MAX_SHARDS + 1))
    except ValueError:
        raise SourceError(f"unbalanced braces in {url!r}", remedy="Close them.") from None
    if not expanded or len(expanded) > MAX_SHARDS:
        raise SourceError(f"{url!r} names more than {MAX_SHARDS} shards", remedy="Check the braces.")
    for name in expanded:
        if glob.has_magic(name) and not os.path.exists(name):
            yield from sorted(glob.glob(name))
        else:
            yield name


def _too_many(path: str) -> bool:
    """Whether a numeric range alone names too many shards; braceexpand would build all of it before the first name."""
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", path)
    return any(len(end) > 18 or abs(int(end) - int(start)) >= MAX_SHARDS for start, end in ranges)
