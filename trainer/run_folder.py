"""The folder of one training run: everything needed to explain it, to continue it and to analyse it.

    runs/demo-001/
      run.json                  format version, made by
      config.yaml               all options, resolved
      steps.jsonl               one StepRecord per finished step, appended
      ledger.jsonl              samples consumed in every step, on which rank (see balancer.ledger)
      bad_samples.jsonl         samples left out or replaced, where they lie and why
      plans/step_000001.json    the plan of each step
      selection/                what a proof needs to select again (see balancer.run_evidence)
      samples/                  pictures and texts of the held-out items
      checkpoints/step_000100/  see trainer.checkpoint
      summary.json              written at the end

Step numbers count finished steps from 1. Only rank 0 writes. A new run folder appears at once and complete (made
beside its place, then renamed), and a folder that holds anything is never written into, except to resume its run, and
then by one process at a time (`RunLock`).
"""

import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from balancer._version import __version__
from trainer.config import FitConfig
from trainer.config_yaml import from_yaml, to_yaml
from trainer.errors import ConfigError

# Version 2 selects the samples of a step in another order and keeps a ledger: a run of version 1 can be exported and
# analysed, but not continued.
FORMAT_VERSION = 2
READABLE_FORMATS = (1, FORMAT_VERSION)
RUNS = Path("runs")
_FOLDERS = ("plans", "samples", "checkpoints")


class RunLock:
    """Holds a run folder against a second writer, such as ranks that outlived a launcher that was killed.

    The system gives it up when the process ends, however it ends. Price: none where a file system has no locks; it
    then protects nothing.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def take(self, path: Path) -> None:
        """Hold the run at `path`; a folder that is no run is left to the one who opens it.

        Raises:
            ConfigError: another process holds it.
        """
        place = path / "run.json"
        if self._file is not None or not place.is_file():
            return
        file = place.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(
                f"another process is writing to the run {path}, perhaps one that a killed launcher left behind. End "
                f"it, then resume."
            ) from None
        except OSError:
            file.close()
        else:
            self._file = file

    def release(self) -> None:
        """Give it up; a second call does nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Plan(Protocol):
    """What is stored of a plan: `balancer.plan.StepPlan` or anything alike."""

    @property
    def step(self) -> int:
        """Number of the step, from 0."""
        ...

    def to_json(self) -> str:
        """The plan as JSON text."""
        ...


