"""What the benchmark of imbalance places: layouts, and steps of samples on R replicas x M micro-batches.

    workload, group, R, M, seed  -->  Step: samples [n], StepCounts, token capacity of a micro-batch
    Step + layout + meeting rule -->  PlacementProblem: forward, backward ns [n, S]   and   StepGrid for the baselines

Two groups of steps, because one sample that is longer than a micro-batch cannot be balanced by any placement:

    fine     the largest sample is at most a quarter of the mean micro-batch, in encoder and in LLM time: 16 samples a
             micro-batch, cut (media and text alike) to the longest length for which that holds
    coarse   8 samples a micro-batch, cut at 32,768 tokens only

Layouts of one replica, each with the closed-form cost of Qwen2.5-VL-7B (encoder 32 layers, LLM 28 layers):

    colocated                               encoder and LLM on one rank, one micro-batch after the other
    encoder stage, P = 2   own-p2           encoder on rank 0, LLM on rank 1, 1F1B
    encoder stage, P = 4   own-p4           encoder on rank 0, LLM on ranks 1 to 3, 1F1B
    spread encoder, P = 4  spread-p4        LLM on all ranks, each encodes whole micro-batches inside it, `nested`
    interleaved, P = 4     interleaved-p4   encoder beside the first of 8 LLM chunks, interleaved 1F1B
    zero bubble, P = 4     zb-p4            encoder beside the first LLM stage, ZB-H1
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import StepCounts
from balancer.layout import EncoderPlace, Meet, ParallelSpec
from balancer.placement_problem import placement_problem
from balancer.plan import Capacities
from balancer.policies import PlacementProblem
from tools.benchmarks.baseline_step import StepGrid, even_groups
from tools.benchmarks.baseline_types import IntArray
from tools.benchmarks.grid_rows import grid_capacity
from tools.benchmarks.partition_rows import MAX_TOKENS
from tools.benchmarks.workloads import LLM, Workload, costs, counts_of, limited, staged_costs

Group = Literal["fine", "coarse"]
GROUPS: tuple[Group, ...] = get_args(Group)
SAMPLES_PER_CELL = MappingProxyType({"fine": 16, "coarse": 8})
FINE_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCase:
    """One replica: P pipeline ranks, where the encoder is, LLM chunks per rank, and the schedule.

    Attributes:
        key: short name for a command line.
        name: in tables.
    """

    key: str
    name: str
    pp_size: int
    encoder: EncoderPlace
    schedule: str
    num_chunks: int = 1

    def parallel(self, num_ranks: int, num_microbatches: int, meet: Meet) -> ParallelSpec:
        """R replicas with M micro-batches."""
        return ParallelSpec.pipeline(
            dp_size=num_ranks,
            pp_size=self.pp_size,
            encoder=self.encoder,
            num_chunks=self.num_chunks,
            num_microbatches=num_microbatches,
            meet=meet,
        )

    def cost_model(self) -> CostModel:
        """Closed form of the 7B model with the LLM layers split evenly over its stages, larger shares first."""
        return _cost_model(self.parallel(1, 1, "step").num_stages - 1)


LAYOUTS = (
    LayoutCase(key="colocated", name="colocated", pp_size=1, encoder="own", schedule="1f1b"),
    LayoutCase(key="own-p2", name="encoder stage, P = 2", pp_size=2, encoder="own", schedule="1f1b"),
    LayoutCase(key="own-p4", name="encoder stage, P = 4", pp_size=4, encoder="own", schedule="1f1b"),
    LayoutCase(key="spread-p4", name="spread encoder, P = 4", pp_size=4, encoder="spread", schedule="nested"),
    LayoutCase(
        key="interleaved-p4",
        name="interleaved, P = 4",
        pp_size=4,
        encoder="shared",
        num_chunks=2,
        schedule="interleaved1f1b",
    ),
    LayoutCase(key="zb-p4", name="zero bubble, P = 4", pp_size=4, encoder="shared", schedule="zb-h1"),
)
MAIN_LAYOUTS = tuple(layout.name for layout in LAYOUTS[:4])


@lru_cache(maxsize=8)
def _cost_model(num_llm_stages: int) -> CostModel:
    return staged_costs(np.bincount(even_groups(LLM.depth, num_llm_stages), minlength=num_llm_stages).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Samples of one step and where they go: R = `num_ranks` replicas, M = `num_microbatches`.

    Attributes:
        seed: of the samples. capacity: tokens that a micro-batch may hold.
    """

    samples: Workload
    group: Group
    num_ranks: int
    num_microbatches: int
    seed: int
    capacity: int

    @cached_property
    def counts(self) -> StepCounts:
        """The samples as the planner sees them."""
        return counts_of(self.samples)

    @property
    def num_cells(self) -> int:
        """Replicas times micro-batches."""
        return self.num_ranks * self.num_microbatches

    def problem(self, layout: LayoutCase, meet: Meet) -> PlacementProblem:
        """Times and limits under a layout."""
        return placement_problem(
            self.counts,
            parallel=layout.parallel(self.num_ranks, self.num_microbatches, meet),
            cost_model=layout.cost_model(),
            capacities=Capacities(tokens=self.capacity),
            schedule=layout.schedule,
        )

    def grid(self, problem: PlacementProblem) -> StepGrid:
        """The same for baselines; a spread encoder counts as an equal share of every pipeline rank."""
        forward, backward = (_on_ranks(problem, times) for times in (problem.forward_ns, problem.backward_ns))
        both = problem.forward_ns + problem.backward_ns
        return StepGrid(
            costs=np.stack([both[:, 0], both[:, 1:].sum(axis=1)], axis=1),
            sizes=self.samples.tokens,
            capacity=self.capacity,
            num_ranks=self.num_ranks,
            num_slots=self.num_microbatches,
            text=self.samples.text,
            images=self.samples.images,
            patches=self.samples.patches,
            rank_forward=forward,
            rank_backward=backward,
        )


