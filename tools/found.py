"""What every part of a proof says in the same words: places of steps, ids that are lost, strange or repeated."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.errors import PlanError
from balancer.ledger_lines import RunLine, StepLine
from balancer.select import StepRange, check_tail, step_range

MAX_NAMED_IDS = 5
Int64Array = NDArray[np.int64]
Found = Callable[[str], None]
"""Takes what is wrong, in a sentence."""


def check_place(line: StepLine, run: RunLine, found: Found) -> StepRange | None:
    """Where a step of a run by sample count lies, having compared its line with that; None, with a finding, where it
    cannot be.
    """
    try:
        where = step_range(
            line.step - 1,
            num_samples=run.num_ids,
            global_batch_size=run.global_batch_size,
            tail=check_tail(run.tail),
        )
    except PlanError as error:
        found(f"step {line.step} of such a run cannot be: {error}")
        return None
    compare_place(line, where.epoch, where.cursor, found)
    return where


def compare_place(line: StepLine, epoch: int, cursor: int, found: Found) -> None:
    """Say that a step is at another place than it belongs."""
    if (line.epoch, line.cursor) != (epoch, cursor):
        found(
            f"step {line.step} is at epoch {line.epoch}, sample {line.cursor}; it belongs at epoch {epoch}, sample "
            f"{cursor}"
        )


def compare_selection(name: str, selected: Int64Array, consumed: Int64Array, found: Found) -> None:
    """Say which samples of the steps called `name` were lost, and which do not belong there."""
    lost, strange = np.setdiff1d(selected, consumed), np.setdiff1d(consumed, selected)
    if len(lost):
        found(f"{name}: samples {few(lost)} are selected by seed and epoch, but were not consumed")
    if len(strange):
        found(f"{name}: samples {few(strange)} were consumed, but are not selected by seed and epoch")


def repeated_ids(ids: Int64Array) -> Int64Array:
    """Ids that come more than once, ascending."""
    values, counts = np.unique(ids, return_counts=True)
    return values[counts > 1]


def few(ids: ArrayLike) -> str:
    """The first of these ids, for messages."""
    listed = np.asarray(ids).tolist()
    more = f" and {len(listed) - MAX_NAMED_IDS} more" if len(listed) > MAX_NAMED_IDS else ""
    return ", ".join(map(str, listed[:MAX_NAMED_IDS])) + more
