"""Greedy generation on one rank, for short answers in evaluation.

Price: no key/value cache, so n new tokens cost n forward passes over the sequence; the media are encoded once.
"""

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.model.vlm import LLM, VISUAL


def generate(
    pieces: nn.ModuleDict,
    *,
    tokens: Tensor,
    position_ids: Tensor,
    max_new_tokens: int,
    stop_id: int,
    visual_index: Tensor | None = None,
    patches: Tensor | None = None,
    grids: Tensor | None = None,
) -> list[int]:
    """Continue one prompt by the likeliest token, ties going to the smaller id.

    Args:
        pieces: "visual" and an "llm" with all layers (pp_size 1).
        tokens: int64 [T], T > 0: the prompt.
        position_ids: int64 [3, T]; new tokens go on from the largest position + 1 on all axes.
        max_new_tokens: at most so many.
        stop_id: ends the answer and is not part of it.
        visual_index, patches, grids: as in a micro-batch; None or empty without media.

    Returns:
        New ids, without `stop_id`.

    Raises:
        ConfigError: an empty prompt, or pieces that are only a part of the model.
    """
    llm = dict(pieces.items()).get(LLM)
    if llm is None or not (llm.has_embedding and llm.has_head):
        raise ConfigError("generation needs the whole language model on one rank; load the checkpoint with pp_size=1")
    if tokens.numel() == 0:
        raise ConfigError("generation needs a prompt of at least one token")
    device = llm.head_weight.device
    sequence, positions = tokens.to(device, torch.int64), position_ids.to(device)
    new: list[int] = []
    with torch.no_grad():
        visual = _encode(pieces, patches, grids, device)
        places = None if visual is None or visual_index is None else visual_index.to(device)
        while len(new) < max_new_tokens:
            hidden = llm(
                sequence,
                position_ids=positions,
                cu_seqlens=torch.tensor([0, sequence.numel()], dtype=torch.int32),
                visual=visual,
                visual_index=places,
                max_seqlen=sequence.numel(),
            )
            best = int(llm.logits(hidden[-1:]).argmax())
            if best == stop_id:
                break
            new.append(best)
            sequence = torch.cat([sequence, sequence.new_tensor([best])])
            positions = torch.cat([positions, (positions.max() + 1).expand(3, 1)], dim=1)
    return new


def _encode(pieces: nn.ModuleDict, patches: Tensor | None, grids: Tensor | None, device: torch.device) -> Tensor | None:
    if patches is None or grids is None or patches.shape[0] == 0:
        return None
    if VISUAL not in pieces:
        raise ConfigError("the prompt has media but this rank has no vision tower; load the checkpoint with pp_size=1")
    embeddings: Tensor = pieces[VISUAL](patches.to(device), grids)
    return embeddings
