"""`balancer-train check`: run the comparison in every layout this machine can start, print a table, judge.

Under torchrun (or as one of its own workers) it checks the layout it was started in. Alone, it checks one process and
starts DP=2 and PP=2 worlds of two processes on the CPU.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from balancer.layout import Layout
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from dataloaders.estimators import estimator_from_config
from dataloaders.scan import scan_source
from trainer.calibrated import memory_model
from trainer.check import CheckRow, CheckSubject, check_layout, row_from
from trainer.check_data import NUM_SAMPLES, CheckSource
from trainer.comm import communicator, launched_world_size
from trainer.config import CheckConfig
from trainer.config_yaml import to_yaml
from trainer.data import sample_reader, select, training_side
from trainer.errors import CheckFailedError, ConfigError
from trainer.kernels import ready_planner
from trainer.mixture import mixture_selector
from trainer.model_source import cost_model_for, load_model_source
from trainer.progress import progress_bars
from trainer.selftest import HEALTHY, PlantedBug, self_test

WORLD_TIMEOUT_S = 600.0
WORLDS = ((2, 1), (2, 2))  # (processes, pp_size)
FAILED = 1


def run_check(config: CheckConfig) -> int:
    """Check; returns 0 when all comparisons agree (self-test: when every planted bug is caught)."""
    torch.set_num_threads(1)
    if config.json_output is not None and not config.json_output.parent.is_dir():
        raise ConfigError(f"json_output={config.json_output}: there is no folder {config.json_output.parent}.")
    subject = build_subject(config)
    if launched_world_size() > 1:
        return _run_in_world(config, subject)
    console = wide_console()
    if config.self_test:
        found = _launched(config, processes=2, pp_size=1)
        return _report_bugs([PlantedBug(**item) for item in found], config, console)
    with communicator(device=torch.device("cpu")) as comm:
        ready_planner(comm, _reporter(console), pipeline=False)
        rows = check_layout(subject, comm)
    for processes, pp_size in WORLDS:
        rows += [row_from(item) for item in _launched(config, processes=processes, pp_size=pp_size)]
    return _report_rows(rows, config, console)


def build_subject(config: CheckConfig) -> CheckSubject:
    """The samples and the model to check: the user's first step, or the built-in set."""
    model = load_model_source(config.model)
    memory = memory_model(config, model, Layout(pp_size=config.pp_size))
    selector = None
    if not config.has_data:
        estimator = estimator_from_config(model.processor)
        source = CheckSource(seed=config.seed)
        index = scan_source(source, estimator, train_on=config.train_on, apply_orientation=config.apply_orientation)
        side = select(config, source, index, estimator, memory=memory)
        batch_size = NUM_SAMPLES
    else:
        with progress_bars() as progress:
            side = training_side(config, model.processor, memory=memory, progress=progress)
        selector = mixture_selector(side, side.ids, config)
        batch_size = config.global_batch_size
    layout = Layout()
    # The number of micro-batches is what varies here, so packs may be as large as it asks for.
    unlimited = Capacities(tokens=max(1, int(side.index.samples["llm_tokens"].sum())))
    plans = PlanSequence(
        index=side.index,
        ids=side.ids,
        global_batch_size=batch_size,
        layout=layout,
        cost_model=cost_model_for(model.config, layout),
        capacities=unlimited,
        schedule=config.schedule,
        seed=config.seed,
        shuffle=config.has_data,
        selector=selector,
    )
    return CheckSubject(reader=sample_reader(side, config), plans=plans, model=model, seed=config.seed)


def _run_in_world(config: CheckConfig, subject: CheckSubject) -> int:
    """The part of one rank: check the layout torchrun made; rank 0 writes or prints the rows."""
    device = torch.device("cpu") if config.json_output is not None else None
    with communicator(pp_size=config.pp_size, device=device) as comm:
        ready_planner(comm, _reporter(wide_console() if comm.is_main else None), pipeline=config.pp_size > 1)
        bugs = self_test(subject, comm) if config.self_test else []
        rows = [] if config.self_test else check_layout(subject, comm)
    if not comm.is_main:
        return 0
    console = wide_console()
    return _report_bugs(bugs, config, console) if config.self_test else _report_rows(rows, config, console)


