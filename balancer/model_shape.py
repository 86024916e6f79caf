"""The shape of a multimodal model: which matrices and which attention its parts have, and on which rows they run.

    patches  --patch_embed--> --encoder: layers--> --projector--> visual rows -.
    tokens   --embedding (a look-up)------------------------------------------ + --llm: layers--> --head--> logits
    (optional) --generator: layers--> ...                                          domain of its own, after the LLM

A shape is numbers only: no weights, no framework. `balancer.flops` and `balancer.activation_memory` read it,
`balancer.model_config` makes it from a Hugging Face `config.json`. Price: norms, biases, rotary embedding and
element-wise work have no place here; they move bytes, not FLOPs, and calibration finds them.
"""

from dataclasses import dataclass
from typing import Literal

from balancer.cost_terms import Column
from balancer.errors import CostModelError

Span = Literal["full", "window", "causal"]
"""What a layer attends to: a whole image segment, a window of one, or the tokens before in the same document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A matrix product per row: [rows, in_dim] x [in_dim, out_dim].

    Attributes:
        name: for reports.
        in_dim, out_dim: of the matrix.
        rows: what is counted: patches, visual, tokens, labels ...
        copies: how many of them a row runs through (active experts).
        reads_stream: its input is the residual stream (through a norm), not a product of the same block.
        adapts: LoRA may adapt it (not routers, embeddings, heads).
    """

    name: str
    in_dim: int
    out_dim: int
    rows: Column
    copies: int = 1
    reads_stream: bool = False
    adapts: bool = True

    def __post_init__(self) -> None:
        require_positive(self, f"linear {self.name}", "in_dim", "out_dim", "copies")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Grouped-query attention, or multi-head latent attention where `kv_rank` is set.

    Attributes:
        dim: width of the residual stream.
        num_heads, num_kv_heads: query heads and the key/value heads they share.
        head_dim, value_dim: width of a query (and key) head and of a value head (0: `head_dim`).
        span: what a row attends to.
        window: tokens that a causal row sees, itself included; 0 for all. Windows of patches are in the counts.
        q_rank, kv_rank, rope_dim: latent attention (DeepSeek-V2): ranks of the compressed queries (0: not compressed)
            and of keys and values, and the part of a head that carries the position.
    """

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0
    span: Span = "causal"
    window: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "attention", "dim", "num_heads", "num_kv_heads", "head_dim")
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.window < 0 or min(self.q_rank, self.kv_rank, self.rope_dim) < 0:
            raise CostModelError(f"attention with window={self.window}, ranks ({self.q_rank}, {self.kv_rank})")

    @property
    def query_width(self) -> int:
        """All query heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def output_width(self) -> int:
        """All heads' values side by side."""
        return self.num_heads * self.value_dim

    @property
    def kv_width(self) -> int:
        """Keys and values of a row as attention reads them."""
        heads = self.num_heads if self.kv_rank else self.num_kv_heads
        return heads * (self.head_dim + self.value_dim)

    def linears(self, rows: Column) -> tuple[LinearShape, ...]:
        """Projections of one layer."""
        output = LinearShape(name="o", in_dim=self.output_width, out_dim=self.dim, rows=rows)
        if not self.kv_rank:
            return (
                LinearShape(name="q", in_dim=self.dim, out_dim=self.query_width, rows=rows, reads_stream=True),
                LinearShape(
                    name="k", in_dim=self.dim, out_dim=self.num_kv_heads * self.head_dim, rows=rows, reads_stream=True
                ),
                LinearShape(
                    name="v", in_dim=self.dim, out_dim=self.num_kv_heads * self.value_dim, rows=rows, reads_stream=True
                ),
                output,
            )
        expanded = self.num_heads * (self.head_dim - self.rope_dim + self.value_dim)
        compressed = (
            (
                LinearShape(name="q_a", in_dim=self.dim, out_dim=self.q_rank, rows=rows, reads_stream=True),
                LinearShape(name="q_b", in_dim=self.q_rank, out_dim=self.query_width, rows=rows),
            )
            if self.q_rank
            else (LinearShape(name="q", in_dim=self.dim, out_dim=self.query_width, rows=rows, reads_stream=True),)
        )
        return (
            *compressed,
            LinearShape(
                name="kv_a", in_dim=self.dim, out_dim=self.kv_rank + self.rope_dim, rows=rows, reads_stream=True
            ),
            LinearShape(name="kv_b", in_dim=self.kv_rank, out_dim=expanded, rows=rows),
            output,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """A dense or mixture-of-experts MLP.

    Attributes:
        dim, hidden: width of the stream and of one expert (or of the only MLP).
        gated: gate, up and down matrices; otherwise up and down.
        num_experts, active_experts: 0 for a dense MLP; otherwise experts there are and a token runs through.
        shared_hidden: hidden width of what every token runs through beside its experts; 0 for none.
        shared_gate: a scalar gate on the shared part.
    """

    dim: int
    hidden: int
    gated: bool = True
    num_experts: int = 0
    active_experts: int = 0
    shared_hidden: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "mlp", "dim", "hidden")
        if self.num_experts and not 1 <= self.active_experts <= self.num_experts:
            raise CostModelError(f"active_experts={self.active_experts} of num_experts={self.num_experts}")

    def linears(self, rows: Column) -> tuple[LinearShape, ...]:
        """Products of one layer; those of experts count once per active expert."""
        if not self.num_experts:
            return self._matrices("", self.hidden, 1, rows)
        parts = [
            LinearShape(
                name="router", in_dim=self.dim, out_dim=self.num_experts, rows=rows, reads_stream=True, adapts=False
            ),
            *self._matrices("expert_", self.hidden, self.active_experts, rows),
        ]
        if self.shared_hidden:
            parts += self._matrices("shared_", self.shared_hidden, 1, rows)
        if self.shared_gate:
            parts.append(
                LinearShape(name="shared_gate", in_dim=self.dim, out_dim=1, rows=rows, reads_stream=True, adapts=False)
            )
        return tuple(parts)

    def _matrices(self, prefix: str, hidden: int, copies: int, rows: Column) -> tuple[LinearShape, ...]:
        names = ("gate", "up") if self.gated else ("up",)
        up = [
            LinearShape(
                name=prefix + name, in_dim=self.dim, out_dim=hidden, rows=rows, copies=copies, reads_stream=True
            )
            for name in names
        ]
        down = LinearShape(name=prefix + "down", in_dim=hidden, out_dim=self.dim, rows=rows, copies=copies)
        return (*up, down)

    @property
    def num_parameters(self) -> int:
        """Matrix entries, those of inactive experts included."""
        per_expert = self.dim * self.hidden * (3 if self.gated else 2)
        shared = self.dim * self.shared_hidden * (3 if self.gated else 2) + self.dim * self.shared_gate
        return per_expert * max(self.num_experts, 1) + self.dim * self.num_experts + shared


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One transformer layer: attention, then an MLP, each with a residual."""

    attention: AttentionShape
    mlp: MLPShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """A run of layers on patches: the encoder, or a generator.

    Attributes:
        layers: in order.
        patch_dim: numbers in a patch (channels x frames x height x width); 0 where the input is embedded elsewhere.
        projector: products between the tower and the LLM, in order: merger, connector, deep-stack mergers.
        idle_layers: last layers that run forward but whose output nothing reads (LLaVA takes an earlier one).
    """

    layers: tuple[LayerShape, ...]
    patch_dim: int = 0
    projector: tuple[LinearShape, ...] = ()
    idle_layers: int = 0

    def __post_init__(self) -> None:
        if not self.layers or not 0 <= self.idle_layers < len(self.layers) or self.patch_dim < 0:
            raise CostModelError(
                f"a tower of {len(self.layers)} layers, {self.idle_layers} of them idle, patch_dim={self.patch_dim}"
            )

    @property
    def dim(self) -> int:
        """Width of the stream."""
        return self.layers[0].attention.dim

    @property
    def patch_embed(self) -> tuple[LinearShape, ...]:
        """The product that embeds a patch, if there is one."""
        if not self.patch_dim:
            return ()
        return (LinearShape(name="patch_embed", in_dim=self.patch_dim, out_dim=self.dim, rows="patches"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The language model.

    Attributes:
        layers: in order.
        vocab_size: rows of the embedding and of the head.
        tied: the head is the embedding matrix.
    """

    layers: tuple[LayerShape, ...]
    vocab_size: int
    tied: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "language model", "vocab_size")
        if not self.layers:
            raise CostModelError("a language model has at least one layer")

    @property
    def dim(self) -> int:
        """Width of the stream."""
        return self.layers[0].attention.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A whole model.

    Attributes:
        name: preset, folder or `model_type`.
        llm: the language model.
        encoder: the vision tower; None for a text model.
        generator: a stack that runs after the LLM on the patches; None for most models.
        note: what was read with less than certainty; empty if nothing.
    """

    name: str
    llm: DecoderShape
    encoder: TowerShape | None = None
    generator: TowerShape | None = None
    note: str = ""

    @property
    def num_parameters(self) -> int:
        """Entries of all matrices; biases, norms and position tables are not counted (about 0.1 %)."""
        total = self.llm.vocab_size * self.llm.dim * (1 if self.llm.tied else 2)
        towers = [tower for tower in (self.encoder, self.generator) if tower is not None]
        for tower in towers:
            total += sum(_entries(linear) for linear in (*tower.patch_embed, *tower.projector))
        for layer in (*self.llm.layers, *(layer for tower in towers for layer in tower.layers)):
            total += sum(_entries(linear) for linear in layer.attention.linears("tokens")) + layer.mlp.num_parameters
        return total


def _entries(linear: LinearShape) -> int:
    return linear.in_dim * linear.out_dim


def require_positive(shape: object, what: str, *names: str) -> None:
    """Raise unless the fields `names` of a shape are positive integers.

    Raises:
        CostModelError: with the name and the value.
    """
    for name in names:
        value = getattr(shape, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CostModelError(f"{what}: {name}={value!r}: a model dimension is a positive integer")
