"""`auto`: the cheapest algorithm whose packing is good enough, and the best of all where none is.

    one dimension        best-fit  ->  exact fill  ->  pattern fill  ->  exhaustive search (a few items)
    several dimensions   best-fit

Stops at `problem.enough` bins. Never more bins than any other packer of one dimension as long as
there are at most `_COMPARE_ITEMS` items; beyond, never more than those named above. Price: where the lower bound is
out of reach, the time of all of them (tens of milliseconds in one dimension).
"""

from packing.inputs import PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.packers.exact import MAX_ITEMS, exact
from packing.packers.first_fit import first_fit, first_fit_decreasing
from packing.packers.next_fit import next_fit
from packing.packers.pattern_fill import pattern_fill
from packing.problem import PackProblem

_COMPARE_ITEMS = 2**17  # the simple rules win rarely, and take a multiple of best-fit's time


def pack_auto(problem: PackProblem) -> tuple[PartArray, int]:
    """(bin_of int32 [n], number of bins)."""
    if problem.sizes.shape[1] > 1:
        return best_fit_decreasing(problem)
    # Pattern fill begins with exact fill, and that with best-fit; each stops when it has enough.
    best = pattern_fill(problem)
    others = [first_fit_decreasing, first_fit, next_fit] if problem.num_items <= _COMPARE_ITEMS else []
    if problem.num_items <= MAX_ITEMS:
        others = [exact]
    for packer in others:
        if best[1] <= problem.enough:
            break
        found = packer(problem)
        if found[1] < best[1]:
            best = found
    return best
