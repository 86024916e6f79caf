"""One packed micro-batch: what the loader hands to a model, with every length and boundary it needs.

    LoadedSample (tokens [t], labels [t], position_ids [3, t], patches [p, d], grids [k, 3])   one per sample
        | collate: concatenate in slot order; positions were made per sample, so nothing is offset
        v
    MicroBatch   (tokens [T], labels [T], position_ids [3, T], cu_seqlens [n+1], patches [P, d], grids [K, 3])

Price: a tail added by `align_tokens` is a zero-loss segment of its own; it is counted as executed, not as useful.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from balancer.errors import BalancerError
from balancer.records import Replaced
from balancer.weights import LOSS_REDUCTIONS, sample_weight
from dataloaders.sample import LoadedSample
from dataloaders.tokenizer import Special

IGNORED_LABEL = -100


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
    """

    step: int
    microbatch: int
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

    @property
    def num_samples(self) -> int:
        """Samples in the pack (the tail is not one)."""
        return int(self.sample_ids.numel())

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
        """Copy to page-locked memory (called by torch's DataLoader)."""
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
    microbatch: int = 0,
    loss_reduction: str = "token_mean",
    align_tokens: int = 1,
) -> MicroBatch:
    """Pack `samples` in order.

    Args:
        samples: at least one.
        loss_reduction: `token_mean`, `sample_mean` or `sqrt`: weight of a label token is 1, 1/n or 1/sqrt(n) with n
            the label tokens of its sample; the loss of a step is sum(w * ce) / sum(w).
        align_tokens: the pack is filled up to a multiple of this with a zero-loss segment.

    Raises:
        BalancerError: no sample, an unknown reduction, or an alignment below 1.
    """
    if not samples:
        raise BalancerError("a micro-batch needs at least one sample; empty cells of a plan are not collated")
    if loss_reduction not in LOSS_REDUCTIONS:
        raise BalancerError(f"loss_reduction={loss_reduction!r}: choose one of {', '.join(LOSS_REDUCTIONS)}")
    if align_tokens < 1:
        raise BalancerError(f"align_tokens={align_tokens}: at least 1")
    lengths = [len(sample.tokens) for sample in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    valid = int(starts[-1])
    tail = -valid % align_tokens
    bounds = [*starts.tolist(), valid + tail] if tail else starts.tolist()
    weights = [_token_weights(sample.labels, loss_reduction) for sample in samples]
    labels = _with_tail([sample.labels for sample in samples], tail, IGNORED_LABEL, np.int64)
    loss_weights = _with_tail(weights, tail, 0.0, np.float64)
    positions = np.concatenate([*(s.position_ids for s in samples), np.tile(np.arange(tail), (3, 1))], axis=1)
    visual_index = np.concatenate([s.visual_index + start for s, start in zip(samples, starts[:-1], strict=True)])
    return MicroBatch(
        step=step,
        microbatch=microbatch,
        tokens=torch.from_numpy(_with_tail([s.tokens for s in samples], tail, Special.PAD, np.int64)),
        labels=torch.from_numpy(labels),
        loss_weights=torch.from_numpy(loss_weights),
        position_ids=torch.from_numpy(positions.astype(np.int64)),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(*lengths, tail),
        visual_index=torch.from_numpy(visual_index.astype(np.int64)),
        patches=torch.from_numpy(np.concatenate([s.patches for s in samples])),
        grids=torch.from_numpy(np.concatenate([s.grids for s in samples]).astype(np.int64)),
        sample_ids=torch.tensor([s.sample_id for s in samples], dtype=torch.int64),
        num_valid_tokens=valid,
        num_label_tokens=int((labels != IGNORED_LABEL).sum()),
        weight_sum=float(loss_weights.sum()),
        replaced=tuple(
            Replaced(sample_id=s.sample_id, place=s.place, reason=s.replaced) for s in samples if s.replaced is not None
        ),
        num_conformed=sum(s.num_conformed for s in samples),
    )


def _token_weights(labels: np.ndarray, loss_reduction: str) -> np.ndarray:
    learned = labels != IGNORED_LABEL
    count = int(learned.sum())
    weights = np.zeros(len(labels), dtype=np.float64)
    if count:
        weights[learned] = sample_weight(count, loss_reduction) / count
    return weights


def _with_tail(parts: Sequence[np.ndarray], tail: int, value: float, dtype: type) -> np.ndarray:
    return np.concatenate([*parts, np.full(tail, value)]).astype(dtype)
