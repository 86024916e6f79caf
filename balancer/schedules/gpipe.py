"""GPipe (Huang et al., 2019): all forwards, then all backwards.

    rank 0   F0 F1 F2 F3 .. .. .. B0 B1 B2 B3
    rank 1   .. F0 F1 F2 F3 .. B0 B1 B2 B3

Price: every rank holds the activations of all M micro-batches. The bubble is that of 1F1B. Alone on its rank: one
micro-batch after the other, because there nothing is gained by holding activations.
"""

import numpy as np

from balancer.schedules import one_f_one_b
from balancer.schedules.program import BACKWARD, FORWARD, Program, Request, require_one_chunk_per_rank


def programs(request: Request) -> list[Program]:
    """The program of every rank."""
    if request.num_ranks == 1:
        return one_f_one_b.programs(request)
    require_one_chunk_per_rank(request)
    num = request.num_microbatches
    op = np.repeat(np.array([FORWARD, BACKWARD], dtype=np.int8), num)
    microbatch = np.tile(np.arange(num, dtype=np.int32), 2)
    return [
        Program(op=op, chunk=np.full(2 * num, rank, dtype=np.int32), microbatch=microbatch)
        for rank in range(request.num_ranks)
    ]
