"""Modelled activation bytes of every module: what a micro-batch keeps between its forward and its backward.

Per row of one layer in a dtype of b bytes, d the stream, q | kv | o the widths of all query heads, of keys and values,
and of the heads' outputs, m the hidden width (Korthikanti et al., "Reducing Activation Recomputation", section 4.1,
without its attention matrix and dropout masks, with grouped heads, flash attention and gated MLPs):

    trained      2 inputs and 2 outputs of norms 4 d b, q + kv + o for attention, 4 m (gated) or 2 m for the MLP, and
                 4 bytes per head and norm (log-sum-exp, root mean square)
    adapted      the same and the adapters' r per product
    traversed    (frozen, but gradients pass) no outputs of norms, no input of the last product:
                 2 d, q + kv + o, 3 m (gated) or m
    recomputed   the input d of the layer; one layer's full set exists while its backward runs
    no backward  nothing stays; one layer's set exists while it runs

Towers keep q, k and v twice where they rotate a fused projection (as Qwen's and ours do). Experts keep their rows once
per active expert. The head keeps d per token, d per labelled row, and its logits: in b bytes, as float32, and as the
float32 softmax (Hugging Face's loss), or, recomputed, those of `LOSS_CHUNK` rows as a constant. A stage also keeps its
output until the backward, and the cosines and sines of its positions.

Price: an estimate of an implementation, not a law. It matches what autograd of this package's own model saves to 2 %
(tests); other code with float32 norms or unfused rotations keeps more. Weights, gradients, optimizer state, allocator
slack and communication buffers are not activations.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from balancer.cost_terms import Column, StageMemory
from balancer.errors import CostModelError
from balancer.flops import ModuleWork, TrainOptions
from balancer.model_shape import LayerShape, LinearShape, MLPShape, ModelShape, TowerShape

LOSS_CHUNK = 1024
_WIDE_BYTES = 4
_INDEX_BYTES = 8
_NOTHING = StageMemory()
_FIELD_OF: dict[Column, str] = {
    "samples": "per_sample_bytes",
    "items": "per_item_bytes",
    "tokens": "per_token_bytes",
    "labels": "per_label_bytes",
    "visual": "per_visual_bytes",
    "patches": "per_patch_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """Bytes of one module.

    Attributes:
        kept: from its forward to its backward.
        working: beside that while it runs; modules of a stage run one after the other, so the largest counts.
    """

    kept: StageMemory = _NOTHING
    working: StageMemory = _NOTHING


def module_memories(
    shape: ModelShape, works: Iterable[ModuleWork], options: TrainOptions, *, dtype_bytes: int = 2
) -> tuple[ModuleMemory, ...]:
    """Bytes of every module, in the order of `balancer.flops.module_works`.

    Args:
        works: what `module_works` gave for the same shape and options; tells where there is a backward.
        dtype_bytes: of an activation, 2 for bf16, 4 for float32.

    Raises:
        CostModelError: a dtype of no size.
    """
    if dtype_bytes not in {1, 2, 4, 8}:
        raise CostModelError(f"dtype_bytes={dtype_bytes}: 2 for bf16, 4 for float32")
    return tuple(_module(shape, work, options, dtype_bytes) for work in works)


def stage_memory(modules: Iterable[ModuleMemory], *, beside: Iterable[StageMemory] = ()) -> StageMemory:
    """Bytes of the modules of one stage: what they keep, the largest working set, and what the stage keeps `beside`."""
    kept, working = StageMemory(), StageMemory()
    for module in modules:
        kept, working = _added(kept, module.kept), _largest(working, module.working)
    total = _added(kept, working)
    for part in beside:
        total = _added(total, part)
    return total


def kept_beside(shape: ModelShape, domain: str, *, last: bool, dtype_bytes: int = 2) -> tuple[StageMemory, StageMemory]:
    """(output of a stage until its backward, the cosines and sines of its positions, float32).

    Args:
        shape: of the model.
        domain: encoder, llm or generator.
        last: whether it is the last stage of its domain; the encoder's hands on visual rows.
    """
    if domain == "llm":
        cosines = _WIDE_BYTES * shape.llm.layers[0].attention.head_dim
        return rows_bytes("tokens", shape.llm.dim * dtype_bytes), rows_bytes("tokens", cosines)
    tower = shape.encoder if domain == "encoder" else shape.generator
    if tower is None:
        raise CostModelError(f"model {shape.name} has no {domain}")
    rotation = rows_bytes("patches", _WIDE_BYTES * tower.layers[0].attention.head_dim)
    if domain == "encoder" and last:
        return rows_bytes("visual", shape.llm.dim * dtype_bytes), rotation
    return rows_bytes("patches", tower.dim * dtype_bytes), rotation


def rows_bytes(rows: Column, num_bytes: int) -> StageMemory:
    """`num_bytes` per row of that kind."""
    return StageMemory(**{_FIELD_OF[rows]: num_bytes})


def _module(shape: ModelShape, work: ModuleWork, options: TrainOptions, dtype_bytes: int) -> ModuleMemory:
    """Which formula holds for a module; its name says where it is in the shape."""
    domain, _, part = work.name.partition(".")
    if domain == "embedding":
        # Ids of the tokens; received visual rows and their places.
        visual = shape.llm.dim * dtype_bytes + _INDEX_BYTES if shape.encoder is not None else 0
        return ModuleMemory(kept=_added(rows_bytes("tokens", _INDEX_BYTES), rows_bytes("visual", visual)))
    if domain == "head":
        return _head(shape, work, options, dtype_bytes)
    tower = shape.encoder if domain == "encoder" else shape.generator
    if part.isdigit():
        layers = shape.llm.layers if tower is None or domain == "llm" else tower.layers
        return _layer(layers[int(part)], "tokens" if domain == "llm" else "patches", work, options, dtype_bytes)
    if tower is None:
        raise CostModelError(f"module {work.name} belongs to no part of {shape.name}")
    if part == "patch_embed":
        trained = options.trains(work.role)
        return ModuleMemory(kept=rows_bytes("patches", tower.patch_dim * dtype_bytes if trained else 0))
    return _projector(tower, work, options, dtype_bytes)


def _layer(layer: LayerShape, rows: Column, work: ModuleWork, options: TrainOptions, dtype_bytes: int) -> ModuleMemory:
    rank = options.lora_rank if work.role == "llm" else 0
    trained = options.trains(work.role) or rank > 0
    full = rows_bytes(rows, layer_bytes(layer, rows, dtype_bytes, trained=trained, lora_rank=rank))
    if not work.backward.flops:
        return ModuleMemory(working=full)
    if options.recomputes(work.role):
        return ModuleMemory(kept=rows_bytes(rows, layer.attention.dim * dtype_bytes), working=full)
    return ModuleMemory(kept=full)


def layer_bytes(layer: LayerShape, rows: Column, dtype_bytes: int, *, trained: bool = True, lora_rank: int = 0) -> int:
    """Bytes that one layer keeps per row without recomputation (formulas: the module's docstring)."""
    attention = layer.attention
    elements = attention.query_width + attention.kv_width + attention.output_width
    if rows == "patches":
        elements += 2 * attention.query_width
    elements += (4 if trained else 2) * attention.dim + _mlp_elements(layer.mlp, trained=trained)
    if attention.kv_rank and trained:
        elements += attention.q_rank + attention.kv_rank + attention.rope_dim
    linears = (*attention.linears(rows), *layer.mlp.linears(rows))
    elements += sum(lora_rank * linear.copies for linear in linears if linear.adapts)
    return elements * dtype_bytes + _WIDE_BYTES * (attention.num_heads + 2)


def _mlp_elements(mlp: MLPShape, *, trained: bool) -> int:
    """Hidden rows that a MLP keeps; an expert also keeps its gathered input and its output, which the router weighs."""
    times = (4 if mlp.gated else 2) - (not trained)
    elements = mlp.hidden * times * max(mlp.active_experts, 1) + mlp.shared_hidden * times
    if mlp.num_experts:
        elements += 2 * mlp.dim * mlp.active_experts + mlp.num_experts
    return elements


def _projector(tower: TowerShape, work: ModuleWork, options: TrainOptions, dtype_bytes: int) -> ModuleMemory:
    """Inputs of its products; behind a norm also the norm's input, and between products that of the activation."""
    if not work.backward.flops:
        return ModuleMemory()
    trained = options.trains(work.role)
    total = StageMemory()
    for position, linear in enumerate(tower.projector):
        copies = (1 if trained else 0) + (1 if _has_input_beside(linear, position) else 0)
        total = _added(total, rows_bytes(linear.rows, linear.in_dim * copies * dtype_bytes))
    if options.recomputes(work.role):
        first = tower.projector[0]
        return ModuleMemory(kept=rows_bytes(first.rows, first.in_dim * dtype_bytes), working=total)
    return ModuleMemory(kept=total)


def _has_input_beside(linear: LinearShape, position: int) -> bool:
    """Whether a norm or an activation in front keeps a tensor as wide as the product's input."""
    return linear.reads_stream or position > 0


def _head(shape: ModelShape, work: ModuleWork, options: TrainOptions, dtype_bytes: int) -> ModuleMemory:
    dim, vocab = shape.llm.dim, shape.llm.vocab_size
    logits = vocab * (dtype_bytes + 2 * _WIDE_BYTES)
    if not work.backward.flops:
        return ModuleMemory(working=StageMemory(constant_bytes=LOSS_CHUNK * logits))
    rows: Column = "labels" if options.head_on == "labels" else "tokens"
    norm = rows_bytes("tokens", dim * dtype_bytes + _WIDE_BYTES)  # its input; its output is the stage's
    # A chosen row, and beside it the log-sum-exp, the label, its weight and its index.
    chosen = dim * dtype_bytes + _WIDE_BYTES + 3 * _INDEX_BYTES if rows == "labels" else 0
    if options.recomputes("head"):
        chunk = StageMemory(constant_bytes=LOSS_CHUNK * logits)
        return ModuleMemory(kept=_added(norm, rows_bytes(rows, chosen)), working=chunk)
    return ModuleMemory(kept=_added(norm, rows_bytes(rows, chosen + logits)))


def _added(first: StageMemory, second: StageMemory) -> StageMemory:
    return StageMemory(
        **{field.name: getattr(first, field.name) + getattr(second, field.name) for field in fields(StageMemory)}
    )


def _largest(first: StageMemory, second: StageMemory) -> StageMemory:
    """Field by field: never below the larger of the two."""
    return StageMemory(
        **{field.name: max(getattr(first, field.name), getattr(second, field.name)) for field in fields(StageMemory)}
    )
