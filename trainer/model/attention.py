"""Attention over packed segments: nothing attends across a boundary, and no padding or dense mask is made.

    q [T, H, D], k, v [T, Hk, D], cu_seqlens [n+1]
        | segments of one length L form a group of m: [m, H, L, D]     many windows, few distinct lengths
        v
    one fused kernel call per distinct length -> out [T, H, D]

Three ways, one result:
  CPU   a custom operator (one graph node whatever the pack) on the fused CPU kernel; the backward starts from the saved
        log-sum-exp. Price: the kernel is private to torch; where it is missing or has changed, the way below is taken.
  CUDA  `varlen_attn` for bf16 and fp16.
  any   the same grouping through public SDPA and autograd: other dtypes on CUDA, and prefixes.

A segment's result does not depend on the values of other segments, bit for bit. Deterministic on CPU.

Legend: T tokens, n segments, m segments of one length, L segment length, P prefix length, H heads, Hk key/value heads,
D head size.
"""

# ruff: noqa: PLR0917  (operators and kernels take tensors by position)

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trainer.errors import ConfigError

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_FLASH_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_CPU_DTYPES = frozenset({torch.float64, torch.float32, torch.bfloat16})
_VARLEN_DTYPES = frozenset({torch.bfloat16, torch.float16})


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    max_seqlen: int | None = None,
    prefix_kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v within each segment.

    Args:
        q: [T, H, D].
        k, v: [T, Hk, D]; query head h reads key/value head h // (H / Hk).
        cu_seqlens: int32 [n+1] segment bounds, from 0 to T, best on the CPU (elsewhere reading it synchronises). Empty
            segments are legal.
        causal: token i of a segment sees tokens 0..i of it.
        scale: default D ** -0.5.
        max_seqlen: the longest segment if known.
        prefix_kv: keys and values [P, Hk, D] that every token of every segment sees before its own segment
            (a shared beginning of several branches; positions are already in the keys).

    Returns:
        [T, H, D] in the dtype of q.

    Raises:
        ConfigError: shapes, dtypes or bounds that do not fit together.
    """
    bounds = _checked_bounds(q, k, v, cu_seqlens)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.shape[0] == 0:
        return q + 0 * (k.sum() + v.sum())  # empty, and the graph stays alive
    if prefix_kv is not None and prefix_kv[0].shape[0]:
        return _with_prefix(q, k, v, prefix_kv, bounds, causal, scale)
    if q.device.type == "cpu" and q.dtype in _CPU_DTYPES and cpu_kernel_works():
        out: Tensor = _packed_cpu(q, k, v, cu_seqlens.to("cpu", torch.int32), causal, scale)[0]
        return out
    if q.device.type == "cuda" and q.dtype in _VARLEN_DTYPES:
        return _varlen(q, k, v, cu_seqlens, bounds, causal, scale, max_seqlen)
    return _grouped_sdpa(q, k, v, bounds, causal, scale)


def _checked_bounds(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[int, ...]:
    if q.dim() != 3 or k.shape != v.shape or k.dim() != 3 or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ConfigError(
            f"packed attention needs q [T, H, D] and k, v [T, Hk, D]; got {[*q.shape]}, {[*k.shape]}, {[*v.shape]}"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ConfigError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads evenly")
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"q, k and v have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    bounds = tuple(cu_seqlens.tolist())
    if not bounds or bounds[0] != 0 or bounds[-1] != q.shape[0] or any(a > b for a, b in pairwise(bounds)):
        shown = f"{[*bounds[:4]]}...{[*bounds[-2:]]}" if len(bounds) > 8 else [*bounds]
        raise ConfigError(f"cu_seqlens {shown} must rise from 0 to the {q.shape[0]} tokens of the pack")
    return bounds


class _Group(NamedTuple):
    """Segments of one length.

    Attributes:
        length: L > 0.
        num_segments: m.
        start: first token of the first segment.
        index: int64 [m * L] tokens, or None if the segments lie side by side from `start`.
    """

    length: int
    num_segments: int
    start: int
    index: Tensor | None

    def take(self, x: Tensor) -> Tensor:
        """[T, h, D] -> [m, h, L, D], a view where possible."""
        if self.index is None:
            rows = x.narrow(0, self.start, self.num_segments * self.length)
        else:
            rows = x.index_select(0, self.index.to(x.device))
        # [m * L, h, D] -> [m, L, h, D] -> [m, h, L, D]
        return rows.unflatten(0, (self.num_segments, self.length)).transpose(1, 2)

    def put(self, target: Tensor, value: Tensor) -> None:
        """Write [m, h, L, ...] into target [T, h, ...]."""
        rows = value.transpose(1, 2).flatten(0, 1)
        if self.index is None:
            target.narrow(0, self.start, rows.shape[0]).copy_(rows)
        else:
            target.index_copy_(0, self.index, rows)


@lru_cache(maxsize=16)
def _groups(bounds: tuple[int, ...]) -> tuple[_Group, ...]:
    """Segments grouped by length, lengths ascending; empty segments vanish. Cached: layers of one pack share it."""
    starts = np.asarray(bounds[:-1], dtype=np.int64)
    lengths = np.diff(np.asarray(bounds, dtype=np.int64))
    groups = []
    for length in np.unique(lengths[lengths > 0]).tolist():
        members = starts[lengths == length]
        if np.all(np.diff(members) == length):
            groups.append(_Group(length, len(members), int(members[0]), None))
        else:
            index = (members[:, None] + np.arange(length)).reshape(-1)
            groups.append(_Group(length, len(members), int(members[0]), torch.from_numpy(index)))
    return tuple(groups)


def _expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """[m, Hk, L, D] -> [m, H, L, D]: each key/value head repeated for the query heads that share it."""
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _sum_heads(gradient: Tensor, num_kv_heads: int) -> Tensor:
    """Transpose of `_expand_heads`: [m, H, L, D] -> [m, Hk, L, D]."""
    if gradient.shape[1] == num_kv_heads:
        return gradient
    return gradient.unflatten(1, (num_kv_heads, -1)).sum(2)


@torch.library.custom_op("mllm_balancer::packed_attention", mutates_args=())
def _packed_cpu(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [T, H, D], log-sum-exp [T, H])."""
    out, logsumexp = _empty_results(q)
    kernel = getattr(torch.ops.aten, _FLASH)
    for group in _groups(tuple(cu_seqlens.tolist())):
        keys, values = (_expand_heads(group.take(x), q.shape[1]) for x in (k, v))
        part, part_lse = kernel(group.take(q), keys, values, 0.0, causal, scale=scale)
        group.put(out, part)
        group.put(logsumexp, part_lse)
    return out, logsumexp


