"""Step times of two models on three mixes, shared out by four methods: the `steps` part of `tools.benchmarks.dropin`.

WorkerOptions --torchrun, 2 ranks, one thread each--> dropin_worker --JSON--> runs --dropin_rows--> tables

One world per model, so that torch starts twice, not six times; the fit of the cost model is shared by its mixes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tools.benchmarks.dropin_rows import Compared, MethodRow, by_method, compare, steps_markdown
from tools.benchmarks.dropin_worker import Run, WorkerOptions

NUM_RANKS = 2
# -P keeps the folder of the script off the module path.
_LAUNCHER = (sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one or several worlds measured.

    Attributes:
        fits: by model: errors of the fit, and milliseconds of a step beside its micro-batches.
    """

    runs: tuple[Run, ...]
    fits: Mapping[str, Mapping[str, float]]

    def compared(self) -> list[Compared]:
        """Ratios of all models and mixes."""
        return compare(self.runs)

    def by_method(self) -> list[MethodRow]:
        """Methods in numbers of their own."""
        return by_method(self.runs)

    def markdown(self) -> str:
        """The tables of docs/dropin_measured.md."""
        fits = [
            f"Fit of {name}: median error {fit['median_error']:.1%}, 95th percentile {fit['p95_error']:.1%}; "
            f"{fit['rest_ms']:.1f} ms a step beside the micro-batches."
            for name, fit in self.fits.items()
        ]
        return "\n".join([steps_markdown(self.compared(), self.by_method()), *fits, ""])

    def as_json(self) -> dict[str, Any]:
        """Runs, fits and rows."""
        return {
            "fits": {name: dict(fit) for name, fit in self.fits.items()},
            "compared": [{**asdict(row), "verdict": row.verdict} for row in self.compared()],
            "methods": [asdict(row) for row in self.by_method()],
            "runs": [asdict(run) for run in self.runs],
        }


def measure_steps(models: Sequence[str], options: WorkerOptions, folder: Path) -> Measured:
    """Measure all `models` with `options`, whose `model` and `output` are set here; files go to `folder`.

    Raises:
        subprocess.CalledProcessError: a rank failed; its error is on stderr.
    """
    runs: list[Run] = []
    fits = {}
    for model in models:
        result = _measure(replace(options, model=model, output=str(folder / f"{model}.json")), folder)
        runs += [run_of(values) for values in result["runs"]]
        fits[model] = result["fit"]
    return Measured(runs=tuple(runs), fits=fits)


def run_of(values: Mapping[str, Any]) -> Run:
    """The run that was written as JSON."""
    lists = {name: tuple(values[name]) for name in ("compute_ms", "predicted_ms")}
    return Run(**{**values, **lists})


def _measure(options: WorkerOptions, folder: Path) -> dict[str, Any]:
    asked = folder / f"{options.model}-options.json"
    asked.write_text(json.dumps(asdict(options)), encoding="utf-8")
    worker = Path(__file__).with_name("dropin_worker.py")
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    subprocess.run(
        [*_LAUNCHER, str(worker), str(asked)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        stdout=sys.stderr,
    )
    result: dict[str, Any] = json.loads(Path(options.output).read_text(encoding="utf-8"))
    return result
