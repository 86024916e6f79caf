"""What a training run did: the summary of its steps.jsonl, as numbers and as a table.

Times are those of the run's own measurement. The first step pays for compilation and cold caches, so times are given
as quantiles, never as means.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from balancer.measured import measure, num_ranks, num_replicas
from balancer.printable import printable
from balancer.records import Replaced, StepRecord, read_records
from tools.errors import AnalyzeError, UsageError

STEPS_FILE = "steps.jsonl"
MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Summary of a run; a number that was not measured is NaN.

    Attributes:
        num_steps, first_step, last_step: steps in the log.
        num_ranks: ranks seen in the measured acts.
        policies: policies used, in order of appearance.
        first_loss, last_loss: of the first and last step with a finite loss.
        step_ms_p50, step_ms_p90: wall time of a step.
        data_wait_ms_p50, data_wait_share: waiting for data; the share is of all step time.
        bubble_ratio_p50: from the measured acts.
        measured_imbalance_p50, microbatch_imbalance_p50: of measured busy time, over replicas and over micro-batches.
        predicted_imbalance_before, predicted_imbalance_after: medians, of sequential placement and of the plan.
        bound_distance_p50: predicted makespan / lower bound; 1.0 is optimal.
        fill_p50, samples_per_pack_p50, num_microbatches_p50: of the plans.
        useful_tokens_per_s_p50, executed_tokens_per_s_p50: all ranks.
        label_tokens, llm_tokens: totals.
        num_dropped, num_cut, num_replaced, num_conformed: samples left out, shortened, replaced by stand-ins; media
            made to fit.
        replaced: what was replaced, where and why (at most 10).
        peak_memory_bytes: largest; 0 where unknown.
    """

    num_steps: int
    first_step: int
    last_step: int
    num_ranks: int
    policies: tuple[str, ...]
    first_loss: float
    last_loss: float
    step_ms_p50: float
    step_ms_p90: float
    data_wait_ms_p50: float
    data_wait_share: float
    bubble_ratio_p50: float
    microbatch_imbalance_p50: float
    measured_imbalance_p50: float
    predicted_imbalance_before: float
    predicted_imbalance_after: float
    bound_distance_p50: float
    fill_p50: float
    samples_per_pack_p50: float
    num_microbatches_p50: float
    useful_tokens_per_s_p50: float
    executed_tokens_per_s_p50: float
    label_tokens: int
    llm_tokens: int
    num_dropped: int
    num_cut: int
    num_replaced: int
    num_conformed: int
    replaced: tuple[Replaced, ...]
    peak_memory_bytes: int

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; unknown numbers become None."""
        return {name: _jsonable(value) for name, value in asdict(self).items()}


def read_run(run_folder: Path) -> list[StepRecord]:
    """The records of `run_folder`/steps.jsonl.

    Raises:
        UsageError: no such folder, or no steps.jsonl in it.
        AnalyzeError: no step was finished.
        RecordFormatError: a damaged line; a last line that a crash cut short is left out.
    """
    path = run_folder / STEPS_FILE
    if not run_folder.is_dir():
        raise UsageError(
            f"run folder {run_folder} does not exist or is no folder. Give the folder that balancer-train printed."
        )
    if not path.is_file():
        raise UsageError(f"{run_folder} holds no {STEPS_FILE}, so it is not the folder of a run. Give its --output.")
    records = read_records(path)
    if not records:
        raise AnalyzeError(f"{path} holds no finished step. Train at least one step.")
    return records


def summarise(records: Sequence[StepRecord]) -> RunReport:
    """Summary of one or more records in step order."""
    ranks, replicas = num_ranks(records), num_replicas(records)
    measured = [measure(record.actions, ranks=ranks, replicas=replicas) for record in records]
    losses = [record.loss for record in records if math.isfinite(record.loss)]
    total_ms = sum(record.step_ms for record in records)
    return RunReport(
        num_steps=len(records),
        first_step=records[0].step,
        last_step=records[-1].step,
        num_ranks=ranks,
        policies=tuple(dict.fromkeys(record.policy for record in records)),
        first_loss=losses[0] if losses else math.nan,
        last_loss=losses[-1] if losses else math.nan,
        step_ms_p50=_quantile((record.step_ms for record in records), 0.5),
        step_ms_p90=_quantile((record.step_ms for record in records), 0.9),
        data_wait_ms_p50=_quantile((record.data_wait_ms for record in records), 0.5),
        data_wait_share=sum(record.data_wait_ms for record in records) / total_ms if total_ms else math.nan,
        bubble_ratio_p50=_quantile((step.bubble_ratio for step in measured), 0.5),
        microbatch_imbalance_p50=_quantile((step.microbatch_imbalance for step in measured), 0.5),
        measured_imbalance_p50=_quantile((record.measured_imbalance for record in records), 0.5),
        predicted_imbalance_before=_quantile((record.imbalance_before for record in records), 0.5),
        predicted_imbalance_after=_quantile((record.imbalance_after for record in records), 0.5),
        bound_distance_p50=_quantile(
            (record.makespan_ms / record.lower_bound_ms for record in records if record.lower_bound_ms), 0.5
        ),
        fill_p50=_quantile((record.fill for record in records), 0.5),
        samples_per_pack_p50=_quantile((record.samples_per_pack for record in records), 0.5),
        num_microbatches_p50=_quantile((record.num_microbatches for record in records), 0.5),
        useful_tokens_per_s_p50=_quantile((record.useful_tokens_per_s for record in records), 0.5),
        executed_tokens_per_s_p50=_quantile((record.executed_tokens_per_s for record in records), 0.5),
        label_tokens=sum(record.label_tokens for record in records),
        llm_tokens=sum(record.llm_tokens for record in records),
        num_dropped=sum(len(record.dropped_ids) for record in records),
        num_cut=sum(len(record.cut_ids) for record in records),
        num_replaced=sum(len(record.replaced) for record in records),
        num_conformed=sum(record.conformed for record in records),
        replaced=tuple(replaced for record in records for replaced in record.replaced)[:MAX_LISTED],
        peak_memory_bytes=max(record.peak_memory_bytes for record in records),
    )


def render(report: RunReport) -> RenderableType:
    """The report as a table."""
    table = Table(title="Run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, text in _rows(report):
        table.add_row(name, escape(text))
    return table


def print_report(report: RunReport, console: Console) -> None:
    """Table, then the replaced samples by name."""
    console.print(render(report))
    for replaced in report.replaced:
        text = printable(f"replaced: sample {replaced.sample_id}, {replaced.place}: {replaced.reason}")
        console.print(text, markup=False)
    if report.num_replaced > len(report.replaced):
        console.print(f"and {report.num_replaced - len(report.replaced)} more replaced samples")


def _rows(report: RunReport) -> Iterable[tuple[str, str]]:
    yield "steps", f"{report.num_steps} ({report.first_step} to {report.last_step}) on {report.num_ranks} rank(s)"
    yield "policy", ", ".join(report.policies)
    yield "loss", f"{_number(report.first_loss, 4)} -> {_number(report.last_loss, 4)}"
    yield "step time", f"p50 {_number(report.step_ms_p50)} ms, p90 {_number(report.step_ms_p90)} ms"
    yield "data wait", f"p50 {_number(report.data_wait_ms_p50)} ms, {_percent(report.data_wait_share)} of all step time"
    yield "bubble_ratio", f"{_number(report.bubble_ratio_p50, 3)} (idle share of all ranks, measured)"
    yield (
        "imbalance, predicted",
        f"{_number(report.predicted_imbalance_before, 3)} sequential -> "
        f"{_number(report.predicted_imbalance_after, 3)} plan",
    )
    yield (
        "imbalance, measured",
        f"{_number(report.measured_imbalance_p50, 3)} over replicas, "
        f"{_number(report.microbatch_imbalance_p50, 3)} over micro-batches",
    )
    yield "makespan / lower bound", f"{_number(report.bound_distance_p50, 3)} (predicted)"
    yield "fill", _percent(report.fill_p50)
    yield (
        "samples per pack",
        f"{_number(report.samples_per_pack_p50, 2)} in {_number(report.num_microbatches_p50)} micro-batch(es) "
        "per replica",
    )
    yield (
        "tokens per second",
        f"{_number(report.useful_tokens_per_s_p50, 0)} useful, {_number(report.executed_tokens_per_s_p50, 0)} executed",
    )
    yield "tokens", f"{report.llm_tokens:,} executed, {report.label_tokens:,} of them trained"
    yield (
        "samples",
        f"{report.num_dropped} dropped, {report.num_cut} cut, {report.num_replaced} replaced; "
        f"{report.num_conformed} media made to fit",
    )
    memory = f"{report.peak_memory_bytes / 2**30:.2f} GiB" if report.peak_memory_bytes else "unknown"
    yield "peak memory", memory


def _quantile(values: Iterable[float], q: float) -> float:
    """Quantile of the finite values; NaN when there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return float(np.quantile(finite, q)) if finite else math.nan


def _number(value: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f}" if math.isfinite(value) else "not measured"


def _percent(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "not measured"


def _jsonable(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
