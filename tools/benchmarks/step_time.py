"""Step time with the balancer off and on, measured on this machine: `python -m tools.benchmarks.step_time`.

For every layout a short `balancer-train fit` on the demo corpus is started under torchrun; at its end it runs the same
steps off, on, on, off (see `trainer.compare`). Each pair of runs of one step gives a ratio; the table shows medians and
the spread of the ratios. One thread per rank. Run it on a machine that does nothing else.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from balancer.measured import measure, num_ranks, num_replicas
from tools.compared_steps import StepPair, read_pairs

# The console script may not be on PATH; -P keeps the current folder off the module path.
WORKER = ["--no-python", sys.executable, "-P", "-c", "from balancer._entry import train; train()"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run: processes and the options that matter."""

    name: str
    processes: int
    options: tuple[str, ...]


SETTINGS = (
    Setting(name="DP=2, 8 samples per step", processes=2, options=("--global-batch-size", "8")),
    Setting(name="DP=2, 16 samples per step", processes=2, options=("--global-batch-size", "16")),
    Setting(name="DP=2, 32 samples per step", processes=2, options=("--global-batch-size", "32")),
    Setting(
        name="PP=2 (encoder, LLM), 16 samples, 4 micro-batches",
        processes=2,
        options=("--global-batch-size", "16", "--pp-size", "2", "--num-microbatches", "4"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians over the measured steps of a setting; `ratio_*` are on / off step times of single pairs."""

    setting: str
    num_steps: int
    off_ms: float
    on_ms: float
    ratio_median: float
    ratio_min: float
    ratio_max: float
    off_imbalance: float
    on_imbalance: float
    off_bubble_ratio: float
    on_bubble_ratio: float


def run(setting: Setting, *, steps: int, folder: Path) -> Row:
    """Train a little in `setting`, compare `steps` steps, and read the result."""
    output = folder / setting.name.replace(" ", "-").replace("|", "-")
    options = [*setting.options, "--max-steps", str(steps), "--compare-steps", str(steps), "--output", str(output)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.processes}"]
    subprocess.run(
        [*launcher, *WORKER, "fit", *options], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr
    )
    return summarise(setting.name, read_pairs(output))


def summarise(name: str, pairs: Sequence[StepPair]) -> Row:
    """The row of one setting."""
    records = [record for pair in pairs for record in (pair.before, pair.after)]
    ranks, replicas = num_ranks(records), num_replicas(records)
    off = [measure(pair.before.actions, ranks=ranks, replicas=replicas) for pair in pairs]
    on = [measure(pair.after.actions, ranks=ranks, replicas=replicas) for pair in pairs]
    ratios = [1.0 / pair.gain for pair in pairs]
    return Row(
        setting=name,
        num_steps=len({pair.step for pair in pairs}),
        off_ms=statistics.median(step.span_ms for step in off),
        on_ms=statistics.median(step.span_ms for step in on),
        ratio_median=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        off_imbalance=statistics.median(step.rank_imbalance for step in off),
        on_imbalance=statistics.median(step.rank_imbalance for step in on),
        off_bubble_ratio=statistics.median(step.bubble_ratio for step in off),
        on_bubble_ratio=statistics.median(step.bubble_ratio for step in on),
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/measurements.md."""
    lines = [
        "| setting | steps | off ms | on ms | on / off, median (min to max) | imbalance off -> on | bubble off -> on |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row.ratio_median:.2f} ({row.ratio_min:.2f} to {row.ratio_max:.2f})"
        lines.append(
            f"| {row.setting} | {row.num_steps} | {row.off_ms:.0f} | {row.on_ms:.0f} | {ratio} "
            f"| {row.off_imbalance:.2f} -> {row.on_imbalance:.2f} "
            f"| {row.off_bubble_ratio:.2f} -> {row.on_bubble_ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all settings; the table goes to stdout, JSON to --json."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.step_time", description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="steps compared per setting (each runs four times)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="balancer-step-time-") as folder:
        rows = [run(setting, steps=options.steps, folder=Path(folder)) for setting in SETTINGS]
    sys.stdout.write(markdown(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
