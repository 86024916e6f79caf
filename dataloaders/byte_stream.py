"""Bytes from front to back: a stored file, what it decompresses to, or what a command prints; bounded on the way.

    StoredFile --chunks of 4 MiB--+
    `pipe:` command --stdout------+--> first bytes --gzip | bzip2 | xz | plain--> ForwardReader.read(offset, size)

A `ForwardReader` answers reads at rising offsets, as an archive's headers and members are asked for. Compression is
told by the first bytes, never by a name. A bomb ends early: what a stream decompresses to is bounded in all and as a
multiple of what went in, and nothing is decompressed ahead of the reader by more than a piece of 1 MiB.

Price: a compressed stream is decompressed from its start to wherever it is read; a plain stored file is skipped over.
"""

import bz2
import lzma
import os
import selectors
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from dataloaders.errors import DataError, SourceError
from dataloaders.storage import FileState, Storage

MIB = 1024**2
CHUNK_BYTES = 4 * MIB
_DECOMPRESSED_CHUNK = MIB
_COMPRESSED_CHUNK = 16 * 1024  # a stream of many tiny ones copies what is behind each of them
_HEAD_BYTES = 16
_UNKNOWN_SIZE = 2**62
_ENDING_S = 2.0  # a command is asked to end, and killed after this time


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Bounds on a hostile stream: sizes in bytes.

    Attributes:
        max_member_bytes: of one file in an archive; a sample with a larger one is bad, and its bytes are passed over.
        max_sample_bytes: of all members of a sample together.
        max_shard_bytes: of a shard, decompressed.
        max_expansion: decompressed bytes for each byte read, once `free_expansion_bytes` are exceeded.
        xz_memory_bytes: that the xz decompressor may take.
        silence_s: seconds for which a command may print nothing.
    """

    max_member_bytes: int = 512 * MIB
    max_sample_bytes: int = 1024 * MIB
    max_shard_bytes: int = 1024**4
    max_expansion: int = 200
    free_expansion_bytes: int = 64 * MIB
    xz_memory_bytes: int = 256 * MIB
    silence_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("max_member_bytes", "max_sample_bytes", "max_shard_bytes", "max_expansion", "xz_memory_bytes"):
            if getattr(self, name) < 1:
                raise DataError(f"{name}={getattr(self, name)}", place="StreamLimits", remedy="Give at least 1.")
        if not self.silence_s > 0:
            raise DataError(f"silence_s={self.silence_s}", place="StreamLimits", remedy="Give more than 0.")


class ForwardReader:
    """Reads at rising offsets from a stream of unknown length (a `StoredFile` for whoever goes forward only).

    Args:
        chunks: the bytes, in pieces; an exhausted iterator is the end.
        place: for messages.
        jump: skips bytes without reading them, where that is possible; returns how many it skipped.
    """

    def __init__(self, chunks: Iterator[bytes], *, place: str, jump: Callable[[int], int] | None = None) -> None:
        self._chunks, self._place, self._jump = chunks, place, jump
        self._held, self._offset, self._ended = memoryview(b""), 0, False
        self.size = _UNKNOWN_SIZE
        self.state = FileState(url=place, size=_UNKNOWN_SIZE, stamp="")

    def read(self, offset: int, size: int) -> bytes:
        """Exactly the bytes [offset, offset + size).

        Raises:
            SourceError: the stream ends before, is over a bound, or `offset` was passed already.
        """
        got = self.read_up_to(offset, size)
        if len(got) < size:
            raise SourceError(
                f"the shard ends at byte {offset + len(got)}, {size - len(got)} bytes too early: it was cut",
                place=self._place,
                remedy="Copy or build the shard again.",
            )
        return got

    def read_up_to(self, offset: int, size: int) -> bytes:
        """As `read`, but fewer bytes at the end."""
        if offset < self._offset:
            raise SourceError(f"byte {offset} was passed already, at byte {self._offset}", place=self._place)
        self._skip(offset - self._offset)
        parts: list[memoryview] = []
        while size > 0 and self._fill():
            part = self._held[:size]
            parts.append(part)
            self._advance(len(part))
            size -= len(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def drain(self) -> None:
        """Read to the end, so that whoever writes the stream ends by itself and can be asked how it went."""
        while self._fill():
            self._advance(len(self._held))

    def _skip(self, count: int) -> None:
        while count > 0:
            if not self._held and self._jump is not None:
                jumped = self._jump(count)
                self._offset, count = self._offset + jumped, count - jumped
            if not count or not self._fill():
                return
            step = min(count, len(self._held))
            self._advance(step)
            count -= step

    def _fill(self) -> bool:
        """Whether there are bytes in hand, fetched if need be."""
        while not self._held and not self._ended:
            chunk = next(self._chunks, None)
            self._ended, self._held = chunk is None, memoryview(chunk or b"")
        return bool(self._held)

    def _advance(self, count: int) -> None:
        self._held, self._offset = self._held[count:], self._offset + count


class _StoredChunks:
    """A stored file in chunks, the next one asked for ahead of time; can jump."""

    def __init__(self, storage: Storage, expect: FileState) -> None:
        self._storage, self._file, self._url, self._at = storage, storage.open(expect.url, expect), expect.url, 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        count = min(CHUNK_BYTES, self._file.size - self._at)
        if count <= 0:
            raise StopIteration
        following = min(CHUNK_BYTES, self._file.size - self._at - count)
        if following > 0:
            self._storage.prefetch([(self._url, self._at + count, following)])
        chunk = self._file.read(self._at, count)
        self._at += count
        return chunk

    def jump(self, count: int) -> int:
        """Skip without reading; to the end at most."""
        count = min(count, self._file.size - self._at)
        self._at += count
        return count


def open_stored(storage: Storage, expect: FileState, *, limits: StreamLimits, place: str) -> ForwardReader:
    """The content of a stored file, decompressed if it is compressed.

    Raises:
        SourceError: it has changed, or its compression is not read here.
    """
    stored = _StoredChunks(storage, expect)
    head = _head(stored)
    decoder = _decoder(head, limits, place)
    if decoder is None:
        return ForwardReader(_bounded(_chain(head, stored), limits, place), place=place, jump=stored.jump)
    return ForwardReader(_decompressed(_chain(head, stored), decoder, limits, place), place=place)


def command_output(command: str, *, limits: StreamLimits, place: str) -> tuple[ForwardReader, Callable[[], None]]:
    """(what the shell command prints, decompressed if it is compressed; function that ends the command).

    The command runs in a process group of its own, which is ended as a whole.
    """
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    printed = _printed(process, limits, place)
    try:
        head = _head(printed)
        decoder = _decoder(head, limits, place)
    except BaseException:
        end_group(process)
        raise
    chunks = _chain(head, printed)
    chunks = _bounded(chunks, limits, place) if decoder is None else _decompressed(chunks, decoder, limits, place)
    return ForwardReader(chunks, place=place), lambda: end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a command and everything it has started; safe to call twice."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Whoever the shell has started may live on after it, so the group is told also when the shell has ended.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
    if process.stdout is not None:
        process.stdout.close()


def _printed(process: "subprocess.Popen[bytes]", limits: StreamLimits, place: str) -> Iterator[bytes]:
    """What the command prints, as it comes; whoever waits for a command that hangs waits `silence_s` at most."""
    stdout = process.stdout
    if stdout is None:
        return
    with selectors.DefaultSelector() as ready:
        ready.register(stdout, selectors.EVENT_READ)
        while True:
            if not ready.select(limits.silence_s):
                raise SourceError(
                    f"the command has printed nothing for {limits.silence_s:g} s",
                    place=place,
                    remedy="Run it by hand, or raise StreamLimits.silence_s.",
                )
            chunk = os.read(stdout.fileno(), MIB)
            if not chunk:
                break
            yield chunk
    try:
        status = process.wait(limits.silence_s)
    except subprocess.TimeoutExpired:
        raise SourceError("the command has closed its output and does not end", place=place) from None
    if status:
        raise SourceError(
            f"the command ended with status {status}",
            place=place,
            remedy="Run it by hand to see what it prints; what it had printed until then was read.",
        )


def _head(chunks: Iterator[bytes]) -> bytes:
    """The first bytes, enough to tell a compression by; a command may print one at a time."""
    head = b""
    while len(head) < _HEAD_BYTES and (chunk := next(chunks, b"")):
        head += chunk
    return head


def _chain(head: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield head
    yield from rest


class _Decompressor(Protocol):
    """What `bz2` and `lzma` offer, and `_Gzip` as well."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    @property
    def needs_input(self) -> bool:
        """Whether it gives nothing more without new input."""
        ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gzip:
    """zlib with what `bz2` and `lzma` do by themselves: it keeps the input that a bounded output left over."""

    def __init__(self) -> None:
        self._inner, self._left = zlib.decompressobj(wbits=31), b""

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._left

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        out = self._inner.decompress(self._left + data if self._left else data, max_length)
        self._left = self._inner.unconsumed_tail
        return out


