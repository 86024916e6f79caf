"""What a generator of schedules works on: chunks of the chain, and the program of one rank as three flat arrays.

    stages in chain order      0    1    2    3    4      with their ranks   0 0 1 0 1
    chunks (runs on one rank)  [0    1] [2] [3]  [4]      with their ranks   0   1 0 1
    Program of a rank          op int8 [n], chunk int32 [n], microbatch int32 [n], in the order it runs them

Consecutive stages on one rank form a chunk and run as one: forward in stage order, backward in reverse. A chunk on
rank -1 is *spread*: every rank holds all of it, and micro-batch m runs on rank m % P, in unit m // P.

`pairwise_order` is the heart of 1F1B: a number of forwards ahead, then one forward, one backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from balancer.errors import ScheduleError

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
# Code of an op -> its letter. I and W are the two halves of B: gradients of the input and of the weights.
OP_LETTERS = "FBIW"
SPREAD = -1

Codes = NDArray[np.int8]
Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive stages of one rank.

    Attributes:
        rank: where it lives; -1 when it is spread over all ranks.
        first_stage, num_stages: its part of the chain.
    """

    rank: int
    first_stage: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank runs, over chunks.

    Attributes:
        op: codes, int8 [n].
        chunk: index in `Request.chunks`, int32 [n].
        microbatch: int32 [n].
    """

    op: Codes
    chunk: Indices
    microbatch: Indices

    def below(self, num_microbatches: int) -> "Program":
        """Without the micro-batches from `num_microbatches` on."""
        keep = self.microbatch < num_microbatches
        return Program(op=self.op[keep], chunk=self.chunk[keep], microbatch=self.microbatch[keep])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a schedule is asked for.

    Attributes:
        name: schedule, for messages.
        num_ranks: P.
        num_microbatches: M.
        stage_ranks: rank of every stage [S], -1 where it is spread.
        num_units_ahead: units of P micro-batches that a spread encoder runs ahead (nested only).
        forward_ticks, backward_ticks: durations [S] on the clock that places spread work, whole numbers.
        chunks: `stage_ranks` as chunks, in chain order.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    num_units_ahead: int
    forward_ticks: tuple[int, ...]
    backward_ticks: tuple[int, ...]
    chunks: tuple[Chunk, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", chunks_of(self.stage_ranks))

    def refuse(self, why: str) -> ScheduleError:
        """The error that says what about the placement does not go."""
        return ScheduleError(f"schedule {self.name} with stage_ranks={list(self.stage_ranks)}: {why}")


def chunks_of(stage_ranks: Sequence[int]) -> tuple[Chunk, ...]:
    """Runs of stages on one rank."""
    chunks: list[Chunk] = []
    for stage, rank in enumerate(stage_ranks):
        if chunks and chunks[-1].rank == rank:
            last = chunks.pop()
            chunks.append(Chunk(rank=rank, first_stage=last.first_stage, num_stages=last.num_stages + 1))
        else:
            chunks.append(Chunk(rank=rank, first_stage=stage, num_stages=1))
    return tuple(chunks)


def require_one_chunk_per_rank(request: Request) -> None:
    """Ranks 0, 1, ... in order, each with one chunk.

    Raises:
        ScheduleError: another placement.
    """
    ranks = [chunk.rank for chunk in request.chunks]
    if SPREAD in ranks:
        raise request.refuse("a stage that is spread over all ranks (-1) needs the schedule phased or nested")
    if ranks != list(range(request.num_ranks)):
        raise request.refuse(
            "stages lie on ranks 0, 1, ... in order, several per rank where needed (stages that return to an "
            "earlier rank need interleaved1f1b)"
        )


@lru_cache(maxsize=4096)
def pairwise_order(num: int, ahead: int) -> tuple[Codes, Indices]:
    """`ahead` forwards, then one forward, one backward, then the backwards that are left.

    Returns:
        (op int8 [2 num], index int32 [2 num]): FORWARD or BACKWARD of the index-th item, every item once per op.
        Example with num=3, ahead=1: F0 F1 B0 F2 B1 B2.
    """
    ahead = min(ahead, num)
    index = np.arange(num)
    # Slot of each forward and backward; forward i >= ahead is followed by backward i - ahead.
    forward_slot = np.where(index < ahead, index, 2 * index - ahead)
    backward_slot = np.where(index < num - ahead, 2 * index + ahead + 1, num + index)
    op, item = np.empty(2 * num, dtype=np.int8), np.empty(2 * num, dtype=np.int32)
    op[forward_slot], op[backward_slot] = FORWARD, BACKWARD
    item[forward_slot] = item[backward_slot] = index
    op.setflags(write=False)
    item.setflags(write=False)
    return op, item


def over_stages(programs: Sequence[Program], chunks: Sequence[Chunk]) -> tuple[Codes, Indices, Indices, Indices]:
    """Programs over chunks as acts of stages: (op, stage, microbatch, rank), each [A], rank by rank."""
    op = np.concatenate([program.op for program in programs])
    chunk = np.concatenate([program.chunk for program in programs])
    microbatch = np.concatenate([program.microbatch for program in programs])
    rank = np.repeat(np.arange(len(programs), dtype=np.int32), [len(program.op) for program in programs])
    first = np.array([part.first_stage for part in chunks], dtype=np.int32)[chunk]
    width = np.array([part.num_stages for part in chunks], dtype=np.int32)[chunk]
    # One entry per (act, stage of its chunk): `within` counts 0 .. width - 1 inside each act.
    act = np.repeat(np.arange(len(op)), width)
    within = np.arange(len(act)) - np.repeat(np.cumsum(width) - width, width)
    op, rank = op[act], rank[act]
    stage = first[act] + np.where(op == FORWARD, within, width[act] - 1 - within)
    return op, stage.astype(np.int32), microbatch[act], rank
