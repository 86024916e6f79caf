"""Section `streaming`: bounded look-ahead over a stream against packing all samples at once.

Order decides: shuffled streams are easy, streams in order of arrival (the Azure and Mooncake traces) or sorted are not.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

import packing
from tools.benchmarks.baseline_types import IntArray
from tools.benchmarks.checking import packing_quality, packing_violations
from tools.benchmarks.measuring import Kind, Row, measure, sort_case
from tools.benchmarks.options import Options, progress
from tools.benchmarks.packing_rows import our_packers
from tools.benchmarks.real_tables import ARRIVAL_TABLES
from tools.benchmarks.workloads import Workload, clipped

STREAM_WORKLOADS = (
    *("text", "vlm", "servegen", "azure_conversations"),
    *("real_azure_conversations", "real_azure_code", "real_mooncake_conversations", "real_internvl"),
)
STREAM_CAPACITIES = (4_096, 8_192)
LOOKAHEADS = (256, 1_000)
CHUNK = 1_000


def streaming_rows(options: Options) -> Iterator[Row]:
    """Shuffled streams of all workloads, and those in order of arrival and sorted where that is harder."""
    for name in options.names(STREAM_WORKLOADS):
        shuffled = options.samples(name)
        streams = [("shuffled", shuffled, shuffled.tokens), ("sorted", shuffled, np.sort(shuffled.tokens))]
        if name in ARRIVAL_TABLES:
            arriving = options.samples(name, arrival=True)
            streams.append(("in order of arrival", arriving, arriving.tokens))
        for order, samples, tokens in streams:
            for capacity in [capacity for capacity in STREAM_CAPACITIES if capacity in options.capacities]:
                yield from _stream(samples, order, clipped(tokens, capacity)[:, None], capacity, options)


def _stream(samples: Workload, order: str, sizes: IntArray, capacity: int, options: Options) -> Iterator[Row]:
    setting = f"{capacity:,} tokens, {order}"
    progress(f"streaming: {samples.name}, {setting}, n = {len(samples):,}")
    run_stream(sizes[:64], capacity, 16)  # compiles
    best_fit_by_batch(sizes[:64], capacity)
    cases: dict[str, Callable[[], object]] = {"sort": sort_case(sizes[:, 0])}
    cases |= {f"look-ahead {size:,}": partial(run_stream, sizes, capacity, size) for size in LOOKAHEADS}
    cases["best-fit by 1,000"] = partial(best_fit_by_batch, sizes, capacity)
    timings, results = measure(cases, repeats=options.repeats, budget_s=options.budget_s)
    bound = packing.bin_lower_bound(sizes, capacity=capacity)
    offline = min(packing.pack(sizes, capacity=capacity, algorithm=name).num_bins for name in our_packers())
    common = Row(
        section="streaming",
        workload=samples.name,
        real=samples.real,
        setting=setting,
        num_items=len(samples),
        method="",
        kind="ours",
        sort_ms=timings["sort"].median_ms,
    )
    methods: list[tuple[str, Kind, str]] = [(f"look-ahead {size:,}", "ours", "") for size in LOOKAHEADS]
    for method, kind, system in [*methods, ("best-fit by 1,000", "baseline", "TRL's batches")]:
        quality = packing_quality(results[method], bound)
        quality |= {
            "offline_bins": offline,
            "over_offline": quality["bins"] / max(offline, 1) - 1.0,
            "fill": float(sizes.sum()) / max(quality["bins"] * capacity, 1),
        }
        yield replace(
            common,
            method=method,
            kind=kind,
            system=system,
            runs_ms=timings[method].runs_ms,
            quality=quality,
            violations=packing_violations(results[method], sizes, np.array([capacity], np.int64)),
        )


def run_stream(sizes: IntArray, capacity: int, lookahead: int) -> IntArray:
    """Bin of each item int64 [n], from chunks of 1,000 items; bins are taken out as soon as they are there."""
    packer = packing.StreamingPacker(capacity, lookahead)
    bins = []
    for start in range(0, len(sizes), CHUNK):
        packer.add(sizes[start : start + CHUNK])
        while (found := packer.pop()) is not None:
            bins.append(found.items)
    bins += [found.items for found in packer.flush()]
    bin_of = np.full(len(sizes), -1, np.int64)
    if bins:
        bin_of[np.concatenate(bins)] = np.repeat(np.arange(len(bins)), [len(items) for items in bins])
    return bin_of


def best_fit_by_batch(sizes: IntArray, capacity: int) -> IntArray:
    """Best-fit-decreasing of every 1,000 items by themselves, as data sets are packed while they are mapped (TRL)."""
    bin_of = np.empty(len(sizes), np.int64)
    num_bins = 0
    for start in range(0, len(sizes), CHUNK):
        packed = packing.pack(sizes[start : start + CHUNK], capacity=capacity, algorithm="best_fit_decreasing")
        bin_of[start : start + CHUNK] = packed.bin_of + num_bins
        num_bins += packed.num_bins
    return bin_of
