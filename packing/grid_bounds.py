"""Lower bounds on the objectives of a grid of R ranks x M slots; never above the optimum.

per_rank: a makespan bound for R parts, since the slots of a rank only add up.

per_slot: T[j] is the largest cell of the slot in place j, slots in descending order; T[0] + ... + T[M - 1] is sought.
    - Every rank's total is at most the sum of all T, so the makespan bound for R parts holds here too.
    - Items above half a capacity need a cell each. With b their weights in descending order, the cell in place k of
      all cells in descending order weighs at least b[k], so T[j] >= b[j * R].
    - The first j slots are j * R cells. They hold at most the weight K(j) that fits into j * R capacities with items
      divisible, so the others hold W - K(j) or more: T[j] + ... + T[M - 1] >= (W - K(j)) / R.
    - T descends, so T[j] is at least the average of T[j + 1], ..., T[M - 1].
    Together these bound D[j] = T[j] + ... + T[M - 1] from D[j + 1]; D[0] is the answer. The average of all stages
    counts as one more stage, since the largest stage of a cell is at least that.

    weights 100 and six of 30, sizes 4 and 2, capacity 4, 2 ranks x 2 slots: the average alone says 280 / 2 = 140.
    One slot holds at most K(1) = 100 + 2 * 30 = 160, so 120 are left: T[1] >= 60, T[0] >= 100, the bound is 160.

Price: stages are bounded one by one, so where they compete inside a cell the bound is loose. O(n log n).
"""

import numpy as np
import numpy.typing as npt

from packing.inputs import IntArray
from packing.makespan_bounds import partition_bound
from packing.partitioners.order import ascending, peaks

_DROPPED_BITS = 20
"""Of the 52 bits of a density's fraction, so that densities sort fast; the margin of `_outside` covers it."""


def grid_bound(
    weights: IntArray, num_ranks: int, num_slots: int, sizes: IntArray, capacity: IntArray, *, per_slot: bool
) -> int:
    """No assignment within the capacities has a smaller objective; checked input as in `GridProblem`."""
    bound = partition_bound(weights, num_ranks)
    if not per_slot or weights.shape[0] == 0:
        return bound
    left = weight_left(weights, sizes, capacity, num_ranks, num_slots)
    peak = peaks(weights)
    for column in range(capacity.shape[0]):
        alone = np.sort(peak[sizes[:, column] > capacity[column] // 2])[::-1][::num_ranks]
        after = 0  # D[slot + 1]
        for slot in range(num_slots - 1, -1, -1):
            top = int(alone[slot]) if slot < alone.shape[0] else 0
            num_after = num_slots - 1 - slot
            if num_after:
                top = max(top, -(-after // num_after))
            after = max(top + after, -(-left[slot] // num_ranks))
        bound = max(bound, after)
    return bound


def weight_left(weights: IntArray, sizes: IntArray, capacity: IntArray, num_ranks: int, num_slots: int) -> list[int]:
    """[M]: this much weight at least, in some stage, is outside any j slots, however full; entry 0 is the total.

    The largest over stages (and their average), and over the columns of the sizes.
    """
    stages = [(np.ascontiguousarray(weights[:, stage]), 1) for stage in range(weights.shape[1])]
    if len(stages) > 1:
        stages.append((np.add.reduce([weight for weight, _ in stages]), len(stages)))
    left = [max(-(-int(weight.sum()) // share) for weight, share in stages)] + [0] * (num_slots - 1)
    for column in range(capacity.shape[0] if num_slots > 1 else 0):
        size = np.ascontiguousarray(sizes[:, column])
        rooms = [slot * num_ranks * int(capacity[column]) for slot in range(1, num_slots)]
        for weight, share in stages:
            outside = _outside(weight, size, rooms)
            left[1:] = [max(known, -(-value // share)) for known, value in zip(left[1:], outside, strict=True)]
    return left


def _outside(weight: IntArray, size: IntArray, rooms: list[int]) -> list[int]:
    """At most the weight that stays outside each room when the densest items go in first, the last one in part."""
    order = ascending(_sparsity(weight, size))
    weight_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(weight[order])])
    size_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(size[order])])
    total, last = int(weight_before[-1]), int(size_before[-1])
    # Items in the wrong order have densities that agree to 2**-31, so that much weight more may fit.
    margin = (total >> 30) + 1
    outside = []
    for room in rooms:
        whole = int(np.searchsorted(size_before, min(room, last), side="right")) - 1
        inside = int(weight_before[whole])
        if whole < weight.shape[0]:
            item = order[whole]
            inside += -(-int(weight[item]) * (room - int(size_before[whole])) // int(size[item]))
        outside.append(max(0, total - inside - margin))
    return outside


def _sparsity(weight: IntArray, size: IntArray) -> IntArray:
    """Integers from 0 on that descend as weight / size ascends; items without a size count as the densest."""
    density: npt.NDArray[np.float64] = np.full(weight.shape[0], np.inf)
    np.divide(weight, size, out=density, where=size > 0)
    # The bits of a non-negative IEEE number, read as an integer, ascend with it.
    rank: IntArray = density.view(np.int64) >> _DROPPED_BITS
    sparsity: IntArray = rank.max(initial=0) - rank
    return sparsity
