"""Systems that balance encoder and LLM separately and exchange encoder inputs and outputs between ranks.

    micro-batch m of all ranks, as a sampler cut it
        samples  --by LLM cost-->      LLM rank                    cells
        media    --by encoder cost-->  encoder rank of the same m  encoder_cells

Each micro-batch is balanced by itself, because it is all such a system has decoded. Property: each stage alone is
close to even. Price: decoded pixels and embeddings cross ranks in every micro-batch, forward and backward, and all
ranks meet at every exchange, also where the layout lets them meet once a step; no capacity is kept. The exchange
itself counts as free here. What is moved is a sample's media as a whole.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from tools.benchmarks.baseline_step import Placed, StepGrid, in_order
from tools.benchmarks.baseline_types import IntArray

LOONGFORGE_TRIGGER = 0.2
LOONGFORGE_REFINEMENTS = 20
LOONGFORGE_TOLERANCE = 0.05
LOONGFORGE_LENGTH_RATIO = 1.5


def lpt_per_stage(grid: StepGrid) -> Placed:
    """OrchMLLM, VeOmni: in every micro-batch, samples by LLM time and media by encoder time, longest first.

    It ignores what one of the two assignments does to the other stage, micro-batches other than the current one, and
    the token capacity."""
    cells = in_order(grid)
    encoder_cells = cells.copy()
    encoder, llm = grid.costs[:, 0], grid.costs[:, -1]
    for slot in range(grid.num_slots):
        items = np.flatnonzero(cells[:, 1] == slot)
        nothing = [0] * grid.num_ranks
        cells[items, 0] = _longest_first(llm[items].tolist(), nothing)
        encoder_cells[items, 0] = _longest_first(encoder[items].tolist(), nothing)
    return Placed(cells=cells, encoder_cells=encoder_cells)


def _longest_first(costs: Sequence[int], loads: Sequence[int]) -> IntArray:
    """Longest first to the lightest rank; ranks start with `loads`. int64 [k]."""
    rank_of = np.empty(len(costs), np.int64)
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for item in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, rank = heap[0]
        rank_of[item] = rank
        heapq.heapreplace(heap, (load + costs[item], rank))
    return rank_of


def loongforge(grid: StepGrid) -> Placed:
    """LoongForge: in every micro-batch, samples longest first under a pack length, with what ranks did before in view.

    It leaves a micro-batch alone whose imbalance is below 20 %, or in which one sample is more than a mean load, then
    swaps the dearest of the fullest with the cheapest of the emptiest rank up to 20 times. Media go by the square of
    their patches (a video counts as one image of all its frames). LLM cost is a fit of its own there, ours here; packs
    are at most 1.5 mean loads long; the original raises when no rank has an image."""
    cells = in_order(grid)
    encoder_cells = cells.copy()
    history = [0] * grid.num_ranks
    squares = grid.patches * grid.patches
    llm = grid.costs[:, -1]
    for slot in range(grid.num_slots):
        items = np.flatnonzero(cells[:, 1] == slot)
        before = cells[items, 0]
        solver = _Rebalance(llm[items].tolist(), grid.sizes[items].tolist(), history)
        cells[items, 0] = solver.solved(before, LOONGFORGE_LENGTH_RATIO)
        loads = np.array(history, np.int64)
        np.add.at(loads, cells[items, 0], llm[items])
        history = loads.tolist()
        media = items[grid.patches[items] > 0]
        solver = _Rebalance(squares[media].tolist(), grid.patches[media].tolist(), [0] * grid.num_ranks)
        encoder_cells[items, 0] = cells[items, 0]
        encoder_cells[media, 0] = solver.solved(cells[media, 0], None)
    return Placed(cells=cells, encoder_cells=encoder_cells)


class _Rebalance:
    """One micro-batch of LoongForge: costs and lengths of its items, and loads of the ranks from before."""

    def __init__(self, costs: Sequence[int], lengths: Sequence[int], history: Sequence[int]) -> None:
        self._costs, self._lengths = costs, lengths
        self._loads = list(history)
        self._infinite = sum(costs) + max(history) + 1  # wider than any spread

    def solved(self, rank_of: IntArray, length_ratio: float | None) -> IntArray:
        """New rank of every item; `rank_of` where it is left alone."""
        now = np.array(self._loads, np.int64)
        np.add.at(now, rank_of, np.array(self._costs, np.int64))
        mean = float(now.sum()) / len(now)
        if not self._costs or mean <= 0 or max(self._costs) > mean or float(now.max()) / mean - 1 < LOONGFORGE_TRIGGER:
            return rank_of
        cap = sum(self._lengths) / len(now) * length_ratio if length_ratio else float("inf")
        buckets, held = self._greedy(cap)
        self._refine(buckets, held, cap)
        placed = np.empty(len(self._costs), np.int64)
        for rank, items in enumerate(buckets):
            placed[items] = rank
        return placed

    def _greedy(self, cap: float) -> tuple[list[list[int]], list[int]]:
        """Longest first to the lightest rank that has room in tokens, or to the lightest where none has."""
        buckets: list[list[int]] = [[] for _ in self._loads]
        held = [0] * len(self._loads)
        heap = [(load, rank) for rank, load in enumerate(self._loads)]
        heapq.heapify(heap)
        for item in sorted(range(len(self._costs)), key=self._costs.__getitem__, reverse=True):
            full = []
            while heap and held[heap[0][1]] + self._lengths[item] > cap:
                full.append(heapq.heappop(heap))
            _, rank = heapq.heappop(heap) if heap else full.pop(0)
            buckets[rank].append(item)
            held[rank] += self._lengths[item]
            self._loads[rank] += self._costs[item]
            for entry in [*full, (self._loads[rank], rank)]:
                heapq.heappush(heap, entry)
        return buckets, held

    def _refine(self, buckets: list[list[int]], held: list[int], cap: float) -> None:
        """Move the dearest item of the fullest rank to the emptiest, or swap it with the cheapest there."""
        loads, costs, lengths = self._loads, self._costs, self._lengths
        for _ in range(LOONGFORGE_REFINEMENTS):
            high = max(range(len(loads)), key=loads.__getitem__)
            low = min(range(len(loads)), key=loads.__getitem__)
            spread = loads[high] - loads[low]
            if spread < LOONGFORGE_TOLERANCE * max(loads[low], 1) or not buckets[high] or not buckets[low]:
                return
            given = max(buckets[high], key=costs.__getitem__)
            taken = min(buckets[low], key=costs.__getitem__)
            by_moving = by_swapping = self._infinite
            if held[low] + lengths[given] <= cap:
                by_moving = self._spread_after(high, low, costs[given])
            if max(held[high] - lengths[given] + lengths[taken], held[low] - lengths[taken] + lengths[given]) <= cap:
                by_swapping = self._spread_after(high, low, costs[given] - costs[taken])
            if min(by_moving, by_swapping) >= spread:
                return
            self._move(buckets, held, given, (high, low))
            if by_swapping < by_moving:
                self._move(buckets, held, taken, (low, high))

    def _spread_after(self, high: int, low: int, moved: int) -> int:
        loads = self._loads
        others = [load for rank, load in enumerate(loads) if rank not in (high, low)]
        both = [loads[high] - moved, loads[low] + moved]
        return max(*both, *others) - min(*both, *others)

    def _move(self, buckets: list[list[int]], held: list[int], item: int, ranks: tuple[int, int]) -> None:
        source, target = ranks
        buckets[source].remove(item)
        buckets[target].append(item)
        for sums, value in ((self._loads, self._costs[item]), (held, self._lengths[item])):
            sums[source] -= value
            sums[target] += value
