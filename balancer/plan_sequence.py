"""All steps of a run as a pure function: step number -> StepPlan. Nothing is stored between steps.

    index + eligible ids + (seed, epoch) --select--> ids of step k --place--> StepPlan k

    select   by sample count (`balancer.select`), by token budget (`balancer.token_steps`), or a mixture's own;
             then, with look-ahead, samples are exchanged inside aligned blocks of steps (`balancer.lookahead`)

State of a run is therefore one integer, the number of finished steps: a resume at step 10^6 costs what step 0 costs
(with a token budget: one pass over the token counts of its epoch).

What an epoch does not hold is said in its plans: the first step of every epoch carries `dropped` (unusable or oversize
samples, the same in each epoch), the last step the tail that this epoch leaves out. So the samples of an epoch's plans
and those that they list as dropped are all samples, each once (under tail `repeat`, some of them twice).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from balancer.cost_model import CostModel
from balancer.counts import StepCounts
from balancer.errors import PlanError
from balancer.layout import Layout, ParallelSpec
from balancer.lookahead import LookaheadSelector, index_costs
from balancer.plan import Capacities, StepPlan
from balancer.planner import DEFAULT_POLICY, plan_step
from balancer.select import Dropped, SelectIndex, Selector, StepRange, StepSelector, Tail, TailPolicy
from balancer.shuffle import DEFAULT_BLOCK_SHARDS, Shuffle, groups_of, shuffle_mode
from balancer.token_steps import TokenStepSelector
from balancer.weights import planned_weight_sum

# The loader plans a few steps ahead of the trainer and both ask for the same plans.
PLANS_KEPT = 16
_OwnSelector: TypeAlias = StepSelector | TokenStepSelector


@dataclass(frozen=True, kw_only=True)
class PlanSequence:
    """Plans of consecutive steps over `ids`.

    Attributes:
        index: costs of all samples.
        ids: int64 [n], the eligible samples.
        global_batch_size: samples per optimizer step over all ranks; the last step of an epoch may hold fewer.
        step_tokens: LLM tokens per optimizer step instead, see `balancer.token_steps`; then `global_batch_size` and
            `tail` decide nothing.
        tail: what becomes of a last step that is not full: `pad`, `drop` or `repeat`, see `balancer.select`.
        lookahead_steps: steps that exchange samples so that each costs the same, see `balancer.lookahead`; 1: none.
        selection_cost: what look-ahead evens. Give a model that does not depend on the layout where a run may be
            resumed with another one; None: `cost_model`.
        layout, cost_model, capacities, schedule, policy, num_microbatches, min_num_microbatches: see `plan_step`.
        parallel: domains and micro-batches beyond what `layout` says; then `layout` and the two numbers of
            micro-batches decide nothing.
        shuffle: permute the samples by (seed, epoch): full (True), or block, window after window of `block_shards`
            groups; none (False) keeps the order of `ids` (evaluation). See `balancer.shuffle`.
        groups: int64 [len(index)], for block: samples of one number are cheap to read together, see
            `dataloaders.source.groups`; None: the shards of the index.
        selector: decides the samples of every step instead (a mixture); `ids`, `global_batch_size`, `seed` and
            `shuffle` then select nothing.
        dropped: samples of the index that are not in `ids`, and why; the first plan of every epoch lists them.

    Raises:
        PlanError: no eligible sample, a global batch size below 1, groups of another number of samples, or a mixture
            with a token budget, look-ahead or another tail than `pad`.
    """

    index: SelectIndex
    ids: NDArray[np.int64]
    global_batch_size: int
    step_tokens: int | None = None
    tail: TailPolicy = "pad"
    lookahead_steps: int = 1
    selection_cost: CostModel | None = field(default=None, repr=False)
    layout: Layout
    cost_model: CostModel
    capacities: Capacities
    schedule: str = "1f1b"
    policy: str = DEFAULT_POLICY
    num_microbatches: int | None = None
    min_num_microbatches: int = 1
    parallel: ParallelSpec | None = None
    seed: int = 0
    shuffle: Shuffle = True
    block_shards: int = DEFAULT_BLOCK_SHARDS
    groups: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    selector: Selector | None = None
    dropped: tuple[Dropped, ...] = field(default=(), repr=False)
    _selector: Selector = field(init=False, repr=False, compare=False)
    _own: _OwnSelector | None = field(init=False, repr=False, compare=False)
    _parallel: ParallelSpec = field(init=False, repr=False, compare=False)
    _plans: dict[tuple[int, str], StepPlan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        own = None if self.selector is not None else self._own_selector()
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "_selector", self._checked_mixture() if own is None else self._looking_ahead(own))
        spec = self.parallel or ParallelSpec.of(
            self.layout, num_microbatches=self.num_microbatches, min_num_microbatches=self.min_num_microbatches
        )
        object.__setattr__(self, "_parallel", spec)
        object.__setattr__(self, "_plans", {})

    def _checked_mixture(self) -> Selector:
        """The given selector, unless options are set that only change a selection of our own."""
        given = {
            f"step_tokens={self.step_tokens}": self.step_tokens is not None,
            f"lookahead_steps={self.lookahead_steps}": self.lookahead_steps != 1,
            f"tail={self.tail!r}": self.tail != "pad",
        }
        wrong = [name for name, is_set in given.items() if is_set]
        if wrong or self.selector is None:
            raise PlanError(
                f"{', '.join(wrong)}: not with a mixture. It draws a fixed number of samples for every step, by "
                f"weights that hold step by step, so no step is short and none may give samples to another; set "
                f"global_batch_size alone"
            )
        return self.selector

    def _own_selector(self) -> _OwnSelector:
        groups: NDArray[np.int64] | None = None
        if shuffle_mode(self.shuffle) == "block":
            groups = groups_of(self.index.shard_numbers if self.groups is None else self.groups, self.index)[self.ids]
        if self.step_tokens is not None:
            return TokenStepSelector(
                self.ids,
                self.index.samples["llm_tokens"][self.ids],
                seed=self.seed,
                step_tokens=self.step_tokens,
                shuffle=self.shuffle,
                groups=groups,
                block_shards=self.block_shards,
            )
        return StepSelector(
            self.ids,
            seed=self.seed,
            global_batch_size=self.global_batch_size,
            tail=self.tail,
            shuffle=self.shuffle,
            groups=groups,
            block_shards=self.block_shards,
        )

    def _looking_ahead(self, own: _OwnSelector) -> Selector:
        if self.lookahead_steps == 1:
            return own
        by_tokens = self.step_tokens is not None
        costs_of = index_costs(self.index, self.selection_cost or self.cost_model, with_tokens=by_tokens)
        return LookaheadSelector(own, costs_of, lookahead_steps=self.lookahead_steps, equal_count=not by_tokens)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every sample once (as far as `tail` lets them); the last one may be shorter."""
        return self._selector.steps_per_epoch

    @property
    def epoch_tail(self) -> Tail:
        """What the end of every epoch looks like, in counts."""
        return Tail(policy="pad") if self._own is None else self._own.tail

    def selection_notes(self) -> list[str]:
        """What the selection does to samples and to their order beside permuting them, one sentence each."""
        said = [self.epoch_tail.text()] if self.epoch_tail.text() else []
        if self.lookahead_steps > 1:
            said.append(
                f"ITERATION ORDER: samples are exchanged inside blocks of {self.lookahead_steps} steps (look-ahead), "
                f"so a step holds other samples than without it"
            )
        return said

    @property
    def spec(self) -> ParallelSpec:
        """Replicas, domains and micro-batches that every step is planned for."""
        return self._parallel

    def position(self, step: int) -> StepRange:
        """Epoch and cursor of a step."""
        return self._selector.step_ids(step)[0]

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """int64 [n]: the samples of a step, blind to policy and layout."""
        return self._selector.step_ids(step)[1]

    def counts(self, step: int) -> StepCounts:
        """Costs of the samples of a step."""
        return StepCounts.from_index(self.index, self.sample_ids(step))

    def epoch(self, epoch: int = 0, *, start: int = 0) -> Iterator[StepPlan]:
        """The plans of one epoch, made as they are asked for, from its step `start` (from 0) on.

        A `start` at the end of the epoch, where a resume may stand, gives none.

        Raises:
            PlanError: at once: there is no such epoch or start; as it is asked for: a step that cannot be planned.
        """
        if epoch < 0 or not 0 <= start <= self.steps_per_epoch:
            raise PlanError(
                f"epoch={epoch}, start={start}: epochs count from 0 and have the steps 0 to {self.steps_per_epoch - 1}"
            )
        first = epoch * self.steps_per_epoch
        return (self.plan(first + index) for index in range(start, self.steps_per_epoch))

    def dropped_at(self, step: int) -> tuple[tuple[int, str], ...]:
        """(sample id, reason) of what the plan of `step` lists, see the module."""
        if self._own is None:
            return ()
        epoch, index = divmod(step, self.steps_per_epoch)
        listed = [(drop.sample_id, drop.reason) for drop in self.dropped] if index == 0 else []
        if index == self.steps_per_epoch - 1:
            left = self._own.tail_dropped(epoch).tolist()
            reason = f"tail: the last {len(left)} samples of epoch {epoch} do not fill a step"
            listed += [(sample, reason) for sample in left]
        return tuple(listed)

    def plan(self, step: int, *, policy: str | None = None) -> StepPlan:
        """The plan of a step; `policy` overrides the sequence's for a comparison over the same samples."""
        key = (step, policy or self.policy)
        if key not in self._plans:
            while len(self._plans) >= PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = self._place(*key)
        return self._plans[key]

    def weight_sum(self, step: int, loss_reduction: str) -> float:
        """Planned loss weight of a step: the denominator that every rank knows before the first forward."""
        return planned_weight_sum(self.counts(step).label_tokens.tolist(), loss_reduction)

    def _place(self, step: int, policy: str) -> StepPlan:
        where, ids = self._selector.step_ids(step)
        return plan_step(
            StepCounts.from_index(self.index, ids),
            parallel=self._parallel,
            cost_model=self.cost_model,
            capacities=self.capacities,
            schedule=self.schedule,
            policy=policy,
            seed=self.seed,
            step=step,
            epoch=where.epoch,
            cursor=where.cursor,
            dropped=self.dropped_at(step),
        )


def plan_epoch(plans: PlanSequence, epoch: int = 0, *, start: int = 0) -> Iterator[StepPlan]:
    """The plans of one epoch, lazily; as `PlanSequence.epoch`."""
    return plans.epoch(epoch, start=start)
