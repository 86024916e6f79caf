"""Closed-form FLOPs of a model, module by module: forward, input gradients, weight gradients, recomputation.

    ModelShape --module_works(frozen, recompute, lora_rank, ...)--> one ModuleWork per module, in chain order

    patch_embed | encoder.0 .. | projector | embedding | llm.0 .. | head | generator.0 ..

A multiply-add is two FLOPs. A product [rows, i] x [i, o] takes 2 i o per row forward, the same again for the gradient
of its input and again for that of its weight. Attention takes 2 (q + v) per pair of positions, q and v the widths of
all query and value heads (equal: 4 h per pair); a causal layer has half of the pairs of l^2 (FlashAttention skips the
rest). Its backward takes 2.5 times that, since flash kernels make the scores again (Dao, FlashAttention-2, section 4:
"5 matmuls"), or twice with `attention="math"`, which keeps them. Gradients exist only where autograd runs:

    weight gradient   modules that train
    input gradient    whatever has a trained parameter before it in the chain (a norm in front of a product counts)
    nothing           a frozen prefix
    recomputation     adds the module's forward to its backward

Price: norms, biases, rotary embedding, activations and the loss are not counted (below 1 % of a model; the tests
compare with `torch.utils.flop_counter` on real modules). A chain is a chain: text-only samples are charged the input
gradients that samples with media need. Checkpointing that stops early skips the last product of a block; not here.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np

from balancer.cost_terms import Column, Columns, sample_columns
from balancer.counts import Int64Array, StepCounts
from balancer.errors import CostModelError
from balancer.model_shape import AttentionShape, LayerShape, LinearShape, ModelShape, TowerShape
from balancer.number_checks import is_whole

AttentionKernel = Literal["flash", "math"]
CausalPairs = Literal["half", "all"]
HeadOn = Literal["labels", "all"]

FREEZABLE = ("patch_embed", "encoder", "projector", "embedding", "llm", "head", "generator")
RECOMPUTABLE = ("encoder", "projector", "llm", "head", "generator")
_ALSO_FROZEN = {"encoder": ("patch_embed",), "llm": ("embedding", "head")}


class Unit(NamedTuple):
    """What FLOPs are counted per.

    Attributes:
        column: of the counts.
        squared: per l^2 - max(l - window, 0)^2 of a sample instead (window 0: per l^2).
        attention: whether attention makes them, which runs at a rate of its own.
    """

    column: Column
    squared: bool = False
    window: int = 0
    attention: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs per unit; adds up, scales."""

    flops: Mapping[Unit, int] = field(default_factory=dict)

    def __add__(self, other: "Work") -> "Work":
        total = dict(self.flops)
        for unit, flops in other.flops.items():
            total[unit] = total.get(unit, 0) + flops
        return Work(total)

    def of(self, counts: StepCounts) -> Int64Array:
        """FLOPs of every sample, int64 [n]."""
        columns = sample_columns(counts)
        total = np.zeros(len(counts), dtype=np.int64)
        for unit, flops in self.flops.items():
            total += flops * _quantity(unit, columns)
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleWork:
    """What one module does per micro-batch.

    Attributes:
        name: e.g. `llm.3`.
        role: the name by which it is frozen or recomputed.
        forward, input_grad, weight_grad, recompute: FLOPs; the last three make up its backward.
    """

    name: str
    role: str
    forward: Work
    input_grad: Work = Work()
    weight_grad: Work = Work()
    recompute: Work = Work()

    @property
    def backward(self) -> Work:
        """The whole backward."""
        return self.input_grad + self.weight_grad + self.recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a model is trained, as far as its FLOPs and bytes depend on it.

    Attributes:
        frozen: modules without weight gradients. `encoder` includes its patch embedding, `llm` its embedding and head.
        recompute: modules whose forward runs again in the backward; `all` for every one.
        lora_rank: rank of adapters on all projections and MLPs of the LLM, whose own weights are frozen then; 0: none.
        head_on: whether the vocabulary projection runs on labelled positions or on all.
        attention: `flash` makes scores again in the backward; `math` keeps them.
        causal_pairs: `half` of the pairs under a causal mask, as kernels run it; `all` counts as FlopCounterMode does,
            which knows neither masks nor windows.

    Raises:
        CostModelError: a module or a choice that does not exist, or a negative rank.
    """

    frozen: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    lora_rank: int = 0
    head_on: HeadOn = "labels"
    attention: AttentionKernel = "flash"
    causal_pairs: CausalPairs = "half"

    def __post_init__(self) -> None:
        _check_names("frozen", self.frozen, FREEZABLE)
        _check_names("recompute", self.recompute, (*RECOMPUTABLE, "all"))
        if not is_whole(self.lora_rank, high=2**40):
            raise CostModelError(f"lora_rank={str(self.lora_rank)[:40]}: 0 for no adapters, or a positive rank")
        check_head_on(self.head_on)
        for name, choices in (("attention", get_args(AttentionKernel)), ("causal_pairs", get_args(CausalPairs))):
            if getattr(self, name) not in choices:
                raise CostModelError(f"{name}={getattr(self, name)!r}: choose {' or '.join(choices)}")

    def trains(self, role: str, *, tied: bool = False) -> bool:
        """Whether the own weights of a module get gradients; tied embeddings are frozen by either of their names."""
        names = {role, "embedding", "head"} if tied and role in {"embedding", "head"} else {role}
        frozen = set(self.frozen) | {also for name in self.frozen for also in _ALSO_FROZEN.get(name, ())}
        adapted = self.lora_rank > 0 and role in {"llm", "embedding", "head"}
        return not adapted and not names & frozen

    def recomputes(self, role: str) -> bool:
        """Whether a module's forward runs again in its backward."""
        return role in self.recompute or ("all" in self.recompute and role in RECOMPUTABLE)


