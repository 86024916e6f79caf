"""The exact optimum of small steps by trying every placement, beside the planner.

    6 samples on 2 replicas x 2 micro-batches: 4^6 = 4,096 placements, each simulated, those above a capacity left out,
    and those that leave a micro-batch empty that could be filled, as for every planner

Which micro-batch is which matters on a pipeline, so orders are tried too. With an encoder on every rank the placement
of media is not tried: it is left out here.
"""

from dataclasses import dataclass, replace

import numpy as np

from balancer.layout import Meet
from balancer.policies import PlacementProblem
from balancer.policies.joint_exact import legal
from balancer.simulate import meeting_makespans_ns
from tools.benchmarks.imbalance_cases import LAYOUTS, LayoutCase, Step, make_step
from tools.benchmarks.imbalance_judge import judge, lay
from tools.benchmarks.imbalance_ours import placed_by, planned
from tools.benchmarks.imbalance_run import MEETS, RunOptions
from tools.benchmarks.options import progress
from tools.benchmarks.workloads import workload

SMALL_SAMPLES = 6
SMALL_SHAPE = (2, 2)
SMALL_STEPS = 20
QUICK_SMALL_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """One line: ratios of the planner's makespan to the optimum, one a step."""

    workload: str
    layout: str
    meet: Meet
    ratios: tuple[float, ...]


def optima(options: RunOptions, policy: str, *, quick: bool = False) -> list[Optimum]:
    """All lines: workloads, layouts whose encoder is a stage, both meeting rules."""
    progress("exact optimum of small steps")
    layouts = [layout for layout in LAYOUTS if layout.name in options.layouts and layout.encoder != "spread"]
    seeds = range(QUICK_SMALL_STEPS if quick else SMALL_STEPS)
    return [
        Optimum(
            workload=name,
            layout=layout.name,
            meet=meet,
            ratios=tuple(_ratio(small_step(name, options, seed), layout, meet, policy) for seed in seeds),
        )
        for name in options.workloads
        for layout in layouts
        for meet in MEETS
    ]


def _ratio(step: Step, layout: LayoutCase, meet: Meet, policy: str) -> float:
    problem = step.problem(layout, meet)
    placed = placed_by(planned(step, layout, meet, policy), problem)
    return judge(problem, lay(problem, placed), meet).makespan_ns / optimum_ns(problem, meet)


def small_step(name: str, options: RunOptions, seed: int) -> Step:
    """A step of few samples, with a capacity that longest first always keeps: the mean plus the largest."""
    step = make_step(workload(name, SMALL_SAMPLES, seed, data=options.data), "coarse", *SMALL_SHAPE, seed)
    tokens = step.samples.tokens
    return replace(step, capacity=-(-int(tokens.sum()) // step.num_cells) + int(tokens.max()))


def optimum_ns(problem: PlacementProblem, meet: Meet) -> int:
    """The least makespan of any placement within the capacities that fills what it can (`joint_exact.legal`)."""
    num_ranks, num_slots = problem.dp_size, problem.num_microbatches or 1
    num_cells = num_ranks * num_slots
    every = np.indices((num_cells,) * problem.num_samples, dtype=np.int32).reshape(problem.num_samples, -1).T
    cells = legal(problem, every, num_slots)  # [K, n]
    inside = (cells[:, :, np.newaxis] == np.arange(num_cells)).astype(np.int64)  # [K, n, cells]
    shape = (len(inside), num_ranks, num_slots, problem.num_stages)  # [K, R, M, S]
    present = np.repeat((inside.sum(axis=1) > 0).reshape(shape[:3])[..., np.newaxis], problem.num_stages, axis=3)
    if problem.parallel.has_encoder:
        present[..., 0] = np.einsum("knc,n->kc", inside, problem.counts.patches).reshape(shape[:3]) > 0
    forward, backward, weight = (
        np.einsum("knc,ns->kcs", inside, values).reshape(shape) + present * constant
        for values, constant in (
            (problem.forward_ns, problem.forward_constant_ns),
            (problem.backward_ns, problem.backward_constant_ns),
            (problem.weight_ns, problem.weight_constant_ns),
        )
    )
    schedule = problem.schedule_for(num_slots)
    return int(meeting_makespans_ns(schedule, forward, backward, present, meet, weight_ns=weight).min())
