"""Processes that scan the pieces of a source (shards, or slices), and what becomes of them when something goes wrong.

    parent --Job--> worker (spawned, one at a time) --job.scan(context)--> samples so far | finished | failed --> parent

An error of a piece comes back as a message and does not stop the others; a worker that is killed is a `SourceError`
that names the piece it had; Ctrl-C and every other exception in the parent end all workers; and a worker ends itself
when its parent is gone. Finished pieces lie in the unit folder by then, so nothing is scanned twice.

Price: the context (estimator, encoder, and the source of slices) is pickled once and made again in every worker.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar, cast

from dataloaders.errors import DataError, SourceError

REPORT_INTERVAL_S = 0.2
_END_S = 5.0
ContextT = TypeVar("ContextT")
_ContextT_contra = TypeVar("_ContextT_contra", contravariant=True)


class Job(Protocol[_ContextT_contra]):
    """A piece of a source that any process can scan: hashable, picklable, and small, for it travels."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def size(self) -> int:
        """How much work it is, compared with others of its kind."""
        ...

    def scan(self, context: _ContextT_contra, progress: Callable[[int, int], None] | None = None) -> int:
        """Scan it, write its unit, and return the number of its samples."""
        ...


class TravelError(DataError):
    """Something that cannot be pickled, or not made again in another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceEvent:
    """News of one piece.

    Attributes:
        job: the piece.
        samples, total: scanned so far, in all (0 before it is opened).
        finished: its unit is written.
        error: it failed.
    """

    job: Job[Any]
    samples: int = 0
    total: int = 0
    finished: bool = False
    error: Exception | None = None


Report = Callable[[PieceEvent], None]


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def scan_here(jobs: Sequence[Job[ContextT]], context: ContextT, report: Report) -> None:
    """Scan pieces in this process, one after another; one that fails is reported and the next one is taken."""
    for job in jobs:
        try:
            samples = job.scan(context, _throttled(job, report))
        except Exception as error:
            report(PieceEvent(job=job, error=error))
        else:
            report(PieceEvent(job=job, samples=samples, total=samples, finished=True))


def scan_in_workers(jobs: Sequence[Job[ContextT]], context: ContextT, report: Report, *, workers: int) -> None:
    """Scan pieces in `workers` processes, in this order.

    Raises:
        TravelError: the context does not travel to other processes; nothing was scanned then.
        SourceError: a worker was lost. All have ended then.
    """
    try:
        payload = pickle.dumps(context)
    except Exception as error:
        raise _no_traveller(str(error)) from error
    waiting = list(reversed(jobs))
    with _started(min(workers, len(jobs)), payload) as crew:
        for worker in crew:
            worker.give(waiting)
        while busy := {worker.connection: worker for worker in crew if worker.job is not None}:
            for ready in wait(list(busy)):
                worker = busy[cast("Connection[object, object]", ready)]
                event = worker.hear()
                report(event)
                if event.finished or event.error is not None:
                    worker.job = None
                    worker.give(waiting)


def _no_traveller(why: str) -> TravelError:
    return TravelError(
        f"the source, the estimator or the encoder does not travel to other processes: {why}",
        place="scan_in_workers",
        remedy="Make it of plain attributes, and of classes and functions at the top level of a module that can be "
        "imported; or use one worker.",
    )


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    connection: "Connection[object, object]"
    job: Job[Any] | None = None

    def give(self, waiting: list[Job[ContextT]]) -> None:
        """Hand over the next piece, if there is one."""
        if waiting:
            self.job = waiting.pop()
            try:
                self.connection.send(self.job)
            except OSError as error:
                raise self._lost() from error

    def hear(self) -> PieceEvent:
        """The next message; raises SourceError where the process is gone, TravelError where it cannot begin."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if isinstance(message, str):
            raise _no_traveller(message)
        return cast(PieceEvent, message)

    def _lost(self) -> SourceError:
        self.process.join(_END_S)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return SourceError(
            f"a scanning process was lost ({how})",
            place=self.job.name if self.job else "index",
            remedy="What was finished is kept: start again. The system ends a process when memory runs out: "
            "take fewer workers then. A script that starts workers needs `if __name__ == '__main__':`.",
        )


@contextmanager
def _started(count: int, payload: bytes) -> Iterator[list[_Worker]]:
    """`count` workers; none of them outlives the block."""
    context: SpawnContext = multiprocessing.get_context("spawn")  # forked ones would inherit threads and descriptors
    crew: list[_Worker] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, payload), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            crew.append(_Worker(process, ours))
        yield crew
    finally:
        for worker in crew:
            worker.connection.close()
            worker.process.terminate()
        for worker in crew:
            worker.process.join(_END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _work(connection: "Connection[object, object]", payload: bytes) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends us
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), name="end-with-parent", daemon=True).start()
    context, why = _made_again(payload)
    while True:
        try:
            job = cast("Job[Any]", connection.recv())
            if why:
                connection.send(why)
                return
        except (EOFError, OSError):
            return
        scan_here([job], context, lambda event: connection.send(_sendable(event)))


def _made_again(payload: bytes) -> tuple[Any, str]:
    """(the context, "") or (None, why it cannot be made in this process)."""
    try:
        return pickle.loads(payload), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _exit_after(process: BaseProcess) -> None:
    process.join()
    os._exit(1)


def _sendable(event: PieceEvent) -> PieceEvent:
    """The event with an error that arrives: one that does not pickle becomes its text."""
    if event.error is None:
        return event
    try:
        pickle.loads(pickle.dumps(event.error))
        return event
    except Exception:
        told = SourceError(f"{type(event.error).__name__}: {event.error}", place=event.job.name)
        return PieceEvent(job=event.job, error=told)


def _throttled(job: Job[Any], report: Report) -> Callable[[int, int], None]:
    last = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= REPORT_INTERVAL_S:
            last[0] = now
            report(PieceEvent(job=job, samples=done, total=total))

    return progress
