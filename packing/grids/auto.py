"""Auto: the placer made for the objective, then the other one where that may still help; the better of the two.

    per_rank -> ranks_first, then level_fill        per_slot -> level_fill, then ranks_first

The second one runs where items are few (heuristics are coarse there, and time is short anyway) and the objective is
above `enough`. Price: with more than `_FEW_ITEMS` items only the first one runs; the other was never better by 0.1 % in
our measurements.
"""

from packing.grids.cells import value_of
from packing.grids.level_fill import level_fill
from packing.grids.ranks_first import ranks_first
from packing.inputs import PartArray
from packing.problem import GridProblem

_FEW_ITEMS = 2048


def auto(problem: GridProblem) -> PartArray | None:
    """cell_of int32 [n] = rank * num_slots + slot, or None when no assignment within the capacities was found."""
    per_rank = problem.objective == "per_rank"
    first, second = (ranks_first, level_fill) if per_rank else (level_fill, ranks_first)
    found = first(problem)
    if found is None:
        return None  # both fall back on the same packing
    value = value_of(problem, found)
    if value <= problem.enough or problem.num_items > _FEW_ITEMS:
        return found
    other = second(problem)
    if other is None or value_of(problem, other) >= value:
        return found
    return other
