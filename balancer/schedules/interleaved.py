"""Interleaved 1F1B (Narayanan et al., 2021): V chunks of the chain on every rank, micro-batches in groups of P.

    P=2, V=2, M=4    chunks 0 1 2 3 on ranks 0 1 0 1
    order of forwards    group 0: chunk 0 of m0 m1, chunk 2 of m0 m1;  group 1: chunk 0 of m2 m3, chunk 2 of m2 m3
    order of backwards   the same groups, chunks from the last to the first
    a rank               2(P-1-r) + (V-1)P forwards ahead, then one forward, one backward

The bubble is 1/V of 1F1B's: (P-1)(tf+tb) with the times of a chunk. Price: V times as many messages, and rank r holds
up to 2(P-1-r) + (V-1)P + 1 chunks.

Any M will do. Where it is no multiple of P, max(1, M // P) groups of nearly equal size share it, the largest of G
micro-batches, and G takes the place of P in the forwards ahead: the bubble stays, the price is memory (G < 2P, and near
P for many micro-batches). Groups have at least P members, or there is one alone; so nothing blocks. Proof: let rank r
run its k-th forward at time k + r, and its k-th backward half a tick after the forward it follows,
k + (V-1)G + 2(P-1) - r + 1/2. The same chunk's neighbour ranks are one tick apart; the chunk before (or behind) at the
other end of the ranks has an index lower by the group's size, hence a time lower by size - (P-1) > 0; and the last
chunk's backward comes after its forward because no group exceeds G. Every act waits for earlier times only.

Ranks before the rounds that hold one chunk (an encoder on a rank of its own) run plain 1F1B, as far ahead as the first
rank of the rounds needs and half a group more: the rounds take their micro-batches in bursts. With one chunk on every
rank this is 1F1B.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from balancer.schedules.program import BACKWARD, FORWARD, SPREAD, Indices, Program, Request, pairwise_order


def programs(request: Request) -> list[Program]:
    """The program of every rank.

    Raises:
        ScheduleError: chunks that do not go round the ranks in order.
    """
    if SPREAD in request.stage_ranks:
        raise request.refuse("a stage that is spread over all ranks (-1) needs the schedule phased or nested")
    return rounds(request, range(len(request.chunks)))


def rounds(
    request: Request, chunks: Sequence[int], *, group_sizes: Sequence[int] | None = None, extra_ahead: int = 0
) -> list[Program]:
    """Programs of chunks that go round the ranks.

    Args:
        request: ranks and chunks; its micro-batches where `group_sizes` does not say otherwise.
        chunks: indices in `request.chunks`, in chain order.
        group_sizes: micro-batches of every group; default: as in the module text.
        extra_ahead: more forwards ahead on every rank.
    """
    num_ranks = request.num_ranks
    num_single, num_chunks = _shape(request, [request.chunks[chunk].rank for chunk in chunks])
    width = num_ranks - num_single
    sizes = list(group_sizes) if group_sizes is not None else _sizes(request.num_microbatches, width)
    num = sum(sizes)
    if num_chunks == 1:
        return [_single(chunks[rank], num, num_ranks - 1 - rank + extra_ahead) for rank in range(num_ranks)]
    turn, microbatch = _forwards(num_chunks, sizes)
    found = []
    for rank in range(num_single, num_ranks):
        own = np.array(chunks[rank::width][:num_chunks], dtype=np.int32)
        ahead = 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * max(sizes) + extra_ahead
        op, item = pairwise_order(len(microbatch), ahead)
        of_rank = np.where(op == FORWARD, turn[item], num_chunks - 1 - turn[item])
        found.append(Program(op=op, chunk=own[of_rank], microbatch=microbatch[item]))
    lead = _most_ahead(found[0], chunks[num_single]) - 1 + width // 2
    return [_single(chunks[rank], num, lead + num_single - rank) for rank in range(num_single)] + found


def _single(chunk: int, num_microbatches: int, ahead: int) -> Program:
    op, microbatch = pairwise_order(num_microbatches, ahead)
    return Program(op=op, chunk=np.full(len(op), chunk, dtype=np.int32), microbatch=microbatch)


def _shape(request: Request, ranks: list[int]) -> tuple[int, int]:
    """(ranks at the head with one chunk, chunks of each of the others), for chunks on `ranks`."""
    num_chunks = ranks.count(request.num_ranks - 1)
    num_single = 0 if num_chunks == 1 else next((r for r in range(request.num_ranks) if ranks.count(r) > 1), 0)
    expected = list(range(num_single)) + list(range(num_single, request.num_ranks)) * num_chunks
    if ranks != expected:
        raise request.refuse(
            "chunks go round the ranks in order, every rank taking the same number, such as [0, 1, 0, 1]; ranks with "
            "one chunk may come before the round, such as [0, 1, 2, 1, 2]"
        )
    return num_single, num_chunks


def _sizes(num_microbatches: int, width: int) -> list[int]:
    num_groups = max(1, num_microbatches // width)
    smaller, num_larger = divmod(num_microbatches, num_groups)
    return [smaller + (group < num_larger) for group in range(num_groups)]


def _forwards(num_chunks: int, sizes: Sequence[int]) -> tuple[Indices, Indices]:
    """Round and micro-batch of every forward of a rank, in order; int32 [V * M] each."""
    # Per group [V, size], flat: the group's micro-batches once per round.
    bounds = np.cumsum([0, *sizes])
    turn = np.concatenate([np.repeat(np.arange(num_chunks), size) for size in sizes])
    members = [np.arange(first, last) for first, last in pairwise(bounds.tolist())]
    microbatch = np.concatenate([np.tile(group, num_chunks) for group in members])
    return turn.astype(np.int32), microbatch.astype(np.int32)


def _most_ahead(program: Program, chunk: int) -> int:
    """Largest lead of a chunk's forwards over its backwards in one program."""
    own = program.chunk == chunk
    steps = np.where(program.op[own] == BACKWARD, -1, 1)
    return int(np.cumsum(steps).max())
