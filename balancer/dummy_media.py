"""Media for batches without: a sharded encoder then runs on every rank in every micro-batch, and adds nothing.

    MicroBatch, text only   --with_dummy_media-->  the same tokens + merge^2 patches of zeros, grid (1, merge, merge)
    patches [P + p, d]      --your encoder------>  visual [V + 1, D]                       V = 0 in a text-only batch
    embeds [T, D], visual   --place_visual------>  embeds with rows at visual_index  +  0 * (rows that are left over)

Under FSDP or ZeRO-3 the parameters of an encoder are gathered when it runs, by all ranks together. A rank that skips it
leaves the others waiting, or answers with the parameters of its next layer: an abort, or wrong numbers if sizes agree.
Running is not enough: without a path through the graph the encoder has no gradients on this rank, and the others wait
in the backward. So what is left over is added with weight zero.

Price: an encoder pass over merge^2 patches, and a sum, in batches without media. Zero times infinity is no number: an
encoder that overflows on zero patches would spread it.
"""

from dataclasses import replace

import torch

from balancer.batch import MicroBatch
from balancer.errors import BalancerError


def with_dummy_media(batch: MicroBatch, merge: int, patch_dim: int) -> MicroBatch:
    """The batch with one smallest medium if it has none; tokens, labels, positions and visual_index are untouched.

    Args:
        batch: one with media is returned as it is.
        merge: patches along an edge that the encoder merges into one visual token; the dummy has merge^2 patches.
        patch_dim: values of a patch, d.

    Returns:
        A batch whose last `num_dummy_patches` patches belong to no token.

    Raises:
        BalancerError: merge or patch_dim below 1, or patches of another width.
    """
    for name, value in (("merge", merge), ("patch_dim", patch_dim)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BalancerError(f"{name}={value!r}: give a whole number from 1 on, the one your encoder has")
    patches = batch.patches
    if patches.shape[1] not in ({patch_dim} if len(patches) else {0, patch_dim}):
        raise BalancerError(
            f"patches of this batch have {patches.shape[1]} values, patch_dim={patch_dim}: give the width that the "
            "reader makes, in_channels * temporal_patch_size * patch_size^2 of the vision config"
        )
    if len(patches):
        return batch
    dummy = torch.zeros((merge * merge, patch_dim), dtype=patches.dtype, device=patches.device)
    grid = torch.tensor([[1, merge, merge]], dtype=batch.grids.dtype, device=batch.grids.device)
    return replace(batch, patches=dummy, grids=grid, num_dummy_patches=len(dummy))


def place_visual(embeds: torch.Tensor, visual: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Token embeddings with visual ones put in; rows of `visual` beyond the index are added with weight zero.

    Args:
        embeds: [T, D], not changed.
        visual: [V + k, D], what the encoder made of all patches of the batch; the k rows of a dummy come last.
        index: int64 [V], `MicroBatch.visual_index`.

    Returns:
        [T, D], of the type of `embeds`.

    Raises:
        BalancerError: fewer visual rows than positions, or rows of another width.
    """
    num_visual = index.numel()
    if visual.shape[0] < num_visual or visual.shape[1:] != embeds.shape[1:]:
        raise BalancerError(
            f"visual embeddings {list(visual.shape)} do not fill {num_visual} positions of token embeddings "
            f"{list(embeds.shape)}: give what the encoder makes of all patches of this batch, merged to visual tokens"
        )
    visual = visual.to(embeds.dtype)
    placed = embeds.index_copy(0, index, visual[:num_visual])
    left_over = visual[num_visual:]
    # Times zero before the sum, which could overflow.
    return placed + (left_over * 0).sum() if len(left_over) else placed
