"""The trainer's loader: every step, the micro-batches that the plan gives to this rank.

    PlanSequence --step--> StepPlan --members(dp_rank, m)--> ids --workers: fetch, decode, pack--> MicroBatch

Workers (`balancer.worker_pool`) receive one cell (rank, micro-batch) of a plan at a time and read only its samples. A
worker's error is returned, not raised, so that the trainer can raise it on every rank at the same step boundary.

A sample over its time, or one that ends two workers, arrives as a zero-loss stand-in of the planned shape: the plan
stays what it is on all ranks. Price: whether that happens depends on time, so two runs may differ in which samples are
replaced; each is recorded. With `num_workers=0` samples are loaded in this process, where nothing can end a call that
hangs: `sample_timeout_s` needs workers.
"""

import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count, islice
from types import TracebackType

import torch

from balancer.batch import MicroBatch
from balancer.errors import BalancerError, PlanError
from balancer.packed_cell import PackedCell
from balancer.plan import StepPlan
from balancer.plan_sequence import PlanSequence
from balancer.sample_reader import SampleReader
from balancer.worker_pool import Cell, Failed, WorkerPool
from dataloaders.sample import check_loadable

__all__ = ["PlanLoader", "SampleReader", "StepBatches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """Everything one rank runs in one step.

    Attributes:
        plan: the plan of the step, the same on all ranks.
        microbatches: [M], None where the plan leaves this rank's cell empty.
        error: the first error met while loading, or None; raised by the trainer on all ranks together.
        data_wait_ms: time this call had to wait for data.
    """

    plan: StepPlan
    microbatches: tuple[MicroBatch | None, ...]
    error: Exception | None
    data_wait_ms: float


class PlanLoader:
    """Micro-batches of one DP rank, step by step.

    Each iteration has workers of its own, which end with it, however it ends; `close` ends them as well.

    Args:
        reader: how samples become micro-batches.
        plans: the run's plans.
        dp_rank: whose cells to read.
        steps: which steps, in order; a resumed run starts its range where it stopped, nothing before is opened.
        num_workers: decoding processes; 0 decodes in this one.
        pin_memory: copy batches to page-locked memory.
        sample_timeout_s, recycle_after: see `WorkerPool`; without workers they have no effect.

    Raises:
        DataError: samples of the reader's model can be costed, but not loaded.
        BalancerError: an option out of range, or a reader with a `read` of its own in workers, which would not call it.
    """

    def __init__(
        self,
        reader: SampleReader,
        plans: PlanSequence,
        *,
        dp_rank: int,
        steps: range,
        num_workers: int = 0,
        pin_memory: bool = False,
        sample_timeout_s: float | None = None,
        recycle_after: int | None = None,
    ) -> None:
        check_loadable(reader.estimator, reader.index)
        if num_workers < 0:
            raise BalancerError(f"num_workers={num_workers}: 0 or more")
        if num_workers and type(reader).read is not SampleReader.read:
            raise BalancerError(
                f"{type(reader).__name__} has a read() of its own, which workers do not call: override load() or "
                f"pack(), or pass num_workers=0"
            )
        self._reader, self._plans, self._dp_rank, self._steps = reader, plans, dp_rank, steps
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._sample_timeout_s, self._recycle_after = sample_timeout_s, recycle_after
        self._pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def cells(self) -> Iterator[Cell]:
        """The non-empty cells of this rank in the order they are run."""
        for step in self._steps:
            try:
                plan = self._plans.plan(step)
            except PlanError:
                return  # cells are read ahead by rank-dependent numbers; `__iter__` raises it at its own step
            for microbatch in range(plan.num_microbatches):
                members = plan.members(self._dp_rank, microbatch)
                if len(members):
                    yield Cell(step=step, microbatch=microbatch, sample_ids=tuple(members.tolist()))

    def __iter__(self) -> Iterator[StepBatches]:
        with ExitStack() as stack:
            loaded = self._in_workers(stack) if self._num_workers else self._here()
            stack.callback(loaded.close)
            for step in self._steps:
                plan = self._plans.plan(step)
                start = time.perf_counter()
                microbatches: list[MicroBatch | None] = []
                error: Exception | None = None
                for microbatch in range(plan.num_microbatches):
                    if not len(plan.members(self._dp_rank, microbatch)):
                        microbatches.append(None)
                        continue
                    batch = next(loaded)
                    if isinstance(batch, Failed):
                        error = error or batch.error
                    microbatches.append(None if isinstance(batch, Failed) else batch)
                yield StepBatches(
                    plan=plan,
                    microbatches=tuple(microbatches),
                    error=error,
                    data_wait_ms=(time.perf_counter() - start) * 1e3,
                )

    def close(self) -> None:
        """End the workers of all iterations under way."""
        for pool in list(self._pools):
            pool.close()

    def __enter__(self) -> "PlanLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _here(self) -> Generator[MicroBatch | Failed, None, None]:
        """Batches loaded in this process; the source hears of one cell in advance."""
        cells, announced = self.cells(), deque[Cell]()
        for number in count():
            for cell in islice(cells, 2 - len(announced)):
                with suppress(Exception):  # a hint: reading says what is wrong
                    self._reader.prefetch(cell.sample_ids)
                announced.append(cell)
            if not announced:
                return
            cell = announced.popleft()
            try:
                batch = self._reader.read(cell.sample_ids, step=cell.step, microbatch_index=cell.microbatch)
                yield batch.pin_memory() if self._pin_memory else batch
            except Exception as error:  # carried to the step boundary, where every rank raises it
                yield Failed(number, error)

    def _in_workers(self, stack: ExitStack) -> Generator[MicroBatch | Failed, None, None]:
        """Batches loaded by a pool, which `stack` ends."""
        pinning = stack.enter_context(_pinning_thread()) if self._pin_memory else None

        def arrived(cell: PackedCell) -> MicroBatch | Future[MicroBatch]:
            batch = MicroBatch.of(cell)
            return batch if pinning is None else pinning.submit(batch.pin_memory)

        pool = WorkerPool(
            self._reader,
            num_workers=self._num_workers,
            sample_timeout_s=self._sample_timeout_s,
            recycle_after=self._recycle_after,
            arrived=arrived,
        )
        self._pools.add(stack.enter_context(pool))
        for result in pool.run(self.cells()):
            if isinstance(result, Failed):
                yield result
            else:
                yield result.value.result() if isinstance(result.value, Future) else result.value


def _pinning_thread() -> ThreadPoolExecutor:
    """A thread that copies batches to page-locked memory while the trainer computes, for the trainer's own device."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, "pin-memory")
    return ThreadPoolExecutor(
        1, "pin-memory", initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
    )
