"""Who waits for whom in a schedule, and an order in which all of it can run; or the cycle that would make it hang.

    Schedule [A acts] --link--> sources of every act (CSR) --order--> Compiled: acts in an order that can run

    F(stage)       after F of the nearest present stage before it
    B or I(stage)  after F of its own stage and B or I of the nearest present stage after it
    W(stage)       after I of its own stage
    routed         media items are exchanged between the ranks of a unit: the first stage after the encoder waits for
                   all encoder forwards of the unit, the encoder's backward for all of the unit that comes back

and every act after the one before it on its rank. Sends never block (the executor posts them and goes on), so a run
hangs exactly when program order and these edges form a cycle.

Price: linear in acts and edges, about 4 ms for 131,072 acts, then cached per schedule object (64 of them). Explicit
`edges` are resolved in plain Python, a few microseconds per act.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from balancer.errors import ScheduleError
from balancer.schedule import Schedule
from balancer.simulation_core import FORWARD, WEIGHT_GRADIENT, link_acts, order_acts, read_only

# Data edges between stages: (producer, consumer).
Edges = Collection[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaActs:
    """The acts in an order that can run, as many replicas side by side read them; int32 [A] each.

    Attributes:
        cell: micro-batch * S + stage.
        work: row of its duration: cell plus M * S times the code of its op.
        rank: where it runs.
        slot: chain it is part of: its micro-batch, plus M for B and I; -1 for none.
        waits_for: exchange it waits for: unit, plus M for what comes back; -1 for none.
        part_of: exchange it is a part of, or -1.
    """

    cell: NDArray[np.int32]
    work: NDArray[np.int32]
    rank: NDArray[np.int32]
    slot: NDArray[np.int32]
    waits_for: NDArray[np.int32]
    part_of: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compiled:
    """A schedule that can run, as read-only arrays; acts are indices into those of the schedule.

    Attributes:
        offsets, sources: act a waits for sources[offsets[a] : offsets[a + 1]]; int64 [A + 1], int32 [E].
        order: all acts, each after those it waits for, int32 [A].
        cell, act_rank: stage * M + micro-batch and rank of every act, int32 [A].
        replicas: what `time_replicas` reads.
        has_backward: acts other than F occur.
        split: where the backward is split into I and W, bool [M, S].
        num_ranks: P.
        num_exchanged: cells of the stage that is exchanged inside units: M where routed, else 0.
    """

    offsets: NDArray[np.int64]
    sources: NDArray[np.int32]
    order: NDArray[np.int32]
    cell: NDArray[np.int32]
    act_rank: NDArray[np.int32]
    replicas: ReplicaActs
    has_backward: bool
    split: NDArray[np.bool_]
    num_ranks: int
    num_exchanged: int

    def is_away(self, source: int, act: int) -> bool:
        """Whether what `act` gets from `source` takes the latency: from another rank, or by an exchange."""
        exchanged = (self.cell[source] < self.num_exchanged) != (self.cell[act] < self.num_exchanged)
        return bool(self.act_rank[source] != self.act_rank[act] or (exchanged and self.num_ranks > 1))


def compiled(schedule: Schedule, *, edges: Edges | None = None, routed: bool = False) -> Compiled:
    """The schedule in an order in which every act finds its inputs ready.

    Args:
        schedule: complete or with acts left out; an absent stage passes the wait on.
        edges: data edges between stages; default is the chain 0 -> 1 -> ... -> S-1.
        routed: stage 0 is exchanged inside units, see above.

    Raises:
        ScheduleError: no order exists, and the text shows the cycle; edges that go back; nothing to route.
    """
    if routed and (edges is not None or schedule.unit_size == 0):
        raise ScheduleError(
            f"schedule {schedule.name}: routed media items need a chain of stages whose encoder is spread over the "
            "ranks (phased or nested); leave routed=False"
        )
    return _compiled(schedule, None if edges is None else tuple(sorted(edges)), schedule.unit_size if routed else 0)


@lru_cache(maxsize=64)
def _compiled(schedule: Schedule, edges: tuple[tuple[int, int], ...] | None, unit_size: int) -> Compiled:
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    if edges is None:
        linked = link_acts(schedule.op, schedule.stage, schedule.microbatch, stages, microbatches, unit_size)
    else:
        linked = _link(schedule, edges)
    offsets, sources = read_only(linked[0]), read_only(linked[1])
    order, position = order_acts(schedule.rank_offsets, offsets, sources)
    if len(order) < len(schedule.op):
        raise ScheduleError(_describe_cycle(schedule, offsets, sources, position))
    weight = schedule.op == WEIGHT_GRADIENT
    split = np.zeros((microbatches, stages), dtype=np.bool_)
    split[schedule.microbatch[weight], schedule.stage[weight]] = True
    return Compiled(
        offsets=offsets,
        sources=sources,
        order=read_only(order),
        cell=read_only(schedule.stage * np.int32(microbatches) + schedule.microbatch),
        act_rank=read_only(schedule.act_rank),
        replicas=_replica_acts(schedule, order, unit_size),
        has_backward=bool((schedule.op != FORWARD).any()),
        split=read_only(split),
        num_ranks=schedule.num_ranks,
        num_exchanged=microbatches if unit_size else 0,
    )


def _replica_acts(schedule: Schedule, order: NDArray[np.int32], unit_size: int) -> ReplicaActs:
    op, stage, microbatch = schedule.op[order], schedule.stage[order], schedule.microbatch[order]
    forward, weight = op == FORWARD, op == WEIGHT_GRADIENT
    cell = microbatch * schedule.num_stages + stage
    # Of a backward, the own forward is earlier on the same rank: only the chain of backwards is left to wait for.
    slot = np.where(weight, -1, np.where(forward, microbatch, microbatch + schedule.num_microbatches))
    waits_for = part_of = np.full(len(op), -1)
    if unit_size:
        exchange = np.where(forward, 0, schedule.num_microbatches) + microbatch // unit_size
        # All stages wait, not the entry alone: once it has, the others wait for no more than it did.
        waits = ~weight & (forward != (stage == 0))
        waits_for, part_of = np.where(waits, exchange, -1), np.where(waits | weight, -1, exchange)
        slot = np.where(stage == 0, -1, slot)
    fields = {
        "cell": cell,
        "work": cell + op.astype(np.int32) * schedule.place.size,
        "rank": schedule.act_rank[order],
        "slot": slot,
        "waits_for": waits_for,
        "part_of": part_of,
    }
    return ReplicaActs(**{name: read_only(values.astype(np.int32)) for name, values in fields.items()})


def _link(schedule: Schedule, edges: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Sources of every act for any edges between stages, in the form of `link_acts`."""
    before: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    after: list[list[int]] = [[] for _ in range(schedule.num_stages)]
    for producer, consumer in edges:
        if not 0 <= producer < consumer < schedule.num_stages:
            raise ScheduleError(f"edge {producer} -> {consumer}: edges go from a stage to a later one")
        before[consumer].append(producer)
        after[producer].append(consumer)
    # (is a forward, stage, micro-batch) -> act; a B or an I is what other stages wait for.
    act_of: dict[tuple[bool, int, int], int] = {}
    triples = list(zip(schedule.op.tolist(), schedule.stage.tolist(), schedule.microbatch.tolist(), strict=True))
    for act, (op, stage, microbatch) in enumerate(triples):
        if op != WEIGHT_GRADIENT:
            act_of[op == FORWARD, stage, microbatch] = act
    offsets, sources = [0], list[int]()
    for op, stage, microbatch in triples:
        if op == WEIGHT_GRADIENT:
            sources.append(act_of[False, stage, microbatch])
        elif op == FORWARD:
            sources += _nearest(act_of, (True, stage, microbatch), before)
        else:
            sources.append(act_of[True, stage, microbatch])
            sources += _nearest(act_of, (False, stage, microbatch), after)
        offsets.append(len(sources))
    return np.array(offsets, dtype=np.int64), np.array(sources, dtype=np.int32)


