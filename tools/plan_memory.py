"""What weights, gradients and optimizer hold on every pipeline rank, and whether that and the activations fit.

    ModelShape, layers of stages, what is frozen --rank_states--> RankStates [P] --+ peak activations--> fits or not

Mixed precision with Adam and no sharding (Rajbhandari et al., "ZeRO", section 3.1): 16 bytes per trained parameter, of
bf16 weight 2, bf16 gradient 2, float32 master weight 4 and two moments 8; a frozen parameter has its weight alone.
Matrices count, norms and biases do not (about 0.1 %). Buffers of communication and the allocator's slack come on top.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from balancer.flops import TrainOptions, module_names
from balancer.hardware import hardware
from balancer.layout import SPREAD, ParallelSpec
from balancer.model_shape import LayerShape, LinearShape, ModelShape
from balancer.stage_costs import layers_of_stages
from tools.plan_command import PlanCommand

WEIGHT_BYTES = 2
GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 12
ASSUMED = (
    "weights and optimizer: bf16 weights and gradients, float32 master weights and Adam, no ZeRO: "
    f"{WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES} bytes a trained parameter, {WEIGHT_BYTES} a frozen one"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """Parameters that one pipeline rank holds."""

    trained: int
    frozen: int

    def state_bytes(self, *, optimizer_shards: int = 1, shards: int = 1) -> int:
        """Bytes of weights, gradients and optimizer; `optimizer_shards` replicas share the last (ZeRO-1), `shards` all
        of them (ZeRO-3)."""
        optimizer = OPTIMIZER_BYTES * self.trained // optimizer_shards
        whole = WEIGHT_BYTES * (self.trained + self.frozen) + GRADIENT_BYTES * self.trained
        return (whole + optimizer) // shards


def rank_states(command: PlanCommand, shape: ModelShape, parallel: ParallelSpec) -> tuple[RankStates, ...]:
    """Of every pipeline rank, [P]; a spread encoder is whole on each."""
    options = TrainOptions(frozen=module_names("frozen", command.frozen), lora_rank=command.lora_rank)
    counts = [[0, 0] for _ in range(parallel.num_ranks)]  # trained, frozen

    def add(home: int, role: str, parameters: int, adapters: int = 0) -> None:
        trains = options.trains(role, tied=shape.llm.tied)
        for rank in range(parallel.num_ranks) if home == SPREAD else (home,):
            counts[rank][0 if trains else 1] += parameters
            counts[rank][0] += adapters

    homes = list(zip(parallel.domain_of_stage, parallel.stage_ranks, strict=True))
    tower = shape.encoder
    if tower is not None and parallel.has_encoder:
        home = parallel.stage_ranks[0]
        add(home, "patch_embed", sum(map(_entries, tower.patch_embed)))
        add(home, "encoder", sum(_layer_entries(layer) for layer in tower.layers))
        add(home, "projector", sum(map(_entries, tower.projector)))
    llm = [home for domain, home in homes if domain == "llm"]
    sizes = layers_of_stages(len(shape.llm.layers), len(llm), command.layers_per_stage or None)
    start = 0
    for home, size in zip(llm, sizes, strict=True):
        for layer in shape.llm.layers[start : start + size]:
            add(home, "llm", _layer_entries(layer), _adapters(layer, command.lora_rank))
        start += size
    table = shape.llm.vocab_size * shape.llm.dim
    add(llm[0], "embedding", table)
    if not (shape.llm.tied and llm[0] == llm[-1]):
        add(llm[-1], "head", table)
    return tuple(RankStates(trained=trained, frozen=frozen) for trained, frozen in counts)


def device_memory_gib(command: PlanCommand) -> float | None:
    """Memory of the accelerator that `--hardware` names; None without one."""
    chip = hardware(command.hardware)
    return chip.memory_gib if chip.known else None


def too_large(
    states: Sequence[RankStates], peaks: Sequence[int], memory_gib: float, *, device: str, dp_size: int
) -> str:
    """What does not fit, in a sentence; "" where all ranks do.

    Args:
        peaks: peak activations of every rank in bytes.
        memory_gib: of one device.
    """
    limit = memory_gib * 2**30
    held = [states_of.state_bytes() + peak for states_of, peak in zip(states, peaks, strict=True)]
    if max(held) <= limit:
        return ""
    rank = held.index(max(held))
    own, peak = states[rank], peaks[rank]
    ways = [("ZeRO-1", own.state_bytes(optimizer_shards=dp_size)), ("ZeRO-3", own.state_bytes(shards=dp_size))]
    shared = " and ".join(f"{(size + peak) / 2**30:.0f} GiB with {name}" for name, size in ways)
    over = f"; over {dp_size} replicas it would be {shared}" if dp_size > 1 else ""
    return (
        f"does not fit: pipeline rank {rank} holds {held[rank] / 2**30:.0f} GiB, {own.state_bytes() / 2**30:.0f} of "
        f"weights and optimizer and {peak / 2**30:.0f} of activations, {device} has {memory_gib:g}{over}. Else more "
        "pipeline ranks, --frozen or --lora-rank, --recompute, a smaller --capacity-tokens"
    )


def _entries(linear: LinearShape) -> int:
    return linear.in_dim * linear.out_dim


def _layer_entries(layer: LayerShape) -> int:
    return sum(map(_entries, layer.attention.linears("tokens"))) + layer.mlp.num_parameters


def _adapters(layer: LayerShape, rank: int) -> int:
    """Entries of low-rank adapters on all products of a layer, those of inactive experts included."""
    linears = (*layer.attention.linears("tokens"), *layer.mlp.linears("tokens"))
    return sum(
        rank * (linear.in_dim + linear.out_dim) * (layer.mlp.num_experts if linear.name.startswith("expert_") else 1)
        for linear in linears
        if linear.adapts
    )
