"""The ends of very many replicas or candidates of one schedule at once, in integers: what plans are compared by.

    schedule + durations [K, M, S] ns --makespans_ns--> makespans [K]
    ... of R replicas that meet       --meeting_makespans_ns--> the step [C]
    ... in other orders [C, R, M]     --makespans_of_orders_ns--> makespans [C, R]

Integers, so that all hosts agree. The rules are those of balancer/simulate.py; an absent act (`present`) takes no time
and passes the wait on.

Price: about 3 ns per act of a replica where 64 or more replicas run side by side (balancer/simulation_core.py).
"""

from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from balancer.compiled_schedule import compiled
from balancer.counts import Int64Array
from balancer.errors import ScheduleError
from balancer.schedule import Schedule
from balancer.simulation_core import read_only, time_replicas
from balancer.whole_numbers import whole_number

BoolArray = NDArray[np.bool_]
_Value = TypeVar("_Value", bound=np.generic)

# Where replicas wait for each other: see `meeting_makespans_ns`.
Meet = Literal["step", "microbatch", "unit"]

# As in planning (balancer/exact_sums.py): what stays below it cannot wrap.
MAX_MAKESPAN_NS = 2**62

_NO_HALVES: Int64Array = read_only(np.zeros((0, 0, 0), dtype=np.int64))
_ALL_PRESENT: BoolArray = read_only(np.zeros((0, 0), dtype=np.bool_))


def makespans_ns(
    schedule: Schedule,
    forward_ns: Int64Array,
    backward_ns: Int64Array,
    present: BoolArray | None = None,
    *,
    weight_ns: Int64Array | None = None,
    p2p_ns: int = 0,
    routed: bool = False,
) -> Int64Array:
    """Makespans of K replicas that run the same full `schedule` over a chain of stages, int64 [K].

    Args:
        schedule: complete: absent acts are named by `present`, which may differ from replica to replica.
        forward_ns, backward_ns: int64 [K, M, S], not negative; entries of absent acts are not read.
        present: bool [K, M, S]: False where an act does not run; None: all run.
        weight_ns: the part of `backward_ns` that is W where backward is split; default half, rounded down.
        p2p_ns, routed: as in `simulate`.

    Raises:
        ScheduleError: a deadlock (with its cycle), arrays of another shape or kind, or durations of acts that run that
            are negative or add up to 2^62 or more in a replica.
    """
    ends = rank_ends_ns(schedule, forward_ns, backward_ns, present, weight_ns=weight_ns, p2p_ns=p2p_ns, routed=routed)
    makespans: Int64Array = ends.max(axis=1)
    return makespans


