"""Our policies and a user's own function as `Balancer`s of the benchmark.

plan_step(counts, parallel, cost model, capacities, policy)   --StepPlan-->  Placed   (what the trainer would run)
module:function (counts, R, M, capacity)                      --arrays-->    Placed
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.layout import Meet
from balancer.plan import Capacities, StepPlan
from balancer.planner import plan_step
from balancer.policies import PlacementProblem, policy_names
from balancer.schedule import build_schedule
from tools.benchmarks.baseline_step import Placed, StepGrid
from tools.benchmarks.baseline_types import IntArray
from tools.benchmarks.imbalance_baselines import Balancer
from tools.benchmarks.imbalance_cases import LayoutCase, Step

Columns = Mapping[str, IntArray]
UserFunction = Callable[[Columns, int, int, int], tuple[npt.ArrayLike, npt.ArrayLike]]


class UserBalancerError(ValueError):
    """A user's function gave something that is no placement; the text says what was expected."""


def our_policies() -> tuple[str, ...]:
    """Policies that balance by cost, the default last."""
    return tuple(name for name in ("lpt", "joint") if name in policy_names())


def planned(step: Step, layout: LayoutCase, meet: Meet, policy: str) -> StepPlan:
    """The plan of a step."""
    return plan_step(
        step.counts,
        parallel=layout.parallel(step.num_ranks, step.num_microbatches, meet),
        cost_model=layout.cost_model(),
        capacities=Capacities(tokens=step.capacity),
        schedule=layout.schedule,
        policy=policy,
    )


def placed_by(plan: StepPlan, problem: PlacementProblem) -> Placed:
    """Where a plan puts the samples, and its media items where these are routed."""
    cells = np.stack([plan.dp_rank, plan.microbatch], axis=1).astype(np.int64)
    if not plan.routed:
        return Placed(cells=cells)
    schedule = build_schedule(problem.schedule, stage_ranks=problem.stage_ranks, num_microbatches=plan.num_microbatches)
    entry = plan.unit.astype(np.int64) * schedule.unit_size + plan.encoder_rank
    return Placed(cells=cells, entries=np.stack([cells[plan.item_row, 0], entry], axis=1))


def users_balancer(path: str) -> Balancer:
    """The balancer `module:function`, imported by the name that was given.

    It gets (counts, num_ranks, num_microbatches, capacity): columns int64 [n] by name, and three numbers. It gives
    (rank, micro-batch), two arrays of integers [n]; -1 for a sample it leaves out.

    Raises:
        ValueError: no such function.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"--balancer {path!r}: give module:function, for example my_balancer:place")
    try:
        function: UserFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--balancer {path!r}: {error}; is its folder on PYTHONPATH?") from error

    def run(grid: StepGrid) -> IntArray:
        return _cells(path, function(columns_of(grid), grid.num_ranks, grid.num_slots, grid.capacity), len(grid))

    return Balancer(
        system=path, rule="yours", ignores="", price="", run=run, uses_layout=True, may_exceed=True, may_lose=True
    )


def columns_of(grid: StepGrid) -> Columns:
    """What a user's function gets: int64 [n] columns.

    llm_tokens, text_tokens, images, patches; encoder_ns and llm_ns (forward and backward); and for every pipeline rank
    p of a replica forward_ns_p and backward_ns_p.
    """
    columns = {
        "llm_tokens": grid.sizes,
        "text_tokens": grid.text,
        "images": grid.images,
        "patches": grid.patches,
        "encoder_ns": grid.costs[:, 0],
        "llm_ns": grid.costs[:, 1],
    }
    for rank in range(grid.rank_forward.shape[1]):
        columns[f"forward_ns_{rank}"] = grid.rank_forward[:, rank]
        columns[f"backward_ns_{rank}"] = grid.rank_backward[:, rank]
    return {name: column.copy() for name, column in columns.items()}


def _cells(path: str, found: Any, num_samples: int) -> IntArray:
    try:
        columns = [np.asarray(column) for column in found]
    except TypeError:
        columns = []
    if len(columns) != 2 or any(
        column.shape != (num_samples,) or not np.issubdtype(column.dtype, np.integer) for column in columns
    ):
        shapes = [f"{column.dtype} {column.shape}" for column in columns] or type(found).__name__
        raise UserBalancerError(
            f"{path} gave {shapes}; expected two arrays of integers of shape ({num_samples},): rank and micro-batch"
        )
    return np.stack(columns, axis=1).astype(np.int64)
