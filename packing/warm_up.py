"""`warm_up`: kernels are compiled, or loaded from their cache, before the first step needs them.

Call it once where a process starts, before loader workers do: forked workers inherit the kernels, spawned workers
load them from the cache in milliseconds, and no worker compiles. Cold it takes seconds, warm a fraction of one. With
several processes per node it may run in all of them at once; only the first start of an installation is cold.
"""

import logging
import time
from collections.abc import Collection

import numpy as np

from packing._kernel_cache import counts
from packing.bins import pack
from packing.grid import partition_grid
from packing.inputs import IntArray
from packing.parts import partition
from packing.registry import GRID_PLACERS, PACKERS, PARTITIONERS
from packing.streaming import pack_windowed

_log = logging.getLogger("packing")

# Optimum and lower bound differ (4 and 3 bins; 90 and 84, 90 and 87 in three parts), so that algorithms which stop at
# the bound, or try another one above it, run to the end. Few items for exact algorithms, more for those that follow.
_FEW = np.array([40, 40, 30, 30, 30, 20, 20, 20, 21])
_MORE = np.array([20] * 9 + [10] * 7 + [11])
_CAPACITY = 88
_NUM_PARTS = 3


def warm_up(*, grid: bool = False, every_algorithm: bool = False) -> float:
    """Run small inputs through `pack` and `partition`, on every route that their kernels can take.

    Args:
        grid: `partition_grid` as well.
        every_algorithm: all registered algorithms instead of the default ones, capacities too large for a table, and
            streams.

    Returns:
        Seconds it took. They are logged (logger `packing`, level info) when a kernel was compiled or loaded. Where
        none could be loaded, "compiling kernels" is logged as the first one begins to compile.
    """
    start = time.perf_counter()
    before = counts.copy()
    _run_packers(PACKERS if every_algorithm else ["best_fit_decreasing"])
    if every_algorithm:
        pack(_FEW << 40, capacity=_CAPACITY << 40, target_gap=0)
        pack_windowed(_FEW, capacity=_CAPACITY, lookahead=4)
    _run_partitioners({"auto", *(PARTITIONERS if every_algorithm else [])})
    if grid:
        _run_grid_placers({"auto", *(GRID_PLACERS if every_algorithm else [])})
    seconds = time.perf_counter() - start
    new = counts - before
    if new:
        _log.info("kernels ready in %.2f s (%d compiled, %d loaded)", seconds, new["compiled"], new["loaded"])
    return seconds


def _two_columns(values: IntArray) -> IntArray:
    return np.stack([values, values[::-1]], axis=1)


def _run_packers(names: Collection[str]) -> None:
    for name in names:
        pack(_FEW, capacity=_CAPACITY, algorithm=name, target_gap=0)
        pack(_two_columns(_FEW), capacity=[_CAPACITY] * 2, algorithm=name, target_gap=0)


def _run_partitioners(names: Collection[str]) -> None:
    for name in names:
        for values in (_FEW, _MORE):
            room = int(values.sum())
            partition(values, _NUM_PARTS, algorithm=name, target_gap=0)
            partition(values, _NUM_PARTS, algorithm=name, target_gap=0, sizes=values, capacity=room)
            partition(_two_columns(values), _NUM_PARTS, algorithm=name, target_gap=0, equal_count=True)


def _run_grid_placers(names: Collection[str]) -> None:
    for name in names:
        for weights in (_FEW, _two_columns(_MORE)):
            room = int(weights.sum())
            sizes = np.arange(weights.shape[0])
            partition_grid(weights, 2, 2, algorithm=name, target_gap=0)
            partition_grid(
                weights, 2, 2, algorithm=name, target_gap=0, objective="per_slot", sizes=sizes, capacity=room
            )
