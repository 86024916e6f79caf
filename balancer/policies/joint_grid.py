"""Cells for all samples at once: the starting points of the `joint` policy.

    work columns [n, C], shares of the slots [M]
      by_rank   replicas even in total, each with its own small and large micro-batches   (they meet once a step)
      by_rank_exactly   the same, closer to even, for few samples
      by_slot   micro-batch by micro-batch, like with like over replicas                  (they meet in each)

Columns are what is kept even: `rank` the time on the first, the middle and the last pipeline rank; `stage` the encoder
and the rest, scaled to the same total, so that both are even however little one costs; `sum` all together. A column is
a proxy; which one is right depends on the data and the schedule, so the policy simulates.
"""

from typing import Literal

import numpy as np

from balancer.counts import Int64Array
from balancer.policies.base import Int32Array, PlacementProblem
from balancer.policies.joint_profile import levels
from packing import InfeasiblePartitionError, partition
from packing.grids.cells import whole_bins
from packing.grids.exchange import exchange
from packing.grids.level_fill import fill
from packing.grids.ranks_first import deal
from packing.partitioners.order import descending, peaks
from packing.problem import GridProblem, Objective

Columns = Literal["rank", "stage", "sum"]

_DIFFERENCE_PARTS = 10
_WORK_DIVISOR = 4  # of the exchanges: the local searches that follow know the schedule
_SCALE_BITS = 12


