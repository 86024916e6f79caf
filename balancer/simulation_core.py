"""The inner loops of the simulator: who waits for whom, an order in which all can run, and the times that follow.

    acts [A] of all ranks, one program after the other
      link_acts     -> offsets [A + 1], sources [E]: the acts whose results each act waits for
      order_acts    -> order [A]: each act after its sources and the act before it on its rank; shorter: a deadlock
      time_acts     -> start, end [A] of one replica, floating-point milliseconds
      time_replicas -> end of every rank of K replicas or candidates, integer nanoseconds

Four kernels because compiling is a user's time. All are linear in acts plus edges; only the routed exchange of a unit
has more edges than acts, (micro-batches of the unit) squared. `time_replicas` reads no edges: along a chain of stages
the latest arrival of every micro-batch is all there is to know. It runs up to 64 replicas side by side, so that one
act of all of them is one short loop over neighbours in memory.

Ops are coded 0 F, 1 B, 2 I, 3 W. A *cell* is a (stage, micro-batch).
"""
# ruff: noqa: PLR0917  kernels take flat arguments

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from packing._jit import jit, jit_inner

Int8Array = NDArray[np.int8]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = 0, 1, 2, 3
_NEVER = -(1 << 62)  # an arrival that nobody waits for, even with latency added
_LANES = 64  # replicas side by side

_Array = TypeVar("_Array", bound=NDArray[Any])
_Value = TypeVar("_Value", bound=np.generic)


def read_only(array: _Array) -> _Array:
    """The same array, not writable: kernels are compiled once, for arguments of this kind only."""
    view = array.view()
    view.setflags(write=False)
    return view


@jit
def link_acts(
    op: Int8Array,
    stage: Int32Array,
    microbatch: Int32Array,
    num_stages: int,
    num_microbatches: int,
    unit_size: int,
) -> tuple[Int64Array, Int32Array]:
    """Sources of every act along the chain of stages, as (offsets int64 [A + 1], sources int32 [E]).

    F waits for F of the nearest stage before it that the micro-batch has, B and I for their own F and for B or I of the
    nearest stage after, W for its own I. With `unit_size` > 0 stage 0 is exchanged inside units of so many
    micro-batches: the entry of each (its first stage after 0) waits for all F of stage 0 in the unit, and B or I of
    stage 0 for all entries coming back.
    """
    num_acts = len(op)
    forward = np.full(num_stages * num_microbatches, -1, np.int32)
    backward = np.full(num_stages * num_microbatches, -1, np.int32)
    for act in range(num_acts):
        cell = stage[act] * num_microbatches + microbatch[act]
        if op[act] == FORWARD:
            forward[cell] = act
        elif op[act] != WEIGHT_GRADIENT:
            backward[cell] = act
    first, entry = (1, 1) if unit_size > 0 else (0, 0)  # stages of the chain; routed, stage 0 stands beside it
    neighbour = np.full(num_acts, -1, np.int32)
    last = np.full(num_microbatches, -1, np.int32)
    for cell in range(first * num_microbatches, num_stages * num_microbatches):
        act = forward[cell]
        if act >= 0:
            neighbour[act] = last[cell % num_microbatches]
            last[cell % num_microbatches] = act
    last[:] = -1  # ends as the entry's backward of every micro-batch
    for cell in range(num_stages * num_microbatches - 1, first * num_microbatches - 1, -1):
        act = backward[cell]
        if act >= 0:
            neighbour[act] = last[cell % num_microbatches]
            last[cell % num_microbatches] = act
    routed_edges = 2 * num_microbatches * min(unit_size, num_microbatches)
    offsets = np.zeros(num_acts + 1, np.int64)
    sources = np.empty(2 * num_acts + routed_edges, np.int32)
    count = 0
    for act in range(num_acts):
        cell = stage[act] * num_microbatches + microbatch[act]
        if op[act] == WEIGHT_GRADIENT:
            count = _append(sources, count, backward[cell])
        else:
            if op[act] != FORWARD:
                count = _append(sources, count, forward[cell])
            count = _append(sources, count, neighbour[act])
            if entry > 0 and neighbour[act] < 0:
                unit = microbatch[act] // unit_size * unit_size
                for other in range(unit, min(unit + unit_size, num_microbatches)):
                    if op[act] == FORWARD and stage[act] > 0:
                        count = _append(sources, count, forward[other])
                    elif op[act] != FORWARD and stage[act] == 0:
                        count = _append(sources, count, last[other])
        offsets[act + 1] = count
    return offsets, sources[:count].copy()


