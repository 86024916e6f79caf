"""A model shape on the stages of a layout: closed-form FLOPs over the rate of a device, and activation bytes.

    ModelShape --module_works--> modules --split over ParallelSpec.domain_of_stage--> StageCost, StageMemory per stage

    encoder stages     patch_embed, layers .., projector      one stage, or its layers split like those of the LLM
    llm stages         embedding on the first, layers, head on the last
    generator stages   likewise, after the LLM

Layers are split as evenly as possible, larger parts first (the last stage also has the head), unless
`layers_per_stage` says how. A domain without a stage is no error if the model lacks it too; without an encoder stage
a model's vision tower is left out, since a text-only layout runs none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from balancer.activation_memory import kept_beside, module_memories, stage_memory
from balancer.cost_terms import DOMAINS, StageCost, StageMemory, StageTerms
from balancer.errors import CostModelError
from balancer.flops import ModuleWork, TrainOptions, Unit, Work, module_works
from balancer.hardware import NOMINAL, Efficiency, Hardware, hardware
from balancer.layout import ParallelSpec
from balancer.model_config import model_shape
from balancer.model_shape import ModelShape
from balancer.number_checks import is_whole

# A rate that makes numbers readable, not a claim about any hardware: plans depend on ratios only.
NOMINAL_FLOPS_PER_SECOND = 1e12
_TERM_OF = {
    "samples": "per_sample_ns",
    "items": "per_item_ns",
    "tokens": "per_token_ns",
    "labels": "per_label_ns",
    "visual": "per_visual_ns",
    "patches": "per_patch_ns",
    "full_sq": "per_full_sq_ns",
    "window_sq": "per_window_sq_ns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What `CostModel.from_config` is made of; fields as there."""

    stages: tuple[StageCost, ...]
    memory: tuple[StageMemory, ...]
    absolute: bool
    note: str
    source: str
    domains: tuple[str, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """Nanoseconds per FLOP of products and of attention."""

    linear: float
    attention: float


def stage_costs(
    source: str | Path | ModelShape,
    parallel: ParallelSpec,
    device: str | Hardware = NOMINAL,
    *,
    options: TrainOptions,
    layers_per_stage: Sequence[int] | None = None,
    dtype_bytes: int = 2,
    efficiency: Efficiency | None = None,
) -> StageCosts:
    """Terms of every stage of `parallel`; arguments as in `CostModel.from_config`."""
    shape = model_shape(source)
    chip = device if isinstance(device, Hardware) else hardware(device)
    if not is_whole(dtype_bytes, low=1, high=16):
        raise CostModelError(f"dtype_bytes={str(dtype_bytes)[:40]}: 2 for bf16, 4 for float32")
    shape = _fitted(shape, parallel)
    works = module_works(shape, options)
    memories = module_memories(shape, works, options, dtype_bytes=dtype_bytes)
    assumed = Efficiency() if efficiency is None else efficiency
    if not isinstance(assumed, Efficiency):
        raise CostModelError(f"efficiency={str(assumed)[:40]}: an Efficiency(linear=..., attention=...)")
    rates = _rates(chip, assumed)
    stages, memory, layers = [], [], []
    for domain in DOMAINS:
        count = parallel.domain_of_stage.count(domain)
        mine = [index for index, work in enumerate(works) if _domain(work) == domain]
        parts = _split(mine, works, count, layers_per_stage if domain == "llm" else None, domain)
        for position, part in enumerate(parts):
            layers.append(sum(_is_layer(works[index]) for index in part))
            stages.append(_stage_cost([works[index] for index in part], rates))
            beside = kept_beside(shape, domain, last=position == len(parts) - 1, dtype_bytes=dtype_bytes)
            memory.append(stage_memory((memories[index] for index in part), beside=beside))
    notes = [shape.note, chip.note, *_assumptions(chip, assumed)]
    return StageCosts(
        stages=tuple(stages),
        memory=tuple(memory),
        absolute=chip.known,
        note="; ".join(note for note in notes if note),
        source=f"closed form of {shape.name} on {chip.name}",
        domains=parallel.domain_of_stage,
        layers=tuple(layers),
    )


def _fitted(shape: ModelShape, parallel: ParallelSpec) -> ModelShape:
    """The shape with exactly the domains that the layout has stages for."""
    domains = set(parallel.domain_of_stage)
    for name, tower in (("encoder", shape.encoder), ("generator", shape.generator)):
        if name in domains and tower is None:
            remedy = "encoder='none'" if name == "encoder" else "generator=False"
            raise CostModelError(f"the layout has {name} stages, but model {shape.name} has no {name}: use {remedy}")
    return ModelShape(
        name=shape.name,
        llm=shape.llm,
        encoder=shape.encoder if "encoder" in domains else None,
        generator=shape.generator if "generator" in domains else None,
        note=shape.note,
    )


def _rates(chip: Hardware, efficiency: Efficiency) -> _Rates:
    if not chip.known:
        return _Rates(linear=1e9 / NOMINAL_FLOPS_PER_SECOND, attention=1e9 / NOMINAL_FLOPS_PER_SECOND)
    peak = chip.peak_flops_per_second
    return _Rates(linear=1e9 / (peak * efficiency.linear), attention=1e9 / (peak * efficiency.attention))


def _assumptions(chip: Hardware, efficiency: Efficiency) -> tuple[str, ...]:
    if not chip.known:
        return ()
    return (
        f"assumes {efficiency.linear:g} of peak in products and {efficiency.attention:g} in attention; calibrate for "
        "times that were measured",
    )


def _domain(work: ModuleWork) -> str:
    first = work.name.partition(".")[0]
    return first if first in {"encoder", "generator"} else "llm"


def _is_layer(work: ModuleWork) -> bool:
    return work.name.rpartition(".")[2].isdigit()


def _split(
    mine: list[int], works: Sequence[ModuleWork], num_stages: int, given: Sequence[int] | None, domain: str
) -> list[list[int]]:
    """Module indices of each stage: layers by number, what precedes them on the first, what follows on the last."""
    if not num_stages:
        return []
    layers = [index for index in mine if _is_layer(works[index])]
    sizes = layers_of_stages(len(layers), num_stages, given, domain=domain)
    before = [index for index in mine if index < layers[0]]
    after = [index for index in mine if index > layers[-1]]
    parts, start = [], 0
    for size in sizes:
        parts.append(layers[start : start + size])
        start += size
    parts[0] = before + parts[0]
    parts[-1] = parts[-1] + after
    return parts


def layers_of_stages(
    num_layers: int, num_stages: int, given: Sequence[int] | None = None, *, domain: str = "llm"
) -> tuple[int, ...]:
    """Layers of each stage: as given, or as even as possible with the larger parts first.

    Raises:
        CostModelError: more stages than layers, or given numbers that do not add up.
    """
    if given is not None:
        fits = isinstance(given, Sequence) and len(given) == num_stages and all(is_whole(part) for part in given)
        if not fits or sum(given) != num_layers:
            raise CostModelError(
                f"layers_per_stage={str(given)[:200]} for {num_stages} {domain} stages of {num_layers} layers: one "
                "number per stage, and they add up"
            )
        return tuple(given)
    if num_layers < num_stages:
        raise CostModelError(f"{num_layers} {domain} layers cannot fill {num_stages} stages; use fewer ranks or chunks")
    share, extra = divmod(num_layers, num_stages)
    return tuple(share + (stage < extra) for stage in range(num_stages))


def _stage_cost(works: Sequence[ModuleWork], rates: _Rates) -> StageCost:
    forward, backward, weight = Work(), Work(), Work()
    for work in works:
        forward, backward, weight = forward + work.forward, backward + work.backward, weight + work.weight_grad
    return StageCost(forward=_terms(forward, rates), backward=_terms(backward, rates), weight=_terms(weight, rates))


def _terms(work: Work, rates: _Rates) -> StageTerms:
    """FLOPs per unit to nanoseconds per unit. A second width of windowed attention on one stage is refused."""
    values: dict[str, float] = {}
    window = 0
    for unit, flops in work.flops.items():
        rate = rates.attention if unit.attention else rates.linear
        name = _TERM_OF[unit.column] if not unit.squared else _squared_name(unit)
        if unit.window:
            if window not in {0, unit.window}:
                raise CostModelError(
                    f"one stage has windows of {window} and {unit.window} tokens: only one is modelled"
                )
            window = unit.window
        values[name] = values.get(name, 0.0) + flops * rate
    return StageTerms(**values, causal_window=window)


def _squared_name(unit: Unit) -> str:
    return "per_causal_window_ns" if unit.window else "per_token_sq_ns"
