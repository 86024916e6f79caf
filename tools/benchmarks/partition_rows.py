"""Section `partition`: samples on ranks, by one cost and by two, with free and with equal counts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

import packing
from packing.registry import PARTITIONERS
from tools.benchmarks.baseline_types import IntArray, Weights, bin_of_items
from tools.benchmarks.baselines import PARTITION_BASELINES, PartitionBaseline
from tools.benchmarks.checking import count_spread, partition_quality
from tools.benchmarks.measuring import Kind, Row, measure, sort_case
from tools.benchmarks.options import SLOW_ALGORITHMS, Options, progress
from tools.benchmarks.peers import partition_peers
from tools.benchmarks.workloads import Workload, costs, limited

MAX_TOKENS = 32_768
PARTITION_WORKLOADS = (
    *("text", "vlm", "video", "servegen", "internvl"),
    *("real_azure_conversations", "real_internvl", "real_image_captions"),
)
PARTITION_CASES = ((8_192, 64), (8_192, 1_024), (1_024, 64))
QUICK_PARTITION_CASES = ((256, 16),)
LOOSE_GAP = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCase:
    """n items, k parts, S stages (1: the LLM alone), equal counts or free ones."""

    num_items: int
    num_parts: int
    num_stages: int
    equal_count: bool

    @property
    def in_words(self) -> str:
        """The setting of a row."""
        stages = "LLM cost" if self.num_stages == 1 else "encoder and LLM cost"
        return f"{self.num_parts:,} parts, {stages}" + (", equal counts" if self.equal_count else "")


def balanced_costs(samples: Workload) -> IntArray:
    """`costs` int64 [n, 2] with the encoder's scaled to the total of the LLM's, as where ranks are dealt out to the
    stages so that both take equally long; otherwise the LLM alone decides. An encoder without work stays so."""
    both = costs(samples)
    encoder, llm = (int(total) for total in both.sum(axis=0))
    if encoder:
        both[:, 0] = np.rint(both[:, 0] * (llm / encoder)).astype(np.int64)
    return both


def partition_rows(options: Options) -> Iterator[Row]:
    """Samples of at most 32,768 tokens (longer ones are cut), forward and backward nanoseconds of a 7B model."""
    for name in options.names(PARTITION_WORKLOADS):
        for num_items, num_parts in QUICK_PARTITION_CASES if options.quick else PARTITION_CASES:
            samples = limited(options.samples(name, num_items), MAX_TOKENS)
            both = balanced_costs(samples)
            for num_stages in (1, 2):
                if num_stages == 2 and not both[:, 0].any():
                    continue
                for equal in (False, True):
                    case = PartitionCase(
                        num_items=num_items, num_parts=num_parts, num_stages=num_stages, equal_count=equal
                    )
                    yield from _partition_cell(case, samples, np.ascontiguousarray(both[:, 2 - num_stages :]), options)


def _our_partitioners(case: PartitionCase, matrix: IntArray) -> dict[str, Callable[[], packing.PartitionResult]]:
    names = [name for name in PARTITIONERS if name not in SLOW_ALGORITHMS]
    run = partial(packing.partition, matrix, case.num_parts, equal_count=case.equal_count)
    ours: dict[str, Callable[[], packing.PartitionResult]] = {name: partial(run, algorithm=name) for name in names}
    ours["auto, 0.5 % gap"] = partial(run, target_gap=LOOSE_GAP)
    return ours


def _other_partitioners(case: PartitionCase, options: Options) -> dict[str, tuple[Kind, PartitionBaseline]]:
    found: dict[str, tuple[Kind, PartitionBaseline]] = {
        name: ("baseline", other) for name, other in PARTITION_BASELINES.items()
    }
    if options.with_peers:
        found |= {f"{name} (package)": ("peer", other) for name, other in partition_peers().items()}
    return {
        name: (kind, other)
        for name, (kind, other) in found.items()
        if case.num_items * case.num_parts <= other.max_cells
        and other.equal_count >= case.equal_count
        and (case.num_stages > 1 or not other.several_stages)
    }


def _partition_cell(case: PartitionCase, samples: Workload, matrix: IntArray, options: Options) -> Iterator[Row]:
    progress(f"partition: {samples.name}, {case.in_words}, n = {case.num_items:,}")
    weights = Weights(costs=matrix, num_parts=case.num_parts)
    _ = weights.stages
    ours, others = _our_partitioners(case, matrix), _other_partitioners(case, options)
    for run in ours.values():
        run()
    theirs = {f"{kind} {name}": partial(other.run, weights) for name, (kind, other) in others.items()}
    cases: dict[str, Callable[[], object]] = {"sort": sort_case(matrix[:, -1] >> 20), **ours, **theirs}
    timings, results = measure(cases, repeats=options.repeats, budget_s=options.budget_s)
    bound = packing.makespan_lower_bound(matrix, case.num_parts, equal_count=case.equal_count)
    common = Row(
        section="partition",
        workload=samples.name,
        real=samples.real,
        setting=case.in_words,
        num_items=case.num_items,
        method="",
        kind="ours",
        sort_ms=timings["sort"].median_ms,
    )

    def judged(row: Row, part_of: IntArray) -> Row:
        uneven = case.equal_count and count_spread(part_of, case.num_parts) > 1
        return replace(
            row,
            quality=partition_quality(part_of, matrix, case.num_parts, bound),
            violations={"count_spread": float(count_spread(part_of, case.num_parts))} if uneven else {},
        )

    for name in ours:
        yield judged(replace(common, method=name, runs_ms=timings[name].runs_ms), results[name].part_of)
    for name, (kind, other) in others.items():
        parts = results[f"{kind} {name}"]
        returns = "arrays" if isinstance(parts, np.ndarray) else "lists"
        row = replace(common, method=name, kind=kind, system=other.system, returns=returns, note=other.language)
        yield judged(replace(row, runs_ms=timings[f"{kind} {name}"].runs_ms), bin_of_items(parts, case.num_items))
