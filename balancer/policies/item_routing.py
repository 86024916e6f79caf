"""Media items of a spread encoder: which pipeline rank encodes each, inside its unit.

    unit of 2 micro-batches on 2 ranks, items 5 4 | 1   ->   rank 0: 5, rank 1: 4 1   (5 instead of 9)

A unit's micro-batches are encoded together, one per rank of the replica; uneven items make all ranks wait for the
heaviest. Its items are therefore dealt out over its ranks, heaviest first, each to the lightest rank so far (LPT,
Graham 1969: at most 4/3 of the best). An item stays in the unit of its micro-batch, so nothing else of the plan
changes. An act has the capacities of a micro-batch, and an item goes where there is room; where one finds none,
those of its unit stay with their micro-batches, which fit. Price: embeddings travel from the rank that encodes them to
the rank that needs them, once per unit.
"""

import numpy as np

from balancer.policies.base import Int32Array, PlacementProblem
from balancer.policies.joint_core import route
from packing.partitioners.order import descending


def route_items(problem: PlacementProblem, cell_of: Int32Array, num_microbatches: int) -> tuple[Int32Array, Int32Array]:
    """(encoder rank, unit) of every media item, int32 [k].

    Args:
        problem: with a spread encoder.
        cell_of: dp_rank * M + micro-batch of every sample, int32 [n].
        num_microbatches: M.
    """
    unit_size = problem.schedule_for(num_microbatches).unit_size
    num_units = -(-num_microbatches // unit_size)
    cost = problem.item_forward_ns + problem.item_backward_ns
    replica, microbatch = np.divmod(cell_of[problem.counts.item_rows()].astype(np.int64), num_microbatches)
    unit = microbatch // unit_size
    # A last unit that is not full has as many encoder acts as micro-batches.
    width = np.minimum(unit_size, num_microbatches - np.arange(num_units, dtype=np.int64) * unit_size)
    group = replica * num_units + unit
    rank = route(
        descending(cost[:, np.newaxis]),
        group,
        microbatch - unit * unit_size,
        cost,
        np.tile(width, problem.dp_size),
        unit_size,
        problem.item_sizes,
        np.array(problem.item_capacity, dtype=np.int64),
    )
    return rank, unit.astype(np.int32)
