"""`BalancedDataLoader`: one changed line where torch's DataLoader stood, and every rank's batches cost the same.

    costs [n]  --epoch order by seed-->  global batches of batch_size x dp_size  --plan_step-->  this rank's indices

Every rank computes the same plan from the costs, without communication. `batch_size` becomes the *mean* number of
samples per rank: a rank with heavy samples gets fewer of them. A global batch holds the very samples it would hold
without balancing; only who gets which changes. Price: batches of unequal length, so normalise the loss by the samples
or tokens of the *global* batch, not per rank.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from balancer.errors import BalancerError, LayoutError, MissingCostError, PlanError
from balancer.layout import Layout, ParallelSpec
from balancer.plan import MAX_CAPACITY, Capacities
from balancer.planner import DEFAULT_POLICY, plan_step
from balancer.select import StepSelector
from balancer.warm_up import warm_up_once

Sample_co = TypeVar("Sample_co", covariant=True)
Costs = Sequence[int] | NDArray[Any] | Callable[[int], int | Sequence[int]]

NUM_COST_COLUMNS = 2
_FINEST_COST = 2.0**30
_logger = logging.getLogger(__name__)
# The cost of a sample is what the caller says, in the caller's unit: one "nanosecond" per unit, nothing added.
_AS_GIVEN = CostModel(
    stages=(
        StageCost(forward=StageTerms(per_patch_ns=1.0), backward=StageTerms()),
        StageCost(forward=StageTerms(per_token_ns=1.0), backward=StageTerms()),
    )
)


class BalancedBatchSampler(Sampler[list[int]]):
    """Index batches of one DP rank, balanced over all ranks, for those who keep their own DataLoader.

    Args:
        costs: int [n], or [n, 2] for (encoder, LLM) cost; any unit, at least 0.
        batch_size: mean samples per rank and batch.
        layout: dp_size of it counts; None: the initialised process group as pure DP, else one process.
        dp_rank: whose batches; None: this process's.
        shuffle: a new order every epoch, from (seed, epoch).
        drop_last: leave out a last global batch that is not full. Without it, only a rest of fewer samples than ranks
            is left out, because every rank needs at least one.
        policy: see `balancer.policies`.

    Raises:
        BalancerError: costs of another shape or negative.
        LayoutError: a dp_rank outside the layout.
        PlanError: fewer samples than ranks.
    """

    def __init__(
        self,
        costs: Sequence[int] | NDArray[Any],
        batch_size: int = 1,
        *,
        layout: Layout | None = None,
        dp_rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        policy: str = DEFAULT_POLICY,
        seed: int = 0,
    ) -> None:
        self._costs = _checked_costs(costs)
        self._layout, self._dp_rank = _place(layout, dp_rank)
        if batch_size < 1:
            raise PlanError(f"batch_size={batch_size}: at least one sample per rank")
        self._global_batch_size = batch_size * self._layout.dp_size
        self._policy, self._seed = policy, seed
        num_samples = len(self._costs)
        rest = num_samples % self._global_batch_size
        self._num_dropped = rest if drop_last or rest < self._layout.dp_size else 0
        self._selector = StepSelector(
            np.arange(num_samples), seed=seed, global_batch_size=self._global_batch_size, shuffle=shuffle
        )
        self._epoch = 0
        if len(self) == 0:
            raise PlanError(
                f"{num_samples} samples do not give each of {self._layout.dp_size} ranks one; use fewer ranks or "
                f"drop_last=False with a smaller batch_size (now {batch_size})"
            )
        if self._num_dropped:
            _logger.info("%d of %d samples are left out of every epoch", self._num_dropped, num_samples)
        warm_up_once()  # here rather than in the first step, where other ranks would wait for this one

    def __len__(self) -> int:
        """Batches per epoch, the same on every rank."""
        steps = self._selector.steps_per_epoch
        return steps - 1 if self._num_dropped else steps

    @property
    def num_dropped(self) -> int:
        """Samples of each epoch that no rank sees."""
        return self._num_dropped

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it epochs advance by themselves."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._epoch
        self._epoch += 1
        for number in range(len(self)):
            where, ids = self._selector.step_ids(epoch * self._selector.steps_per_epoch + number)
            costs = self._costs[ids]
            nothing = np.zeros(len(ids), dtype=np.int64)
            plan = plan_step(
                StepCounts(
                    sample_ids=ids,
                    # Zero-cost samples weigh one unit, or they could all end up on one rank.
                    llm_tokens=np.maximum(costs[:, 1], 1),
                    patches=costs[:, 0],
                    label_tokens=nothing,
                    visual_tokens=nothing,
                    num_items=nothing,
                    full_total_sq=nothing,
                    window_total_sq=nothing,
                ),
                parallel=ParallelSpec.of(self._layout, num_microbatches=1),
                cost_model=_AS_GIVEN,
                capacities=Capacities(tokens=min(MAX_CAPACITY, int(np.maximum(costs[:, 1], 1).sum()))),
                policy=self._policy,
                seed=self._seed,
                step=where.step,
                epoch=where.epoch,
                cursor=where.cursor,
            )
            if not plan.num_samples.all():
                raise PlanError(
                    f"policy {self._policy!r} left a rank without a sample; choose joint, lpt or sequential"
                )
            yield plan.members(self._dp_rank, 0).tolist()


class BalancedDataLoader(DataLoader[Sample_co]):
    """torch's DataLoader with batches balanced over DP ranks; map-style datasets.

    Arguments up to `persistent_workers` are DataLoader's, in its order and meaning, except that `batch_size` is a mean.

    Args:
        cost: cost of every sample, known without decoding it: an array [n] or [n, 2] (encoder, LLM), or a function of
            the index. None: `dataset.cost(i)`.
        parallel, dp_rank: see `BalancedBatchSampler`.
        policy, seed: see `BalancedBatchSampler`.

    Raises:
        MissingCostError: no cost; the text shows the line to add.
        BalancerError: an iterable dataset, or a sampler beside the balancing one.
    """

    def __init__(  # noqa: PLR0917  (DataLoader's own order of arguments)
        self,
        dataset: Dataset[Sample_co],
        batch_size: int = 1,
        shuffle: bool | None = None,
        sampler: None = None,
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
        cost: Costs | None = None,
        parallel: Layout | None = None,
        dp_rank: int | None = None,
        policy: str = DEFAULT_POLICY,
        seed: int = 0,
    ) -> None:
        if sampler is not None or batch_sampler is not None:
            raise BalancerError(
                "BalancedDataLoader decides which rank gets which sample, so it takes no sampler; leave out "
                "DistributedSampler and the like and pass shuffle=, seed= and, if need be, parallel="
            )
        if isinstance(dataset, IterableDataset):
            raise BalancerError("an IterableDataset has no index to plan with; use a map-style dataset (len and [i])")
        super().__init__(
            dataset,
            batch_sampler=BalancedBatchSampler(
                _costs_of(dataset, cost),
                batch_size,
                layout=parallel,
                dp_rank=dp_rank,
                shuffle=bool(shuffle),
                drop_last=drop_last,
                policy=policy,
                seed=seed,
            ),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it epochs advance by themselves."""
        cast("BalancedBatchSampler", self.batch_sampler).set_epoch(epoch)

    @property
    def num_dropped(self) -> int:
        """Samples of each epoch that no rank sees."""
        return cast("BalancedBatchSampler", self.batch_sampler).num_dropped


