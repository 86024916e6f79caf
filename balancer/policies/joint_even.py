"""Even out the totals of replicas to the last nanoseconds by exchanging pairs of samples.

    totals 20 and 14, samples {9 6 5} {7 4 3}   ->   a pair that differs by half of 6: 6 and 3   ->   totals 17 and 17

Where a step takes what the slowest replica has in all, only that total counts. The highest replica exchanges a sample
with another one such that the pair differs by about half of what their totals do. With the samples of each replica in
order of weight, the nearest pair is found in one walk over both, so thousands of pairs cost as much as their sum, not
their product. The lowest replica comes first; all are looked at only where it does not take most of the excess away.

Where no single pair helps, many are exchanged at once: samples of the highest and of the lowest replica are matched,
like with like, and which pairs change places is found by differencing (Karmarkar and Karp 1982): the two largest
differences take opposite signs and leave theirs, until one is left. With k pairs about k^(-0.7 ln k) of a difference
remains, so that replicas with 64 samples and more agree to billionths.

Exchanges keep the number of samples of every cell, and capacities hold. Work is limited by a count of steps: results
are the same on every machine. Price: one column only; a step of 8,192 samples on 64 replicas takes about a millisecond.
"""

import numpy as np
from numpy.typing import NDArray

from packing._jit import jit, jit_inner

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]

_ENOUGH = 4  # an exchange that leaves one part in so many of the excess is made without a look at other replicas
_PAIRS = 256  # pairs that are differenced at once
_PARTNERS = 16  # lowest replicas that differencing tries,
_MIXES = 64  # so often in all before it gives up,
_LEFT_OUT = 7  # one sample in so many left out of all but the first try
_MIX_WORK = 4_000  # steps that take as long as differencing two replicas
_SCANNED = 8  # totals that are read in the time of one step of a walk


@jit
def even_out(  # noqa: PLR0917  kernels take flat arguments
    weight: Int64Array,
    sizes: Int64Array,
    capacity: Int64Array,
    cell_of: Int32Array,
    num_replicas: int,
    num_slots: int,
    enough: int,
    max_work: int,
) -> Int32Array:
    """A better `cell_of` int32 [n] (replica * M + micro-batch); the largest total of a replica never rises.

    Args:
        weight: int64 [n], what a replica adds up. sizes: int64 [n, d]. capacity: int64 [d], of a cell.
        enough: total of the highest replica that ends the search: the mean, or the longest sample.
        max_work: steps of walks and looks at replicas.
    """
    result = cell_of.copy()
    total, load, begin, items = _grouped(weight, sizes, cell_of, num_replicas, num_slots)
    while max_work > 0:
        high, lowest = int(total.argmax()), int(total.argmin())
        max_work -= num_replicas // _SCANNED + 1
        if total[high] <= enough:
            break
        best, best_give, best_take, best_low, mixed = int(total[high]), -1, -1, -1, False
        for turn in range(num_replicas):
            low = (lowest + turn) % num_replicas
            if low == high or total[low] >= best:
                continue
            found, give, take, seen = _nearest(
                weight, sizes, capacity, result, load, items, begin, total, high, low, best
            )
            max_work -= seen + 1
            if found < best:
                best, best_give, best_take, best_low = found, give, take, low
            if _ENOUGH * (best - enough) <= total[high] - enough or max_work <= 0:
                break
            if turn == 0:  # one pair is not enough: many at once, before all others are looked at
                mixed = _mix(weight, sizes, capacity, result, load, items, begin, total, high, low, best, 0)
                max_work -= _MIX_WORK
                if mixed:
                    break
        if mixed:
            continue
        if best_low < 0:
            for turn in range(_MIXES):
                low = _lowest_but(total, turn % max(1, min(_PARTNERS, num_replicas - 1)))
                mixed = low != high and _mix(
                    weight, sizes, capacity, result, load, items, begin, total, high, low, total[high], turn
                )
                max_work -= num_replicas // _SCANNED + _MIX_WORK
                if mixed or max_work <= 0:
                    break
            if not mixed:
                break
            continue
        one, other = items[best_give], items[best_take]
        _exchange(sizes, result, load, one, other)
        total[high] -= weight[one] - weight[other]
        total[best_low] += weight[one] - weight[other]
        _settle(weight, items, best_give, int(begin[high]), int(begin[high + 1]), int(other))
        _settle(weight, items, best_take, int(begin[best_low]), int(begin[best_low + 1]), int(one))
    return result


