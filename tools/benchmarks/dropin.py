"""The loader where torch's stood, measured: `python -m tools.benchmarks.dropin overhead | steps | all`.

    overhead   what it costs: beside a plain DataLoader with the same batches            dropin_overhead   3 minutes
    steps      what it gains: two models, three mixes, four methods on two ranks         dropin_steps     12 minutes
                  samples: dropin_mixes   who runs what: dropin_methods   predicted by: dropin_fit
                  models: dropin_models   one rank: dropin_worker         statistics: dropin_rows

Tables go to stdout; with --output also dropin.md and dropin.json. Two cores are enough and needed; run it on a machine
that does nothing else. `--quick` runs everything at sizes that only show that it works.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.benchmarks.dropin_mixes import MIXES
from tools.benchmarks.dropin_models import MODELS
from tools.benchmarks.dropin_overhead import OverheadOptions, loading, overhead_markdown, waiting
from tools.benchmarks.dropin_steps import measure_steps
from tools.benchmarks.dropin_worker import WorkerOptions
from tools.benchmarks.measuring import environment

PARTS = ("overhead", "steps")
QUICK_OVERHEAD = OverheadOptions(
    batch_size=4,
    loading_ranks=2,
    loading_steps=6,
    loading_pairs=2,
    waiting_samples=64,
    waiting_ranks=4,
    waiting_steps=8,
    waiting_pairs=1,
    compute_ms=1.0,
    workers=(0,),
)


def parser() -> argparse.ArgumentParser:
    """The command line; defaults are the sizes of the tables in docs."""
    made = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.dropin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = WorkerOptions(model="", mixes=(), output="")
    made.add_argument("part", choices=(*PARTS, "all"))
    made.add_argument("--output", type=Path, help="folder for dropin.md and dropin.json")
    made.add_argument("--quick", action="store_true", help="smallest sizes: numbers mean nothing")
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    made.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES))
    made.add_argument("--steps", type=int, default=defaults.num_steps, help="steps of each mix")
    made.add_argument("--rounds", type=int, default=defaults.rounds, help="A B C D, D C B A passes over each step")
    made.add_argument("--batch-size", type=int, default=defaults.batch_size, help="mean samples a micro-batch and rank")
    made.add_argument("--num-microbatches", type=int, default=defaults.num_microbatches)
    made.add_argument("--capacity-tokens", type=int, help="of a micro-batch, for all methods; then M is the least")
    made.add_argument("--capacity-patches", type=int)
    made.add_argument("--seed", type=int, default=defaults.seed)
    return made


def worker_options(arguments: argparse.Namespace) -> WorkerOptions:
    """What the ranks are told, but for the model and the file they write."""
    quick = {"num_steps": 2, "rounds": 1, "tiny": True, "batch_size": 2, "fit_cells": 4, "fit_repeats": 1}
    asked: dict[str, Any] = {
        "num_steps": arguments.steps,
        "rounds": arguments.rounds,
        "batch_size": arguments.batch_size,
        **(quick if arguments.quick else {}),
    }
    return WorkerOptions(
        model="",
        output="",
        mixes=tuple(arguments.mixes),
        num_microbatches=arguments.num_microbatches,
        capacity_tokens=arguments.capacity_tokens,
        capacity_patches=arguments.capacity_patches,
        seed=arguments.seed,
        **asked,
    )


def measured(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """(tables, the same and what they are made of as JSON values)."""
    text = ""
    content: dict[str, Any] = {"environment": {**environment({}), "clock": "time.perf_counter"}}
    if arguments.part != "steps":
        options = QUICK_OVERHEAD if arguments.quick else OverheadOptions()
        loaded, waited = loading(options), waiting(options)
        text += "## Overhead\n\n" + overhead_markdown(options, loaded, waited) + "\n"
        content["overhead"] = {
            "options": asdict(options),
            "loading": [asdict(row) for row in loaded],
            "waiting": [asdict(row) for row in waited],
        }
    if arguments.part != "overhead":
        asked = worker_options(arguments)
        with tempfile.TemporaryDirectory(prefix="balancer-dropin-") as folder:
            steps = measure_steps(arguments.models, asked, Path(folder))
        text += "## Steps\n\n" + steps.markdown()
        content["steps"] = {"options": asdict(asked), **steps.as_json()}
    return text, content


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module."""
    arguments = parser().parse_args(argv)
    text, content = measured(arguments)
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "dropin.md").write_text(text, encoding="utf-8")
        (arguments.output / "dropin.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