def _costs_of(dataset: Any, cost: Costs | None) -> NDArray[Any]:
    if cost is None:
        cost = getattr(dataset, "cost", None)
        if cost is None:
            raise MissingCostError(
                "no cost is known for these samples. Add cost=lengths (one number per sample, e.g. its tokens), or "
                "give the dataset a method cost(i) that does not decode the sample"
            )
    if not callable(cost):
        given = np.asarray(cost)
        if len(given) != len(dataset):
            raise BalancerError(f"cost has {len(given)} entries for {len(dataset)} samples")
        return given
    return np.array([cost(i) for i in range(len(dataset))])


def _checked_costs(costs: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    array = np.asarray(costs)
    if array.ndim == 1:
        array = np.stack([np.zeros_like(array), array], axis=1)
    if array.ndim != 2 or array.shape[1] != NUM_COST_COLUMNS or not np.issubdtype(array.dtype, np.number):
        raise BalancerError(f"costs have shape {np.shape(costs)}; expected numbers [n], or [n, 2] for (encoder, LLM)")
    if len(array) and not (np.isfinite(array).all() and array.min() >= 0):
        raise BalancerError("costs are finite and not negative; the smallest is " + str(array.min()))
    if not np.issubdtype(array.dtype, np.integer) and (array != np.rint(array)).any():
        # Fractions (seconds, say) would be lost in whole numbers; only ratios matter, so the unit is made finer.
        array = array * (_FINEST_COST / array.max())
    rounded: NDArray[np.int64] = np.rint(array).astype(np.int64)
    return rounded


def _place(layout: Layout | None, dp_rank: int | None) -> tuple[Layout, int]:
    joined = dist.is_available() and dist.is_initialized()
    launched = dist.is_available() and dist.is_torchelastic_launched() and os.environ.get("WORLD_SIZE", "1") != "1"
    if not joined and dp_rank is None and (launched if layout is None else layout.dp_size > 1):
        raise LayoutError(
            "which rank this is cannot be known: there is no process group yet. Call torch.distributed."
            "init_process_group before making the loader, or pass parallel= and dp_rank="
        )
    if layout is None:
        layout = Layout(dp_size=dist.get_world_size() if joined else 1)
        if not joined:
            _logger.info("no process group: balancing for one process (initialise it first, or pass parallel=)")
    if dp_rank is None:
        dp_rank = layout.coordinates(dist.get_rank())[0] if joined else 0
    if not 0 <= dp_rank < layout.dp_size:
        raise LayoutError(f"dp_rank={dp_rank} is outside dp_size={layout.dp_size}")
    # Batches go to replicas; how a replica splits the model is no matter here.
    return Layout(dp_size=layout.dp_size), dp_rank
