"""A pool of loader workers: cells in, their results out in the same order, whatever becomes of the workers.

    cells --number--> Task --the worker with the fewest tasks--> Done | Failed --put in order--> results
                       ^                  | over its time: killed          the sample becomes a stand-in ("timeout")
                       +---- once more ---+ dies: replaced                 twice on one sample: a stand-in as well

A task goes to whichever worker has least to do, so that a long cell delays only the few tasks behind it; at most
`prefetch` tasks per worker are begun and not delivered, which also bounds the memory of results that wait.

Prices. A task that is done again is done from its first sample. What waits in the queue of a worker is not taken back
while that worker lives. There is no thread: workers are watched and given work while the trainer asks for a result, as
torch's DataLoader does it, so a worker that hangs during a long step is found at the next call (and is over its time by
then). Time stops for nobody: when the whole machine is suspended, a sample under way counts as late unless its worker
goes on within a twentieth of a second.
"""

import heapq
import logging
import math
import select
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

from balancer.errors import BalancerError, LostWorkerError
from balancer.worker_crew import Crew, UnderWay, Worker, how_it_ended
from balancer.worker_memory import MemoryWatch, own_bytes
from balancer.worker_process import Cell, Done, Failed, Ready, Task, TaskReader, WorkerTaskError

__all__ = ["Cell", "Done", "Failed", "MemoryWatch", "TaskReader", "WorkerPool", "WorkerTaskError"]

_SECOND_LOOK_S = 0.05
_IDLE_S = 5.0
_STAND_IN_S = 60.0
_MIB = 1 << 20
_logger = logging.getLogger(__name__)


