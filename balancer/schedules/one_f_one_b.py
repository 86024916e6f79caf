"""1F1B (PipeDream-Flush, Narayanan et al., 2021): P-1-rank forwards ahead, then one forward, one backward.

    rank 0   F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    rank 1   .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3

Rank r holds at most min(P - r, M) micro-batches. Price: with uniform times (P-1)(tf+tb) of every rank stay idle.
"""

import numpy as np

from balancer.schedules.program import Program, Request, pairwise_order, require_one_chunk_per_rank


def programs(request: Request) -> list[Program]:
    """The program of every rank."""
    require_one_chunk_per_rank(request)
    found = []
    for rank in range(request.num_ranks):
        op, microbatch = pairwise_order(request.num_microbatches, request.num_ranks - 1 - rank)
        found.append(Program(op=op, chunk=np.full(len(op), rank, dtype=np.int32), microbatch=microbatch))
    return found
