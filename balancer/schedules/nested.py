"""Nested (BigMac, arXiv 2605.25451): encoder and generator, spread over all ranks, inside the LLM's pipeline.

Unit u is the micro-batches uP .. uP+P-1, one per rank; rank j runs encoder and generator of micro-batch uP+j.

    EF_u  every rank encodes its micro-batch          EF_u[j] -> F(uP+j, first chunk)
    EB_u  every rank runs the encoder's backward      B(uP+j, first chunk) -> EB_u[j]
    G_u   generator, forward and backward at once     F(uP+j, last chunk) -> G_u[j] -> B(uP+j, last chunk)

*Common cut*: per unit one instant on the clock of the untouched LLM schedule, at which every rank puts the unit's acts
at its first boundary between acts at or after it:

    EF_0 .. EF_{W-1}         before the pipeline starts
    EB_u, then EF_{u+W}      at the end of B(uP+P-1, first chunk)
    G_u                      at the end of F(uP+P-1, last chunk)

Before the cut nothing changes, after it everything moves by the unit's length on every rank: no gap opens and no cycle
can form. A step takes M*V*(tf+tb) + (P-1)*(tf+tb) + (M/P)*(ef+eb+g), as long as with unlimited memory, and holds W = 3
encoder micro-batches a rank whatever M is. Price: activations of P more chunks a rank with a generator (forwards run P
further ahead; without that, its cut deadlocks), embeddings of up to W units parked on rank 0, and units of uneven work
cost time: everybody waits for the slowest rank of a unit.

W = 3 is the least in general (V = 1 or P = 2 do with 2, without a generator); with too few the simulator names the
cycle. The last unit may be partial: the order is made for whole units, then micro-batches that do not exist are left
out. That cannot block: no act waits for another micro-batch, so what is left is a part of an order that runs. The LLM
runs interleaved 1F1B, with one chunk a rank 1F1B.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancer.schedules.clock import starts_of
from balancer.schedules.interleaved import rounds
from balancer.schedules.program import BACKWARD, FORWARD, SPREAD, Program, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Acts that every rank runs on its micro-batch of a unit, from one instant on.

    Attributes:
        at: instant on the LLM's clock; -1 is before the first act.
        acts: (op, chunk, unit).
    """

    at: int
    acts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The LLM's schedule on its clock, beside which spread work is placed.

    Attributes:
        encoder, generator: chunk that is spread, None where there is none.
        llm: programs of the LLM over whole units.
        starts: int64 per rank, aligned with `llm`.
        num_units: U.
        unit_returned: end of the backward of each unit's last micro-batch in the first LLM chunk, [U].
        unit_finished: end of the forward of each unit's last micro-batch in the last LLM chunk, [U].
    """

    encoder: int | None
    generator: int | None
    llm: tuple[Program, ...]
    starts: tuple[NDArray[np.int64], ...]
    num_units: int
    unit_returned: tuple[int, ...]
    unit_finished: tuple[int, ...]


def programs(request: Request) -> list[Program]:
    """The program of every rank."""
    spread = place_llm(request)
    cuts = generator_cuts(spread)
    encoder = spread.encoder
    if encoder is not None:
        ahead = min(request.num_units_ahead, spread.num_units)
        cuts.append(Cut(at=-1, acts=tuple((FORWARD, encoder, unit) for unit in range(ahead))))
        for unit, at in enumerate(spread.unit_returned):
            acts = [(BACKWARD, encoder, unit)]
            if unit + ahead < spread.num_units:
                acts.append((FORWARD, encoder, unit + ahead))
            cuts.append(Cut(at=at, acts=tuple(acts)))
    return insert(request, spread, cuts)


def place_llm(request: Request) -> Spread:
    """The LLM's part of the request, with its clock.

    Raises:
        ScheduleError: no spread stage, or one elsewhere than at head and tail, or an LLM that does not go round all
            ranks.
    """
    encoder, chunks, generator = _domains(request)
    num_ranks = request.num_ranks
    num_units = -(-request.num_microbatches // num_ranks)
    # Groups of several chunks a rank have to be whole, unless there is one alone.
    whole = num_units > 1 and len(chunks) > num_ranks
    sizes = [num_ranks] * num_units if whole else [request.num_microbatches]
    llm = rounds(request, chunks, group_sizes=sizes, extra_ahead=num_ranks if generator is not None else 0)
    # At least one tick: an act that starts at a cut comes after it, one that ends there before it.
    forward, backward = (
        [max(1, sum(ticks[part.first_stage : part.first_stage + part.num_stages])) for part in request.chunks]
        for ticks in (request.forward_ticks, request.backward_ticks)
    )
    starts = starts_of(llm, chunks, forward, backward)
    lasts = [min(first + num_ranks, sum(sizes)) - 1 for first in range(0, sum(sizes), num_ranks)]
    return Spread(
        encoder=encoder,
        generator=generator,
        llm=tuple(llm),
        starts=tuple(starts),
        num_units=num_units,
        unit_returned=_ends(llm[0], starts[0], (BACKWARD, chunks[0]), lasts, backward[chunks[0]]),
        unit_finished=_ends(llm[-1], starts[-1], (FORWARD, chunks[-1]), lasts, forward[chunks[-1]]),
    )


def generator_cuts(spread: Spread) -> list[Cut]:
    """The generator's units: each as soon as the LLM has finished the unit's forwards."""
    generator = spread.generator
    if generator is None:
        return []
    return [
        Cut(at=at, acts=((FORWARD, generator, unit), (BACKWARD, generator, unit)))
        for unit, at in enumerate(spread.unit_finished)
    ]


def insert(request: Request, spread: Spread, cuts: Sequence[Cut]) -> list[Program]:
    """Every cut's acts at each rank's first boundary at or after its instant; cuts of one instant in one order."""
    ordered = sorted(cuts, key=lambda cut: cut.at)  # stable
    added = np.array([act for cut in ordered for act in cut.acts], dtype=np.int64).reshape(-1, 3)
    at = np.repeat([cut.at for cut in ordered], [len(cut.acts) for cut in ordered])
    found = []
    for rank, (llm, starts) in enumerate(zip(spread.llm, spread.starts, strict=True)):
        # Before the first act that starts at the cut or later; an act that runs at the cut ends first.
        slot = np.searchsorted(starts, at)
        order = np.argsort(np.concatenate([2 * slot, 2 * np.arange(len(starts)) + 1]), kind="stable")
        microbatch = np.concatenate([added[:, 2] * request.num_ranks + rank, llm.microbatch])
        program = Program(
            op=np.concatenate([added[:, 0], llm.op])[order].astype(np.int8),
            chunk=np.concatenate([added[:, 1], llm.chunk])[order].astype(np.int32),
            microbatch=microbatch[order].astype(np.int32),
        )
        found.append(program.below(request.num_microbatches))
    return found


def _domains(request: Request) -> tuple[int | None, list[int], int | None]:
    """Chunks of the encoder, the LLM and the generator."""
    ranks = [chunk.rank for chunk in request.chunks]
    if SPREAD not in ranks:
        raise request.refuse(
            "no stage is spread over the ranks (-1), so nothing runs beside the LLM; spread the encoder "
            '(encoder="spread" of ParallelSpec.pipeline, stage_ranks=[-1, 0, 1, ...]) or take 1f1b (interleaved1f1b '
            "where a rank has several chunks)"
        )
    encoder = 0 if ranks[0] == SPREAD else None
    generator = len(ranks) - 1 if ranks[-1] == SPREAD else None
    llm = list(range(0 if encoder is None else 1, len(ranks) if generator is None else generator))
    spread = [chunk for chunk in request.chunks if chunk.rank == SPREAD]
    if len(spread) > (encoder is not None) + (generator is not None) or any(chunk.num_stages > 1 for chunk in spread):
        raise request.refuse("spread stages (-1) are the first one, the encoder, and the last one, the generator")
    if any(ranks[chunk] != place % request.num_ranks for place, chunk in enumerate(llm)):
        raise request.refuse("around an LLM the others are spread, so it starts on rank 0 and goes round all ranks")
    return encoder, llm, generator


def _ends(
    program: Program, starts: NDArray[np.int64], act: tuple[int, int], microbatches: list[int], ticks: int
) -> tuple[int, ...]:
    """Ends of one chunk's acts of one op on `microbatches` (ascending)."""
    op, chunk = act
    own = (program.op == op) & (program.chunk == chunk) & np.isin(program.microbatch, microbatches)
    order = np.argsort(program.microbatch[own], kind="stable")
    return tuple((starts[own][order] + ticks).tolist())
