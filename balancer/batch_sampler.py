"""`BalancedBatchSampler`: index lists of one rank, micro-batch by micro-batch, for a DataLoader of torch.

    costs [n]  --epoch order by seed, or a sampler's-->  steps of batch_size x dp_size x M samples
    step  --plan_step, the same on every rank-->  this rank's indices of each of its M micro-batches

Every rank computes the same plan from the costs, without communication. A step holds the very samples that it would
hold without balancing; only who gets which changes. Price: batches of unequal length, so normalise a loss by the
samples or tokens of the *step*, not per rank.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from balancer.counts import Int64Array
from balancer.epoch_plans import EpochPlans, StepOptions, fingerprint_of
from balancer.errors import BalancerError, PlanError
from balancer.layout import Layout, MediaPresence, Meet, ParallelSpec
from balancer.loader_costs import LoaderCosts, Numbers, loader_costs
from balancer.loader_place import Place, place_of
from balancer.plan import MAX_CAPACITY, Capacities, StepPlan, digest_fields
from balancer.plan_ahead import MadeAhead
from balancer.planner import DEFAULT_POLICY
from balancer.policies import get_policy
from balancer.select import eligible_ids
from balancer.warm_up import warm_up_once

Oversize = Literal["error", "drop"]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """One micro-batch as it was drawn.

    Attributes:
        epoch, step: `step` counts from the start of its epoch.
        plan, digests: the plan of the step, and digests of its inputs and of itself.
        microbatch_index: its number in the step.
        sample_ids, indices: dataset indices, int64 [n] and as the list that the DataLoader got.
    """

    epoch: int
    step: int
    plan: StepPlan
    digests: tuple[str, str]
    microbatch_index: int
    sample_ids: Int64Array
    indices: list[int]


class Draws(Iterator[list[int]]):
    """One pass over an epoch.

    A DataLoader draws ahead of what it hands out; `drawn` remembers what each list was, in the same order. A step that
    cannot be planned raises, or with `defers_errors` ends the pass: `error` then says why, to be raised when all that
    came before it is handed out, which is the same place on every rank however far ahead each has drawn.
    """

    def __init__(
        self,
        plans: EpochPlans,
        *,
        epoch: int,
        start: int,
        dp_rank: int,
        may_be_empty: bool,
        defers_errors: bool,
        begun: Callable[[int], None],
    ) -> None:
        self.drawn: deque[Drawn] = deque()
        self.error: Exception | None = None
        self.plans, self.epoch, self.start = plans, epoch, start
        self._begun: Callable[[int], None] | None = begun
        self._dp_rank, self._may_be_empty, self._defers_errors = dp_rank, may_be_empty, defers_errors
        self._ahead = MadeAhead(self._step, range(start, plans.steps_per_epoch))
        self._cells = self._walk()

    def begin(self) -> None:
        """Use the epoch up: the next pass is over the next one. DataLoader asks for some passes and drops them."""
        if self._begun is not None:
            self._begun(self.epoch)
            self._begun = None

    def __next__(self) -> list[int]:
        self.begin()
        drawn = next(self._cells)
        self.drawn.append(drawn)
        return drawn.indices

    def close(self) -> None:
        """Stop planning ahead."""
        self._cells.close()
        self._ahead.close()

    def _walk(self) -> Generator[Drawn, None, None]:
        while True:
            try:
                cells = next(self._ahead)
            except StopIteration:
                return
            except Exception as error:
                if not self._defers_errors:
                    raise
                self.error = error
                return
            yield from cells

    def _step(self, step: int) -> list[Drawn]:
        """This rank's micro-batches of a step, with all that takes time worked out."""
        plan = self.plans.plan(self.epoch, step)
        if not (self._may_be_empty or plan.num_samples.all()):
            raise _empty_cells(plan, epoch=self.epoch, step=step)
        inputs = digest_fields({"epoch": self.plans.digest, "step": plan.inputs_digest})
        digests = inputs, plan.digest
        cells = (self.plans.dataset_indices(plan, self._dp_rank, index) for index in range(plan.num_microbatches))
        return [
            Drawn(
                epoch=self.epoch,
                step=step,
                plan=plan,
                digests=digests,
                microbatch_index=index,
                sample_ids=sample_ids,
                indices=sample_ids.tolist(),
            )
            for index, sample_ids in enumerate(cells)
        ]


def _empty_cells(plan: StepPlan, *, epoch: int, step: int) -> PlanError:
    empty = int((plan.num_samples == 0).sum())
    return PlanError(
        f"step {step} of epoch {epoch} needs {plan.num_microbatches} micro-batches to keep its capacities, and its "
        f"{len(plan.sample_ids)} samples leave {empty} of the {plan.num_samples.size} cells (rank, micro-batch) empty; "
        f"raise batch_size or the capacities, or load a balancer.SampleDataset, which fills them with zero-loss "
        f"stand-ins"
    )