@jit_inner
def _grouped(
    weight: Int64Array, sizes: Int64Array, cell_of: Int32Array, num_replicas: int, num_slots: int
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """(totals [R], sizes of cells [R * M, d], where the samples of each replica begin [R + 1], samples of all [n]).

    Those of a replica are in order of weight, the heaviest first.
    """
    total = np.zeros(num_replicas, np.int64)
    load = np.zeros((num_replicas * num_slots, sizes.shape[1]), np.int64)
    begin = np.zeros(num_replicas + 1, np.int64)
    for item in range(len(weight)):
        replica = cell_of[item] // num_slots
        total[replica] += weight[item]
        begin[replica + 1] += 1
        for column in range(sizes.shape[1]):
            load[cell_of[item], column] += sizes[item, column]
    for replica in range(num_replicas):
        begin[replica + 1] += begin[replica]
    items = np.empty(len(weight), np.int64)
    place = begin[:num_replicas].copy()
    for item in np.argsort(-weight, kind="mergesort"):
        replica = cell_of[item] // num_slots
        items[place[replica]] = item
        place[replica] += 1
    return total, load, begin, items


@jit_inner
def _nearest(  # noqa: PLR0917  kernels take flat arguments
    weight: Int64Array,
    sizes: Int64Array,
    capacity: Int64Array,
    cell_of: Int32Array,
    load: Int64Array,
    items: Int64Array,
    begin: Int64Array,
    total: Int64Array,
    high: int,
    low: int,
    best: int,
) -> tuple[int, int, int, int]:
    """(higher of both totals, place of the sample to give, of the one to take, steps): the best exchange below `best`.

    For each sample of the high replica, in order, the samples of the low one around the wanted difference.
    """
    give, take, steps = -1, -1, 0
    wanted = (total[high] - total[low]) // 2
    there, last = begin[low], begin[low + 1] - 1
    for here in range(begin[high], begin[high + 1]):
        goal = weight[items[here]] - wanted  # what the sample to take should weigh
        steps += 1
        if goal < 0 or there > last:
            break
        while there < last and weight[items[there + 1]] >= goal:
            there += 1
            steps += 1
        for other in range(there, min(there + 2, last + 1)):
            change = weight[items[here]] - weight[items[other]]
            after = max(total[high] - change, total[low] + change)
            if after < best and _fits(sizes, capacity, cell_of, load, items[here], items[other]):
                best, give, take = after, here, other
    return best, give, take, steps


@jit_inner
def _fits(  # noqa: PLR0917  kernels take flat arguments
    sizes: Int64Array, capacity: Int64Array, cell_of: Int32Array, load: Int64Array, one: int, other: int
) -> bool:
    """Whether both cells keep to the capacities when the samples change places."""
    for column in range(len(capacity)):
        change = sizes[one, column] - sizes[other, column]
        if (
            load[cell_of[other], column] + change > capacity[column]
            or load[cell_of[one], column] - change > capacity[column]
        ):
            return False
    return True


@jit_inner
def _exchange(sizes: Int64Array, cell_of: Int32Array, load: Int64Array, one: int, other: int) -> None:
    """Let two samples change places."""
    for column in range(sizes.shape[1]):
        change = sizes[one, column] - sizes[other, column]
        load[cell_of[one], column] -= change
        load[cell_of[other], column] += change
    cell = cell_of[one]
    cell_of[one] = cell_of[other]
    cell_of[other] = cell


@jit_inner
def _lowest_but(total: Int64Array, turn: int) -> int:
    """The replica of lowest total but for `turn` lower ones (of equal totals one counts)."""
    floor, replica = np.int64(-1), 0
    for _ in range(turn + 1):
        replica = -1
        for other in range(len(total)):
            if total[other] > floor and (replica < 0 or total[other] < total[replica]):
                replica = other
        if replica < 0:
            return int(total.argmax())
        floor = total[replica]
    return replica


@jit_inner
def _mix(  # noqa: PLR0917  kernels take flat arguments
    weight: Int64Array,
    sizes: Int64Array,
    capacity: Int64Array,
    cell_of: Int32Array,
    load: Int64Array,
    items: Int64Array,
    begin: Int64Array,
    total: Int64Array,
    high: int,
    low: int,
    best: int,
    turn: int,
) -> bool:
    """Exchange many pairs of two replicas at once, if that leaves both below `best`; whether it did.

    Another `turn` leaves other samples out, which gives other differences.
    """
    pairs = np.empty((_PAIRS, 2), np.int64)  # places of the samples
    count, there, free = 0, begin[low], begin[low]  # samples of the low replica from `free` on are not matched yet
    matched = np.int64(0)
    for here in range(begin[high], begin[high + 1]):
        mine = weight[items[here]]
        while there < begin[low + 1] and weight[items[there]] > mine:
            there += 1
        if there < begin[low + 1] and weight[items[there]] == mine:
            there += 1  # an exchange of equals changes nothing
            free = there
            continue
        if turn > 0 and (here + turn) % _LEFT_OUT == 0:
            continue
        # The nearest heavier or lighter one, whichever keeps the sum of all differences small.
        heavier, lighter = there > free, there < begin[low + 1]
        if count == _PAIRS or not (heavier or lighter):
            continue
        other = there - 1 if heavier and (matched > 0 or not lighter) else there
        pairs[count, 0], pairs[count, 1] = here, other
        count += 1
        matched += mine - weight[items[other]]
        free = other + 1
        there = max(there, free)
    difference = np.empty(count + 1, np.int64)
    difference[count] = total[high] - total[low]  # of all that stays
    for pair in range(count):
        difference[pair] = weight[items[pairs[pair, 0]]] - weight[items[pairs[pair, 1]]]
        difference[count] -= difference[pair]
    sign = _signs(difference)
    gap = np.int64(0)
    for pair in range(count + 1):
        gap += sign[pair] * sign[count] * difference[pair]
    if (total[high] + total[low] + abs(gap) + 1) // 2 >= best:
        return False
    fits = True
    for pair in range(count):
        if sign[pair] != sign[count]:
            _exchange(sizes, cell_of, load, items[pairs[pair, 0]], items[pairs[pair, 1]])
    for pair in range(count):
        for side in range(2):
            for column in range(len(capacity)):
                fits = fits and load[cell_of[items[pairs[pair, side]]], column] <= capacity[column]
    for pair in range(count):
        if sign[pair] != sign[count]:
            one, other = items[pairs[pair, 0]], items[pairs[pair, 1]]
            if fits:
                items[pairs[pair, 0]], items[pairs[pair, 1]] = other, one
            else:
                _exchange(sizes, cell_of, load, one, other)
    if not fits:
        return False
    both = total[high] + total[low]
    total[high] = (both + gap) // 2
    total[low] = both - total[high]
    for replica in (high, low):  # matched samples are alike, so little is out of order
        for place in range(begin[replica] + 1, begin[replica + 1]):
            _settle(weight, items, place, begin[replica], place + 1, items[place])
    return True


@jit_inner
def _signs(difference: Int64Array) -> Int64Array:
    """Signs int64 [k], 1 or -1, that make the signed sum small, by differencing."""
    count = len(difference)
    value = np.abs(difference)
    order = np.argsort(value, kind="mergesort")  # ascending: the two largest are at the end
    left = value[order]
    pairs = np.empty((count, 2), np.int64)
    for last in range(count - 1, 0, -1):
        # The two largest take opposite signs; their difference stands for both, under the name of the larger.
        large, small, rest = order[last], order[last - 1], left[last] - left[last - 1]
        pairs[last, 0], pairs[last, 1] = large, small
        place = last - 1
        while place > 0 and left[place - 1] > rest:
            left[place], order[place] = left[place - 1], order[place - 1]
            place -= 1
        left[place], order[place] = rest, large
    sign = np.ones(count, np.int64)
    for last in range(1, count):  # the last difference first: the sign of the larger is settled before the smaller's
        sign[pairs[last, 1]] = -sign[pairs[last, 0]]
    for place in range(count):
        if difference[place] < 0:
            sign[place] = -sign[place]
    return sign


@jit_inner
def _settle(  # noqa: PLR0917  kernels take flat arguments
    weight: Int64Array, items: Int64Array, place: int, first: int, stop: int, item: int
) -> None:
    """Put `item` where another one leaves `place`, in order of weight."""
    while place > first and weight[items[place - 1]] < weight[item]:
        items[place] = items[place - 1]
        place -= 1
    while place + 1 < stop and weight[items[place + 1]] > weight[item]:
        items[place] = items[place + 1]
        place += 1
    items[place] = item
