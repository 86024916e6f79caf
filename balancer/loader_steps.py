"""One pass over an epoch, step by step; a step is handed out when all ranks have all of its micro-batches.

    torch's iterator --M batches--> a step --agreement: label tokens--> micro-batches that say what they are to it

It begins with the first batch, not with `iter(loader)`: Lightning makes iterators before it says which epoch they are
to run over. An error while loading is that of its step; the next call goes on with the next step. Where torch has lost
a batch (a time-out, a dead worker), no later one of this pass can be told from it: the other steps fail alike.
"""

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from balancer.adapters.accelerate import begin_pass
from balancer.agreement import Agreement
from balancer.batch_sampler import Drawn, Draws
from balancer.errors import PlanError
from balancer.loader_collate import Output, as_output, label_tokens_of, padded_tokens_of
from balancer.loader_report import Tally
from balancer.microbatch_info import MicroBatchInfo

if TYPE_CHECKING:
    from balancer.loader import BalancedDataLoader

_MAX_LISTED = 16
# How torch's messages begin where it lost a batch; what a dataset raises in a worker begins with "Caught".
_LOST = ("DataLoader ", "Pin memory thread ")


class StepIterator(Iterator[Any]):
    """What `iter(loader)` gives.

    Args:
        loader: whose next epoch to pass over.
        agreement, output: of the loader.
        whole_steps: hand out lists of all micro-batches of a step.
        labels_known: planned label tokens may stand in where batches do not tell theirs.

    Attributes:
        is_over: nothing more comes.
    """

    _batches: Iterator[Any]
    _draws: Draws
    _tally: Tally

    def __init__(
        self,
        loader: "BalancedDataLoader[Any]",
        *,
        agreement: Agreement,
        output: Output,
        whole_steps: bool,
        labels_known: bool,
    ) -> None:
        self._loader, self._agreement = loader, agreement
        self._output, self._whole_steps, self._labels_known = output, whole_steps, labels_known
        self._begun, self.is_over = False, False
        self._ready: deque[tuple[Any, MicroBatchInfo]] = deque()
        self._lost: Exception | None = None

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        try:
            if not self._begun:
                self._begin()
            if not self._ready:
                self._take_step()
        except Exception:
            raise
        except BaseException:  # an interrupt inside a step: what is left of it must not pass for the next one
            self.is_over = True
            raise
        if self._whole_steps:
            taken = list(self._ready)
            self._ready.clear()
            return self._hand_out([batch for batch, _ in taken], taken[-1][1])
        return self._hand_out(*self._ready.popleft())

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """Drop what was loaded ahead, and the workers unless they are kept."""
        self._ready.clear()
        self.is_over = True
        if not self._begun:
            return
        self._draws.close()
        end = getattr(self._batches, "_shutdown_workers", None)
        if end is not None:
            end()

    def _begin(self) -> None:
        loader = self._loader
        try:
            self._batches, self._draws, self._tally = loader.begin_pass(self)
        except Exception as error:  # a sampler that fails, workers that do not start
            self._fail(error)
        counted = 1 if self._whole_steps else loader.num_microbatches
        self._accelerate = begin_pass(loader, self, num_microbatches=counted, non_blocking=loader.pin_memory)
        self._begun = True

    def _hand_out(self, batch: Any, info: MicroBatchInfo) -> Any:
        loader, steps_per_epoch = self._loader, self._draws.plans.steps_per_epoch
        loader.current = info
        if info.is_last_microbatch:
            loader.balanced.reached = info.epoch, info.step % steps_per_epoch + 1
        return self._accelerate.hand_out(batch, is_last=loader.balanced.reached == (info.epoch, steps_per_epoch))

    def _take_step(self) -> None:
        """Load the micro-batches of the next step, and agree."""
        tally, started = self._tally, time.perf_counter()
        batches, drawn, error = [], list[Drawn](), None
        labels: list[int | None] = []
        while not drawn or len(drawn) < drawn[0].plan.num_microbatches:
            try:
                batches.append(self._load())
                labels.append(label_tokens_of(batches[-1]))
            except Exception as raised:  # carried to the agreement, where every rank raises it
                stopped = isinstance(raised, StopIteration)
                if not self._draws.drawn and stopped:
                    self._end(self._draws.error)
                if not self._draws.drawn:
                    self._fail(raised)
                met = _not_the_end(raised) if stopped else raised
                if met is not self._lost:  # which comes again in every step
                    met.add_note(f"while loading samples {_listed(self._draws.drawn[0].indices)}")
                error = error or met
            drawn.append(self._draws.drawn.popleft())
        first = drawn[0]
        loaded = time.perf_counter()
        total = self._agreed(first, labels, error)
        tally.data_wait_ms += (loaded - started) * 1e3
        tally.agreement_wait_ms += (time.perf_counter() - loaded) * 1e3
        tally.add(
            first.plan,
            samples_of_rank=sum(len(cell.indices) for cell in drawn),
            label_tokens=total,
            padded_tokens=sum(map(padded_tokens_of, batches, (len(cell.indices) for cell in drawn))),
        )
        for batch, cell in zip(batches, drawn, strict=True):
            info = self._info(cell, total)
            self._ready.append((as_output(batch, info, self._output), info))

    def _agreed(self, first: Drawn, labels: list[int | None], error: Exception | None) -> int | None:
        """Label tokens of the step over all ranks, or what any of them met; `labels` are those of the micro-batches."""
        known = [count for count in labels if count is not None]
        plan = first.plan
        total = self._agreement.agree(
            error,
            sum(known) if known and len(known) == len(labels) else None,
            first.digests,
            doing=lambda: f"loading step {first.step} of epoch {first.epoch}",
        )
        if total is None and self._labels_known:
            return plan.num_label_tokens
        return total

    def _info(self, cell: Drawn, total: int | None) -> MicroBatchInfo:
        return MicroBatchInfo(
            epoch=cell.epoch,
            step=cell.epoch * self._draws.plans.steps_per_epoch + cell.step,
            microbatch_index=cell.microbatch_index,
            num_microbatches=cell.plan.num_microbatches,
            sample_ids=cell.sample_ids,
            step_samples=len(cell.plan.sample_ids),
            step_label_tokens=total,
        )

    def _load(self) -> Any:
        """The next micro-batch, in the order in which they were drawn."""
        if self._lost is None:
            try:
                return next(self._batches)
            except RuntimeError as error:
                # torch says so where no batch came, which it may still hand out later, in place of another one.
                if not str(error).startswith(_LOST):
                    raise
                self._lost = error
        if not self._draws.drawn:
            next(self._draws)
        raise self._lost

    def _end(self, error: Exception | None) -> NoReturn:
        """There is no next step: raises StopIteration, or why it could not go on."""
        if error is not None:
            self._fail(error)
        self.is_over = True
        self._loader.epoch_ended()
        self._accelerate.end()
        raise StopIteration

    def _fail(self, error: Exception) -> NoReturn:
        """Raise what keeps this rank, and so all of them, from the next step."""
        self.is_over = True
        if not isinstance(error, PlanError):  # plans fail alike everywhere, other things may not
            unknown = "0" * 64
            self._agreement.agree(error, None, (unknown, unknown), doing=lambda: "beginning a step")
        raise error


def _not_the_end(raised: Exception) -> Exception:
    """A dataset or a collate_fn let a StopIteration out, which is no end of the epoch."""
    error = RuntimeError("a sample could not be loaded: the dataset or collate_fn raised StopIteration")
    error.__cause__ = raised
    return error


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:_MAX_LISTED])) + (", ..." if len(indices) > _MAX_LISTED else "")
