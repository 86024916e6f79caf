"""A step before and after balancing as two Gantt charts on one time axis: one self-contained SVG.

    title
    before:  caption with measured numbers        a row per rank, a bar per act, idle time grey
    after:   caption with measured numbers        the same axis, so lengths compare by eye
    time axis in ms, legend of (stage, op)

The hue tells the stage, light and dark tell forward and backward; every pair of hues stays apart under the common
forms of colour blindness, and the number in a bar is its micro-batch. Hues repeat after five stages. Colours of text
and background follow the reader's light or dark scheme. All text is escaped, nothing is loaded from outside.
"""

import math
from collections.abc import Iterable, Iterator
from html import escape

from balancer.measured import measure, num_ranks, num_replicas
from balancer.records import ActionRecord, StepRecord
from tools.compared_steps import StepPair

WIDTH_PX = 980
LEFT_PX = 150
RIGHT_PX = 24
ROW_PX = 26
BAR_PX = 20
CAPTION_PX = 54
TITLE_PX = 44
AXIS_PX = 46
LEGEND_PX = 24
LEGEND_COLUMNS = 4
MIN_LABEL_PX = 14
PLOT_PX = WIDTH_PX - LEFT_PX - RIGHT_PX

# (forward, backward) per stage: hues of the Okabe-Ito palette, each in a light and a dark shade.
SHADES = (
    ("#f0b43c", "#a85a00"),
    ("#7cc6ee", "#005a9c"),
    ("#6fcdaa", "#00704f"),
    ("#e3a5c7", "#8e3a6d"),
    ("#efe36a", "#857a00"),
)

STYLE = """\
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-size: 13px; fill: #1b1f24; }
.title { font-size: 17px; font-weight: 600; }
.head { font-weight: 600; }
.small { font-size: 11px; }
.key { font-size: 12px; }
.dim { fill: #57606a; }
.page { fill: #ffffff; }
.lane { fill: #eaeef2; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.end { stroke: #1b1f24; stroke-width: 1.5; stroke-dasharray: 4 3; }
.on-light { fill: #1b1f24; font-size: 11px; }
.on-dark { fill: #ffffff; font-size: 11px; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .dim { fill: #9aa4ae; }
  .page { fill: #0d1117; }
  .lane { fill: #21262d; }
  .grid { stroke: #30363d; }
  .end { stroke: #e6edf3; }
  .on-light { fill: #1b1f24; }
  .on-dark { fill: #ffffff; }
}"""


def render_pair(pair: StepPair) -> str:
    """The SVG document of a step measured with the balancer off and on."""
    records = (pair.before, pair.after)
    ranks = num_ranks(records)
    axis_ms = max(_length_ms(record) for record in records)
    panel_px = CAPTION_PX + ranks * ROW_PX
    kinds = sorted({(action.stage, action.op) for record in records for action in record.actions}, key=_legend_order)
    legend_rows = math.ceil(len(kinds) / LEGEND_COLUMNS)
    height_px = TITLE_PX + 2 * panel_px + AXIS_PX + legend_rows * LEGEND_PX + 12
    title = f"Step {pair.step}, measured with the balancer off and on: the same samples, {_speed(pair.gain)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH_PX} {height_px}" width="{WIDTH_PX}" '
        f'height="{height_px}" role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(_describe(pair, ranks))}</desc>',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="page" width="{WIDTH_PX}" height="{height_px}"/>',
        _text(16, 28, title, "title"),
    ]
    axis_top_px = TITLE_PX + 2 * panel_px
    for name, record, top_px in (
        ("before", pair.before, TITLE_PX),
        ("after", pair.after, TITLE_PX + panel_px),
    ):
        lines += _panel(name, record, ranks, axis_ms, top_px)
    lines += _axis_labels(axis_ms, axis_top_px)
    lines += _legend(kinds, axis_top_px + AXIS_PX)
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _panel(name: str, record: StepRecord, ranks: int, axis_ms: float, top_px: float) -> Iterator[str]:
    head, numbers = _caption(name, record, ranks)
    yield f'<g id="{name}">'
    yield _text(16, top_px + 20, head, "head")
    yield _text(16, top_px + 39, numbers, "dim")
    lanes_px = top_px + CAPTION_PX
    end_px = _x(record.step_ms, axis_ms)
    for x_px in (_x(tick_ms, axis_ms) for tick_ms in _ticks_ms(axis_ms)):
        yield f'<line class="grid" x1="{x_px}" x2="{x_px}" y1="{lanes_px - 4}" y2="{lanes_px + ranks * ROW_PX}"/>'
    for rank in range(ranks):
        lane_px = lanes_px + rank * ROW_PX
        acts = sorted((action for action in record.actions if action.rank == rank), key=lambda act: act.start_ms)
        yield _text(16, lane_px + 15, _row_label(rank, acts), "small")
        lane_end_px = round(end_px - LEFT_PX, 2)
        yield f'<rect class="lane" x="{LEFT_PX}" y="{lane_px}" width="{lane_end_px}" height="{BAR_PX}"/>'
        for action in acts:
            yield _bar(action, axis_ms, lane_px)
    yield f'<line class="end" x1="{end_px}" x2="{end_px}" y1="{lanes_px - 4}" y2="{lanes_px + ranks * ROW_PX - 2}"/>'
    yield "</g>"


