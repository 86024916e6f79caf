"""Counts to time and memory: nanoseconds and bytes of every sample on every stage, as int64 [n, S].

    stage 0            encoder: patches, visual tokens, attention in sum(l^2) over full and window segments
    stages 1 .. S-1    LLM: tokens, causal attention in tokens^2, all or a window; the last one also holds the head
    (last stage)       generator, where the layout has one

    from_config    closed form of a real model on a layout         balancer.flops, .activation_memory, .hardware
    fit            measured acts                                   balancer.calibration
    from_dims      closed form of two towers by a few numbers      here
    from_json      a stored model; equal fingerprints give equal plans

Cost is a vector of times because encoder and LLM differ in kind: a token sum calls [1024] and [512, 512] equal, and a
rank with many images equal to one with much text.

Hosts must agree to the bit, so every term is *one* IEEE multiplication of an exact integer count, rounded to an
integer, and only integers are added (`balancer.cost_terms`). Price: up to half a nanosecond of rounding per term.
Closed forms count multiply-adds as two FLOPs and ignore norms, rotary embedding and element-wise work; absolute times
follow from a rate, which scales everything alike and never changes a plan without per-micro-batch constants.
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from balancer.cost_terms import (
    COEFFICIENTS,
    StageCost,
    StageMemory,
    StageTerms,
    item_columns,
    sample_columns,
    stage_bytes,
    times_ns,
)
from balancer.counts import Int64Array, StepCounts
from balancer.errors import CostModelError
from balancer.flops import HeadOn, TrainOptions, module_names
from balancer.hardware import NOMINAL, Efficiency, Hardware
from balancer.layout import ParallelSpec
from balancer.model_shape import ModelShape
from balancer.stage_costs import NOMINAL_FLOPS_PER_SECOND, stage_costs

if TYPE_CHECKING:
    from balancer.observations import Observations

__all__ = ["CostModel", "EncoderDims", "LLMDims", "StageCost", "StageMemory", "StageTerms"]

FORMAT_VERSION = 2


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
    """Predicted time and memory per stage, in chain order; with an encoder, it is stage 0.

    Attributes:
        stages: terms per stage.
        memory: modelled activation bytes per stage; None where they are not known.
        absolute: whether times are meant in real nanoseconds of known hardware; otherwise only their ratios count.
        note: what a reader must know (an unknown rate, an approximation); empty if nothing.
        source: where the coefficients come from.

    Raises:
        CostModelError: no stages, memory for another number of stages, or a prediction beyond the range of int64.
    """

    stages: tuple[StageCost, ...]
    memory: tuple[StageMemory, ...] | None = None
    absolute: bool = False
    note: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.stages:
            raise CostModelError("a cost model has at least one stage")
        if self.memory is not None and len(self.memory) != len(self.stages):
            raise CostModelError(f"memory of {len(self.memory)} stages for a cost model of {len(self.stages)}")

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return len(self.stages)

    @property
    def fingerprint(self) -> str:
        """sha256 over all coefficients, little-endian: equal fingerprints give equal plans. Texts do not count."""
        digest = hashlib.sha256(b"cost model, format 2")
        for stage in self.stages:
            for terms in (stage.forward, stage.backward, stage.weight):
                values = [getattr(terms, name) for name in COEFFICIENTS]
                digest.update(struct.pack(f"<{len(values)}dq", *values, terms.causal_window))
        for memory in self.memory or ():
            values = [getattr(memory, field.name) for field in fields(memory)]
            digest.update(b"memory" + struct.pack(f"<{len(values)}q", *values))
        return digest.hexdigest()

    def forward_ns(self, counts: StepCounts) -> Int64Array:
        """Forward nanoseconds, int64 [n, S], without the constants per micro-batch."""
        return times_ns([stage.forward for stage in self.stages], sample_columns(counts), counts.sample_ids)

    def backward_ns(self, counts: StepCounts) -> Int64Array:
        """Backward nanoseconds (input and weight gradients), int64 [n, S], without the constants per micro-batch."""
        return times_ns([stage.backward for stage in self.stages], sample_columns(counts), counts.sample_ids)

    def weight_ns(self, counts: StepCounts) -> Int64Array:
        """The part of `backward_ns` that makes weight gradients, int64 [n, S]; never above it."""
        return times_ns([stage.weight for stage in self.stages], sample_columns(counts), counts.sample_ids)

    def forward_constant_ns(self) -> Int64Array:
        """Constant of one forward micro-batch per stage, int64 [S]."""
        return np.array([round(stage.forward.constant_ns) for stage in self.stages], dtype=np.int64)

    def backward_constant_ns(self) -> Int64Array:
        """Constant of one backward micro-batch per stage, int64 [S]."""
        return np.array([round(stage.backward.constant_ns) for stage in self.stages], dtype=np.int64)

    def weight_constant_ns(self) -> Int64Array:
        """Weight-gradient part of `backward_constant_ns`, int64 [S]."""
        return np.array([round(stage.weight.constant_ns) for stage in self.stages], dtype=np.int64)

    def item_forward_ns(self, counts: StepCounts) -> Int64Array:
        """Forward nanoseconds of every media item on stage 0, int64 [k]; a sample's items add up to its share of stage
        0 that comes from media, up to half a nanosecond per term and item."""
        return self._item_ns(counts, self.stages[0].forward)

    def item_backward_ns(self, counts: StepCounts) -> Int64Array:
        """Backward nanoseconds of every media item on stage 0, int64 [k]."""
        return self._item_ns(counts, self.stages[0].backward)

    def activation_bytes(self, counts: StepCounts) -> Int64Array:
        """Modelled bytes that a sample keeps on each stage, int64 [n, S]; [n, 0] where `memory` is not known.

        A micro-batch holds the sum over its samples plus `activation_constant_bytes`.
        """
        return stage_bytes(self.memory or (), sample_columns(counts), counts.sample_ids)

    def activation_constant_bytes(self) -> Int64Array:
        """Bytes of a micro-batch that do not depend on its samples, int64 [S]; [0] where `memory` is not known."""
        return np.array([memory.constant_bytes for memory in self.memory or ()], dtype=np.int64)

    def to_json(self) -> str:
        """Text with sorted keys; `from_json` reads the same coefficients to the bit."""
        stages = [
            {name: _changed(getattr(stage, name)) for name in ("forward", "backward", "weight")}
            for stage in self.stages
        ]
        memory = None if self.memory is None else [_changed(stage) for stage in self.memory]
        content = {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint, "stages": stages}
        texts = {"absolute": self.absolute, "note": self.note, "source": self.source}
        return json.dumps({**content, **texts, "memory": memory}, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """Read `to_json`'s text.

        Raises:
            CostModelError: not JSON, another format version, fields that do not fit, or coefficients that do not
                match the fingerprint.
        """
        try:
            data = json.loads(text)
            version, fingerprint = data.pop("format_version"), data.pop("fingerprint")
            if version != FORMAT_VERSION:
                raise CostModelError(f"cost model of format {version}; this version reads {FORMAT_VERSION}")
            stages = tuple(
                StageCost(**{name: StageTerms(**_numbers(terms)) for name, terms in stage.items()})
                for stage in data.pop("stages")
            )
            memory = data.pop("memory")
            if not isinstance(data["absolute"], bool) or not isinstance(data["note"] + data["source"], str):
                raise TypeError("absolute is true or false, note and source are texts")
            model = cls(
                stages=stages,
                memory=None if memory is None else tuple(StageMemory(**_numbers(stage)) for stage in memory),
                **data,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CostModelError):
                raise
            raise CostModelError(f"cost model cannot be read ({error!r}); write it with CostModel.to_json") from error
        if model.fingerprint != fingerprint:
            raise CostModelError(
                f"cost model has fingerprint {model.fingerprint[:12]}, its text says {str(fingerprint)[:12]}: it was "
                "edited by hand; calibrate again, or build it from a config"
            )
        return model

    def _item_ns(self, counts: StepCounts, terms: StageTerms) -> Int64Array:
        row_ids = np.repeat(counts.sample_ids, np.diff(counts.item_offsets))
        return times_ns([terms], item_columns(counts), row_ids)[:, 0]

    @classmethod
    def from_config(
        cls,
        source: str | Path | ModelShape,
        parallel: ParallelSpec,
        hardware: str | Hardware = NOMINAL,
        *,
        frozen: Sequence[str] = (),
        recompute: Sequence[str] = (),
        lora_rank: int = 0,
        layers_per_stage: Sequence[int] | None = None,
        head_on: HeadOn = "labels",
        dtype_bytes: int = 2,
        efficiency: Efficiency | None = None,
    ) -> "CostModel":
        """The closed form of a model on the stages of a layout (`balancer.flops`, `balancer.activation_memory`).

        Args:
            source: a preset (`balancer.model_config.preset_names`), a Hugging Face folder or `config.json`, or a shape.
            parallel: gives the stages; degrees inside a stage (TP, CP, EP) scale all its times alike and are not here.
            hardware: name or rates; unknown rates give ratios only (`absolute` is False, `note` says why).
            frozen: modules without weight gradients: `encoder`, `projector`, `llm`, or finer (`balancer.flops`).
            recompute: modules whose forward runs again in the backward; `all` for every one.
            lora_rank: adapters on the LLM, whose own weights are then frozen.
            layers_per_stage: layers of each LLM stage; default: even, larger parts first.
            head_on: whether the vocabulary projection runs on positions with a label or on all.
            dtype_bytes: of an activation; 2 for bf16, 4 for float32.
            efficiency: share of peak that kernels are assumed to reach.

        Raises:
            CostModelError: a model that cannot be read, a domain that it lacks, a module that does not exist, or layers
                that do not add up.
        """
        options = TrainOptions(
            frozen=module_names("frozen", frozen),
            recompute=module_names("recompute", recompute),
            lora_rank=lora_rank,
            head_on=head_on,
        )
        costs = stage_costs(
            source,
            parallel,
            hardware,
            options=options,
            layers_per_stage=layers_per_stage,
            dtype_bytes=dtype_bytes,
            efficiency=efficiency,
        )
        return cls(
            stages=costs.stages, memory=costs.memory, absolute=costs.absolute, note=costs.note, source=costs.source
        )

    @classmethod
    def fit(
        cls,
        observations: "Observations",
        *,
        domains: Sequence[str] | None = None,
        num_stages: int | None = None,
        memory: tuple[StageMemory, ...] | None = None,
    ) -> "CostModel":
        """The model that explains measured acts best; `balancer.calibration.fit` also says how well, and where it ends.

        Raises:
            CostModelError: a stage that was not measured, or on fewer than three micro-batches.
        """
        from balancer.calibration import fit  # builds on this module, and brings scipy

        return fit(observations, domains=domains, num_stages=num_stages, memory=memory).model

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


def _changed(terms: StageTerms | StageMemory) -> dict[str, float | int]:
    """Fields that are not zero."""
    return {field.name: getattr(terms, field.name) for field in fields(terms) if getattr(terms, field.name)}


def _numbers(terms: Any) -> dict[str, Any]:
    if not isinstance(terms, dict) or any(
        isinstance(value, bool) or not isinstance(value, int | float) for value in terms.values()
    ):
        raise CostModelError(f"terms of a stage are numbers by name; got {str(terms)[:80]}")
    return terms


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
