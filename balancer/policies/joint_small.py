"""Steps of few samples: from every start, each move and each swap is simulated and the best made, until none helps.

    n samples, R * M cells   ->   n (R M - 1) moves and n (n - 1) / 2 swaps, all in one simulation a round

Heuristics are coarse where a sample is a large part of a micro-batch, and there is time to look at everything; the
simple policies are starts too, so none of them is faster. Media
items count as encoded with their micro-batch in here; they are routed afterwards, where that is faster. Price: limited
to `_MOST_VALUES` values a round and `_MOST_ROUNDS` rounds, some milliseconds.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from balancer.errors import PlanError
from balancer.policies import length_grouped, lpt, sequential
from balancer.policies.base import Int32Array, PlacementProblem, total_over_stages
from balancer.policies.joint_exact import legal
from balancer.policies.joint_trial import Trial, Trials

_MOST_VALUES = 2**15
_MOST_ROUNDS = 12


def is_small(problem: PlacementProblem, num_cells: int) -> bool:
    """Whether all moves and swaps can be simulated in no time."""
    count = problem.num_samples
    return (count * (num_cells - 1) + count * (count - 1) // 2) * max(count, num_cells) <= _MOST_VALUES


def simple_starts(problem: PlacementProblem, num_microbatches: int) -> Iterator[Int32Array]:
    """Cells of the simple policies where they find room in M micro-batches, and of few samples one a cell."""
    for policy in (sequential, length_grouped, lpt):
        try:
            placement = policy.place(replace(problem, num_microbatches=num_microbatches))
        except PlanError:
            continue
        yield problem.cells_of(placement).astype(np.int32)
    if problem.num_samples < problem.dp_size * num_microbatches:  # samples of like time at the same time
        work = total_over_stages(problem.forward_ns + problem.backward_ns)
        turn = np.empty(problem.num_samples, dtype=np.int32)
        turn[np.argsort(-work, kind="stable")] = np.arange(problem.num_samples, dtype=np.int32)
        yield turn % np.int32(problem.dp_size) * np.int32(num_microbatches) + turn // np.int32(problem.dp_size)


def descended(problem: PlacementProblem, trials: Trials, start: Trial, num_cells: int) -> Trial:
    """The candidate after the best moves and swaps; never slower than it was."""
    cell_of, makespan = start.cell_of, int(trials.makespans_ns(start.cell_of[np.newaxis])[0])
    for _ in range(_MOST_ROUNDS):
        tried = legal(problem, _neighbours(cell_of, num_cells), num_cells // problem.dp_size)
        if not len(tried):
            break
        makespans = trials.makespans_ns(tried)
        best = int(makespans.argmin())
        if makespans[best] >= makespan:
            break
        cell_of, makespan = tried[best], int(makespans[best])
    found = trials.evaluate(np.ascontiguousarray(cell_of))
    return found if found.makespan_ns < start.makespan_ns else start


def _neighbours(cell_of: Int32Array, num_cells: int) -> Int32Array:
    """All assignments that differ by one move or one swap, int32 [C, n]."""
    count = len(cell_of)
    row = np.repeat(np.arange(count), num_cells)
    moves = np.repeat(cell_of[np.newaxis], len(row), axis=0)
    moves[np.arange(len(row)), row] = np.tile(np.arange(num_cells, dtype=np.int32), count)
    one, other = np.triu_indices(count, 1)
    swaps = np.repeat(cell_of[np.newaxis], len(one), axis=0)
    swap = np.arange(len(one))
    swaps[swap, one], swaps[swap, other] = cell_of[other], cell_of[one]
    every: Int32Array = np.concatenate([moves, swaps])
    changed: Int32Array = every[(every != cell_of).any(axis=1)]
    return changed