class RunFolder:
    """Paths and small files of one run.

    Attributes:
        path: the folder.
        steps_path: steps.jsonl, written by `balancer.records.RecordWriter`.
        ledger_path: ledger.jsonl, written by `balancer.ledger.LedgerWriter`.
        bad_samples_path: bad_samples.jsonl, written by `trainer.bad_samples.BadSamples`.
        checkpoints: where `trainer.checkpoint` keeps its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps_path = path / "steps.jsonl"
        self.ledger_path = path / "ledger.jsonl"
        self.bad_samples_path = path / "bad_samples.jsonl"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path, config: FitConfig) -> "RunFolder":
        """Make a new run folder; an existing empty folder is used.

        Raises:
            ConfigError: the folder holds a run, or anything else, or cannot be made.
        """
        _refuse_occupied(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        except OSError as error:
            raise ConfigError(f"run folder {path} cannot be made: {error}. Give another --output.") from None
        try:
            draft.chmod(0o777 & ~_umask())  # mkdtemp's folders are private; a run folder is like any other
            for name in _FOLDERS:
                (draft / name).mkdir()
            (draft / "run.json").write_text(
                json.dumps({"format_version": FORMAT_VERSION, "version": __version__}) + "\n"
            )
            (draft / "config.yaml").write_text(_stored(config), encoding="utf-8")
            (draft / "steps.jsonl").touch()
            draft.rename(path)  # replaces an empty folder, fails on any other
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            _refuse_occupied(path)
            raise ConfigError(f"run folder {path} cannot be made: {error}. Give another --output.") from None
        return cls(path)

    @classmethod
    def resume(cls, path: Path, config: FitConfig, *, step: int) -> "RunFolder":
        """Open an existing run to go on after `step` finished steps: later plans and the summary are removed.

        Records beyond `step` are cut off by `RecordWriter`, which the caller opens with the same number.

        Raises:
            ConfigError: no run, or one of another format version.
        """
        _check_format(path)
        folder = cls(path)
        for name in _FOLDERS:
            (path / name).mkdir(exist_ok=True)
        folder._remove_plans(step)
        write_atomically(path / "config.yaml", _stored(config))
        (path / "summary.json").unlink(missing_ok=True)
        return folder

    def _remove_plans(self, step: int) -> None:
        """Remove the plans of steps beyond `step`; price: that of those, not of the run's.

        Plans are written without a gap. The last goes first, so that a kill in between leaves none either.
        """
        last = step
        while self._plan_path(last + 1).exists():
            last += 1
        for number in range(last, step, -1):
            self._plan_path(number).unlink()

    def _plan_path(self, number: int) -> Path:
        return self.path / "plans" / f"step_{number:06d}.json"

    def write_plan(self, plan: Plan) -> Path:
        """Store the plan of a step as plans/step_N.json, where N counts finished steps from 1."""
        path = self._plan_path(plan.step + 1)
        path.write_text(plan.to_json(), encoding="utf-8")
        return path

    def write_sample(self, name: str, content: bytes) -> Path:
        """Store a file under samples/; only the last part of `name` is used."""
        path = self.path / "samples" / Path(name).name
        path.write_bytes(content)
        return path

    def write_summary(self, values: Mapping[str, Any]) -> Path:
        """Store the final numbers of the run."""
        path = self.path / "summary.json"
        content = _known({"format_version": FORMAT_VERSION, **values})
        write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
        return path


def read_config(path: Path, *, formats: Sequence[int] = (FORMAT_VERSION,)) -> FitConfig:
    """The options a run was started with, as far as they were not changed by a resume.

    Args:
        formats: versions of run folders to take; the present one alone can be resumed.

    Raises:
        ConfigError: no run, or one of another format version.
    """
    _check_format(path, formats)
    place = path / "config.yaml"
    try:
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} has no readable config.yaml: {error}") from None
    return from_yaml(text, FitConfig, place=str(place))


def next_free(root: Path, stem: str) -> Path:
    """First of root/STEM-001, -002, ... after all that exist: where a run without --output goes."""
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    names = [] if not root.is_dir() else [pattern.fullmatch(entry.name) for entry in root.iterdir()]
    number = max((int(match[1]) for match in names if match), default=0) + 1
    return root / f"{stem}-{number:03d}"


def newest_run(root: Path) -> Path:
    """The run under `root` that wrote a step last.

    Raises:
        ConfigError: there is none.
    """
    runs = [] if not root.is_dir() else [entry for entry in root.iterdir() if (entry / "run.json").is_file()]
    if not runs:
        raise ConfigError(f"there is no run under {root}/ to resume. Give its folder: --resume RUN.")
    return max(
        runs, key=lambda run: ((run / "steps.jsonl").stat().st_mtime_ns if (run / "steps.jsonl").exists() else 0, run)
    )


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file so that a reader or a crash sees the old or the new text, never a part."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _known(value: Any) -> Any:
    """`value` with null for numbers that are not finite: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: _known(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stored(config: FitConfig) -> str:
    # `resume` is a wish for one start, not a property of the run.
    return to_yaml(dataclasses.replace(config, resume=False))


def _refuse_occupied(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"run folder {path} is a file. Give another --output.")
    if (path / "run.json").exists():
        raise ConfigError(f"{path} holds a run already. Continue it with --resume {path}, or give another --output.")
    if any(path.iterdir()):
        raise ConfigError(f"{path} is not empty and holds no run. Give another --output; nothing is overwritten.")


def _check_format(path: Path, formats: Sequence[int] = (FORMAT_VERSION,)) -> None:
    if not (path / "run.json").is_file():
        raise ConfigError(f"{path} is no run folder (it has no run.json). Give the folder of a run: --resume RUN.")
    try:
        version = json.loads((path / "run.json").read_text(encoding="utf-8")).get("format_version")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path / 'run.json'} cannot be read: {error}") from None
    if type(version) is not int or version not in formats:
        raise ConfigError(
            f"{path} is a run of format version {version}; this version reads {FORMAT_VERSION}. A step would hold "
            f"other samples than in the version that started it: resume it with that one, or export its model and "
            f"start a new run from it with --model."
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
