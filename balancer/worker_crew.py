"""The processes of a worker pool: started one by one, retired, killed, reaped; none is left behind.

    start --> Worker(process, channel, slot, tasks) --retire (idle) | kill (hangs) | dead--> leaving --> reaped

A process that is killed while the kernel holds it (a read of a hung mount) dies only when that read ends. Nothing here
waits for it: its place is free at once, and it is reaped whenever it goes, by a later pool if need be.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field

from balancer.errors import BalancerError
from balancer.worker_channel import Channel
from balancer.worker_memory import MemoryTrend, MemoryWatch
from balancer.worker_process import ReaderFile, Slot, Task, TaskReader, reader_file, start_process

_END_S, _DEATH_S = 1.0, 2.0
_unreaped: "list[subprocess.Popen[bytes]]" = []


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """The sample a worker is on, since when on the monotonic clock, and whether a stand-in is made of it."""

    sample_id: int
    since_s: float
    stand_in: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One process.

    Attributes:
        name: number of the process, from 0; never used again.
        tasks: given to it and not answered, in the order of its work.
        num_given, num_samples: tasks given and samples answered, in its life.
        started_s: monotonic time of its start. ready: it has its reader.
        deaf: a message could not be sent, so it is dead or dying.
        suspect_s: since when it is known to be over its time; None while it is not.
    """

    name: int
    process: "subprocess.Popen[bytes]"
    channel: Channel
    slot: Slot
    trend: MemoryTrend
    started_s: float
    tasks: deque[Task] = field(default_factory=deque)
    num_given: int = 0
    num_samples: int = 0
    ready: bool = False
    deaf: bool = False
    suspect_s: float | None = None

    def give(self, task: Task) -> bool:
        """Hand over a task; False if it does not take any now."""
        try:
            if not self.channel.send(task, wait=False):
                return False
        except OSError:
            self.deaf = True
            return False
        self.tasks.append(task)
        self.num_given += 1
        return True

    def under_way(self) -> UnderWay | None:
        """What it is on, or was on when it died; None between two tasks."""
        beat = self.slot.read()
        ids = self.tasks[0].cell.sample_ids if self.tasks and beat.number == self.tasks[0].number else ()
        if not 0 <= beat.position < len(ids):
            return None
        sample_id = ids[beat.position]
        return UnderWay(sample_id=sample_id, since_s=beat.since_s, stand_in=sample_id in self.tasks[0].stand_ins)

    def __str__(self) -> str:
        return f"loader worker {self.name} (pid {self.process.pid})"


class Crew:
    """Living workers of one pool.

    Raises:
        BalancerError: the reader does not pickle.
    """

    def __init__(self, reader: TaskReader, memory: MemoryWatch) -> None:
        self._reader: ReaderFile | None = reader_file(reader)
        self._memory, self._owner = memory, os.getpid()
        self.workers: list[Worker] = []
        self._leaving: list[subprocess.Popen[bytes]] = []
        self._num_started = 0

    def start(self) -> Worker:
        """One more worker."""
        if self._reader is None:
            raise BalancerError("the loader was closed while it was being iterated over")
        process, channel, slot = start_process(self._reader)
        worker = Worker(
            name=self._num_started,
            process=process,
            channel=channel,
            slot=slot,
            trend=MemoryTrend(self._memory),
            started_s=time.monotonic(),
        )
        self._num_started += 1
        self.workers.append(worker)
        return worker

    def dismiss(self, worker: Worker, *, kill: bool = False) -> None:
        """Let a worker go: it ends when it finds its channel closed, or is killed."""
        if kill:
            worker.process.kill()
        self.workers.remove(worker)
        worker.channel.close()
        worker.slot.close()
        self._leaving.append(worker.process)

    def reap(self) -> None:
        """Take note of processes that have ended, so that none stays a zombie."""
        if self._leaving:
            self._leaving = [process for process in self._leaving if process.poll() is None]

    def close(self) -> None:
        """End all workers; in a process that was forked off, only forget them."""
        if self._reader is None:
            return
        reader, self._reader = self._reader, None
        reader.close()
        here = os.getpid() == self._owner
        for worker in list(self.workers):
            busy = bool(worker.tasks) or not worker.ready
            self.dismiss(worker, kill=here and busy)
        if not here:
            return
        _wait_for(self._leaving, _END_S)
        for process in self._leaving:
            if process.poll() is None:
                process.kill()
        _wait_for(self._leaving, _DEATH_S)
        _unreaped[:] = [process for process in (*_unreaped, *self._leaving) if process.poll() is None]
        self._leaving = []


def how_it_ended(process: "subprocess.Popen[bytes]") -> str:
    """Signal or exit code of a process whose channel has closed, in words."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_DEATH_S)
    code = process.returncode
    if code is None:
        return "it closed its channel and went on"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _wait_for(processes: "list[subprocess.Popen[bytes]]", limit_s: float) -> None:
    end, pause_s = time.monotonic() + limit_s, 0.001
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
