"""Moves and swaps that lower the highest part until none helps, `enough` is met, or the work limit is reached.

    {7 4 3} {6 5} of LPT   ->   swap 7 and 6   ->   {6 4 3} {7 5}, makespan 13

The highest part gives an item for one that is lighter in its largest stage by `step` or a little more, wherever that
is: in the list of all items sorted by this stage those are neighbours. An exchange counts if both parts end at least
`step` below the old makespan. `step` starts at half of the way to `enough` and is halved whenever no exchange is left,
down to one, so a refined partition is never worse than its start. Capacities and equal counts hold throughout.

Parts have slots for items, some of them empty: a move is a swap with an empty slot, and with equal counts a part has as
many slots as it may hold items.

Price: only one item for one, or moves into the `_LOWEST` lowest parts. The limit counts candidates, not time: results
are the same on every machine. A step costs O(k / 256 + n / k) and its candidates, of which few are needed; all of it
counts, so refinement takes O(n) however many parts there are.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.grouping import group_by_bin
from packing.inputs import IntArray, PartArray
from packing.partitioners.order import ascending
from packing.problem import PartitionProblem

_MIN_CANDIDATES = 200_000
_CANDIDATES_PER_ITEM = 60
_ITEM_WORK = 8  # candidates that take as long as turning to another item to give,
_TURN_WORK = 64  # and to another part
_SCANNED = 64  # parts or slots passed in a simple loop that take as long as a candidate
_LOWEST = 8
_BLOCK = 256  # places of the list of parts that move as one
_SPAN = 128
_SPARE_SLOTS = 2


def refine(problem: PartitionProblem, part_of: PartArray, work_divisor: int = 1) -> PartArray:
    """A partition with a makespan of at most that of `part_of`, which must respect capacities and counts.

    `work_divisor`: one part in that many of the work limit, to tell which of several starts is worth the rest.
    """
    num_parts, values = problem.num_parts, problem.values
    num_stages = problem.weights.shape[1]
    order, offsets, load = group_by_bin(part_of, values, num_parts)
    height = load[:, :num_stages].max(axis=1)
    result = part_of.copy()
    if height.max() <= problem.enough:
        return result
    if problem.equal_count:
        starts = np.arange(num_parts + 1) * (problem.base_count + (problem.num_extra > 0))
        fewest = problem.base_count
    else:
        fewest = 0
        starts = offsets + np.arange(num_parts + 1) * _SPARE_SLOTS
    slots = np.full(starts[-1], -1)
    slots[np.arange(order.size) + np.repeat(starts[:-1] - offsets[:-1], np.diff(offsets))] = order
    by_weight = np.empty((2 * num_stages, order.size), np.int64)  # items, then their weights, by stage
    for stage in range(num_stages):
        by_weight[stage] = ascending(problem.weights[:, stage])
        by_weight[num_stages + stage] = problem.weights[by_weight[stage], stage]
    ranked = np.zeros(-(-num_parts // _BLOCK) * _BLOCK, np.int64)
    ranked[:num_parts] = np.argsort(height, kind="stable")
    work = max(_MIN_CANDIDATES, _CANDIDATES_PER_ITEM * problem.num_items) // work_divisor
    _refine(
        values, problem.capacity, result, slots, starts, load, height, ranked, by_weight, fewest, problem.enough, work
    )
    return result


@jit
def _refine(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    part_of: PartArray,
    slots: IntArray,
    starts: IntArray,
    load: IntArray,
    height: IntArray,
    ranked: IntArray,
    by_weight: IntArray,
    fewest: int,
    enough: int,
    work: int,
) -> None:
    """Exchange items in place: in `part_of`, and between `slots` (item or -1).

    starts [k + 1]: part p has slots starts[p]..starts[p + 1]; load [k, S + d]; height [k];
    ranked [k or more]: parts by height; by_weight [2 S, n]: items, then weights, sorted by each stage;
    fewest: items below which no part may fall.
    """
    num_parts, num_values = load.shape
    num_stages = num_values - capacity.shape[0]
    turned = np.zeros(ranked.shape[0] // _BLOCK, np.int64)
    least = np.zeros(num_stages, np.int64)  # at most the smallest load in each stage
    last = num_parts - 1
    step = height.max()
    while work > 0:
        high = ranked[_index(turned, last)]
        if height[high] <= enough:
            return
        step = min(step, (height[high] - enough + 1) // 2)
        give, take, low, seen = _find_exchange(
            values, capacity, part_of, slots, starts, load, ranked, turned, by_weight, least, high, step, fewest
        )
        work -= seen + _TURN_WORK
        if low < 0:
            if step <= 1:
                return
            step //= 2
            for stage in range(num_stages):
                least[stage] = load[0, stage]
                for part in range(num_parts):
                    least[stage] = min(least[stage], load[part, stage])
            work -= num_stages * num_parts // _SCANNED
            continue
        place = starts[low]
        while slots[place] != take:
            place += 1
        scanned = place - starts[low]
        slots[place] = slots[give]
        part_of[slots[give]] = low
        for column in range(num_values):
            change = values[slots[give], column] - (values[take, column] if take >= 0 else 0)
            load[high, column] -= change
            load[low, column] += change
            if column < num_stages:
                lighter = min(load[high, column], load[low, column])
                least[column] = min(least[column], lighter)
        slots[give] = take
        if take >= 0:
            part_of[take] = high
        first = _first_at_least(ranked, turned, height, height[low], -1, last)
        place = first
        while ranked[_index(turned, place)] != low:
            place += 1
        scanned += place - first + _settle(ranked, turned, height, place, _height(load, num_stages, low), last)
        scanned += _settle(ranked, turned, height, last, _height(load, num_stages, high), num_parts)
        work -= scanned // _SCANNED


@jit_inner
def _height(load: IntArray, num_stages: int, part: int) -> int:
    height = load[part, 0]
    for stage in range(1, num_stages):
        height = max(height, load[part, stage])
    return int(height)


@jit_inner
def _index(turned: IntArray, place: int) -> int:
    """Where the list of parts keeps that place: every block of `_BLOCK` places is a ring, turned by so many."""
    return int(place - place % _BLOCK + (place + turned[place // _BLOCK]) % _BLOCK)


@jit_inner
def _first_at_least(  # noqa: PLR0917  kernels take flat arguments
    ranked: IntArray, turned: IntArray, height: IntArray, value: int, hole: int, stop: int
) -> int:
    """First place in the ascending list of `stop` parts, without the one at `hole`, of a part at least `value` high."""
    left, right = 0, stop - (hole >= 0)
    while left < right:
        middle = (left + right) // 2
        if height[ranked[_index(turned, middle + (0 <= hole <= middle))]] < value:
            left = middle + 1
        else:
            right = middle
    return left


@jit_inner
def _settle(  # noqa: PLR0917  kernels take flat arguments
    ranked: IntArray, turned: IntArray, height: IntArray, place: int, new_height: int, stop: int
) -> int:
    """Move the part at `place` of the ascending list of `stop` parts to where its new height belongs.

    Whole blocks between are turned by one place. Returns the number of steps.
    """
    part, steps = ranked[_index(turned, place)], 0
    goal = _first_at_least(ranked, turned, height, new_height, place, stop)
    while place != goal:
        block, step = place // _BLOCK, 1 if goal > place else -1
        steps += 1
        if place % _BLOCK == (0 if step > 0 else _BLOCK - 1) and abs(goal - place) >= _BLOCK - 1:
            turned[block] = (turned[block] + step) % _BLOCK
            place += step * (_BLOCK - 1)
        else:
            ranked[_index(turned, place)] = ranked[_index(turned, place + step)]
            place += step
    ranked[_index(turned, goal)] = part
    height[part] = new_height
    return steps


@jit_inner
def _find_exchange(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    part_of: PartArray,
    slots: IntArray,
    starts: IntArray,
    load: IntArray,
    ranked: IntArray,
    turned: IntArray,
    by_weight: IntArray,
    least: IntArray,
    high: int,
    step: int,
    fewest: int,
) -> tuple[int, int, int, int]:
    """(slot to give, item to take or -1 for a move, part to give to or -1 when none, candidates seen).

    Both parts end at least `step` below the height of `high`.
    """
    num_parts, num_values = load.shape
    num_stages = num_values - capacity.shape[0]
    stage = 0  # the one in which it is highest
    for other in range(1, num_stages):
        if load[high, other] > load[high, stage]:
            stage = other
    limit = load[high, stage] - step
    room = limit - least[stage]  # the exchange takes at least `step` and at most this much off the stage
    weights, count = by_weight[num_stages + stage], 0
    seen = (starts[high + 1] - starts[high]) // _SCANNED
    for slot in range(starts[high], starts[high + 1]):
        count += slots[slot] >= 0
    for slot in range(starts[high], starts[high + 1]):
        give = slots[slot]
        if give < 0 or values[give, stage] < step:
            continue
        weight = values[give, stage]
        if weight <= room and count > fewest:
            for place in range(min(_LOWEST, num_parts - 1)):
                low = ranked[_index(turned, place)]
                if _possible(values, capacity, load, high, low, give, -1, limit):
                    for empty in range(starts[low + 1] - 1, starts[low] - 1, -1):
                        if slots[empty] < 0:
                            return slot, -1, low, seen
                    seen += (starts[low + 1] - starts[low]) // _SCANNED  # it has no empty slot
        left, right = 0, weights.shape[0]  # the first item heavier than weight - step
        while left < right:
            middle = (left + right) // 2
            if weights[middle] <= weight - step:
                left = middle + 1
            else:
                right = middle
        place, first = left - 1, max(0, left - _SPAN) if step > 1 else 0
        while place >= first and weights[place] >= weight - room:
            take = by_weight[stage, place]
            low = int(part_of[take])
            # The first condition fails most often and costs least.
            if (
                load[low, stage] + weight - weights[place] <= limit
                and low != high
                and _possible(values, capacity, load, high, low, give, take, limit)
            ):
                return slot, take, low, seen + left - place
            place -= 1
        seen += left - place + _ITEM_WORK
    return -1, -1, -1, seen


@jit_inner
def _possible(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray, capacity: IntArray, load: IntArray, high: int, low: int, give: int, take: int, limit: int
) -> bool:
    """Whether both parts stay within all limits after `high` gives an item to `low` and takes one (-1: none)."""
    num_values = values.shape[1]
    num_stages = num_values - capacity.shape[0]
    for column in range(num_values):
        change = values[give, column] - (values[take, column] if take >= 0 else 0)
        most = limit if column < num_stages else capacity[column - num_stages]
        if change > most - load[low, column] or -change > most - load[high, column]:
            return False
    return True
