"""The balancers that the benchmark compares: public systems, written anew, by name.

Each is a pure function of `StepGrid` that gives cells [n, 2] or `Placed`. `rule` is what it does, `ignores` what it
does not know, `price` what it costs; the modules named `baseline_*` have the details. Nothing is repaired: what breaks
a capacity or loses a sample is counted by the judge.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tools.benchmarks import baseline_encoders as encoders
from tools.benchmarks import baseline_grids as grids
from tools.benchmarks.baseline_outliers import variable_length_packing
from tools.benchmarks.baseline_rebalance import batch_rebalance
from tools.benchmarks.baseline_reordering import disttrain
from tools.benchmarks.baseline_step import Placed, StepGrid, in_order
from tools.benchmarks.baseline_types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancer:
    """One way to place a step.

    Attributes:
        system: where it runs today. rule, ignores, price: in words.
        run: the function.
        uses_layout: whether the placement depends on pipeline stages; others are placed once for all layouts.
        exchanges: media are encoded on other ranks than their samples run on, which no plan without exchange can be
            held against.
        may_exceed, may_lose: breaks the token capacity, or leaves samples out of the step, by its own rule.
        max_cells: more ranks x micro-batches than that take longer than a row may.
    """

    system: str
    rule: str
    ignores: str
    price: str
    run: Callable[[StepGrid], Placed | IntArray]
    uses_layout: bool = False
    exchanges: bool = False
    may_exceed: bool = False
    may_lose: bool = False
    max_cells: int = 2**62

    def place(self, grid: StepGrid) -> Placed:
        """Its placement of the step."""
        found = self.run(grid)
        return found if isinstance(found, Placed) else Placed(cells=found)


BALANCERS: Mapping[str, Balancer] = MappingProxyType(
    {
        "sequential": Balancer(
            system="no balancing",
            rule="equal counts of consecutive samples a rank and micro-batch",
            ignores="everything but counts",
            price="none",
            run=in_order,
            may_exceed=True,
        ),
        "batch_rebalance": Balancer(
            system="transformers",
            rule="samples sorted by length, cut into groups of like cost, dealt by cost slot by slot",
            ignores="images, encoder, pipeline, token capacity",
            price="padding counts in its cost although packs have none",
            run=batch_rebalance,
            may_exceed=True,
            max_cells=4_096,
        ),
        "dp_balanced": Balancer(
            system="Megatron-LM",
            rule="next-fit packs in input order, dealt to ranks slot by slot",
            ignores="cost of any kind",
            price="more micro-batches than asked for",
            run=grids.megatron_dp_balanced,
        ),
        "verl": Balancer(
            system="verl",
            rule="Karmarkar-Karp with equal counts over ranks, then over the micro-batches of a rank",
            ignores="token capacity, where ranks meet, the pipeline",
            price="a tuple of all ranks per sample",
            run=grids.verl_two_level,
            may_exceed=True,
        ),
        "best_fit_random": Balancer(
            system="TRL, axolotl and others",
            rule="best-fit packs, dealt at random",
            ignores="cost, encoder, pipeline",
            price="packs are full, not even",
            run=grids.best_fit_at_random,
        ),
        "omnibal": Balancer(
            system="OmniBal",
            rule="packs full in tokens or images by repeated sampling and filtering, dealt in their order",
            ignores="cost, where ranks meet",
            price="more or fewer micro-batches than asked for",
            run=grids.omnibal_dealt,
        ),
        "disttrain": Balancer(
            system="DistTrain",
            rule="longest first over ranks in equal counts, then micro-batches ordered to fill 1F1B's intervals",
            ignores="token capacity, meeting in every micro-batch, uneven LLM time",
            price="micro-batches stay as they came",
            run=disttrain,
            uses_layout=True,
            may_exceed=True,
        ),
        "wlb_packing": Balancer(
            system="WLB-LLM without delay",
            rule="longest first to the micro-batch of least LLM work that has room, of all ranks",
            ignores="encoder, pipeline, which rank a micro-batch is on",
            price="what fits nowhere waits for the next step",
            run=variable_length_packing,
            may_lose=True,
        ),
        "loongforge": Balancer(
            system="LoongForge",
            rule="in every micro-batch, LLM and encoder each longest first over ranks, with history and a threshold",
            ignores="other micro-batches, token capacity; media weigh patches squared",
            price="pixels and embeddings cross ranks in every micro-batch",
            run=encoders.loongforge,
            exchanges=True,
            may_exceed=True,
        ),
        "per_stage": Balancer(
            system="OrchMLLM, VeOmni",
            rule="in every micro-batch, LLM and encoder each longest first over ranks, with a shuffle between",
            ignores="other micro-batches, token capacity",
            price="pixels and embeddings cross ranks in every micro-batch",
            run=encoders.lpt_per_stage,
            exchanges=True,
            may_exceed=True,
        ),
    }
)
