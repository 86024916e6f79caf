"""What planning costs: CPU milliseconds of the whole `plan_step` on one core, kernels compiled.

    512 samples on 8 x 4, 8,192 on 64 x 16, 131,072 on 1,024 x 16; each workload, layout and meeting rule

Counts are made before the clock starts, as a loader has them; what is timed is what a rank does at every step.
"""

import gc
import statistics
import time
from dataclasses import dataclass

from balancer.errors import BalancerError
from tools.benchmarks.imbalance_cases import LAYOUTS, make_step
from tools.benchmarks.imbalance_ours import planned
from tools.benchmarks.imbalance_run import MEETS, RunOptions
from tools.benchmarks.options import progress
from tools.benchmarks.workloads import workload

# Samples, R, M and the limit in milliseconds.
TIMING_CASES = ((512, 8, 4, 2.0), (8_192, 64, 16, 10.0), (131_072, 1_024, 16, 300.0))
MAX_RUNS = 15
BUDGET_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTime:
    """One line. `runs_ms`: CPU time of every warm run."""

    num_samples: int
    num_ranks: int
    num_microbatches: int
    limit_ms: float
    workload: str
    layout: str
    meet: str
    runs_ms: tuple[float, ...]

    @property
    def step(self) -> str:
        """Samples and where they go, in words."""
        return f"{self.num_samples:,} on {self.num_ranks:,} x {self.num_microbatches}"

    @property
    def median_ms(self) -> float:
        """Median over the runs."""
        return statistics.median(self.runs_ms)

    @property
    def min_ms(self) -> float:
        """The run that was disturbed least."""
        return min(self.runs_ms)


def planning_times(options: RunOptions, policy: str, *, quick: bool = False) -> list[PlanningTime]:
    """All lines; with `quick` the smallest case only."""
    lines = []
    for num_samples, num_ranks, num_microbatches, limit_ms in TIMING_CASES[: 1 if quick else None]:
        progress(f"planning time: {num_samples:,} samples on {num_ranks:,} x {num_microbatches}")
        for name in options.workloads:
            samples = workload(name, num_samples, data=options.data)
            step = make_step(samples, "coarse", num_ranks, num_microbatches, 0)
            _ = step.counts
            for layout in [layout for layout in LAYOUTS if layout.name in options.layouts]:
                for meet in MEETS:
                    try:
                        planned(step, layout, meet, policy)
                    except BalancerError:  # the rows of the main table say why
                        continue
                    runs: list[float] = []
                    while len(runs) < MAX_RUNS and (not runs or sum(runs) < 1e3 * BUDGET_S):
                        gc.collect()
                        start = time.process_time()
                        planned(step, layout, meet, policy)
                        runs.append(1e3 * (time.process_time() - start))
                    lines.append(
                        PlanningTime(
                            num_samples=num_samples,
                            num_ranks=num_ranks,
                            num_microbatches=num_microbatches,
                            limit_ms=limit_ms,
                            workload=name,
                            layout=layout.name,
                            meet=meet,
                            runs_ms=tuple(runs),
                        )
                    )
    return lines
