"""Lower bounds on the makespan: how even any partition can be.

    weights 5 5 5, 2 parts   ->   average 7.5, loads are multiples of 5: 10

Never above the optimum; it is what lets a partition say how good it is. Monotone in the number of parts; another item
may lower it, by less than a unit, because it may break the common unit of the others. Each stage is bounded alone, so
with several stages that compete the bound can be loose. Plain numpy on sorted values, O(n log n) per stage.
"""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from packing.errors import PackingError
from packing.inputs import IntArray, as_flag, as_weights, at_least_one

StageNorm = Literal["max", "sum"]


def makespan_lower_bound(
    weights: npt.ArrayLike, num_parts: int, *, equal_count: bool = False, stage_norm: StageNorm = "max"
) -> int:
    """No partition of `weights` [n] or [n, S] into `num_parts` has a smaller largest load than this.

    The largest over stages (over their sum with `stage_norm="sum"`) of: the longest item; the average, rounded up to
    a multiple of the greatest common divisor of the weights, or to whole units of which they nearly are multiples (some
    part holds the average number of whole units, rounded up); the generalised pigeonhole (of the j*k + 1 largest items
    some part holds j + 1, so at least the j + 1 smallest of them); with `equal_count` the m longest items, of which
    two share a part, or each is beside the lightest ones that must fill its part.

    Raises:
        PackingError and its kinds: as `partition`.
    """
    costs = stage_costs(as_weights(weights), stage_norm)
    return partition_bound(costs, at_least_one(num_parts, "num_parts"), as_flag(equal_count, "equal_count"))


def stage_costs(stages: IntArray, stage_norm: StageNorm) -> IntArray:
    """What counts of weights or loads [m, S]: all stages, or their sum [m, 1].

    Raises:
        PackingError: an unknown norm.
    """
    if not isinstance(stage_norm, str) or stage_norm not in get_args(StageNorm):
        raise PackingError(f"unknown stage_norm {stage_norm!r}; available: {', '.join(get_args(StageNorm))}")
    if stage_norm == "max" or stages.shape[1] == 1:
        return stages
    total = stages[:, 0].copy()
    for stage in range(1, stages.shape[1]):  # several times faster than a sum along the short axis
        total += stages[:, stage]
    return total.reshape(-1, 1)


def costly_stages(stages: IntArray) -> IntArray:
    """Stages that cost anything (at least one): text alone has no encoder, and one stage is balanced faster."""
    costly = [stage for stage in range(stages.shape[1]) if stages[:, stage].any()] or [0]
    return stages if len(costly) == stages.shape[1] else np.ascontiguousarray(stages[:, costly])


def partition_bound(weights: IntArray, num_parts: int, equal_count: bool = False) -> int:
    """`makespan_lower_bound` on checked input: weights [n, S]."""
    if weights.shape[0] == 0:
        return 0
    return max(_stage_bound(weights[:, stage], num_parts, equal_count) for stage in range(weights.shape[1]))


def _stage_bound(weights: IntArray, num_parts: int, equal_count: bool) -> int:
    before = np.zeros(weights.shape[0] + 1, np.int64)  # before[i]: sum of the i smallest
    ascending = np.sort(weights)
    np.cumsum(ascending, out=before[1:])
    num_items = ascending.shape[0]
    longest, total = int(ascending[-1]), int(before[-1])
    unit = max(int(np.gcd.reduce(weights)), 1)  # every load is a multiple of it
    bound = max(longest, -(-total // (num_parts * unit)) * unit, _unit_bound(ascending, num_parts))
    if num_items > num_parts:
        # For every j with j * num_parts + 1 <= num_items: the j + 1 smallest of the j * num_parts + 1 largest.
        first = np.arange(num_items - num_parts - 1, -1, -num_parts)
        bound = max(bound, int((before[first + np.arange(2, first.shape[0] + 2)] - before[first]).max()))
    if equal_count and num_items >= num_parts:
        bound = max(bound, _companions_bound(ascending, before, num_parts))
    return bound


def _unit_bound(ascending: IntArray, num_parts: int) -> int:
    """unit * ceil(sum(weights // unit) / k) for the largest unit that leaves every weight its multiple."""
    positive = ascending[np.searchsorted(ascending, 1) :]
    if positive.shape[0] == 0:
        return 0
    smallest = int(positive[0])
    multiples = (positive + smallest // 2) // smallest
    unit = int((positive // multiples).min())
    return unit * -(-int((positive // unit).sum()) // num_parts)


def _companions_bound(ascending: IntArray, before: IntArray, num_parts: int) -> int:
    """Of the m largest items two share a part, or m parts hold one each, each beside base - 1 others or more."""
    base = ascending.shape[0] // num_parts  # items that every part holds
    largest = np.arange(1, num_parts + 1)  # every m
    apart = before[-1] - before[-1 - largest] + before[largest * (base - 1)]
    bounds = -(-apart // largest)
    if base >= 2:
        together = ascending[-2 : -num_parts - 1 : -1] + ascending[-1:-num_parts:-1] + before[base - 2]
        bounds[1:] = np.minimum(bounds[1:], together)
    # With base = 1, `bounds` are averages of the m largest, which the longest exceeds anyway.
    return int(bounds.max())
