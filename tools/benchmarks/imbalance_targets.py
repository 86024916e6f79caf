"""What the planner must reach on the rows of a run: PASS, MISS, or no rows to tell.

bound    fine group: makespan <= 1.02 of the lower bound, every step
others   never above the best baseline of the same setting that keeps samples and capacities
optimum  small steps: beside the exact one (no limit set: the worst is shown)
time     512 on 8 x 4 <= 2 ms, 8,192 on 64 x 16 <= 10 ms, 131,072 on 1,024 x 16 <= 300 ms, medians
rules    no sample lost, no capacity broken, a plan for every step
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from tools.benchmarks.imbalance_rows import Row, best_baseline, by_setting, mean_ratio
from tools.benchmarks.imbalance_small import Optimum
from tools.benchmarks.imbalance_timing import TIMING_CASES, PlanningTime
from tools.benchmarks.targets import Measured, Target

BOUND_LIMIT = 1.02
ROUNDING = 1e-9


def imbalance_targets(
    rows: Sequence[Row], times: Sequence[PlanningTime], optima: Sequence[Optimum], policy: str
) -> list[Target]:
    """All lines, for our policy `policy`."""
    ours = [row for row in rows if row.kind == "ours" and row.method == policy]
    fine = [row for row in ours if row.setting.group == "fine"]
    lines = [
        _target(
            f"fine, {layout}, meet {meet}: makespan / lower bound",
            BOUND_LIMIT,
            ((max(row.ratios, default=math.nan), row.setting.in_words) for row in chosen),
        )
        for layout, meet, chosen in _by_layout(fine)
    ]
    lines.append(_target("makespan / that of the best baseline", 1.0 + ROUNDING, over_best(rows, policy)))
    lines.append(
        _target(
            "exact optimum of small steps: worst ratio",
            math.inf,
            (
                (max(line.ratios, default=math.nan), f"{line.workload}, {line.layout}, meet {line.meet}")
                for line in optima
            ),
        )
    )
    for num_samples, num_ranks, num_microbatches, limit_ms in TIMING_CASES:
        here = [line for line in times if line.num_samples == num_samples]
        what = f"{num_samples:,} samples on {num_ranks:,} x {num_microbatches}: ms, median"
        lines.append(
            _target(
                what,
                limit_ms,
                ((line.median_ms, f"{line.workload}, {line.layout}, meet {line.meet}") for line in here),
            )
        )
    lines.append(
        _target(
            "samples lost, capacities broken, steps without a plan",
            0.0,
            ((_broken(row), row.setting.in_words) for row in ours),
        )
    )
    return lines


def over_best(rows: Sequence[Row], policy: str) -> Iterator[Measured]:
    """Mean ratio of the policy over that of the best baseline, a setting."""
    for setting, found in by_setting(rows).items():
        best = best_baseline(found)
        mine = [row for row in found if row.kind == "ours" and row.method == policy and row.seeds]
        if best and mine:
            yield mean_ratio(mine[0]) / mean_ratio(best), f"{setting.in_words}: {best.method}"


def _broken(row: Row) -> float:
    return float(bool(row.failed)) + sum(verdict.lost + verdict.cells_above for verdict in row.verdicts)


def _by_layout(rows: Iterable[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.setting.layout, row.setting.meet), []).append(row)
    for (layout, meet), chosen in found.items():
        yield layout, meet, chosen


def _target(name: str, limit: float, measured: Iterable[Measured]) -> Target:
    values = [(value, where) for value, where in measured if not math.isnan(value)]
    worst, where = max(values, default=(math.nan, ""))
    return Target(name=name, limit=limit, worst=worst, where=where, num_rows=len(values))