def _nearest(
    act_of: dict[tuple[bool, int, int], int], start: tuple[bool, int, int], neighbours: list[list[int]]
) -> list[int]:
    """Acts of the nearest present stages in one direction: an absent stage passes the wait on, not itself."""
    forward, stage, microbatch = start
    found: set[int] = set()
    waiting, seen = list(neighbours[stage]), set[int]()
    while waiting:
        other = waiting.pop()
        if other in seen:
            continue
        seen.add(other)
        act = act_of.get((forward, other, microbatch))
        if act is None:
            waiting.extend(neighbours[other])
        else:
            found.add(act)
    return sorted(found)


def _describe_cycle(
    schedule: Schedule, offsets: NDArray[np.int64], sources: NDArray[np.int32], position: NDArray[np.int64]
) -> str:
    """Follow who waits for whom from the first stuck rank until a rank repeats, and spell out that loop."""
    rank = int(np.flatnonzero(position < schedule.rank_offsets[1:])[0])
    steps: list[tuple[int, str]] = []
    while rank not in [visited for visited, _ in steps]:
        head = int(position[rank])
        waits_for = sources[offsets[head] : offsets[head + 1]]
        # Programs run from the front: an act is done when its rank has gone past it.
        missing = int(waits_for[waits_for >= position[schedule.act_rank[waits_for]]][0])
        holder = int(schedule.act_rank[missing])
        stopped = int(position[holder])
        behind = "" if stopped == missing else f", which rank {holder} runs only after {_name(schedule, stopped)}"
        steps.append((rank, f"rank {rank}: {_name(schedule, head)} waits for {_name(schedule, missing)}{behind}"))
        rank = holder
    first = [visited for visited, _ in steps].index(rank)
    cycle = "; ".join(text for _, text in steps[first:])
    return f"schedule {schedule.name} would deadlock: {cycle}"


def _name(schedule: Schedule, index: int) -> str:
    return f"{schedule.stage[index]}{'FBIW'[schedule.op[index]]}{schedule.microbatch[index]}"
