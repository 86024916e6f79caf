"""How large a schedule may be: refused before anything of that size is allocated, by the name of what is too large.

    numbers of ranks, stages, micro-batches --whole_size--> in the limits of a layout --check_num_acts--> A <= 2^24

The limits of ranks, stages and micro-batches are those of balancer/layout.py. The acts have one of their own, because
each takes 30 bytes for good and about ten times that while it is made.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from balancer.errors import ScheduleError
from balancer.layout import MAX_MICROBATCHES, MAX_PIPELINE_RANKS, MAX_STAGES
from balancer.whole_numbers import shown, whole_number

# 2^16 micro-batches on 64 stages, three acts each.
MAX_ACTS = 2**24
MAX_TICKS = 2**62
_ACTS_PER_CELL = 3  # F, I, W: the most that any schedule runs

_Integer = TypeVar("_Integer", np.int8, np.int32, np.int64)

LIMITS = {"ranks": MAX_PIPELINE_RANKS, "stages": MAX_STAGES, "micro-batches": MAX_MICROBATCHES}


def whole_size(name: str, value: object, kind: str, *, at_least: int = 1, below: str) -> int:
    """A number of ranks, stages or micro-batches, `kind` in `LIMITS`.

    Raises:
        ScheduleError: no whole number, too small (the text says `below`) or beyond the limit.
    """
    return whole_number(
        name,
        value,
        error=ScheduleError,
        below=below,
        above=f"a schedule has at most {LIMITS[kind]} {kind}",
        at_least=at_least,
        at_most=LIMITS[kind],
    )


def whole_index(name: str, value: object, kind: str, *, at_least: int = 0) -> int:
    """The number of one rank, stage or micro-batch, counted from 0; -1 is allowed where `at_least` says so.

    Raises:
        ScheduleError: no whole number or outside the range.
    """
    return whole_number(
        name,
        value,
        error=ScheduleError,
        below=f"{kind} are numbered from {at_least} on",
        above=f"{kind} are numbered below {LIMITS[kind]}",
        at_least=at_least,
        at_most=LIMITS[kind] - 1,
    )


def check_num_acts(name: str, num_stages: int, num_microbatches: int) -> None:
    """Check the product that decides what a schedule takes.

    Raises:
        ScheduleError: more than `MAX_ACTS`.
    """
    most = _ACTS_PER_CELL * num_stages * num_microbatches
    if most > MAX_ACTS:
        raise ScheduleError(
            f"schedule {shown(name)}: {num_stages} stages x {num_microbatches} micro-batches are up to {most} acts, at "
            f"most {MAX_ACTS}: use fewer micro-batches"
        )


def whole_array(name: str, values: object, kind: type[_Integer]) -> NDArray[_Integer]:
    """`values` as a contiguous array of `kind`, without wrapping.

    Raises:
        ScheduleError: no integers, or integers beyond `kind`.
    """
    try:
        array = np.asarray(values)
    except (OverflowError, TypeError, ValueError) as error:
        raise ScheduleError(f"{name} is no array of whole numbers: {error}") from error
    if array.size == 0:
        array = array.astype(kind)
    if array.dtype.kind not in "iu":
        raise ScheduleError(f"{name} holds {array.dtype}; expected whole numbers, {np.dtype(kind)}")
    info = np.iinfo(kind)
    if array.dtype != kind and array.size and not (info.min <= array.min() and array.max() <= info.max):
        largest = max(int(array.min()), int(array.max()), key=abs)
        raise ScheduleError(f"{name} holds {largest}, beyond {np.dtype(kind)}")
    return np.ascontiguousarray(array, dtype=kind)


def check_ticks(what: str, ticks: object, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Durations of every stage on a schedule's clock.

    Raises:
        ScheduleError: not one whole number >= 0 per stage, or so long that M micro-batches end beyond 2^62.
    """
    if not isinstance(ticks, Sequence | np.ndarray) or len(ticks) != num_stages:
        raise ScheduleError(f"clock: {what} is {shown(ticks)}; expected one whole number >= 0 per stage, {num_stages}")
    # Forward and backward of all stages together have to stay below 2^62.
    most = MAX_TICKS // (2 * num_stages * num_microbatches)
    return tuple(
        whole_number(
            f"clock: {what} of stage {stage}",
            tick,
            error=ScheduleError,
            below="a duration is a whole number >= 0",
            above=f"with {num_stages} stages and {num_microbatches} micro-batches a duration is at most {most} ticks; "
            "take a coarser tick",
            at_least=0,
            at_most=most,
        )
        for stage, tick in enumerate(ticks)
    )
