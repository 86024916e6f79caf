"""From argv to a config: subcommands, YAML with overrides, and errors that name the option that was meant.

    argv ── split off the subcommand ── answer unknown options ── YAML or stored run ── tyro ──> Command
            (bare or options: fit)      (nearest name, aliases)   (pydantic, strict)   (CLI wins)

Usage errors end the process with exit code 2 and one message on stderr; `--help` ends it with 0. Neither imports
torch, so both answer at once.
"""

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import tyro

from balancer.printable import printable
from trainer.config import (
    CheckConfig,
    Config,
    ExportConfig,
    FitConfig,
    PlanConfig,
)
from trainer.config_yaml import AnyConfig, flag, from_yaml, option_names, switches, unknown_name
from trainer.errors import ConfigError
from trainer.profile_config import ProfileConfig
from trainer.resume_options import refuse_changed_trajectory
from trainer.run_folder import RUNS, newest_run, read_config

Kind = Literal["fit", "check", "plan", "profile", "export"]

PROGRAM = "balancer-train"
CONFIGS: dict[Kind, type[Config]] = {
    "fit": FitConfig,
    "check": CheckConfig,
    "plan": PlanConfig,
    "profile": ProfileConfig,
    "export": ExportConfig,
}
# Of these only one may be set; naming one on the command line drops the other one's value from the YAML file.
ALTERNATIVES = {"epochs": "max_steps", "max_steps": "epochs", "data": "mixture", "mixture": "data"}
HELP = ("-h", "--help")
OVERVIEW = """\
usage: balancer-train [fit|check|plan|profile|export] [OPTIONS]

  fit      train a model (the default: bare balancer-train trains a small model on a demo corpus)
  check    prove that a balanced step equals a plain loop, on your model and data
  plan     print what training would do, without training
  profile  measure a model on this machine and write a cost model for fit and plan
  export   write the model of a run as config.json and safetensors

  --config FILE.yaml   options as YAML keys; the command line wins over the file
  --help               after a subcommand: its options. Those of fit:

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand with its resolved options."""

    kind: Kind
    config: Config


def parse(argv: Sequence[str]) -> Command:
    """Resolve the command line (without the program's name).

    Raises:
        SystemExit: code 2 after a message on stderr (usage or config error), code 0 after `--help`.
    """
    try:
        return parse_or_raise(argv)
    except ConfigError as error:
        sys.stderr.write(printable(f"error: {error}\n"))
        raise SystemExit(2) from None


def parse_or_raise(argv: Sequence[str]) -> Command:
    """Like `parse`, but our own errors are raised; tyro's (a missing or unreadable value) still end with code 2.

    Raises:
        ConfigError: unknown subcommand, option or key; a value outside its range; a file that cannot be read.
    """
    if argv and argv[0] in HELP:
        sys.stdout.write(OVERVIEW)
    kind, words = _split_kind(list(argv))
    cls = CONFIGS[kind]
    words, resume = _take_resume(words) if kind == "fit" else (words, None)
    _refuse_unknown_options(kind, cls, words)
    words, config_file = _take_config_file(words)
    if any(word in HELP for word in words):
        return Command(kind=kind, config=_run_tyro(kind, cls, None, words))
    base = None if config_file is None else from_yaml(_read(config_file), cls, place=str(config_file))
    stored: FitConfig | None = None
    if resume is not None:
        stored = _stored_run(_value_of(words, "output"), resume)
        # A resumed run goes on as it was started; a file given now replaces the stored options but not the folder.
        base = stored if base is None else dataclasses.replace(cast(FitConfig, base), output=stored.output)
    config = _run_tyro(kind, cls, base, words)
    if isinstance(config, FitConfig) and config.resume:
        if stored is None:  # asked for by `resume: true` in the YAML file
            stored = _stored_run(None if config.output is None else str(config.output), "")
            config = dataclasses.replace(config, output=stored.output)
        refuse_changed_trajectory(stored, config)
    return Command(kind=kind, config=config)