def module_works(shape: ModelShape, options: TrainOptions | None = None) -> tuple[ModuleWork, ...]:
    """FLOPs of every module of a model, in chain order (see the module's docstring)."""
    chain = _Chain(options or TrainOptions())
    if shape.encoder is not None:
        chain.tower("encoder", shape.encoder)
    tied = shape.llm.tied
    chain.add("embedding", "embedding", (), trains=chain.options.trains("embedding", tied=tied))
    for index, layer in enumerate(shape.llm.layers):
        chain.layer(f"llm.{index}", "llm", layer, "tokens", lora_rank=chain.options.lora_rank)
    head = LinearShape(
        name="head",
        in_dim=shape.llm.dim,
        out_dim=shape.llm.vocab_size,
        rows="labels" if chain.options.head_on == "labels" else "tokens",
        adapts=False,
    )
    chain.add("head", "head", (head,), trains=chain.options.trains("head", tied=tied))
    if shape.generator is not None:
        chain.tower("generator", shape.generator)
    return tuple(chain.modules)


class _Chain:
    """Walks a model in order and remembers whether anything before has a gradient."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        self.modules: list[ModuleWork] = []
        self.upstream = False

    def tower(self, role: str, tower: TowerShape) -> None:
        """Patch embedding, layers and projector of an encoder or a generator."""
        embed = "patch_embed" if role == "encoder" else role
        if tower.patch_embed:
            self.add(f"{role}.patch_embed", embed, tower.patch_embed, trains=self.options.trains(embed))
        used = len(tower.layers) - tower.idle_layers
        for index, layer in enumerate(tower.layers):
            self.layer(f"{role}.{index}", role, layer, "patches", idle=index >= used)
        if tower.projector:
            owner = "projector" if role == "encoder" else role
            self.add(f"{role}.projector", owner, tower.projector, trains=self.options.trains(owner))

    def layer(
        self, name: str, role: str, layer: LayerShape, rows: Column, *, lora_rank: int = 0, idle: bool = False
    ) -> None:
        """Attention, then the MLP; `idle` runs forward only."""
        trains = self.options.trains(role)
        first = layer.attention.linears(rows)
        second = layer.mlp.linears(rows)
        forward = _sum(_forward(linear, lora_rank) for linear in (*first, *second))
        pairs = attention_work(layer.attention, self.options.causal_pairs)
        forward += pairs
        if idle:
            self.modules.append(ModuleWork(name=name, role=role, forward=forward))
            return
        inner = self.upstream or trains or lora_rank > 0
        inputs, weights = Work(), Work()
        for linears, upstream in ((first, self.upstream), (second, inner)):
            for linear in linears:
                needed = upstream or trains or (lora_rank > 0 and not linear.reads_stream)
                inputs += _input_grad(linear, lora_rank, needed=needed)
                weights += _weight_grad(linear, lora_rank, trains=trains)
        if inner:
            inputs += _scaled(pairs, 5, 2) if self.options.attention == "flash" else _scaled(pairs, 2, 1)
        self._append(name, role, forward, inputs, weights)
        self.upstream = inner

    def add(self, name: str, role: str, linears: Sequence[LinearShape], *, trains: bool) -> None:
        """A module of plain products; the first one needs no input gradient unless something before it does."""
        inputs, weights = Work(), Work()
        for position, linear in enumerate(linears):
            needed = self.upstream or (trains and (position > 0 or linear.reads_stream))
            inputs += _input_grad(linear, 0, needed=needed)
            weights += _weight_grad(linear, 0, trains=trains)
        self._append(name, role, _sum(_forward(linear, 0) for linear in linears), inputs, weights)
        self.upstream = self.upstream or trains

    def _append(self, name: str, role: str, forward: Work, inputs: Work, weights: Work) -> None:
        again = self.options.recomputes(role) and bool(inputs.flops or weights.flops)
        self.modules.append(
            ModuleWork(
                name=name,
                role=role,
                forward=forward,
                input_grad=inputs,
                weight_grad=weights,
                recompute=forward if again else Work(),
            )
        )


def attention_work(attention: AttentionShape, causal_pairs: CausalPairs = "half") -> Work:
    """Scores and weighted values of one layer, per squared length of what its rows attend to."""
    pair = 2 * (attention.query_width + attention.output_width)
    if attention.span == "full":
        return Work({Unit("full_sq", attention=True): pair})
    if attention.span == "window":
        return Work({Unit("window_sq", attention=True): pair})
    if causal_pairs == "all":
        return Work({Unit("tokens", squared=True, attention=True): pair})
    return Work({Unit("tokens", squared=True, window=attention.window, attention=True): pair // 2})


def _forward(linear: LinearShape, lora_rank: int) -> Work:
    return _per_row(linear, linear.in_dim * linear.out_dim + _adapter(linear, lora_rank, both=True))


def _input_grad(linear: LinearShape, lora_rank: int, *, needed: bool) -> Work:
    """Gradient of the product's input; that of the adapter's middle is needed whenever there is an adapter."""
    base = linear.in_dim * linear.out_dim if needed else 0
    return _per_row(linear, base + _adapter(linear, lora_rank, both=needed))


def _weight_grad(linear: LinearShape, lora_rank: int, *, trains: bool) -> Work:
    base = linear.in_dim * linear.out_dim if trains else 0
    return _per_row(linear, base + _adapter(linear, lora_rank, both=True))


def _adapter(linear: LinearShape, lora_rank: int, *, both: bool) -> int:
    """Entries of B, and of A where `both`: W x + B (A x), A [r, in], B [out, r] (Hu et al., LoRA)."""
    if not linear.adapts:
        return 0
    return lora_rank * (linear.out_dim + (linear.in_dim if both else 0))


def _per_row(linear: LinearShape, entries: int) -> Work:
    return Work({Unit(linear.rows): 2 * entries * linear.copies}) if entries else Work()


def _scaled(work: Work, numerator: int, denominator: int) -> Work:
    return Work({unit: flops * numerator // denominator for unit, flops in work.flops.items()})


def _sum(works: Iterator[Work]) -> Work:
    total = Work()
    for work in works:
        total += work
    return total


def _quantity(unit: Unit, columns: Columns) -> Int64Array:
    column = columns[unit.column]
    if not unit.squared:
        return column
    outside = np.maximum(column - unit.window, 0) if unit.window else 0
    return np.asarray(column * column - outside * outside, dtype=np.int64)


def check_head_on(head_on: str) -> None:
    """Raise CostModelError for a choice that does not exist."""
    if head_on not in get_args(HeadOn):
        raise CostModelError(f"head_on={head_on!r}: choose {' or '.join(get_args(HeadOn))}")


def module_names(option: str, names: Collection[str]) -> tuple[str, ...]:
    """Names of modules as `TrainOptions` holds them.

    Raises:
        CostModelError: one text, whose letters would be taken for names.
    """
    if isinstance(names, str):
        raise CostModelError(f"{option}={names!r} is one text; names are given as a tuple: {option}=({names!r},)")
    return tuple(names)


def _check_names(option: str, names: Collection[str], known: Sequence[str]) -> None:
    if set(module_names(option, names)) - set(known):
        raise CostModelError(f"{option}={names!r}: modules are {', '.join(known)}, given as a tuple of names")
