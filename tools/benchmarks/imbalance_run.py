"""Runs the settings of the benchmark: every method places the same steps, one judge looks at all of them.

    task = workload, group, R, M  -->  steps (seeds)  -->  layouts  -->  methods  -->  meeting rules  -->  rows

A baseline that knows no pipeline places a step once for all layouts, and one that knows no meeting rule once for both;
our policies plan each anew. Tasks are independent, so they may run in several processes.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from balancer.bounds import lower_bounds
from balancer.errors import BalancerError
from balancer.layout import Meet
from balancer.policies import PlacementProblem
from tools.benchmarks.baseline_step import Placed
from tools.benchmarks.imbalance_baselines import BALANCERS, Balancer
from tools.benchmarks.imbalance_cases import (
    GROUPS,
    LAYOUTS,
    MAIN_LAYOUTS,
    SAMPLES_PER_CELL,
    Group,
    LayoutCase,
    Step,
    largest_share,
    make_step,
)
from tools.benchmarks.imbalance_judge import Laid, judge, lay
from tools.benchmarks.imbalance_ours import UserBalancerError, our_policies, placed_by, planned, users_balancer
from tools.benchmarks.imbalance_rows import Bound, Kind, Row, RowBuilder, Setting
from tools.benchmarks.options import progress
from tools.benchmarks.workloads import available, workload

MEETS: tuple[Meet, ...] = ("step", "microbatch")
IMBALANCE_WORKLOADS = ("text", "vlm", "video", "servegen")
IMBALANCE_TABLES = ("real_mooncake_conversations", "real_internvl", "real_image_captions")
# (R, steps).
NUM_STEPS = ((8, 8), (64, 3), (1_024, 1))
QUICK_STEPS = ((8, 2),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to run.

    Attributes:
        workloads, layouts, policies: by name. num_steps: (R, steps); a step is a seed.
        num_microbatches: M.
        data: folder of real tables. balancer: a user's `module:function`, or empty.
        processes: tasks at the same time.
    """

    workloads: tuple[str, ...] = IMBALANCE_WORKLOADS
    groups: tuple[Group, ...] = GROUPS
    layouts: tuple[str, ...] = MAIN_LAYOUTS
    num_steps: tuple[tuple[int, int], ...] = NUM_STEPS
    num_microbatches: tuple[int, ...] = (1, 4, 16)
    policies: tuple[str, ...] = ()
    data: Path | None = None
    balancer: str = ""
    processes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """All methods, layouts and meeting rules for steps of one kind."""

    workload: str
    group: Group
    num_ranks: int
    num_microbatches: int
    num_steps: int

    @property
    def num_samples(self) -> int:
        """Samples of a step."""
        return self.num_ranks * self.num_microbatches * SAMPLES_PER_CELL[self.group]


def default_workloads(data: Path | None) -> tuple[str, ...]:
    """The generated ones, and the real tables that are there."""
    found = available(data)
    return tuple(name for name in (*IMBALANCE_WORKLOADS, *IMBALANCE_TABLES) if name in found)


def tasks(options: RunOptions) -> list[Task]:
    """All tasks, small ones first."""
    found = [
        Task(workload=name, group=group, num_ranks=ranks, num_microbatches=microbatches, num_steps=steps)
        for name in options.workloads
        for group in options.groups
        for ranks, steps in options.num_steps
        for microbatches in options.num_microbatches
    ]
    return sorted(found, key=lambda task: task.num_samples * task.num_steps)


def run(options: RunOptions) -> list[Row]:
    """Rows of all tasks, by group, layout, meeting rule and workload."""
    todo = tasks(options)
    if options.processes == 1:
        rows = [row for task in todo for row in run_task(task, options)]
    else:
        with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
            # Large tasks start first, or the last one would run alone.
            results = list(pool.map(run_task, todo[::-1], [options] * len(todo)))
        rows = [row for found in results[::-1] for row in found]
    layouts = [layout.name for layout in LAYOUTS]

    def key(row: Row) -> tuple[int, int, int, int]:
        setting = row.setting
        places = (GROUPS.index(setting.group), layouts.index(setting.layout), MEETS.index(setting.meet))
        return (*places, options.workloads.index(setting.workload))

    return sorted(rows, key=key)


