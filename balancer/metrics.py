"""The numbers by which plans and runs are judged, each defined here and nowhere else.

`bubble_ratio = 1 - sum(busy) / (num_ranks * makespan)`: uniform GPipe and 1F1B give (p-1)/(m+p-1).
`bubble_overhead = idle / busy`: the same idle time seen from the ideal run; uniform schedules give (p-1)/m.
The bubble by kind (structural, stage skew, data, communication, straggler) is in balancer/bubbles.py.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float] | NDArray[np.int64] | NDArray[np.float64]


def imbalance(values: Values) -> float:
    """max / mean over ranks, >= 1. All zero: 1.0 (nobody waits). No ranks at all: NaN."""
    numbers = [float(value) for value in values]
    if not numbers:
        return math.nan
    mean = math.fsum(numbers) / len(numbers)
    # Rounding must not report better than perfect.
    return 1.0 if mean == 0.0 else max(1.0, max(numbers) / mean)


def bubble_ratio(busy: Values, makespan: float) -> float:
    """Idle share of all rank time: 1 - sum(busy) / (num_ranks * makespan). 0.0 where nothing ran.

    Args:
        busy: time each rank works, in any one unit.
        makespan: duration of the step on all ranks, in the same unit.
    """
    total = len(busy) * float(makespan)
    return 0.0 if total == 0.0 else 1.0 - math.fsum(float(value) for value in busy) / total


def bubble_overhead(busy: Values, makespan: float) -> float:
    """Idle time over busy time, the form in which (p-1)/m is usually quoted. 0.0 where nothing ran."""
    work = math.fsum(float(value) for value in busy)
    return 0.0 if work == 0.0 else (len(busy) * float(makespan) - work) / work


def padding_ratio(padded: float, capacity: float) -> float:
    """Share of the capacity that is padding. NaN for no capacity."""
    return padded / capacity if capacity else math.nan


def fill(used: float, capacity: float) -> float:
    """Share of the capacity that is used. NaN for no capacity."""
    return used / capacity if capacity else math.nan
