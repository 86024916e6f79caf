"""All steps of a run as a pure function: step number -> StepPlan. Nothing is stored between steps.

    index + eligible ids + (seed, epoch) --select--> ids of step k --place--> StepPlan k

State of a run is therefore one integer, the number of finished steps: a resume at step 10^6 costs what step 0 costs.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from balancer.cost_model import CostModel
from balancer.counts import StepCounts
from balancer.layout import Layout
from balancer.plan import Capacities, StepPlan
from balancer.planner import plan_step
from balancer.select import SelectIndex, Selector, StepRange, StepSelector
from balancer.shuffle import DEFAULT_BLOCK_SHARDS, Shuffle, groups_of, shuffle_mode
from balancer.weights import planned_weight_sum

# The loader plans a few steps ahead of the trainer and both ask for the same plans.
PLANS_KEPT = 16


@dataclass(frozen=True, kw_only=True)
class PlanSequence:
    """Plans of consecutive steps over `ids`.

    Attributes:
        index: costs of all samples.
        ids: int64 [n], the eligible samples.
        global_batch_size: samples per optimizer step over all ranks; the last step of an epoch may hold fewer.
        layout, cost_model, capacities, schedule, policy, num_microbatches, min_num_microbatches: see `plan_step`.
        shuffle: permute the samples by (seed, epoch): full (True), or block, window after window of `block_shards`
            groups; none (False) keeps the order of `ids` (evaluation). See `balancer.shuffle`.
        groups: int64 [len(index)], for block: samples of one number are cheap to read together, see
            `dataloaders.source.groups`; None: the shards of the index.
        selector: decides the samples of every step instead (a mixture); `ids`, `global_batch_size`, `seed` and
            `shuffle` then select nothing.

    Raises:
        PlanError: no eligible sample, a global batch size below 1, or groups of another number of samples.
    """

    index: SelectIndex
    ids: NDArray[np.int64]
    global_batch_size: int
    layout: Layout
    cost_model: CostModel
    capacities: Capacities
    schedule: str = "1f1b"
    policy: str = "lpt"
    num_microbatches: int | None = None
    min_num_microbatches: int = 1
    seed: int = 0
    shuffle: Shuffle = True
    block_shards: int = DEFAULT_BLOCK_SHARDS
    groups: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)
    selector: Selector | None = None
    _selector: Selector = field(init=False, repr=False, compare=False)
    _plans: dict[tuple[int, str], StepPlan] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        selector = self.selector or self._step_selector()
        object.__setattr__(self, "_selector", selector)
        object.__setattr__(self, "_plans", {})

    def _step_selector(self) -> StepSelector:
        groups: NDArray[np.int64] | None = None
        if shuffle_mode(self.shuffle) == "block":
            groups = groups_of(self.index.shard_numbers if self.groups is None else self.groups, self.index)[self.ids]
        return StepSelector(
            self.ids,
            seed=self.seed,
            global_batch_size=self.global_batch_size,
            shuffle=self.shuffle,
            groups=groups,
            block_shards=self.block_shards,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every sample once; the last one may be shorter."""
        return self._selector.steps_per_epoch

    def position(self, step: int) -> StepRange:
        """Epoch and cursor of a step."""
        return self._selector.step_ids(step)[0]

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """int64 [n]: the samples of a step, blind to policy and layout."""
        return self._selector.step_ids(step)[1]

    def counts(self, step: int) -> StepCounts:
        """Costs of the samples of a step."""
        return StepCounts.from_index(self.index, self.sample_ids(step))

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
            layout=self.layout,
            cost_model=self.cost_model,
            capacities=self.capacities,
            schedule=self.schedule,
            policy=policy,
            num_microbatches=self.num_microbatches,
            min_num_microbatches=self.min_num_microbatches,
            seed=self.seed,
            step=step,
            epoch=where.epoch,
            cursor=where.cursor,
        )