def _reporter(console: Console | None) -> Callable[[str], None]:
    """What prints a line of text, or nothing where another rank does."""
    return lambda text: None if console is None else console.print(text, markup=False, highlight=False)


def _launched(config: CheckConfig, *, processes: int, pp_size: int) -> list[dict[str, Any]]:
    """Run this check in a gloo world of its own on this machine and return what rank 0 found.

    Raises:
        CheckFailedError: the world ended before it could report; the text ends with its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="balancer-check-") as folder:
        options, found = Path(folder) / "check.yaml", Path(folder) / "found.json"
        options.write_text(to_yaml(replace(config, pp_size=pp_size, json_output=found)), encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        # -P keeps the current folder off the module path: a user's trainer.py must not be picked up.
        worker = ["--no-python", sys.executable, "-P", "-c", "from balancer._entry import train; train()"]
        try:
            done = subprocess.run(
                [*launcher, *worker, "check", "--config", str(options)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=WORLD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CheckFailedError(
                f"the check in {processes} processes (pp_size={pp_size}) did not end within {WORLD_TIMEOUT_S} s. Take "
                f"fewer or smaller samples: --global-batch-size."
            ) from None
        if not found.exists():
            cause = _cause(done.stdout + done.stderr)
            raise CheckFailedError(f"the check in {processes} processes (pp_size={pp_size}) ended early:\n{cause}")
        return list(json.loads(found.read_text(encoding="utf-8")))


def _cause(output: str) -> str:
    """What the ranks said, without the launcher's report around it; the last lines where they said nothing."""
    lines = output.strip().splitlines()
    said = dict.fromkeys(line for line in lines if line.startswith("error"))
    return "\n".join(list(said) or lines[-20:])


def _report_rows(rows: Sequence[CheckRow], config: CheckConfig, console: Console) -> int:
    """Write or print comparisons; `FAILED` when one does not agree."""
    if config.json_output is None:
        return _print_rows(rows, console)
    config.json_output.write_text(json.dumps([asdict(row) for row in rows]) + "\n", encoding="utf-8")
    return 0 if all(row.passed for row in rows) else FAILED


def _report_bugs(bugs: Sequence[PlantedBug], config: CheckConfig, console: Console) -> int:
    """Write or print planted bugs; `FAILED` when one went unnoticed or the healthy run was blamed."""
    if config.json_output is None:
        return _print_bugs(bugs, console)
    config.json_output.write_text(json.dumps([asdict(item) for item in bugs]) + "\n", encoding="utf-8")
    return FAILED if _wrong_verdicts(bugs) else 0


def wide_console() -> Console:
    """A console that does not cut the table where output goes to a file or a narrow pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _print_rows(rows: Sequence[CheckRow], console: Console) -> int:
    table = Table(title="balanced step against a plain loop: largest gradient error of any tensor")
    for column in ("layout", "dtype", "M", "balancer", "covers", "loss", "worst tensor", "error", "limit", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row.layout,
            row.dtype,
            str(row.num_microbatches),
            row.balancer,
            ", ".join(row.covers),
            f"{row.loss:.6f}",
            row.worst_tensor,
            f"{row.worst_error:.1e}",
            f"{row.tolerance:.0e}",
            "ok" if row.passed else "FAILED",
        )
    console.print(table)
    failed = sum(not row.passed for row in rows)
    console.print(f"{len(rows) - failed} of {len(rows)} comparisons agree")
    return FAILED if failed else 0


def _print_bugs(bugs: Sequence[PlantedBug], console: Console) -> int:
    table = Table(title="self-test: planted bugs (DP=2, fp64)")
    for column in ("bug", "error", "worst tensor", "the check"):
        table.add_column(column)
    for item in bugs:
        table.add_row(item.bug, f"{item.worst_error:.1e}", item.worst_tensor, "fails" if item.caught else "passes")
    console.print(table)
    wrong = _wrong_verdicts(bugs)
    console.print("every bug was caught" if not wrong else f"wrong verdict on: {', '.join(wrong)}")
    return FAILED if wrong else 0


def _wrong_verdicts(bugs: Sequence[PlantedBug]) -> list[str]:
    return [item.bug for item in bugs if item.caught == (item.bug == HEALTHY)]
