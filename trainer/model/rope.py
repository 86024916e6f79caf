"""Rotary positions: two axes (h, w) for patches, three sections (t, h, w) for the LLM; and the RMS norm beside it.

    angles [T, D/2]  =  position of the axis that owns the frequency * base ** (-2i / d)
    (x1, x2) = halves of a head;   out = (x1 cos - x2 sin, x2 cos + x1 sin)

Angles are made in float32 (float64 for a float64 model), whatever the compute dtype, since bf16 cannot hold a position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics and angles of a tensor of `dtype`: float64 stays, everything else is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _inverse_frequencies(size: int, theta: float, like: Tensor) -> Tensor:
    """[size / 2]: theta ** (-2i / size) (RoFormer, eq. 15)."""
    exponents = torch.arange(0, size, 2, dtype=wide_dtype(like.dtype), device=like.device) / size
    return 1.0 / (theta**exponents)


def vision_angles(positions: Tensor, head_dim: int, *, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation of patches by row and column.

    Args:
        positions: int64 [P, 2]: (h, w) of each patch.
        head_dim: D, a multiple of 4: D/4 frequencies per axis.
        like: gives device and precision.

    Returns:
        cos and sin [P, D/2].
    """
    inverse = _inverse_frequencies(head_dim // 2, theta, like)
    # [P, 2, 1] * [D/4] -> [P, 2, D/4] -> [P, D/2]
    angles = (positions.to(like.device, inverse.dtype)[..., None] * inverse).flatten(1)
    return angles.cos(), angles.sin()


def mrope_angles(
    position_ids: Tensor, head_dim: int, *, theta: float, sections: Sequence[int], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotation of LLM tokens by time, row and column (Qwen2-VL, multimodal rotary position embedding).

    Args:
        position_ids: int64 [3, T]: (t, h, w).
        sections: how many of the D/2 frequencies each axis owns, lowest first; they add up to D/2.
        like: gives device and precision.

    Returns:
        cos and sin [T, D/2].
    """
    inverse = _inverse_frequencies(head_dim, theta, like)
    positions = position_ids.to(like.device, inverse.dtype)
    owned = zip(positions, inverse.split([*sections]), strict=True)
    angles = torch.cat([axis[:, None] * frequencies for axis, frequencies in owned], dim=-1)
    return angles.cos(), angles.sin()


class _Rotate(torch.autograd.Function):
    """The backward of a rotation is the opposite rotation, so only the angles are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    one, two = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=one).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=two).addcmul_(first, sin)
    return out.to(x.dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads x [T, ..., D] by (cos, sin), each [T, D/2]; the angles get no gradient."""
    shape = (x.shape[0], *(1,) * (x.dim() - 2), x.shape[-1] // 2)
    cos, sin = (part.view(shape) for part in angles)
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated


class _Normalise(torch.autograd.Function):
    """x / rms(x) * weight with few passes over memory; keeps x and 1 / rms.

    With y = x / rms and h = grad * weight: dx = (h - y * mean(h * y)) / rms, dweight = sum(grad * y).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, unit = grad.to(scale.dtype), x * scale
        product = wide * unit
        grad_weight = product.flatten(0, -2).sum(0)
        slope = product.mul_(weight).mean(-1, keepdim=True)
        grad_x = torch.mul(wide, weight, out=product).sub_(unit.mul_(slope)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last axis; statistics in `wide_dtype`."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., dim] in the dtype of x."""
        out: Tensor = _Normalise.apply(x, self.weight, self.eps)
        return out
