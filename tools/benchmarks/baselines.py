"""Algorithms of public systems, written anew from their description: what the benchmarks compare with.

This is the one place for baselines in the project. Each is a pure function with one of three signatures; `system`
names where the algorithm runs today, `language` what the original is made of, which is what ours is made of too
(pure Python loops, heapq and bisect, or numba), so that speeds compare. They return what the original returns: lists of
item indices, except that numba ones return arrays, which spares them the building of lists.

    packer       (Items)                  ->  bins
    partitioner  (Weights)                ->  parts, or int64 [n, S] where each stage has an assignment of its own
    grid placer  (Grid)                   ->  int64 [n, 2], rank and slot of each item

Inputs that the original takes as Python lists are converted before the clock starts (`Items.rows`). Nothing is
repaired: where the original may exceed a capacity, so does this, and the benchmark reports it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tools.benchmarks import baseline_grids as grids
from tools.benchmarks import baseline_packers as packers
from tools.benchmarks import baseline_partitions as partitions
from tools.benchmarks.baseline_types import Bins, Grid, IntArray, Items, Weights

Language = Literal["python", "numba"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackBaseline:
    """A packer.

    Attributes:
        system, language: see above.
        run: the function.
        dimensions: number of capacities it is made for; None: any.
        max_items: largest n of a benchmark row: beyond it a run takes longer than a row may.
    """

    system: str
    run: Callable[[Items], Bins]
    language: Language = "python"
    dimensions: int | None = 1
    max_items: int = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionBaseline:
    """A partitioner.

    Attributes:
        system, language, run: as above.
        equal_count: numbers of items per part are equal.
        several_stages: made for more than one cost; the others balance the last stage only.
        max_cells: largest number of items times parts.
    """

    system: str
    run: Callable[[Weights], Bins]
    language: Language = "python"
    equal_count: bool = False
    several_stages: bool = False
    max_cells: int = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class GridBaseline:
    """A placer on ranks x slots; `may_exceed`: nothing in it keeps cells within the capacity."""

    system: str
    run: Callable[[Grid], IntArray]
    language: Language = "python"
    may_exceed: bool = False


PACK_BASELINES: Mapping[str, PackBaseline] = MappingProxyType(
    {
        "axolotl_first_fit": PackBaseline(
            system="axolotl", run=packers.axolotl_first_fit, language="numba", max_items=10_000_000
        ),
        "axolotl_sequential": PackBaseline(
            system="axolotl", run=packers.axolotl_sequential, language="numba", max_items=10_000_000
        ),
        "megatron_next_fit": PackBaseline(system="Megatron-LM", run=packers.megatron_next_fit, dimensions=None),
        "llama_factory_knapsack": PackBaseline(system="LLaMA-Factory", run=packers.llama_factory_knapsack),
        "llama_factory_knapsack_global": PackBaseline(
            system="LLaMA-Factory, all at once", run=packers.llama_factory_knapsack_global, max_items=100_000
        ),
        "energon_knapsack": PackBaseline(system="Megatron-Energon", run=packers.energon_knapsack, max_items=100_000),
        "nemo_first_fit_shuffle": PackBaseline(system="NeMo", run=packers.nemo_first_fit_shuffle),
        "nemo_first_fit_decreasing": PackBaseline(system="NeMo", run=packers.nemo_first_fit_decreasing),
        "trl_best_fit_decreasing": PackBaseline(system="TRL", run=packers.trl_best_fit_decreasing),
        "omnibal": PackBaseline(system="OmniBal", run=packers.omnibal, dimensions=None, max_items=100_000),
        "internvl_buffer": PackBaseline(
            system="InternVL", run=packers.internvl_buffer, dimensions=2, max_items=100_000
        ),
    }
)

PARTITION_BASELINES: Mapping[str, PartitionBaseline] = MappingProxyType(
    {
        "verl_karmarkar_karp_equal": PartitionBaseline(
            system="verl", run=partitions.verl_karmarkar_karp_equal, equal_count=True
        ),
        "verl_karmarkar_karp": PartitionBaseline(
            system="verl", run=partitions.verl_karmarkar_karp, max_cells=1_000_000
        ),
        "karmarkar_karp_sum": PartitionBaseline(
            system="verl, on the sum of stages",
            run=partitions.karmarkar_karp_sum,
            several_stages=True,
            max_cells=1_000_000,
        ),
        "verl_greedy": PartitionBaseline(system="verl", run=partitions.verl_greedy),
        "areal_balanced_greedy": PartitionBaseline(
            system="AReaL", run=partitions.areal_balanced_greedy, equal_count=True
        ),
        "veomni_lpt": PartitionBaseline(system="VeOmni, LoongForge", run=partitions.veomni_lpt),
        "lpt_per_stage": PartitionBaseline(
            system="VeOmni, OrchMLLM with re-shuffle between stages", run=partitions.lpt_per_stage, several_stages=True
        ),
        "sequential": PartitionBaseline(system="no balancing", run=partitions.sequential, equal_count=True),
    }
)

GRID_BASELINES: Mapping[str, GridBaseline] = MappingProxyType(
    {
        "megatron_dp_balanced": GridBaseline(system="Megatron-LM", run=grids.megatron_dp_balanced),
        "verl_two_level": GridBaseline(system="verl", run=grids.verl_two_level, may_exceed=True),
        "best_fit_at_random": GridBaseline(system="TRL, axolotl and others", run=grids.best_fit_at_random),
    }
)