class WorkerPool:
    """Workers for one pass over cells.

    Args:
        reader: what workers do with sample ids.
        num_workers: processes, started as there is work for them.
        prefetch: tasks per worker that are begun and not delivered.
        sample_timeout_s: longest time for one sample; None: none, and a worker that hangs then hangs the caller.
        recycle_after: tasks after which a worker is replaced by a fresh one; None: never.
        max_worker_deaths: deaths (time-outs not counted) after which the pool gives up.
        start_timeout_s: longest time for a worker to start.
        memory: when to look at the memory of workers.
        arrived: applied to the value of a result when it arrives, ahead of its delivery.

    Raises:
        BalancerError: a number out of range, or a reader that does not pickle.
    """

    def __init__(
        self,
        reader: TaskReader,
        *,
        num_workers: int,
        prefetch: int = 4,
        sample_timeout_s: float | None = None,
        recycle_after: int | None = None,
        max_worker_deaths: int = 8,
        start_timeout_s: float = 300.0,
        memory: MemoryWatch | None = None,
        arrived: Callable[[Any], Any] | None = None,
    ) -> None:
        if num_workers < 1 or prefetch < 1 or (recycle_after is not None and recycle_after < 1):
            raise BalancerError(
                f"num_workers={num_workers}, prefetch={prefetch}, recycle_after={recycle_after}: at least 1 each"
            )
        if sample_timeout_s is not None and not sample_timeout_s > 0:
            raise BalancerError(f"sample_timeout_s={sample_timeout_s}: more than 0, or None for no limit")
        self._reader, self._num_workers, self._prefetch = reader, num_workers, prefetch
        self._timeout_s, self._recycle_after = sample_timeout_s, recycle_after
        self._max_deaths, self._start_timeout_s = max_worker_deaths, start_timeout_s
        self._arrived = arrived
        self._crew = Crew(reader, memory or MemoryWatch())
        self._finalizer = weakref.finalize(self, self._crew.close)
        self._cells: Iterator[Cell] = iter(())
        self._num_taken = 0
        self._again: list[tuple[int, Task]] = []  # a heap of tasks whose worker is gone
        self._results: dict[int, Done | Failed] = {}
        self._deaths: list[str] = []
        self._deaths_at: Counter[int] = Counter()
        self._broken: Exception | None = None

    def run(self, cells: Iterable[Cell]) -> Iterator[Done | Failed]:
        """Results of `cells`, in their order; ends the workers when it ends. Once per pool.

        An error of a task is the result of that task. When the pool gives up, the reason is the result of every task
        that is not finished.
        """
        self._cells = iter(cells)
        number = 0
        try:
            while self._obtain(number):
                yield self._results.pop(number)
                number += 1
        finally:
            self.close()

    def close(self) -> None:
        """End all workers; those at work are killed."""
        self._finalizer()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _obtain(self, number: int) -> bool:
        """Work until the result of task `number` is there; False if there is no such task."""
        self._listen(0.0)
        while True:
            if self._broken is None:
                self._fill(number)
            elif number == self._num_taken:
                self._take_cell()
            if number in self._results:
                return True
            if number == self._num_taken:
                return False
            if self._broken is not None:
                self.close()
                self._results[number] = Failed(number, self._broken)
                return True
            self._listen(self._wait_s())

    # --- giving

    def _fill(self, next_number: int) -> None:
        """Give out tasks, as far as workers take them and results may wait."""
        limit = next_number + self._prefetch * self._num_workers
        while (task := self._next_task(limit)) is not None:
            worker = self._free_worker()
            if worker is None or not worker.give(task):
                heapq.heappush(self._again, (task.number, task))
                if worker is None or not worker.deaf:
                    return

    def _next_task(self, limit: int) -> Task | None:
        if self._again:
            return heapq.heappop(self._again)[1]
        return self._take_cell() if self._num_taken < limit else None

    def _take_cell(self) -> Task | None:
        cell = next(self._cells, None)
        if cell is None:
            return None
        self._num_taken += 1
        return Task(number=self._num_taken - 1, cell=cell)

    def _free_worker(self) -> Worker | None:
        """The worker with least to do; a new one while there is a place for it and all others are at work."""
        open_ones = [worker for worker in self._crew.workers if not worker.deaf and not self._retiring(worker)]
        least = min(open_ones, key=lambda worker: len(worker.tasks), default=None)
        # One process more than workers at most, while retiring ones finish.
        room = len(open_ones) < self._num_workers and len(self._crew.workers) <= self._num_workers
        if room and (least is None or least.tasks):
            try:
                return self._crew.start()
            except OSError as error:
                self._give_up(f"a loader worker could not be started: {error}", error)
                return None
        return least if least is not None and len(least.tasks) < self._prefetch else None

    def _retiring(self, worker: Worker) -> bool:
        return self._recycle_after is not None and worker.num_given >= self._recycle_after

    # --- listening and watching

    def _listen(self, wait_s: float) -> None:
        """Take in what workers say, waiting for the first word at most so long; then look after them."""
        poller = select.poll()
        by_file = {worker.channel.fileno(): worker for worker in self._crew.workers}
        for file in by_file:
            poller.register(file, select.POLLIN)
        for file, _ in poller.poll(wait_s * 1e3):
            self._hear(by_file[file])
        now_s = time.monotonic()
        for worker in list(self._crew.workers):
            if self._retiring(worker) and not worker.tasks:
                self._crew.dismiss(worker)
            elif not worker.ready and now_s - worker.started_s > self._start_timeout_s:
                worker.process.kill()
                self._lost(worker, f"not started within {self._start_timeout_s:g} s")
            elif self._is_late(worker, now_s):
                self._replace_late(worker)
        self._crew.reap()

    def _hear(self, worker: Worker) -> None:
        """All that a worker has said."""
        while True:
            try:
                message = worker.channel.receive(wait=False)
            except BlockingIOError:
                return
            except (EOFError, ConnectionError):
                self._lost(worker, how_it_ended(worker.process))
                return
            except Exception as error:  # a result that did not survive its way; it has been taken off the channel
                lost = WorkerTaskError(f"the result of {worker} cannot be received: {type(error).__name__}: {error}")
                lost.__cause__ = error
                message = Failed(worker.tasks[0].number if worker.tasks else -1, lost)
            if isinstance(message, Ready):
                worker.ready = True
            elif message.number < 0:
                self._give_up(f"a loader worker could not start: {message.error}", message.error)
                return
            else:
                self._answered(worker, message)

    def _answered(self, worker: Worker, message: Done | Failed) -> None:
        if not worker.tasks or worker.tasks[0].number != message.number:
            return  # its failure to be received is known already
        task = worker.tasks.popleft()
        worker.suspect_s = None
        worker.num_samples += len(task.cell.sample_ids)
        if isinstance(message, Done) and self._arrived is not None:
            message = Done(message.number, self._arrived(message.value))
        self._results[task.number] = message
        if worker.num_samples >= worker.trend.next_look:
            self._look_at_memory(worker)

    def _look_at_memory(self, worker: Worker) -> None:
        now, trend = own_bytes(worker.process.pid), worker.trend
        trend.add(worker.num_samples, now)
        said = f"{worker}: {now / _MIB:.0f} MiB of its own after {worker.num_samples} samples"
        if trend.leaks(now):
            _logger.warning(
                "%s, growing by %.1f MiB per 1000 samples: a decoder or a source keeps memory. recycle_after= replaces "
                "workers now and then",
                said,
                trend.slope_bytes / _MIB,
            )
        elif time.monotonic() - trend.logged_s >= trend.watch.log_interval_s:
            trend.logged_s = time.monotonic()
            _logger.info("%s", said)

    def _is_late(self, worker: Worker, now_s: float) -> bool:
        """Whether a worker is over its time for a sample, and still is at a second look."""
        at = worker.under_way()
        if at is None or now_s - at.since_s <= self._limit_s(at):
            worker.suspect_s = None
            return False
        if worker.suspect_s is None or worker.suspect_s < at.since_s:
            worker.suspect_s = now_s
        return now_s - worker.suspect_s >= _SECOND_LOOK_S

    def _limit_s(self, at: UnderWay) -> float:
        """Time for a sample. A stand-in needs no data: only a new worker's first look is slow."""
        if self._timeout_s is None:
            return math.inf
        return max(self._timeout_s, _STAND_IN_S) if at.stand_in else self._timeout_s

    def _wait_s(self) -> float:
        """Until the next look is due."""
        if self._timeout_s is None:
            return _IDLE_S
        now_s, due_s = time.monotonic(), min(_IDLE_S, self._timeout_s)
        for worker in self._crew.workers:
            if worker.suspect_s is not None:
                due_s = min(due_s, worker.suspect_s + _SECOND_LOOK_S - now_s)
            elif (at := worker.under_way()) is not None:
                due_s = min(due_s, at.since_s + self._limit_s(at) - now_s)
        return max(due_s, 0.005)

    # --- losing workers

    def _replace_late(self, worker: Worker) -> None:
        at = worker.under_way()
        if at is None:  # it has gone on this very moment
            return
        if at.stand_in:  # not the sample's fault: counted, or it would go on for ever
            self._lost(worker, f"no stand-in within {self._limit_s(at):g} s")
            return
        place = self._place(at.sample_id)
        _logger.warning(
            "%s did not load sample %d (%s) within %g s and is replaced; the sample is trained as a stand-in without "
            "loss",
            worker,
            at.sample_id,
            place,
            self._timeout_s,
        )
        self._redo(worker, at.sample_id, f"timeout: not loaded within {self._timeout_s:g} s by {worker}, {place}")

    def _lost(self, worker: Worker, how: str) -> None:
        """A worker has died by itself."""
        at = worker.under_way()
        sample_id = None if at is None else at.sample_id
        where = "between samples" if sample_id is None else f"at sample {sample_id} ({self._place(sample_id)})"
        self._deaths.append(f"{worker}: {how} {where}")
        _logger.warning("%s was lost: %s %s; it is replaced", worker, how, where)
        reason = None
        if sample_id is not None:
            self._deaths_at[sample_id] += 1
            if self._deaths_at[sample_id] > 1:
                reason = f"lost_worker: worker died while loading it twice ({how}), {self._place(sample_id)}"
        self._redo(worker, sample_id, reason)
        if len(self._deaths) > self._max_deaths:
            self._give_up(f"a decoding process was lost {len(self._deaths)} times: {'; '.join(self._deaths)}", None)

    def _redo(self, worker: Worker, sample_id: int | None, reason: str | None) -> None:
        """Let a worker go and take its tasks back; `reason` makes a stand-in of `sample_id` in the first one."""
        tasks = list(worker.tasks)
        worker.tasks.clear()
        self._crew.dismiss(worker, kill=True)
        for task in tasks:
            redone = task
            if task is tasks[0] and sample_id is not None and reason is not None:
                redone = replace(task, stand_ins={**task.stand_ins, sample_id: reason})
            heapq.heappush(self._again, (redone.number, redone))

    def _give_up(self, cause: str, error: Exception | None) -> None:
        lost = LostWorkerError(
            f"{cause}. The system ends a process when memory runs out: lower --num-workers, or see the system's log"
            if error is None
            else cause
        )
        lost.__cause__ = error
        self._broken = lost

    def _place(self, sample_id: int) -> str:
        try:
            return self._reader.place(sample_id)
        except Exception as error:  # a message must not fail over where
            return f"place unknown: {type(error).__name__}"
