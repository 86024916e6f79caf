"""A loader worker: one process that loads the samples of one task after another and says which sample it is on.

    parent --Start: slot, reader--> worker --Ready-->
    parent --Task(number, ids, stand_ins)...--> worker --Done(number, packed) | Failed(number, error)--> parent
                       slot (64 bytes both map): count, task number, place in the task, since when

The slot costs no system call, so it is written for every sample. The reader lies in one memory file that all workers
map: an index that is held in memory exists once. A worker knows no other module of the trainer and needs no torch. It
ends when its socket closes, and at the latest when its parent is gone, even if a decoder hangs in C.
"""

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import spawn
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from balancer.errors import BalancerError
from balancer.worker_channel import Channel, Parcel, from_file
from balancer.worker_files import memory_file

Allocate = Callable[[int, int], NDArray[np.float32]]
_SLOT_BYTES = 64
_PR_SET_PDEATHSIG = 1
# Of a worker, unless the user has set it: one thread; and glibc keeps up to 64 MiB of what a decoded picture has freed
# for the next one (measured: 11.4 -> 10.5 ms a sample).
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
# The module search path comes first: everything else, this package included, is found through it.
_CODE = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from balancer.worker_process import run; run(*map(int, sys.argv[1].split(',')))"
)


class TaskReader(Protocol):
    """What a worker does with ids; `balancer.sample_reader.SampleReader` is one. Picklable."""

    def prefetch(self, sample_ids: Sequence[int]) -> None:
        """A hint that these are read soon; returns at once."""
        ...

    def room_bytes(self, sample_ids: Sequence[int]) -> int:
        """Bytes of all that `load` and `stand_in` allocate for these; 0 where they do not."""
        ...

    def load(self, sample_id: int, *, allocate: Allocate) -> Any:
        """One sample; arrays made by `allocate` are not copied on their way, and good until the task is done."""
        ...

    def stand_in(self, sample_id: int, reason: str, *, allocate: Allocate) -> Any:
        """What takes the place of a sample that cannot be loaded; needs no data."""
        ...

    def pack(self, samples: Sequence[Any], *, step: int, microbatch_index: int) -> Any:
        """The result of a task, made of its samples."""
        ...

    def place(self, sample_id: int) -> str:
        """Where a sample lies, for messages; called in the parent."""
        ...


class WorkerTaskError(BalancerError):
    """An exception of a worker that does not travel between processes: its text stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Work for one worker: a non-empty cell of a plan."""

    step: int
    microbatch: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A numbered cell; `stand_ins` says which samples not to touch, and why."""

    number: int
    cell: Cell
    stand_ins: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has its reader."""


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a task."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The exception of a task, or of the start of the worker (number -1)."""

    number: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Beat:
    """Task and place in it (-1: between two tasks) that a worker is on, since `since_s` of the monotonic clock."""

    number: int
    position: int
    since_s: float


class Slot:
    """The piece of memory in which a worker says what it is on: int64 (count, task number, position, nanoseconds)."""

    def __init__(self, file: int) -> None:
        self._mapping = mmap.mmap(file, _SLOT_BYTES)
        os.close(file)
        self._cells = memoryview(self._mapping).cast("q")
        if not self._cells[0]:
            self.write(-1, -1)

    @classmethod
    def create(cls) -> tuple["Slot", int]:
        """A slot, and a descriptor of it for the worker."""
        file = memory_file("balancer-slot")
        os.truncate(file, _SLOT_BYTES)
        return cls(os.dup(file)), file

    def write(self, number: int, position: int) -> None:
        """Tell; the count is odd while the fields are being written."""
        cells = self._cells
        cells[0] += 1
        cells[1], cells[2], cells[3] = number, position, time.monotonic_ns()
        cells[0] += 1

    def read(self) -> Beat:
        """What was told last. A worker that is killed half-way through writing leaves the fields as they are."""
        for _ in range(100):
            count, number, position, since_ns, *_ = self._cells
            if count % 2 == 0 and self._cells[0] == count:
                break
        return Beat(number, position, since_ns / 1e9)

    def close(self) -> None:
        """Unmap."""
        self._cells.release()
        self._mapping.close()


@dataclass(frozen=True, slots=True)
class ReaderFile:
    """A pickled reader in a memory file, and what a worker needs to know of the main module (empty: nothing)."""

    file: int
    main: Mapping[str, Any]

    def close(self) -> None:
        """Free the file; workers that have it keep it."""
        os.close(self.file)


def reader_file(reader: TaskReader) -> ReaderFile:
    """The reader for all workers. Only a reader with classes of the main script makes workers import that script.

    Raises:
        BalancerError: the reader does not pickle.
    """
    try:
        parcel = Parcel(reader)
    except Exception as error:
        raise BalancerError(
            f"the reader does not travel to loader workers: {error}. Make source, encoder and estimator of plain "
            f"attributes and module-level functions, or load with num_workers=0"
        ) from error
    main: dict[str, Any] = {}
    if parcel.mentions(b"__main__"):
        known = spawn.get_preparation_data("loader worker")
        main = {key: value for key, value in known.items() if key.startswith("init_main")}
    return ReaderFile(parcel.to_file("balancer-reader"), main)


