"""Objects between the trainer and its loader workers: large arrays are handed over, not copied through a pipe.

    sender    object --pickle 5--> body + buffers --write--> memory file --its descriptor over a socket-->   receiver
    receiver  memory file --map, copy on write--> buffers --unpickle--> the same arrays, writable, nothing copied

Small objects travel inside the message. An array that lies in the file already (`Channel.room`) is not written either:
the sender never copies it. A receiver says with its next message which mappings it no longer has, and the sender writes
into those files again, see `balancer.worker_files`.

Prices. Other arrays are copied once by the sender. A process that the receiver forks off must not use arrays that the
receiver has dropped. Only our own processes hold the other end of these sockets: nothing that comes from data is
unpickled.
"""

import contextlib
import mmap
import os
import pickle
import socket
import struct
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from balancer.room import Room
from balancer.worker_files import FileRoom, SenderFiles, memory_file

_ALIGN = 64
_INLINE_BYTES = 16 << 10
_CONTROL_BYTES = socket.CMSG_SPACE(2 * array("i").itemsize)
# Python before 3.13 keeps a descriptor open for every mapping; more mappings than this are read instead.
_MAX_MAPPED = sys.maxsize if sys.version_info >= (3, 13) else 256
_mapped: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


class Parcel:
    """An object taken apart for sending.

    Layout: what lies in the room, then u64 number of chunks, u64 start of each, u64 size of each, then the chunks that
    lie elsewhere (pickle, buffer, buffer, ...), each at a multiple of 64 bytes.

    Args:
        room: of the file that is going to carry the object.

    Attributes:
        room: as given.
        begin: where the number of chunks stands.
        num_bytes: up to the end of the last chunk.
    """

    def __init__(self, value: object, room: Room | None = None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        chunks = [memoryview(body), *(buffer.raw() for buffer in buffers)]
        there = [None if room is None else room.offset_of(chunk) for chunk in chunks]
        self.room = room
        self.begin = 0 if room is None or there.count(None) == len(there) else _aligned(room.used_bytes)
        self.num_bytes = self.begin + 8 * (1 + 2 * len(chunks))
        self._body, self._placed, starts = chunks[0], [], []
        for chunk, offset in zip(chunks, there, strict=True):
            starts.append(_aligned(self.num_bytes) if offset is None else offset)
            if offset is None:
                self.num_bytes = starts[-1] + chunk.nbytes
                self._placed.append((starts[-1], chunk))
        sizes = [chunk.nbytes for chunk in chunks]
        head = struct.pack(f"<{1 + 2 * len(chunks)}Q", len(chunks), *starts, *sizes)
        self._placed.append((self.begin, memoryview(head)))

    @property
    def fits_message(self) -> bool:
        """Whether it can travel without a file."""
        return self.begin == 0 and self.num_bytes <= _INLINE_BYTES

    def mentions(self, word: bytes) -> bool:
        """Whether the pickle, arrays left aside, holds `word`."""
        return word in bytes(self._body)

    def to_bytes(self) -> bytearray:
        """The layout in one piece, for small objects."""
        data = bytearray(self.num_bytes)
        for start, chunk in self._placed:
            data[start : start + chunk.nbytes] = chunk
        return data

    def to_file(self, name: str = "balancer-parcel") -> int:
        """Descriptor of a new memory file that holds the layout."""
        file = memory_file(name)
        try:
            self.write_to(file)
        except BaseException:
            os.close(file)
            raise
        return file

    def write_to(self, file: int) -> None:
        """Write what does not lie in the room to a file, which is made longer if need be."""
        if os.fstat(file).st_size < self.num_bytes:
            os.truncate(file, self.num_bytes)
        for start, chunk in self._placed:
            _write(file, chunk, start)


def from_bytes(data: bytearray | memoryview | mmap.mmap, begin: int = 0) -> Any:
    """The object of a layout; its arrays lie in `data` and are as writable as that."""
    view = memoryview(data)
    (count,) = struct.unpack_from("<Q", view, begin)
    numbers = struct.unpack_from(f"<{2 * count}Q", view, begin + 8)
    body, *buffers = [view[start : start + size] for start, size in zip(numbers[:count], numbers[count:], strict=True)]
    return pickle.loads(body, buffers=buffers)


def from_file(file: int, begin: int = 0, released: Callable[[], object] | None = None) -> Any:
    """The object of a memory file, which is closed. Its arrays keep the mapping alive; writing to them is private.

    Args:
        begin: see `Parcel`.
        released: called when no array needs the file any more, from whichever thread drops the last one.
    """
    try:
        size = os.fstat(file).st_size
        if len(_mapped) >= _MAX_MAPPED:
            data = _read(file, size)
            if released is not None:
                released()
            return from_bytes(data, begin)
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        mapping = mmap.mmap(file, size, access=mmap.ACCESS_COPY, **options)
    finally:
        os.close(file)
    _mapped.add(mapping)
    if released is not None:
        weakref.finalize(mapping, released).atexit = False
    return from_bytes(mapping, begin)


class Channel:
    """One end of a socket pair that carries whole objects, in order.

    Args:
        end: a connected socket of kind SOCK_SEQPACKET; the channel owns it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._files = SenderFiles()
        self._num_received = 0
        self._released: deque[int] = deque()  # numbers of files received and no longer mapped; any thread appends

    @classmethod
    def pair(cls) -> tuple["Channel", socket.socket]:
        """A channel and the other end of it, to be inherited by a process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        """Descriptor to wait on; -1 once closed."""
        return self._socket.fileno()

    def send(self, value: object, *, wait: bool = True) -> bool:
        """Send an object; False if `wait` is off and it does not fit before the other end reads.

        Raises:
            OSError: the other end is gone.
        """
        return self.send_parcel(self.parcel(value), wait=wait)

    def room(self, num_bytes: int) -> Room:
        """Memory for arrays of the next object; give it to `parcel`, which must follow.

        Raises:
            OSError: there is not so much memory.
        """
        if num_bytes <= _INLINE_BYTES:
            return Room.of(0)
        file = self._files.take(num_bytes)
        try:
            return FileRoom(file, num_bytes)
        except BaseException:
            self._files.keep(file)
            raise

    def parcel(self, value: object, room: Room | None = None) -> Parcel:
        """An object as this channel sends it: with the numbers of the files that are no longer needed here."""
        released = [self._released.popleft() for _ in range(len(self._released))]
        return Parcel((released, value), room)

    def send_parcel(self, parcel: Parcel, *, wait: bool = True) -> bool:
        """Send what `parcel` made; as `send` otherwise."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        file = parcel.room.file if isinstance(parcel.room, FileRoom) else None
        try:
            if parcel.fits_message:
                self._socket.send(parcel.to_bytes(), flags)
            else:
                file = file or self._files.take(parcel.num_bytes)
                parcel.write_to(file.file)
                self.send_files([os.dup(file.file)], flags, parcel.begin)
        except OSError as error:
            if file is not None:
                self._files.keep(file)  # both ends count only files that were sent
            if isinstance(error, BlockingIOError):
                return False
            raise
        if file is not None:
            (self._files.keep if parcel.fits_message else self._files.lend)(file)
        return True

    def send_files(self, files: list[int], flags: int = 0, begin: int = 0) -> None:
        """Send descriptors, which are closed here; `begin` is that of a parcel."""
        try:
            # Not socket.send_fds and recv_fds, which ignore their flags before Python 3.12.
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))]
            self._socket.sendmsg([struct.pack("<Q", begin)], control, flags)
        finally:
            for file in files:
                os.close(file)

    def receive(self, *, wait: bool = True) -> Any:
        """The next object.

        Raises:
            BlockingIOError: `wait` is off and there is none.
            EOFError: the other end is gone and everything it sent has been received.
        """
        data, files = self._receive(wait=wait)
        if files:
            number = self._num_received
            self._num_received += 1
            (begin,) = struct.unpack("<Q", data)
            released, value = from_file(files[0], begin, partial(self._released.append, number))
        else:
            released, value = from_bytes(bytearray(data))
        self._files.give_back(released)
        return value

    def receive_files(self) -> list[int]:
        """Descriptors sent by `send_files`; the caller closes them."""
        return self._receive(wait=True)[1]

    def _receive(self, *, wait: bool) -> tuple[bytes, list[int]]:
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        while True:
            try:
                data, control, seen, _ = self._socket.recvmsg(_INLINE_BYTES, _CONTROL_BYTES, flags)
            except ConnectionResetError:
                continue  # said once, ahead of what the other end still sent, when it left messages unread
            files = [file for _, _, held in control for file in array("i", held[: len(held) - len(held) % 4])]
            if seen & socket.MSG_CTRUNC:
                self._num_received += 1
                for file in files:
                    os.close(file)
                raise OSError("this process has too many open files to receive a batch: raise its limit (ulimit -n)")
            if not data:
                raise EOFError("the other end of the channel is closed")
            return data, files

    def close(self) -> None:
        """Close this end; what was sent can still be received at the other one."""
        with contextlib.suppress(OSError):
            self._socket.close()
        self._files.close()


def _aligned(start: int) -> int:
    return start + -start % _ALIGN


def _write(file: int, chunk: memoryview, at: int) -> None:
    while chunk.nbytes:
        written = os.pwrite(file, chunk, at)
        chunk, at = chunk[written:], at + written


def _read(file: int, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = os.preadv(file, [view[at:]], at)
        if not got:
            raise EOFError("a memory file is shorter than it was")
        at += got
    return data
