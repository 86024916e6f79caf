"""Whether a model keeps the samples of a pack apart: what its config says, then one small experiment.

    config: kinds of layers, attention back end   --known to mix samples, or unknown-->  PackingError
        |
        v  probe: two packs that differ in the first sample only
    | a a a a a a | b b b b |      logits of b    must be the same
    | c c c c c c | b b b b |      logits of b

A linear-attention, convolution or recurrent layer carries its state over a boundary whatever the batch says; an
attention back end without a mask function of its own gets no mask, and looks everywhere. Neither gives an error: the
loss just becomes a little worse. The alignment tail is no sample: a pack of one sample and a tail needs no boundary,
because attention is causal and the tail has no labels.

Price: the probe is two forward passes of a few tokens, in eval mode, without gradients, on the device of the model. It
proves nothing about kernels that are chosen for other sizes or in training only; and layers that could be packed with
special kernels are refused by their kind, because the fall-back of those kernels mixes samples.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from balancer.adapters.hf_batch import HfCollate
from balancer.errors import PackingError

PACKABLE_LAYERS: Mapping[str, bool] = {
    "attention": True,
    "full_attention": True,
    "sliding_attention": True,
    "chunked_attention": True,
    "dense": True,
    "sparse": True,
    "moe": True,
    "conv": False,
    "hybrid": False,
    "hybrid_sliding": False,
    "linear_attention": False,
    "mamba": False,
    "recurrent": False,
    "compressed_sparse_attention": False,
    "heavily_compressed_attention": False,
}
"""Layer kinds of transformers' configs: False where state, or a block of keys, spans a boundary."""