def _caption(name: str, record: StepRecord, ranks: int) -> tuple[str, str]:
    replicas = num_replicas([record])
    measured = measure(record.actions, ranks=ranks, replicas=replicas)
    if replicas > 1:
        imbalance = f"imbalance {measured.rank_imbalance:.2f} over {replicas} replicas"
    else:
        imbalance = f"imbalance {measured.microbatch_imbalance:.2f} over micro-batches"
    switch = "off" if name == "before" else "on"
    head = f"{name}: balancer {switch} (policy {record.policy}), step {record.step_ms:.1f} ms"
    numbers = (
        f"bubble_ratio {measured.bubble_ratio:.3f}, {imbalance}, {record.num_microbatches} micro-batch(es) per replica"
    )
    return head, numbers


def _bar(action: ActionRecord, axis_ms: float, lane_px: float) -> str:
    left_px, right_px = _x(action.start_ms, axis_ms), _x(action.end_ms, axis_ms)
    width_px = round(max(right_px - left_px, 0.3), 2)
    label = ""
    if width_px >= MIN_LABEL_PX:
        scheme = "on-light" if action.op == "F" else "on-dark"
        middle_px = round(left_px + width_px / 2, 2)
        label = (
            f'<text class="{scheme}" x="{middle_px}" y="{lane_px + 14}" text-anchor="middle">{action.microbatch}</text>'
        )
    hint = (
        f"{_kind_name(action.stage, action.op)}, micro-batch {action.microbatch}: "
        f"{action.start_ms:.1f} to {action.end_ms:.1f} ms ({action.end_ms - action.start_ms:.1f} ms)"
    )
    # A hair's gap between bars that touch, taken from the bar itself.
    drawn_px = round(width_px - 0.6, 2) if width_px > 3 else width_px
    return (
        f'<g><title>{escape(hint)}</title><rect class="act" x="{left_px}" y="{lane_px}" width="{drawn_px}" '
        f'height="{BAR_PX}" rx="1.5" fill="{_colour(action.stage, action.op)}"/>{label}</g>'
    )


def _axis_labels(axis_ms: float, top_px: float) -> Iterator[str]:
    digits = max(0, -math.floor(math.log10(nice_step_ms(axis_ms))))
    for tick_ms in _ticks_ms(axis_ms):
        x_px, label = _x(tick_ms, axis_ms), f"{tick_ms:.{digits}f}"
        yield f'<text class="small dim" x="{x_px}" y="{top_px + 14}" text-anchor="middle">{label}</text>'
    middle_px = LEFT_PX + PLOT_PX / 2
    note = "ms since the step began; grey: idle; dashed: end of the step; number in a bar: micro-batch"
    yield f'<text class="small dim" x="{middle_px}" y="{top_px + 33}" text-anchor="middle">{note}</text>'


def _ticks_ms(axis_ms: float) -> list[float]:
    step_ms = nice_step_ms(axis_ms)
    return [index * step_ms for index in range(math.floor(axis_ms / step_ms + 1e-9) + 1)]


def nice_step_ms(axis_ms: float) -> float:
    """Distance of the ticks: 1, 2 or 5 times a power of ten, 4 to 10 ticks on the axis."""
    rough = axis_ms / 10
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def _legend(kinds: Iterable[tuple[int, str]], top_px: float) -> Iterator[str]:
    column_px = PLOT_PX / LEGEND_COLUMNS
    for index, (stage, op) in enumerate(kinds):
        row, column = divmod(index, LEGEND_COLUMNS)
        x_px, y_px = LEFT_PX + column * column_px, top_px + row * LEGEND_PX
        yield f'<rect x="{x_px}" y="{y_px + 4}" width="16" height="14" rx="1.5" fill="{_colour(stage, op)}"/>'
        yield _text(x_px + 22, y_px + 15, _kind_name(stage, op), "key")


def _legend_order(kind: tuple[int, str]) -> tuple[int, bool]:
    return kind[0], kind[1] != "F"


def _kind_name(stage: int, op: str) -> str:
    return f"stage {stage} {_module(stage)} {'forward' if op == 'F' else 'backward'}"


def _module(stage: int) -> str:
    """Stage 0 is the encoder in every layout, see `balancer.layout.Layout.stage_ranks`."""
    return "encoder" if stage == 0 else "LLM"


def _row_label(rank: int, acts: Iterable[ActionRecord]) -> str:
    modules = sorted({_module(action.stage) for action in acts}, key=str.lower)
    return f"rank {rank}: {' + '.join(modules) if modules else 'idle'}"


def _colour(stage: int, op: str) -> str:
    return SHADES[stage % len(SHADES)][0 if op == "F" else 1]


def _length_ms(record: StepRecord) -> float:
    return max(record.step_ms, *(action.end_ms for action in record.actions))


def _x(time_ms: float, axis_ms: float) -> float:
    return round(LEFT_PX + time_ms / axis_ms * PLOT_PX, 2)


def _text(x_px: float, y_px: float, text: str, css_class: str) -> str:
    return f'<text class="{css_class}" x="{x_px}" y="{y_px}">{escape(text)}</text>'


def _speed(gain: float) -> str:
    return f"{gain:.2f}x as fast" if gain >= 1 else f"{gain:.2f}x as fast (slower)"


def _describe(pair: StepPair, ranks: int) -> str:
    captions = (_caption(name, record, ranks) for name, record in (("before", pair.before), ("after", pair.after)))
    return "; ".join(f"{head}, {numbers}" for head, numbers in captions)
