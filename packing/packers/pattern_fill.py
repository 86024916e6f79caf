"""Patterns from a linear program over all bins: for few large sizes, where filling bin after bin runs into a corner.

    sizes --group by load--> 64 classes --linear program--> bins of each pattern --pick real sizes--> half of the bins
      ^                                                                                                      |
      +------------------------- what is left, with new classes, up to 12 times, then exact fill ------------+

    sizes 1365 (1,200 of them) 1300 (800) 760 (400) ..., capacity 4096: how many bins with three of the first?

A pattern says how many sizes of each class a bin takes; which sizes of the class is decided bin by bin, so that the
bin is full. 0.03 to 0.1 % above the bound where best-fit is 1 to 3 % above it (InternVL's samples in bins of 4,096 and
8,192). Price: 10 to 60 ms whatever n is; no gain over exact fill where small sizes are plenty (then the better of the
two is returned). One dimension; others get best-fit.
"""

import numpy as np

from packing._jit import jit, jit_inner
from packing.column_generation import FloatArray, best_patterns
from packing.completion import NUMBER, RANK, repeats, take
from packing.inputs import IntArray, PartArray
from packing.packers.exact_fill import Plan, exact_fill, fill_rest, new_plan
from packing.problem import PackProblem
from packing.size_classes import SizeClasses, size_classes

_NUM_CLASSES = 64
_GRID = 512  # units of the capacity in the linear program
_MAX_ROUNDS = 12
_LOOK_AFTER = 3  # from this round on, see what the rest would need
_NUM_TURNS = 4  # patterns take turns, so that none gets all the best sizes of a class
_MAX_TABLES = 400  # limit of the linear program
_MAX_NODES = 100  # of the search for real sizes, per bin
_WASTE_SHARE = 400  # a bin may leave one part in so many free
_POSITION = 2  # third column of a list of picks: which class of the pattern


