"""An encoder and an LLM by a few numbers, and the FLOPs that follow from them (`CostModel.from_dims`).

    EncoderDims --encoder_terms--> StageTerms of stage 0
    LLMDims     --llm_terms------> StageTerms of a number of its layers, the last with the head

For real models read `balancer.model_config`; this is what a test or a sketch of a model needs.
"""

from dataclasses import dataclass, fields

from balancer.cost_terms import StageTerms
from balancer.errors import CostModelError
from balancer.number_checks import is_whole

_LARGEST_DIM = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDims:
    """Shape of a vision tower.

    Attributes:
        dim, depth, mlp_dim: width, layers, SwiGLU hidden width.
        num_full_layers: layers with full attention; the others use windows.
        out_dim: width of the LLM that receives the merged patches.
        patch_dim: numbers per patch (channels * temporal * height * width).
        merge: side of the square of patches that becomes one visual token.
    """

    dim: int
    depth: int
    mlp_dim: int
    num_full_layers: int
    out_dim: int
    patch_dim: int = 1176
    merge: int = 2

    def __post_init__(self) -> None:
        _check_dims(self, optional=("num_full_layers",))
        if not 0 <= self.num_full_layers <= self.depth:
            raise CostModelError(f"num_full_layers={self.num_full_layers} of depth={self.depth} layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMDims:
    """Shape of a decoder-only LLM with grouped-query attention and SwiGLU. `head_dim` defaults to dim / num_heads."""

    dim: int
    depth: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    vocab_size: int
    head_dim: int = 0

    def __post_init__(self) -> None:
        _check_dims(self, optional=("head_dim",))
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)


def encoder_terms(dims: EncoderDims, ns_per_flop: float) -> StageTerms:
    """Per patch: embedding; per layer q, k, v, output (8 d^2) and SwiGLU (6 d m); the merger works on squares."""
    merged_dim = dims.dim * dims.merge**2
    merger = (2 * merged_dim**2 + 2 * merged_dim * dims.out_dim) // dims.merge**2
    layers = dims.depth * (8 * dims.dim**2 + 6 * dims.dim * dims.mlp_dim)
    # Scores and weighted values are 2 d FLOPs each per pair of patches.
    pair = 4 * dims.dim
    return StageTerms(
        per_patch_ns=(2 * dims.patch_dim * dims.dim + layers + merger) * ns_per_flop,
        per_full_sq_ns=dims.num_full_layers * pair * ns_per_flop,
        per_window_sq_ns=(dims.depth - dims.num_full_layers) * pair * ns_per_flop,
    )


def llm_terms(dims: LLMDims, layers: int, ns_per_flop: float, head_on: str | None) -> StageTerms:
    """Per token and layer: q, output (4 d h), k, v (4 d g), SwiGLU (6 d m); h, g: widths of all query, kv heads."""
    query_dim, kv_dim = dims.num_heads * dims.head_dim, dims.num_kv_heads * dims.head_dim
    layer = 4 * dims.dim * query_dim + 4 * dims.dim * kv_dim + 6 * dims.dim * dims.mlp_dim
    head = 2 * dims.dim * dims.vocab_size
    return StageTerms(
        per_token_ns=(layers * layer + (head if head_on == "all" else 0)) * ns_per_flop,
        per_label_ns=(head if head_on == "labels" else 0) * ns_per_flop,
        # 4 h per pair, half of the pairs under the causal mask.
        per_token_sq_ns=layers * 2 * query_dim * ns_per_flop,
    )


def _check_dims(dims: EncoderDims | LLMDims, *, optional: tuple[str, ...]) -> None:
    for field in fields(dims):
        value = getattr(dims, field.name)
        if not is_whole(value, low=0 if field.name in optional else 1, high=_LARGEST_DIM):
            raise CostModelError(f"{field.name}={str(value)[:40]}: a model dimension is a positive number")
