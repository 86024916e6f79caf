"""One packed micro-batch as the trainer sees it, with every length and boundary that a model needs.

PackedCell (numpy, see `balancer.packed_cell`)  --of-->  MicroBatch (torch, the same memory)  --to--> the device
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from balancer.packed_cell import PackedCell, pack_samples
from balancer.records import Replaced
from dataloaders.chat import IGNORED_LABEL
from dataloaders.sample import LoadedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples packed for one forward pass.

    Shapes: T tokens (tail included), V visual tokens, P patches of d values, K media items, n samples.

    Attributes:
        tokens: int64 [T].
        labels: int64 [T], already shifted; -100 where nothing is learned.
        loss_weights: float64 [T], weight of each label token (0 where there is no label).
        position_ids: int64 [3, T] (t, h, w), per sample from 0.
        cu_seqlens: int32 [num_segments + 1], on the CPU; the last segment is the alignment tail if there is one.
        max_seqlen: longest segment, tail included.
        visual_index: int64 [V], positions in T that receive a visual embedding.
        patches: float32 [P, d].
        grids: int64 [K, 3], on the CPU: (t, h, w) of each media item in patches.
        sample_ids: int64 [n], on the CPU, in slot order.
        num_valid_tokens: T without the tail.
        num_label_tokens: labels that are learned.
        weight_sum: sum of `loss_weights`.
        replaced: samples with stand-in media.
        num_conformed: media that differed from the plan and were made to fit it.
        num_microbatches: of the step. step_label_tokens: labels that are learned in the whole step, over all its
            micro-batches and ranks: what a loss is divided by; None where that is not known.
        num_dummy_patches: patches of a dummy medium at the end of `patches`, see `balancer.dummy_media`.
    """

    step: int
    microbatch_index: int
    tokens: torch.Tensor
    labels: torch.Tensor
    loss_weights: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    visual_index: torch.Tensor
    patches: torch.Tensor
    grids: torch.Tensor
    sample_ids: torch.Tensor
    num_valid_tokens: int
    num_label_tokens: int
    weight_sum: float
    replaced: tuple[Replaced, ...] = ()
    num_conformed: int = 0
    num_microbatches: int = 1
    step_label_tokens: int | None = None
    num_dummy_patches: int = 0

    @classmethod
    def of(cls, cell: PackedCell) -> "MicroBatch":
        """The cell as tensors over the same memory, which must be writable."""
        values: dict[str, Any] = {f.name: getattr(cell, f.name) for f in fields(cell)}
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                values[name] = torch.from_numpy(value)
        return cls(**values)

    @property
    def num_samples(self) -> int:
        """Samples in the pack (the tail is not one)."""
        return int(self.sample_ids.numel())

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the step ends with this micro-batch: time for the optimizer."""
        return self.microbatch_index == self.num_microbatches - 1

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "MicroBatch":
        """The batch on `device`, pixels in `dtype`. Boundaries, grids and ids stay on the CPU, where they are read."""
        stay = {"cu_seqlens", "grids", "sample_ids"}
        moved: dict[str, Any] = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor) and f.name not in stay
        }
        if dtype is not None:
            moved["patches"] = moved["patches"].to(dtype)
        return replace(self, **moved)

    def pin_memory(self) -> "MicroBatch":
        """Copy to page-locked memory."""
        pinned: dict[str, Any] = {
            f.name: getattr(self, f.name).pin_memory()
            for f in fields(self)
            if isinstance(getattr(self, f.name), torch.Tensor)
        }
        return replace(self, **pinned)

    def without_loss_of(self, sample_ids: set[int]) -> "MicroBatch":
        """The batch with the labels of `sample_ids` removed: how a stand-in found on another rank is honoured."""
        hit = [slot for slot, sample in enumerate(self.sample_ids.tolist()) if sample in sample_ids]
        if not hit:
            return self
        labels, weights = self.labels.clone(), self.loss_weights.clone()
        bounds = self.cu_seqlens.tolist()
        for slot in hit:
            labels[bounds[slot] : bounds[slot + 1]] = IGNORED_LABEL
            weights[bounds[slot] : bounds[slot + 1]] = 0.0
        return replace(
            self,
            labels=labels,
            loss_weights=weights,
            num_label_tokens=int((labels != IGNORED_LABEL).sum()),
            weight_sum=float(weights.sum()),
        )


def collate(
    samples: Sequence[LoadedSample],
    *,
    step: int = 0,
    microbatch_index: int = 0,
    loss_reduction: str = "token_mean",
    align_tokens: int = 1,
) -> MicroBatch:
    """Pack `samples` in order; arguments and errors are those of `pack_samples`."""
    return MicroBatch.of(
        pack_samples(
            samples,
            step=step,
            microbatch_index=microbatch_index,
            loss_reduction=loss_reduction,
            align_tokens=align_tokens,
        )
    )
