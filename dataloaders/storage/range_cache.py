"""Ranges of remote files kept on local disk, for several processes at once, and never wrong after a kill.

    folder/<hash of url, size, stamp>.data      sparse copy of the file: each range at its own offset
    folder/<hash of url, size, stamp>.ranges    records, appended under a lock: offset, size, crc32 of bytes, own crc32

Bytes are written first and their record after, so a process that is killed leaves bytes nobody looks at, or a torn
record, which its own checksum gives away. Bytes are checked once per process, when first read: after a power cut, a
record may have survived its bytes. When the copies take more than `limit_bytes`, the least recently used go, whole.

Price: between two checks each process may exceed the limit by a sixteenth; a range is found when one stored range holds
it. When the disk is full or read-only, reading goes on without the cache, and one message says so.
"""

import errno
import fcntl
import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from dataloaders.storage.base import MIB, FileState

MAX_OPEN_COPIES = 64
TOUCH_EVERY_S = 10.0
_RECORD = struct.Struct("<QQI")
_RECORD_BYTES = _RECORD.size + 4
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # a link would lead out of the folder
_LOOK_BACK = 16  # stored ranges looked at from the wanted offset backwards

_T = TypeVar("_T")
_log = logging.getLogger("dataloaders.storage")


class RangeCache:
    """Ranges on disk, below `folder`; safe from several threads and processes.

    Args:
        folder: made when needed, readable by its owner alone; nothing else belongs in it. One that others may write to
            is not used.
        limit_bytes: of disk blocks.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit_bytes = Path(folder), limit_bytes
        self._lock = threading.Lock()
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._unchecked_bytes, self._off = limit_bytes, False

    def get(self, state: FileState, offset: int, size: int) -> bytes | None:
        """Bytes [offset, offset + size) of a file; None where they are not stored whole."""
        return self._guarded(lambda: self._copy(state).get(offset, size)) if state.stamp else None

    def holds(self, state: FileState, offset: int, size: int) -> bool:
        """Whether they are stored, as far as can be told without reading them."""
        return bool(state.stamp and self._guarded(lambda: self._copy(state).find(offset, size) is not None))

    def put(self, state: FileState, offset: int, data: bytes) -> None:
        """Store `data` of a file from `offset` on, if it is a small part of the limit."""
        if not state.stamp or len(data) > self._limit_bytes // 4:
            return  # without a stamp, a file that has changed would look the same
        self._guarded(lambda: self._copy(state).put(offset, data))
        self._unchecked_bytes += len(data)
        if self._unchecked_bytes > min(self._limit_bytes // 16, 256 * MIB):
            self._unchecked_bytes = 0
            self._guarded(self._shrink)

    def close(self) -> None:
        """Close files."""
        with self._lock:
            for copy in self._copies.values():
                copy.close()
            self._copies.clear()

    def _guarded(self, action: Callable[[], _T]) -> _T | None:
        """The result of `action`; None, from now on, when the disk fails it."""
        if self._off:
            return None
        try:
            with self._lock:
                return action()
        except OSError as error:
            self._off = True
            _log.warning("the range cache at %s is not used any more: %s", self._folder, error.strerror or error)
            return None

    def _copy(self, state: FileState) -> "_Copy":
        name = hashlib.sha256(f"{state.url}\0{state.size}\0{state.stamp}".encode("utf-8", "replace")).hexdigest()[:40]
        copy = self._copies.pop(name, None)
        if copy is not None and copy.is_gone():
            copy.close()
            copy = None
        if copy is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _check_private(self._folder)
            copy = _Copy(self._folder / name, state.size)
        self._copies[name] = copy
        while len(self._copies) > MAX_OPEN_COPIES:
            self._copies.popitem(last=False)[1].close()
        return copy

    def _shrink(self) -> None:
        """Remove the least recently used copies while all take more than the limit."""
        with _locked(self._folder / "lock") as locked:
            if not locked:
                return  # another process is at it
            sizes, used = _disk_use(self._folder)
            total = sum(sizes.values())
            for name in sorted(sizes, key=lambda name: used[name]):
                if total <= self._limit_bytes * 0.9:
                    break
                for ending in (".ranges", ".data"):
                    (self._folder / f"{name}{ending}").unlink(missing_ok=True)
                total -= sizes[name]
        for name in [name for name, copy in self._copies.items() if copy.is_gone()]:
            self._copies.pop(name).close()  # its blocks are free only when the last process has closed it


class _Copy:
    """The stored ranges of one file."""

    def __init__(self, stem: Path, size: int) -> None:
        self._size = size
        self._data = self._ranges = -1
        try:
            self._data = os.open(f"{stem}.data", _OPEN_FLAGS, 0o600)
            self._ranges = os.open(f"{stem}.ranges", _OPEN_FLAGS | os.O_APPEND, 0o600)
        except OSError:
            self.close()
            raise
        self._read_bytes, self._touched_s = 0, 0.0
        self._known: dict[tuple[int, int], int] = {}  # (offset, size) -> crc32
        self._sorted: list[tuple[int, int]] = []
        self._checked: set[tuple[int, int]] = set()

    def is_gone(self) -> bool:
        """Whether another process has removed it."""
        return not (os.fstat(self._data).st_nlink and os.fstat(self._ranges).st_nlink)

    def find(self, offset: int, size: int) -> tuple[int, int] | None:
        """The stored range that holds [offset, offset + size)."""
        found = self._find(offset, size)
        if found is None and self._read_records():
            found = self._find(offset, size)
        return found

    def get(self, offset: int, size: int) -> bytes | None:
        """Bytes [offset, offset + size), if one stored range holds them."""
        found = self.find(offset, size)
        if found is None:
            return None
        start, length = found
        if found in self._checked:
            data = os.pread(self._data, size, offset)
        else:
            whole = os.pread(self._data, length, start)
            if len(whole) != length or zlib.crc32(whole) != self._known[found]:
                self._forget(found)
                return None
            self._checked.add(found)
            data = whole[offset - start : offset - start + size]
        self._touch()
        return data if len(data) == size else None

    def put(self, offset: int, data: bytes) -> None:
        """Store `data`."""
        if self.find(offset, len(data)) is not None:
            return
        view, at = memoryview(data), offset
        while view:
            written = os.pwrite(self._data, view, at)
            view, at = view[written:], at + written
        body = _RECORD.pack(offset, len(data), zlib.crc32(data))
        fcntl.flock(self._ranges, fcntl.LOCK_EX)
        try:
            torn = os.fstat(self._ranges).st_size % _RECORD_BYTES
            if torn:  # a process was killed while it wrote
                os.ftruncate(self._ranges, os.fstat(self._ranges).st_size - torn)
            os.write(self._ranges, body + struct.pack("<I", zlib.crc32(body)))
        finally:
            fcntl.flock(self._ranges, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files."""
        for fd in (self._data, self._ranges):
            if fd >= 0:
                os.close(fd)
        self._data = self._ranges = -1

    def _find(self, offset: int, size: int) -> tuple[int, int] | None:
        if (offset, size) in self._known:
            return (offset, size)
        last = bisect_right(self._sorted, (offset, 1 << 62))
        candidates = reversed(self._sorted[max(last - _LOOK_BACK, 0) : last])
        return next(((start, length) for start, length in candidates if start + length >= offset + size), None)

    def _read_records(self) -> bool:
        """Take in records that any process has appended; whether there were some."""
        end = os.fstat(self._ranges).st_size // _RECORD_BYTES * _RECORD_BYTES
        if end <= self._read_bytes:
            return False
        text = os.pread(self._ranges, end - self._read_bytes, self._read_bytes)
        for at in range(0, len(text) - _RECORD_BYTES + 1, _RECORD_BYTES):
            body, own = text[at : at + _RECORD.size], text[at + _RECORD.size : at + _RECORD_BYTES]
            if zlib.crc32(body) == int.from_bytes(own, "little"):
                offset, size, crc = _RECORD.unpack(body)
                if offset + size > self._size:
                    continue  # of no file of this size: nothing is allocated for it
                if (offset, size) not in self._known:
                    insort(self._sorted, (offset, size))
                self._known[offset, size] = crc
        self._read_bytes += len(text) // _RECORD_BYTES * _RECORD_BYTES
        return True

    def _forget(self, found: tuple[int, int]) -> None:
        del self._known[found]
        self._sorted.remove(found)

    def _touch(self) -> None:
        """Note the use, now and then."""
        if time.monotonic() - self._touched_s > TOUCH_EVERY_S:
            self._touched_s = time.monotonic()
            os.utime(self._ranges)


def _check_private(folder: Path) -> None:
    """Raise PermissionError for a folder where others may put bytes that this process would then train on."""
    status = folder.stat()
    if status.st_mode & 0o002:
        raise PermissionError(errno.EPERM, "anybody may write there")
    if status.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "it belongs to another user")


def _disk_use(folder: Path) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes on disk and time of the last use, of every copy, by name."""
    sizes: dict[str, int] = {}
    used: dict[str, float] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            name, dot, _ = entry.name.partition(".")
            if not dot:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            sizes[name] = sizes.get(name, 0) + status.st_blocks * 512
            used[name] = max(used.get(name, 0.0), status.st_mtime)
    return sizes, used


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """The lock of the file `path`; False where another process has it."""
    fd = os.open(path, _OPEN_FLAGS, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
