"""The language model of a `config.json` as a DecoderShape: dense, mixture of experts, windows, latent attention.

    hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size        always
    num_key_value_heads, head_dim, layer_types, sliding_window, experts, kv_lora_rank ...     where the family has them

Families share these names, so one reader serves them; the tables below say where a family differs. Defaults are those
of its configuration class in transformers.

Refused is what has no closed form here: layers that are no attention (state space, linear, recurrent), attention over
chosen or chunked tokens, and to another sequence. `layer_types` names them; hybrids without it are known by the fields
that only they have, in the config of the LLM or beside it, or by their family: a config may leave out what is the
default of its class.
"""

import re
from collections.abc import Mapping
from typing import Any

from balancer.config_fields import ConfigFields
from balancer.errors import CostModelError
from balancer.model_shape import AttentionShape, DecoderShape, LayerShape, MLPShape

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8}
_QWEN2 = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "mixtral": {**_MISTRAL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gemma2": {**_GEMMA, "vocab_size": 256000},
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "sliding_window_pattern": 6},
}
KNOWN_TYPES = frozenset(
    {
        *_DEFAULTS,
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "gemma",
        "glm4",
        "glm4_moe",
        "glm4v_text",
        "gpt_oss",
        "granite",
        "granitemoe",
        "internlm2",
        "internlm3",
        "kimi_k2",
        "olmo2",
        "olmoe",
        "phi3",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl",
        "qwen2_vl_text",
        "qwen3_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "smollm3",
    }
)
# Two matrices instead of three.
_PLAIN_MLP = frozenset({"falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "nemotron", "opt", "phi", "starcoder2"})
_TIED_BY_DEFAULT = ("gemma", "cohere")
# Every n-th layer sees all tokens, the others a window.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")

# Fields that tell of what has no closed form (patterns of whole names), and of what.
_REFUSED_FIELDS = (
    (r"is_encoder_decoder", "an encoder and a decoder"),
    (r"add_cross_attention|cross_attention_(layers|frequency)|cross_layer_interval|cross_attn_\w+", "cross-attention"),
    (r"(\w+_)?mamba_\w+|(\w+_)?ssm_\w+|state_size|time_step_\w+", "state-space layers"),
    (r"(\w+_)?linear_att(n|ention)(_\w+)?|linear_(num|key|value|head|conv)_\w+|kda_\w+", "linear attention"),
    (r"lru_width|rescale_every|conv_L_cache|short_conv_\w+", "recurrent or convolution layers"),
    (r"attention_chunk_size", "attention in chunks"),
    (r"index_topk(_\w+)?|sparse_attention(_\w+)?|block_?sparse_\w+", "sparse attention"),
)
# Which layers are of which kind: where `layer_types` is given it says the same.
_REFUSED_ORDERS = (
    r"full_attention_interval|attn_layer_(period|offset|indices)|full_attn_idxs|attn_type_list|attention_types"
    r"|layers?_block_types?|block_types|hybrid_\w+|global_attn_\w+|global_attention_every_\w+|layer_group_size",
    "layers of several kinds",
)
# Families (patterns of whole names) whose defaults have layers without a closed form, and of what kind.
_REFUSED_FAMILIES = (
    (r"(falcon_?)?mamba\d*|rwkv\d*|xlstm|retnet", "no attention"),
    (
        r"jamba|bamba|zamba\d*|nemotron_h|falcon_?h1|granitemoehybrid|plamo2|hymba|samba|phi4flash",
        "state-space layers",
    ),
    (r"kimi_linear|bailing_(hybrid|moe_linear)|olmo_hybrid|minimax_(text_01|m1)", "linear attention"),
    (r"recurrent_?gemma|griffin|stripedhyena", "recurrent or convolution layers"),
    (r"deepseek_v32", "sparse attention"),
    (r"mllama(_text_model)?|idefics", "cross-attention"),
)
# The same, of families whose `layer_types` says it all where it is given.
_REFUSED_WITHOUT_LAYER_TYPES = (
    (r"qwen3_next|qwen3_5(_moe)?(_text)?|qwen4_exp(_text)?|glm5_next(_text)?|minimax", "linear attention"),
    (r"lfm2(_\w+)?|lfm3", "recurrent or convolution layers"),
    (r"llama4(_text)?", "attention in chunks"),
    (r"gpt_neo", "layers of several kinds"),
)


def decoder_shape(text: ConfigFields, root: ConfigFields) -> tuple[DecoderShape, str]:
    """(shape, note) of a language model.

    Args:
        text: its own section.
        root: the whole config, which may hold `tie_word_embeddings`.

    Raises:
        CostModelError: a missing field, or layers without a closed form.
    """
    kind = text.model_type
    _refuse_other_layers(text, root)
    text = text.with_defaults(_DEFAULTS.get(kind, {}))
    depth = text.integer("num_hidden_layers")
    if depth > 10_000:
        raise CostModelError(f"{text.place}: num_hidden_layers={depth} is no number of layers")
    windows = _windows(text, depth)
    layers = tuple(
        LayerShape(attention=_attention(text, windows[index]), mlp=_mlp(text, index)) for index in range(depth)
    )
    tied = next((part.flag("tie_word_embeddings", default=False) for part in (root, text) if _says_tied(part)), None)
    if tied is None:
        tied = kind.startswith(_TIED_BY_DEFAULT)
    note = "" if kind in KNOWN_TYPES or kind in _PLAIN_MLP else f"model_type {kind!r} read by its generic fields"
    return DecoderShape(layers=layers, vocab_size=text.integer("vocab_size"), tied=tied), note


def _refuse_other_layers(text: ConfigFields, root: ConfigFields) -> None:
    """Raises CostModelError where fields, or the family, say what has no closed form."""
    listed = text.has("layer_types")
    refused = _REFUSED_FIELDS if listed else (*_REFUSED_FIELDS, _REFUSED_ORDERS)
    families = _REFUSED_FAMILIES if listed else (*_REFUSED_FAMILIES, *_REFUSED_WITHOUT_LAYER_TYPES)
    for part in (text, root):
        for pattern, meaning in refused:
            # Configs also hold the switches of what they do not have: false, 0, null or an empty list.
            found = next((name for name, value in part.values.items() if value and re.fullmatch(pattern, name)), None)
            if found is not None:
                raise _no_closed_form(part, f"{found}={str(part.values[found])[:60]} tells of {meaning}")
        for pattern, meaning in families:
            if re.fullmatch(pattern, part.model_type):
                raise _no_closed_form(part, f"model_type {part.model_type!r} has {meaning}")


def _no_closed_form(part: ConfigFields, reason: str) -> CostModelError:
    return CostModelError(
        f"{part.place}: {reason}: only full_attention and sliding_attention have a closed form here; "
        "fit a cost model to measurements instead"
    )


def _says_tied(part: ConfigFields) -> bool:
    return part.has("tie_word_embeddings")


def _attention(text: ConfigFields, window: int) -> AttentionShape:
    dim, heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    if text.has("kv_lora_rank"):
        rope = text.integer("qk_rope_head_dim")
        return AttentionShape(
            dim=dim,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=text.integer("qk_nope_head_dim") + rope,
            value_dim=text.integer("v_head_dim"),
            window=window,
            q_rank=text.integer("q_lora_rank", default=0, minimum=0),
            kv_rank=text.integer("kv_lora_rank"),
            rope_dim=rope,
        )
    return AttentionShape(
        dim=dim,
        num_heads=heads,
        num_kv_heads=text.integer("num_key_value_heads", default=heads),
        head_dim=text.integer("head_dim", default=max(dim // heads, 1)),
        window=window,
    )


def _mlp(text: ConfigFields, index: int) -> MLPShape:
    dim = text.integer("hidden_size")
    gated = text.model_type not in _PLAIN_MLP
    experts = text.integer(*_EXPERTS, default=0, minimum=0)
    if experts <= 1 or not _is_sparse(text, index):
        return MLPShape(dim=dim, hidden=text.integer("intermediate_size", "ffn_dim", "n_inner"), gated=gated)
    hidden = text.integer("moe_intermediate_size", "intermediate_size")
    shared = text.integer("shared_expert_intermediate_size", "shared_intermediate_size", default=0, minimum=0)
    if not shared:
        shared = hidden * text.integer("n_shared_experts", "num_shared_experts", default=0, minimum=0)
    return MLPShape(
        dim=dim,
        hidden=hidden,
        gated=gated,
        num_experts=experts,
        active_experts=text.integer(*_ACTIVE),
        shared_hidden=shared,
        shared_gate=text.model_type == "qwen2_moe",
    )


def _is_sparse(text: ConfigFields, index: int) -> bool:
    """Whether a layer of a mixture has experts (DeepSeek, Qwen and Llama 4 each say it in their own way)."""
    if index in text.integers("mlp_only_layers") or index < text.integer("first_k_dense_replace", default=0, minimum=0):
        return False
    step = text.integer("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1)
    return (index + 1) % step == 0


def _windows(text: ConfigFields, depth: int) -> tuple[int, ...]:
    """Tokens that each layer sees; 0 for all.

    Raises:
        CostModelError: layer types that are no attention or not as many as layers.
    """
    types = text.texts("layer_types")
    if types:
        if len(types) != depth:
            raise CostModelError(f"{text.place}: layer_types has {len(types)} entries for {depth} layers")
        return tuple(_window_of(text, kind) for kind in types)
    if not text.has("sliding_window") or not text.flag("use_sliding_window", default=not _opts_in(text)):
        return (0,) * depth
    window = text.integer("sliding_window", minimum=0)
    pattern = text.integer(
        "sliding_window_pattern", "_sliding_window_pattern", default=_PATTERNS.get(text.model_type, 0), minimum=0
    )
    if pattern:
        return tuple(0 if (index + 1) % pattern == 0 else window for index in range(depth))
    first = text.integer("max_window_layers", default=0, minimum=0) if _opts_in(text) else 0
    return tuple(window if index >= first else 0 for index in range(depth))


def _opts_in(text: ConfigFields) -> bool:
    """Qwen's configs carry a window that only `use_sliding_window` switches on, from `max_window_layers` up."""
    return text.model_type.startswith("qwen")


def _window_of(text: ConfigFields, kind: str) -> int:
    if kind == "full_attention":
        return 0
    if kind == "sliding_attention":
        return text.integer("sliding_window")
    raise _no_closed_form(text, f"layer_types has {kind!r}")
