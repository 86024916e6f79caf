"""Results of the benchmark of imbalance: one row a method and setting, with every step it was measured on.

    setting = workload, group, R, M, layout, meeting rule        row = setting + method + verdicts of its steps

Ratios are per step: makespan over the lower bound of the same step, or over another method's makespan of the same
step. Quantiles go over the steps of all rows that a table line stands for.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from balancer.layout import Meet
from tools.benchmarks.imbalance_cases import Group
from tools.benchmarks.imbalance_judge import Verdict

Kind = Literal["ours", "yours", "baseline", "exchanges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was placed, and how it runs."""

    workload: str
    real: bool
    group: Group
    num_ranks: int
    num_microbatches: int
    layout: str
    meet: Meet

    @property
    def in_words(self) -> str:
        """For tables and targets."""
        shape = f"{self.num_ranks:,} x {self.num_microbatches}"
        return f"{self.workload}, {self.group}, {shape}, {self.layout}, meet {self.meet}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Lower bounds of one step in nanoseconds.

    Attributes:
        lower_ns: no placement takes less. work_ns: the part that knows only the mean work of a rank.
        largest_share: largest sample over the mean micro-batch.
    """

    lower_ns: int
    work_ns: int
    largest_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method in one setting.

    Attributes:
        method, kind, system: `exchanges` marks baselines that encode media on other ranks than samples run on.
        seeds: of the steps. bounds, verdicts, cpu_ms: one a step; cpu_ms is the placement (for ours the whole plan).
        failed: why it gave no placement of some step; empty when all is well.
    """

    setting: Setting
    method: str
    kind: Kind
    system: str
    seeds: tuple[int, ...]
    bounds: tuple[Bound, ...]
    verdicts: tuple[Verdict, ...]
    cpu_ms: tuple[float, ...]
    failed: str = ""

    @property
    def is_clean(self) -> bool:
        """Every step placed, with every sample and within the capacity."""
        return not self.failed and all(verdict.is_clean for verdict in self.verdicts)

    @property
    def ratios(self) -> list[float]:
        """Makespan over the lower bound, a step."""
        return [
            verdict.makespan_ns / max(bound.lower_ns, 1)
            for verdict, bound in zip(self.verdicts, self.bounds, strict=True)
        ]

    @property
    def work_ratios(self) -> list[float]:
        """Makespan over the mean work of a rank, a step."""
        return [
            verdict.makespan_ns / max(bound.work_ns, 1)
            for verdict, bound in zip(self.verdicts, self.bounds, strict=True)
        ]

    def over(self, other: "Row") -> list[float]:
        """Own makespan over that of another method, for the steps that both placed."""
        theirs = dict(zip(other.seeds, other.verdicts, strict=True))
        return [
            verdict.makespan_ns / max(theirs[seed].makespan_ns, 1)
            for seed, verdict in zip(self.seeds, self.verdicts, strict=True)
            if seed in theirs
        ]

    def as_json(self) -> dict[str, Any]:
        """The row with derived figures, as JSON takes it."""
        verdicts = [
            {name: getattr(verdict, name) for name in Verdict.__dataclass_fields__} for verdict in self.verdicts
        ]
        bounds = [{name: getattr(bound, name) for name in Bound.__dataclass_fields__} for bound in self.bounds]
        return {
            **{name: getattr(self.setting, name) for name in Setting.__dataclass_fields__},
            **{"method": self.method, "kind": self.kind, "system": self.system, "failed": self.failed},
            "steps": [
                {"seed": seed, **bound, **verdict, "ratio": ratio, "cpu_ms": cpu_ms}
                for seed, bound, verdict, ratio, cpu_ms in zip(
                    self.seeds, bounds, verdicts, self.ratios, self.cpu_ms, strict=True
                )
            ],
        }


@dataclass(slots=True)
class RowBuilder:
    """A row that grows by one step at a time."""

    setting: Setting
    method: str
    kind: Kind
    system: str
    steps: list[tuple[int, Bound, Verdict, float]] = field(default_factory=list)
    failed: str = ""

    def finished(self) -> Row:
        """The row."""
        seeds, bounds, verdicts, cpu_ms = zip(*self.steps, strict=True) if self.steps else ((), (), (), ())
        return Row(
            setting=self.setting,
            method=self.method,
            kind=self.kind,
            system=self.system,
            seeds=seeds,
            bounds=bounds,
            verdicts=verdicts,
            cpu_ms=cpu_ms,
            failed=self.failed,
        )


def by_setting(rows: Iterable[Row]) -> Mapping[Setting, list[Row]]:
    """Rows that compete with each other."""
    found: dict[Setting, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.setting].append(row)
    return found


def mean_ratio(row: Row) -> float:
    """Mean over steps of the ratio to the bound; infinite where nothing was placed."""
    return float(np.mean(row.ratios)) if row.seeds else math.inf


def best_baseline(rows: Sequence[Row]) -> Row | None:
    """The baseline of least mean ratio that keeps all samples and capacities and exchanges nothing between ranks."""
    clean = [row for row in rows if row.kind == "baseline" and row.is_clean]
    return min(clean, key=mean_ratio, default=None)


def quantiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    """p50, p90, p99 and mean; NaN where there is nothing."""
    if not values:
        return (math.nan, math.nan, math.nan, math.nan)
    p50, p90, p99 = (float(value) for value in np.quantile(values, (0.5, 0.9, 0.99)))
    return p50, p90, p99, float(np.mean(values))