def work_columns(problem: PlacementProblem, kind: Columns) -> Int64Array:
    """What is to be kept even, int64 [n, C], C from 1 to 3."""
    total = problem.forward_ns + problem.backward_ns
    first = total[:, 0]
    rest = total[:, 1].copy() if problem.num_stages > 1 else np.zeros_like(first)
    for stage in range(2, problem.num_stages):
        rest += total[:, stage]
    if kind == "sum" or not first.any() or not rest.any():
        return (first + rest)[:, np.newaxis]
    if kind == "stage":
        return _scaled([first, rest]) if problem.parallel.has_encoder else (first + rest)[:, np.newaxis]
    if problem.num_pipeline_ranks == 1 or problem.parallel.encoder_is_spread:
        return np.stack([first, rest], axis=1)
    work = problem.rank_work_ns()
    ranks = sorted({0, problem.num_pipeline_ranks // 2, problem.num_pipeline_ranks - 1})
    distinct = [ranks[0]]
    for rank in ranks[1:]:
        if not any(np.array_equal(work[:, rank], work[:, other]) for other in distinct):
            distinct.append(rank)
    return np.ascontiguousarray(work[:, distinct])


def _scaled(columns: list[Int64Array]) -> Int64Array:
    """Columns with about the same total, in integers: a column is multiplied by a ratio of whole numbers."""
    totals = [int(column.sum()) for column in columns]
    largest = max(totals)
    scaled = []
    for column, total in zip(columns, totals, strict=True):
        ratio = (largest << _SCALE_BITS) // total
        scaled.append(column if ratio >> _SCALE_BITS == 1 and total == largest else column * ratio >> _SCALE_BITS)
    return np.stack(scaled, axis=1)


def stages_differ(problem: PlacementProblem) -> bool:
    """Whether samples share the encoder's time out otherwise than the rest of the time: a tenth of it or more."""
    columns = work_columns(problem, "stage")
    if columns.shape[1] == 1:
        return False
    return _DIFFERENCE_PARTS * int(np.abs(columns[:, 0] - columns[:, 1]).sum()) >= int(columns.sum())


def by_rank(problem: PlacementProblem, columns: Int64Array, shares: Int64Array) -> Int32Array | None:
    """Cell of every sample, replicas even in total; None where no room was found."""
    num_replicas, num_slots = problem.dp_size, len(shares)
    capacity, values = _capacity(problem), _values(problem, columns)
    total = -(-int(columns.sum(axis=0).max()) // num_replicas)
    level = levels(shares, total, np.zeros(num_slots, dtype=np.int64))
    cell_of, complete = deal(values, capacity, descending(columns), level, num_replicas)
    found = cell_of if complete else _packed(problem, columns, num_slots, "per_rank")
    if found is None:
        return None
    even = np.full(num_replicas, total, dtype=np.int64)
    return exchange(values, capacity, found, even, cells_per_unit=num_slots, slack=0, work_divisor=_WORK_DIVISOR)


def by_rank_exactly(problem: PlacementProblem, columns: Int64Array, num_slots: int) -> Int32Array | None:
    """The same by `packing.partition` over replicas, then the samples of each over its micro-batches; None: no room.

    Closer to even, and slower: one call for every replica.
    """
    capacity, level = _capacity(problem), np.zeros(num_slots, dtype=np.int64)
    values = _values(problem, columns)
    even = np.full(problem.dp_size, -(-int(columns.sum(axis=0).max()) // problem.dp_size), dtype=np.int64)
    try:
        rank_of = partition(
            columns,
            problem.dp_size,
            capacity=problem.replica_capacity(num_slots),
            sizes=problem.sizes,
            target_gap=0.0,
        ).part_of
    except InfeasiblePartitionError:
        return None
    if num_slots == 1:
        return exchange(values, capacity, rank_of, even, cells_per_unit=1, slack=0)
    order = descending(columns)
    cell_of = np.empty(problem.num_samples, dtype=np.int32)
    ranks_in_order = rank_of[order]
    for rank in range(problem.dp_size):
        mine = order[ranks_in_order == rank]
        slot_of, complete = deal(values[mine], capacity, np.arange(len(mine)), level, 1)
        if not complete:
            return None
        cell_of[mine] = rank * num_slots + slot_of
    return exchange(values, capacity, cell_of, even, cells_per_unit=num_slots, slack=0, work_divisor=_WORK_DIVISOR)


def by_slot(problem: PlacementProblem, columns: Int64Array, shares: Int64Array, *, refined: bool) -> Int32Array | None:
    """Cell of every sample, the cells of a slot even; None where no room was found.

    `refined`: also by exchanges between cells, as is always done with one column; where stages compete, lowering the
    tops does more as a rule.
    """
    num_replicas, num_slots = problem.dp_size, len(shares)
    capacity, values = _capacity(problem), _values(problem, columns)
    total = -(-int(columns.sum(axis=0).max()) // num_replicas)
    giants = np.zeros(num_slots, dtype=np.int64)
    heaviest = np.sort(peaks(columns))[::-1][::num_replicas][:num_slots]
    giants[: len(heaviest)] = heaviest
    level = levels(shares, total, giants)
    cell_of, complete = fill(values, capacity, descending(columns), level, num_replicas)
    found = cell_of if complete else _packed(problem, columns, num_slots, "per_slot")
    if found is None or (columns.shape[1] > 1 and not refined):
        return found
    each = np.tile(level, num_replicas)
    return exchange(values, capacity, found, each, cells_per_unit=1, slack=0, work_divisor=_WORK_DIVISOR)


def _values(problem: PlacementProblem, columns: Int64Array) -> Int64Array:
    return np.concatenate([columns, problem.sizes], axis=1)


def _capacity(problem: PlacementProblem) -> Int64Array:
    return np.array(problem.capacity, dtype=np.int64)


def _packed(problem: PlacementProblem, columns: Int64Array, num_slots: int, objective: Objective) -> Int32Array | None:
    """Whole packed bins as cells: found whenever best-fit-decreasing needs at most R * M bins."""
    return whole_bins(
        GridProblem(
            weights=columns,
            num_ranks=problem.dp_size,
            num_slots=num_slots,
            sizes=problem.sizes,
            capacity=_capacity(problem),
            objective=objective,
            lower_bound=0,
            enough=0,
        )
    )
