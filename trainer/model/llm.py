"""The language model, or any run of its layers: what one pipeline stage holds.

    tokens [T] -> embed_tokens -> visual embeddings put at visual_index      first stage          [T, dim]
               or hidden [T, dim] from the stage before                      later stages
        | layers.<global index>: causal attention within a segment, gated MLP, pre-norm residuals [T, dim]
        v norm                                                               last stage           [T, dim]
    hidden; the head is applied by the loss, to labelled rows only

Parameter names hold the global layer index, so a checkpoint fits every split. Shapes as in Qwen2.5: grouped
key/value heads, biases on q, k and v only.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.model.attention import packed_attention
from trainer.model.rope import RMSNorm, mrope_angles, rotate
from trainer.model.vit import GatedMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMConfig:
    """Shape of the language model.

    Attributes:
        vocab_size, dim, depth, mlp_dim: ids, width, layers, hidden width of the gated MLP.
        num_heads, num_kv_heads: query heads and the key/value heads they share.
        rope_theta: base of the rotary frequencies.
        mrope_section: frequencies owned by (t, h, w); they add up to half a head.
        tie_embeddings: the head is the embedding matrix (both must then be on one stage).
        norm_eps: of every RMS norm.

    Raises:
        ConfigError: sizes that do not divide or add up.
    """

    vocab_size: int
    dim: int
    depth: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    mrope_section: tuple[int, int, int]
    rope_theta: float = 1_000_000.0
    tie_embeddings: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "depth", "num_heads", "num_kv_heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"llm {name}={getattr(self, name)}: at least 1")
        if self.dim % (2 * self.num_heads):
            raise ConfigError(f"llm dim={self.dim} must be a multiple of 2 * num_heads={2 * self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if len(self.mrope_section) != 3 or sum(self.mrope_section) != self.head_dim // 2 or min(self.mrope_section) < 0:
            raise ConfigError(
                f"mrope_section={self.mrope_section}: three numbers that add up to head_dim / 2 = {self.head_dim // 2}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


class Attention(nn.Module):
    """Causal attention within segments."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim)
        self.k_proj = nn.Linear(config.dim, kv_dim)
        self.v_proj = nn.Linear(config.dim, kv_dim)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, cu_seqlens: Tensor, angles: tuple[Tensor, Tensor], max_seqlen: int | None) -> Tensor:
        """[T, dim] -> [T, dim]."""
        # [T, heads * D] -> [T, heads, D]
        q, k, v = (proj(x).unflatten(1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, angles), rotate(k, angles)
        out = packed_attention(q, k, v, cu_seqlens, causal=True, max_seqlen=max_seqlen)
        return self.o_proj(out.flatten(1))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: LLMConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config.dim, config.mlp_dim, bias=False)
        self.input_layernorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, cu_seqlens: Tensor, angles: tuple[Tensor, Tensor], max_seqlen: int | None) -> Tensor:
        """[T, dim] -> [T, dim]."""
        x = x + self.self_attn(self.input_layernorm(x), cu_seqlens, angles, max_seqlen)
        return x + self.mlp(self.post_attention_layernorm(x))


class LLMStage(nn.Module):
    """Layers first_layer..last_layer (inclusive), with the embedding and the head where asked.

    Args:
        config: the whole model.
        first_layer, last_layer: global indices; first_layer = last_layer + 1 means no layer.
        has_embedding: takes tokens instead of hidden rows.
        has_head: ends with the final norm and holds the head.

    Raises:
        ConfigError: layers outside the model, or tied embeddings split over two stages.
    """

    def __init__(
        self, config: LLMConfig, *, first_layer: int, last_layer: int, has_embedding: bool, has_head: bool
    ) -> None:
        super().__init__()
        if not 0 <= first_layer <= last_layer + 1 <= config.depth:
            raise ConfigError(f"layers {first_layer}..{last_layer} are not within 0..{config.depth - 1}")
        if config.tie_embeddings and has_embedding != has_head:
            raise ConfigError(
                "tie_embeddings needs the embedding and the head on one stage; use pp_size <= 2 or untie them"
            )
        self.config = config
        self.first_layer, self.last_layer = first_layer, last_layer
        self.has_embedding, self.has_head = has_embedding, has_head
        if has_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(index): DecoderLayer(config) for index in range(first_layer, last_layer + 1)})
        if has_head:
            self.norm = RMSNorm(config.dim, eps=config.norm_eps)
            if not config.tie_embeddings:
                self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, dim]; logits = hidden @ head_weight.T.

        Raises:
            ConfigError: this stage has no head.
        """
        if not self.has_head:
            raise ConfigError(f"the stage with layers {self.first_layer}..{self.last_layer} has no head")
        return self.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight

    def forward(
        self,
        inputs: Tensor,
        *,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        visual: Tensor | None = None,
        visual_index: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Run the layers.

        Args:
            inputs: int64 tokens [T] with an embedding, else hidden [T, dim].
            position_ids: int64 [3, T], made per sample.
            cu_seqlens: int32 [n+1], on the CPU.
            visual: [V, dim], or None where the pack has no media.
            visual_index: int64 [V]: rows of T that `visual` replaces, each once.
            max_seqlen: longest segment if known.

        Returns:
            hidden [T, dim], after the final norm on the last stage.

        Raises:
            ConfigError: visual embeddings that do not fit the index, or on a stage without an embedding.
        """
        x = self.embed_tokens(inputs) if self.has_embedding else inputs
        if visual is not None:
            x = self._put_visual(x, visual, visual_index)
        angles = mrope_angles(
            position_ids,
            self.config.head_dim,
            theta=self.config.rope_theta,
            sections=self.config.mrope_section,
            like=x,
        )
        for layer in self.layers.values():
            x = layer(x, cu_seqlens, angles, max_seqlen)
        return self.norm(x) if self.has_head else x

    def _put_visual(self, x: Tensor, visual: Tensor, visual_index: Tensor | None) -> Tensor:
        """Replace rows; a copy by index, so it is deterministic and the placeholders' rows get no gradient."""
        rows = 0 if visual_index is None else visual_index.shape[0]
        if not self.has_embedding or visual.shape != (rows, x.shape[1]) or visual_index is None:
            where = "with" if self.has_embedding else "without"
            raise ConfigError(
                f"visual embeddings {[*visual.shape]} for {rows} places of width {x.shape[1]}, "
                f"on a stage {where} an embedding: one row per place, on the first stage"
            )
        return x.index_copy(0, visual_index, visual.to(x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, dim] -> [T, vocab_size]; for evaluation, since training never makes logits of unlabelled rows."""
        return hidden @ self.head_weight.to(hidden.dtype).T
