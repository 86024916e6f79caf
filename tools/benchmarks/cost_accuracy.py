"""Predicted against measured time per stage and micro-batch: `python -m tools.benchmarks.cost_accuracy`.

Three models (the demo, one wide and shallow, one deep and narrow) are each profiled by `balancer-train profile`: fitted
on a designed set of micro-batches, checked on micro-batches of another seed and other shapes that the fit never saw.
One process, one thread, data in memory. Run it on a machine that does nothing else, or with `--clock cpu`.

    model -> balancer-train profile -> cost.json (Fit) -> rows per (stage, op) -> docs/cost_model_measured.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from balancer.fit_report import Fit
from dataloaders.demo import DEMO_PROCESSOR

# The console script may not be on PATH; -P keeps the current folder off the module path.
COMMAND = [sys.executable, "-P", "-c", "from balancer._entry import train; train()", "profile"]
REACH_MEDIAN, REACH_P95 = 0.10, 0.25

# Sizes as in a model folder's config.json.
MODELS: Mapping[str, Mapping[str, Any] | None] = {
    "demo": None,
    "wide": {
        "vision": {
            "dim": 96,
            "depth": 3,
            "num_heads": 3,
            "mlp_dim": 256,
            "out_dim": 256,
            "full_attention_layers": [2],
        },
        "llm": {
            "vocab_size": 2048,
            "dim": 256,
            "depth": 2,
            "num_heads": 4,
            "num_kv_heads": 4,
            "mlp_dim": 768,
            "mrope_section": [8, 12, 12],
        },
    },
    "deep": {
        "vision": {
            "dim": 32,
            "depth": 6,
            "num_heads": 2,
            "mlp_dim": 96,
            "out_dim": 64,
            "full_attention_layers": [1, 3, 5],
        },
        "llm": {
            "vocab_size": 264,
            "dim": 64,
            "depth": 8,
            "num_heads": 2,
            "num_kv_heads": 1,
            "mlp_dim": 192,
            "mrope_section": [4, 6, 6],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stage and op of one model; errors are |predicted / measured - 1| on micro-batches of other shapes.

    Attributes:
        r2, held_out_median: of the designed set. fitted, checked: micro-batches. bias: above 0 is predicted too long.
    """

    model: str
    stage: int
    op: str
    fitted: int
    r2: float
    held_out_median: float
    checked: int
    median: float
    p95: float
    bias: float

    @property
    def reached(self) -> bool:
        """Whether the row is within 10 % (median) and 25 % (p95)."""
        return self.median <= REACH_MEDIAN and self.p95 <= REACH_P95


def measure(model: str, options: Sequence[str], folder: Path) -> Fit:
    """Profile one model in a process of its own."""
    output = folder / f"{model}.json"
    subprocess.run(
        [*COMMAND, "--model", _model(model, folder), "--output", str(output), *options],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=sys.stderr,
    )
    return Fit.from_json(output.read_text(encoding="utf-8"))


def rows_of(model: str, fitted: Fit) -> list[Row]:
    """One row per stage and op that was checked."""
    stages = {(stage.stage, stage.op): stage for stage in fitted.stages}
    rows = []
    for checked in fitted.verified:
        stage = stages[checked.stage, checked.op]
        rows.append(
            Row(
                model=model,
                stage=checked.stage,
                op=checked.op,
                fitted=stage.num_microbatches,
                r2=stage.r2,
                held_out_median=stage.held_out.median,
                checked=checked.num_microbatches,
                median=checked.median,
                p95=checked.p95,
                bias=checked.bias,
            )
        )
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/cost_model_measured.md."""
    lines = [
        "| model | stage | op | fitted on | R2 | held-out median | checked on | error median | p95 | bias |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.stage} | {row.op} | {row.fitted} | {row.r2:.4f} | {row.held_out_median:.1%} "
            f"| {row.checked} | {row.median:.1%} | {row.p95:.1%} | {row.bias:+.1%} |"
        )
    worst = f"{max(row.median for row in rows):.1%}, p95 {max(row.p95 for row in rows):.1%}"
    reached = "all rows" if all(row.reached for row in rows) else "NOT all rows"
    lines.append("")
    lines.append(
        f"Worst row: median {worst}. Reach (median <= {REACH_MEDIAN:.0%}, p95 <= {REACH_P95:.0%}): met by {reached}."
    )
    return "\n".join(lines) + "\n"


def _model(name: str, folder: Path) -> str:
    """A preset's name, or a new folder with the sizes of a model."""
    sizes = MODELS[name]
    if sizes is None:
        return name
    place = folder / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"format_version": 1, **sizes}), encoding="utf-8")
    (place / "processor.json").write_text(json.dumps(dict(DEMO_PROCESSOR)), encoding="utf-8")
    return str(place)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models; the table goes to stdout, rows as JSON to --json."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.cost_accuracy", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine that is not quiet")
    parser.add_argument("--capacity-tokens", type=int, default=2048)
    parser.add_argument("--verify-microbatches", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(argv)
    shared = [f"--capacity-tokens={options.capacity_tokens}", f"--repeats={options.repeats}"]
    shared += [f"--verify-microbatches={options.verify_microbatches}"]
    shared += [f"--seed={options.seed}", f"--clock={options.clock}", "--threads=1"]
    with tempfile.TemporaryDirectory(prefix="balancer-cost-accuracy-") as folder:
        rows = [row for name in options.models for row in rows_of(name, measure(name, shared, Path(folder)))]
    sys.stdout.write(markdown(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
