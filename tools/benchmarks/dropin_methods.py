"""Who runs which sample: four ways to share out the same global batch.

    samples 0 .. n-1 of a step  --method-->  cells int64 [n, 2] = (rank, micro-batch), M

    sequential       equal counts in the order of the data: what a run without any of this does
    length_grouped   sorted by LLM tokens, dealt out to the ranks
    batch_rebalance  transformers' `train_sampling_strategy="batch_rebalance"`: contiguous groups of like length
    joint            ours

Fair: every method gets the same samples, the same least number of micro-batches and the same capacities. A capacity
that the least number cannot hold costs a method as many more micro-batches as it needs. `batch_rebalance` knows neither
media nor capacities; it gets LLM tokens *with* visual tokens as lengths (a processor that expands placeholders shows it
those), its packs are padding-free like everybody's, and its number of micro-batches is raised until all cells hold.
"""

from dataclasses import dataclass, replace

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import Int64Array, StepCounts
from balancer.layout import Layout, ParallelSpec
from balancer.plan import MAX_CAPACITY, Capacities
from balancer.planner import plan_step
from balancer.policies.base import sum_over_cells
from tools.benchmarks.baseline_rebalance import batch_rebalance
from tools.benchmarks.baseline_step import StepGrid

OURS, REBALANCE = "joint", "batch_rebalance"
POLICIES = ("sequential", "length_grouped", OURS)
METHODS = ("sequential", "length_grouped", REBALANCE, OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetup:
    """What every method gets.

    Attributes:
        num_ranks: R. num_microbatches: M, or the least of it where there are capacities.
        batch_size: mean samples of a micro-batch and rank.
        capacity_tokens, capacity_patches: of a micro-batch; None: no limit.
    """

    num_ranks: int
    num_microbatches: int
    batch_size: int
    capacity_tokens: int | None = None
    capacity_patches: int | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.num_ranks * self.num_microbatches * self.batch_size

    @property
    def is_limited(self) -> bool:
        """Whether the number of micro-batches may differ from step to step."""
        return self.capacity_tokens is not None or self.capacity_patches is not None

    def parallel(self) -> ParallelSpec:
        """The same for the planner: encoder and LLM on every rank, ranks meet once a step."""
        spec = ParallelSpec.of(Layout(dp_size=self.num_ranks), num_microbatches=self.num_microbatches)
        spec = replace(spec, fill_cells=True)
        if not self.is_limited:
            return spec
        return replace(spec, num_microbatches=None, min_num_microbatches=self.num_microbatches)

    def capacities(self, counts: StepCounts) -> Capacities:
        """The same for the planner of a step; without a limit, what the whole step holds."""
        return Capacities(tokens=self.capacity_tokens or int(counts.llm_tokens.sum()), patches=self.capacity_patches)


def place(
    method: str, counts: StepCounts, setup: StepSetup, cost_model: CostModel, *, step: int = 0
) -> tuple[Int64Array, int]:
    """(cells int64 [n, 2], M) of one step.

    Raises:
        KeyError: no such method.
        PlanError, ValueError: a sample above a capacity, or fewer samples than cells.
    """
    if method == REBALANCE:
        return _rebalanced(counts, setup)
    if method not in POLICIES:
        raise KeyError(f"method {method!r} does not exist; choose one of {', '.join(METHODS)}")
    plan = plan_step(
        counts,
        parallel=setup.parallel(),
        cost_model=cost_model,
        capacities=setup.capacities(counts),
        policy=method,
        step=step,
    )
    return np.stack([plan.dp_rank, plan.microbatch], axis=1).astype(np.int64), plan.num_microbatches


def _rebalanced(counts: StepCounts, setup: StepSetup) -> tuple[Int64Array, int]:
    """The fewest micro-batches whose cells hold the capacities; the algorithm itself knows of none."""
    limit = np.array([setup.capacity_tokens or MAX_CAPACITY, setup.capacity_patches or MAX_CAPACITY])
    sizes = np.stack([counts.llm_tokens, counts.patches], axis=1)
    for num_microbatches in range(setup.num_microbatches, len(counts) // setup.num_ranks + 1):
        cells = batch_rebalance(_grid(counts, setup.num_ranks, num_microbatches))
        shape = (setup.num_ranks, num_microbatches)
        loads = sum_over_cells(cells[:, 0] * num_microbatches + cells[:, 1], sizes, shape)
        if bool((loads <= limit).all()):
            return cells, num_microbatches
    raise ValueError(
        f"{REBALANCE}: {len(counts)} samples on {setup.num_ranks} ranks do not hold capacity_tokens="
        f"{setup.capacity_tokens}, capacity_patches={setup.capacity_patches}; raise the capacities or batch_size"
    )


def _grid(counts: StepCounts, num_ranks: int, num_microbatches: int) -> StepGrid:
    """The step as `batch_rebalance` reads it: lengths alone."""
    nothing = np.zeros((len(counts), 2), np.int64)
    return StepGrid(
        sizes=counts.llm_tokens,
        costs=nothing,
        num_ranks=num_ranks,
        num_slots=num_microbatches,
        capacity=MAX_CAPACITY,
        text=counts.llm_tokens - counts.visual_tokens,
        images=counts.num_items,
        patches=counts.patches,
        rank_forward=nothing,
        rank_backward=nothing,
    )
