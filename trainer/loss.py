"""Weighted cross-entropy as a sum, so micro-batches, ranks and layouts add up to one number.

    loss of a step = sum over all label tokens of w * ce / sum of w        the division is the caller's, once, globally

Logits exist for labelled rows only, `chunk` rows at a time; the backward makes them again from the saved log-sum-exp.
Price: one more product with the head in the backward. Sums are float64 in a fixed order. Without any label the sum is
an exact 0 whose graph is alive and whose gradients are zero.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from trainer.errors import TrainerError
from trainer.model.rope import wide_dtype

IGNORED_LABEL = -100
DEFAULT_CHUNK = 1024


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """sum(w * ce) from logits that are already there.

    Args:
        logits: [T, V].
        labels: int64 [T], -100 where nothing is learned.
        weights: [T], read at labelled rows only.

    Returns:
        float64 scalar.

    Raises:
        TrainerError: lengths that differ.
    """
    _check(logits, labels, weights)
    rows = (labels != IGNORED_LABEL).nonzero().squeeze(1)
    chosen = logits.index_select(0, rows)
    nll = cross_entropy(chosen.to(wide_dtype(chosen.dtype)), labels[rows], reduction="none")
    return (nll.double() * weights[rows].double()).sum()


def head_cross_entropy_sum(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, *, chunk: int = DEFAULT_CHUNK
) -> Tensor:
    """sum(w * ce) of logits hidden @ head_weight.T, without keeping logits.

    Args:
        hidden: [T, dim].
        head_weight: [V, dim].
        labels: int64 [T], -100 where nothing is learned.
        weights: [T], read at labelled rows only.
        chunk: rows whose logits exist at one time.

    Returns:
        float64 scalar; differentiable in `hidden` and `head_weight`.

    Raises:
        TrainerError: lengths that differ, or a chunk below 1.
    """
    _check(hidden, labels, weights)
    if chunk < 1:
        raise TrainerError(f"chunk={chunk}: at least 1 row")
    rows = (labels != IGNORED_LABEL).nonzero().squeeze(1)
    total: Tensor = _HeadCrossEntropy.apply(
        hidden.index_select(0, rows), head_weight, labels[rows], weights[rows].double(), chunk
    )
    return total


def token_nll(hidden: Tensor, head_weight: Tensor, labels: Tensor, *, chunk: int = DEFAULT_CHUNK) -> Tensor:
    """-log p of every label, for evaluation: float64 [T], 0 where the label is ignored. No gradient."""
    _check(hidden, labels, labels)
    rows = (labels != IGNORED_LABEL).nonzero().squeeze(1)
    out = torch.zeros(labels.shape, dtype=torch.float64, device=hidden.device)
    with torch.no_grad():
        nll, _ = _row_losses(hidden.index_select(0, rows), head_weight, labels[rows], chunk)
        out[rows] = nll.double()
    return out


class _HeadCrossEntropy(torch.autograd.Function):
    """d(sum)/d(logits) = w * (softmax - one-hot), chunk by chunk."""

    @staticmethod
    def forward(  # noqa: PLR0917  (autograd passes by position)
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, chunk: int
    ) -> Tensor:
        nll, logsumexp = _row_losses(hidden, head, labels, chunk)
        ctx.save_for_backward(hidden, head, labels, weights, logsumexp)
        ctx.chunk = chunk
        return (nll.double() * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, head, labels, weights, logsumexp = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=logsumexp.dtype)
        scales = (weights * grad).to(logsumexp.dtype)
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            slope = (_logits(hidden[part], head) - logsumexp[part, None]).exp_()  # [rows, V], softmax
            slope.scatter_add_(1, labels[part, None], slope.new_full((slope.shape[0], 1), -1.0))
            slope = slope.mul_(scales[part, None]).to(hidden.dtype)
            grad_hidden[part] = slope @ head.to(hidden.dtype)
            grad_head += slope.T @ hidden[part]
        return grad_hidden, grad_head.to(head.dtype), None, None, None


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    logits = hidden @ head.to(hidden.dtype).T
    return logits.to(wide_dtype(logits.dtype))


def _row_losses(hidden: Tensor, head: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """(-log p [N], log-sum-exp [N]) of N labelled rows."""
    nll = torch.empty(labels.shape, dtype=wide_dtype(hidden.dtype), device=hidden.device)
    logsumexp = torch.empty_like(nll)
    for start in range(0, labels.shape[0], chunk):
        part = slice(start, start + chunk)
        logits = _logits(hidden[part], head)
        logsumexp[part] = logits.logsumexp(-1)
        nll[part] = logsumexp[part] - logits.gather(1, labels[part, None]).squeeze(1)
    return nll, logsumexp


def _check(rows: Tensor, labels: Tensor, weights: Tensor) -> None:
    if not rows.shape[0] == labels.shape[0] == weights.shape[0]:
        raise TrainerError(f"{rows.shape[0]} rows, {labels.shape[0]} labels and {weights.shape[0]} weights do not fit")
