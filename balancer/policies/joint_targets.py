"""Micro-batches of different mixture: how much of the encoder's and of the rest of the time each should hold.

    samples in two classes: above or below the mean in encoder time for the rest of their time
      --classes divisible, descent on the longest path-->  shares [2, M] of the work of each class
      --replica by replica, media-rich and heavy samples first, to the slot where most is short-->  cells [n]

    1F1B, encoder 1 | LLM 1, M = 4, half of the LLM's time without media
    equal micro-batches: 1.25 of the work of a rank, the best sizes: 1.18, the best sizes and mixtures: 1.01

One share a micro-batch (`joint_profile`) makes micro-batches small where a pipeline warms up and drains. Where the
encoder is a stage by itself, mixture does more: a first micro-batch with little to encode starts the LLM early. The
makespan is convex in the shares, so descent works as there; here each step takes one longest path and averages it with
those before, because where several are equally long one alone would push work to and fro.

A spread encoder gains too: whole micro-batches encoded in turn start the LLM earlier than a unit whose items are
exchanged, once they hold the right mixture.

All in integers, on rounded times. Price: about 1 ms for the first step of a kind on 4 x 16, then cached, and 0.2 us per
sample of 16 micro-batches. Coarse samples miss a target by as much as they are coarse: one candidate of several.
"""

from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from balancer.counts import Int64Array
from balancer.policies.base import Int32Array, PlacementProblem
from balancer.policies.joint_grid import work_columns
from balancer.policies.joint_profile import TOTAL
from balancer.policies.joint_targets_core import FULL, best_shares, makespan_of
from packing._jit import jit
from packing.grouping import group_by_bin

_LEVELS = 32  # times are rounded to this many parts of the longest stage
_SIZE_LEVELS = 64  # sizes to this many parts of the capacities
_LEAST_GAIN_PARTS = 256  # a mixture is worth trying from one part in so many of the makespan
_ORDER_SHIFT = 4  # samples of about the same weight go in any order
_SAFE_BITS = 30  # times of a replica, so that no product overflows
_MOST = 64 * TOTAL  # of a sample, for the same reason: 64 replicas' work


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """What slots should hold.

    Attributes:
        slots: encoder time and the rest of either class in each slot, int64 [2, M, 2], media-poor samples first, in
            parts of a replica's total: over classes and slots the sum of a column is about `TOTAL`.
        columns: the same of every sample, int64 [n, 2], scaled to about the same total.
        rich: 1 for samples of the second class, else 0, int64 [n].
    """

    slots: Int64Array
    columns: Int64Array
    rich: Int64Array


