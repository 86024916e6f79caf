"""What a data set holds and costs, from headers alone: by modality and shard, distributions, tails, unusable samples.

    data -> open_source -> scan (headers of images and videos, text through the tokenizer; no pixel is decoded)
           -> CostIndex -> DataReport -> tables, JSON or SVG
    folder of an index ------^

A scan for a report reads every record once and is not cached; `balancer-analyze index` keeps it.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balancer.printable import printable
from dataloaders.counts import MediaKind
from dataloaders.errors import IndexFormatError, SourceError
from dataloaders.estimators import Preprocessing
from dataloaders.index import Confidence, CostIndex
from dataloaders.index_format import META
from dataloaders.open_source import named_data, open_source
from dataloaders.printable import printable as printable_name
from dataloaders.scan import Modalities, count_modalities, scan_source
from dataloaders.scan_rows import text_rule
from dataloaders.shard_scan import shard_notes
from dataloaders.storage import Storage
from dataloaders.tar_source import TarSource
from tools.cost_histogram import Bin, histogram, histogram_table
from tools.errors import UsageError
from tools.model_folder import TextRule, TrainOn, load_encoder, load_estimator, load_rules
from tools.reach import Reach

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
COLUMNS = {
    "llm_tokens": "LLM tokens",
    "label_tokens": "label tokens",
    "visual_tokens": "visual tokens",
    "patches": "patches",
    "num_items": "media items",
}
HISTOGRAMS = ("llm_tokens", "patches")
NUM_LARGEST = 5
NUM_SHARDS = 5
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
class ShardCost:
    """What the usable samples of one shard cost, and its shares of the whole."""

    shard: str
    samples: int
    llm_tokens: int
    patches: int
    token_share: float
    patch_share: float


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
        rules: what media and text were counted by, in words.
        distributions: per count, see COLUMNS; empty when nothing is usable.
        histograms: per count of HISTOGRAMS, in bins that double.
        modality_shares: for `llm_tokens`, `patches` and `num_items`: share of `text`, `image` and `video`.
        shards: the shards with the most LLM tokens; num_shards: of them all.
        num_without_labels: usable samples without a label token (they cost time and teach nothing).
        num_estimated: usable samples with counts that are estimated: a medium without an exact header, or text that was
            counted roughly.
        num_clamped: usable samples with a medium that was clamped to what the processor takes.
        largest: the samples with the most LLM tokens.
        notes: likely slips in how the shards were built, one sentence each.
        reasons: unusable samples by reason.
        unusable: the unusable samples.
    """

    num_samples: int
    num_usable: int
    rules: dict[str, str]
    modalities: Modalities
    distributions: dict[str, Distribution]
    histograms: dict[str, tuple[Bin, ...]]
    modality_shares: dict[str, dict[str, float]]
    shards: tuple[ShardCost, ...]
    num_shards: int
    num_without_labels: int
    num_estimated: int
    num_clamped: int
    largest: tuple[LargeSample, ...]
    notes: tuple[str, ...]
    reasons: dict[str, int]
    unusable: tuple[UnusableSample, ...]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def report_on(
    data: str | Sequence[str],
    *,
    processor: Path | None = None,
    text: TextRule = "auto",
    train_on: TrainOn | None = None,
    preprocessing: Preprocessing | None = None,
    apply_orientation: bool = True,
    media_root: str | None = None,
    reached: Reach | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DataReport:
    """Scan `data`, or open it where it is an index, and summarise it.

    Args:
        data: what `open_source` takes, with braces expanded; or the folder of an index.
        processor: model folder that names the token rule; None takes the published Qwen2.5-VL settings. With an index,
            the model that it must have been made for.
        text: how text is counted, see `tools.model_folder`.
        train_on: which turns carry labels; None: the answers, or what the index has.
        preprocessing: library that resizes media first, see `estimator_from_config`.
        apply_orientation: whether images are turned as their EXIF data says; an index answers in its notes.
        media_root: where paths of media start from, for other data than tars.
        reached: how data are reached; None: the default storage, and no table of members is kept.
        progress: called with (samples done, samples in all).

    Raises:
        UsageError: neither an index nor data, or no model folder; or `media_root` for an index or tars.
        DataError: a missing or damaged shard, or a model folder without a known rule. Bad samples are rows, not errors.
        IndexFormatError: a damaged index, or one that was made for another model, text rule, labelling or orientation.
    """
    urls = [data] if isinstance(data, str) else list(data)
    if len(urls) == 1 and is_index(urls[0]):
        if media_root is not None:
            raise UsageError("--media-root: an index reads no media. Leave it out.")
        index = CostIndex.open(Path(urls[0]).expanduser())
        _check_index(
            index,
            processor=processor,
            text=text,
            train_on=train_on,
            preprocessing=preprocessing,
            apply_orientation=apply_orientation,
        )
        return summarise(index, shard_notes(index.shards))
    indices = [url for url in urls if is_index(url)]
    if indices:
        raise UsageError(f"{indices[0]} is an index; name one index alone, or data.")
    for url in urls:
        check_named(url)
    rules = load_rules(processor, text=text, train_on=train_on or "assistant", preprocessing=preprocessing)
    reached = reached or Reach(storage=Storage(), members=None)
    source = open_source(
        urls[0] if len(urls) == 1 else urls, media_root=media_root, storage=reached.storage, members=reached.members
    )
    index = scan_source(
        source, rules.estimator, encoder=rules.encoder, apply_orientation=apply_orientation, progress=progress
    )
    notes = source.report.lines() if isinstance(source, TarSource) else []
    return summarise(index, [*notes, *([rules.note] if rules.note else [])])


def is_index(name: str) -> bool:
    """Whether this is the folder of an index."""
    return (Path(name).expanduser() / META).is_file()


def check_named(name: str) -> None:
    """Refuse what can be neither an index nor data; `open_source` judges names of files."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        try:
            named_data(name)
        except SourceError as error:
            raise UsageError(f"{name} is neither an index (no {META}) nor data: {error}") from None
    elif not os.path.exists(path) and not re.search(r"\.\w+$|[:*?\[{]", name):
        raise UsageError(f"{name} is neither an index (no such folder) nor data. Check the path.")


def _check_index(
    index: CostIndex,
    *,
    processor: Path | None,
    text: TextRule,
    train_on: TrainOn | None,
    preprocessing: Preprocessing | None,
    apply_orientation: bool,
) -> None:
    """Refuse an index that was made for another model, text rule, labelling or option than asked for."""
    differing = []
    if processor is not None:
        estimator = load_estimator(processor, preprocessing=preprocessing)
        if estimator.fingerprint != index.key.estimator:
            differing.append(f"its media are counted by {index.rules.get('media')!r}, not by {estimator.rule!r}")
    elif preprocessing is not None:
        raise UsageError(
            f"--preprocessing {preprocessing}: an index has its own. Leave it out, or give --model too to compare them."
        )
    if text != "auto":
        encoder, _ = load_encoder(processor, text, "assistant")
        if encoder.fingerprint != index.key.tokenizer:
            differing.append(f"its text is counted by {index.rules.get('text')!r}, not by {text_rule(encoder)!r}")
    if not apply_orientation and index.key.apply_orientation:
        differing.append("its images are turned as their EXIF orientation says")
    if train_on is not None and train_on != index.key.train_on:
        differing.append(f"its labels are on {index.key.train_on!r}, not on {train_on!r}")
    if differing:
        raise IndexFormatError(
            "; ".join(differing), place=str(index.folder), remedy="Leave these options out, or build the index again."
        )


def summarise(index: CostIndex, notes: Sequence[str] = ()) -> DataReport:
    """Summary of an index; `notes` are what its header pass noticed."""
    samples = index.samples
    if not index.key.apply_orientation:
        notes = [*notes, "images are measured as they are stored, not as their EXIF orientation turns them"]
    usable = np.asarray(samples["confidence"]) != Confidence.UNUSABLE
    ids = np.flatnonzero(usable)
    bad = tuple(
        UnusableSample(sample_id=item.sample_id, place=item.place, reason=str(item.reason), message=item.message)
        for item in index.bad
    )
    shards, num_shards = _shard_costs(index, ids)
    return DataReport(
        num_samples=len(index),
        num_usable=len(ids),
        rules=dict(index.rules),
        modalities=count_modalities(index),
        distributions={name: _distribution(np.asarray(samples[name])[ids]) for name in COLUMNS} if len(ids) else {},
        histograms={name: histogram(np.asarray(samples[name])[ids]) for name in HISTOGRAMS},
        modality_shares=_modality_shares(index),
        shards=shards,
        num_shards=num_shards,
        num_without_labels=int((np.asarray(samples["label_tokens"])[ids] == 0).sum()),
        num_estimated=int((np.asarray(samples["confidence"])[ids] == Confidence.ESTIMATED).sum()),
        num_clamped=int(np.asarray(samples["clamped"])[ids].sum()),
        largest=_largest(index, ids),
        notes=tuple(notes),
        reasons=dict(Counter(item.reason for item in bad).most_common()),
        unusable=bad,
    )


def print_report(report: DataReport, console: Console) -> None:
    """Tables of counts and distributions, then what stands out, by name."""
    console.print(f"{report.num_samples} samples, {report.num_usable} usable", style="bold")
    for what, rule in report.rules.items():
        console.print(printable(f"{what}: {rule}"), markup=False)
    console.print(_modality_table(report))
    if report.distributions:
        console.print(_distribution_table(report))
        for name, bins in report.histograms.items():
            console.print(histogram_table(f"{COLUMNS[name]} per sample", bins))
        console.print(_share_table(report))
        console.print(_shard_table(report))
    if report.largest:
        console.print("Largest samples:", style="bold")
    for item in report.largest:
        counts = f"{item.llm_tokens:,} LLM tokens, {item.patches:,} patches"
        console.print(f"  {counts}: {printable(item.place)}", markup=False)
    for note in report.notes:
        console.print(printable(f"note: {note}"), markup=False)
    if report.num_without_labels:
        console.print(f"{report.num_without_labels} samples have no label token: they cost time and teach nothing")
    if report.num_estimated:
        console.print(
            f"{report.num_estimated} samples have estimated counts: text without its tokenizer, or a medium without an "
            f"exact header"
        )
    if report.num_clamped:
        console.print(f"{report.num_clamped} samples hold a medium that is clamped to what the processor takes")
    if report.unusable:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in report.reasons.items())
        console.print(printable(f"Unusable samples ({reasons}):"), style="bold", markup=False)
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


def _largest(index: CostIndex, ids: NDArray[np.int64]) -> tuple[LargeSample, ...]:
    lengths = np.asarray(index.samples["llm_tokens"])[ids].astype(np.int64)
    order = ids[np.argsort(-lengths, kind="stable")[:NUM_LARGEST]]
    return tuple(
        LargeSample(
            sample_id=int(i),
            place=f"shard {index.shard(int(i))}, key {printable_name(index.keys(int(i)))}",
            llm_tokens=int(index.samples["llm_tokens"][i]),
            patches=int(index.samples["patches"][i]),
        )
        for i in order
    )


def _modality_shares(index: CostIndex) -> dict[str, dict[str, float]]:
    """Shares of text, images and videos in the tokens, patches and items of all usable samples."""
    kinds = index.items["kind"]
    text = int(index.samples["text_tokens"].sum(dtype=np.int64))
    shares = {}
    for name, column in (("llm_tokens", "llm_tokens"), ("patches", "patches")):
        sums = {"text": text if name == "llm_tokens" else 0}
        for kind in MediaKind:
            sums[kind.name.lower()] = int(index.items[column][kinds == kind].sum(dtype=np.int64))
        shares[name] = _shares_of(sums)
    counts = np.bincount(kinds, minlength=len(MediaKind)).tolist()
    shares["num_items"] = _shares_of({"text": 0, "image": counts[MediaKind.IMAGE], "video": counts[MediaKind.VIDEO]})
    return shares


def _shares_of(sums: Mapping[str, int]) -> dict[str, float]:
    whole = sum(sums.values())
    return {kind: value / whole if whole else 0.0 for kind, value in sums.items()}


def _shard_costs(index: CostIndex, ids: NDArray[np.int64]) -> tuple[tuple[ShardCost, ...], int]:
    """The shards with the most LLM tokens, and the number of all that have a usable sample."""
    shards = index.names["shard"].combine_chunks()
    encoded = shards if hasattr(shards, "indices") else shards.dictionary_encode()
    codes = np.asarray(encoded.indices.to_numpy(zero_copy_only=False))[ids]
    names = encoded.dictionary.to_pylist()
    columns = {name: np.asarray(index.samples[name])[ids].astype(np.float64) for name in HISTOGRAMS}
    # Sums of int32 numbers in float64 are exact up to 2^53.
    tokens, patches = (np.bincount(codes, columns[name], len(names)).astype(np.int64) for name in HISTOGRAMS)
    samples = np.bincount(codes, minlength=len(names))
    order = [int(k) for k in np.argsort(-tokens, kind="stable") if samples[k]]
    all_tokens, all_patches = max(int(tokens.sum()), 1), max(int(patches.sum()), 1)
    costs = tuple(
        ShardCost(
            shard=str(names[k]),
            samples=int(samples[k]),
            llm_tokens=int(tokens[k]),
            patches=int(patches[k]),
            token_share=int(tokens[k]) / all_tokens,
            patch_share=int(patches[k]) / all_patches,
        )
        for k in order[:NUM_SHARDS]
    )
    return costs, len(order)


def _modality_table(report: DataReport) -> Table:
    table = Table(title="Samples and media by kind", title_justify="left")
    for name in asdict(report.modalities):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_row(*(f"{count:,}" for count in asdict(report.modalities).values()))
    return table


def _share_table(report: DataReport) -> Table:
    table = Table(title="What makes the cost", title_justify="left")
    table.add_column("share of")
    kinds = ("text", "image", "video")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for name, shares in report.modality_shares.items():
        table.add_row(COLUMNS[name], *(f"{shares[kind]:.1%}" for kind in kinds))
    return table


def _shard_table(report: DataReport) -> Table:
    rest = f" ({len(report.shards):,} of {report.num_shards:,})" if report.num_shards > len(report.shards) else ""
    table = Table(title=f"Shards with the most LLM tokens{rest}", title_justify="left")
    table.add_column("shard", overflow="fold")
    for name in ("samples", "LLM tokens", "share", "patches", "share"):
        table.add_column(name, justify="right")
    for cost in report.shards:
        table.add_row(
            escape(printable(cost.shard)),
            f"{cost.samples:,}",
            f"{cost.llm_tokens:,}",
            f"{cost.token_share:.1%}",
            f"{cost.patches:,}",
            f"{cost.patch_share:.1%}",
        )
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