def start_process(reader: ReaderFile) -> tuple["subprocess.Popen[bytes]", Channel, Slot]:
    """Start a worker.

    The process runs a fresh interpreter: it inherits no thread, no lock and no descriptor but its socket. It is in a
    process group of its own, so that Ctrl-C is the parent's matter.
    """
    channel, theirs = Channel.pair()
    slot, slot_file = Slot.create()
    main_thread = threading.current_thread() is threading.main_thread()
    try:
        process = subprocess.Popen(
            [
                os.fsdecode(spawn.get_executable()),
                "-P",
                "-c",
                _CODE,
                f"{theirs.fileno()},{os.getpid()},{int(main_thread)}",
                json.dumps([str(entry) or os.getcwd() for entry in sys.path]),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
            env={**_ENVIRONMENT, **os.environ},
        )
        try:
            channel.send(dict(reader.main))
            channel.send_files([os.dup(slot_file), os.dup(reader.file)])
        except OSError:  # it is gone already; hearing from it says so
            pass
    except BaseException:
        channel.close()
        slot.close()
        raise
    finally:
        theirs.close()
        os.close(slot_file)
    return process, channel, slot


def run(descriptor: int, parent: int, from_main_thread: int) -> None:
    """The life of a worker; ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with(parent, ask_kernel=bool(from_main_thread))
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(EOFError, OSError):  # the parent is gone or wants no more
        _serve(channel)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # threads of a storage client or a decoder have nothing to finish


def _serve(channel: Channel) -> None:
    main = channel.receive()
    slot_file, reader_at = channel.receive_files()
    slot = Slot(slot_file)
    try:
        if main:
            spawn.prepare(main)  # as multiprocessing does it
        reader: TaskReader = from_file(reader_at)
    except Exception as error:
        channel.send(Failed(-1, _sendable(error)))
        return
    channel.send(Ready())
    waiting: deque[Task] = deque()
    announced = 0  # of those that wait, from the front
    while True:
        _take(channel, waiting, wait=not waiting)
        slot.write(waiting[0].number, 0)
        announced = _announce(reader, waiting, announced)
        task, announced = waiting.popleft(), announced - 1
        samples, packed, room = [], None, None
        try:
            room = channel.room(reader.room_bytes(task.cell.sample_ids))
            for position, sample_id in enumerate(task.cell.sample_ids):
                slot.write(task.number, position)
                _take(channel, waiting, wait=False)
                announced = _announce(reader, waiting, announced)
                samples.append(_load(reader, sample_id, task.stand_ins.get(sample_id), room.allocate))
            slot.write(task.number, -1)
            packed = reader.pack(samples, step=task.cell.step, microbatch_index=task.cell.microbatch)
            answer = channel.parcel(Done(task.number, packed), room)
        except Exception as error:  # carried to the step boundary, where every rank raises it
            answer = channel.parcel(Failed(task.number, _sendable(error)), room)
        slot.write(-1, -1)
        channel.send_parcel(answer)
        del answer, packed, samples, room  # the next task must not find the memory of this one in use


def _load(reader: TaskReader, sample_id: int, reason: str | None, allocate: Allocate) -> Any:
    if reason is None:
        return reader.load(sample_id, allocate=allocate)
    return reader.stand_in(sample_id, reason, allocate=allocate)


def _announce(reader: TaskReader, waiting: "deque[Task]", announced: int) -> int:
    """Tell the reader of all tasks that wait beyond the first `announced`; the number announced now.

    All at once, not one ahead: a request that fails and waits takes as long as several cells do.
    """
    for task in islice(waiting, announced, None):
        with contextlib.suppress(Exception):  # a hint: reading says what is wrong
            reader.prefetch([i for i in task.cell.sample_ids if i not in task.stand_ins])
    return len(waiting)


def _take(channel: Channel, waiting: "deque[Task]", *, wait: bool) -> None:
    """Move tasks that have arrived to `waiting`; with `wait`, at least one."""
    while True:
        try:
            waiting.append(channel.receive(wait=wait))
        except BlockingIOError:
            return
        wait = False


def _sendable(error: Exception) -> Exception:
    """The exception with the worker's traceback as a note; one that does not pickle becomes its text."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    note = f"in a loader worker:\n{lines}"
    try:
        error.add_note(note)
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(copy, type(error)) and str(copy) == str(error):
            return error
    except Exception:  # its own code runs here
        pass
    try:
        said = str(error)
    except Exception:
        said = "(its text cannot be made)"
    told = WorkerTaskError(f"{type(error).__name__}: {said}")
    told.add_note(note)
    return told


def _end_with(parent: int, *, ask_kernel: bool) -> None:
    """Let this process end when its parent is gone, however it went.

    The kernel's own notice also ends a worker that hangs inside C; it comes when the *thread* that started the worker
    ends, so it is asked for only where that is the main one.
    """
    if ask_kernel:
        with contextlib.suppress(Exception):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch, args=(parent,), name="end-with-parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