@_packed_cpu.register_fake
def _packed_cpu_fake(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return _empty_results(q)


def _empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(q.shape[:2], dtype=wide, device=q.device)


@torch.library.custom_op("mllm_balancer::packed_attention_backward", mutates_args=())
def _packed_cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [T, H, D] and k, v [T, Hk, D]."""
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    kernel = getattr(torch.ops.aten, _FLASH_BACKWARD)
    for group in _groups(tuple(cu_seqlens.tolist())):
        keys, values = (_expand_heads(group.take(x), q.shape[1]) for x in (k, v))
        lse = group.take(logsumexp[..., None]).squeeze(-1)  # [m, H, L]
        part_q, part_k, part_v = kernel(
            group.take(grad_out), group.take(q), keys, values, group.take(out), lse, 0.0, causal, scale=scale
        )
        group.put(grad_q, part_q)
        group.put(grad_k, _sum_heads(part_k, k.shape[1]))
        group.put(grad_v, _sum_heads(part_v, v.shape[1]))
    return grad_q, grad_k, grad_v


@_packed_cpu_backward.register_fake
def _packed_cpu_backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(k.shape, dtype=k.dtype, device=k.device),
        torch.empty(v.shape, dtype=v.dtype, device=v.device),
    )


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.causal, ctx.scale = inputs  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad_out: Tensor, _: Tensor) -> tuple:
    q, k, v, out, logsumexp, cu_seqlens = ctx.saved_tensors  # type: ignore[attr-defined]
    causal, scale = ctx.causal, ctx.scale  # type: ignore[attr-defined]
    grads = _packed_cpu_backward(grad_out, q, k, v, out, logsumexp, cu_seqlens, causal, scale)
    return (*grads, None, None, None)


_packed_cpu.register_autograd(_backward, setup_context=_save)


@lru_cache(maxsize=1)
def cpu_kernel_works() -> bool:
    """Whether torch's fused CPU kernel is there and answers as this module expects (tried once, on four numbers)."""
    try:
        x = torch.ones(1, 1, 2, 2)
        out, logsumexp = getattr(torch.ops.aten, _FLASH)(x, x, x, 0.0, True, scale=1.0)
        grads = getattr(torch.ops.aten, _FLASH_BACKWARD)(x, x, x, x, out, logsumexp, 0.0, True, scale=1.0)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    # Value rows are equal, so attention returns them; each weight column sums to the gradient it received.
    return bool(torch.equal(out, x) and torch.equal(grads[2], torch.tensor([[[[1.5, 1.5], [0.5, 0.5]]]])))


def _grouped_sdpa(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], causal: bool, scale: float) -> Tensor:
    """The same grouping with public functions only; autograd keeps what it needs."""
    out = torch.zeros_like(q)
    for group in _groups(bounds):
        keys, values = (_expand_heads(group.take(x), q.shape[1]) for x in (k, v))
        part = scaled_dot_product_attention(group.take(q), keys, values, is_causal=causal, scale=scale)
        rows = part.transpose(1, 2).flatten(0, 1)
        if group.index is None:
            out = torch.slice_scatter(out, rows, 0, group.start, group.start + rows.shape[0])
        else:
            out = out.index_copy(0, group.index.to(out.device), rows)
    return out