_RECURRENT_MODELS = {"falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "xlstm"}
_MASKED = {"eager", "flex_attention", "sdpa"}
_PROBE_TOKENS = (9, 7)


def check_packable(model: torch.nn.Module, *, probe: bool = True, collate: HfCollate | None = None) -> None:
    """Return if the model can be fed packs; call it once, before training.

    Under a sharding wrapper every rank has to call it, as for any forward pass.

    Args:
        model: of transformers, or wrapped as DistributedDataParallel does.
        probe: run the experiment; False where no forward pass is possible yet: kinds of layers and attention back
            ends that are not known here are refused then.
        collate: makes the packs of the probe; None: `HfCollate.for_model(model)`. Pass the one that is trained with.

    Raises:
        PackingError: which layers or back end mix samples, and what to do.
    """
    wrapped = getattr(model, "module", None)
    inner = wrapped if isinstance(wrapped, torch.nn.Module) else model
    config = getattr(inner, "config", None)
    if config is None:
        raise PackingError(
            f"{type(inner).__name__} has no config and is no model of transformers. Feed it MicroBatch "
            f"(output='batch') and give cu_seqlens to its attention."
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    unknown = [*_unknown_layers(config, text), *_unknown_back_end(text)]
    if probe:
        _probe(model, inner, text, collate or HfCollate.for_model(config))
    elif unknown:
        raise PackingError(
            f"{unknown[0]} is not known to keep samples apart. "
            f"Call check_packable with probe=True, or load the model with attn_implementation='sdpa'."
        )


def _unknown_layers(config: Any, text: Any) -> list[str]:
    """Kinds that the registry does not have; raises for those that mix samples."""
    if getattr(config, "is_encoder_decoder", False):
        raise PackingError(
            f"{config.model_type} is an encoder-decoder: its cross-attention sees all samples of a pack. "
            f"Use output='batch' with a collate_fn that pads."
        )
    kinds: set[str] = {"recurrent"} if text.model_type in _RECURRENT_MODELS else set()
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds.update(getattr(text, name, None) or ())
    mixing = sorted(kind for kind in kinds if PACKABLE_LAYERS.get(kind) is False)
    if mixing:
        raise PackingError(
            f"{text.model_type} has layers of kind {', '.join(mixing)}, which carry state from one sample of a pack "
            f"into the next. Feed it one sample per micro-batch (batch_size=1), or pad with a collate_fn of your own."
        )
    return [f"a layer of kind {kind}" for kind in sorted(kinds - PACKABLE_LAYERS.keys())]


def _back_end(text: Any) -> str:
    return getattr(text, "_attn_implementation", None) or "eager"


def _unknown_back_end(text: Any) -> list[str]:
    """The back end if only an experiment tells; raises where it is known to mix samples."""
    name = _back_end(text)
    if name.startswith("paged|"):
        raise PackingError(
            f"attention back end {name!r} is for generation and takes its boundaries from a cache. "
            f"Load the model with attn_implementation={name.removeprefix('paged|')!r}."
        )
    return [] if name in _MASKED or "flash" in name else [f"attention back end {name!r}"]


def _probe(model: torch.nn.Module, inner: torch.nn.Module, text: Any, collate: HfCollate) -> None:
    first, second = _PROBE_TOKENS
    tokens = _ordinary_tokens(inner, text, collate, 2 * first + second)
    behind = tokens[2 * first :]
    logits = [
        _logits(model, inner, collate, [front, behind])[first : first + second]
        for front in (tokens[:first], tokens[first : 2 * first])
    ]
    moved = float((logits[0] - logits[1]).abs().max())
    scale = float(logits[0].abs().max())
    # Other experts, other sums: a mixture of experts may round differently. A sample that is seen moves far more.
    allowed = max(4 * torch.finfo(logits[0].dtype).eps, 1e-5) * scale
    if not moved <= allowed:
        raise PackingError(
            f"{text.model_type} with attention back end {_back_end(text)!r} mixes the samples of a pack: another first "
            f"sample moves the logits of the second one by {moved:.2g} (of at most {scale:.2g}). "
            f"{_remedy(text, collate)}"
        )


def _remedy(text: Any, collate: HfCollate) -> str:
    if not collate.no_cache:
        return "A cache hides boundaries: leave no_cache=True in HfCollate."
    if collate.num_position_axes != HfCollate.for_model(text).num_position_axes:
        return "Its positions have another number of axes: use HfCollate.for_model(model)."
    return "Load the model with attn_implementation='sdpa' or 'flash_attention_2', or train without packs."


def _ordinary_tokens(inner: torch.nn.Module, text: Any, collate: HfCollate, count: int) -> list[int]:
    """`count` ids spread over the vocabulary, none of which the config names as special."""
    special = {collate.image_token_id, collate.video_token_id}
    for config in (inner.config, text):
        named = [value for name, value in vars(config).items() if "token" in name]
        special.update(one for value in named for one in (value if isinstance(value, list) else [value]))
    vocab = [one for one in range(min(int(text.vocab_size), 4096)) if one not in special]
    chosen = np.linspace(0, len(vocab) - 1, count).astype(int)
    order = np.random.Generator(np.random.Philox(0)).permutation(count)
    return [vocab[one] for one in chosen[order]]


def _logits(
    model: torch.nn.Module, inner: torch.nn.Module, collate: HfCollate, samples: list[list[int]]
) -> torch.Tensor:
    """[T, vocabulary] of a pack, in eval mode; modules are left as they were."""
    batch = collate([{"input_ids": tokens, "labels": tokens} for tokens in samples])
    del batch["labels"]
    device = next(inner.parameters()).device
    if device.type == "meta":
        raise PackingError("the model has no weights yet (meta device). Load it first, or call with probe=False.")
    moved = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in batch.items()}
    _check_forward(inner, moved)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            out = model(**moved)
    finally:
        for module in training:
            module.training = True
    logits = getattr(out, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise PackingError(f"{type(inner).__name__} gives no logits to compare. Pass the model with its head.")
    return logits[0]  # axes: (batch of one, tokens, vocabulary)


def _check_forward(inner: torch.nn.Module, batch: Mapping[str, Any]) -> None:
    parameters = inspect.signature(inner.forward).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    missing = sorted(batch.keys() - parameters.keys())
    if missing and not takes_all:
        raise PackingError(
            f"the forward of {type(inner).__name__} does not take {', '.join(missing)}, so it cannot know the "
            f"boundaries of a pack. Update transformers, or pad with a collate_fn of your own."
        )
