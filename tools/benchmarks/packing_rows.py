"""Section `pack`, one capacity, and the cell of methods that section `vector` shares."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

import packing
from packing.registry import PACKERS
from tools.benchmarks.baseline_types import Bins, IntArray, Items, bin_of_items
from tools.benchmarks.baselines import PACK_BASELINES, PackBaseline
from tools.benchmarks.checking import packing_quality, packing_violations
from tools.benchmarks.measuring import Kind, Row, measure, sort_case
from tools.benchmarks.options import SLOW_ALGORITHMS, Options, progress
from tools.benchmarks.peers import pack_peers
from tools.benchmarks.workloads import Workload, clipped

SCALE_WORKLOADS = ("text", "vlm")
SCALE_CAPACITY = 8_192
# Every peer runs on these; on the others only the baselines that come near the bound.
CORE_WORKLOADS = ("text", "vlm", "servegen", "real_internvl", "real_azure_conversations")
CLOSE_BASELINES = ("axolotl_first_fit", "llama_factory_knapsack_global", "nemo_first_fit_decreasing")
LIST_ALGORITHMS = ("best_fit_decreasing", "auto")
WARM_UP_ITEMS = 100_000
FAST_ALGORITHMS = (*LIST_ALGORITHMS, "next_fit")  # beyond a million items


Others = Mapping[str, tuple[Kind, PackBaseline]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One input: sizes int64 [n, d] under `capacity`; `setting` is the latter in words."""

    section: str
    samples: Workload
    sizes: IntArray
    capacity: tuple[int, ...]
    setting: str


def our_packers() -> list[str]:
    """Algorithms of the registry that are made for many items."""
    return [name for name in PACKERS if name not in SLOW_ALGORITHMS]


def bins_as_lists(result: packing.PackResult) -> list[list[int]]:
    """The bins as Python lists, which is what most peers return."""
    items, offsets = result.order.tolist(), result.offsets.tolist()
    return [items[start:stop] for start, stop in pairwise(offsets)]


def pack_rows(options: Options) -> Iterator[Row]:
    """One capacity: all workloads at n, and two of them at other n."""
    for cell in token_cells(options):
        yield from cell_rows(cell, options)
    for num_items in options.scale:
        for name in options.names(SCALE_WORKLOADS):
            yield from cell_rows(_token_cell(options.samples(name, num_items), SCALE_CAPACITY), options)


def token_cells(options: Options, num_items: int | None = None) -> Iterator[Cell]:
    """All workloads x capacities, with `num_items` samples if given."""
    for name in options.names():
        samples = options.samples(name, num_items)
        for capacity in options.capacities:
            yield _token_cell(samples, capacity)


def _token_cell(samples: Workload, capacity: int) -> Cell:
    sizes = clipped(samples.tokens, capacity)[:, None]
    return Cell(section="pack", samples=samples, sizes=sizes, capacity=(capacity,), setting=f"{capacity:,} tokens")


def others(cell: Cell, options: Options) -> dict[str, tuple[Kind, PackBaseline]]:
    """Baselines and peers that can do the cell in seconds."""
    dimensions = len(cell.capacity)
    found: dict[str, tuple[Kind, PackBaseline]] = {name: ("baseline", other) for name, other in PACK_BASELINES.items()}
    if options.with_peers:
        found |= {name: ("peer", other) for name, other in pack_peers().items()}
    all_methods = dimensions > 1 or cell.samples.name in CORE_WORKLOADS or bool(options.workloads)
    return {
        name: (kind, other)
        for name, (kind, other) in found.items()
        if other.dimensions in (None, dimensions)
        and len(cell.samples) <= other.max_items
        and (all_methods or name in CLOSE_BASELINES)
        and (dimensions > 1 or name != "omnibal")
    }


def cell_rows(cell: Cell, options: Options) -> Iterator[Row]:
    """All methods on one input."""
    num_items = len(cell.samples)
    progress(f"{cell.section}: {cell.samples.name}, {cell.setting}, n = {num_items:,}")
    items = Items(sizes=cell.sizes, capacity=np.array(cell.capacity, np.int64))
    _ = items.rows, items.lengths, items.limits  # lists are made before the clock starts
    names = [name for name in our_packers() if num_items <= 1_000_000 or name in FAST_ALGORITHMS]
    ours = {name: partial(packing.pack, cell.sizes, capacity=cell.capacity, algorithm=name) for name in names}
    lists = {f"{name}, lists": partial(_as_lists, ours[name]) for name in LIST_ALGORITHMS if name in ours}
    foreign = others(cell, options)
    theirs = {f"{kind} {name}": partial(other.run, items) for name, (kind, other) in foreign.items()}
    _warm_up(cell, names, foreign)
    cases: dict[str, Callable[[], object]] = {"sort": sort_case(cell.sizes[:, 0]), **ours, **lists, **theirs}
    timings, results = measure(cases, repeats=options.repeats, budget_s=options.budget_s)
    bound = packing.bin_lower_bound(cell.sizes, capacity=cell.capacity)
    common = Row(
        section=cell.section,
        workload=cell.samples.name,
        real=cell.samples.real,
        setting=cell.setting,
        num_items=num_items,
        method="",
        kind="ours",
        sort_ms=timings["sort"].median_ms,
    )

    def judged(row: Row, bins: Bins) -> Row:
        bin_of = bin_of_items(bins, num_items)
        violations = packing_violations(bin_of, cell.sizes, items.capacity)
        return replace(row, quality=packing_quality(bin_of, bound), violations=violations)

    for name in names:
        row = judged(replace(common, method=name, runs_ms=timings[name].runs_ms), results[name].bin_of)
        yield row
        if f"{name}, lists" in timings:
            yield replace(row, returns="lists", runs_ms=timings[f"{name}, lists"].runs_ms)
    for name, (kind, other) in foreign.items():
        bins = results[f"{kind} {name}"]
        returns = "arrays" if isinstance(bins, np.ndarray) else "lists"
        row = replace(common, method=name, kind=kind, system=other.system, returns=returns, note=other.language)
        yield judged(replace(row, runs_ms=timings[f"{kind} {name}"].runs_ms), bins)


def _as_lists(case: Callable[[], packing.PackResult]) -> list[list[int]]:
    return bins_as_lists(case())


def _warm_up(cell: Cell, names: list[str], foreign: Others) -> None:
    """Compile kernels and import packages: ours on enough items to reach every kernel, others on a few."""
    few = Items(sizes=np.ascontiguousarray(cell.sizes[:64]), capacity=np.array(cell.capacity, np.int64))
    for name in names:
        packing.pack(cell.sizes[:WARM_UP_ITEMS], capacity=cell.capacity, algorithm=name)
    for _, other in foreign.values():
        other.run(few)
