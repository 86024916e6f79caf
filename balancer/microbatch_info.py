"""What a micro-batch is to its step, for loops whose batches are the user's own.

`BalancedDataLoader.current` is one of these for the batch that was handed out last; batches of ours carry the same.
"""

from dataclasses import dataclass

from balancer.counts import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatchInfo:
    """Place and size of one micro-batch of this rank.

    Attributes:
        epoch: from 0. step: optimizer step, from 0, counted over all epochs.
        microbatch_index: from 0; num_microbatches: M of this step, the same on every rank.
        sample_ids: int64 [n], indices into the dataset, in the order of the batch.
        step_samples: samples of the step over all ranks and micro-batches.
        step_label_tokens: label tokens of the step over all ranks and micro-batches: what the sum of a token loss is
            divided by. None: not known (a `collate_fn` of the user's, and no label counts in the costs).
    """

    epoch: int
    step: int
    microbatch_index: int
    num_microbatches: int
    sample_ids: Int64Array
    step_samples: int
    step_label_tokens: int | None = None

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the step ends with this micro-batch: time for the optimizer."""
        return self.microbatch_index == self.num_microbatches - 1