def _on_ranks(problem: PlacementProblem, times: IntArray) -> IntArray:
    """Times of the stages int64 [n, S] on pipeline ranks, int64 [n, P]."""
    ranks = np.zeros((len(times), problem.num_pipeline_ranks), np.int64)
    for stage, rank in enumerate(problem.stage_ranks):
        if rank >= 0:
            ranks[:, rank] += times[:, stage]
        else:
            ranks += times[:, stage, None] // problem.num_pipeline_ranks
    return ranks


def make_step(samples: Workload, group: Group, num_ranks: int, num_microbatches: int, seed: int) -> Step:
    """A step of all `samples`, which are cut as their group says."""
    num_cells = num_ranks * num_microbatches
    samples = limited(samples, MAX_TOKENS)
    if group == "fine":
        samples = finely_cut(samples, num_cells)
    return Step(
        samples=samples,
        group=group,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        seed=seed,
        capacity=grid_capacity(samples.tokens, num_cells),
    )


def largest_share(samples: Workload, num_cells: int) -> float:
    """Largest sample over the mean micro-batch, in encoder or LLM time, whichever is larger."""
    both = costs(samples)
    means = both.sum(axis=0) / num_cells
    return max(float(both[:, stage].max() / means[stage]) for stage in range(2) if means[stage])


def finely_cut(samples: Workload, num_cells: int, share: float = FINE_SHARE) -> Workload:
    """The samples cut at the longest length for which none is more than `share` of the mean micro-batch.

    Raises:
        ValueError: too few samples a micro-batch: even samples of one length each are a larger part of it.
    """
    if largest_share(samples, num_cells) <= share:
        return samples
    good, bad = 1, int(samples.tokens.max())
    while bad - good > max(good // 64, 1):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if largest_share(limited(samples, middle), num_cells) <= share else (good, middle)
    cut = limited(samples, good)
    if largest_share(cut, num_cells) > share:
        raise ValueError(
            f"{len(samples)} samples of {samples.name!r} on {num_cells} micro-batches: no length makes each sample at "
            f"most {share:g} of a mean micro-batch; give more samples"
        )
    return cut
