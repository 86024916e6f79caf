"""The samples of one micro-batch put one behind the other, in numpy: what a loader worker sends to the trainer.

    LoadedSample (tokens [t], labels [t], position_ids [3, t], patches [p, d], grids [k, 3])   one per sample
        | pack_samples: concatenate in slot order; positions were made per sample, so nothing is offset;
        v               patches that lie one behind the other already are not copied
    PackedCell   (tokens [T], labels [T], position_ids [3, T], cu_seqlens [n+1], patches [P, d], grids [K, 3])

`balancer.batch.MicroBatch` is the same with torch tensors over the same memory. Without torch a worker starts in a
third of the time and holds about 120 MB less. Price: a tail added by `align_tokens` is a zero-loss segment of its own;
it is counted as executed, not as useful.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancer.errors import BalancerError
from balancer.records import Replaced
from balancer.room import joined
from balancer.weights import LOSS_REDUCTIONS, sample_weight
from dataloaders.chat import IGNORED_LABEL
from dataloaders.sample import LoadedSample
from dataloaders.tokenizer import Special


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedCell:
    """Samples packed for one forward pass; fields and shapes are those of `balancer.batch.MicroBatch`.

    Attributes:
        tokens, labels: int64 [T]. loss_weights: float64 [T]. position_ids: int64 [3, T].
        cu_seqlens: int32 [num_segments + 1]. visual_index: int64 [V].
        patches: float32 [P, d]. grids: int64 [K, 3]. sample_ids: int64 [n].
    """

    step: int
    microbatch_index: int
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_weights: NDArray[np.float64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    visual_index: NDArray[np.int64]
    patches: NDArray[np.float32]
    grids: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    num_valid_tokens: int
    num_label_tokens: int
    weight_sum: float
    replaced: tuple[Replaced, ...] = ()
    num_conformed: int = 0


def pack_samples(
    samples: Sequence[LoadedSample],
    *,
    step: int = 0,
    microbatch_index: int = 0,
    loss_reduction: str = "token_mean",
    align_tokens: int = 1,
) -> PackedCell:
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
    return PackedCell(
        step=step,
        microbatch_index=microbatch_index,
        tokens=_with_tail([s.tokens for s in samples], tail, Special.PAD, np.int64),
        labels=labels,
        loss_weights=loss_weights,
        position_ids=positions.astype(np.int64, copy=False),
        cu_seqlens=np.array(bounds, dtype=np.int32),
        max_seqlen=max(*lengths, tail),
        visual_index=visual_index.astype(np.int64, copy=False),
        patches=joined([s.patches for s in samples]),
        grids=np.concatenate([s.grids for s in samples]).astype(np.int64, copy=False),
        sample_ids=np.array([s.sample_id for s in samples], dtype=np.int64),
        num_valid_tokens=valid,
        num_label_tokens=int((labels != IGNORED_LABEL).sum()),
        weight_sum=float(loss_weights.sum()),
        replaced=tuple(
            Replaced(sample_id=s.sample_id, place=s.place, reason=s.replaced) for s in samples if s.replaced is not None
        ),
        num_conformed=sum(s.num_conformed for s in samples),
    )


def _token_weights(labels: NDArray[np.int32], loss_reduction: str) -> NDArray[np.float64]:
    learned = labels != IGNORED_LABEL
    count = int(learned.sum())
    weights = np.zeros(len(labels), dtype=np.float64)
    if count:
        weights[learned] = sample_weight(count, loss_reduction) / count
    return weights


def _with_tail(parts: Sequence[np.ndarray], tail: int, value: float, dtype: type) -> np.ndarray:
    return np.concatenate([*parts, np.full(tail, value)]).astype(dtype)
