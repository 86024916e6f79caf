"""Counts to time: forward and backward nanoseconds of every sample on every stage, as int64 [n, S].

    stage 0            encoder: linear in patches, attention in sum(l^2) over full and window segments
    stages 1 .. S-1    LLM: linear in tokens, causal attention in tokens^2; the last one also holds the head

Cost is a vector of times because encoder and LLM differ in kind: a token sum calls [1024] and [512, 512] equal, and a
rank with many images equal to one with much text.

Hosts must agree to the bit, so every term is *one* IEEE multiplication of an exact integer count, rounded to an
integer, and only integers are added: no BLAS, no fused operation, no order to depend on. Price: up to half a
nanosecond of rounding per term.

The closed form counts multiply-adds as two FLOPs and ignores norms, rotary embedding and element-wise work; absolute
times follow from `flops_per_second`, which scales everything alike and therefore never changes a plan without
per-micro-batch constants.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from balancer.counts import Int64Array, StepCounts
from balancer.errors import CostModelError

# A rate that makes numbers readable, not a claim about any hardware: plans depend on ratios only.
NOMINAL_FLOPS_PER_SECOND = 1e12
_LARGEST_TERM_NS = 2.0**58


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTerms:
    """Coefficients of one stage in one direction, in nanoseconds per unit.

    Attributes:
        constant_ns: per micro-batch that runs the stage at all (launch overhead); not part of a sample's cost.
        per_patch_ns, per_token_ns, per_label_ns: linear terms.
        per_full_sq_ns, per_window_sq_ns: per squared patch of full and window attention segments.
        per_token_sq_ns: per squared LLM token of a sample (causal attention: half the pairs are already taken off).
    """

    constant_ns: float = 0.0
    per_patch_ns: float = 0.0
    per_token_ns: float = 0.0
    per_label_ns: float = 0.0
    per_full_sq_ns: float = 0.0
    per_window_sq_ns: float = 0.0
    per_token_sq_ns: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0.0):
                raise CostModelError(f"{field.name}={value}: a cost coefficient is finite and not negative")

    def scaled(self, factor: float) -> "StageTerms":
        """The same terms, each multiplied by `factor`."""
        return StageTerms(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Forward and backward terms of one stage."""

    forward: StageTerms
    backward: StageTerms


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
        _require_positive(self, optional=("num_full_layers",))
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
        _require_positive(self, optional=("head_dim",))
        if self.head_dim == 0:
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Predicted time per stage; the encoder is stage 0.

    Raises:
        CostModelError: no stages, or a predicted time beyond the range of int64 nanoseconds.
    """

    stages: tuple[StageCost, ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise CostModelError("a cost model has at least one stage")

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return len(self.stages)

    @property
    def fingerprint(self) -> str:
        """sha256 over all coefficients as little-endian doubles: equal fingerprints give equal plans."""
        digest = hashlib.sha256(b"cost model, format 1")
        for stage in self.stages:
            for terms in (stage.forward, stage.backward):
                digest.update(struct.pack("<7d", *(getattr(terms, field.name) for field in fields(terms))))
        return digest.hexdigest()

    def forward_ns(self, counts: StepCounts) -> Int64Array:
        """Forward nanoseconds, int64 [n, S], without the constants per micro-batch."""
        return self._times_ns(counts, [stage.forward for stage in self.stages])

    def backward_ns(self, counts: StepCounts) -> Int64Array:
        """Backward nanoseconds, int64 [n, S], without the constants per micro-batch."""
        return self._times_ns(counts, [stage.backward for stage in self.stages])

    def forward_constant_ns(self) -> Int64Array:
        """Constant of one forward micro-batch per stage, int64 [S]."""
        return np.array([round(stage.forward.constant_ns) for stage in self.stages], dtype=np.int64)

    def backward_constant_ns(self) -> Int64Array:
        """Constant of one backward micro-batch per stage, int64 [S]."""
        return np.array([round(stage.backward.constant_ns) for stage in self.stages], dtype=np.int64)

    def _times_ns(self, counts: StepCounts, stages: Sequence[StageTerms]) -> Int64Array:
        times = np.zeros((len(counts), len(stages)), dtype=np.int64)
        if not len(counts):
            return times
        token_sq = counts.llm_tokens * counts.llm_tokens
        for index, terms in enumerate(stages):
            for coefficient, column in (
                (terms.per_patch_ns, counts.patches),
                (terms.per_token_ns, counts.llm_tokens),
                (terms.per_label_ns, counts.label_tokens),
                (terms.per_full_sq_ns, counts.full_total_sq),
                (terms.per_window_sq_ns, counts.window_total_sq),
                (terms.per_token_sq_ns, token_sq),
            ):
                if coefficient > 0.0:
                    times[:, index] += _term_ns(coefficient, column, counts)
        return times

    @classmethod
    def from_dims(
        cls,
        encoder: EncoderDims,
        llm: LLMDims,
        *,
        llm_layers_per_stage: Sequence[int],
        flops_per_second: float = NOMINAL_FLOPS_PER_SECOND,
        backward_factor: float = 2.0,
        head_on: Literal["labels", "all"] = "labels",
    ) -> "CostModel":
        """The closed form for an encoder as stage 0 and an LLM split over the following stages.

        Args:
            llm_layers_per_stage: layers of each LLM stage, in order; their sum is the depth.
            flops_per_second: sustained rate of one rank.
            backward_factor: backward over forward time; 2 where every module is trained and nothing recomputed.
            head_on: whether the vocabulary projection runs on positions with a label or on all.

        Raises:
            CostModelError: layers that do not add up, or a rate or factor that is no positive number.
        """
        if sum(llm_layers_per_stage) != llm.depth or any(layers < 0 for layers in llm_layers_per_stage):
            raise CostModelError(
                f"llm_layers_per_stage={list(llm_layers_per_stage)} adds up to {sum(llm_layers_per_stage)}; "
                f"the LLM has {llm.depth} layers"
            )
        if not (math.isfinite(flops_per_second) and flops_per_second > 0.0):
            raise CostModelError(f"flops_per_second={flops_per_second}: measure it or leave the default")
        ns_per_flop = 1e9 / flops_per_second
        forward = [_encoder_terms(encoder, ns_per_flop)]
        last = len(llm_layers_per_stage) - 1
        for index, layers in enumerate(llm_layers_per_stage):
            forward.append(_llm_terms(llm, layers, ns_per_flop, head_on if index == last else None))
        return cls(stages=tuple(StageCost(forward=terms, backward=terms.scaled(backward_factor)) for terms in forward))


def _term_ns(coefficient: float, column: Int64Array, counts: StepCounts) -> Int64Array:
    product = column.astype(np.float64) * coefficient
    if float(product.max()) > _LARGEST_TERM_NS:
        sample = int(counts.sample_ids[int(product.argmax())])
        raise CostModelError(
            f"sample {sample} costs {float(product.max()):.3g} ns, beyond what integer nanoseconds hold; "
            "check its counts and the rate of the cost model"
        )
    return np.rint(product).astype(np.int64)


def _encoder_terms(dims: EncoderDims, ns_per_flop: float) -> StageTerms:
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


def _llm_terms(dims: LLMDims, layers: int, ns_per_flop: float, head_on: str | None) -> StageTerms:
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


def _require_positive(dims: EncoderDims | LLMDims, *, optional: tuple[str, ...]) -> None:
    for field in fields(dims):
        value = getattr(dims, field.name)
        if value < (0 if field.name in optional else 1):
            raise CostModelError(f"{field.name}={value}: a model dimension is a positive number")
