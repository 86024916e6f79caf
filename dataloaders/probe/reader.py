"""Where media bytes come from: memory, a file, or ranges of a shard, all behind one seekable binary file.

    bytes | path | ByteReader  --open_source-->  seekable file             for libraries (Pillow, FFmpeg)
                               --Window------->  bytes [offset, + count)   for our own header parsers

A `ByteReader` serves a tar member by offset: the buffer asks for `BLOCK_BYTES` at a time and only for what the header
parsers touch, so a member is not fetched whole where its format does not demand it. A `Window` starts with 4 KiB and
fetches blocks of 16 KiB by offset where a header is longer (about one JPEG in ten), so long metadata are stepped over.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, Self, TypeAlias, TypeGuard, cast, runtime_checkable

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits

BLOCK_BYTES = 16 * 1024  # 97 % of real JPEG headers end inside it; the rest costs a second read
HEAD_BYTES = 4 * 1024  # nine of ten image headers end inside it
_REMEDY = "Remove or replace the file."


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
    return place or (str(Path(src)) if _is_path(src) else "")


def _is_path(src: MediaSource) -> TypeGuard[str | os.PathLike[str]]:
    # As isinstance(src, os.PathLike), at a tenth of its time.
    return isinstance(src, str) or hasattr(src, "__fspath__")


def storage_failed(error: BaseException) -> bool:
    """Whether an `OSError` comes from storage (it has an errno) and not from a media parser's complaint."""
    return isinstance(error, OSError) and type(error).__module__ == "builtins" and error.errno is not None


class Window:
    """The bytes of one medium as header parsers want them: by offset, fetched once, never more than a budget in all.

    Attributes:
        head: the first bytes, fetched already.
        size: of the medium, in bytes.
        place: what errors name as the origin.
        limits: ceilings.

    Raises:
        MediaError: `empty_file` or `too_large`, from the constructor; `too_large` when more than
            `limits.max_header_bytes` are asked for; `truncated` where `at` reaches beyond the end.
        OSError: the storage failed.
    """

    __slots__ = ("_base", "_block", "_fetched", "_file", "_memory", "_reader", "head", "limits", "place", "size")

    def __init__(self, src: MediaSource, *, limits: ProbeLimits, place: str) -> None:
        self.limits, self.place = limits, place
        self._block, self._base, self._fetched = b"", 0, 0
        self._file: BinaryIO | None = None
        self._memory: memoryview | None = None
        self._reader: ByteReader | None = None
        if isinstance(src, bytes):
            self.size = len(src)
        elif isinstance(src, (bytearray, memoryview)):
            view = memoryview(src)
            self._memory = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
            self.size = len(self._memory)
        elif _is_path(src):
            self._file = open(src, "rb", buffering=0)  # noqa: SIM115  closed by __exit__
            self.size = os.fstat(self._file.fileno()).st_size
        else:
            self._reader = cast(ByteReader, src)
            self.size = self._reader.size
        try:
            limits.check_bytes(self.size, place=place)
            self.head = src if isinstance(src, bytes) else self._fetch(0, min(self.size, HEAD_BYTES))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, where the window opened one."""
        if self._file is not None:
            self._file.close()

    def block(self, offset: int, count: int) -> tuple[bytes, int]:
        """(data, base): the medium from byte `base` on; holds [offset, offset + count) as far as there is such."""
        end = min(offset + count, self.size)
        if end <= len(self.head):
            return self.head, 0
        if self._base <= offset and end <= self._base + len(self._block):
            return self._block, self._base
        if offset >= end:
            return b"", offset
        self._block, self._base = self._fetch(offset, min(max(count, BLOCK_BYTES), self.size - offset)), offset
        return self._block, offset

    def peek(self, offset: int, count: int) -> bytes:
        """Bytes [offset, offset + count), fewer at the end of the medium."""
        data, base = self.block(offset, count)
        return data[offset - base : offset - base + count] if base <= offset else b""

    def at(self, offset: int, count: int) -> bytes:
        """Exactly the bytes [offset, offset + count)."""
        found = self.peek(offset, count)
        if len(found) < count:
            raise self.truncated()
        return found

    def truncated(self, what: str = "the header") -> MediaError:
        """The error for a medium that ends before `what` does."""
        return MediaError(
            Reason.TRUNCATED, f"Truncated: {what} is cut off ({self.size} bytes)", place=self.place, remedy=_REMEDY
        )

    def corrupt(self, cause: str) -> MediaError:
        """The error for a header that contradicts its format."""
        return MediaError(Reason.CORRUPT, cause, place=self.place, remedy=_REMEDY)

    def unsupported(self, cause: str) -> MediaError:
        """The error for a sound file of a kind that nothing here decodes."""
        return MediaError(Reason.UNSUPPORTED_MEDIA, cause, place=self.place, remedy="Convert it to PNG or JPEG.")

    def _fetch(self, offset: int, count: int) -> bytes:
        self._fetched += count
        if self._fetched > self.limits.max_header_bytes:
            raise MediaError(
                Reason.TOO_LARGE,
                f"the header spreads over more than max_header_bytes={self.limits.max_header_bytes}",
                place=self.place,
                remedy="Raise ProbeLimits.max_header_bytes if the file is meant.",
            )
        if self._reader is not None:
            return self._reader.read(offset, count)
        if self._file is not None:
            return os.pread(self._file.fileno(), count, offset)
        return bytes(self._memory[offset : offset + count]) if self._memory is not None else b""
