"""Memory files between the trainer and its workers: nameless, written, lent to the receiver, and written again.

    free --take--> room of the next cell, or written at once --lend--> the receiver's --give_back--> free

A memory file (`memfd_create`) has no name: the kernel frees it with its last descriptor and mapping, so a process that
is killed leaves nothing behind, and the size of /dev/shm does not matter. Fresh pages cost several times as much as
filling them, so files are used again, and one that was a room stays mapped. Price: a sender keeps a few files for the
next objects.
"""

import mmap
import os
import tempfile
from collections.abc import Iterable

import numpy as np

from balancer.room import Room

_MAX_LENT, _MAX_FREE = 32, 8  # files of one sender


def memory_file(name: str) -> int:
    """Descriptor of an empty nameless file: in memory, or a deleted one in the folder for temporary files."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or a sandbox without it
        with tempfile.TemporaryFile(prefix=name) as file:
            return os.dup(file.fileno())


class MemoryFile:
    """A memory file of a sender."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._mapping: mmap.mmap | None = None

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return os.fstat(self.file).st_size

    def mapped(self, num_bytes: int) -> mmap.mmap:
        """Its first bytes, shared with whoever else maps them; it is made longer if need be.

        Raises:
            OSError: there is no room for so many.
        """
        if self._mapping is None or len(self._mapping) < num_bytes:
            os.posix_fallocate(self.file, 0, num_bytes)  # an error here, where writing to the mapping would be a signal
            try:
                if self._mapping is not None:
                    self._mapping.resize(self.num_bytes)  # pages that are known stay known
            except BufferError:  # a reader has kept an array of an earlier room
                self._mapping = None
            if self._mapping is None:
                self._mapping = mmap.mmap(self.file, num_bytes, access=mmap.ACCESS_WRITE)
        return self._mapping

    def close(self) -> None:
        """Let go of it; a mapping ends with the last array that lies in it."""
        self._mapping = None
        os.close(self.file)


class FileRoom(Room):
    """A room at the start of a memory file."""

    def __init__(self, file: MemoryFile, num_bytes: int) -> None:
        super().__init__(np.frombuffer(file.mapped(num_bytes), dtype=np.float32, count=num_bytes // 4))
        self.file = file


class SenderFiles:
    """Memory files of a sender: lent to the receiver, or free to be written again. At most so many of each are kept."""

    def __init__(self) -> None:
        self._free: list[MemoryFile] = []
        self._lent: dict[int, MemoryFile] = {}  # number of the message -> file
        self._num_sent = 0

    def take(self, num_bytes: int) -> MemoryFile:
        """A file to be written, if possible one of that size; it belongs to the caller, who says `lend` or `keep`."""
        sizes = {file: file.num_bytes for file in self._free}
        fits = [file for file in self._free if sizes[file] >= num_bytes]
        file = min(fits, key=sizes.__getitem__) if fits else max(self._free, key=sizes.__getitem__, default=None)
        if file is None:
            return MemoryFile(memory_file("balancer-parcel"))
        self._free.remove(file)
        return file

    def lend(self, file: MemoryFile) -> None:
        """The next number belongs to a file that has been sent."""
        self._lent[self._num_sent] = file
        self._num_sent += 1
        if len(self._lent) > _MAX_LENT:  # the receiver keeps what it gets
            self._lent.pop(next(iter(self._lent))).close()

    def keep(self, file: MemoryFile) -> None:
        """A file that nobody uses."""
        if len(self._free) < _MAX_FREE:
            self._free.append(file)
        else:
            file.close()

    def give_back(self, numbers: Iterable[int]) -> None:
        """The receiver is done with these."""
        for number in numbers:
            file = self._lent.pop(number, None)
            if file is not None:
                self.keep(file)

    def close(self) -> None:
        """Let go of all."""
        while self._free:
            self._free.pop().close()
        while self._lent:
            self._lent.popitem()[1].close()
