"""`BalancedDataLoader`: one changed line where torch's DataLoader stood, and every rank's batches cost the same.

    costs  --BalancedBatchSampler: plan_step, on every rank alike-->  index lists of this rank
           --torch's workers: dataset[i], collate-->                  batches of micro-batches
           --agreement: one small collective per step-->              the step starts, or fails, on every rank
           --> micro-batches, each with its step, its number, the step's label tokens

`batch_size` becomes the *mean* number of samples per micro-batch and rank: a rank with heavy samples gets fewer. A step
holds the very samples that it would hold without balancing; only who gets which changes. Prices: batches of unequal
length, so divide a loss by the samples or tokens of the *step*; and a step is handed out when all its micro-batches are
there, on every rank, which keeps M of them in memory.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

from torch.utils.data import DataLoader, Dataset

from balancer.adapters.accelerate import AcceleratePrepared
from balancer.agreement import Agreement
from balancer.batch_sampler import BalancedBatchSampler, Draws, Oversize, check_sampler
from balancer.errors import BalancerError
from balancer.layout import Layout, Meet, ParallelSpec
from balancer.loader_collate import MediaPresence, Output
from balancer.loader_costs import Cost, loader_costs
from balancer.loader_options import check_microbatches, check_of_torch, collate_for, prefetch_for, rounded_capacity
from balancer.loader_report import LoaderReport, Tally
from balancer.loader_state import resume, state_of
from balancer.loader_steps import StepIterator
from balancer.microbatch_info import MicroBatchInfo
from balancer.planner import DEFAULT_POLICY
from balancer.rank_sampler import RankSampler

Sample_co = TypeVar("Sample_co", covariant=True)
YieldPer = Literal["microbatch", "step"]
_logger = logging.getLogger(__name__)

__all__ = ["BalancedBatchSampler", "BalancedDataLoader"]


class BalancedDataLoader(AcceleratePrepared, DataLoader[Sample_co]):
    """torch's DataLoader with batches balanced over DP ranks and micro-batches; map-style datasets.

    Arguments up to `in_order` are DataLoader's, in its order and meaning, except that `batch_size` is a mean, that
    `sampler` gives the order of all ranks together, and that `collate_fn` gets the samples of one micro-batch.

    Args:
        parallel: replicas, and micro-batches per step: `ParallelSpec`, `Layout` or a torch DeviceMesh. None: the
            initialised process group as pure data parallelism, else one process.
        cost: cost of every sample, known without decoding it: numbers [n] or [n, 2] (encoder, LLM), a function of the
            index, or a `CostModel` for the counts of `cost_index`. None: what the dataset knows, see
            `balancer.loader_costs`.
        cost_index: counts of every sample: a `CostIndex`, or columns by name (`llm_tokens`, `label_tokens`, ...).
        capacity_tokens, capacity_patches: hard limits of a micro-batch. Without a fixed number of micro-batches a step
            takes as many as it needs.
        policy: see `balancer.policies`.
        meet: where ranks wait for one another: in every `microbatch`, or once a `step` (gradients accumulated without
            synchronisation).
        lookahead_steps: steps that exchange samples so that each costs the same; 1: none.
        yield_per: hand out one `microbatch` after the other, or all of a `step` as a list.
        output: without `collate_fn`: `batch` (`MicroBatch`, or torch's default for other samples), `dict`, or `hf`:
            padding-free batches in transformers' spelling.
        seed: of the order; with `shuffle`, order is a function of (seed, epoch).
        oversize: samples above a capacity: `error` lists them at once, `drop` leaves them out and counts them.
        align_tokens: packs of ours are filled up to a multiple of this with a zero-loss segment; `capacity_tokens` is
            rounded down to one.
        media_presence: `any`; `aligned`: in every micro-batch either all ranks have media or none; `dummy`: packs
            without media get a smallest one of zeros. For models that hang where a rank skips its encoder.
        loss_reduction: weights of label tokens in packs of ours, see `balancer.packed_cell`.
        dp_rank: whose batches; None: this process's.

    Attributes:
        current: what the batch that was handed out last is to its step; None before the first.

    Raises:
        MissingCostError: no cost; the text shows the line to add.
        BalancerError: options that do not go together.
        LayoutError, PlanError, OversizeError: see `BalancedBatchSampler`.
        RankError: while iterating: loading failed on some rank; the same on every rank, at the same step.
    """

    def __init__(  # noqa: PLR0917  (DataLoader's own order of arguments)
        self,
        dataset: Dataset[Sample_co],
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Sample_co]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        parallel: ParallelSpec | Layout | Any = None,
        cost: Cost | None = None,
        cost_index: Any = None,
        capacity_tokens: int | None = None,
        capacity_patches: int | None = None,
        policy: str = DEFAULT_POLICY,
        meet: Meet = "microbatch",
        lookahead_steps: int = 1,
        yield_per: YieldPer = "microbatch",
        output: Output = "batch",
        seed: int = 0,
        oversize: Oversize = "error",
        align_tokens: int = 1,
        media_presence: MediaPresence = "any",
        loss_reduction: str = "token_mean",
        dp_rank: int | None = None,
    ) -> None:
        check_of_torch(dataset, batch_size=batch_size, batch_sampler=batch_sampler, in_order=in_order)
        check_sampler(sampler, shuffle=bool(shuffle))
        if yield_per not in get_args(YieldPer):
            raise BalancerError(f"yield_per={yield_per!r}: choose one of {', '.join(get_args(YieldPer))}")
        collate, packs = collate_for(
            dataset,
            collate_fn,
            output=output,
            align_tokens=align_tokens,
            media_presence=media_presence,
            loss_reduction=loss_reduction,
        )
        known = loader_costs(dataset, cost=cost, cost_index=cost_index)
        balanced = BalancedBatchSampler(
            known,
            batch_size,
            sampler=sampler,
            parallel=parallel,
            dp_rank=dp_rank,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            capacity_tokens=rounded_capacity(capacity_tokens, align_tokens),
            capacity_patches=capacity_patches,
            policy=policy,
            meet=meet,
            lookahead_steps=lookahead_steps,
            oversize=oversize,
            seed=seed,
            media_presence="aligned" if media_presence == "aligned" else "any",
            may_be_empty=packs,
            defers_errors=True,
        )
        fixed = balanced.options.spec.num_microbatches
        check_microbatches(fixed, output=output)
        more: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        super().__init__(
            dataset,
            batch_sampler=balanced,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_for(fixed, num_workers=num_workers, given=prefetch_factor),
            persistent_workers=persistent_workers,
            **more,
        )
        # What DataLoader clears beside a batch sampler, but libraries read.
        for name, value in (
            ("batch_size", batch_size),
            ("drop_last", drop_last),
            ("sampler", RankSampler(balanced, dataset)),
        ):
            object.__setattr__(self, name, value)
        self.balanced = balanced
        self.current: MicroBatchInfo | None = None
        self._yield_per, self._output = yield_per, output
        self._labels_known = known.labels_known
        place = balanced.place
        self._agreement = Agreement(world_size=place.world_size, dp_size=place.spec.dp_size, dp_rank=place.dp_rank)
        self._tally = Tally()
        self._running: weakref.ref[StepIterator] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return StepIterator(
            self,
            agreement=self._agreement,
            output=self._output,
            whole_steps=self._yield_per == "step",
            labels_known=self._labels_known,
        )

    def begin_pass(self, steps: StepIterator) -> tuple[Iterator[Any], Draws, Tally]:
        """For `StepIterator`: torch's iterator over the next epoch, what it draws, and where to count."""
        before = None if self._running is None else self._running()
        if before is not None and self.persistent_workers:  # torch has one iterator, which serves the newest pass
            before.is_over = True
        self._running = weakref.ref(steps)  # not kept: an iterator that is let go ends its workers
        inner = super().__iter__()
        draws = self.balanced.latest
        if draws is None:
            raise BalancerError("torch's DataLoader did not ask for batches; this version of torch is not supported")
        draws.begin()
        self.balanced.reached, self._tally = (draws.epoch, draws.start), Tally(epoch=draws.epoch)
        return inner, draws, self._tally

    def __len__(self) -> int:
        """What one iteration of an epoch from its start hands out, the same on every rank: micro-batches, or steps.

        Raises:
            TypeError: micro-batches of which every step has as many as it needs.
        """
        return self.steps_per_epoch if self._yield_per == "step" else len(self.balanced)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.balanced.steps_per_epoch

    @property
    def num_microbatches(self) -> int | None:
        """Micro-batches of a step and rank; None: as many as each step needs. A short last step may have fewer."""
        return self.balanced.options.spec.num_microbatches

    @property
    def num_dropped(self) -> int:
        """Samples that the end of each epoch leaves out."""
        return self.balanced.num_dropped

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self.balanced.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it epochs advance by themselves."""
        self.balanced.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, see `balancer.loader_state`."""
        epoch, step = self.balanced.reached or (self.balanced.epoch, self.balanced.next_step)
        return state_of(self.balanced, self.balanced.plans(epoch), epoch=epoch, step=step)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved position with the next iteration.

        Raises:
            LoaderStateError: a position that this loader cannot go on from.
        """
        resume(self.balanced, state_dict)

    def report(self) -> LoaderReport:
        """What the current epoch has held so far."""
        return self._tally.report(
            samples_left_out=self.balanced.plans(self._tally.epoch).num_dropped,
            samples_unusable=len(self.balanced.eligible.dropped),
        )

    def close(self) -> None:
        """End workers and planning; the loader may be iterated again."""
        running = None if self._running is None else self._running()
        if running is not None:
            running.close()
        workers = getattr(self, "_iterator", None)
        if workers is not None and hasattr(workers, "_shutdown_workers"):
            workers._shutdown_workers()
            self._iterator = None

    def __enter__(self) -> "BalancedDataLoader[Sample_co]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def epoch_ended(self) -> None:
        """For `StepIterator`: the pass has handed out everything."""
        self.balanced.reached = None
        _logger.info("%s", self.report().text())
