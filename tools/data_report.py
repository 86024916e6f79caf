"""What a data set holds and costs, from headers alone: counts by modality, distributions, tails, unusable samples.

    --data -> TarSource -> scan (headers of images and videos, text through the tokenizer; no pixel is decoded)
           -> CostIndex -> DataReport -> table or JSON

The scan reads every record once and is not cached.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balancer.printable import printable
from dataloaders.estimators import estimator_from_config
from dataloaders.index import Confidence, CostIndex
from dataloaders.scan import Modalities, count_modalities, scan_source
from dataloaders.source import SampleSource
from dataloaders.tar_source import TarSource

TrainOn = Literal["assistant", "last", "all"]

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
COLUMNS = {
    "llm_tokens": "LLM tokens",
    "label_tokens": "label tokens",
    "visual_tokens": "visual tokens",
    "patches": "patches",
    "num_items": "media items",
}
NUM_LARGEST = 5
MAX_LISTED = 20
TAIL_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distribution of one count over the usable samples.

    Attributes:
        quantiles: min, p50, p90, p99, max.
        mean, total: over the samples.
        tail_share: share of the total that the largest 1 % of the samples hold (at least one sample).
    """

    quantiles: dict[str, int]
    mean: float
    total: int
    tail_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeSample:
    """One of the longest samples."""

    sample_id: int
    place: str
    llm_tokens: int
    patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusableSample:
    """A sample that cannot be trained on, where it is and why."""

    sample_id: int
    place: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Summary of a data set.

    Attributes:
        num_samples: all of them; num_usable: those that can be trained on.
        modalities: samples and media by kind.
        distributions: per count, see COLUMNS; empty when nothing is usable.
        num_without_labels: usable samples without a label token (they cost time and teach nothing).
        num_estimated: usable samples with a medium whose counts are estimated, not read.
        largest: the samples with the most LLM tokens.
        notes: likely slips in how the shards were built, one sentence each.
        reasons: unusable samples by reason.
        unusable: the unusable samples.
    """

    num_samples: int
    num_usable: int
    modalities: Modalities
    distributions: dict[str, Distribution]
    num_without_labels: int
    num_estimated: int
    largest: tuple[LargeSample, ...]
    notes: tuple[str, ...]
    reasons: dict[str, int]
    unusable: tuple[UnusableSample, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def report_on(
    data: str,
    *,
    processor: Path | None = None,
    train_on: TrainOn = "assistant",
    apply_orientation: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> DataReport:
    """Scan `data` and summarise it.

    Args:
        data: shards, with braces expanded.
        processor: model folder that names the token rule; None takes the published Qwen2.5-VL settings.
        train_on: which turns carry labels.
        apply_orientation: whether images are turned as their EXIF data says.
        progress: called with (samples done, samples in all).

    Raises:
        DataError: a missing or damaged shard, or a model folder without a known rule. Bad samples are rows, not errors.
    """
    estimator = estimator_from_config({"model_type": "qwen2_5_vl"} if processor is None else processor)
    source = TarSource(data)
    index = scan_source(source, estimator, train_on=train_on, apply_orientation=apply_orientation, progress=progress)
    return summarise(index, source)


def summarise(index: CostIndex, source: SampleSource) -> DataReport:
    """Summary of an index; `source` names the places."""
    samples = index.samples
    usable = np.asarray(samples["confidence"]) != Confidence.UNUSABLE
    ids = np.flatnonzero(usable)
    bad = tuple(
        UnusableSample(sample_id=item.sample_id, place=item.place, reason=str(item.reason), message=item.message)
        for item in index.bad
    )
    return DataReport(
        num_samples=len(index),
        num_usable=len(ids),
        modalities=count_modalities(index),
        distributions={name: _distribution(np.asarray(samples[name])[ids]) for name in COLUMNS} if len(ids) else {},
        num_without_labels=int((np.asarray(samples["label_tokens"])[ids] == 0).sum()),
        num_estimated=int((np.asarray(samples["confidence"])[ids] == Confidence.ESTIMATED).sum()),
        largest=_largest(samples, source, ids),
        notes=tuple(source.report.lines()) if isinstance(source, TarSource) else (),
        reasons=dict(Counter(item.reason for item in bad).most_common()),
        unusable=bad,
    )


def print_report(report: DataReport, console: Console) -> None:
    """Tables of counts and distributions, then what stands out, by name."""
    console.print(f"{report.num_samples} samples, {report.num_usable} usable", style="bold")
    console.print(_modality_table(report))
    if report.distributions:
        console.print(_distribution_table(report))
    if report.largest:
        console.print("Largest samples:", style="bold")
    for item in report.largest:
        console.print(f"  {item.llm_tokens:,} LLM tokens, {item.patches:,} patches: {escape(item.place)}")
    for note in report.notes:
        console.print(f"note: {note}", markup=False)
    if report.num_without_labels:
        console.print(f"{report.num_without_labels} samples have no label token: they cost time and teach nothing")
    if report.num_estimated:
        console.print(
            f"{report.num_estimated} samples hold a medium whose counts are estimated, not read from its header"
        )
    if report.unusable:
        reasons = ", ".join(f"{escape(reason)}: {count}" for reason, count in report.reasons.items())
        console.print(f"Unusable samples ({reasons}):", style="bold")
    for bad in report.unusable[:MAX_LISTED]:
        # Most messages name their place themselves.
        place = "" if bad.place in bad.message else f"{bad.place}: "
        console.print(printable(f"  {bad.reason}: {place}{bad.message}"), markup=False)
    if len(report.unusable) > MAX_LISTED:
        console.print(f"  and {len(report.unusable) - MAX_LISTED} more; --json lists all")


def _distribution(values: NDArray[Any]) -> Distribution:
    ordered = np.sort(values.astype(np.int64))
    total = int(ordered.sum())
    in_tail = max(1, round(len(ordered) * TAIL_SHARE))
    return Distribution(
        # The smallest value that this share of the samples does not exceed: always a value that occurs.
        quantiles={name: int(np.quantile(ordered, q, method="inverted_cdf")) for name, q in QUANTILES.items()},
        mean=float(ordered.mean()),
        total=total,
        tail_share=int(ordered[-in_tail:].sum()) / total if total else 0.0,
    )


def _largest(
    samples: Mapping[str, NDArray[Any]], source: SampleSource, ids: NDArray[np.int64]
) -> tuple[LargeSample, ...]:
    lengths = np.asarray(samples["llm_tokens"])[ids].astype(np.int64)
    order = ids[np.argsort(-lengths, kind="stable")[:NUM_LARGEST]]
    return tuple(
        LargeSample(
            sample_id=int(i),
            place=source.place(int(i)),
            llm_tokens=int(samples["llm_tokens"][i]),
            patches=int(samples["patches"][i]),
        )
        for i in order
    )


def _modality_table(report: DataReport) -> Table:
    table = Table(title="Samples and media by kind", title_justify="left")
    for name in asdict(report.modalities):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{count:,}" for count in asdict(report.modalities).values()))
    return table


def _distribution_table(report: DataReport) -> Table:
    table = Table(title="Per sample", title_justify="left")
    table.add_column("count")
    for name in (*QUANTILES, "mean", "total", "in top 1 %"):
        table.add_column(name, justify="right")
    for name, distribution in report.distributions.items():
        table.add_row(
            COLUMNS[name],
            *(f"{value:,}" for value in distribution.quantiles.values()),
            f"{distribution.mean:,.1f}",
            f"{distribution.total:,}",
            f"{distribution.tail_share:.1%}",
        )
    return table
