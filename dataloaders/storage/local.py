"""Local files: ranges by `pread`, a bounded number of open handles, and no trust in a file that changes meanwhile.

    path --open (once, then from the cache)--> LocalFile(fd) --pread(offset, size)--> bytes

Price: one open file per recently used path. Safe from several threads and after a fork, since no position is shared.
"""

import os
import stat
import threading
from collections import OrderedDict

from dataloaders.errors import SourceError
from dataloaders.storage.base import FileState
from dataloaders.storage.urls import local_path, shown


class LocalFile:
    """An open local file (a `StoredFile`), closed with its last reference, so that no reader loses it to the cache.

    Raises:
        SourceError: it is a folder, a pipe or a device.
        OSError: it cannot be opened.
    """

    def __init__(self, url: str) -> None:
        self.fd = -1
        # Not blocking: a pipe that took the place of a file would wait for a writer for ever.
        self.fd = os.open(local_path(url), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("this is no regular file", place=shown(url), remedy="Name a file.")
        self._state = _state(url, status)

    @property
    def state(self) -> FileState:
        """The file as it was found when opened."""
        return self._state

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._state.size

    def now(self) -> FileState:
        """The open file as it is now."""
        return _state(self._state.url, os.fstat(self.fd))

    def read(self, offset: int, size: int) -> bytes:
        """Exactly the bytes [offset, offset + size).

        Raises:
            SourceError: the file ends before.
            OSError: it cannot be read.
        """
        check_range(self._state, offset, size)
        chunks: list[bytes] = []
        while size > 0:
            chunk = os.pread(self.fd, size, offset)
            if not chunk:
                raise changed(self._state.url, f"it ends {size} bytes early")
            chunks.append(chunk)
            offset, size = offset + len(chunk), size - len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class LocalFiles:
    """Open local files, at most `max_open` of them, least recently used first out."""

    def __init__(self, max_open: int) -> None:
        self._max_open, self._files = max_open, OrderedDict[str, LocalFile]()
        self._lock = threading.Lock()

    def open(self, url: str, expect: FileState | None = None) -> LocalFile:
        """The open file at `url`.

        Raises:
            SourceError: it is not as expected.
            OSError: it cannot be opened.
        """
        with self._lock:
            file = self._files.pop(url, None)
        if file is None:
            file = LocalFile(url)
        if expect is not None:
            check_unchanged(expect, file.now())
        with self._lock:
            self._files[url] = file
            while len(self._files) > self._max_open:
                self._files.popitem(last=False)  # closed when the last reader lets go of it
        return file

    def __len__(self) -> int:
        return len(self._files)


def local_state(url: str) -> FileState | None:
    """State of the regular file at `url`; None where there is none."""
    try:
        status = os.stat(local_path(url))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _state(url, status) if stat.S_ISREG(status.st_mode) else None


def check_unchanged(expect: FileState, found: FileState) -> None:
    """Raise SourceError unless the two have one size and, where both are known, one stamp."""
    if found.size != expect.size:
        raise changed(expect.url, f"it had {expect.size} bytes and has {found.size}")
    if expect.stamp and found.stamp and expect.stamp != found.stamp:
        raise changed(expect.url, f"its stamp was {expect.stamp} and is {found.stamp}")


def check_range(state: FileState, offset: int, size: int) -> None:
    """Raise SourceError unless [offset, offset + size) lies in the file: the bound before anything is allocated."""
    if offset < 0 or size < 0 or offset + size > state.size:
        raise SourceError(
            f"bytes {offset} to {offset + size} are not in a file of {state.size} bytes",
            place=shown(state.url),
            remedy="Build what names them (index, table of members) again.",
        )


def changed(url: str, how: str) -> SourceError:
    """The error for a file that is not what it was."""
    return SourceError(
        f"the file has changed since it was opened: {how}",
        place=shown(url),
        remedy="Start again when the files are complete.",
    )


def _state(url: str, status: os.stat_result) -> FileState:
    return FileState(url=url, size=status.st_size, stamp=str(status.st_mtime_ns))
