"""What a DataLoader worker makes of the samples of one micro-batch when the user gave no `collate_fn`.

    LoadedSample (dataloaders.sample)   --pack-->            MicroBatch                      output="batch" and "dict"
    LoadedSample or tokenised mapping   --flatten-->         batch in transformers' spelling output="hf"
    anything else                       --default_collate--> as torch's DataLoader            output="batch"

Step, label tokens and the like are put in by the loader's own process, where they are known: see `as_output`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from torch.utils.data import default_collate

from balancer.adapters.hf_batch import count_labels, is_flat, num_tail_tokens
from balancer.batch import MicroBatch, collate
from balancer.dummy_media import with_dummy_media
from balancer.errors import BalancerError
from balancer.microbatch_info import MicroBatchInfo
from dataloaders.chat import IGNORED_LABEL
from dataloaders.sample import LoadedSample
from dataloaders.tokenizer import Special

Output = Literal["batch", "hf", "dict"]
MediaPresence = Literal["any", "aligned", "dummy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collate:
    """Samples of one micro-batch -> what the loader hands out, picklable.

    Attributes:
        loss_reduction, align_tokens: see `balancer.packed_cell.pack_samples`.
        flatten: makes transformers' batches; None: packs, or torch's default.
        dummy: (merge, patch_dim) of the smallest medium, for micro-batches without any; None: they have none.
        patch_dim: values of a patch, for a micro-batch without a sample; None: there are none such.
        needs_packs: samples of another kind are refused instead of collated as torch does.
    """

    loss_reduction: str = "token_mean"
    align_tokens: int = 1
    flatten: Callable[[Sequence[Any]], dict[str, Any]] | None = None
    dummy: tuple[int, int] | None = None
    patch_dim: int | None = None
    needs_packs: bool = False

    def __call__(self, samples: list[Any]) -> Any:
        """One micro-batch.

        Raises:
            BalancerError: samples that cannot be packed where they must be.
        """
        stands_in = not samples and self.patch_dim is not None
        given = [_empty_sample(self.patch_dim)] if stands_in and self.patch_dim is not None else samples
        if self.flatten is not None:
            return self.flatten(given)
        if not given or not isinstance(given[0], LoadedSample):
            if self.needs_packs:
                kind = type(given[0]).__name__ if given else "no sample"
                raise BalancerError(
                    f"the dataset gives {kind}, not LoadedSample: output='dict', align_tokens and "
                    f"media_presence='dummy' need a balancer.SampleDataset; for another dataset pass a "
                    f"collate_fn of your own"
                )
            return default_collate(given)
        batch = collate(given, loss_reduction=self.loss_reduction, align_tokens=self.align_tokens)
        if stands_in:
            batch = replace(batch, sample_ids=batch.sample_ids[:0])
        return batch if self.dummy is None else with_dummy_media(batch, merge=self.dummy[0], patch_dim=self.dummy[1])


def label_tokens_of(batch: object) -> int | None:
    """Label tokens of a batch of ours; None: it is the user's own."""
    if isinstance(batch, MicroBatch):
        return batch.num_label_tokens
    return count_labels(batch) if is_flat(batch) else None


def padded_tokens_of(batch: object, num_samples: int) -> int:
    """Tokens of the alignment tail of a batch of ours."""
    if isinstance(batch, MicroBatch):
        return len(batch.tokens) - batch.num_valid_tokens
    return num_tail_tokens(batch, num_samples) if is_flat(batch) else 0


def as_output(batch: Any, info: MicroBatchInfo, output: Output) -> Any:
    """The batch with what the loader knows about its step."""
    if isinstance(batch, MicroBatch):
        batch = replace(
            batch,
            step=info.step,
            microbatch_index=info.microbatch_index,
            num_microbatches=info.num_microbatches,
            step_label_tokens=info.step_label_tokens,
        )
        if output == "dict":
            named = {field.name: getattr(batch, field.name) for field in fields(batch)}
            return {**named, "is_last_microbatch": batch.is_last_microbatch}
    elif output == "hf":
        # A step without a label has a sum of no losses, which is 0 over anything but 0.
        batch["num_items_in_batch"] = max(1, info.step_label_tokens or 0)
    return batch


def _empty_sample(patch_dim: int) -> LoadedSample:
    """One padding token without a label: what runs where a rank has no sample in a micro-batch."""
    return LoadedSample(
        sample_id=-1,
        place="no sample",
        tokens=np.full(1, Special.PAD, dtype=np.int32),
        labels=np.full(1, IGNORED_LABEL, dtype=np.int32),
        position_ids=np.zeros((3, 1), dtype=np.int64),
        visual_index=np.zeros(0, dtype=np.int64),
        patches=np.zeros((0, patch_dim), dtype=np.float32),
        grids=np.zeros((0, 3), dtype=np.int64),
    )
