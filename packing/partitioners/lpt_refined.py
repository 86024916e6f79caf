"""LPT, then moves and swaps that lower the highest part: what `auto` begins with.

    weights 7 6 5 4 3, 2 parts   ->   {7 4 3} {6 5} by LPT   ->   {6 4 3} {7 5} by a swap

Never worse than LPT. Price: that of its two halves (packing/partitioners/lpt.py, refine.py).
"""

from packing.inputs import PartArray
from packing.partitioners.lpt import lpt
from packing.partitioners.refine import refine
from packing.partitioners.within_capacity import within_capacity
from packing.problem import PartitionProblem


def lpt_refined(problem: PartitionProblem) -> PartArray | None:
    """LPT, then refinement; where LPT runs into a capacity, refinement of `within_capacity`. None: nothing found."""
    start = lpt(problem)
    if start is None:
        start = within_capacity(problem)
    return None if start is None else refine(problem, start)
