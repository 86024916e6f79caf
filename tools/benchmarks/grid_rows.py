"""Section `grid`: samples on ranks x micro-batches under a token capacity.

Two figures, because it depends on the parallelism where ranks meet: `sync_ratio` when they wait for each other in every
micro-batch, `rank_ratio` when they meet once a step (see `checking.grid_quality`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

import packing
from packing.problem import Objective
from tools.benchmarks.baseline_types import Grid, IntArray
from tools.benchmarks.baselines import GRID_BASELINES, GridBaseline
from tools.benchmarks.checking import grid_quality, grid_violations
from tools.benchmarks.measuring import Kind, Row, measure, sort_case
from tools.benchmarks.options import Options, progress
from tools.benchmarks.partition_rows import MAX_TOKENS, balanced_costs
from tools.benchmarks.peers import grid_peers
from tools.benchmarks.workloads import Workload, limited

GRID_WORKLOADS = ("text", "vlm", "servegen", "video", "internvl", "real_internvl")
GRID_SHAPE = (8_192, 64, 16)
QUICK_GRID_SHAPE = (256, 8, 4)
GRID_SLACK_PERCENT = 10


def grid_capacity(sizes: IntArray, num_cells: int) -> int:
    """Tokens a cell may hold: 10 % above the mean cell, and at least the largest sample."""
    roomy = -(-int(sizes.sum()) * (100 + GRID_SLACK_PERCENT) // (100 * num_cells))
    return max(int(sizes.max()), roomy)


def grid_rows(options: Options) -> Iterator[Row]:
    """Ranks x micro-batches; what is balanced is the sum of both stages, for ours also each of them."""
    num_items, num_ranks, num_slots = QUICK_GRID_SHAPE if options.quick else GRID_SHAPE
    for name in options.names(GRID_WORKLOADS):
        samples = limited(options.samples(name, num_items), MAX_TOKENS)
        capacity = grid_capacity(samples.tokens, num_ranks * num_slots)
        both = balanced_costs(samples)
        total = both.sum(axis=1, keepdims=True)
        for matrix in (total, both) if both[:, 0].any() else (total,):
            grid = Grid(costs=matrix, sizes=samples.tokens, capacity=capacity, num_ranks=num_ranks, num_slots=num_slots)
            yield from _grid_cell(grid, samples, options)


def _grid_cell(grid: Grid, samples: Workload, options: Options) -> Iterator[Row]:
    num_items, num_stages = grid.costs.shape
    setting = f"{grid.num_ranks} x {grid.num_slots}, {grid.capacity:,} tokens"
    setting += ", one cost" if num_stages == 1 else ", two stages"
    progress(f"grid: {samples.name}, {setting}, n = {num_items:,}")
    _ = grid.lengths, grid.totals
    objectives: tuple[Objective, ...] = ("per_rank", "per_slot")
    ours = {str(objective): partial(_place, grid, objective) for objective in objectives}
    found: dict[str, tuple[Kind, GridBaseline]] = {}
    if num_stages == 1:
        found |= {name: ("baseline", other) for name, other in GRID_BASELINES.items()}
        if options.with_peers:
            found |= {name: ("peer", other) for name, other in grid_peers().items()}
    for case in ours.values():
        case()
    theirs = {f"{kind} {name}": partial(other.run, grid) for name, (kind, other) in found.items()}
    cases: dict[str, Callable[[], object]] = {"sort": sort_case(grid.sizes), **ours, **theirs}
    timings, results = measure(cases, repeats=options.repeats, budget_s=options.budget_s)
    common = Row(
        section="grid",
        workload=samples.name,
        real=samples.real,
        setting=setting,
        num_items=num_items,
        method="",
        kind="ours",
        sort_ms=timings["sort"].median_ms,
    )
    bounds = _grid_bounds(grid)

    def judged(row: Row, cells: IntArray) -> Row:
        return replace(
            row,
            quality={**grid_quality(cells, grid.costs, grid.num_ranks), **bounds},
            violations=grid_violations(cells, grid.sizes, grid.capacity, grid.num_slots),
        )

    for name in ours:
        row = replace(common, method=name, runs_ms=timings[name].runs_ms)
        yield judged(row, _cells(results[name]))
    for name, (kind, other) in found.items():
        row = replace(common, method=name, kind=kind, system=other.system, note=other.language)
        yield judged(replace(row, runs_ms=timings[f"{kind} {name}"].runs_ms), results[f"{kind} {name}"])


def _place(grid: Grid, objective: Objective) -> packing.GridResult:
    return packing.partition_grid(
        grid.costs,
        grid.num_ranks,
        grid.num_slots,
        capacity=grid.capacity,
        sizes=grid.sizes,
        objective=objective,
    )


def _grid_bounds(grid: Grid) -> Mapping[str, float]:
    """No assignment has a smaller rank ratio than this."""
    mean = float(grid.costs.sum(axis=0).max()) / grid.num_ranks
    return {"least_rank_ratio": packing.makespan_lower_bound(grid.costs, grid.num_ranks) / max(mean, 1.0)}


def _cells(result: packing.GridResult) -> IntArray:
    """(rank, slot) int64 [n, 2] of a `GridResult`."""
    return np.stack([result.rank_of, result.slot_of], axis=1).astype(np.int64)
