"""Measuring several methods on one input: CPU time of this process, in rounds, with the spread.

    round 1: sort, ours, peer A, peer B     round 2: sort, ours, peer A, peer B     ...

Rounds spread a disturbance of the machine over all methods. CPU time, not wall time, because other work on the machine
then disturbs less; threads of a library are summed. `sort` is numpy's stable argsort of the same int32 keys: ratios to
it carry over between machines better than milliseconds do.
"""

import gc
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

Kind = Literal["ours", "baseline", "peer", "bound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """CPU milliseconds of the measured runs of one method, in order."""

    runs_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median over the runs."""
        return statistics.median(self.runs_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one input.

    Attributes:
        section: part of the benchmark. workload, real: whose samples. setting: capacities or parts, in words.
        num_items: n.
        method, kind, system: what ran; `system` is where a baseline or peer comes from.
        returns: "arrays" or "lists"; building Python lists costs more than packing does.
        runs_ms: CPU time of every measured run.
        sort_ms: numpy's stable argsort of as many int32 keys, median in the same rounds; NaN where it does not apply.
        quality: figures by name: bins, bound, excess; makespan, gap; sync_ratio, rank_ratio.
        violations: what the result breaks: unplaced items, bins above a capacity. Empty when nothing.
        note: anything else a reader needs.
    """

    section: str
    workload: str
    real: bool
    setting: str
    num_items: int
    method: str
    kind: Kind
    system: str = ""
    returns: str = "arrays"
    runs_ms: tuple[float, ...] = ()
    sort_ms: float = float("nan")
    quality: Mapping[str, float] = field(default_factory=dict)
    violations: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def median_ms(self) -> float:
        """Median CPU time; NaN where nothing was timed."""
        return statistics.median(self.runs_ms) if self.runs_ms else float("nan")

    @property
    def sort_ratio(self) -> float:
        """Median CPU time in units of the sort."""
        return self.median_ms / self.sort_ms if self.sort_ms else float("nan")

    def as_json(self) -> dict[str, Any]:
        """The row with its derived figures."""
        return {**asdict(self), "median_ms": self.median_ms, "sort_ratio": self.sort_ratio}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Row":
        """The row that `as_json` wrote."""
        known = {entry.name: values[entry.name] for entry in fields(cls)}
        if known["sort_ms"] is None:  # JSON has no NaN
            known["sort_ms"] = float("nan")
        return cls(**{**known, "runs_ms": tuple(known["runs_ms"])})


def measure(
    cases: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    budget_s: float,
    clock_s: Callable[[], float] = time.process_time,
) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Timings and results of all cases. Each runs at least once, then again while its runs took less than the budget.

    Compiled methods must have run before, or the first run is their compilation. `cpu_with_children_s` is the clock
    for methods that start processes.
    """
    runs: dict[str, list[float]] = {name: [] for name in cases}
    results: dict[str, Any] = {}
    for _ in range(repeats):
        for name, case in cases.items():
            if runs[name] and sum(runs[name]) >= 1e3 * budget_s:
                continue
            gc.collect()
            start = clock_s()
            results[name] = case()
            runs[name].append(1e3 * (clock_s() - start))
    return {name: Timing(runs_ms=tuple(values)) for name, values in runs.items()}, results


def cpu_with_children_s() -> float:
    """CPU seconds of this process and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def sort_case(keys: np.typing.NDArray[np.int64]) -> Callable[[], object]:
    """numpy's stable argsort of `keys` [n] as int32 (fitted into it): the unit of time."""
    narrow = np.minimum(keys, 2**31 - 1).astype(np.int32)
    return lambda: np.argsort(narrow, kind="stable")


def environment(versions: Mapping[str, str]) -> dict[str, str]:
    """What a reader needs to judge the numbers; no name or path of the machine."""
    numba = sys.modules.get("numba")
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": str(getattr(numba, "__version__", "not imported")),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": str(os.cpu_count()),
        "clock": "time.process_time",
        **versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
