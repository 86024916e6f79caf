"""Speed against excess of the section `pack`, as one self-contained SVG.

    a panel an input (workload, capacity)     y: bins above the bound in percent, logarithmic, 0 at the bottom
                                              x: CPU time, logarithmic;  a numbered mark a method
    legend: number, method, system

Down and left is better. Shape and colour tell ours, algorithms of public systems written anew, and installed packages;
a hollow mark builds Python lists where ours could return arrays. All text is escaped, nothing is loaded from outside.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from tools.benchmarks.measuring import Kind, Row
from tools.timeline_svg import STYLE

PANEL_WIDTH_PX, PANEL_HEIGHT_PX = 490, 300
LEFT_PX, RIGHT_PX, TOP_PX, BOTTOM_PX = 62, 44, 34, 40
PLOT_WIDTH_PX = PANEL_WIDTH_PX - LEFT_PX - RIGHT_PX
PLOT_HEIGHT_PX = PANEL_HEIGHT_PX - TOP_PX - BOTTOM_PX
TITLE_PX = 44
LEGEND_ROW_PX = 20
LEGEND_COLUMNS = 2
PANEL_COLUMNS = 2
MAX_PANELS = 6
LEAST_POWER = -5  # excess of 0.001 % and below is drawn on the bottom line
MARK_STYLE = """\
.ours { fill: #0a5cad; stroke: #0a5cad; }
.baseline { fill: #a85a00; stroke: #a85a00; }
.peer { fill: #8e3a6d; stroke: #8e3a6d; }
.hollow { fill-opacity: 0; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  .ours { fill: #6cb6ff; stroke: #6cb6ff; }
  .baseline { fill: #f0b43c; stroke: #f0b43c; }
  .peer { fill: #e3a5c7; stroke: #e3a5c7; }
}"""
KINDS: Mapping[Kind, str] = {"ours": "ours", "baseline": "algorithm of a public system", "peer": "installed package"}

_Method = tuple[Kind, str]


def speed_against_excess(rows: Sequence[Row]) -> str:
    """The document: up to six inputs of the n that has most of them, 8,192 tokens first."""
    panels = _panels(rows)
    numbers: dict[_Method, int] = {}
    for row in sorted((row for panel in panels for row in panel), key=lambda row: list(KINDS).index(row.kind)):
        numbers.setdefault((row.kind, row.method), len(numbers) + 1)
    panels_px = math.ceil(len(panels) / PANEL_COLUMNS) * PANEL_HEIGHT_PX
    legend_rows = math.ceil(len(numbers) / LEGEND_COLUMNS)
    width_px = PANEL_COLUMNS * PANEL_WIDTH_PX
    height_px = TITLE_PX + panels_px + (legend_rows + 1) * LEGEND_ROW_PX + 12
    title = "Packing: CPU time against bins above the lower bound"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px} {height_px}" width="{width_px}" '
        f'height="{height_px}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f"<style>\n{STYLE}\n{MARK_STYLE}\n</style>",
        f'<rect class="page" width="{width_px}" height="{height_px}"/>',
        _text(16, 28, title, "title"),
    ]
    for index, panel in enumerate(panels):
        line, column = divmod(index, PANEL_COLUMNS)
        lines += _panel(panel, numbers, column * PANEL_WIDTH_PX, TITLE_PX + line * PANEL_HEIGHT_PX)
    systems = {(row.kind, row.method): row.system for panel in panels for row in panel}
    lines += _legend(numbers, systems, TITLE_PX + panels_px, legend_rows)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panels(rows: Sequence[Row]) -> list[list[Row]]:
    cells: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.section == "pack" and row.median_ms > 0:
            cells.setdefault((row.setting, row.workload, row.num_items), []).append(row)
    sizes = [num_items for _, _, num_items in cells]
    usual = max(sizes, key=sizes.count, default=0)
    chosen = [key for key in cells if key[2] == usual]
    chosen.sort(key=lambda key: (not key[0].startswith("8,192"), -len(cells[key])))
    return [cells[key] for key in chosen[:MAX_PANELS]]


def _panel(rows: Sequence[Row], numbers: Mapping[_Method, int], left_px: float, top_px: float) -> Iterator[str]:
    times = [row.median_ms for row in rows]
    low = math.floor(math.log10(min(times)))
    high = max(math.ceil(math.log10(max(times))), low + 1)
    largest = max(row.quality["excess"] for row in rows)
    most = max(math.ceil(math.log10(largest)) if largest > 0 else LEAST_POWER, LEAST_POWER + 1)
    left_px, top_px = left_px + LEFT_PX, top_px + TOP_PX

    def x_of(value: float) -> float:
        return left_px + PLOT_WIDTH_PX * (math.log10(value) - low) / (high - low)

    def y_of(value: float) -> float:
        power = max(math.log10(value), LEAST_POWER) if value > 0 else LEAST_POWER
        return top_px + PLOT_HEIGHT_PX * (most - power) / (most - LEAST_POWER)

    first = rows[0]
    yield _text(left_px, top_px - 14, f"{first.workload}, {first.setting}, {first.num_items:,} samples", "head")
    right_px, bottom_px = left_px + PLOT_WIDTH_PX, top_px + PLOT_HEIGHT_PX
    for power in range(low, high + 1):
        x = x_of(10.0**power)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top_px}" y2="{bottom_px}"/>'
        yield _text(x, bottom_px + 30, f"{10.0**power:g} ms", "small dim", anchor="middle")
    for power in range(LEAST_POWER, most + 1):
        y = y_of(10.0**power)
        yield f'<line class="grid" x1="{left_px}" x2="{right_px}" y1="{y:.1f}" y2="{y:.1f}"/>'
        label = f"{100 * 10.0**power:g} %" if power > LEAST_POWER else "0 %"
        yield _text(left_px - 8, y + 4, label, "small dim", anchor="end")
    last_px = -math.inf
    for rank, row in enumerate(sorted(rows, key=lambda row: (y_of(row.quality["excess"]), row.median_ms))):
        x, y = x_of(row.median_ms), y_of(row.quality["excess"])
        told = f"{row.method}: {row.median_ms:.3g} ms, {100 * row.quality['excess']:.3f} % above the bound"
        yield _mark(row, x, y, told + (", breaks a capacity" if row.violations else ""))
        # Numbers of neighbouring marks go above and below in turn.
        below = abs(x - last_px) < 16 and rank % 2 == 1
        yield _text(x, y + (17 if below else -8), str(numbers[row.kind, row.method]), "small", anchor="middle")
        last_px = x


def _legend(
    numbers: Mapping[_Method, int], systems: Mapping[_Method, str], top_px: float, num_rows: int
) -> Iterator[str]:
    for (kind, method), number in numbers.items():
        column, line = divmod(number - 1, num_rows)
        x, y = 24 + column * PANEL_WIDTH_PX, top_px + LEGEND_ROW_PX * (line + 1)
        yield _shape(kind, "", x + 26, y - 4, "")
        system = systems[kind, method]
        yield _text(x, y, str(number), "small")
        yield _text(x + 40, y, f"{method} ({system or KINDS[kind]})", "key")
    note = (
        "Circle: ours. Square: algorithm of a public system. Diamond: installed package. Hollow: ours as Python lists."
    )
    yield _text(24, top_px + LEGEND_ROW_PX * (num_rows + 1), note, "small dim")


def _mark(row: Row, x: float, y: float, told: str) -> str:
    style = " hollow" if row.kind == "ours" and row.returns == "lists" else ""
    return _shape(row.kind, style, x, y, f"<title>{escape(told)}</title>")


def _shape(kind: str, style: str, x: float, y: float, inside: str) -> str:
    if kind == "ours":
        return f'<circle class="{kind}{style}" cx="{x:.1f}" cy="{y:.1f}" r="5">{inside}</circle>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if kind == "peer" else ""
    return f'<rect class="{kind}{style}" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8"{turn}>{inside}</rect>'


def _text(x: float, y: float, text: str, style: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>'