def run_task(task: Task, options: RunOptions) -> list[Row]:
    """Rows of one task."""
    shape = f"{task.num_ranks:,} x {task.num_microbatches}"
    progress(f"{task.workload}, {task.group}, {shape}, {task.num_samples:,} samples, {task.num_steps} steps")
    balancers: dict[str, tuple[Kind, Balancer]] = {
        name: ("exchanges" if balancer.exchanges else "baseline", balancer) for name, balancer in BALANCERS.items()
    }
    if options.balancer:
        balancers[options.balancer] = ("yours", users_balancer(options.balancer))
    layouts = [layout for layout in LAYOUTS if layout.name in options.layouts]
    builders: dict[tuple[str, Meet, str], RowBuilder] = {}
    for seed in range(task.num_steps):
        samples = workload(task.workload, task.num_samples, seed, data=options.data)
        try:
            step = make_step(samples, task.group, task.num_ranks, task.num_microbatches, seed)
        except ValueError as error:  # no cut makes these samples fine: the setting has a step less
            progress(f"seed {seed} left out: {error}")
            continue
        _run_step(_StepRun(step=step, balancers=balancers, layouts=layouts, builders=builders), options.policies)
    return [builder.finished() for builder in builders.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepRun:
    """One step on its way through all layouts and methods."""

    step: Step
    balancers: Mapping[str, tuple[Kind, Balancer]]
    layouts: Sequence[LayoutCase]
    builders: dict[tuple[str, Meet, str], RowBuilder]

    def row(self, layout: LayoutCase, meet: Meet, method: tuple[str, Kind, str]) -> RowBuilder:
        """The row of a method, made at its first step."""
        name, kind, system = method
        if (layout.name, meet, name) not in self.builders:
            samples = self.step.samples
            setting = Setting(
                workload=samples.name,
                real=samples.real,
                group=self.step.group,
                num_ranks=self.step.num_ranks,
                num_microbatches=self.step.num_microbatches,
                layout=layout.name,
                meet=meet,
            )
            self.builders[layout.name, meet, name] = RowBuilder(setting=setting, method=name, kind=kind, system=system)
        return self.builders[layout.name, meet, name]


def _run_step(run: _StepRun, policies: Sequence[str]) -> None:
    share = largest_share(run.step.samples, run.step.num_cells)
    placed: dict[str, tuple[Placed, float]] = {}
    for layout in run.layouts:
        problems = {meet: run.step.problem(layout, meet) for meet in MEETS}
        bounds = {meet: bound_of(problem, run.step.num_microbatches, share) for meet, problem in problems.items()}
        for name, (kind, balancer) in run.balancers.items():
            if run.step.num_cells > balancer.max_cells:
                continue
            method = (name, kind, balancer.system)
            try:
                if name not in placed or balancer.uses_layout:
                    placed[name] = _timed(balancer, run.step, problems["step"])
                laid = _laid(problems["step"], placed[name][0], name, kind)
            except ValueError as error:
                if kind == "yours":
                    raise
                for meet in MEETS:
                    run.row(layout, meet, method).failed = str(error)
                continue
            for meet in MEETS:
                verdict = judge(problems[meet], laid, meet)
                run.row(layout, meet, method).steps.append((run.step.seed, bounds[meet], verdict, placed[name][1]))
        for policy in policies or our_policies():
            _run_policy(run, layout, policy, problems, bounds)


def _laid(problem: PlacementProblem, placed: Placed, name: str, kind: Kind) -> Laid:
    """Cell times; what a user's function placed where there is nothing is the user's to know."""
    try:
        return lay(problem, placed)
    except ValueError as error:
        raise UserBalancerError(f"{name}: {error}") if kind == "yours" else error from None


def _timed(balancer: Balancer, step: Step, problem: PlacementProblem) -> tuple[Placed, float]:
    """A placement and its CPU milliseconds; lists that the original takes are made before."""
    grid = step.grid(problem)
    _ = grid.lengths, grid.totals
    start = time.process_time()
    found = balancer.place(grid)
    return found, 1e3 * (time.process_time() - start)


def _run_policy(
    run: _StepRun,
    layout: LayoutCase,
    policy: str,
    problems: Mapping[Meet, PlacementProblem],
    bounds: Mapping[Meet, Bound],
) -> None:
    for meet in MEETS:
        builder = run.row(layout, meet, (policy, "ours", ""))
        start = time.process_time()
        try:
            plan = planned(run.step, layout, meet, policy)
        except BalancerError as error:
            builder.failed = f"{type(error).__name__}: {error}"
            continue
        cpu_ms = 1e3 * (time.process_time() - start)
        laid = lay(problems[meet], placed_by(plan, problems[meet]))
        builder.steps.append((run.step.seed, bounds[meet], judge(problems[meet], laid, meet), cpu_ms))


def bound_of(problem: PlacementProblem, num_microbatches: int, largest: float) -> Bound:
    """The certificate of the planner, which needs no placement."""
    bounds = lower_bounds(problem, num_microbatches)
    return Bound(lower_ns=bounds.lower_ns, work_ns=bounds.work_ns, largest_share=largest)
