"""Moves and swaps that lower the highest part until none helps, the bound is met, or the work limit is reached.

    {7 4 3} {6 5} of LPT   ->   swap 7 and 6   ->   {6 4 3} {7 5}, makespan 13

Every accepted step puts both parts strictly below the old makespan, so a refined partition is never worse than its
start. Capacities and equal counts hold throughout. The limit counts candidate exchanges, not time: results are the same
on every machine.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.inputs import IntArray, PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.partitioners.lpt import lpt
from packing.problem import PartitionProblem

_MIN_EXCHANGES = 2_000_000
_EXCHANGES_PER_ITEM = 500


def lpt_refined(problem: PartitionProblem) -> PartArray | None:
    """LPT, then refinement; where LPT runs into a capacity, refinement of `within_capacity`. None: nothing found."""
    start = lpt(problem)
    if start is None:
        start = within_capacity(problem)
    return None if start is None else refine(problem, start)


def refine(problem: PartitionProblem, part_of: PartArray) -> PartArray:
    """A partition with a makespan of at most that of `part_of`, which must respect capacities and counts."""
    result = part_of.copy()
    _refine(
        problem.values,
        problem.capacity,
        result,
        problem.num_parts,
        problem.base_count,
        problem.lower_bound,
        max(_MIN_EXCHANGES, _EXCHANGES_PER_ITEM * problem.num_items),
    )
    return result


def within_capacity(problem: PartitionProblem) -> PartArray | None:
    """Best-fit-decreasing on the sizes as a partition: found whenever that packing needs at most k bins.

    With equal counts the bins are evened out afterwards, which can fail (None) although a solution exists.
    """
    part_of, num_bins = best_fit_decreasing(problem.packing())
    if num_bins > problem.num_parts:
        return None
    return _even_out(problem, part_of) if problem.equal_count else part_of


def _even_out(problem: PartitionProblem, part_of: PartArray) -> PartArray | None:
    """Move items from the fullest part (by count) to the emptiest that takes one, until counts differ by one."""
    sizes, capacity = problem.sizes, problem.capacity
    part_of = part_of.copy()
    count = np.bincount(part_of, minlength=problem.num_parts)
    used = np.zeros((problem.num_parts, sizes.shape[1]), np.int64)
    np.add.at(used, part_of, sizes)
    while count.max() - count.min() > 1:
        for item, goal in _count_moves(part_of, count):
            if (sizes[item] <= capacity - used[goal]).all():
                break
        else:
            return None
        source = part_of[item]
        used[source] -= sizes[item]
        used[goal] += sizes[item]
        count[source] -= 1
        count[goal] += 1
        part_of[item] = goal
    return part_of


def _count_moves(part_of: PartArray, count: IntArray) -> list[tuple[int, int]]:
    """(item, goal) pairs that even out counts: from one of the fullest parts to one that holds at least two fewer."""
    most = count.max()
    goals = [int(part) for part in np.argsort(count, kind="stable") if count[part] <= most - 2]
    items = np.flatnonzero(count[part_of] == most)
    return [(int(item), goal) for goal in goals for item in items]


@jit
def _refine(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    part_of: PartArray,
    num_parts: int,
    base_count: int,
    lower_bound: int,
    max_exchanges: int,
) -> None:
    num_items, num_values = values.shape
    num_stages = num_values - capacity.shape[0]
    load = np.zeros((num_parts, num_values), np.int64)
    height = np.zeros(num_parts, np.int64)
    count = np.zeros(num_parts, np.int64)
    # The items of a part are a doubly linked list: rows are next item, previous item, first item (by part).
    links = np.full((3, max(num_items, num_parts)), -1, np.int64)
    for item in range(num_items):
        part = int(part_of[item])  # not int32, so that helpers compile once
        _add(values, load, links, part, item)
        count[part] += 1
    for part in range(num_parts):
        height[part] = _height(load, num_stages, part)
    tried = np.full(num_parts, -1, np.int64)
    turn = 0
    while max_exchanges > 0:
        turn += 1
        high = _highest(height)
        makespan = height[high]
        if makespan <= lower_bound:
            return
        give, take, low = -1, -1, high
        tried[high] = turn
        while give < 0 and max_exchanges > 0:
            low = _lowest_untried(height, tried, turn)
            if low < 0 or (num_stages == 1 and height[low] >= makespan):
                return
            tried[low] = turn
            may_move = base_count >= num_items or count[high] - count[low] == 1
            give, take, seen = _best_exchange(values, capacity, load, links, high, low, makespan, lower_bound, may_move)
            max_exchanges -= seen
        if give >= 0:
            _remove(values, load, links, high, give)
            _add(values, load, links, low, give)
            part_of[give] = low
            if take >= 0:
                _remove(values, load, links, low, take)
                _add(values, load, links, high, take)
                part_of[take] = high
            else:
                count[high] -= 1
                count[low] += 1
            height[high] = _height(load, num_stages, high)
            height[low] = _height(load, num_stages, low)


@jit_inner
def _height(load: IntArray, num_stages: int, part: int) -> int:
    height = 0
    for stage in range(num_stages):
        height = max(height, load[part, stage])
    return height


@jit_inner
def _add(values: IntArray, load: IntArray, links: IntArray, part: int, item: int) -> None:
    first = links[2, part]
    links[0, item] = first
    links[1, item] = -1
    if first >= 0:
        links[1, first] = item
    links[2, part] = item
    for column in range(values.shape[1]):
        load[part, column] += values[item, column]


@jit_inner
def _remove(values: IntArray, load: IntArray, links: IntArray, part: int, item: int) -> None:
    after, prior = links[0, item], links[1, item]
    if prior >= 0:
        links[0, prior] = after
    else:
        links[2, part] = after
    if after >= 0:
        links[1, after] = prior
    for column in range(values.shape[1]):
        load[part, column] -= values[item, column]


@jit_inner
def _highest(height: IntArray) -> int:
    best = 0
    for part in range(height.shape[0]):
        if height[part] > height[best]:
            best = part
    return best


@jit_inner
def _lowest_untried(height: IntArray, tried: IntArray, turn: int) -> int:
    """The lowest part that was not tried in this turn, or -1."""
    best = -1
    for part in range(height.shape[0]):
        if tried[part] != turn and (best < 0 or height[part] < height[best]):
            best = part
    return best


@jit_inner
def _best_exchange(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    capacity: IntArray,
    load: IntArray,
    links: IntArray,
    high: int,
    low: int,
    makespan: int,
    lower_bound: int,
    may_move: bool,
) -> tuple[int, int, int]:
    """(item to give, item to take or -1 for a move, candidates seen); give is -1 when nothing lowers the pair.

    Takes the first exchange that gains at least half of what the pair can gain, else the best.
    """
    num_stages = values.shape[1] - capacity.shape[0]
    ideal = lower_bound
    for stage in range(num_stages):
        ideal = max(ideal, (load[high, stage] + load[low, stage] + 1) // 2)
    enough = makespan - (makespan - ideal + 1) // 2
    best_give, best_take, best_height = -1, -1, makespan
    seen = 0
    give = links[2, high]
    while give >= 0:
        take = -1 if may_move else links[2, low]
        while take >= 0 or may_move:
            seen += 1
            height = 0
            for stage in range(num_stages):
                change = values[give, stage] - (values[take, stage] if take >= 0 else 0)
                height = max(height, load[high, stage] - change, load[low, stage] + change)
            if height < best_height and _fits(values, capacity, load, high, low, give, take):
                best_give, best_take, best_height = give, take, height
                if height <= enough:
                    return best_give, best_take, seen
            take = links[2, low] if take < 0 else links[0, take]
            if take < 0:
                break
        give = links[0, give]
    return best_give, best_take, seen


@jit_inner
def _fits(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray, capacity: IntArray, load: IntArray, high: int, low: int, give: int, take: int
) -> bool:
    """Whether both parts stay within capacity after `high` gives an item to `low` and takes one (or none)."""
    num_stages = values.shape[1] - capacity.shape[0]
    for column in range(num_stages, values.shape[1]):
        change = values[give, column] - (values[take, column] if take >= 0 else 0)
        limit = capacity[column - num_stages]
        if change > limit - load[low, column] or -change > limit - load[high, column]:
            return False
    return True
