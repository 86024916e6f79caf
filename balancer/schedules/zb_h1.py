"""ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024): the backward in two halves, I and W.

    I   gradient of the input: the rank before waits for it
    W   gradient of the weights: nobody waits for it, it fills the bubble

    rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1 .. I2 W2 .. I3 W3
    rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 .. I3 W2 W3
    rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Rule (the handcrafted schedule of the paper's section on H1): forwards and I in the order of 1F1B; rank r runs the W of
a micro-batch r micro-batches after its I. The bubble shrinks from (P-1)(tf+ti+tw) to (P-1)(tf+ti-tw) where M >= P.
Price: activations stay until W, so every rank holds up to min(P, M) micro-batches: the peak of 1F1B's first rank, now
on every rank.
"""

import numpy as np

from balancer.schedules.program import (
    FORWARD,
    INPUT,
    WEIGHT,
    Program,
    Request,
    pairwise_order,
    require_one_chunk_per_rank,
)


def programs(request: Request) -> list[Program]:
    """The program of every rank."""
    require_one_chunk_per_rank(request)
    return [_program(rank, request) for rank in range(request.num_ranks)]


def _program(rank: int, request: Request) -> Program:
    num = request.num_microbatches
    op, microbatch = pairwise_order(num, request.num_ranks - 1 - rank)
    op = np.where(op == FORWARD, FORWARD, INPUT).astype(np.int8)
    slots = np.arange(len(op))
    # W of micro-batch m comes right after I of micro-batch m + rank; those that are left, at the end, in order.
    after = np.append(slots[op == INPUT][min(rank, num) :], np.full(min(rank, num), len(op)))
    order = np.argsort(np.append(2 * slots, 2 * after + 1), kind="stable")
    return Program(
        op=np.append(op, np.full(num, WEIGHT, dtype=np.int8))[order],
        chunk=np.full(3 * num, rank, dtype=np.int32),
        microbatch=np.append(microbatch, np.arange(num, dtype=np.int32))[order],
    )
