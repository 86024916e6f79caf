"""When the acts of an LLM schedule run, on a clock of whole ticks: what places the units of a spread encoder.

    programs [P] + ticks of every chunk  --one pass over the acts-->  start int64 [acts of the rank], one per rank

Every rank derives the same instants from the schedule and the ticks; nothing is measured while a step runs. This is
a small forward pass of its own because the simulator stands above the schedules; the price is a plain Python loop,
about 2 us an act, once per schedule.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from balancer.errors import ScheduleError
from balancer.schedules.program import FORWARD, Program


def starts_of(
    programs: Sequence[Program], chunks: Sequence[int], forward: Sequence[int], backward: Sequence[int]
) -> list[NDArray[np.int64]]:
    """Start of every act in ticks, per rank.

    Args:
        programs: forward and backward acts of the chunks.
        chunks: indices of the chunks in chain order, without a gap.
        forward, backward: ticks of the chunk with that index.

    Raises:
        ScheduleError: the programs block each other.
    """
    first, last = chunks[0], chunks[-1]
    acts = [
        list(zip(program.op.tolist(), program.chunk.tolist(), program.microbatch.tolist(), strict=True))
        for program in programs
    ]
    starts: list[list[int]] = [[] for _ in programs]
    now = [0] * len(acts)
    end: dict[tuple[int, int, int], int] = {}
    waiting: dict[tuple[int, int, int], int] = {}
    ready = list(range(len(acts)))
    while ready:
        rank = ready.pop()
        for op, chunk, microbatch in acts[rank][len(starts[rank]) :]:
            is_forward = op == FORWARD
            source = (op, chunk - 1 if is_forward else chunk + 1, microbatch)
            arrival = 0
            # The forward of a backward is earlier on its own rank: the rank's clock covers it.
            if chunk != (first if is_forward else last):
                if source not in end:
                    waiting[source] = rank
                    break
                arrival = end[source]
            start = max(now[rank], arrival)
            now[rank] = end[op, chunk, microbatch] = start + (forward if is_forward else backward)[chunk]
            starts[rank].append(start)
            if (op, chunk, microbatch) in waiting:
                ready.append(waiting.pop((op, chunk, microbatch)))
    if any(len(own) != len(program) for own, program in zip(starts, acts, strict=True)):
        raise ScheduleError("the schedule of the LLM alone would deadlock: its clock cannot be computed")
    return [np.array(own, dtype=np.int64) for own in starts]
