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
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from balancer.cost_terms import (
    COEFFICIENTS,
    DOMAINS,
    MAX_STAGES,
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
from balancer.flops import HeadOn, TrainOptions, check_head_on, module_names
from balancer.hardware import NOMINAL, Efficiency, Hardware
from balancer.layout import ParallelSpec
from balancer.model_shape import ModelShape
from balancer.number_checks import is_number, is_whole
from balancer.stage_costs import NOMINAL_FLOPS_PER_SECOND, stage_costs
from balancer.tower_dims import EncoderDims, LLMDims, encoder_terms, llm_terms

if TYPE_CHECKING:
    from balancer.observations import Observations

__all__ = ["CostModel", "EncoderDims", "LLMDims", "StageCost", "StageMemory", "StageTerms"]

FORMAT_VERSION = 2
_MOST_SHOWN = 16  # stages in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Predicted time and memory per stage, in chain order; with an encoder, it is stage 0.

    Attributes:
        stages: terms per stage.
        memory: modelled activation bytes per stage; None where they are not known.
        absolute: whether times are meant in real nanoseconds of known hardware; otherwise only their ratios count.
        note: what a reader must know (an unknown rate, an approximation); empty if nothing.
        source: where the coefficients come from.
        domains: encoder, llm or generator for every stage, [S]; () where nobody said.
        layers: of every stage, [S]; () where nobody said. Neither counts in the fingerprint.

    Raises:
        CostModelError: no stages, memory, domains or layers for another number of stages, or a prediction beyond the
            range of int64.
    """

    stages: tuple[StageCost, ...]
    memory: tuple[StageMemory, ...] | None = None
    absolute: bool = False
    note: str = ""
    source: str = ""
    domains: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.stages) <= MAX_STAGES:
            raise CostModelError(
                f"{len(self.stages)} stages: a cost model has at least one stage, at most {MAX_STAGES}"
            )
        if self.memory is not None and len(self.memory) != len(self.stages):
            raise CostModelError(f"memory of {len(self.memory)} stages for a cost model of {len(self.stages)}")
        for name, allowed, fits in (
            ("domains", f"each of {', '.join(DOMAINS)}", all(domain in DOMAINS for domain in self.domains)),
            ("layers", "each a number of layers", all(is_whole(layers) for layers in self.layers)),
        ):
            values = getattr(self, name)
            if not fits or len(values) not in (0, len(self.stages)):
                raise CostModelError(f"{name}={str(values)[:80]}: one per stage, {len(self.stages)}, {allowed}")

    @property
    def num_stages(self) -> int:
        """S, the number of stages."""
        return len(self.stages)

    def other_split(self, domains: Sequence[str], layers: Sequence[int] = ()) -> str:
        """What tells the split that this model is of from another one; "" where nothing does.

        Args:
            domains: of the stages of the other one (`ParallelSpec.domain_of_stage`).
            layers: of its stages; () where they are not known.
        """
        mine, other = self.domains or ("?",) * self.num_stages, tuple(domains)
        same = len(mine) == len(other) if not self.domains else mine == other
        if same and (not layers or not self.layers or tuple(layers) == self.layers):
            return ""
        return f"is of {_split_text(mine, self.layers)}, the layout is {_split_text(other, tuple(layers))}"

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
        split = {name: list(getattr(self, name)) for name in ("domains", "layers")}
        return json.dumps({**content, **texts, **split, "memory": memory}, indent=2, sort_keys=True)

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
            domains, layers = (tuple(data.pop(name, ())) for name in ("domains", "layers"))
            model = cls(
                stages=stages,
                domains=domains,
                layers=layers,
                memory=None if memory is None else tuple(StageMemory(**_numbers(stage)) for stage in memory),
                **data,
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, CostModelError):
                raise
            raise CostModelError(
                f"cost model cannot be read ({error!r:.200}); write it with CostModel.to_json"
            ) from error
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
            stages=costs.stages,
            memory=costs.memory,
            absolute=costs.absolute,
            note=costs.note,
            source=costs.source,
            domains=costs.domains,
            layers=costs.layers,
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
        check_head_on(head_on)
        parts = list(llm_layers_per_stage) if isinstance(llm_layers_per_stage, Sequence) else []
        if not parts or not all(is_whole(layers) for layers in parts) or sum(parts) != llm.depth:
            raise CostModelError(
                f"llm_layers_per_stage={str(llm_layers_per_stage)[:200]}{_sum_text(parts)}; the LLM has {llm.depth} "
                "layers: give the number of each stage, as a list"
            )
        if not is_number(flops_per_second) or flops_per_second == 0.0:
            raise CostModelError(f"flops_per_second={str(flops_per_second)[:40]}: measure it or leave the default")
        if not is_number(backward_factor):
            raise CostModelError(f"backward_factor={str(backward_factor)[:40]}: a number from 0 on")
        ns_per_flop = 1e9 / flops_per_second
        forward = [encoder_terms(encoder, ns_per_flop)]
        last = len(parts) - 1
        for index, layers in enumerate(parts):
            forward.append(llm_terms(llm, layers, ns_per_flop, head_on if index == last else None))
        return cls(
            stages=tuple(StageCost(forward=terms, backward=terms.scaled(backward_factor)) for terms in forward),
            domains=("encoder", *["llm"] * len(parts)),
            layers=(encoder.depth, *parts),
        )


def _split_text(domains: tuple[str, ...], layers: tuple[int, ...]) -> str:
    """`2 stages: encoder (27 layers), llm (28 layers)`."""
    if len(layers) != len(domains):
        named = list(domains)
    else:
        named = [f"{domain} ({count} layers)" for domain, count in zip(domains, layers, strict=True)]
    shown = ", ".join(named[:_MOST_SHOWN]) + (", ..." if len(named) > _MOST_SHOWN else "")
    return f"{len(named)} stages" if set(domains) == {"?"} else f"{len(named)} stages: {shown}"


def _sum_text(parts: Sequence[Any]) -> str:
    return f" adds up to {sum(parts)}" if parts and all(is_whole(part) for part in parts) else ""


def _changed(terms: StageTerms | StageMemory) -> dict[str, float | int]:
    """Fields that are not zero."""
    return {field.name: getattr(terms, field.name) for field in fields(terms) if getattr(terms, field.name)}


def _numbers(terms: Any) -> dict[str, Any]:
    if not isinstance(terms, dict) or any(
        isinstance(value, bool) or not isinstance(value, int | float) for value in terms.values()
    ):
        raise CostModelError(f"terms of a stage are numbers by name; got {str(terms)[:80]}")
    return terms
