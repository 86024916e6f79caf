"""Kernels of the `joint` policy: a local search by simulation, and the routing of media items over encoder ranks.

    cells of the samples [n], acts of the schedule [A]
      shorten     the slowest replica: swap two of its micro-batches, move a sample, swap two samples; simulate; keep
                  what is no slower                                     -> cells [n], makespan [R]
      route       items of one (replica, unit) heaviest first, each to the lightest encoder rank  -> rank [k]

Only the slowest replica decides a step that ends when all are done, so the search works on that one alone. A turn makes
`LANES` tries side by side in one simulation and takes the fastest; every eighth turn tries exchanges with another
replica. Tries come from a fixed sequence of pseudo-random numbers and are limited by their count: results are the same
on every machine. Price: a local optimum, 4 to 8 microseconds a turn for 16 to 128 acts.
"""

import numpy as np
from numpy.typing import NDArray

from balancer.simulation_core import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from packing._jit import jit, jit_inner

BoolArray = NDArray[np.bool_]
Int8Array = NDArray[np.int8]
Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

# Acts: op, micro-batch * S + stage, rank, arrival slot, each [A]; P, M, S, and the micro-batches of an exchange or 0.
Program = tuple[Int8Array, Int32Array, Int32Array, Int32Array, int, int, int, int]
# What cells add up: values [n, columns], constants [kinds, S], the first stage whose times follow the samples, and 1
# where stage 0 is an encoder that runs only in micro-batches with media, else 0.
Samples = tuple[Int64Array, Int64Array, int, int]
# Sums of cells: times [kinds, R * M, S]; sizes, samples with media and samples [R * M, d + 2]; present [R * M, S].
Sums = tuple[Int64Array, Int64Array, BoolArray]
# Lanes: times [kinds, M * S, LANES] and present [M * S, LANES].
Lanes = tuple[Int64Array, BoolArray]
# Who is where: cell of every sample [n], samples of all replicas [n], where those of each begin [R + 1].
Places = tuple[Int32Array, Int64Array, Int64Array]

LANES = 8
_CROSS_TURN = 8  # one turn in so many exchanges samples with another replica
_DRAWS = 4  # moves drawn until one is allowed
_MULTIPLIER, _INCREMENT, _MASK = 1103515245, 12345, 2**31 - 1  # the generator of the C standard's example
_NOTHING, _CELLS, _SAMPLES = 0, 1, 2  # kinds of moves