class BalancedBatchSampler(Sampler[list[int]]):
    """Index batches of one DP rank, balanced over all ranks, for those who keep their own DataLoader.

    Such a DataLoader knows nothing of steps: `BalancedDataLoader` adds what a step is, its label tokens, the agreement
    on errors, and a saved position.

    Args:
        costs: int or float [n], or [n, 2] for (encoder, LLM) cost; any unit, at least 0. Also `LoaderCosts`.
        batch_size: mean samples per rank and micro-batch.
        sampler: gives the order; the same on every rank. None: `shuffle` decides.
        parallel: replicas and micro-batches: `ParallelSpec`, `Layout` or a DeviceMesh; None: the initialised process
            group as pure DP, else one process.
        dp_rank: whose batches; None: this process's.
        shuffle: a new order every epoch, from (seed, epoch).
        drop_last: leave out a last step that is not full. Without it, only a rest of fewer samples than ranks is left
            out, because every rank needs at least one.
        capacity_tokens, capacity_patches: hard limits of a micro-batch, in the units of the costs' columns.
        policy: see `balancer.policies`.
        meet: where ranks wait for one another: once a `step`, or in every `microbatch`.
        lookahead_steps: steps that exchange samples so that each costs the same.
        oversize: samples above a capacity: `error` lists them at once, `drop` leaves them out and counts them.
        media_presence: `aligned`: in every micro-batch either all ranks have media (patches) or none.
        may_be_empty: the collation makes a batch of no sample too; otherwise a step that would need one is refused.
        defers_errors: a step that cannot be planned ends the iteration, and `latest.error` says why.

    Raises:
        BalancerError: costs of another shape or negative, options that do not go together.
        LayoutError: a dp_rank outside the layout, or one that cannot be known.
        PlanError: fewer samples than ranks.
        OversizeError: samples above a capacity.
    """

    def __init__(
        self,
        costs: Numbers | LoaderCosts,
        batch_size: int = 1,
        *,
        sampler: Iterable[int] | None = None,
        parallel: ParallelSpec | Layout | Any = None,
        dp_rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        capacity_tokens: int | None = None,
        capacity_patches: int | None = None,
        policy: str = DEFAULT_POLICY,
        meet: Meet = "microbatch",
        lookahead_steps: int = 1,
        oversize: Oversize = "error",
        seed: int = 0,
        media_presence: MediaPresence = "any",
        may_be_empty: bool = False,
        defers_errors: bool = False,
    ) -> None:
        known = costs if isinstance(costs, LoaderCosts) else _costs_alone(costs)
        check_sampler(sampler, shuffle=shuffle)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise PlanError(f"batch_size={batch_size}: at least one sample per rank")
        get_policy(policy)  # a name that does not exist is told here
        if oversize not in get_args(Oversize):
            raise PlanError(f"oversize={oversize!r}: choose 'error' or 'drop'")
        self.costs = known
        self.place: Place = place_of(parallel, dp_rank, meet=meet)
        self._sampler, self._shuffle = sampler, shuffle
        self._may_be_empty, self._defers_errors = may_be_empty, defers_errors
        capacities = _capacities(known, capacity_tokens, capacity_patches)
        self.options = StepOptions(
            spec=_spec_for(
                self.place.spec,
                known,
                media_presence=media_presence,
                limited=capacity_tokens is not None or capacity_patches is not None,
            ),
            cost_model=known.cost_model,
            capacities=capacities,
            batch_size=batch_size,
            drop_last=drop_last,
            policy=policy,
            lookahead_steps=lookahead_steps,
            seed=seed,
        )
        self.eligible = eligible_ids(known.index, capacities, oversize, cost_model=known.cost_model)
        self.epoch, self._start = 0, 0
        self.reached: tuple[int, int] | None = None  # (epoch, finished steps) of a pass under way, as its user has it
        self.latest: Draws | None = None
        self._orders: dict[int, EpochPlans] = {}
        self._by_seed = None if sampler is not None else self._plans_of(None)
        if self._by_seed is not None and self._by_seed.num_dropped:
            _logger.info("%d of %d samples are left out of every epoch", self.num_dropped, self._by_seed.num_samples)
        warm_up_once()  # here rather than in the first step, where other ranks would wait for this one

    def __iter__(self) -> Draws:
        """The index lists of the next epoch, from where a loaded state says."""
        self.latest = Draws(
            self.plans(self.epoch),
            epoch=self.epoch,
            start=self._start,
            dp_rank=self.place.dp_rank,
            may_be_empty=self._may_be_empty,
            defers_errors=self._defers_errors,
            begun=lambda epoch: self.start_at(epoch + 1, 0),
        )
        return self.latest

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank.

        Raises:
            TypeError: every step has as many micro-batches as it needs, so that the number is only known by planning.
        """
        number = self.plans(self.epoch).num_microbatches
        if number is None:
            raise TypeError(
                "the number of micro-batches differs from step to step, so there is no length; use steps_per_epoch, "
                "yield_per='step', or fix num_microbatches in parallel="
            )
        return number

    @property
    def next_step(self) -> int:
        """The step of its epoch that the next iteration begins with."""
        return self._start

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the costs."""
        return fingerprint_of(self.costs.index)

    @cached_property
    def eligible_digest(self) -> str:
        """Hex digest of the samples that are not left out as unusable or oversize."""
        return digest_fields({"ids": self.eligible.ids})

    @property
    def shuffle(self) -> bool:
        """Whether epochs are permuted by (seed, epoch)."""
        return self._shuffle

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.plans(self.epoch).steps_per_epoch

    @property
    def num_dropped(self) -> int:
        """Samples that the end of each epoch leaves out."""
        return self.plans(self.epoch).num_dropped

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; without it epochs advance by themselves.

        The epoch that a loaded position lies in keeps that position.
        """
        if epoch != self.epoch:
            self.start_at(epoch, 0)

    def start_at(self, epoch: int, step: int) -> None:
        """Begin the next iteration at a step (from 0) of an epoch."""
        if epoch < 0 or step < 0:
            raise PlanError(f"epoch={epoch}, step={step}: both count from 0")
        self.epoch, self._start, self.reached = epoch, step, None

    def plans(self, epoch: int) -> EpochPlans:
        """The plans of an epoch; a sampler is asked for its order once per epoch."""
        if self._by_seed is not None:
            return self._by_seed
        if epoch not in self._orders:
            # The epoch that runs stays known while the next one's length is asked for: a sampler that draws from a
            # generator gives another order when it is asked again.
            made = self._plans_of(self._order_of(epoch))
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: made}
        return self._orders[epoch]

    def _plans_of(self, order: Int64Array | None) -> EpochPlans:
        return EpochPlans(
            self.costs.index,
            self.options,
            ids=self.eligible.ids,
            dropped=self.eligible.dropped,
            shuffle=self._shuffle,
            order=order,
        )

    def _order_of(self, epoch: int) -> Int64Array:
        """The sampler's order without the samples that cannot be loaded."""
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
        given = list(self._sampler or ())
        if not all(isinstance(i, int | np.integer) for i in given):
            raise BalancerError("the sampler must give indices of single samples; pass batches as batch_sampler")
        order, num_samples = np.array(given, dtype=np.int64), len(self.costs.index)
        wrong = order[(order < 0) | (order >= num_samples)][:5].tolist()
        if wrong:
            raise BalancerError(f"the sampler gives indices {wrong} for a dataset of {num_samples} samples")
        usable = np.zeros(num_samples, dtype=np.bool_)
        usable[self.eligible.ids] = True
        return order[usable[order]]


