"""`length_grouped`: sort by LLM tokens, so that what runs at the same time has similar length.

    tokens 9 8 7 6 5 4 3 2, 2 ranks, 2 micro-batches   ->   micro-batch 0: [9 7][8 6]   micro-batch 1: [5 3][4 2]

The well-known baseline of padded training. It evens out ranks within a micro-batch by token length; what a token costs
(attention, images) it does not see, and one rank always gets the larger of each pair.
"""

import numpy as np

from balancer.policies.base import Placement, PlacementProblem
from balancer.policies.sequential import fill_in_order, num_groups, spread_in_order


def place(problem: PlacementProblem) -> Placement:
    """Place the samples by descending LLM tokens.

    Raises:
        PlanError: a fixed number of micro-batches that is too small.
    """
    num_ranks, (num_samples, num_units) = problem.dp_size, problem.sizes.shape
    order = np.argsort(-problem.counts.llm_tokens, kind="stable")
    # A row is one sample for each rank; the last one may be short: [rows * R, d] -> [rows, R * d].
    num_rows = -(-num_samples // num_ranks)
    padded = np.zeros((num_rows * num_ranks, num_units), dtype=np.int64)
    padded[:num_samples] = problem.sizes[order]
    rows = padded.reshape(num_rows, num_ranks * num_units)
    capacity = problem.capacity * num_ranks
    filled = fill_in_order(rows, capacity)
    num_microbatches = problem.choose_num_microbatches("length_grouped", num_groups(filled))
    microbatch_of_row = spread_in_order(rows, capacity, num_microbatches, filled)
    position = np.arange(num_samples, dtype=np.int64)
    dp_rank, microbatch = np.empty(num_samples, dtype=np.int64), np.empty(num_samples, dtype=np.int64)
    dp_rank[order] = position % num_ranks
    microbatch[order] = microbatch_of_row[position // num_ranks]
    return Placement.from_cells(dp_rank, microbatch, num_microbatches)
