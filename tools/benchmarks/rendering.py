"""The rows of a run as markdown tables."""

import math
from collections.abc import Sequence

from tools.benchmarks.measuring import Row
from tools.benchmarks.targets import Target


def markdown(rows: Sequence[Row], targets: Sequence[Target], notes: Sequence[str]) -> str:
    """Targets first, then a table a section."""
    lines = ["## Targets", "", "| target | limit | worst | verdict | where |", "|---|---|---|---|---|"]
    for target in targets:
        sign = ">=" if target.at_least else "<="
        worst = "" if math.isnan(target.worst) else f"{target.worst:.5g}"
        verdict = target.verdict
        lines.append(f"| {target.name} | {sign} {target.limit:g} | {worst} | {verdict} | {_cell(target.where)} |")
    for section in dict.fromkeys(row.section for row in rows):
        chosen = [row for row in rows if row.section == section]
        figures = list(dict.fromkeys(name for row in chosen for name in row.quality))
        lines += ["", f"## {section}", ""]
        head = ["workload", "setting", "n", "method", "CPU ms, median (min to max)", "x sort", *figures, "broken"]
        lines += [_line(head), "|" + "---|" * len(head)]
        lines += [_line(_values(row, figures)) for row in chosen]
    lines += ["", "## Notes", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _values(row: Row, figures: Sequence[str]) -> list[str]:
    method = row.method + (f" ({row.system})" if row.system else "") + (", lists" if row.returns == "lists" else "")
    time = ""
    if row.runs_ms:
        time = f"{row.median_ms:.3g} ({min(row.runs_ms):.3g} to {max(row.runs_ms):.3g}, {len(row.runs_ms)} runs)"
    ratio = "" if math.isnan(row.sort_ratio) else f"{row.sort_ratio:.2f}"
    quality = [_figure(name, row.quality[name]) if name in row.quality else "" for name in figures]
    broken = ", ".join(f"{name} {value:g}" for name, value in row.violations.items())
    return [row.workload, row.setting, f"{row.num_items:,}", method, time, ratio, *quality, broken]


def _figure(name: str, value: float) -> str:
    if name in ("excess", "gap", "over_offline", "bound_excess"):
        return f"{100 * value:.3f} %"
    return f"{value:,.0f}" if value >= 1000 and value == int(value) else f"{value:.5g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
