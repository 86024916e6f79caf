"""The two models that steps are measured with, each one forward and backward of a micro-batch as a function.

    MicroBatch --demo--> trainer.model: vision tower, LLM, loss of labelled rows          backward
               --hf----> transformers Qwen2.5-VL, random weights, its own forward + loss  backward

Both have the same sizes. Torch, the trainer and transformers are imported when a model is built, in a process that
torchrun starts; nothing else of `tools` needs them.

Attention of the transformers model is a function of our own, registered with transformers: one fused kernel call a
segment, boundaries from `cu_seq_lens_q`, what its flash-attention back ends do on a GPU. With `sdpa` it would build a
dense mask over the whole pack, so that every pack pays for the square of its length: no user of packs trains so.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dataloaders.tokenizer import VOCAB_SIZE, Special

DEMO, HF = "demo", "hf"
MODELS = (DEMO, HF)
_ATTENTION = "segments"
_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """A model that can be run forward and backward.

    Attributes:
        parameters: all of them, in one order on every rank.
        prepare: micro-batch -> what the forward takes; outside of what is timed, as a collate function would be.
        loss_sum: prepared micro-batch -> sum of the losses of its label tokens, a scalar with a graph.
    """

    name: str
    parameters: Sequence[Any] = field(repr=False)
    prepare: Callable[[Any], Any]
    loss_sum: Callable[[Any], Any]


def build(name: str, *, tiny: bool = False) -> Trainable:
    """The model `name` with weights from a seed, float32 on the CPU.

    Args:
        tiny: the smallest sizes that every mechanism allows.

    Raises:
        KeyError: no such model.
    """
    if name not in _BUILDERS:
        raise KeyError(f"model {name!r} does not exist; choose one of {', '.join(MODELS)}")
    return _BUILDERS[name](tiny)


def _demo(tiny: bool) -> Trainable:
    model = importlib.import_module("trainer.model")
    presets = importlib.import_module("trainer.model.presets")
    loss, vit = importlib.import_module("trainer.loss"), importlib.import_module("trainer.model.vit")
    layout = importlib.import_module("balancer.layout").Layout()
    modules = model.build_pieces(presets.preset("check" if tiny else "demo"), layout, 0, seed=_SEED)

    def prepare(batch: Any) -> Any:
        vit.vision_order.cache_clear()  # in training no two micro-batches are alike, so each works out its order
        return batch

    def loss_sum(batch: Any) -> Any:
        visual = modules["visual"](batch.patches, batch.grids) if len(batch.grids) else None
        llm = modules["llm"]
        hidden = llm(
            batch.tokens,
            position_ids=batch.position_ids,
            cu_seqlens=batch.cu_seqlens,
            visual=visual,
            visual_index=batch.visual_index,
            max_seqlen=batch.max_seqlen,
        )
        return loss.head_cross_entropy_sum(hidden, llm.head_weight, batch.labels, batch.loss_weights)

    return Trainable(name=DEMO, parameters=list(modules.parameters()), prepare=prepare, loss_sum=loss_sum)


def _transformers(tiny: bool) -> Trainable:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    transformers.AttentionInterface.register(_ATTENTION, _segment_attention)
    transformers.AttentionMaskInterface.register(_ATTENTION, _no_mask)
    config = transformers.Qwen2_5_VLConfig(**(_config(16, 24, 2, 1) if tiny else _config(64, 128, 4, 2)))
    torch.manual_seed(_SEED)
    model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(
        config, attn_implementation={"text_config": _ATTENTION, "vision_config": "sdpa"}, dtype=torch.float32
    )
    model.train()

    def loss_sum(inputs: Mapping[str, Any]) -> Any:
        # Divided by 1 here and by the labels of the step where steps are made, like the other model.
        return model(**inputs, num_items_in_batch=1, use_cache=False).loss

    return Trainable(
        name=HF, parameters=list(model.parameters()), prepare=lambda batch: hf_inputs(batch, torch), loss_sum=loss_sum
    )


def _config(vision_dim: int, dim: int, depth: int, num_kv_heads: int) -> dict[str, Any]:
    """Sizes of the trainer's presets `demo` and `check`."""
    heads = 2 * num_kv_heads
    half = dim // heads // 2
    return {
        "text_config": {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": dim,
            "intermediate_size": 3 * dim,
            "num_hidden_layers": 4,
            "num_attention_heads": heads,
            "num_key_value_heads": num_kv_heads,
            "max_position_embeddings": 1 << 15,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
            },
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": int(Special.PAD),
        },
        "vision_config": {
            "depth": depth,
            "hidden_size": vision_dim,
            "intermediate_size": 3 * vision_dim,
            "num_heads": 2,
            "out_hidden_size": dim,
            "fullatt_block_indexes": list(range(1, depth, 2)),
        },
        "image_token_id": int(Special.IMAGE_PAD),
        "video_token_id": int(Special.VIDEO_PAD),
        "vision_start_token_id": int(Special.VISION_START),
        "vision_end_token_id": int(Special.VISION_END),
        "tie_word_embeddings": False,
    }


def hf_inputs(batch: Any, torch: Any) -> dict[str, Any]:
    """A `MicroBatch` in transformers' spelling of a pack: text positions first, labels unshifted, media by kind."""
    bounds = batch.cu_seqlens
    lengths = (bounds[1:] - bounds[:-1]).long()
    text = torch.arange(len(batch.tokens)) - torch.repeat_interleave(bounds[:-1].long(), lengths)
    labels = torch.full_like(batch.labels, -100)
    labels[1:] = batch.labels[:-1]
    inputs = {
        "input_ids": batch.tokens[None],
        "labels": labels[None],
        "position_ids": torch.cat([text[None], batch.position_ids])[:, None],
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }
    sizes = batch.grids.prod(dim=1)
    is_video = batch.grids[:, 0] > 1
    of_video = torch.repeat_interleave(is_video, sizes)
    for kind, chosen, rows in (("image", ~is_video, ~of_video), ("video", is_video, of_video)):
        if bool(chosen.any()):
            inputs["pixel_values" if kind == "image" else "pixel_values_videos"] = batch.patches[rows]
            inputs[f"{kind}_grid_thw"] = batch.grids[chosen]
    return inputs


def _segment_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, scaling: float, cu_seq_lens_q: Any, **_: Any
) -> tuple[Any, None]:
    """Causal attention within segments: query [1, H, T, D], key and value [1, Hk, T, D] -> [1, T, H, D]."""
    torch = importlib.import_module("torch")
    lengths = (cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist()
    repeats = module.num_key_value_groups
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), is_causal=True, scale=scaling
        )
        for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Segments carry the boundaries; a mask [T, T] is what they avoid."""


_BUILDERS: Mapping[str, Callable[[bool], Trainable]] = {DEMO: _demo, HF: _transformers}