@jit_inner
def _append(sources: Int32Array, count: int, act: int) -> int:
    if act < 0:
        return count
    sources[count] = act
    return count + 1


@jit
def order_acts(rank_offsets: Int64Array, offsets: Int64Array, sources: Int32Array) -> tuple[Int32Array, Int64Array]:
    """(order, next act of every rank int64 [P]) when each rank runs its program as far as its sources allow.

    A rank that stops is looked at again only when the act it waits for has run, and goes on at the source where it
    stopped, so every edge is read once. Fewer acts in `order` than there are: the rest wait for each other.
    """
    num_ranks, num_acts = len(rank_offsets) - 1, len(offsets) - 1
    order = np.empty(num_acts, np.int32)
    done = np.zeros(num_acts, np.bool_)
    position = rank_offsets[:num_ranks].copy()
    cursor = np.empty(num_ranks, np.int64)  # next source to look at
    first_waiting = np.full(num_acts, -1, np.int32)  # ranks that wait for an act, as a linked list
    next_waiting = np.full(num_ranks, -1, np.int32)
    ready = np.empty(num_ranks, np.int32)
    for rank in range(num_ranks):
        cursor[rank] = offsets[position[rank]]
        ready[rank] = num_ranks - 1 - rank
    num_ready, count = num_ranks, 0
    while num_ready > 0:
        num_ready -= 1
        rank = ready[num_ready]
        while position[rank] < rank_offsets[rank + 1]:
            act = position[rank]
            while cursor[rank] < offsets[act + 1] and done[sources[cursor[rank]]]:
                cursor[rank] += 1
            if cursor[rank] < offsets[act + 1]:
                missing = sources[cursor[rank]]
                next_waiting[rank] = first_waiting[missing]
                first_waiting[missing] = rank
                break
            done[act] = True
            order[count] = act
            count += 1
            position[rank] += 1
            waiting = first_waiting[act]
            while waiting >= 0:
                ready[num_ready] = waiting
                num_ready += 1
                waiting = next_waiting[waiting]
    return order[:count].copy(), position


@jit
def time_acts(
    order: Int32Array,
    offsets: Int64Array,
    sources: Int32Array,
    op: Int8Array,
    cell: Int32Array,
    rank: Int32Array,
    forward: Float64Array,
    backward: Float64Array,
    weight: Float64Array,
    p2p: float,
    num_ranks: int,
    exchanged: int,
) -> tuple[Float64Array, Float64Array, Float64Array, int]:
    """(start [A], end [A], busy [P], first act whose duration is negative or not finite, else -1).

    Args:
        order, offsets, sources: what `order_acts` and `link_acts` give.
        cell: stage * M + micro-batch, the index into `forward`, `backward` and `weight`, the part of `backward` that W
            takes from I.
        p2p: added to what comes from another rank, and to an exchange: it ends for all when its last part arrives.
        exchanged: cells of stage 0 where that stage is exchanged inside units, else 0.
    """
    start, end = np.zeros(len(op)), np.zeros(len(op))
    clock, busy = np.zeros(num_ranks), np.zeros(num_ranks)
    for act in order:
        place, here, code = rank[act], cell[act], op[act]
        begin = clock[place]
        for edge in range(offsets[act], offsets[act + 1]):
            source = sources[edge]
            away = rank[source] != place or (num_ranks > 1 and (cell[source] < exchanged) != (here < exchanged))
            begin = max(begin, end[source] + (p2p if away else 0.0))
        duration = forward[here] if code == FORWARD else weight[here] if code == WEIGHT_GRADIENT else backward[here]
        if code == INPUT_GRADIENT:
            duration -= weight[here]
        if not 0.0 <= duration < np.inf:
            return start, end, busy, act
        start[act] = begin
        end[act] = clock[place] = begin + duration
        busy[place] += duration
    return start, end, busy, -1


