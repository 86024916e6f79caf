"""The cost of a data set as one self-contained SVG: histograms of LLM tokens and patches, and what makes the cost.

    title
    LLM tokens per sample   two bars a bin: share of the samples, share of the sum
    patches per sample      the same
    shares by modality      one stacked bar a count

Hues, text and the dark scheme are those of `tools.timeline_svg`. All text is escaped, nothing is loaded from outside.
"""

from collections.abc import Iterator, Mapping
from html import escape

from balancer.printable import printable
from tools.cost_histogram import Bin, ticks
from tools.data_report import COLUMNS, DataReport
from tools.timeline_svg import STYLE

WIDTH_PX = 980
LEFT_PX = 70
RIGHT_PX = 24
TITLE_PX = 70
CHART_PX = 180
HEAD_PX = 34
AXIS_PX = 44
ROW_PX = 30
PLOT_PX = WIDTH_PX - LEFT_PX - RIGHT_PX
MAX_LABELS = 14
SAMPLES_COLOUR, SUM_COLOUR = "#7cc6ee", "#a85a00"
MODALITY_COLOURS = {"text": "#00704f", "image": "#f0b43c", "video": "#8e3a6d"}
COUNTED_BY = {"llm_tokens": "LLM tokens", "patches": "patches", "num_items": "media items"}


def render_costs(report: DataReport, name: str) -> str:
    """The SVG document of a report; `name` is what was measured."""
    panels = [(column, report.histograms[column]) for column in report.histograms if report.histograms[column]]
    panel_px = HEAD_PX + CHART_PX + AXIS_PX
    shares_px = TITLE_PX + len(panels) * panel_px
    height_px = shares_px + HEAD_PX + ROW_PX * (len(COUNTED_BY) + 1) + 16
    title = printable(f"What {name} costs: {report.num_usable:,} usable samples")
    rules = printable("; ".join(report.rules.values()))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height_px}" width="{WIDTH_PX}" '
        f'height="{height_px}" role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(rules)}</desc>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" width="{WIDTH_PX}" height="{height_px}"/>',
        _text(16, 28, title, "title"),
        _text(16, 50, rules[:150], "dim small"),
    ]
    for number, (column, bins) in enumerate(panels):
        lines += _panel(COLUMNS.get(column, column), bins, TITLE_PX + number * panel_px)
    lines += _shares(report.modality_shares, shares_px)
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _panel(name: str, bins: tuple[Bin, ...], top_px: float) -> Iterator[str]:
    most = max(max(row.sample_share, row.total_share) for row in bins) or 1.0
    base_px = top_px + HEAD_PX + CHART_PX
    yield _text(16, top_px + 18, f"{name} per sample", "head")
    yield from _key(top_px)
    for share in (0.25, 0.5, 0.75, 1.0):
        if share <= most * 1.001:
            y_px = round(base_px - share / most * CHART_PX, 2)
            yield f'<line class="grid" x1="{LEFT_PX}" x2="{WIDTH_PX - RIGHT_PX}" y1="{y_px}" y2="{y_px}"/>'
            yield _label(LEFT_PX - 8, y_px + 4, f"{share:.0%}", "end")
    step_px = PLOT_PX / len(bins)
    for index, row in enumerate(bins):
        left_px = LEFT_PX + index * step_px
        hint = (
            f"{row.low:,} to {row.high:,}: {row.samples:,} samples ({row.sample_share:.2%}) with {row.total_share:.2%} "
            f"of the sum"
        )
        yield f"<g><title>{escape(hint)}</title>"
        for half, (share, colour) in enumerate(((row.sample_share, SAMPLES_COLOUR), (row.total_share, SUM_COLOUR))):
            bar_px = round(share / most * CHART_PX, 2)
            x_px, width_px = round(left_px + step_px * (0.08 + 0.42 * half), 2), round(step_px * 0.4, 2)
            yield (
                f'<rect class="bar" x="{x_px}" y="{round(base_px - bar_px, 2)}" width="{width_px}" height="{bar_px}" '
                f'fill="{colour}"/>'
            )
        yield "</g>"
    yield f'<line class="grid" x1="{LEFT_PX}" x2="{WIDTH_PX - RIGHT_PX}" y1="{base_px}" y2="{base_px}"/>'
    for index, row in ticks(bins, MAX_LABELS):
        yield _label(LEFT_PX + index * step_px, base_px + 16, f"{row.low:,}", "start")


def _key(top_px: float) -> Iterator[str]:
    for x_px, colour, name in ((300, SAMPLES_COLOUR, "share of the samples"), (480, SUM_COLOUR, "share of the sum")):
        yield f'<rect x="{x_px}" y="{top_px + 7}" width="16" height="12" fill="{colour}"/>'
        yield _text(x_px + 22, top_px + 18, name, "key")


def _shares(shares: Mapping[str, Mapping[str, float]], top_px: float) -> Iterator[str]:
    yield _text(16, top_px + 18, "What makes the cost", "head")
    for number, (kind, colour) in enumerate(MODALITY_COLOURS.items()):
        x_px = 300 + 100 * number
        yield f'<rect x="{x_px}" y="{top_px + 7}" width="16" height="12" fill="{colour}"/>'
        yield _text(x_px + 22, top_px + 18, kind, "key")
    for row, (column, name) in enumerate(COUNTED_BY.items()):
        y_px = top_px + HEAD_PX + row * ROW_PX
        yield _text(16, y_px + 15, name, "small")
        left_px = 140.0
        for kind, colour in MODALITY_COLOURS.items():
            share = shares.get(column, {}).get(kind, 0.0)
            width_px = round(share * (WIDTH_PX - RIGHT_PX - 140), 2)
            if width_px > 0:
                hint = escape(f"{kind}: {share:.1%} of the {name}")
                at = f'x="{round(left_px, 2)}" y="{y_px}" width="{width_px}" height="20"'
                yield f'<g><title>{hint}</title><rect class="share" {at} fill="{colour}"/></g>'
            left_px += width_px


def _text(x_px: float, y_px: float, text: str, css_class: str) -> str:
    return f'<text class="{css_class}" x="{x_px}" y="{y_px}">{escape(text)}</text>'


def _label(x_px: float, y_px: float, text: str, anchor: str) -> str:
    at = f'x="{round(x_px, 2)}" y="{round(y_px, 2)}"'
    return f'<text class="small dim" {at} text-anchor="{anchor}">{escape(text)}</text>'
