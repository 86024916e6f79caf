"""Systems that do not place one step's samples on ranks x micro-batches, each on its own terms.

    delay  WLB-LLM moves long samples to later steps: several steps in a row, then flush steps for what still waits
    cp     Megatron hybrid CP splits long samples over ranks: waves of groups, with a barrier after each

Both are compared by time per work: the sum of makespans over the sum of the mean work of a rank, for the samples that
ran. 1 is what nobody beats without splitting or moving samples, and what neither of the two is bound by.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from balancer.errors import PlanError
from balancer.layout import Meet
from tools.benchmarks.baseline_context_parallel import hybrid_context_parallel
from tools.benchmarks.baseline_outliers import OutlierDelay
from tools.benchmarks.baseline_step import Placed
from tools.benchmarks.baseline_types import IntArray
from tools.benchmarks.imbalance_cases import LAYOUTS, SAMPLES_PER_CELL, LayoutCase, Step, make_step
from tools.benchmarks.imbalance_judge import judge, lay
from tools.benchmarks.imbalance_ours import placed_by, planned
from tools.benchmarks.imbalance_run import MEETS, RunOptions
from tools.benchmarks.options import progress
from tools.benchmarks.workloads import Workload, workload

WINDOW_STEPS = 8
OWN_SHAPE = (8, 4)
QUICK_WINDOW_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTerms:
    """One line: our policy beside a system, on the same samples.

    Attributes:
        what: the system. setting: in words.
        ours, theirs: time per work; NaN where our policy found no room in some step.
        theirs_flushed: with the steps that run what was left; NaN where nothing waits.
        late: share of samples that ran in another step than they were selected for. waiting: share left at the end.
    """

    what: str
    setting: str
    ours: float
    theirs: float
    theirs_flushed: float
    late: float
    waiting: float


def own_terms(options: RunOptions, policy: str, *, quick: bool = False) -> list[OwnTerms]:
    """All lines, for the coarse group: that is where long samples are."""
    lines: list[OwnTerms] = []
    for name in options.workloads:
        progress(f"own terms: {name}")
        lines += _delays(name, options, policy, QUICK_WINDOW_STEPS if quick else WINDOW_STEPS)
        lines += _context_parallel(name, options, policy)
    return lines


def _delays(name: str, options: RunOptions, policy: str, num_steps: int) -> Iterator[OwnTerms]:
    num_ranks, num_microbatches = OWN_SHAPE
    per_step = num_ranks * num_microbatches * SAMPLES_PER_CELL["coarse"]
    samples = workload(name, per_step * num_steps, data=options.data)
    # One step of all samples cuts them and sets one capacity for the whole window.
    whole = make_step(samples, "coarse", num_ranks, num_microbatches * num_steps, 0)
    rows_of_step = np.arange(per_step * num_steps).reshape(num_steps, per_step)
    delayed, flushed, late, waiting = _delayed(whole, rows_of_step)
    for layout in [layout for layout in (LAYOUTS[0], LAYOUTS[2]) if layout.name in options.layouts]:
        for meet in MEETS:
            ours = [_planned_time(_part(whole, rows), layout, meet, policy) for rows in rows_of_step]
            theirs = [_placed_time(_part(whole, rows), cells, layout, meet) for rows, cells in delayed]
            last = [_placed_time(_part(whole, rows), cells, layout, meet) for rows, cells in flushed]
            yield OwnTerms(
                what="WLB-LLM outlier delay",
                setting=f"{name}, {num_ranks} x {num_microbatches}, {num_steps} steps, {layout.name}, meet {meet}",
                ours=_per_work(ours),
                theirs=_per_work(theirs),
                theirs_flushed=_per_work([*theirs, *last]),
                late=late,
                waiting=waiting,
            )


_Part = tuple[IntArray, IntArray]  # rows of the window, and their cells [k, 2]


def _delayed(whole: Step, rows_of_step: IntArray) -> tuple[list[_Part], list[_Part], float, float]:
    """Samples and cells of every step under the delay, of the flush steps, and the shares late and waiting."""
    num_ranks, num_microbatches = OWN_SHAPE
    delay = OutlierDelay(whole.capacity, num_ranks * num_microbatches)
    lengths = whole.samples.tokens
    work = whole.grid(whole.problem(LAYOUTS[0], "step")).costs[:, -1]

    def part(cells: Sequence[Sequence[tuple[int, int]]]) -> _Part:
        rows = np.array([rows_of_step[step, row] for names in cells for step, row in names], np.int64)
        cell = np.repeat(np.arange(len(cells)), [len(names) for names in cells])
        return rows, np.stack([cell % num_ranks, cell // num_ranks], axis=1).astype(np.int64)

    steps = [part(delay.step(lengths[rows].tolist(), work[rows].tolist())) for rows in rows_of_step]
    waiting = len(delay.waiting) / rows_of_step.size
    late = sum(len(np.setdiff1d(rows, own)) for (rows, _), own in zip(steps, rows_of_step, strict=True))
    flushed = [part(cells) for cells in delay.flush()]
    return steps, flushed, (late + waiting * rows_of_step.size) / rows_of_step.size, waiting


def _part(whole: Step, rows: IntArray) -> Step:
    """A step of some samples of the window."""
    samples = whole.samples
    columns = {name: getattr(samples, name)[rows] for name in ("tokens", "text", "images", "patches", "patch_squares")}
    return Step(
        samples=Workload(name=samples.name, real=samples.real, **columns),
        group=whole.group,
        num_ranks=OWN_SHAPE[0],
        num_microbatches=OWN_SHAPE[1],
        seed=whole.seed,
        capacity=whole.capacity,
    )


_Time = tuple[float, int]  # makespan, mean work of the busiest pipeline rank


def _placed_time(step: Step, cells: IntArray, layout: LayoutCase, meet: Meet) -> _Time:
    problem = step.problem(layout, meet)
    makespan = judge(problem, lay(problem, Placed(cells=cells)), meet).makespan_ns
    return makespan, int(problem.rank_work_ns().sum(axis=0).max()) // problem.dp_size


def _planned_time(step: Step, layout: LayoutCase, meet: Meet, policy: str) -> _Time:
    """Time of our plan; NaN where it finds no room in its micro-batches."""
    problem = step.problem(layout, meet)
    try:
        placed = placed_by(planned(step, layout, meet, policy), problem)
    except PlanError:
        return math.nan, 1
    return _placed_time(step, placed.cells, layout, meet)


def _per_work(times: Sequence[_Time]) -> float:
    return sum(makespan for makespan, _ in times) / max(sum(work for _, work in times), 1)


def _context_parallel(name: str, options: RunOptions, policy: str) -> Iterator[OwnTerms]:
    num_ranks, num_microbatches = OWN_SHAPE
    count = num_ranks * num_microbatches * SAMPLES_PER_CELL["coarse"]
    step = make_step(workload(name, count, data=options.data), "coarse", num_ranks, num_microbatches, 0)
    problem = step.problem(LAYOUTS[0], "step")
    grid = step.grid(problem)
    total = grid.costs.sum(axis=1)
    waves = hybrid_context_parallel(grid)
    time = sum(max(int(total[group.items].sum()) / group.degree for group in wave) for wave in waves)
    for meet in MEETS:
        yield OwnTerms(
            what="Megatron hybrid CP",
            setting=f"{name}, {num_ranks} x {num_microbatches}, 1 step, colocated, meet {meet}",
            ours=_per_work([_planned_time(step, LAYOUTS[0], meet, policy)]),
            theirs=time * num_ranks / float(total.sum()),
            theirs_flushed=float("nan"),
            late=0.0,
            waiting=0.0,
        )
