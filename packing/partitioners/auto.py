"""The default: LPT and refinement, and more only while the bound says that more can be gained.

    lpt, refined  --above enough-->  up to 16 items: branch and bound, a fixed number of steps
                                     one stage, 0.1 % above, up to 4,096 items: Karmarkar-Karp, refined
                                     several stages or equal counts, 16 items a part, or 0.1 % above and up to
                                     4,096 items or one stage: even mix, refined

Refined LPT meets the bound (or its largest item) on nearly every large input, so the others are compiled and run only
where they pay. Never worse than `lpt_refined`.
"""

from packing.inputs import PartArray
from packing.partitioners.even_mix import even_mix
from packing.partitioners.exact import improve
from packing.partitioners.karmarkar_karp import karmarkar_karp
from packing.partitioners.lpt_refined import lpt_refined
from packing.partitioners.refine import refine
from packing.problem import Partitioner, PartitionProblem

_FEW_ITEMS = 16
_EXACT_STEPS = 20_000  # at most about a millisecond
_MANY_ITEMS = 4096
_MANY_PER_PART = 16  # then even the last bit of unevenness goes
_SMALL_GAIN = 1000  # one part in that many is not worth a second start


def auto(problem: PartitionProblem) -> PartArray | None:
    """part_of int32 [n], or None when no assignment within capacities and counts was found."""
    best = lpt_refined(problem)
    if best is None or problem.num_parts == 1:
        return best
    makespan = problem.makespan(best)
    if makespan <= problem.enough:
        return best
    if problem.num_items <= _FEW_ITEMS:
        return improve(problem, best, _EXACT_STEPS)
    for other in _others(problem, makespan):
        found = other(problem)
        if found is not None and problem.makespan(found) < makespan:
            best, makespan = found, problem.makespan(found)
        if makespan <= problem.enough:
            break
    return best


def _others(problem: PartitionProblem, makespan: int) -> list[Partitioner]:
    """What may find a lower makespan than refined LPT did, where it is worth its time."""
    one_stage = problem.weights.shape[1] == 1
    worth = makespan - problem.enough > problem.enough // _SMALL_GAIN
    few = problem.num_items <= _MANY_ITEMS
    others: list[Partitioner] = []
    if one_stage and worth and few:
        others.append(_refined_karmarkar_karp)
    many_per_part = problem.num_items >= _MANY_PER_PART * problem.num_parts
    if (not one_stage or problem.equal_count) and (many_per_part or (worth and (few or one_stage))):
        others.append(even_mix)
    return others


def _refined_karmarkar_karp(problem: PartitionProblem) -> PartArray | None:
    found = karmarkar_karp(problem)
    return None if found is None else refine(problem, found)
