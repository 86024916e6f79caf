"""The vision tower: native-resolution patches of many images in one row, window attention, few full layers, a merger.

    patches [P, 1176], grids [n, 3]        order: item, time, merge block (row, column), 2x2 inside the block
        | patch_embed                                                                   [P, dim]
        | window order: blocks of one 112 px window lie side by side                    [P, dim]
        | blocks: attention within a window, or within a temporal slice (full layers)   [P, dim]
        | merger: norm, 2x2 patches -> one row, MLP                                     [V, out_dim], V = P / 4
        v original order
    visual embeddings [V, out_dim]

No layer attends across temporal slices or items. Windows at the right and bottom border are smaller, never padded.
Parameter names follow Qwen2.5-VL's `visual.*`; the patch embedding is stored as the matrix [dim, 1176] that a
convolution with stride = kernel is.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from trainer.errors import ConfigError
from trainer.model.attention import packed_attention
from trainer.model.rope import RMSNorm, rotate, vision_angles

NUM_CHANNELS = 3
_NORM_EPS = 1e-6
_THETA = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Shape of the vision tower.

    Attributes:
        dim, depth, num_heads, mlp_dim: width, layers, heads, hidden width of the gated MLP.
        patch_px, temporal_patch: a patch is temporal_patch frames of patch_px x patch_px pixels.
        merge: merge x merge patches become one visual token.
        window_px: side of an attention window.
        full_attention_layers: layers whose segments are whole temporal slices.
        out_dim: width of the LLM.

    Raises:
        ConfigError: sizes that do not divide, or a full layer that does not exist.
    """

    dim: int
    depth: int
    num_heads: int
    mlp_dim: int
    out_dim: int
    full_attention_layers: tuple[int, ...]
    patch_px: int = 14
    temporal_patch: int = 2
    merge: int = 2
    window_px: int = 112

    def __post_init__(self) -> None:
        for name in ("dim", "depth", "num_heads", "mlp_dim", "out_dim", "patch_px", "temporal_patch", "merge"):
            if getattr(self, name) < 1:
                raise ConfigError(f"vision {name}={getattr(self, name)}: at least 1")
        if self.dim % (4 * self.num_heads):
            raise ConfigError(
                f"vision dim={self.dim} must be a multiple of 4 * num_heads={4 * self.num_heads} (h, w pairs)"
            )
        if self.window_px < 1 or self.window_px % (self.patch_px * self.merge):
            raise ConfigError(
                f"window_px={self.window_px} must be a multiple of patch_px * merge = {self.patch_px * self.merge}"
            )
        if not all(0 <= layer < self.depth for layer in self.full_attention_layers):
            raise ConfigError(f"full_attention_layers={self.full_attention_layers}: layers are 0..{self.depth - 1}")

    @property
    def patch_values(self) -> int:
        """Numbers in one patch: channels x frames x height x width."""
        return NUM_CHANNELS * self.temporal_patch * self.patch_px**2

    @property
    def window_cells(self) -> int:
        """Side of a window in merge blocks."""
        return self.window_px // (self.patch_px * self.merge)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOrder:
    """How the patches of a call are ordered and cut; depends on the grids alone.

    Attributes:
        blocks: int64 [V]: merge block at each place of the window order.
        inverse: int64 [V]: place of each merge block in the window order.
        positions: int64 [P, 2]: (h, w) of each patch, in window order.
        full, window: int32 segment bounds in patches.
    """

    blocks: Tensor
    inverse: Tensor
    positions: Tensor
    full: Tensor
    window: Tensor