@jit
def shorten(  # noqa: PLR0917  kernels take flat arguments
    program: Program,
    samples: Samples,
    places: Places,
    capacity: Int64Array,
    fixed_times: Int64Array,
    unit_size: int,
    target: int,
    patience: int,
    max_turns: int,
) -> tuple[Int64Array, int]:
    """(makespans [R], turns made) after moving samples of the slowest replicas; changes `places`.

    Args:
        program: as `time_replicas` takes it.
        samples: values int64 [n, kinds * S + d + 1] are forward and backward (and, where the schedule splits it,
            weight-gradient) times, sizes, and whether there is media; constants those of a micro-batch.
        places: see above. capacity: int64 [d], of a cell.
        fixed_times: int64 [kinds, R, M]: times of stage 0 where it is routed, -1 where absent; else [kinds, 0, M].
        unit_size: samples stay inside their unit of so many micro-batches (M: anywhere).
        target: makespan that is good enough. patience: turns in vain, one after the other, that end the search.
    """
    cell_of, _, offsets = places
    num_replicas, num_microbatches = len(offsets) - 1, program[5]
    constants = samples[1]
    num_kinds, num_stages = constants.shape
    num_cells, routed = num_replicas * num_microbatches, fixed_times.shape[1] > 0
    times = np.zeros((num_kinds, num_cells, num_stages), np.int64)
    present = np.zeros((num_cells, num_stages), np.bool_)
    sums = (times, np.zeros((num_cells, len(capacity) + 2), np.int64), present)
    for cell in range(num_cells if routed else 0):
        replica, slot = cell // num_microbatches, cell % num_microbatches
        present[cell, 0] = fixed_times[0, replica, slot] >= 0
        for kind in range(num_kinds):
            times[kind, cell, 0] = max(0, fixed_times[kind, replica, slot])
    for item in range(len(cell_of)):
        _add(samples, sums, item, cell_of[item], 1)
    lanes = (
        np.zeros((num_kinds, num_microbatches * num_stages, LANES), np.int64),
        np.zeros((num_microbatches * num_stages, LANES), np.bool_),
    )
    clock = np.zeros((program[4] + 4 * num_microbatches, LANES), np.int64)
    makespan, after = np.zeros(num_replicas, np.int64), np.zeros(LANES, np.int64)
    for start in range(0, num_replicas, LANES):
        for lane in range(min(LANES, num_replicas - start)):
            _load(sums, lanes, start + lane, lane, num_microbatches)
        _run(program, lanes, clock, after)
        for lane in range(min(LANES, num_replicas - start)):
            makespan[start + lane] = after[lane]
    moves = np.zeros((LANES, 5), np.int64)  # kind, sample to give, one to take or -1, cell it leaves, cell it goes to
    random, vain, turns, worst, loaded = 1, 0, 0, int(makespan.argmax()), -1
    while turns < max_turns and vain < patience and makespan[worst] > target:
        turns += 1
        vain += 1
        random, partner = _partner(random, worst, 1 if routed else num_replicas, num_microbatches)
        if loaded != worst or partner != worst:
            for lane in range(LANES):
                _load(sums, lanes, worst if _own(lane, worst, partner) else partner, lane, num_microbatches)
            loaded = worst if partner == worst else -1
        random = _try(
            samples, sums, lanes, places, capacity, moves, unit_size, num_microbatches, worst, partner, random
        )
        _run(program, lanes, clock, after)
        best = _fastest(after, moves, makespan[worst], worst, partner)
        if partner == worst:
            for lane in range(LANES):
                _show_move(sums, lanes, moves[lane], worst, num_microbatches, lane)
        if best < 0:
            continue
        _accept(samples, sums, places, moves[best], worst, partner)
        if partner != worst:
            makespan[partner] = after[best + LANES // 2]
        if after[best] < makespan[worst]:
            vain, loaded = 0, -1
            makespan[worst] = after[best]
            worst = int(makespan.argmax())
        else:
            for lane in range(LANES):
                _show_move(sums, lanes, moves[best], worst, num_microbatches, lane)
    return makespan, turns


@jit_inner
def _next(random: int) -> int:
    return (random * _MULTIPLIER + _INCREMENT) & _MASK


@jit_inner
def _partner(random: int, worst: int, num_replicas: int, num_microbatches: int) -> tuple[int, int]:
    """(random state, replica that takes part in this turn): mostly the slowest one itself."""
    random = _next(random)
    if num_replicas == 1 or (num_microbatches > 1 and (random >> 16) % _CROSS_TURN > 0):
        return random, worst
    random = _next(random)
    return random, (random >> 8) % num_replicas


@jit_inner
def _own(lane: int, worst: int, partner: int) -> bool:
    """Whether a lane holds the slowest replica; with a partner, the second half of the lanes holds that."""
    return partner == worst or lane < LANES // 2


@jit_inner
def _try(  # noqa: PLR0917  kernels take flat arguments
    samples: Samples,
    sums: Sums,
    lanes: Lanes,
    places: Places,
    capacity: Int64Array,
    moves: Int64Array,
    unit_size: int,
    num_microbatches: int,
    worst: int,
    partner: int,
    random: int,
) -> int:
    """Draw a move for every lane that holds the slowest replica, and put what it changes into the lanes."""
    for lane in range(LANES):
        moves[lane, 0] = _NOTHING
        if not _own(lane, worst, partner):
            continue
        random = _draw(
            samples, sums, places, capacity, unit_size, num_microbatches, worst, partner, random, moves[lane]
        )
        if moves[lane, 0] == _NOTHING:
            continue
        _apply(samples, sums, moves[lane], False)
        _show(sums, lanes, moves[lane, 3], worst * num_microbatches, lane)
        beside = lane if partner == worst else lane + LANES // 2
        _show(sums, lanes, moves[lane, 4], partner * num_microbatches, beside)
        _apply(samples, sums, moves[lane], True)
    return random


@jit_inner
def _draw(  # noqa: PLR0917  kernels take flat arguments
    samples: Samples,
    sums: Sums,
    places: Places,
    capacity: Int64Array,
    unit_size: int,
    num_microbatches: int,
    worst: int,
    partner: int,
    random: int,
    move: Int64Array,
) -> int:
    """Write a move that is allowed, if one is found soon, and return the random state."""
    cell_of, items, offsets = places
    base, other_base = worst * num_microbatches, partner * num_microbatches
    count, other_count = offsets[worst + 1] - offsets[worst], offsets[partner + 1] - offsets[partner]
    if count == 0 or other_count == 0:
        return random
    for _ in range(_DRAWS):
        random = _next(random)
        kind = (random >> 16) & 7
        random = _next(random)
        one = random >> 8
        random = _next(random)
        two = random >> 8
        give, take = items[offsets[worst] + one % count], np.int64(-1)
        source = np.int64(cell_of[give])
        goal = source - (source - base) % unit_size + two % unit_size
        if partner == worst and kind < 2:
            if goal != source and goal < base + num_microbatches:
                move[0], move[1], move[2], move[3], move[4] = _CELLS, give, take, source, goal
                return random
            continue
        if kind > 3 or partner != worst:
            take = items[offsets[partner] + two % other_count]
            goal = np.int64(cell_of[take])
        if (
            goal != source
            and goal < other_base + num_microbatches
            and (partner != worst or (goal - base) // unit_size == (source - base) // unit_size)
            and _fits(samples, sums, capacity, int(give), int(take), int(source), int(goal))
        ):
            move[0], move[1], move[2], move[3], move[4] = _SAMPLES, give, take, source, goal
            return random
    return random


@jit_inner
def _fits(  # noqa: PLR0917  kernels take flat arguments
    samples: Samples, sums: Sums, capacity: Int64Array, give: int, take: int, source: int, goal: int
) -> bool:
    """Whether both cells stay within the capacities, and none is emptied."""
    values, held = samples[0], sums[1]
    if take < 0 and held[source, held.shape[1] - 1] <= 1:
        return False
    first = values.shape[1] - len(capacity) - 1
    for column in range(len(capacity)):
        change = values[give, first + column] - (values[take, first + column] if take >= 0 else 0)
        if held[goal, column] + change > capacity[column] or held[source, column] - change > capacity[column]:
            return False
    return True


@jit_inner
def _fastest(after: Int64Array, moves: Int64Array, before: int, worst: int, partner: int) -> int:
    """The lane with the fastest move that is worth making, or -1. Equal times count, so that the search drifts on."""
    best, best_after = -1, before + (1 if partner == worst else 0)
    for lane in range(LANES):
        if moves[lane, 0] == _NOTHING:
            continue
        value = after[lane] if partner == worst else max(after[lane], after[lane + LANES // 2])
        if value < best_after:
            best, best_after = lane, value
    return best


@jit_inner
def _accept(  # noqa: PLR0917  kernels take flat arguments
    samples: Samples, sums: Sums, places: Places, move: Int64Array, worst: int, partner: int
) -> None:
    """Make a move for good."""
    cell_of, items, offsets = places
    _apply(samples, sums, move, False)
    kind, give, take, source, goal = move[0], move[1], move[2], move[3], move[4]
    if kind == _CELLS:
        for place in range(offsets[worst], offsets[worst + 1]):
            if cell_of[items[place]] == source:
                cell_of[items[place]] = goal
            elif cell_of[items[place]] == goal:
                cell_of[items[place]] = source
        return
    cell_of[give] = goal
    if take >= 0:
        cell_of[take] = source
    if partner == worst:
        return
    for place in range(offsets[worst], offsets[worst + 1]):
        if items[place] == give:
            items[place] = take
            break
    for place in range(offsets[partner], offsets[partner + 1]):
        if items[place] == take:
            items[place] = give
            break


@jit_inner
def _apply(samples: Samples, sums: Sums, move: Int64Array, undo: bool) -> None:
    """Make a move on the sums of the cells, or take it back."""
    give, take, source, goal = move[1], move[2], move[3], move[4]
    if move[0] == _CELLS:
        _swap_cells(samples, sums, source, goal)
        return
    if undo:
        source, goal = goal, source
    _add(samples, sums, give, source, -1)
    _add(samples, sums, give, goal, 1)
    if take >= 0:
        _add(samples, sums, take, goal, -1)
        _add(samples, sums, take, source, 1)


@jit_inner
def _add(samples: Samples, sums: Sums, item: int, cell: int, sign: int) -> None:
    """Add a sample to the sums of a cell, or with sign -1 take it out; stages appear and vanish with their samples."""
    values, constants, first, encoder_rule = samples
    times, held, present = sums
    num_stages, last = times.shape[2], held.shape[1] - 1
    for kind in range(times.shape[0]):
        for stage in range(first, num_stages):
            times[kind, cell, stage] += sign * values[item, kind * num_stages + stage]
    for column in range(last):
        held[cell, column] += sign * values[item, times.shape[0] * num_stages + column]
    held[cell, last] += sign
    for stage in range(first, num_stages):
        here = held[cell, last - 1] > 0 if stage < encoder_rule else held[cell, last] > 0
        if here != present[cell, stage]:
            present[cell, stage] = here
            for kind in range(times.shape[0]):
                times[kind, cell, stage] += constants[kind, stage] if here else -constants[kind, stage]


@jit_inner
def _swap_cells(samples: Samples, sums: Sums, left: int, right: int) -> None:
    """Exchange all that two cells hold."""
    first = samples[2]
    times, held, present = sums
    for stage in range(first, times.shape[2]):
        for kind in range(times.shape[0]):
            time = times[kind, left, stage]
            times[kind, left, stage] = times[kind, right, stage]
            times[kind, right, stage] = time
        here = present[left, stage]
        present[left, stage] = present[right, stage]
        present[right, stage] = here
    for column in range(held.shape[1]):
        number = held[left, column]
        held[left, column] = held[right, column]
        held[right, column] = number


@jit_inner
def _load(sums: Sums, lanes: Lanes, replica: int, lane: int, num_microbatches: int) -> None:
    """Put a whole replica into a lane."""
    base = replica * num_microbatches
    for cell in range(base, base + num_microbatches):
        _show(sums, lanes, cell, base, lane)


@jit_inner
def _show_move(  # noqa: PLR0917  kernels take flat arguments
    sums: Sums, lanes: Lanes, move: Int64Array, replica: int, num_microbatches: int, lane: int
) -> None:
    """Put both cells of a move into a lane, as they are."""
    if move[0] != _NOTHING:
        _show(sums, lanes, move[3], replica * num_microbatches, lane)
        _show(sums, lanes, move[4], replica * num_microbatches, lane)


@jit_inner
def _show(sums: Sums, lanes: Lanes, cell: int, base: int, lane: int) -> None:
    """Put one cell into a lane that holds the replica whose first cell is `base`."""
    times, _, present = sums
    lane_times, lane_present = lanes
    num_stages = times.shape[2]
    row = (cell - base) * num_stages
    for stage in range(num_stages):
        lane_present[row + stage, lane] = present[cell, stage]
        for kind in range(times.shape[0]):
            lane_times[kind, row + stage, lane] = times[kind, cell, stage]


@jit_inner
def _run(program: Program, lanes: Lanes, clock: Int64Array, after: Int64Array) -> None:
    """Makespans of all lanes, by the rules of `balancer.simulation_core.time_replicas`.

    clock [P + 4 M, LANES]: of ranks, then the latest arrival of every micro-batch, forward and backward, then the
    exchanges of every unit, forward and backward.
    """
    op, act_cell, act_rank, act_slot, num_ranks, num_microbatches, num_stages, exchange_unit = program
    times, present = lanes
    clock[:] = 0
    for act in range(len(op)):
        here, place, code, row = act_cell[act], act_rank[act], op[act], num_ranks + act_slot[act]
        kind = 0 if code == FORWARD else 1
        if code == WEIGHT_GRADIENT:
            for lane in range(LANES):
                clock[place, lane] += times[2, here, lane] if present[here, lane] else 0
        elif code == INPUT_GRADIENT:
            for lane in range(LANES):
                end = max(clock[place, lane], clock[row, lane]) + times[1, here, lane] - times[2, here, lane]
                clock[place, lane] = end if present[here, lane] else clock[place, lane]
                clock[row, lane] = end if present[here, lane] else clock[row, lane]
        elif exchange_unit == 0:
            for lane in range(LANES):
                end = max(clock[place, lane], clock[row, lane]) + times[kind, here, lane]
                clock[place, lane] = end if present[here, lane] else clock[place, lane]
                clock[row, lane] = end if present[here, lane] else clock[row, lane]
        else:
            unit = num_ranks + (2 + kind) * num_microbatches + act_slot[act] % num_microbatches // exchange_unit
            _run_exchanged(lanes, clock, here, place, row, unit, here % num_stages == 0, kind)
    after[:] = 0
    for rank in range(num_ranks):
        for lane in range(LANES):
            after[lane] = max(after[lane], clock[rank, lane])


@jit_inner
def _run_exchanged(  # noqa: PLR0917  kernels take flat arguments
    lanes: Lanes, clock: Int64Array, here: int, place: int, row: int, unit: int, is_encoder: bool, kind: int
) -> None:
    """One act where media items are exchanged: stage 0 stands beside the chain and meets it once a unit."""
    times, present = lanes
    gives = is_encoder == (kind == 0)  # to the exchange; the others wait for it
    for lane in range(LANES):
        if not present[here, lane]:
            continue
        begin = clock[place, lane]
        if not is_encoder:
            begin = max(begin, clock[row, lane])
        if not gives:
            begin = max(begin, clock[unit, lane])
        end = begin + times[kind, here, lane]
        clock[place, lane] = end
        if gives:
            clock[unit, lane] = max(clock[unit, lane], end)
        if not is_encoder:
            clock[row, lane] = end


@jit
def route(  # noqa: PLR0917  kernels take flat arguments
    order: Int64Array,
    group: Int64Array,
    own: Int64Array,
    cost: Int64Array,
    width: Int64Array,
    num_ranks: int,
    sizes: Int64Array,
    capacity: Int64Array,
) -> Int32Array:
    """Encoder rank of every item [k], heaviest first (`order`), each to the lightest of the ranks its group has where
    it still fits. Items of a group where one finds no room stay on their `own` ranks [k].

    group int64 [k]: replica and unit of each item; cost int64 [k]; width [groups]: ranks 0 .. width - 1 encode.
    sizes int64 [k, e], capacity [e]: hard limits of what one rank encodes in a unit.
    """
    rank_of = np.empty(len(group), np.int32)
    load = np.zeros((len(width), num_ranks), np.int64)
    used = np.zeros((len(width), num_ranks, len(capacity)), np.int64)
    full = np.zeros(len(width), np.bool_)
    for item in order:
        mine, taken = load[group[item]], used[group[item]]
        best = -1
        for rank in range(width[group[item]]):
            if best >= 0 and mine[rank] >= mine[best]:
                continue
            fits = True
            for column in range(len(capacity)):
                fits = fits and taken[rank, column] + sizes[item, column] <= capacity[column]
            if fits:
                best = rank
        if best < 0:
            full[group[item]] = True
            continue
        rank_of[item] = best
        mine[best] += cost[item]
        for column in range(len(capacity)):
            taken[best, column] += sizes[item, column]
    for item in range(len(group)):
        if full[group[item]]:
            rank_of[item] = own[item]
    return rank_of
