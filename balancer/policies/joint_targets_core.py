"""The best shares of divisible work: descent on the longest path of a pipeline.

    schedule, work of K classes [K, 2, S]  -->  shares [K, M] of each class in running order, their makespan

The makespan is the longest path through the acts, a convex function of the shares. A step follows one longest path:
shares are worth the time of their acts on it, those worth more than the mean of their class shrink, the others grow.
Where several paths are equally long one alone would push work to and fro, so a step uses the mean of the last few.

In integers, from rounded work, so that neighbouring steps share one result and every host has the same. Price: 2 to 3
microseconds a step for 128 acts; within half a percent of the optimum of a linear program on 104 pipelines tried.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from balancer.compiled_schedule import compiled
from balancer.counts import Int64Array
from balancer.policies.joint_profile import TOTAL
from balancer.schedule import Schedule
from packing._jit import jit, jit_inner

Int8Array = NDArray[np.int8]
Int32Array = NDArray[np.int32]

FULL = 1024  # a micro-batch at its capacity
_NUM_STEPS, _LEAST_STEPS, _MOST_WORK = 320, 64, 2**21  # fewer steps for schedules of thousands of acts
_NUM_TURNS, _SLACK_PARTS = 12, 256
_FIRST_STEP, _LAST_STEP, _STEP_PARTS = 384, 8, 1024  # of 1,024: how far shares may move in a step
_GAIN_PARTS = 2048  # gains that are smaller are not worth shares that are further from equal
_ENOUGH_PARTS = 1024  # a makespan within one part in so many of the work of a rank ends the descent

# Acts in an order that can run: op, stage, micro-batch, rank, the act before on the rank or -1; what act a waits for is
# sources[offsets[a] : offsets[a + 1]], as places in that order.
_Acts = tuple[Int8Array, Int32Array, Int32Array, Int32Array, Int32Array, Int64Array, Int32Array]


@lru_cache(maxsize=1024)
def best_shares(
    schedule: Schedule, work: tuple[int, ...], filled: tuple[int, ...], routed: bool
) -> tuple[Int64Array, int]:
    """Shares int64 [K, M], the sum of each class about `TOTAL`, and their makespan in parts of `work` / `TOTAL`.

    Args:
        schedule: what a replica runs.
        work: K x 2 x S numbers up to 2**16 in all, forward and backward time of each class in every stage.
        filled: K numbers, how much of all micro-batches together the sizes of each class fill, `FULL` is all.
        routed: media items are exchanged inside units.
    """
    unit_size = schedule.unit_size if routed else 0
    times = _by_op(work, len(filled))
    equal = np.full((len(filled), schedule.num_microbatches), TOTAL // schedule.num_microbatches, dtype=np.int64)
    share, makespan = _descend(
        _acts(schedule, routed), times, np.array(filled, dtype=np.int64), equal, unit_size, schedule.num_ranks
    )
    share.setflags(write=False)
    return share, int(makespan)


def makespan_of(schedule: Schedule, work: tuple[int, ...], share: Int64Array, routed: bool) -> int:
    """Makespan of shares int64 [K, M], in the unit of `best_shares`."""
    unit_size = schedule.unit_size if routed else 0
    return int(_makespan(_acts(schedule, routed), _by_op(work, len(share)), share, unit_size))


def _by_op(work: tuple[int, ...], num_classes: int) -> Int64Array:
    """Times of the ops F, B, I, W, twice those of `work`, so that a half of B is whole: int64 [K, 4, S]."""
    both = np.array(work, dtype=np.int64).reshape(num_classes, 2, -1)
    forward, backward = both[:, 0], both[:, 1]
    return np.ascontiguousarray(np.stack([2 * forward, 2 * backward, backward, backward], axis=1))


@lru_cache(maxsize=64)
def _acts(schedule: Schedule, routed: bool) -> _Acts:
    links = compiled(schedule, routed=routed)
    order = links.order
    place = np.empty(len(order), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    before = np.full(len(order), -1, dtype=np.int32)
    firsts = schedule.rank_offsets[:-1]
    before[1:] = place[:-1]
    before[firsts[firsts < len(order)]] = -1
    counts = np.diff(links.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    starts = np.repeat(links.offsets[:-1][order] - offsets[:-1], counts)
    sources = place[links.sources[starts + np.arange(len(starts))]]
    return (
        schedule.op[order],
        schedule.stage[order],
        schedule.microbatch[order],
        schedule.act_rank[order],
        before[order],
        offsets,
        sources,
    )


@jit
def _makespan(acts: _Acts, times: Int64Array, share: Int64Array, unit_size: int) -> int:
    end, reason = np.zeros(len(acts[0]), np.int64), np.zeros(len(acts[0]), np.int64)
    return int(end[_run(acts, times, share, _of_units(share, unit_size), end, reason)])


@jit
def _descend(  # noqa: PLR0917  kernels take flat arguments
    acts: _Acts, times: Int64Array, filled: Int64Array, start: Int64Array, unit_size: int, num_ranks: int
) -> tuple[Int64Array, int]:
    """(best shares seen, their makespan)."""
    num_acts, share = len(acts[0]), start.copy()
    slope = np.zeros(share.shape, np.int64)
    end, reason = np.zeros(num_acts, np.int64), np.zeros(num_acts, np.int64)
    best, best_makespan, enough = share.copy(), -1, 0
    step = _FIRST_STEP << 10
    for _ in range(max(_LEAST_STEPS, min(_NUM_STEPS, _MOST_WORK // max(1, num_acts)))):
        last = _run(acts, times, share, _of_units(share, unit_size), end, reason)
        makespan = int(end[last])
        if best_makespan < 0:
            enough = _busiest(acts, times, share, unit_size, num_ranks)
            enough += enough // _ENOUGH_PARTS
        if best_makespan < 0 or makespan < best_makespan - best_makespan // _GAIN_PARTS:
            best_makespan = makespan
            best[:] = share
            if best_makespan <= enough:
                break
        slope -= slope >> 3
        _add_path(acts, times, unit_size, reason, last, slope)
        _move(share, slope, step >> 10)
        _normalise(share, filled)
        step = max(_LAST_STEP << 10, step - (step >> 6))
    return best, best_makespan


@jit_inner
def _busiest(acts: _Acts, times: Int64Array, share: Int64Array, unit_size: int, num_ranks: int) -> int:
    """Work of the busiest rank, which is the same whatever the shares."""
    op, stage, microbatch, rank = acts[0], acts[1], acts[2], acts[3]
    encoded = _of_units(share, unit_size)
    work = np.zeros(num_ranks, np.int64)
    for act in range(len(op)):
        held = encoded if stage[act] == 0 else share
        for row in range(len(times)):
            work[rank[act]] += held[row, microbatch[act]] * times[row, op[act], stage[act]]
    return int(work.max())


@jit_inner
def _of_units(share: Int64Array, unit_size: int) -> Int64Array:
    """Shares in the encoder: routed, all entries of a unit encode equally long."""
    if unit_size == 0:
        return share
    found = share.copy()
    num_microbatches = share.shape[1]
    for row in range(len(share)):
        for first in range(0, num_microbatches, unit_size):
            stop = min(first + unit_size, num_microbatches)
            found[row, first:stop] = share[row, first:stop].sum() // (stop - first)
    return found


@jit_inner
def _run(  # noqa: PLR0917  kernels take flat arguments
    acts: _Acts,
    times: Int64Array,
    share: Int64Array,
    encoded: Int64Array,
    end: Int64Array,
    reason: Int64Array,
) -> int:
    """The act that ends last; writes the end of every act, and the act that it waited for or -1."""
    op, stage, microbatch, _, before, offsets, sources = acts
    last = 0
    for act in range(len(op)):
        begin, why = np.int64(0), np.int64(-1)
        if before[act] >= 0:
            begin, why = end[before[act]], np.int64(before[act])
        for place in range(offsets[act], offsets[act + 1]):
            source = sources[place]
            if end[source] > begin:
                begin, why = end[source], np.int64(source)
        held = encoded if stage[act] == 0 else share
        for row in range(len(times)):
            begin += held[row, microbatch[act]] * times[row, op[act], stage[act]]
        end[act], reason[act] = begin, why
        if begin > end[last]:
            last = act
    return last


@jit_inner
def _add_path(  # noqa: PLR0917  kernels take flat arguments
    acts: _Acts,
    times: Int64Array,
    unit_size: int,
    reason: Int64Array,
    last: int,
    slope: Int64Array,
) -> None:
    """Add what each share is worth on the longest path, times 1,024."""
    op, stage, microbatch = acts[0], acts[1], acts[2]
    act = last
    while act >= 0:
        first, stop = np.int64(microbatch[act]), np.int64(microbatch[act]) + 1
        if unit_size > 0 and stage[act] == 0:
            first -= first % unit_size
            stop = min(first + unit_size, slope.shape[1])
        for row in range(len(times)):
            slope[row, first:stop] += (times[row, op[act], stage[act]] << 10) // (stop - first)
        act = reason[act]


@jit_inner
def _move(share: Int64Array, slope: Int64Array, step: int) -> None:
    """Shares whose slope is above the mean of their class shrink, the others grow."""
    num_classes, num_microbatches = share.shape
    centred = np.empty_like(slope)
    largest = np.int64(1)
    for row in range(num_classes):
        mean = np.int64(0)
        for slot in range(num_microbatches):
            mean += share[row, slot] * slope[row, slot]
        mean //= TOTAL
        for slot in range(num_microbatches):
            centred[row, slot] = slope[row, slot] - mean
            largest = max(largest, abs(centred[row, slot]))
    least = TOTAL // (256 * num_microbatches)
    for row in range(num_classes):
        for slot in range(num_microbatches):
            part = centred[row, slot] * step // largest  # of 1,024
            share[row, slot] = max(least, share[row, slot] - (share[row, slot] * part >> 10))


@jit_inner
def _normalise(share: Int64Array, filled: Int64Array) -> None:
    """Rows with sum about `TOTAL`, slots within the capacity or just above it, by scaling rows and columns in turn."""
    num_classes, num_microbatches = share.shape
    most = FULL * (TOTAL // num_microbatches)
    for _ in range(_NUM_TURNS):
        for row in range(num_classes):
            total = share[row].sum()
            for slot in range(num_microbatches):
                share[row, slot] = share[row, slot] * TOTAL // total
        above = False
        for slot in range(num_microbatches):
            size = np.int64(0)
            for row in range(num_classes):
                size += filled[row] * share[row, slot]
            if size > most:
                above = above or size > most + most // _SLACK_PARTS
                for row in range(num_classes):
                    share[row, slot] = share[row, slot] * (most >> 10) // (size >> 10)
        if not above:
            return
