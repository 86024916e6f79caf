"""The steps of a loader's epoch: what they hold, and which samples the end of the epoch leaves out.

    costs + (seed, epoch)  or  costs + a sampler's order   --select-->  steps of batch_size x dp_size x M samples
    step --plan_step--> StepPlan --dataset_indices(dp_rank, m)--> what this rank loads

Every rank has a sample in every micro-batch. A last step that is too short for that has fewer micro-batches; fewer
samples than ranks are left out of that epoch (`drop_last`: the whole short step is). Both are counted.

With a sampler's order the rows of the index are put into that order, so that a sample which the order repeats is two
rows; plans then speak of places in the order, `dataset_indices` of the dataset. Price: a copy of the costs per epoch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from balancer.cost_model import CostModel
from balancer.cost_table import taken
from balancer.counts import Int64Array
from balancer.errors import PlanError
from balancer.layout import Layout, ParallelSpec
from balancer.plan import Capacities, StepPlan, digest_fields
from balancer.plan_sequence import PlanSequence
from balancer.select import Dropped, SelectIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What decides about steps, whatever the order of the samples.

    Attributes:
        spec: replicas, micro-batches, where ranks meet.
        batch_size: mean samples of a rank's micro-batch.
        drop_last, policy, lookahead_steps, seed: see `BalancedDataLoader`.
    """

    spec: ParallelSpec
    cost_model: CostModel
    capacities: Capacities
    batch_size: int
    drop_last: bool
    policy: str
    lookahead_steps: int
    seed: int

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        num_microbatches = self.spec.num_microbatches or self.spec.min_num_microbatches
        return self.batch_size * self.spec.dp_size * num_microbatches


class EpochPlans:
    """Plans of the epochs of one order of samples.

    Args:
        index: costs of the dataset.
        ids: int64 [n], eligible rows of the index.
        dropped: the other ones.
        shuffle: permute by (seed, epoch).
        order: int64 [k], a sampler's order, instead of `ids` and `shuffle`; then one epoch is all there is.

    Raises:
        PlanError: fewer samples than ranks.
    """

    def __init__(
        self,
        index: SelectIndex,
        options: StepOptions,
        *,
        ids: Int64Array,
        dropped: Sequence[Dropped] = (),
        shuffle: bool = False,
        order: Int64Array | None = None,
    ) -> None:
        self.options, self._order = options, order
        rows = ids if order is None else np.arange(len(order))
        self.num_samples = len(rows)
        size, dp_size = options.global_batch_size, options.spec.dp_size
        self._rest = self.num_samples % size
        leaves_rest = bool(self._rest) and (options.drop_last or self._rest < dp_size)
        self.num_dropped = self._rest if leaves_rest else 0
        if self.num_samples - self.num_dropped < dp_size:
            raise PlanError(
                f"{self.num_samples} samples do not give each of {dp_size} ranks one; use fewer ranks or "
                f"drop_last=False with a smaller batch_size (now {options.batch_size})"
                if self.num_samples
                else "no samples to load: the dataset is empty, or every sample was left out as unusable or oversize"
            )
        self._plans = PlanSequence(
            index=index if order is None else taken(index, order),
            ids=rows,
            global_batch_size=size,
            lookahead_steps=options.lookahead_steps,
            layout=Layout(dp_size=dp_size),
            parallel=options.spec,
            cost_model=options.cost_model,
            capacities=options.capacities,
            policy=options.policy,
            seed=options.seed,
            shuffle=shuffle and order is None,
            dropped=tuple(dropped) if order is None else (),
        )
        self.steps_per_epoch = self._plans.steps_per_epoch - (1 if leaves_rest else 0)
        self._last: PlanSequence | None = None
        fixed = options.spec.num_microbatches
        if fixed is not None and not leaves_rest and 0 < self._rest < dp_size * fixed:
            self._last = replace(self._plans, parallel=replace(options.spec, num_microbatches=self._rest // dp_size))

    @property
    def num_microbatches(self) -> int | None:
        """Micro-batches of an epoch per rank; None where every step has as many as it needs."""
        fixed = self.options.spec.num_microbatches
        if fixed is None:
            return None
        last = fixed if self._last is None else self._rest // self.options.spec.dp_size
        return fixed * (self.steps_per_epoch - 1) + last

    @cached_property
    def digest(self) -> str:
        """Hex digest of what makes these epochs and their number of steps, so that no rank ends before another."""
        return digest_fields(
            {
                "order": self.order_digest,
                "num_samples": self.num_samples,
                "steps_per_epoch": self.steps_per_epoch,
                "seed": self.options.seed,
            }
        )

    @cached_property
    def order_digest(self) -> str:
        """Hex digest of the sampler's order; "" for an order by seed."""
        return "" if self._order is None else digest_fields({"order": self._order})

    def plan(self, epoch: int, step: int) -> StepPlan:
        """The plan of step `step` (from 0) of an epoch."""
        is_last = step == self.steps_per_epoch - 1
        plans = self._last if self._last is not None and is_last else self._plans
        return plans.plan(self._number(epoch, step))

    def dataset_indices(self, plan: StepPlan, dp_rank: int, microbatch: int) -> Int64Array:
        """Indices into the dataset, int64 [k], of one cell."""
        members = plan.members(dp_rank, microbatch)
        return members if self._order is None else self._order[members]

    def dropped_of(self, epoch: int) -> Int64Array:
        """Dataset indices, int64 [num_dropped], that the end of this epoch leaves out."""
        if not self.num_dropped:
            return np.zeros(0, dtype=np.int64)
        ids = self._plans.sample_ids(self._number(epoch, self.steps_per_epoch))
        return ids if self._order is None else self._order[ids]

    def _number(self, epoch: int, step: int) -> int:
        """Number of a step in the endless sequence of plans; a sampler's order has one epoch only."""
        return step if self._order is not None else epoch * self._plans.steps_per_epoch + step


def fingerprint_of(index: SelectIndex) -> str:
    """Hex digest of the costs of an index."""
    known = getattr(index, "fingerprint", None)
    return known if isinstance(known, str) else taken(index, np.arange(len(index))).fingerprint
