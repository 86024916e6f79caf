"""transformers `train_sampling_strategy="batch_rebalance"` (`BatchRebalanceSampler`): groups of like lengths.

    lengths 9 8 3 3 2 2 1 1, 2 ranks x 2 slots   ->   [9] [8] [3 3] [2 2 1 1]   ->   slot 0: [9] [8], slot 1: the rest

Samples sorted by length are cut into ranks x slots contiguous groups. A cut moves by one sample at a time, from the
dearest group to the cheapest, until no state is new; a group of one sample cannot give, so its slot is frozen after
the other groups of the slot were filled up to its cost. Groups are dealt to slots by descending cost. A group costs
count * longest * (1 + longest / 1000): padding and attention, as the sampler assumes.

It knows sequence lengths only. Images and encoders it does not see, nor a token capacity: a cell may exceed it.

Price: here compiled, with the same moves; every move costs ranks * slots steps and there may be 30 * ranks * slots of
them, so thousands of cells take seconds (in the original, hours).
"""

import numpy as np
import numpy.typing as npt

from packing._jit import jit, jit_inner
from tools.benchmarks.baseline_step import StepGrid
from tools.benchmarks.baseline_types import IntArray

FloatArray = npt.NDArray[np.float64]

QUADRATIC = 0.001
MOVES_PER_GROUP = 30
HASH_SEED = 0


def batch_rebalance(grid: StepGrid) -> IntArray:
    """Cells of every sample, int64 [n, 2].

    Raises:
        ValueError: fewer samples than cells, as in the original.
    """
    num_samples, num_groups = len(grid), grid.num_cells
    if num_samples < num_groups:
        raise ValueError(f"{num_samples} samples do not fill {num_groups} groups with at least one each")
    order = np.argsort(-grid.sizes, kind="stable")
    lengths = grid.sizes[order].astype(np.float64)
    counts = _Search(lengths, num_groups, grid.num_ranks).counts()
    longest = lengths[np.cumsum(counts) - counts]  # every group has a sample
    costs = counts * longest + QUADRATIC * counts * longest * longest
    place_of_group = np.empty(num_groups, np.int64)
    place_of_group[np.argsort(-costs, kind="stable")] = np.arange(num_groups)
    cells = np.empty((num_samples, 2), np.int64)
    place = place_of_group[np.repeat(np.arange(num_groups), counts)]
    cells[order, 0], cells[order, 1] = place % grid.num_ranks, place // grid.num_ranks
    return cells


class _Search:
    """The state of the search: samples in each group, what groups cost, which are frozen, states seen before."""

    def __init__(self, lengths: FloatArray, num_groups: int, num_ranks: int) -> None:
        self._lengths, self._num_ranks = lengths, num_ranks
        num_samples = len(lengths)
        self._counts = num_samples // num_groups + (np.arange(num_groups) < num_samples % num_groups).astype(np.int64)
        self._best = self._counts.copy()
        self._costs = np.zeros(num_groups, np.float64)
        self._frozen = np.zeros(num_groups, np.bool_)
        most = max(num_groups * MOVES_PER_GROUP, num_samples)
        self._spread = np.full(1, np.inf)
        self._moves_left = np.full(1, most, np.int64)
        # States by a hash of the counts, open addressing; 0 marks a free place.
        self._seen = np.zeros(2 ** (2 * most).bit_length(), np.int64)
        # Counts add up to the samples, so sums of counts times keys stay below 2**62.
        generator = np.random.Generator(np.random.Philox(HASH_SEED))
        self._keys = generator.integers(1, 2**62 // num_samples, num_groups, dtype=np.int64)

    def counts(self) -> IntArray:
        """Samples in each group: the state of least spread that the search has seen."""
        while True:
            counts, costs, frozen = self._counts, self._costs, self._frozen
            progress = (self._spread, self._moves_left)
            pivot = _move(self._lengths, (counts, costs, frozen), (self._best, progress), (self._seen, self._keys))
            if pivot < 0:
                return self._best
            # Its slot: the groups that rank beside it by cost, as many as ranks.
            ranking = np.argsort(-costs, kind="stable")
            first = int(np.flatnonzero(ranking == pivot)[0]) // self._num_ranks * self._num_ranks
            member = np.zeros(len(counts), np.bool_)
            member[ranking[first : first + self._num_ranks]] = True
            _fill_slot(self._lengths, (counts, costs, frozen), member, pivot)
            frozen |= member


@jit_inner
def _update_costs(lengths: FloatArray, counts: IntArray, costs: FloatArray) -> None:
    start = 0
    for group in range(counts.shape[0]):
        longest = lengths[start] if counts[group] > 0 else 0.0
        costs[group] = _cost(counts[group], longest)
        start += counts[group]


@jit_inner
def _cost(count: int, longest: float) -> float:
    return count * longest + QUADRATIC * count * longest * longest


_State = tuple[IntArray, FloatArray, npt.NDArray[np.bool_]]


@jit
def _move(
    lengths: FloatArray,
    state: _State,
    found: tuple[IntArray, tuple[FloatArray, IntArray]],
    table: tuple[IntArray, IntArray],
) -> int:
    """Move samples from the dearest to the cheapest group; the dearest when it has one sample only, -1 at the end."""
    counts, costs, frozen = state
    best, (spread, moves_left) = found
    seen, keys = table
    while moves_left[0] > 0:
        moves_left[0] -= 1
        if _seen_before(counts, keys, seen):
            return -1
        _update_costs(lengths, counts, costs)
        high, low, num_active = -1, -1, 0
        for group in range(counts.shape[0]):
            if not frozen[group]:
                num_active += 1
                high = group if high < 0 or costs[group] > costs[high] else high
                low = group if low < 0 or costs[group] < costs[low] else low
        if num_active <= 1:
            return -1
        if costs[high] - costs[low] < spread[0]:
            spread[0] = costs[high] - costs[low]
            best[:] = counts
        if costs[high] == costs[low]:
            return -1
        if counts[high] <= 1:
            return high
        counts[high] -= 1
        counts[low] += 1
    return -1


@jit_inner
def _seen_before(counts: IntArray, keys: IntArray, seen: IntArray) -> bool:
    state = 0
    for group in range(counts.shape[0]):
        state += counts[group] * keys[group]
    place = state & (seen.shape[0] - 1)
    while seen[place] != 0:
        if seen[place] == state:
            return True
        place = (place + 1) & (seen.shape[0] - 1)
    seen[place] = state
    return False


@jit
def _fill_slot(lengths: FloatArray, state: _State, member: npt.NDArray[np.bool_], pivot: int) -> None:
    """The other groups of the slot of `pivot` take samples of cheaper groups, up to the cost of `pivot`."""
    counts, costs, frozen = state
    cap = costs[pivot]
    start = 0
    for group in range(counts.shape[0]):
        while member[group] and not frozen[group] and group != pivot:
            longest = lengths[start] if counts[group] > 0 else 0.0
            if _cost(counts[group] + 1, longest) > cap:
                break
            _update_costs(lengths, counts, costs)
            donor = -1
            for other in range(counts.shape[0]):
                if not frozen[other] and not member[other] and counts[other] > 1:
                    donor = other if donor < 0 or costs[other] < costs[donor] else donor
            if donor < 0:
                break
            counts[group] += 1
            counts[donor] -= 1
            if donor < group:
                start -= 1
        start += counts[group]
