"""The report of `balancer-analyze plan` for people: tables, then what balancing does not help with.

Texts of the data (shards, keys, models, paths) are printed without markup and with control characters replaced.
"""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balancer.printable import printable
from dataloaders.printable import printable as printable_name
from tools.plan_measure import KINDS, PolicyReport
from tools.plan_memory import ASSUMED
from tools.plan_report import COUNTS, DataSummary, LayoutSummary, PlanReport, StepSizes
from tools.plan_what_if import TRAINED, Alternative

MAX_LISTED = 20
SMALL = 0.02
GIB = 2**30


def print_report(report: PlanReport, console: Console) -> None:
    """All of it."""
    for warning in report.warnings:
        _say(console, f"note: {warning}", bold=True)
    _print_data(report.data, console)
    _print_layout(report.layout, report.main_policy, console)
    _print_steps(report, console)
    console.print(_policy_table(report))
    for line in _under_policies(report):
        _say(console, line)
    console.print(_cause_table(report.policies))
    if _most_idle(report):
        _say(console, _most_idle(report))
    for policy in report.policies:
        if policy.error:
            _say(console, f"{policy.policy} {policy.error}")
        elif policy.kept_sequential:
            _say(
                console,
                f"{policy.policy}: sequential was kept in {policy.kept_sequential} of {policy.num_steps} steps, where "
                "it simulates no slower",
            )
    if report.what_if:
        console.print(_what_if_table(report))
        _say(console, TRAINED)
        for other in report.what_if:
            if other.error:
                _say(console, f"{other.encoder} {other.schedule}: {other.error}")
    console.print("Where it does not help:", style="bold")
    for limit in report.limits:
        _say(console, f"  {limit.text}")
    if not report.limits:
        _say(console, "  no limit beside the placement of samples was found in these steps")
    for note in report.notes:
        if not (report.what_if and note == TRAINED):  # said already
            _say(console, f"note: {note}")


def _say(console: Console, text: str, *, bold: bool = False) -> None:
    console.print(printable(text), markup=False, style="bold" if bold else None)


def _print_data(data: DataSummary, console: Console) -> None:
    left = data.num_samples - data.num_planned
    _say(
        console,
        f"{printable_name(data.name)}: {data.num_samples:,} samples, {data.num_planned:,} planned, {left:,} left out",
    )
    if any(data.rules.values()):
        rules = (f"{name} by {printable_name(rule)}" for name, rule in data.rules.items() if rule)
        _say(console, f"  counted: {'; '.join(rules)}")
    for name, count in data.counts.items():
        _say(
            console,
            f"  {COUNTS[name]}: p50 {count.p50:,}, p90 {count.p90:,}, p99 {count.p99:,}, max {count.max:,}, "
            f"mean {count.mean:,.1f}, total {count.total:,}",
        )
    if data.left_out:
        _say(console, "left out (" + ", ".join(f"{reason}: {count:,}" for reason, count in data.reasons.items()) + "):")
    for drop in data.left_out[:MAX_LISTED]:
        place = f"shard {printable_name(drop.shard)}, key {printable_name(drop.key)}"
        _say(console, f"  sample {drop.sample_id}, {place}: {drop.reason}")
    if len(data.left_out) > MAX_LISTED:
        _say(console, f"  and {len(data.left_out) - MAX_LISTED:,} more; --json lists all")


