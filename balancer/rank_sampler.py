"""`loader.sampler`: what libraries look at before they decide whether a loader needs one of their own.

    Lightning   isinstance(loader.sampler, DistributedSampler) -> it leaves the loader alone; set_epoch every epoch
    others      iterate it, or take its length, to know the samples of this rank

Prices with Lightning's Trainer. Make the loader in `train_dataloader()` or a LightningDataModule, where the process
group exists. `accumulate_grad_batches` counts batches, so give it the fixed number of micro-batches; without one use
`yield_per="step"` and manual optimisation, because Lightning fetches one batch ahead of a loader without a length and
a checkpoint would be that batch ahead. A checkpoint inside a step (by time, or on a signal) loads that step again.
`precision="bf16-true"` and the like convert dicts but refuse frozen dataclasses: `output="dict"`. Trainer.predict and
overfit_batches make loaders anew around samplers of their own, which is refused: they need a plain DataLoader.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from balancer.batch_sampler import BalancedBatchSampler


class RankSampler(DistributedSampler[Any]):
    """The samples of this rank in the order they are loaded."""

    def __init__(self, balanced: BalancedBatchSampler, dataset: Any) -> None:
        place = balanced.place
        super().__init__(dataset, num_replicas=place.spec.dp_size, rank=place.dp_rank, shuffle=balanced.shuffle)
        self._balanced = balanced

    def __iter__(self) -> Iterator[int]:
        plans, epoch, rank = self._balanced.plans(self._balanced.epoch), self._balanced.epoch, self.rank
        for step in range(plans.steps_per_epoch):
            plan = plans.plan(epoch, step)
            for index in range(plan.num_microbatches):
                yield from plans.dataset_indices(plan, rank, index).tolist()

    def set_epoch(self, epoch: int) -> None:
        """As `BalancedDataLoader.set_epoch`."""
        self._balanced.set_epoch(epoch)
