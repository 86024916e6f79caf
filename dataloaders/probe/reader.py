"""Where media bytes come from: memory, a file, or ranges of a shard, all behind one seekable binary file.

A `ByteReader` serves a tar member by offset: the buffer asks for `BLOCK_BYTES` at a time and only for what the header
parsers touch, so a member is not fetched whole where its format does not demand it.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias, cast, runtime_checkable

from dataloaders.probe.limits import ProbeLimits

BLOCK_BYTES = 16 * 1024  # 97 % of real JPEG headers end inside it; the rest costs a second read


@runtime_checkable
class ByteReader(Protocol):
    """Random access to the encoded bytes of one medium.

    `read(offset, size)` returns `size` bytes, or fewer at the end of the medium; it raises `OSError` when the
    storage itself fails.
    """

    @property
    def size(self) -> int:
        """Encoded size in bytes."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the medium."""
        ...


MediaSource: TypeAlias = bytes | bytearray | memoryview | str | os.PathLike[str] | ByteReader


class _RangeFile(io.RawIOBase):
    """A `ByteReader` as an unbuffered file. `failure` keeps a storage error that a parser may have swallowed."""

    def __init__(self, reader: ByteReader) -> None:
        super().__init__()
        self._reader = reader
        self._offset = 0
        self.failure: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._reader.size}[whence]
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}: before the start of the medium")
        self._offset = base + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        want = min(len(view), max(self._reader.size - self._offset, 0))
        try:
            data = self._reader.read(self._offset, want) if want else b""
        except OSError as error:
            self.failure = error
            raise
        view[: len(data)] = data
        self._offset += len(data)
        return len(data)


@contextmanager
def open_source(src: MediaSource, *, limits: ProbeLimits, place: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open `src` as (binary file, size in bytes), refusing empty and oversized media.

    Raises:
        MediaError: `empty_file` or `too_large`.
        OSError: the storage failed, also when a media parser swallowed the failure on its way up.
    """
    if isinstance(src, (bytes, bytearray, memoryview)):
        limits.check_bytes(len(src), place=place)
        with io.BytesIO(src) as memory:
            yield memory, len(src)
        return
    if isinstance(src, (str, os.PathLike)):
        with open(src, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            limits.check_bytes(size, place=place)
            yield file, size
        return
    limits.check_bytes(src.size, place=place)
    raw = _RangeFile(src)
    try:
        with io.BufferedReader(raw, buffer_size=BLOCK_BYTES) as buffered:
            yield cast(BinaryIO, buffered), src.size
    except Exception:
        if raw.failure is not None:
            raise raw.failure from None
        raise
    if raw.failure is not None:
        raise raw.failure


def place_of(src: MediaSource, place: str) -> str:
    """The place an error names: what the caller says, else the path when `src` is one."""
    return place or (str(Path(src)) if isinstance(src, (str, os.PathLike)) else "")


def storage_failed(error: BaseException) -> bool:
    """Whether an `OSError` comes from storage (it has an errno) and not from a media parser's complaint."""
    return isinstance(error, OSError) and type(error).__module__ == "builtins" and error.errno is not None