@jit
def time_replicas(
    work: Int32Array,
    cell: Int32Array,
    rank: Int32Array,
    slot: Int32Array,
    waits_for: Int32Array,
    part_of: Int32Array,
    forward: Int64Array,
    backward: Int64Array,
    halves: Int64Array,
    present: BoolArray,
    orders: Int64Array,
    p2p: int,
    num_ranks: int,
) -> Int64Array:
    """End of every rank of every candidate, int64 [C, P], for acts in an order that can run.

    Args:
        work, cell, rank, slot, waits_for, part_of: of the acts in that order, see `Compiled`.
        forward, backward: int64 [R, M * S].
        halves: int64 [2, R, M * S], backward as I and W; [0, 0, 0] where no backward is split.
        present: bool [R, M * S], or [0, 0] where all acts run.
        orders: int64 [C, M]: candidate c is replica c % R whose i-th micro-batch is orders[c, i].
    """
    num_candidates, num_microbatches = orders.shape
    width = max(1, min(_LANES, num_candidates))
    ends = np.zeros((num_candidates, num_ranks), np.int64)
    durations = np.zeros(((2 + len(halves)) * forward.shape[1], width), np.int64)
    runs = np.ones((forward.shape[1], width), np.bool_)
    clock = np.zeros((num_ranks, width), np.int64)
    arrived = np.zeros((2 * num_microbatches, width), np.int64)  # latest end along the chain, per slot
    holder = np.zeros((2 * num_microbatches, width), np.int32)  # rank where it was
    joined = np.zeros((2 * num_microbatches, width), np.int64)  # latest part of an exchange
    across = p2p if num_ranks > 1 else 0
    for first in range(0, num_candidates, width):
        lanes = min(width, num_candidates - first)
        _load(durations[: len(runs)], forward, orders, first, lanes)
        _load(durations[len(runs) : 2 * len(runs)], backward, orders, first, lanes)
        for half in range(len(halves)):
            _load(durations[(2 + half) * len(runs) : (3 + half) * len(runs)], halves[half], orders, first, lanes)
        if present.size > 0:
            _load(runs, present, orders, first, lanes)
        _fill(clock, 0)
        _fill(arrived, _NEVER)
        _fill(joined, _NEVER)
        for act in range(len(work)):
            here = runs[cell[act]]
            now = clock[rank[act]]
            if waits_for[act] >= 0:
                _raise(now, joined[waits_for[act]], across, here)
            if slot[act] >= 0:
                row = slot[act]
                _advance(now, arrived[row], holder[row], durations[work[act]], here, rank[act], p2p)
            else:
                _add(now, durations[work[act]], here)
            if part_of[act] >= 0:
                _raise(joined[part_of[act]], now, 0, here)
        for lane in range(lanes):
            for place in range(num_ranks):
                ends[first + lane, place] = clock[place, lane]
    return ends


@jit_inner
def _advance(
    clock: Int64Array,
    arrived: Int64Array,
    holder: Int32Array,
    duration: Int64Array,
    runs: BoolArray,
    place: int,
    p2p: int,
) -> None:
    """One act of all lanes; where it is absent nothing changes, so the next stage sees what this one would have."""
    for lane in range(len(clock)):
        arrival = arrived[lane] + (p2p if holder[lane] != place else 0)
        end = max(clock[lane], arrival) + duration[lane]
        clock[lane] = end if runs[lane] else clock[lane]
        arrived[lane] = end if runs[lane] else arrived[lane]
        holder[lane] = place if runs[lane] else holder[lane]


@jit_inner
def _add(clock: Int64Array, duration: Int64Array, runs: BoolArray) -> None:
    """One act that waits for nothing but its rank."""
    for lane in range(len(clock)):
        clock[lane] += duration[lane] if runs[lane] else 0


@jit_inner
def _raise(target: Int64Array, values: Int64Array, more: int, runs: BoolArray) -> None:
    for lane in range(len(target)):
        target[lane] = max(target[lane], values[lane] + more) if runs[lane] else target[lane]


@jit_inner
def _fill(target: Int64Array, value: int) -> None:
    for row in range(target.shape[0]):
        for lane in range(target.shape[1]):
            target[row, lane] = value


@jit_inner
def _load(target: NDArray[_Value], values: NDArray[_Value], orders: Int64Array, first: int, lanes: int) -> None:
    """Times [R, M * S] of candidates first : first + lanes, their micro-batches in order, to lanes [M * S, width]."""
    num_replicas = len(values)
    num_microbatches = orders.shape[1]
    num_stages = values.shape[1] // num_microbatches
    for lane in range(lanes):
        replica = (first + lane) % num_replicas
        for turn in range(num_microbatches):
            source = orders[first + lane, turn] * num_stages
            for stage in range(num_stages):
                target[turn * num_stages + stage, lane] = values[replica, source + stage]