def _split_kind(argv: list[str]) -> tuple[Kind, list[str]]:
    if not argv or argv[0].startswith("-"):
        return "fit", argv
    for kind in CONFIGS:
        if argv[0] == kind:
            return kind, argv[1:]
    name, _, value = argv[0].partition("=")
    if value and name.replace("-", "_") in option_names(FitConfig):
        raise ConfigError(f"{argv[0]!r} is no subcommand; options start with two dashes: {flag(name)} {value}")
    near = difflib.get_close_matches(argv[0], list(CONFIGS), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"{argv[0]!r} is no subcommand; there are {', '.join(CONFIGS)}.{hint}")


def _refuse_unknown_options(kind: Kind, cls: type[Config], words: Sequence[str]) -> None:
    names = [*option_names(cls), "config"]
    for word in words:
        if not _is_option(word) or word in HELP:
            continue
        written = word.partition("=")[0]
        name = written.lstrip("-").replace("-", "_")
        if written.startswith("--"):
            if name in names or (name.startswith("no_") and name.removeprefix("no_") in switches(cls)):
                continue
            owners = [other for other, config in CONFIGS.items() if name in option_names(config)]
            if owners:
                raise ConfigError(f"{written} is an option of {' and '.join(owners)}, not of {kind}.")
        raise ConfigError(unknown_name(f"unknown option {written} of {kind}", name, names, as_flag=True))


def _is_option(word: str) -> bool:
    """Whether a word is an option and not a value, which may be a negative number."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _take_resume(words: list[str]) -> tuple[list[str], str | None]:
    """Split the run off `--resume [RUN]`; "" stands for a bare `--resume`, None for none. tyro sees a plain switch."""
    for position, word in enumerate(words):
        before, after = words[:position], words[position + 1 :]
        if word.startswith("--resume="):
            return [*before, "--resume", *after], word.partition("=")[2]
        if word == "--resume":
            run = after[0] if after and not _is_option(after[0]) else ""
            return [*before, word, *after[bool(run) :]], run
    return words, None


def _stored_run(output: str | None, run: str) -> FitConfig:
    """The config of the run to continue: `run`, else `output`, else the newest run there is."""
    if run and output is not None and Path(run) != Path(output):
        raise ConfigError(f"--resume {run} and --output {output} name two run folders. Give one of them.")
    folder = Path(run or output or newest_run(RUNS))
    return dataclasses.replace(read_config(folder), output=folder, resume=True)


def _take_config_file(words: list[str]) -> tuple[list[str], Path | None]:
    path: Path | None = None
    rest: list[str] = []
    following = iter(words)
    for word in following:
        if word == "--config" or word.startswith("--config="):
            value = word.partition("=")[2] or next(following, "")
            if not value or path is not None:
                raise ConfigError("--config takes one YAML file, once.")
            path = Path(value)
        else:
            rest.append(word)
    return rest, path


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}. Give a YAML file.") from None


def _run_tyro(kind: Kind, cls: type[AnyConfig], base: AnyConfig | None, words: Sequence[str]) -> AnyConfig:
    prog, description = f"{PROGRAM} {kind}", inspect.getdoc(cls)
    if base is None:
        return tyro.cli(cls, prog=prog, description=description, args=list(words))
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in words if _is_option(word)}
    names = option_names(cls)
    dropped = [other for name, other in ALTERNATIVES.items() if name in given and other in names and other not in given]
    base = dataclasses.replace(base, **cast(dict[str, Any], dict.fromkeys(dropped)))
    return tyro.cli(cls, prog=prog, description=description, args=list(words), default=base)


def _value_of(words: Sequence[str], name: str) -> str | None:
    for position, word in enumerate(words):
        if word == flag(name):
            return words[position + 1] if position + 1 < len(words) else None
        if word.startswith(flag(name) + "="):
            return word.partition("=")[2]
    return None