def _with_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_kv: tuple[Tensor, Tensor],
    bounds: tuple[int, ...],
    causal: bool,
    scale: float,
) -> Tensor:
    """One call per segment on [prefix, segment]; the mask is dense, [L, P + L]. Right first; fast later."""
    prefix_k, prefix_v = prefix_kv
    if prefix_k.shape != prefix_v.shape or prefix_k.shape[1:] != k.shape[1:]:
        raise ConfigError(
            f"prefix_kv must be [P, {k.shape[1]}, {k.shape[2]}] twice; got {[*prefix_k.shape]}, {[*prefix_v.shape]}"
        )
    num_prefix, num_heads = prefix_k.shape[0], q.shape[1]
    parts = []
    for start, stop in pairwise(bounds):
        # [P + L, Hk, D] -> [1, H, P + L, D]
        keys, values = (
            _expand_heads(torch.cat([head, tail[start:stop]]).transpose(0, 1)[None], num_heads)
            for head, tail in ((prefix_k, k), (prefix_v, v))
        )
        length = stop - start
        mask = None
        if causal:
            mask = torch.ones(length, num_prefix + length, dtype=torch.bool, device=q.device).tril(num_prefix)
        queries = q[start:stop].transpose(0, 1)[None]
        parts.append(
            scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)[0].transpose(0, 1)
        )
    return torch.cat(parts)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    bounds: tuple[int, ...],
    causal: bool,
    scale: float,
    max_seqlen: int | None,
) -> Tensor:
    """torch's variable-length kernel (CUDA only, bf16 or fp16)."""
    from torch.nn.attention.varlen import varlen_attn  # absent before torch 2.10

    longest = max(b - a for a, b in pairwise(bounds)) if max_seqlen is None else max_seqlen
    cu = cu_seqlens.to(q.device, torch.int32)
    out = varlen_attn(
        q,
        k,
        v,
        cu,
        cu,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0) if causal else (-1, -1),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    if not isinstance(out, Tensor):
        raise ConfigError("varlen_attn returned more than the output: an unknown torch; use float32 or the CPU")
    return out
