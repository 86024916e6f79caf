"""One line an input: ours beside the best of the others.

    workload, setting, n | ours, default | ours, best | best other | fastest other that is no worse than our default

An entry is method, CPU milliseconds and figure. Methods that break a rule (items lost, capacities exceeded) do not
count.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.benchmarks.measuring import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How rows of a section are compared: by which figure (smaller is better), and which of ours is the default."""

    section: str
    figure: str
    default: str
    percent: bool = True


JUDGEMENTS = (
    Judgement(section="pack", figure="excess", default="best_fit_decreasing"),
    Judgement(section="vector", figure="excess", default="best_fit_decreasing"),
    Judgement(section="partition", figure="gap", default="auto"),
    Judgement(section="grid", figure="rank_ratio", default="per_rank", percent=False),
    Judgement(section="grid", figure="sync_ratio", default="per_slot", percent=False),
    Judgement(section="streaming", figure="over_offline", default="look-ahead 1,000"),
)


def summary(rows: Sequence[Row]) -> str:
    """Markdown tables, one a judgement."""
    lines: list[str] = []
    for judgement in JUDGEMENTS:
        found = [line for cell in _cells(rows, judgement) if (line := _line(cell, judgement))]
        if not found:
            continue
        title = f"## {judgement.section}: {judgement.figure}"
        head = ["workload", "setting", "n", "ours, default", "ours, best", "best other", "fastest other, no worse"]
        lines += [title, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head), *found, ""]
    return "\n".join(lines)


def _cells(rows: Sequence[Row], judgement: Judgement) -> Iterator[list[Row]]:
    cells: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.section == judgement.section and judgement.figure in row.quality and not row.violations:
            cells[row.workload, row.setting, row.num_items].append(row)
    yield from cells.values()


def _line(cell: Sequence[Row], judgement: Judgement) -> str:
    def value(row: Row) -> float:
        return row.quality[judgement.figure]

    def entry(row: Row) -> str:
        figure = f"{100 * value(row):.3f} %" if judgement.percent else f"{value(row):.4f}"
        return f"{row.method} {row.median_ms:.3g} ms {figure}"

    ours = [row for row in cell if row.kind == "ours" and row.returns == "arrays"]
    others = [row for row in cell if row.kind != "ours"]
    defaults = [row for row in ours if row.method == judgement.default]
    if not defaults:
        return ""
    default = defaults[0]
    best = min(ours, key=lambda row: (value(row), row.median_ms))
    cells = [default.workload, default.setting, f"{default.num_items:,}", entry(default)]
    cells.append("the same" if best is default or value(best) == value(default) else entry(best))
    cells.append(entry(min(others, key=lambda row: (value(row), row.median_ms))) if others else "")
    equal = [row for row in others if value(row) <= value(default)]
    fastest = min(equal, key=lambda row: row.median_ms, default=None)
    cells.append(f"{entry(fastest)}, {fastest.median_ms / default.median_ms:.3g}x" if fastest else "none")
    return "| " + " | ".join(cells) + " |"
