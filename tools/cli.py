"""`balancer-analyze`: what a data set costs, what a run did, what balancing changed. Needs no torch.

    run       summary of a run's steps.jsonl
    timeline  a step before and after balancing, as an SVG
    data      distributions of a data set, from headers alone

Exit codes: 0 done, 2 usage (an argument that names nothing usable), 1 failure (damaged or insufficient content).
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import tyro
from rich.console import Console
from rich.progress import Progress

from balancer.errors import BalancerError
from balancer.printable import printable
from dataloaders.errors import DataError
from tools import data_report, run_report
from tools.compared_steps import choose_pair, read_pairs
from tools.data_report import TrainOn
from tools.errors import AnalyzeError, UsageError
from tools.timeline_svg import render_pair

PROGRAM = "balancer-analyze"

RunFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_FOLDER")]
Switch = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """Summarise a training run: loss, step times, balance, fill, data wait, and every sample left out."""

    run_folder: RunFolder
    """Folder of a run, as given to balancer-train with --output."""
    json: Switch = False
    """Print one JSON object in place of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineCommand:
    """Draw one step measured with the balancer off and on, as two Gantt charts on one time axis."""

    run_folder: RunFolder
    """Folder of a run that holds compare.jsonl."""
    output: Path = Path("timeline.svg")
    """SVG file to write; an existing one is replaced."""
    step: int | None = None
    """Step to draw, from 1. None: the one with the median gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCommand:
    """Count and measure the samples of a data set from headers alone; no pixel is decoded."""

    data: str
    """Tar shards, braces expanded: 'shards-{000..003}.tar' (quote it)."""
    processor: Path | None = None
    """Model folder whose processor files give the token rule. None: the published Qwen2.5-VL settings."""
    train_on: TrainOn = "assistant"
    """Turns whose tokens carry labels."""
    apply_orientation: bool = True
    """Turn images as their EXIF orientation says before measuring."""
    json: Switch = False
    """Print one JSON object in place of the tables."""


Command = RunCommand | TimelineCommand | DataCommand

COMMANDS: dict[str, Callable[..., object]] = {"run": RunCommand, "timeline": TimelineCommand, "data": DataCommand}


def main(argv: list[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    try:
        command = parse(argv or ["--help"])
    except SystemExit as leaving:  # --help (0) or a usage error (2), already printed
        return leaving.code if argv and isinstance(leaving.code, int) else 2
    try:
        _execute(command)
    except UsageError as error:
        return _fail(error, 2)
    except (AnalyzeError, BalancerError, DataError, OSError) as error:
        return _fail(error, 1)
    return 0


def parse(argv: Sequence[str]) -> Command:
    """The command that `argv` names.

    Raises:
        SystemExit: code 0 after --help, 2 after a usage error.
    """
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog=PROGRAM, description="Analyse data sets and runs. Needs no torch.", args=list(argv)
    )
    return cast(Command, command)


def _execute(command: Command) -> None:
    match command:
        case RunCommand():
            _run(command)
        case TimelineCommand():
            _timeline(command)
        case DataCommand():
            _data(command)


def _run(command: RunCommand) -> None:
    report = run_report.summarise(run_report.read_run(command.run_folder))
    if command.json:
        _write_json(report.to_dict())
    else:
        run_report.print_report(report, _console())


def _timeline(command: TimelineCommand) -> None:
    pair = choose_pair(read_pairs(command.run_folder), command.step)
    try:
        command.output.parent.mkdir(parents=True, exist_ok=True)
        command.output.write_text(render_pair(pair), encoding="utf-8")
    except OSError as error:
        raise AnalyzeError(f"{command.output} cannot be written: {error}. Give another --output.") from None
    _console().print(
        f"step {pair.step}: {pair.before.step_ms:.1f} ms before, {pair.after.step_ms:.1f} ms after; "
        f"drawn in {command.output}",
        markup=False,
    )


def _data(command: DataCommand) -> None:
    with _progress("reading headers") as advance:
        report = data_report.report_on(
            command.data,
            processor=command.processor,
            train_on=command.train_on,
            apply_orientation=command.apply_orientation,
            progress=advance,
        )
    if command.json:
        _write_json(report.to_dict())
    else:
        data_report.print_report(report, _console())


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr where a person watches; stdout stays clean."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _console() -> Console:
    # Long names of shards must be copyable, so lines are never broken in the middle of a word by highlighting.
    return Console(highlight=False, soft_wrap=True)


def _write_json(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(printable(f"error: {error}\n"))  # the text may name members and keys, which are data
    return code