def _decoder(head: bytes, limits: StreamLimits, place: str) -> Callable[[], _Decompressor] | None:
    """Maker of the decompressor for a stream that begins like this; None: it is not compressed."""
    if head.startswith(b"\x1f\x8b\x08"):
        return _Gzip
    if head.startswith(b"BZh") and head[4:10] == b"1AY&SY":
        return bz2.BZ2Decompressor
    if head.startswith(b"\xfd7zXZ\x00"):
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=limits.xz_memory_bytes)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        raise SourceError("this is a zstd file", place=place, remedy="Compress it again by gzip, bzip2 or xz, or not.")
    return None


def _bounded(chunks: Iterator[bytes], limits: StreamLimits, place: str) -> Iterator[bytes]:
    total = 0
    for chunk in chunks:
        total += len(chunk)
        _check_total(total, limits, place)
        yield chunk


def _decompressed(
    chunks: Iterator[bytes], make: Callable[[], _Decompressor], limits: StreamLimits, place: str
) -> Iterator[bytes]:
    """Output in pieces of at most 1 MiB; compressed streams one after another are one stream, as gzip has it."""
    decoder, taken, given = make(), 0, 0
    for compressed in _pieces(chunks):
        data, taken = compressed, taken + len(compressed)
        while data or not decoder.needs_input:
            if decoder.eof:
                data = data.lstrip(b"\0")  # padding between streams
                if not data:
                    break
                decoder = make()
            try:
                piece = decoder.decompress(data, _DECOMPRESSED_CHUNK)
            except (zlib.error, OSError, lzma.LZMAError, EOFError, ValueError) as error:
                raise _corrupt(error, given, place) from error
            data = decoder.unused_data if decoder.eof else b""
            given += len(piece)
            _check_total(given, limits, place)
            if given > limits.free_expansion_bytes and given > limits.max_expansion * taken:
                raise SourceError(
                    f"{taken} bytes decompress to more than {given}: more than {limits.max_expansion} times as much",
                    place=place,
                    remedy="Do not use it; raise StreamLimits.max_expansion if it is meant.",
                )
            if piece:
                yield piece
    if not decoder.eof:
        raise SourceError(
            f"the compressed shard was cut after {taken} bytes", place=place, remedy="Copy or build the shard again."
        )


def _pieces(chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        for start in range(0, len(chunk), _COMPRESSED_CHUNK):
            yield chunk[start : start + _COMPRESSED_CHUNK]


def _check_total(total: int, limits: StreamLimits, place: str) -> None:
    if total > limits.max_shard_bytes:
        raise SourceError(
            f"the shard has more than max_shard_bytes={limits.max_shard_bytes}",
            place=place,
            remedy="Do not use it; raise StreamLimits.max_shard_bytes if it is meant.",
        )


def _corrupt(error: Exception, given: int, place: str) -> SourceError:
    return SourceError(
        f"the compressed shard is damaged after {given} decompressed bytes: {error}",
        place=place,
        remedy="Copy or build the shard again.",
    )
