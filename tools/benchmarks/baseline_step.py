"""What systems that balance a training step receive, and what they give back.

    StepGrid: n samples on R ranks x M micro-batches, with media and stage times   --baseline-->   Placed

`Grid` (see `baseline_types`) has what a packer knows: sizes and costs. A system that balances multimodal training also
reads images and patches, and one that orders micro-batches reads the time of its pipeline stages.

Price: costs are ours. A system that counts tokens gets tokens; one that has a cost function, fitted or assumed, gets
the times the judge uses, which is better than what it has.
"""

from dataclasses import dataclass

import numpy as np

from tools.benchmarks.baseline_types import Grid, IntArray

NOWHERE = -1
"""Rank and slot of a sample that a system lost or keeps for a later step."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepGrid(Grid):
    """Samples of one step; columns int64 [n]. `costs` [n, 2] is encoder and LLM, forward and backward.

    Attributes:
        text, images, patches: text tokens, encoder sequences, encoder tokens.
        rank_forward, rank_backward: int64 [n, P], times on every pipeline rank of a replica; P = 1 where encoder and
            LLM share a rank.
    """

    text: IntArray
    images: IntArray
    patches: IntArray
    rank_forward: IntArray
    rank_backward: IntArray

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_cells(self) -> int:
        """Ranks times micro-batches."""
        return self.num_ranks * self.num_slots


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """Where samples run.

    Attributes:
        cells: int64 [n, 2], rank and micro-batch of every sample; NOWHERE for one that does not run in this step.
        encoder_cells: int64 [n, 2], where the media of a sample are encoded, by systems that exchange encoder inputs
            and outputs between ranks; None: with the sample. Ranks then wait for each other in every encoder act.
        entries: int64 [k, 2], replica and encoder act of every media item of the counts, by planners that route items
            inside a replica whose encoder is on every pipeline rank; None: nothing is routed.
    """

    cells: IntArray
    encoder_cells: IntArray | None = None
    entries: IntArray | None = None


def even_groups(num_items: int, num_groups: int) -> IntArray:
    """Groups of equal counts of consecutive items, larger ones first: what a sampler without balancing makes; [n]."""
    base, extra = divmod(num_items, num_groups)
    counts = base + (np.arange(num_groups) < extra)
    return np.repeat(np.arange(num_groups, dtype=np.int64), counts)


def in_order(grid: StepGrid) -> IntArray:
    """Equal counts of consecutive samples a rank and micro-batch, int64 [n, 2]."""
    rank = even_groups(len(grid), grid.num_ranks)
    return np.stack([rank, slots_in_order(rank, grid.num_ranks, grid.num_slots)], axis=1)


def slots_in_order(rank_of: IntArray, num_ranks: int, num_slots: int) -> IntArray:
    """Equal counts of the samples of each rank, in their order, a micro-batch; int64 [n]."""
    counts = np.bincount(rank_of, minlength=num_ranks).tolist()
    slot = np.empty(len(rank_of), np.int64)
    slot[np.argsort(rank_of, kind="stable")] = np.concatenate([even_groups(count, num_slots) for count in counts])
    return slot
