"""The trainer's loader: every step, the micro-batches that the plan gives to this rank.

    PlanSequence --step--> StepPlan --members(dp_rank, m)--> ids --workers: fetch, decode, collate--> MicroBatch

Workers receive one cell (rank, micro-batch) of a plan at a time and read only its samples. A worker's error is
returned, not raised, so that the trainer can raise it on every rank at the same step boundary.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, Sampler

from balancer.batch import MicroBatch, collate
from balancer.errors import LostWorkerError, PlanError
from balancer.plan import StepPlan
from balancer.plan_sequence import PlanSequence
from dataloaders.estimators import TokenEstimator
from dataloaders.index import CostIndex
from dataloaders.sample import check_loadable, load_sample
from dataloaders.source import SampleSource


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """Work for one worker: a non-empty cell of a plan."""

    step: int
    microbatch: int
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on its way from a worker to the step boundary."""

    error: Exception


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReader:
    """What a worker needs to turn an id into a sample; pickled into every worker.

    Attributes:
        with_pixels: off on pipeline ranks that hold no encoder; their batches carry no patches.
    """

    source: SampleSource
    index: CostIndex
    estimator: TokenEstimator
    train_on: str = "assistant"
    apply_orientation: bool = True
    loss_reduction: str = "token_mean"
    align_tokens: int = 1
    with_pixels: bool = True

    def read(self, sample_ids: Sequence[int], *, step: int = 0, microbatch: int = 0) -> MicroBatch:
        """Load, decode and pack samples."""
        samples = [
            load_sample(
                self.source,
                self.index,
                int(sample_id),
                self.estimator,
                train_on=self.train_on,
                apply_orientation=self.apply_orientation,
                with_pixels=self.with_pixels,
            )
            for sample_id in sample_ids
        ]
        return collate(
            samples,
            step=step,
            microbatch=microbatch,
            loss_reduction=self.loss_reduction,
            align_tokens=self.align_tokens,
        )


class _CellDataset(Dataset[MicroBatch | _Failure]):
    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader

    def __getitem__(self, cell: Any) -> MicroBatch | _Failure:
        try:
            return self._reader.read(cell.sample_ids, step=cell.step, microbatch=cell.microbatch)
        except Exception as error:  # carried to the step boundary, where every rank raises it
            return _Failure(error)


def _end_with_parent(worker: int) -> None:
    """Let a worker end when the training process is gone, however it went.

    torch's own watchdog asks for the parent process, which under a fork server is the server; that one lives as long
    as its workers do, so after a kill -9 of the trainer both would wait for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), name="end-with-parent", daemon=True).start()


def _exit_after(process: BaseProcess) -> None:
    process.join()
    os._exit(1)


class PlanLoader:
    """Micro-batches of one DP rank, step by step.

    Args:
        reader: how samples become micro-batches.
        plans: the run's plans.
        dp_rank: whose cells to read.
        steps: which steps, in order; a resumed run starts its range where it stopped, nothing before is opened.
        num_workers: decoding processes; 0 decodes in this one.

    Raises:
        DataError: samples of the reader's model can be costed, but not loaded.
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
    ) -> None:
        check_loadable(reader.estimator, reader.index)
        self._reader, self._plans, self._dp_rank, self._steps = reader, plans, dp_rank, steps
        # Forked workers would inherit threads and open decoders; a fork server starts clean.
        self._loader: DataLoader[MicroBatch | _Failure] = DataLoader(
            _CellDataset(reader),
            batch_size=None,
            sampler=cast("Sampler[int]", _Cells(self)),
            num_workers=num_workers,
            pin_memory=pin_memory,
            multiprocessing_context="forkserver" if num_workers else None,
            worker_init_fn=_end_with_parent if num_workers else None,
            prefetch_factor=4 if num_workers else None,
        )

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def cells(self) -> Iterator[_Cell]:
        """The non-empty cells of this rank in the order they are run."""
        for step in self._steps:
            try:
                plan = self._plans.plan(step)
            except PlanError:
                return  # cells are read ahead by rank-dependent numbers; `__iter__` raises it at its own step
            for microbatch in range(plan.num_microbatches):
                members = plan.members(self._dp_rank, microbatch)
                if len(members):
                    yield _Cell(step=step, microbatch=microbatch, sample_ids=tuple(members.tolist()))

    def __iter__(self) -> Iterator[StepBatches]:
        batches = iter(self._loader)
        for step in self._steps:
            plan = self._plans.plan(step)
            start = time.perf_counter()
            microbatches: list[MicroBatch | None] = []
            error: Exception | None = None
            for microbatch in range(plan.num_microbatches):
                if not len(plan.members(self._dp_rank, microbatch)):
                    microbatches.append(None)
                    continue
                loaded = _next(batches)
                if isinstance(loaded, _Failure):
                    error = error or loaded.error
                    microbatches.append(None)
                else:
                    microbatches.append(loaded)
            yield StepBatches(
                plan=plan,
                microbatches=tuple(microbatches),
                error=error,
                data_wait_ms=(time.perf_counter() - start) * 1e3,
            )


def _next(batches: Iterator[MicroBatch | _Failure]) -> MicroBatch | _Failure:
    try:
        return next(batches)
    except Exception as error:  # a worker that was killed, or a batch that did not survive its way here
        lost = LostWorkerError(
            f"a decoding process was lost ({type(error).__name__}: {error}). The system ends one when memory runs out: "
            f"lower --num-workers, or see the system's log"
        )
        lost.__cause__ = error
        return _Failure(lost)


class _Cells:
    """The sampler side of `PlanLoader`: restartable, planned lazily."""

    def __init__(self, loader: PlanLoader) -> None:
        self._owner = loader

    def __iter__(self) -> Iterator[_Cell]:
        return self._owner.cells()
