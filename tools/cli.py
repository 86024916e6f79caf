"""`balancer-analyze`: what a data set costs, what a run did, what balancing changed. Needs no torch.

    run       summary of a run's steps.jsonl
    verify    proof that a run consumed every sample exactly once
    timeline  a step before and after balancing, as an SVG
    data      distributions of a data set or of its index, from headers alone
    index     the cost index of a data set, in parallel, resumable, on one machine or several
    merge     the parts of an index, put together
    tokens    what single files or sizes cost under a model, step by step
    plan      what each policy would do on a data set, and where balancing does not help

Exit codes: 0 done, 2 usage (an argument that names nothing usable), 1 failure (damaged or insufficient content).
"""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast

import tyro
from rich.console import Console
from rich.progress import Progress

from balancer.errors import BalancerError
from balancer.printable import printable
from dataloaders.errors import DataError
from dataloaders.estimators import Preprocessing
from dataloaders.index import CostIndex
from tools import data_report, index_command, run_report, tokens_report, verify_command
from tools.compared_steps import choose_pair, read_pairs
from tools.cost_plot import render_costs
from tools.errors import AnalyzeError, UsageError
from tools.index_command import Built, IndexCommand, MergeCommand
from tools.model_folder import TextRule, TrainOn
from tools.plan_command import PlanCommand
from tools.reach import reach
from tools.timeline_svg import render_pair

PROGRAM = "balancer-analyze"
WIDE_CHARS = 140
PLAN_CHARS = 176  # the table of policies has many columns

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
class VerifyCommand:
    """Prove from a run's ledger that every sample was consumed exactly once, across stops and changes of ranks."""

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
    """Count and measure the samples of a data set from headers alone, or of its index; no pixel is decoded."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INDEX_OR_DATA")] = ()
    """Folder of an index; or tar shards, .jsonl, .json or .parquet files (of one kind), or a folder that datasets'
    save_to_disk wrote; paths or URLs, braces and wildcards are expanded: 'shards-{000..003}.tar' (quote it)."""
    data: str | None = None
    """The same as an option."""
    model: Annotated[Path | None, tyro.conf.arg(aliases=["--processor"])] = None
    """Model folder whose processor files give the token rule. None: that of the index; for data, the published
    Qwen2.5-VL settings."""
    text: TextRule = "auto"
    """How the text of data is counted: tokenizer and template of the folder, bytes, or roughly."""
    train_on: TrainOn | None = None
    """Turns whose tokens carry labels. None: that of the index; for data, assistant turns."""
    preprocessing: Preprocessing | None = None
    """Library that resizes media before the processor. None: what users of the model family do by default."""
    apply_orientation: bool = True
    """Turn images as their EXIF orientation says before measuring."""
    media_root: str | None = None
    """Folder or URL that paths of media in the records start from. None: the folder of the file that names them. Not
    for tars or an index."""
    cache_dir: Path | None = None
    """Folder that keeps ranges of remote files and the tables of members of tars. None: no ranges, and the tables in
    the user's cache folder, where balancer-train looks for them."""
    plot: Path | None = None
    """Also draw the histograms as an SVG file; an existing one is replaced."""
    json: Switch = False
    """Print one JSON object in place of the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensCommand:
    """Print what media cost under a model: tokens, patches, frames, and the formula's steps."""

    media: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE_OR_WxH[xFRAMES@FPS]")] = ()
    """Image or video files, or sizes: 640x480 for an image, 1280x720x300@29.97 for a video of 300 frames."""
    model: Path | None = None
    """Model folder in Hugging Face format: its configuration files decide every count."""
    preprocessing: Preprocessing | None = None
    """Library that resizes media before the processor. None: what users of the model family do by default."""
    num_images: int = 1
    """Images in the sample: some families cut up an image only where there are few."""
    apply_orientation: bool = True
    """Turn images as their EXIF orientation says before measuring."""
    json: Switch = False
    """Print one JSON object in place of the text."""


Command = (
    RunCommand
    | VerifyCommand
    | TimelineCommand
    | DataCommand
    | TokensCommand
    | IndexCommand
    | MergeCommand
    | PlanCommand
)

COMMANDS: dict[str, Callable[..., object]] = {
    "run": RunCommand,
    "verify": VerifyCommand,
    "timeline": TimelineCommand,
    "data": DataCommand,
    "tokens": TokensCommand,
    "index": IndexCommand,
    "merge": MergeCommand,
    "plan": PlanCommand,
}


