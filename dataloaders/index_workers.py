"""Processes that scan shards, and what becomes of them when something goes wrong.

    parent --ShardJob--> worker (spawned, one at a time) --started | samples so far | finished | failed--> parent

An error of a shard comes back as a message and does not stop the others; a worker that is killed is a `SourceError`
that names the shard it had; Ctrl-C and every other exception in the parent end all workers; and a worker ends itself
when its parent is gone. Finished shards lie in the unit folder by then, so nothing is scanned twice.
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
from typing import cast

from dataloaders.errors import DataError, SourceError
from dataloaders.shard_scan import ScanContext, ShardJob, scan_shard

REPORT_INTERVAL_S = 0.2
_END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEvent:
    """News of one shard.

    Attributes:
        job: the shard.
        samples, total: scanned so far, in all (0 before it is opened).
        finished: its unit is written.
        error: it failed.
    """

    job: ShardJob
    samples: int = 0
    total: int = 0
    finished: bool = False
    error: Exception | None = None


Report = Callable[[ShardEvent], None]


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def scan_here(jobs: Sequence[ShardJob], context: ScanContext, report: Report) -> None:
    """Scan shards in this process, one after another; a shard that fails is reported and the next one is taken."""
    for job in jobs:
        try:
            samples = scan_shard(job, context, _throttled(job, report))
        except Exception as error:
            report(ShardEvent(job=job, error=error))
        else:
            report(ShardEvent(job=job, samples=samples, total=samples, finished=True))


def scan_in_workers(jobs: Sequence[ShardJob], context: ScanContext, report: Report, *, workers: int) -> None:
    """Scan shards in `workers` processes, the largest ones first.

    Raises:
        DataError: the estimator or the encoder does not pickle.
        SourceError: a worker was lost. All have ended then.
    """
    try:
        payload = pickle.dumps(context)
    except Exception as error:
        raise DataError(
            f"the estimator or the encoder does not travel to other processes: {error}",
            place="scan_in_workers",
            remedy="Make it of plain attributes and module-level functions, or use one worker.",
        ) from error
    waiting = sorted(jobs, key=lambda job: job.size)  # the largest is last, and taken first
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


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    connection: "Connection[object, object]"
    job: ShardJob | None = None

    def give(self, waiting: list[ShardJob]) -> None:
        """Hand over the next shard, if there is one."""
        if waiting:
            self.job = waiting.pop()
            try:
                self.connection.send(self.job)
            except OSError as error:
                raise self._lost() from error

    def hear(self) -> ShardEvent:
        """The next message; raises SourceError where the process is gone."""
        try:
            return cast(ShardEvent, self.connection.recv())
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _lost(self) -> SourceError:
        self.process.join(_END_S)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return SourceError(
            f"a scanning process was lost ({how})",
            place=f"shard {self.job.path}" if self.job else "index",
            remedy="Shards that were finished are kept: start again. The system ends a process when memory runs out: "
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
    context: ScanContext = pickle.loads(payload)
    while True:
        try:
            job = cast(ShardJob, connection.recv())
        except (EOFError, OSError):
            return
        scan_here([job], context, lambda event: connection.send(_sendable(event)))


def _exit_after(process: BaseProcess) -> None:
    process.join()
    os._exit(1)


def _sendable(event: ShardEvent) -> ShardEvent:
    """The event with an error that arrives: one that does not pickle becomes its text."""
    if event.error is None:
        return event
    try:
        pickle.loads(pickle.dumps(event.error))
        return event
    except Exception:
        told = SourceError(f"{type(event.error).__name__}: {event.error}", place=f"shard {event.job.path}")
        return ShardEvent(job=event.job, error=told)


def _throttled(job: ShardJob, report: Report) -> Callable[[int, int], None]:
    last = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= REPORT_INTERVAL_S:
            last[0] = now
            report(ShardEvent(job=job, samples=done, total=total))

    return progress
