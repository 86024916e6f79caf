"""What the benchmark of packing and partitioning runs, and how long."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.benchmarks.workloads import Workload, available, workload

NUM_ITEMS = 100_000
CAPACITIES = (4_096, 8_192, 32_768, 131_072)
SCALE_ITEMS = (1_000, 10_000, 1_000_000, 10_000_000)
SLOW_ALGORITHMS = frozenset({"exact"})  # made for a dozen items


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run.

    Attributes:
        num_items: n of most rows. capacities: token capacities. scale: further n, for two workloads at 8,192 tokens.
        repeats, budget_s: runs of a method, while they take less than the budget together.
        workloads: names, or empty for all. data: folder of real tables. with_peers: also what is installed.
        seed: of the workloads. quick: small cases, to see that everything runs.
    """

    num_items: int = NUM_ITEMS
    capacities: tuple[int, ...] = CAPACITIES
    scale: tuple[int, ...] = SCALE_ITEMS
    repeats: int = 5
    budget_s: float = 2.0
    workloads: tuple[str, ...] = ()
    data: Path | None = None
    with_peers: bool = True
    seed: int = 0
    quick: bool = False

    def names(self, wanted: Sequence[str] | None = None) -> list[str]:
        """Workloads to run: those asked for, else `wanted`, else all."""
        found = available(self.data)
        return [name for name in (self.workloads or wanted or found) if name in found]

    def samples(self, name: str, num_items: int | None = None, **options: bool) -> Workload:
        """Samples of one workload."""
        return workload(name, num_items or self.num_items, self.seed, data=self.data, **options)


def progress(text: str) -> None:
    """A line on stderr, so that stdout holds the tables only."""
    print(text, file=sys.stderr, flush=True)
