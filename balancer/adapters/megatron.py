"""The boundaries of a pack in the names of Megatron's `PackedSeqParams` ("thd": tokens, heads, width; no batch axis).

    MicroBatch | its dict | batch of HfCollate  --packed_seq_params-->  {qkv_format, cu_seqlens_q, ..., max_seqlen_kv}
                                                                         PackedSeqParams(**fields)

The alignment tail is one more sequence, so `cu_seqlens` end at the last token, nothing is left uninitialised, and the
padded boundaries, which say where sequences lie in memory, equal the real ones.

Price: Megatron's context parallelism cuts *every* sequence into 2 x cp_size chunks. `align_tokens` fills up the pack,
not its samples, so packs of several samples seldom fit it; such a pack is refused here instead of in a kernel.
"""

from collections.abc import Mapping
from typing import Any

import torch

from balancer.batch import MicroBatch
from balancer.errors import PackingError


def packed_seq_params(batch: MicroBatch | Mapping[str, Any], *, cp_size: int = 1) -> dict[str, Any]:
    """Arguments of Megatron's `PackedSeqParams`.

    Args:
        batch: `MicroBatch`, a mapping of its fields (output="dict"), or a batch of `HfCollate` (output="hf").
        cp_size: context-parallel ranks.

    Returns:
        `qkv_format` "thd"; `cu_seqlens_q`, `cu_seqlens_kv` and both with `_padded`: int32 [num_segments + 1] on the
        device of the tokens; `max_seqlen_q`, `max_seqlen_kv`: int.

    Raises:
        PackingError: no boundaries in the batch, or a segment that context parallelism cannot cut.
    """
    tokens, cu_seqlens, max_seqlen = _boundaries(batch)
    if cp_size > 1:
        _check_cuttable(cu_seqlens, 2 * cp_size)
    cu_seqlens = cu_seqlens.to(device=tokens.device, dtype=torch.int32)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return {
        "qkv_format": "thd",
        **dict.fromkeys(names, cu_seqlens),
        "max_seqlen_q": max_seqlen,
        "max_seqlen_kv": max_seqlen,
    }


def _boundaries(batch: MicroBatch | Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(tokens, cu_seqlens, max_seqlen)."""
    if isinstance(batch, MicroBatch):
        return batch.tokens, batch.cu_seqlens, batch.max_seqlen
    for names in (("tokens", "cu_seqlens", "max_seqlen"), ("input_ids", "cu_seq_lens_q", "max_length_q")):
        if all(name in batch for name in names):
            tokens, cu_seqlens, max_seqlen = (batch[name] for name in names)
            return tokens, cu_seqlens, int(max_seqlen)
    raise PackingError(
        f"the batch has no boundaries (it has: {', '.join(batch) or 'nothing'}). Take one of BalancedDataLoader with "
        f"output='batch', 'dict' or 'hf'."
    )


def _check_cuttable(cu_seqlens: torch.Tensor, chunks: int) -> None:
    lengths = cu_seqlens.diff().tolist()
    odd = [length for length in lengths if length % chunks]
    if odd:
        raise PackingError(
            f"{len(odd)} of {len(lengths)} segments cannot be cut into {chunks} chunks for context parallelism: "
            f"lengths {', '.join(map(str, odd[:5]))}{', ...' if len(odd) > 5 else ''}. Pad samples to a multiple of "
            f"{chunks} in the dataset; align_tokens pads the pack only."
        )
