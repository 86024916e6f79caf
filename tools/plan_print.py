"""The report of `balancer-analyze plan` for people: tables, then what balancing does not help with.

Texts of the data (shards, keys, models, paths) are printed without markup and with control characters replaced.
"""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balancer.printable import printable
from dataloaders.printable import printable as printable_name
from tools.plan_measure import KINDS, PolicyReport
from tools.plan_report import COUNTS, DataSummary, LayoutSummary, PlanReport
from tools.plan_what_if import Alternative

MAX_LISTED = 20
GIB = 2**30


def print_report(report: PlanReport, console: Console) -> None:
    """All of it."""
    _print_data(report.data, console)
    _print_layout(report.layout, report.main_policy, console)
    _print_steps(report, console)
    console.print(_policy_table(report))
    console.print(_cause_table(report.policies))
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
        for other in report.what_if:
            if other.error:
                _say(console, f"{other.encoder} {other.schedule}: {other.error}")
    console.print("Where it does not help:", style="bold")
    for limit in report.limits:
        _say(console, f"  {limit.text}")
    if not report.limits:
        _say(console, "  no limit beside the placement of samples was found in these steps")
    for note in report.notes:
        _say(console, f"note: {note}")


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False)


def _print_data(data: DataSummary, console: Console) -> None:
    left = data.num_samples - data.num_planned
    _say(
        console,
        f"{printable_name(data.name)}: {data.num_samples:,} samples, {data.num_planned:,} planned, {left:,} left out",
    )
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
    for name in ("work share", "x mean", "peak activations"):
        table.add_column(name, justify="right")
    for rank in layout.ranks:
        table.add_row(
            str(rank.rank),
            ", ".join(rank.stages),
            f"{rank.work_share:.1%}",
            _number(rank.relative_work),
            _gib(rank.peak_activation_bytes),
        )
    console.print(table)


def _print_steps(report: PlanReport, console: Console) -> None:
    rates = "measured costs" if report.layout.measured_costs else "assumed shares of the peak rates"
    meant = f"predicted from {rates}" if report.layout.absolute_times else "nominal: only their ratios mean something"
    _say(
        console,
        f"{len(report.steps)} of {report.steps_per_epoch:,} steps of {report.step_size} were planned; step times are "
        f"{meant}",
    )


def _policy_table(report: PlanReport) -> Table:
    absolute = report.layout.absolute_times
    table = Table(title=f"Step time{'' if absolute else ' (nominal)'}, in ms", title_justify="left")
    table.add_column("policy")
    for name in (
        *("mean", "p50", "p90", "p99", "x sequential", "x bound"),
        *("DP imbalance", "of labels", "bubble", "fill", "M", "peak activations"),
    ):
        table.add_column(name, justify="right")
    for policy in report.policies:
        table.add_row(*_policy_row(policy))
    return table


def _policy_row(policy: PolicyReport) -> list[str]:
    times = policy.step_ms
    if times is None:
        return [escape(policy.policy), *["-"] * 12]
    peak = policy.peak_activation_bytes
    return [
        escape(policy.policy),
        *(_ms(value) for value in (times.mean, times.p50, times.p90, times.p99)),
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


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


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