def check_sampler(sampler: Iterable[int] | None, *, shuffle: bool) -> None:
    """Refuse samplers that do not give the order of all ranks.

    Raises:
        BalancerError: a DistributedSampler, or a sampler beside `shuffle`.
    """
    if sampler is None:
        return
    if isinstance(sampler, DistributedSampler):
        raise BalancerError(
            "a DistributedSampler gives each rank its own share, but the balancer decides which rank gets which "
            "sample; leave it out (sampler=None) and pass shuffle= and seed= instead"
        )
    if shuffle:
        raise BalancerError("sampler= and shuffle=True exclude each other: the sampler gives the order")
    if not hasattr(sampler, "__iter__"):
        raise BalancerError(f"sampler={sampler!r} is no iterable of indices")


def _costs_alone(costs: Numbers) -> LoaderCosts:
    if callable(costs):
        raise BalancerError("a function of the index needs a dataset to say how many there are; give numbers [n]")
    return loader_costs(range(len(costs)), cost=costs, cost_index=None)


def _capacities(costs: LoaderCosts, tokens: int | None, patches: int | None) -> Capacities:
    """Hard limits; no limit on tokens is the sum of all."""
    if not costs.limits_known and (tokens is not None or patches is not None):
        raise BalancerError(
            "the costs are too large to be counted in their own unit, so no capacity can be compared with them; give "
            'tokens and patches as cost_index={"llm_tokens": ..., "patches": ...}'
        )
    everything = min(MAX_CAPACITY, max(1, int(np.asarray(costs.index.samples["llm_tokens"], dtype=np.int64).sum())))
    return Capacities(tokens=everything if tokens is None else tokens, patches=patches)


def _spec_for(spec: ParallelSpec, costs: LoaderCosts, *, media_presence: MediaPresence, limited: bool) -> ParallelSpec:
    """What steps are planned for.

    Costs of the caller's own say nothing about pipeline stages: replicas then count as one rank each. Without a limit
    nothing asks for more micro-batches than there must be. One micro-batch of one kind of cost is met at its end
    wherever ranks meet, which takes a fraction of the time to plan.
    """
    num_microbatches = spec.num_microbatches
    if num_microbatches is None and not limited:
        multiple = spec.num_microbatches_multiple
        num_microbatches = -(-spec.min_num_microbatches // multiple) * multiple
    domains = spec.domains if costs.by_stage else ParallelSpec.pipeline().domains
    presence = spec.media_presence if media_presence == "any" else media_presence
    one_kind = not costs.by_stage and not np.asarray(costs.index.samples["patches"]).any()
    meet: Meet = "step" if num_microbatches == 1 and one_kind else spec.meet
    return replace(spec, domains=domains, num_microbatches=num_microbatches, media_presence=presence, meet=meet)