def rank_ends_ns(
    schedule: Schedule,
    forward_ns: Int64Array,
    backward_ns: Int64Array,
    present: BoolArray | None = None,
    *,
    orders: Int64Array | None = None,
    weight_ns: Int64Array | None = None,
    p2p_ns: int = 0,
    routed: bool = False,
) -> Int64Array:
    """When every pipeline rank of every replica ends its last act, int64 [K, P]; arguments as in `makespans_ns`.

    Args:
        orders: int64 [C, M] with C a multiple of K: candidate c is replica c % K with micro-batch orders[c, i] in the
            place of the i-th, and the result is [C, P]. Saves copying the times of every candidate.
    """
    links = compiled(schedule, routed=routed)
    shape = (len(forward_ns), schedule.num_microbatches, schedule.num_stages)
    forward = _flat("forward_ns", forward_ns, shape, np.int64)
    backward = _flat("backward_ns", backward_ns, shape, np.int64)
    runs = _ALL_PRESENT if present is None else _flat("present", present, shape, np.bool_)
    latency = _latency(p2p_ns, schedule)
    latencies = latency * len(schedule.op)
    if not _surely_fit(forward, backward, latencies):
        _check_signs("forward_ns", forward, runs, shape)
        _check_signs("backward_ns", backward, runs, shape)
        _check_sums(forward, backward, runs, latencies)
    halves = _NO_HALVES
    if links.split.any():
        weight = _flat("weight_ns", backward_ns // 2 if weight_ns is None else weight_ns, shape, np.int64)
        _check_signs("weight_ns", weight, runs, shape)
        halves = read_only(np.stack([backward - weight, weight]))
        _check_signs("backward_ns without weight_ns", halves[0], runs, shape)
    acts = links.replicas
    ends: Int64Array = time_replicas(
        acts.work,
        acts.cell,
        acts.rank,
        acts.slot,
        acts.waits_for,
        acts.part_of,
        forward,
        backward,
        halves,
        runs,
        _orders(orders, shape),
        latency,
        schedule.num_ranks,
    )
    return ends


def makespans_of_orders_ns(
    schedule: Schedule,
    forward_ns: Int64Array,
    backward_ns: Int64Array,
    present: BoolArray | None,
    orders: Int64Array,
    *,
    weight_ns: Int64Array | None = None,
    p2p_ns: int = 0,
) -> Int64Array:
    """Makespans of R replicas under C orders of their micro-batches each, int64 [C, R].

    Args:
        forward_ns, backward_ns, present, weight_ns, p2p_ns: as in `makespans_ns`, [R, M, S].
        orders: int64 [C, R, M]: orders[c, r, i] is the micro-batch of replica r that runs in the place of the i-th.
    """
    expected = (len(forward_ns), schedule.num_microbatches)
    if orders.ndim != 3 or orders.shape[1:] != expected:
        raise ScheduleError(
            f"orders has shape {orders.shape}; expected [orders, replicas, micro-batches] = [C, {expected}]"
        )
    flat = orders.reshape(-1, schedule.num_microbatches)
    ends = rank_ends_ns(schedule, forward_ns, backward_ns, present, orders=flat, weight_ns=weight_ns, p2p_ns=p2p_ns)
    makespans: Int64Array = ends.max(axis=1).reshape(orders.shape[:2])
    return makespans


def meeting_makespans_ns(
    schedule: Schedule,
    forward_ns: Int64Array,
    backward_ns: Int64Array,
    present: BoolArray | None,
    meet: Meet,
    *,
    weight_ns: Int64Array | None = None,
    p2p_ns: int = 0,
    routed: bool = False,
) -> Int64Array:
    """Duration of the step for C candidates of R replicas that meet, int64 [C].

        meet         what waits for the slowest replica               simulated as
        step         the end of the step (gradients)                  max over replicas
        microbatch   every act: replicas run in lockstep (ZeRO-3,     one replica whose acts last as long as the
                     tensor or expert groups that span replicas)      longest of all; present where any is
        unit         every encoder act: items routed over all         encoder acts last as long as the longest of
                     replicas (`encoder_group="world"`)               all; then max over replicas

    `microbatch` is exact for acts that begin and end together. `unit` counts that shares of a unit differ, and not that
    replicas reach their cut at different times (they share one schedule, so that is the difference of their LLM
    times since the last cut): a bound from below, exact where LLM times agree.

    Args:
        forward_ns, backward_ns, present, weight_ns: as in `makespans_ns`, [C, R, M, S].
        meet: where replicas wait for each other.
        p2p_ns, routed: as in `makespans_ns`.
    """
    forward, backward, runs, weight = joined_durations(
        schedule, forward_ns, backward_ns, present, meet, weight_ns=weight_ns
    )
    candidates, replicas = forward.shape[:2]
    flat = (candidates * replicas, *forward.shape[2:])
    makespans = makespans_ns(
        schedule,
        forward.reshape(flat),
        backward.reshape(flat),
        None if runs is None else runs.reshape(flat),
        weight_ns=None if weight is None else weight.reshape(flat),
        p2p_ns=p2p_ns,
        routed=routed,
    )
    steps: Int64Array = makespans.reshape(candidates, replicas).max(axis=1)
    return steps


def meeting_makespan_ns(
    schedule: Schedule,
    forward_ns: Int64Array,
    backward_ns: Int64Array,
    present: BoolArray | None,
    meet: Meet,
    *,
    weight_ns: Int64Array | None = None,
    p2p_ns: int = 0,
    routed: bool = False,
) -> int:
    """Duration of one step of R replicas that meet; arrays [R, M, S], the rest as in `meeting_makespans_ns`."""
    steps = meeting_makespans_ns(
        schedule,
        forward_ns[np.newaxis],
        backward_ns[np.newaxis],
        None if present is None else present[np.newaxis],
        meet,
        weight_ns=None if weight_ns is None else weight_ns[np.newaxis],
        p2p_ns=p2p_ns,
        routed=routed,
    )
    return int(steps[0])


def joined_durations(
    schedule: Schedule,
    forward_ns: Int64Array,
    backward_ns: Int64Array,
    present: BoolArray | None,
    meet: Meet,
    *,
    weight_ns: Int64Array | None = None,
) -> tuple[Int64Array, Int64Array, BoolArray | None, Int64Array | None]:
    """(forward, backward, present, weight) [C, R', M, S] as replicas that meet run them; R' = 1 for `microbatch`.

    Raises:
        ScheduleError: an unknown meeting rule.
    """
    if meet == "step":
        return forward_ns, backward_ns, present, weight_ns
    if meet not in ("microbatch", "unit"):
        raise ScheduleError(f"meet={meet!r} is not known; known: step, microbatch, unit")
    for name, values in (("forward_ns", forward_ns), ("backward_ns", backward_ns), ("weight_ns", weight_ns)):
        if values is not None:
            _check_joinable(name, values, present)
    if present is not None:  # what does not run holds up nobody
        forward_ns, backward_ns = np.where(present, forward_ns, 0), np.where(present, backward_ns, 0)
        present = _join(present, meet)
    forward, backward = _join(forward_ns, meet), _join(backward_ns, meet)
    split = compiled(schedule).split
    if not split.any():
        return forward, backward, present, None
    # Where backward is split, its halves meet one by one.
    weight_ns = backward_ns // 2 if weight_ns is None else np.minimum(weight_ns, backward_ns)
    weight = _join(weight_ns, meet)
    halves = _join(backward_ns - weight_ns, meet) + weight
    return forward, np.where(split, halves, backward), present, weight


def _join(values: NDArray[_Value], meet: Meet) -> NDArray[_Value]:
    """[C, R, M, S] -> the longest over replicas, [C, 1, M, S], or of stage 0 alone, [C, R, M, S]."""
    if meet == "microbatch":
        longest: NDArray[_Value] = values.max(axis=1, keepdims=True)
        return longest
    together = values.copy()
    together[..., 0] = values[..., 0].max(axis=1, keepdims=True)
    return together


def _flat(name: str, values: NDArray[Any], shape: tuple[int, int, int], kind: type[np.generic]) -> NDArray[Any]:
    """[K, M, S] as read-only contiguous [K, M * S]."""
    if values.shape != shape:
        raise ScheduleError(f"{name} has shape {values.shape}; expected [replicas, micro-batches, stages] = {shape}")
    _check_kind(name, values, kind)
    return read_only(np.ascontiguousarray(values, dtype=kind).reshape(shape[0], shape[1] * shape[2]))


def _check_joinable(name: str, values: NDArray[Any], present: BoolArray | None) -> None:
    """Refuse a negative duration before the longest of all replicas hides it.

    Raises:
        ScheduleError: another kind of array, or a negative duration of an act that runs.
    """
    _check_kind(name, values, np.int64)
    negative = values.min(initial=0) < 0 and (values < 0) & (True if present is None else present)
    if np.any(negative):
        raise ScheduleError(f"{name}{np.argwhere(negative)[0].tolist()} is negative: not a duration")


def _check_kind(name: str, values: NDArray[Any], kind: type[np.generic]) -> None:
    """Refuse what would be cut off or wrap in silence: floats as nanoseconds, unsigned integers, numbers as `present`.

    Raises:
        ScheduleError: another kind of array.
    """
    if values.dtype == kind:
        return
    if not np.can_cast(values.dtype, kind, casting="safe") or (kind is np.int64 and values.dtype == np.bool_):
        raise ScheduleError(f"{name} holds {values.dtype}; expected {np.dtype(kind)}")


def _check_signs(name: str, flat: Int64Array, runs: BoolArray, shape: tuple[int, int, int]) -> None:
    """Check the durations [K, M * S] of acts that run.

    Raises:
        ScheduleError: one is negative.
    """
    if flat.min(initial=0) >= 0:
        return
    for replica, cell in np.argwhere((flat < 0) & (runs if runs.size else True))[:1].tolist():
        microbatch, stage = divmod(cell, shape[2])
        raise ScheduleError(f"{name}[{replica}, {microbatch}, {stage}]={flat[replica, cell]} is not a duration")


def _surely_fit(forward: Int64Array, backward: Int64Array, latency_ns: int) -> bool:
    """Whether nothing in durations [K, M * S] can be negative or too long: the longest times the number of acts.

    One pass, which settles it nearly always: read as unsigned, a negative number is the largest.
    """
    longest = int(forward.view(np.uint64).max(initial=0)) + int(backward.view(np.uint64).max(initial=0))
    return bool(longest * forward.shape[1] + latency_ns < MAX_MAKESPAN_NS)


def _check_sums(forward: Int64Array, backward: Int64Array, runs: BoolArray, latency_ns: int) -> None:
    """Check that a path through all acts of a replica stays below 2^62; durations [K, M * S], not negative.

    Sums of Python integers, which cannot wrap: made only where `_surely_fit` says no.

    Raises:
        ScheduleError: it does not; names the replica.
    """
    for replica in range(len(forward)):
        mine = slice(None) if not runs.size else runs[replica]
        total = sum(forward[replica][mine].tolist()) + sum(backward[replica][mine].tolist()) + latency_ns
        if total >= MAX_MAKESPAN_NS:
            raise ScheduleError(
                f"the durations of replica {replica} add up to {total} ns with all latencies, beyond the 2^62 that "
                f"simulated times count in; the longest is {max(forward[replica].max(), backward[replica].max())} ns: "
                "check the costs and their unit"
            )


def _latency(p2p_ns: int, schedule: Schedule) -> int:
    """The latency in nanoseconds, checked.

    Raises:
        ScheduleError: no whole number, negative or too long.
    """
    most = MAX_MAKESPAN_NS // max(len(schedule.op), 1)
    return whole_number(
        "p2p_ns",
        p2p_ns,
        error=ScheduleError,
        below="a latency is at least 0 ns",
        above=f"a latency of this schedule is at most {most} ns",
        at_least=0,
        at_most=most,
    )


def _orders(orders: Int64Array | None, shape: tuple[int, int, int]) -> Int64Array:
    """Orders int64 [C, M], read-only; as they are where none are given."""
    num_replicas, num_microbatches, _ = shape
    if orders is None:
        return read_only(np.tile(np.arange(num_microbatches), (num_replicas, 1)))
    _check_kind("orders", orders, np.int64)
    array = np.ascontiguousarray(orders, dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != num_microbatches or len(array) % max(num_replicas, 1):
        raise ScheduleError(
            f"orders has shape {array.shape}; expected [multiple of {num_replicas}, {num_microbatches}]"
        )
    if array.min(initial=0) < 0 or array.max(initial=0) >= num_microbatches:
        raise ScheduleError(f"orders names micro-batches outside 0..{num_microbatches - 1}")
    return read_only(array)