@lru_cache(maxsize=32)
def vision_order(grids: tuple[tuple[int, int, int], ...], *, merge: int, window_cells: int) -> VisionOrder:
    """Window order of the items in `grids` = ((t, h, w) in patches, ...).

    Raises:
        ConfigError: a grid that is empty or not divisible by `merge`.
    """
    blocks, positions, windows, slices, offset = [], [], [], [], 0
    for t, h, w in grids:
        if min(t, h, w) < 1 or h % merge or w % merge:
            raise ConfigError(f"grid {(t, h, w)}: h and w must be positive multiples of merge={merge}, t at least 1")
        order, lengths = _window_order(t, h // merge, w // merge, window_cells)
        blocks.append(order + offset)
        positions.append(_patch_positions(h, w, merge)[order % (h * w // merge**2)].reshape(-1, 2))
        windows.append(lengths * merge**2)
        slices.append(np.full(t, h * w, dtype=np.int64))
        offset += len(order)
    all_blocks = np.concatenate(blocks)
    return VisionOrder(
        blocks=torch.from_numpy(all_blocks),
        inverse=torch.from_numpy(np.argsort(all_blocks, kind="stable")),
        positions=torch.from_numpy(np.concatenate(positions)),
        full=_bounds(slices),
        window=_bounds(windows),
    )


def _window_order(t: int, rows: int, columns: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """(order of the t * rows * columns blocks by time, window, row, column; blocks in each window)."""
    time, row, column = np.indices((t, rows, columns)).reshape(3, -1)
    across, down = -(-columns // side), -(-rows // side)
    window = (time * down + row // side) * across + column // side
    return np.argsort(window, kind="stable"), np.bincount(window)


def _patch_positions(h: int, w: int, merge: int) -> np.ndarray:
    """[blocks of a slice, merge * merge, 2]: (h, w) of the patches of each merge block."""
    # [2, h, w] -> [2, h/m, m, w/m, m] -> [h/m, w/m, m, m, 2]
    grid = np.indices((h, w)).reshape(2, h // merge, merge, w // merge, merge)
    return grid.transpose(1, 3, 2, 4, 0).reshape(-1, merge * merge, 2)


def _bounds(lengths: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int32))


class VisionAttention(nn.Module):
    """Attention of patches within the given segments."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, cu_seqlens: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[P, dim] -> [P, dim]."""
        # [P, 3 * dim] -> three of [P, H, D]
        q, k, v = self.qkv(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        out = packed_attention(rotate(q, angles), rotate(k, angles), v, cu_seqlens, causal=False)
        return self.proj(out.flatten(1))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=bias)
        self.up_proj = nn.Linear(dim, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, dim] -> [T, dim]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.dim, eps=_NORM_EPS)
        self.norm2 = RMSNorm(config.dim, eps=_NORM_EPS)
        self.attn = VisionAttention(config)
        self.mlp = GatedMLP(config.dim, config.mlp_dim, bias=True)

    def forward(self, x: Tensor, cu_seqlens: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[P, dim] -> [P, dim]."""
        x = x + self.attn(self.norm1(x), cu_seqlens, angles)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """Linear map of a patch."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.patch_values, config.dim, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[P, patch_values] -> [P, dim]."""
        return self.proj(patches.to(self.proj.weight.dtype))


class PatchMerger(nn.Module):
    """Norm, merge x merge neighbours side by side, two-layer MLP to the width of the LLM."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.width = config.dim * config.merge**2
        self.ln_q = RMSNorm(config.dim, eps=_NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(self.width, self.width), nn.GELU(), nn.Linear(self.width, config.out_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[P, dim] -> [V, out_dim]."""
        return self.mlp(self.ln_q(x).view(-1, self.width))


class VisionTower(nn.Module):
    """Patches of any number of images and videos -> visual embeddings in the order of the input."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config)

    def forward(self, patches: Tensor, grids: Tensor) -> Tensor:
        """Encode.

        Args:
            patches: [P, patch_values], P > 0.
            grids: int64 [n, 3]: (t, h, w) in patches, best on the CPU; sum(t * h * w) = P.

        Returns:
            [P / merge**2, out_dim].

        Raises:
            ConfigError: the grids do not describe the patches.
        """
        config = self.config
        shapes = tuple((t, h, w) for t, h, w in grids.tolist())
        described = sum(t * h * w for t, h, w in shapes)
        if not shapes or described != patches.shape[0] or patches.shape[-1] != config.patch_values:
            raise ConfigError(
                f"patches {[*patches.shape]} do not fit {len(shapes)} grids of {described} patches "
                f"of {config.patch_values} values"
            )
        order = vision_order(shapes, merge=config.merge, window_cells=config.window_cells)
        x = self.patch_embed(patches)
        # [P, dim] -> [V, merge**2, dim], blocks reordered -> [P, dim]
        x = x.unflatten(0, (-1, config.merge**2)).index_select(0, order.blocks.to(x.device)).flatten(0, 1)
        angles = vision_angles(order.positions, config.dim // config.num_heads, theta=_THETA, like=x)
        for layer, block in enumerate(self.blocks):
            x = block(x, order.full if layer in config.full_attention_layers else order.window, angles)
        return self.merger(x).index_select(0, order.inverse.to(x.device))