def pattern_fill(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins), never more bins than exact fill."""
    best = exact_fill(problem)
    if problem.sizes.shape[1] != 1 or best[1] <= problem.enough:
        return best
    capacity = int(problem.capacity[0])
    classes = size_classes(problem.sizes.reshape(-1), capacity)
    plan = new_plan(classes)
    for turn in range(_MAX_ROUNDS):
        before = plan.num_bins
        plan = _one_round(classes, plan, capacity, capacity // _WASTE_SHARE)
        stuck = plan.num_bins == before
        if turn >= _LOOK_AFTER or stuck:
            whole = fill_rest(classes, plan, capacity, problem.enough)
            if whole.num_bins < best[1]:
                best = classes.bin_of(whole.bin_at), whole.num_bins
            if stuck or best[1] <= problem.enough:
                break
    return best


def _one_round(classes: SizeClasses, plan: Plan, capacity: int, waste: int) -> Plan:
    """Half of the bins that the linear program wants for what is left."""
    ranks = np.flatnonzero(plan.left[:-1])
    if ranks.shape[0] == 0:
        return plan
    # Sizes that not even the smallest one fits beside need no pattern.
    ranks = ranks[classes.values[ranks] <= capacity - classes.values[ranks[-1]]]
    if ranks.shape[0] == 0:
        return plan
    values, left, cursor = classes.values[ranks], plan.left[ranks], plan.cursor[ranks]
    starts, weights, demand = _groups(values, left, capacity)
    patterns, amount = best_patterns(weights, demand, min(_GRID, capacity), _MAX_TABLES)
    num_bins = _lay_out(values, left, cursor, plan.bin_at, starts, patterns, amount, capacity, waste, plan.num_bins)
    plan.left[ranks], plan.cursor[ranks] = left, cursor
    return Plan(left=plan.left, cursor=plan.cursor, bin_at=plan.bin_at, num_bins=int(num_bins))


def _groups(values: IntArray, left: IntArray, capacity: int) -> tuple[IntArray, IntArray, IntArray]:
    """(first rank of each class and the end [m + 1], weight of each on the grid, items of each).

    Neighbouring sizes with together about the same load form a class; one that has more than that is alone.
    """
    load = values * left
    total = np.cumsum(load)
    group = (total - load // 2) // (total[-1] // _NUM_CLASSES + 1)
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(np.diff(group)) + 1])
    demand = np.add.reduceat(left, starts)
    mean = np.add.reduceat(load, starts) // demand
    shift = max(0, capacity.bit_length() - 40)  # so that the products below do not wrap
    grid = min(_GRID, capacity)
    weights = ((mean >> shift) * (2 * grid) // (capacity >> shift) + 1) // 2
    return np.append(starts, values.shape[0]), np.clip(weights, 1, grid), demand


@jit_inner
def _pick(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    left: IntArray,
    starts: IntArray,
    pattern: IntArray,
    capacity: int,
    picks: IntArray,
    trial: IntArray,
) -> tuple[int, int]:
    """Sizes that follow the pattern (rows: class, how many, work space) and fill a bin best; (number of picks, room).

    Every class counts with its smallest size; what the capacity leaves then is spent on larger ones, depth first. No
    picks and the whole capacity where the pattern cannot be followed.
    """
    num_positions = pattern.shape[0]
    free = capacity
    for position in range(num_positions):
        rank = starts[pattern[position, 0] + 1] - 1
        while rank >= starts[pattern[position, 0]] and left[rank] == 0:
            rank -= 1
        if rank < starts[pattern[position, 0]]:
            return 0, capacity
        pattern[position, 2] = values[rank]
        free -= values[rank] * pattern[position, 1]
    if free < 0:
        return 0, capacity
    best_free, num_picks, depth, position = capacity, 0, 0, 0
    wanted, rank = pattern[0, 1], starts[pattern[0, 0]]
    for _ in range(_MAX_NODES):
        possible = True
        while possible and position < num_positions:
            end, smallest = starts[pattern[position, 0] + 1], pattern[position, 2]
            while wanted > 0:
                while rank < end and (left[rank] == 0 or values[rank] - smallest > free):
                    rank += 1
                if rank == end:
                    break
                extra = values[rank] - smallest
                number = min(left[rank], wanted)
                if extra > 0:
                    number = min(number, free // extra)
                trial[depth, RANK], trial[depth, NUMBER], trial[depth, _POSITION] = rank, number, position
                depth += 1
                free -= number * extra
                wanted -= number
                rank += 1
            possible = wanted == 0
            if possible:
                position += 1
                if position < num_positions:
                    wanted, rank = pattern[position, 1], starts[pattern[position, 0]]
        if possible and free < best_free:
            best_free, num_picks = free, depth
            for turn in range(depth):
                picks[turn, RANK], picks[turn, NUMBER] = trial[turn, RANK], trial[turn, NUMBER]
        if best_free == 0 or depth == 0:
            break
        depth -= 1
        rank = trial[depth, RANK]
        wanted = wanted + 1 if trial[depth, _POSITION] == position else 1
        position = trial[depth, _POSITION]
        free += values[rank] - pattern[position, 2]
        trial[depth, NUMBER] -= 1
        if trial[depth, NUMBER] > 0:
            depth += 1
        rank += 1
    return num_picks, best_free


@jit
def _lay_out(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    left: IntArray,
    cursor: IntArray,
    bin_at: PartArray,
    starts: IntArray,
    patterns: IntArray,
    amount: FloatArray,
    capacity: int,
    waste: int,
    num_bins: int,
) -> int:
    """Pack bins by the patterns, half of what the program wants of each; the number of bins then."""
    num_classes = patterns.shape[0]
    picks = np.empty((values.shape[0] + 1, 3), np.int64)
    trial = np.empty((values.shape[0] + 1, 3), np.int64)
    rows = np.empty((num_classes, 3), np.int64)
    done = np.zeros(num_classes, np.int64)
    for turn in range(1, _NUM_TURNS + 1):
        for index in range(num_classes):
            goal = int(amount[index] * turn / (2 * _NUM_TURNS))
            num_rows = 0
            for column in range(num_classes):
                if patterns[index, column] > 0:
                    rows[num_rows, 0], rows[num_rows, 1] = column, patterns[index, column]
                    num_rows += 1
            while done[index] < goal:
                num_picks, free = _pick(values, left, starts, rows[:num_rows], capacity, picks, trial)
                if free > waste:
                    break
                times = repeats(picks, num_picks, left, goal - done[index])
                take(picks, num_picks, times, num_bins, left, cursor, bin_at)
                done[index] += times
                num_bins += times
    return num_bins