def slot_targets(problem: PlacementProblem, shares: Int64Array, *, routed: bool) -> Targets | None:
    """The mixtures of the slots; None where `shares` [M] of all samples alike are as good, or nearly.

    routed: media items may be exchanged inside units, and are where that is faster.
    """
    num_microbatches = len(shares)
    columns = work_columns(problem, "stage")
    if problem.num_pipeline_ranks == 1 or num_microbatches == 1 or columns.shape[1] == 1:
        return None
    rich = (columns[:, 0] > columns[:, 1]).astype(np.int64)
    total = np.stack([problem.forward_ns.sum(axis=0), problem.backward_ns.sum(axis=0)])
    media = np.stack([rich @ problem.forward_ns, rich @ problem.backward_ns])  # of integers: no BLAS
    longest = max(1, int(total.max()))
    work = np.stack([total - media, media])  # [2 classes, 2, S]
    rounded = tuple(((work * _LEVELS + longest // 2) // longest).reshape(-1).tolist())
    schedule, filled = problem.schedule_for(num_microbatches), _filled(problem, rich, num_microbatches)
    ways, alike = (False, True)[: 1 + routed], np.stack([shares, shares])
    best, makespan = min((best_shares(schedule, rounded, filled, way) for way in ways), key=itemgetter(1))
    one_share = min(makespan_of(schedule, rounded, alike, way) for way in ways)
    if one_share - makespan < makespan // _LEAST_GAIN_PARTS:
        return None
    whole, part = columns.sum(axis=0), rich @ columns
    parts = (np.stack([whole - part, part]) << 10) // np.maximum(1, whole)  # [2 classes, 2 columns], of 1,024
    slots = best[:, :, np.newaxis] * parts[:, np.newaxis] >> 10
    return Targets(slots=slots, columns=columns, rich=rich)


def by_targets(problem: PlacementProblem, cell_of: Int32Array, targets: Targets) -> Int32Array | None:
    """The samples of each replica on its slots anew, so that these come close to the targets; None: no room."""
    num_slots = targets.slots.shape[1]
    replica = np.maximum(1, targets.columns.sum(axis=0) // problem.dp_size)
    shift = max(0, int(replica.max()).bit_length() - _SAFE_BITS)
    scaled = ((targets.columns >> shift) * TOTAL) // np.maximum(1, replica >> shift)  # in the unit of the targets
    scaled = np.minimum(scaled, _MOST)
    heaviest = np.minimum(scaled.max(axis=1) >> _ORDER_SHIFT, 2**15 - 1) + (targets.rich << 15)
    order = np.argsort((2**16 - 1 - heaviest).astype(np.uint16), kind="stable")  # a radix sort
    items, offsets, _ = group_by_bin(
        cell_of[order] // np.int32(num_slots), np.empty((len(order), 0), np.int64), problem.dp_size
    )
    capacity = np.array(problem.capacity, dtype=np.int64)
    found, complete = _fill(scaled, problem.sizes, capacity, targets.rich, order[items], offsets, targets.slots)
    return found if complete else None


def _filled(problem: PlacementProblem, rich: Int64Array, num_microbatches: int) -> tuple[int, int]:
    """How much of the tightest capacity of all cells the two classes fill, rounded up."""
    total, part = problem.sizes.sum(axis=0), rich @ problem.sizes
    if not len(total):
        return 0, 0
    limits = np.array(problem.capacity, dtype=np.int64) * (problem.dp_size * num_microbatches)
    filled = -(-np.stack([total - part, part]) * _SIZE_LEVELS // np.maximum(1, limits)) * (FULL // _SIZE_LEVELS)
    tightest = int(filled.sum(axis=0).argmax())
    return int(filled[0, tightest]), int(filled[1, tightest])


@jit
def _fill(  # noqa: PLR0917  kernels take flat arguments
    values: Int64Array,
    sizes: Int64Array,
    capacity: Int64Array,
    rich: Int64Array,
    items: Int64Array,
    offsets: Int64Array,
    targets: Int64Array,
) -> tuple[Int32Array, bool]:
    """(cell of every sample, whether all found room and no slot stayed empty that could hold a sample).

    items: samples of replica r, rich ones first and heaviest first, are items[offsets[r] : offsets[r + 1]]. Each goes
    to the slot where the squared distance of the slots from their targets falls most: the largest product of the
    sample and of what is short. Targets of the poor class count from its first sample on, or rich ones would fill
    their room.
    """
    num_replicas, (_, num_slots, num_columns) = len(offsets) - 1, targets.shape
    cell_of = np.empty(len(values), np.int32)
    for replica in range(num_replicas):
        short, only_rich = targets[1].copy(), True
        room = np.empty((num_slots, len(capacity)), np.int64)
        room[:] = capacity
        count = np.zeros(num_slots, np.int64)
        for place in range(offsets[replica], offsets[replica + 1]):
            item = items[place]
            if only_rich and rich[item] == 0:
                short += targets[0]
                only_rich = False
            best, best_value = -1, np.int64(0)
            for slot in range(num_slots):
                fits = True
                for column in range(len(capacity)):
                    fits = fits and sizes[item, column] <= room[slot, column]
                if not fits:
                    continue
                value = np.int64(0)
                for column in range(num_columns):
                    value += values[item, column] * short[slot, column]
                if best < 0 or value > best_value:
                    best, best_value = slot, value
            if best < 0:
                return cell_of, False
            cell_of[item] = replica * num_slots + best
            count[best] += 1
            for column in range(num_columns):
                short[best, column] -= values[item, column]
            for column in range(len(capacity)):
                room[best, column] -= sizes[item, column]
        if count.min() == 0 and offsets[replica + 1] - offsets[replica] >= num_slots:
            return cell_of, False
    return cell_of, True