def _print_layout(layout: LayoutSummary, policy: str, console: Console) -> None:
    chunks = "" if layout.num_chunks == 1 else f", {layout.num_chunks} chunks a rank"
    model = printable_name(layout.model)
    _say(
        console,
        f"{model} on {layout.dp_size} replicas x {layout.pp_size} pipeline ranks: encoder {layout.encoder}"
        f"{chunks}, schedule {layout.schedule}, replicas meet per {layout.meet}",
    )
    _say(console, "a micro-batch holds at most " + ", ".join(f"{v:,} {_unit(k)}" for k, v in layout.capacities.items()))
    table = Table(title=f"Pipeline ranks ({policy})", title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("stages")
    for name in ("work share", "x mean", "peak activations", "weights and optimizer"):
        table.add_column(name, justify="right")
    for rank in layout.ranks:
        table.add_row(
            str(rank.rank),
            ", ".join(rank.stages),
            f"{rank.work_share:.1%}",
            _number(rank.relative_work),
            _gib(rank.peak_activation_bytes),
            _gib(rank.state_bytes),
        )
    console.print(table)
    if any(rank.state_bytes is not None for rank in layout.ranks):
        device = layout.device_memory_gib
        _say(console, ASSUMED + ("" if device is None else f"; {layout.hardware} has {device:g} GiB"))


def _print_steps(report: PlanReport, console: Console) -> None:
    rates = "measured costs" if report.layout.measured_costs else "assumed shares of the peak rates"
    meant = f"predicted from {rates}" if report.layout.absolute_times else "nominal: only their ratios mean something"
    asked = "" if report.step_size == f"{_size(report.step_samples)} samples" else f", asked for {report.step_size}"
    _say(
        console,
        f"{len(report.steps)} of {report.steps_per_epoch:,} steps were planned, of {_size(report.step_samples)} "
        f"samples and {_size(report.step_tokens)} LLM tokens{asked}; step times are {meant}",
    )


def _size(sizes: StepSizes) -> str:
    """`32`, or the mean with its range."""
    return f"{sizes.min:,}" if sizes.min == sizes.max else f"{sizes.mean:,.0f} ({sizes.min:,} to {sizes.max:,})"


def _unit_ms(report: PlanReport) -> float | None:
    """What times are printed over where they have no unit: the main policy's mean; None: they are ms."""
    (times,) = (policy.step_ms for policy in report.policies if policy.policy == report.main_policy)
    return None if report.layout.absolute_times or times is None or not times.mean else times.mean


def _policy_table(report: PlanReport) -> Table:
    unit = _unit_ms(report)
    measure = "in ms" if unit is None else f"x the mean of {escape(report.main_policy)}"
    table = Table(title=f"Step time, {measure}", title_justify="left")
    table.add_column("policy")
    for name in (
        *("mean", "p50", "p90", "p99", "max", "x sequential", "x bound"),
        *("DP imbalance", "of labels", "bubble", "fill", "M", "peak activations"),
    ):
        table.add_column(name, justify="right")
    for policy in (*([] if report.before is None else [report.before]), *report.policies):
        table.add_row(*_policy_row(policy, unit))
    return table


def _under_policies(report: PlanReport) -> list[str]:
    """What the columns do not say by themselves."""
    lines = ["of labels: max / mean of label tokens over DP ranks, only a tie-break of placement: it may get less even"]
    ahead = report.lookahead
    if ahead is not None:
        lines.append(
            f"look-ahead of {ahead.lookahead_steps} steps evens steps: {ahead.policy} takes {_number(ahead.p99)}x at "
            f"p99, {_number(ahead.max)}x in the longest step, {_number(ahead.mean)}x on average of the same without it"
        )
    main = next(policy for policy in report.policies if policy.policy == report.main_policy)
    for other in report.what_if:
        if other.min_num_microbatches is not None and (other.relative_time or 1.0) < 1 - SMALL:
            lines.append(
                f"M = {_range(main.num_microbatches)} is the least that fits; --min-num-microbatches "
                f"{other.min_num_microbatches} takes {_number(other.relative_time)}x (simulated)"
            )
    return lines


def _most_idle(report: PlanReport) -> str:
    """The causes that cost most under the main policy; "" where next to nothing is idle."""
    main = next(policy for policy in report.policies if policy.policy == report.main_policy)
    if main.bubbles is None or main.bubble_ratio is None or main.bubble_ratio < SMALL:
        return ""
    first, second, *_ = sorted(main.bubbles.items(), key=lambda item: -item[1])
    causes = [first, second] if second[1] >= SMALL / 4 else [first]
    said = " and ".join(f"{kind.replace('_', ' ')} ({_percent(share)})" for kind, share in causes)
    return (
        f"{main.policy} leaves {_percent(main.bubble_ratio)} of all rank time idle, above all {said}; the lower bound "
        'holds the bubble of the pipeline already, so "none" may bind beside much idle time'
    )


def _policy_row(policy: PolicyReport, unit: float | None) -> list[str]:
    times = policy.step_ms
    if times is None:
        return [escape(policy.policy), *["-"] * 13]
    peak = policy.peak_activation_bytes
    return [
        escape(policy.policy),
        *(_time(value, unit) for value in (times.mean, times.p50, times.p90, times.p99, times.max)),
        _number(policy.relative_time),
        _number(policy.ratio_to_bound, digits=3),
        f"{_number(policy.imbalance_before)} -> {_number(policy.imbalance_after)}",
        f"{_number(policy.label_imbalance_before)} -> {_number(policy.label_imbalance_after)}",
        _percent(policy.bubble_ratio),
        _percent(policy.fill),
        _range(policy.num_microbatches),
        _gib(None if peak is None else max(peak)),
    ]


def _cause_table(policies: tuple[PolicyReport, ...]) -> Table:
    table = Table(title="Idle share of all rank time by cause, and what binds in how many steps", title_justify="left")
    table.add_column("policy")
    for kind in KINDS:
        table.add_column(kind.replace("_", " "), justify="right")
    table.add_column("binds")
    table.add_column("largest bound")
    for policy in policies:
        if policy.bubbles is not None:
            shares = [_percent(policy.bubbles[kind]) for kind in KINDS]
            table.add_row(escape(policy.policy), *shares, _counts(policy.binding), _counts(policy.bounds))
    return table


def _what_if_table(report: PlanReport) -> Table:
    steps = f"{report.what_if_steps} of the steps, {report.main_policy}, simulated"
    table = Table(title=f"The same samples on other layouts ({escape(steps)})", title_justify="left")
    table.add_column("encoder")
    table.add_column("schedule")
    for name in ("x time", "bubble", "busiest rank x mean", "M", "peak activations"):
        table.add_column(name, justify="right")
    for other in report.what_if:
        table.add_row(*_what_if_row(other))
    return table


def _what_if_row(other: Alternative) -> list[str]:
    more = "" if other.min_num_microbatches is None else f", M >= {other.min_num_microbatches}"
    name = [other.encoder + (" (asked for)" if other.chosen else ""), escape(other.schedule) + more]
    if other.relative_time is None:
        return [*name, "cannot run", *["-"] * 4]
    return [
        *name,
        _number(other.relative_time),
        _percent(other.bubble_ratio),
        _number(other.rank_skew),
        _range(other.num_microbatches),
        _gib(other.peak_activation_bytes),
    ]


def _unit(name: str) -> str:
    return {"tokens": "LLM tokens", "items": "media items", "activation_bytes": "bytes of activations"}.get(name, name)


def _time(value_ms: float, unit_ms: float | None) -> str:
    if unit_ms is not None:
        return f"{value_ms / unit_ms:.3f}"
    return f"{value_ms:,.0f}" if value_ms >= 1000 else f"{value_ms:.4g}"


def _number(value: float | None, *, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 3) + 0.0:.1%}"  # + 0.0: no "-0.0 %"


def _range(numbers: tuple[int, int] | None) -> str:
    if numbers is None:
        return "-"
    return str(numbers[0]) if numbers[0] == numbers[1] else f"{numbers[0]} to {numbers[1]}"


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f} GiB"


def _counts(found: dict[str, int] | None) -> str:
    return ", ".join(f"{name} {count}" for name, count in (found or {}).items())
