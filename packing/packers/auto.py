"""`auto`: the cheapest algorithm whose packing is good enough, and the best of all where none is.

    one dimension        best-fit  ->  exact fill  ->  pattern fill  ->  exhaustive search (a few items)
    several dimensions   packing/packers/vector_portfolio.py            ->  exhaustive search (a few items)

Stops at `problem.enough` bins. Never more bins than any other packer as long as there are few items (`_COMPARE_ITEMS`,
`_COMPARE_VECTORS`); beyond, never more than those named above. Price: where the lower bound is out of reach, the time
of all of them (tens of milliseconds for 100,000 items).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packing.inputs import PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.packers.exact import MAX_ITEMS, exact
from packing.packers.first_fit import first_fit, first_fit_decreasing
from packing.packers.next_fit import next_fit
from packing.packers.pattern_fill import pattern_fill
from packing.packers.vector_portfolio import vector_portfolio
from packing.problem import Packer, PackProblem

# The simple rules win rarely, and take a multiple of best-fit's time.
_COMPARE_ITEMS = 2**17
_COMPARE_VECTORS = 2**15  # with more vectors they are tried on a sample first
_SAMPLE = 2**13


def auto(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins)."""
    several = problem.sizes.shape[1] > 1
    # Pattern fill begins with exact fill, and that with best-fit; each stops when it has enough.
    best = vector_portfolio(problem) if several else pattern_fill(problem)
    for packer in _others(problem) if best[1] > problem.enough else ():
        found = packer(problem)
        if found[1] < best[1]:
            best = found
        if best[1] <= problem.enough:
            break
    return best


def _others(problem: PackProblem) -> Sequence[Packer]:
    """What else may find fewer bins."""
    if problem.num_items <= MAX_ITEMS:
        return [exact]
    simple: Sequence[Packer] = (first_fit_decreasing, first_fit, next_fit)
    if problem.sizes.shape[1] == 1:
        return simple if problem.num_items <= _COMPARE_ITEMS else ()
    if problem.num_items <= _COMPARE_VECTORS:
        return simple
    sample = np.ascontiguousarray(problem.sizes[:: problem.num_items // _SAMPLE])
    part = replace(problem, sizes=sample, lower_bound=0, enough=0)
    to_beat = best_fit_decreasing(part)[1]
    return [packer for packer in simple[:2] if packer(part)[1] < to_beat]