def main(argv: list[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    try:
        command = parse(argv or ["--help"])
    except UsageError as error:
        return _fail(error, 2)
    except SystemExit as leaving:  # --help (0) or a usage error (2), already printed
        return leaving.code if argv and isinstance(leaving.code, int) else 2
    try:
        _execute(command)
    except KeyboardInterrupt as leaving:
        sys.stderr.write(printable(f"interrupted: {leaving}\n" if str(leaving) else "interrupted\n"))
        return 130
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
    name, *rest = argv or [""]
    if name in COMMANDS:  # so that usage errors name the help of this command, not that of the program
        return _at_home(cast(Command, tyro.cli(COMMANDS[name], prog=f"{PROGRAM} {name}", args=rest)))
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog=PROGRAM, description="Analyse data sets and runs. Needs no torch.", args=list(argv)
    )
    return _at_home(cast(Command, command))


def _at_home(command: Command) -> Command:
    """The command with `~` expanded in its paths: a shell leaves it in `--output=~/index` and in quotes."""

    def expanded(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(expanded, value))
        return Path(os.path.expanduser(value)) if isinstance(value, Path) else value

    values: dict[str, Any] = {field.name: expanded(getattr(command, field.name)) for field in fields(command)}
    return type(command)(**values)


def _execute(command: Command) -> None:
    match command:
        case RunCommand():
            _run(command)
        case VerifyCommand():
            _verify(command)
        case TimelineCommand():
            _timeline(command)
        case DataCommand():
            _data(command)
        case TokensCommand():
            _tokens(command)
        case IndexCommand():
            _index(command)
        case PlanCommand():
            _plan(command)
        case MergeCommand():
            index = index_command.run_merge(command)
            _print_index(index, None, as_json=command.json)


def _run(command: RunCommand) -> None:
    report = run_report.summarise(run_report.read_run(command.run_folder))
    if command.json:
        _write_json(report.to_dict())
    else:
        run_report.print_report(report, _console())


def _verify(command: VerifyCommand) -> None:
    report = verify_command.verify_run(command.run_folder)
    if command.json:
        _write_json(report.to_dict())
    else:
        verify_command.print_report(report, _console())
    if not report.holds:
        raise AnalyzeError(f"the ledger of {command.run_folder} does not prove that every sample was consumed once.")


def _timeline(command: TimelineCommand) -> None:
    pair = choose_pair(read_pairs(command.run_folder), command.step)
    _write_file(command.output, render_pair(pair), "--output")
    said = f"step {pair.step}: {pair.before.step_ms:.1f} ms before, {pair.after.step_ms:.1f} ms after"
    _console().print(printable(f"{said}; drawn in {command.output}"), markup=False)


def _data(command: DataCommand) -> None:
    sources = [*command.sources, *([] if command.data is None else [command.data])]
    if not sources or (command.sources and command.data is not None):
        raise UsageError("name the folder of an index, or data: balancer-analyze data 'shards-{000..003}.tar'")
    of_index = len(sources) == 1 and data_report.is_index(sources[0])
    reached = None if of_index else reach(command.cache_dir)
    with _progress("reading headers") as advance:
        report = data_report.report_on(
            sources,
            processor=command.model,
            text=command.text,
            train_on=command.train_on,
            preprocessing=command.preprocessing,
            apply_orientation=command.apply_orientation,
            media_root=command.media_root,
            reached=reached,
            progress=advance,
        )
    if command.plot is not None:
        name = sources[0] if len(sources) == 1 else f"{len(sources)} sources"
        _write_file(command.plot, render_costs(report, name), "--plot")
    if command.json:
        _write_json(report.to_dict())
        return
    # A pipe has no width of its own, and the tables have many columns.
    wide = _console()
    wide.width = wide.width if wide.is_terminal else WIDE_CHARS
    data_report.print_report(report, wide)
    if command.plot is not None:
        _console().print(printable(f"drawn in {command.plot}"), markup=False)


def _index(command: IndexCommand) -> None:
    index, built = index_command.run_index(command)
    _print_index(index, built, as_json=command.json)


def _print_index(index: CostIndex, built: Built | None, *, as_json: bool) -> None:
    if as_json:
        _write_json(index_command.describe(index, built))
    else:
        index_command.print_index(index, _console(), built)


def _tokens(command: TokensCommand) -> None:
    report = tokens_report.report_on(
        command.media,
        model=command.model,
        preprocessing=command.preprocessing,
        num_images=command.num_images,
        apply_orientation=command.apply_orientation,
    )
    if command.json:
        _write_json(report.to_dict())
    else:
        tokens_report.print_report(report, _console())
    if report.num_failed:
        raise AnalyzeError(f"{report.num_failed} of {len(report.rows)} media cannot be used as they are; see above.")


def _plan(command: PlanCommand) -> None:
    # Imported here: the planner loads numba, which no other command needs.
    from tools.plan_inputs import prepare
    from tools.plan_print import print_report
    from tools.plan_report import report_on

    with _progress("reading headers") as advance:
        inputs = prepare(command, advance)
    with _progress("planning steps") as advance:
        report = report_on(inputs, advance)
    if command.output is None and command.json:
        _write_json(report.to_dict())
        return
    console = _console()
    if command.output is not None:
        console = Console(file=io.StringIO(), highlight=False, soft_wrap=True)
    console.width = console.width if console.is_terminal else PLAN_CHARS
    if command.output is None:
        print_report(report, console)
        return
    content = _json(report.to_dict())
    if not command.json:
        print_report(report, console)
        content = cast(io.StringIO, console.file).getvalue()
    _write_file(command.output, content, "--output")
    _console().print(printable(f"written to {command.output}"), markup=False)


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


def _write_file(path: Path, content: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise AnalyzeError(f"{path} cannot be written: {error}. Give another {option}.") from None


def _write_json(content: dict[str, object]) -> None:
    sys.stdout.write(_json(content))


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(printable(f"error: {error}\n"))  # the text may name members and keys, which are data
    return code
