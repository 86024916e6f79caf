"""The results of the benchmark of imbalance as markdown.

targets | ratio to the bound | gains | every method | where the best baseline is faster | own terms | optimum | time
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tools.benchmarks.imbalance_own_terms import OwnTerms
from tools.benchmarks.imbalance_rows import Row, best_baseline, by_setting, quantiles
from tools.benchmarks.imbalance_small import Optimum
from tools.benchmarks.imbalance_targets import ROUNDING, over_best
from tools.benchmarks.imbalance_timing import PlanningTime
from tools.benchmarks.targets import Target

GAINS_OVER = ("sequential", "batch_rebalance", "dp_balanced")
MOST_LISTED = 40
TITLE = """# Imbalance in multimodal training, measured

Written by `python -m tools.benchmarks.imbalance`; definitions in [imbalance.md](imbalance.md). Makespans are simulated
with modelled times, free transfers and free launches, for every method alike; only planning times are measured.
Quantiles go over steps, R and M."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that one run measured; `policy` is the one of ours that the targets are about."""

    policy: str
    rows: Sequence[Row]
    targets: Sequence[Target]
    times: Sequence[PlanningTime]
    optima: Sequence[Optimum]
    own_terms: Sequence[OwnTerms]


def markdown(results: Results, notes: Sequence[str]) -> str:
    """A page of all tables."""
    parts = [
        TITLE,
        _targets(results.targets),
        _bound_table(results),
        _gain_table(results),
        _method_table(results.rows),
        _rivals(results),
        _own_terms(results.own_terms),
        _optima(results.optima),
        _times(results.times),
        "## Notes\n\n" + "\n".join(f"- {note}" for note in notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _targets(targets: Sequence[Target]) -> str:
    lines = []
    for target in targets:
        limit = "" if math.isinf(target.limit) else f"<= {target.limit:.4g}"
        verdict = "" if math.isinf(target.limit) else target.verdict
        lines.append([target.name, limit, _number(target.worst, 5), verdict, target.where])
    return _table("Targets", ["target", "limit", "worst", "verdict", "where"], lines)


def _bound_table(results: Results) -> str:
    """Ours, the best baseline and sequential over the lower bound; quantiles over R, M and steps."""

    def key(row: Row) -> tuple[str, ...]:
        setting = row.setting
        return setting.group, setting.layout, setting.meet, setting.workload

    lines = []
    for (group, layout, meet, name), rows in _grouped(results.rows, key):
        mine = _ratios(row for row in rows if row.method == results.policy)
        best = _ratios(row for found in by_setting(rows).values() if (row := best_baseline(found)) is not None)
        plain = _ratios(row for row in rows if row.method == "sequential")
        lines.append([group, layout, meet, name, *_spread(mine), *_spread(best), *_spread(plain)[:1]])
    head = ["group", "layout", "meet", "workload"]
    head += [f"{results.policy}: p50", "p90", "worst", "best baseline: p50", "p90", "worst", "sequential: p50"]
    return _table("Makespan over the lower bound", head, lines)


def _gain_table(results: Results) -> str:
    """Makespan of a baseline over ours, step by step; by layout over all workloads, then by workload."""

    def by_layout(row: Row) -> tuple[str, ...]:
        return row.setting.group, row.setting.layout, row.setting.meet

    def by_workload(row: Row) -> tuple[str, ...]:
        return row.setting.group, row.setting.workload, row.setting.meet

    lines = []
    for key in (by_layout, by_workload):
        for (group, what, meet), rows in _grouped(results.rows, key):
            for name in GAINS_OVER:
                gains = [
                    gain
                    for found in by_setting(rows).values()
                    for mine in found
                    for other in found
                    if mine.method == results.policy and other.method == name
                    for gain in other.over(mine)
                ]
                figures = [_number(value, 3) for value in quantiles(gains)]
                lines.append([group, what, meet, name, str(len(gains)), *figures])
    head = ["group", "layout or workload", "meet", "over", "steps", "p50", "p90", "p99", "mean"]
    return _table(f"Gain of {results.policy}: makespan of the other over ours, all R and M", head, lines)


def _method_table(rows: Sequence[Row]) -> str:
    """Every method over all workloads, layouts, R and M."""

    def key(row: Row) -> tuple[str, ...]:
        return row.setting.group, row.setting.meet, row.method

    lines = []
    for (group, meet, name), found in _grouped(rows, key):
        verdicts = [verdict for row in found for verdict in row.verdicts]
        if not verdicts:
            lines.append([group, meet, name, *[""] * 9, found[0].failed])
            continue
        extra = sum(
            verdict.num_microbatches > row.setting.num_microbatches for row in found for verdict in row.verdicts
        )
        broken = [
            f"{sum(verdict.lost for verdict in verdicts):,} samples lost" * any(v.lost for v in verdicts),
            f"{sum(verdict.cells_above for verdict in verdicts):,} micro-batches above capacity"
            * any(v.cells_above for v in verdicts),
            f"{sum(verdict.cells_short for verdict in verdicts):,} micro-batches left empty"
            * any(v.cells_short for v in verdicts),
            f"{extra} of {len(verdicts)} steps with more micro-batches" * bool(extra),
            f"failed: {next((row.failed for row in found if row.failed), '')}" * any(row.failed for row in found),
        ]
        means = [
            float(np.mean([getattr(verdict, figure) for verdict in verdicts]))
            for figure in ("bubble", "rank_ratio", "sync_ratio", "label_ratio")
        ]
        loads = max(verdict.worst_load for verdict in verdicts)
        label = f"{name} ({found[0].system})" if found[0].system else name
        note = "exchanges, " * (found[0].kind == "exchanges") + ", ".join(text for text in broken if text)
        spread = _spread(_ratios(found))
        lines.append([group, meet, label, *spread, *(_number(value, 3) for value in means), _number(loads, 3), note])
    head = ["group", "meet", "method", "ratio: p50", "p90", "worst", "bubble", "rank ratio", "sync ratio"]
    head += ["label ratio", "fullest", "note"]
    return _table("Every method, all workloads, layouts, R and M", head, lines)


def _rivals(results: Results) -> str:
    above = sorted((pair for pair in over_best(results.rows, results.policy) if pair[0] > 1.0 + ROUNDING), reverse=True)
    title = f"Settings where the best baseline is faster than {results.policy}"
    if not above:
        return f"## {title}\n\nNone of {len(by_setting(results.rows))}."
    lines = [[where, f"{value:.4f}"] for value, where in above[:MOST_LISTED]]
    text = _table(title, ["setting: best baseline", "ours over it"], lines)
    return f"{text}\n\n{len(above)} of {len(by_setting(results.rows))} settings."


def _own_terms(lines: Sequence[OwnTerms]) -> str:
    head = ["system", "setting", "ours", "theirs", "with flush steps", "samples late", "left at the end"]
    cells = [
        [
            line.what,
            line.setting,
            *(_number(value, 4) for value in (line.ours, line.theirs, line.theirs_flushed)),
            *(f"{100 * share:.1f} %" if share else "" for share in (line.late, line.waiting)),
        ]
        for line in lines
    ]
    return _table("On their own terms: time per mean work of a rank", head, cells)


def _optima(lines: Sequence[Optimum]) -> str:
    """Over all workloads."""
    cells = []
    for (layout, meet), found in _grouped(lines, lambda line: (line.layout, line.meet)):
        ratios = [ratio for line in found for ratio in line.ratios]
        p50, p90, _, mean = quantiles(ratios)
        figures = [_number(value, 4) for value in (p50, p90, max(ratios, default=math.nan), mean)]
        exact = sum(ratio == 1.0 for ratio in ratios) / max(len(ratios), 1)
        cells.append([layout, meet, str(len(ratios)), *figures, f"{100 * exact:.0f} %"])
    head = ["layout", "meet", "steps", "p50", "p90", "worst", "mean", "exact"]
    return _table("Small steps: makespan over the exact optimum", head, cells)


def _times(lines: Sequence[PlanningTime]) -> str:
    """Over all workloads: the run that was disturbed least, and the middle and the largest of their medians."""
    cells = []
    for (step, layout, meet), found in _grouped(lines, lambda line: (line.step, line.layout, line.meet)):
        medians = [line.median_ms for line in found]
        figures = [min(line.min_ms for line in found), statistics.median(medians), max(medians)]
        slowest = max(found, key=lambda line: line.median_ms).workload
        cells.append([step, layout, meet, *(_number(value, 3) for value in figures), slowest])
    head = ["step", "layout", "meet", "least", "median", "largest median", "of"]
    return _table("Planning time, CPU ms of the whole plan, warm", head, cells)


_Line = TypeVar("_Line")


def _grouped(
    lines: Iterable[_Line], key: Callable[[_Line], tuple[str, ...]]
) -> list[tuple[tuple[str, ...], list[_Line]]]:
    found: dict[tuple[str, ...], list[_Line]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return list(found.items())


def _ratios(rows: Iterable[Row]) -> list[float]:
    return [ratio for row in rows for ratio in row.ratios]


def _spread(values: Sequence[float]) -> list[str]:
    """p50, p90 and the largest."""
    p50, p90, _, _ = quantiles(values)
    return [_number(value, 4) for value in (p50, p90, max(values, default=math.nan))]


def _number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}g}" if value < 1 else f"{value:.{digits - 1}f}"


def _table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return ""
    rows = [head, ["---"] * len(head), *lines]
    return f"## {title}\n\n" + "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
