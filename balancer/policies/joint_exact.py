"""Every placement of a handful of samples, all simulated: the exact best.

    n samples, R * M cells, the first sample on replica 0 (replicas are alike)   ->   M (R M)^(n - 1) placements

Six samples on 2 x 2: 2,048; seven: 8,192. Where samples are that few no proxy is any good and looking at everything
takes some milliseconds. Media items count as encoded with their micro-batch in here; they are routed afterwards. Price:
limited to `_MOST_PLACEMENTS`; larger steps are searched (`joint_small`).
"""

import numpy as np

from balancer.counts import Int64Array
from balancer.policies.base import Int32Array, PlacementProblem
from balancer.policies.joint_trial import Trials

_MOST_PLACEMENTS = 2**14
_AT_ONCE = 2**12


def is_tiny(problem: PlacementProblem, num_microbatches: int) -> bool:
    """Whether every placement can be simulated."""
    num_cells = problem.dp_size * num_microbatches
    count = problem.num_samples - 1
    if num_cells > 1 and count > _MOST_PLACEMENTS.bit_length():
        return False
    return bool(num_microbatches * num_cells**count <= _MOST_PLACEMENTS)


def best_of_all(problem: PlacementProblem, trials: Trials, num_microbatches: int) -> Int32Array | None:
    """Cells int32 [n] of the fastest placement within the limits, the first of equals; None where there is none."""
    num_cells, count = problem.dp_size * num_microbatches, problem.num_samples
    best, best_makespan = None, 0
    total = num_microbatches * num_cells ** (count - 1)
    for start in range(0, total, _AT_ONCE):
        number = np.arange(start, min(start + _AT_ONCE, total), dtype=np.int64)
        cells = np.empty((len(number), count), dtype=np.int32)
        for sample in range(count - 1, -1, -1):  # digits of the number, the last sample's first
            cells[:, sample] = number % num_cells
            number //= num_cells
        tried = legal(problem, cells, num_microbatches)
        if not len(tried):
            continue
        makespans = trials.makespans_ns(tried)
        fastest = int(makespans.argmin())
        if best is None or makespans[fastest] < best_makespan:
            best, best_makespan = np.ascontiguousarray(tried[fastest]), int(makespans[fastest])
    return best


def legal(problem: PlacementProblem, cells: Int32Array, num_microbatches: int) -> Int32Array:
    """Those of C candidates [C, n] that keep the capacities and leave no cell empty that could be filled.

    A replica with fewer samples than micro-batches has empty ones. Where replicas meet inside the step, none may have
    two in a cell while another has a cell without any (`empty_cells`).
    """
    num_candidates, num_samples = cells.shape
    shape = (num_candidates, problem.dp_size, num_microbatches)
    first = np.arange(num_candidates, dtype=np.int64)[:, np.newaxis] * (shape[1] * shape[2])
    flat: Int64Array = (cells + first).reshape(-1)
    num_cells = shape[0] * shape[1] * shape[2]
    held = np.bincount(flat, minlength=num_cells).reshape(shape)
    filled, most = (held > 0).sum(axis=2), num_microbatches
    if problem.parallel.meet == "step":
        of_replica = held.sum(axis=2)
        kept = (filled >= np.minimum(most, of_replica)).all(axis=1)
        if num_samples >= problem.dp_size:
            kept &= (of_replica > 0).all(axis=1)
    elif num_samples >= problem.dp_size * num_microbatches:
        kept = (filled == most).all(axis=1)
    else:
        kept = (held <= 1).all(axis=(1, 2))
    for column, limit in enumerate(problem.capacity):
        used = np.zeros(num_cells, dtype=np.int64)
        np.add.at(used, flat, np.tile(problem.sizes[:, column], num_candidates))
        kept &= (used.reshape(num_candidates, -1) <= limit).all(axis=1)
    allowed: Int32Array = cells[kept]
    return allowed
