"""`balancer-analyze index` and `merge`: the cost index of a data set, on one machine or several.

    balancer-analyze index 'shards-{000..015}.tar' --model FOLDER --output index
    balancer-analyze index DATA --model FOLDER --output part0 --part 0/2     (on one machine)
    balancer-analyze index DATA --model FOLDER --output part1 --part 1/2     (on another one)
    balancer-analyze merge part0 part1 --output index

An interrupted build goes on where it was; shards that did not change are not read again.
"""

import errno
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from balancer.printable import printable
from dataloaders.errors import DataError
from dataloaders.index import CostIndex
from dataloaders.index_build import BuildProgress, Part, build_shards
from dataloaders.index_merge import merge_parts
from dataloaders.scan_rows import ScanOptions
from tools.errors import AnalyzeError, UsageError
from tools.model_folder import TextRule, TrainOn, load_rules

PLAIN_INTERVAL_S = 10.0
WARN_SHARE = 0.5  # of the samples, unusable for one reason: then the model or an option is at fault, not a file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
Switch = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCommand:
    """Build the cost index of a data set: what every sample costs under a model, from headers alone."""

    data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA...")]
    """Tar shards; braces and wildcards are expanded: 'shards-{000..003}.tar' (quote it)."""
    output: Path
    """Folder for the index. One that is there already is brought up to date; it never loses shards without
    --replace."""
    model: Path
    """Model folder whose processor files give the token rule, in Hugging Face format or from balancer-train export."""
    text: TextRule = "auto"
    """How text is counted: by the folder's tokenizer and chat template, one token a byte, or roughly (an estimate).
    auto: the folder's own; bytes for a folder of balancer-train; otherwise rough."""
    train_on: TrainOn = "assistant"
    """Turns whose tokens carry labels."""
    preprocessing: Literal["transformers", "qwen_vl_utils"] | None = None
    """Library that resizes media before the processor sees them. None: what the family's users do by default."""
    apply_orientation: bool = True
    """Turn images as their EXIF orientation says before measuring."""
    unfit: Literal["skip", "clamp", "error"] = "skip"
    """Media that the processor would fail on: leave their samples out; plan them at the nearest size or number of
    frames that it takes; or stop after the scan and list them all."""
    workers: int | None = None
    """Processes that scan shards. None: as many as there are CPUs, if there is enough to do."""
    part: str | None = None
    """i/n: scan only every n-th shard, as machine i of n, i from 0 to n - 1; join the parts with merge."""
    replace: Switch = False
    """Replace an index of another model, of other options or of other shards that is in the folder."""
    json: Switch = False
    """Print one JSON object in place of text."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers {self.workers}: at least one process scans.")
        if not self.data:
            raise UsageError("no shard is named. Write balancer-analyze index 'shards-{000..015}.tar' ...")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCommand:
    """Join the parts of an index that several machines have built with --part; the result is that of a single build."""

    parts: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PART...")]
    """Folders of all parts, in any order."""
    output: Path
    """Folder for the whole index; an index that is there is replaced."""
    json: Switch = False
    """Print one JSON object in place of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """How a build ended.

    Attributes:
        progress: None: it told nothing.
        note: why text is estimated although nobody asked for that; "" where it is not.
    """

    progress: BuildProgress | None = None
    note: str = ""


def run_index(command: IndexCommand) -> tuple[CostIndex, Built]:
    """Build or update; returns the index and how the build ended.

    Raises:
        KeyboardInterrupt: Ctrl-C; its text says how far the build is and that the same command goes on.
    """
    try:
        part = None if command.part is None else Part.parse(command.part)
    except DataError as error:
        raise UsageError(str(error)) from None
    rules = load_rules(command.model, text=command.text, train_on=command.train_on, preprocessing=command.preprocessing)
    options = ScanOptions(encoder=rules.encoder, apply_orientation=command.apply_orientation, unfit=command.unfit)
    last: list[BuildProgress] = []
    with build_progress() as show:

        def progress(state: BuildProgress) -> None:
            last[:] = [state]
            show(state)

        try:
            index = build_shards(
                command.data,
                rules.estimator,
                command.output,
                options,
                workers=command.workers,
                part=part,
                replace=command.replace,
                progress=progress,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_resumed(last)) from None
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise AnalyzeError(
                f"{command.output} cannot be written: {error}. Free some space and start again, finished shards are "
                "kept; or give another --output."
            ) from None
    return index, Built(progress=last[0] if last else None, note=rules.note)


def _resumed(last: list[BuildProgress]) -> str:
    done = f"{last[0].shards:,} of {last[0].num_shards:,} shards are done; " if last else ""
    return f"{done}the same command goes on where this one was"


def run_merge(command: MergeCommand) -> CostIndex:
    """Merge the parts."""
    return merge_parts(command.parts, command.output)


def describe(index: CostIndex, built: Built | None = None) -> dict[str, object]:
    """What there is to say about an index, as plain values."""
    folder, progress = index.folder, None if built is None else built.progress
    return {
        "folder": str(folder),
        "part": None if index.part is None else str(index.part),
        "samples": len(index),
        "unusable": len(index.bad),
        "reasons": dict(Counter(bad.reason for bad in index.bad).most_common()),
        "clamped": int(index.samples["clamped"].sum()),
        "media": len(index.items["kind"]),
        "shards": len(index.shards),
        "shards_scanned": None if progress is None else progress.shards - progress.reused,
        "bytes": 0 if folder is None else sum(path.stat().st_size for path in folder.iterdir()),
        "rules": {"media": "", "text": "", **index.rules},
        "fingerprint": index.fingerprint,
        "warning": warning_of(index),
        "note": "" if built is None else built.note,
    }


def warning_of(index: CostIndex) -> str:
    """What is wrong where one reason makes half of the samples unusable or more; "" where none does."""
    ((reason, count),) = Counter(bad.reason for bad in index.bad).most_common(1) or [("", 0)]
    if not count or count < WARN_SHARE * len(index):
        return ""
    first = next(bad for bad in index.bad if bad.reason == reason)
    return f"{count:,} of {len(index):,} samples are unusable for one reason, {reason}. The first: {first.message}"


def print_index(index: CostIndex, console: Console, built: Built | None = None) -> None:
    """The same for people."""
    said = describe(index, built)
    part = "" if index.part is None else f" (part {index.part} of {index.part.num_shards} shards)"
    scanned = "" if said["shards_scanned"] is None else f", {said['shards_scanned']} of them scanned now"
    lines = [
        f"{index.folder}{part}: {len(index):,} samples in {said['shards']:,} shards{scanned}; {said['media']:,} media, "
        f"{decimal(int(str(said['bytes'])))}",
        f"media: {index.rules.get('media', '')}",
        f"text: {index.rules.get('text', '')}, labels on {index.key.train_on}",
    ]
    if index.bad:
        reasons = ", ".join(
            f"{reason}: {count}" for reason, count in Counter(b.reason for b in index.bad).most_common()
        )
        lines.append(f"{len(index.bad):,} samples are unusable ({reasons}); balancer-analyze data lists them")
    if said["clamped"]:
        lines.append(f"{said['clamped']:,} samples hold media that were clamped to what the processor takes")
    lines += [f"{name}: {said[name]}" for name in ("note", "warning") if said[name]]
    for line in lines:
        console.print(printable(line), markup=False)


@contextmanager
def build_progress() -> Iterator[Callable[[BuildProgress], None]]:
    """A bar on stderr where a person watches, otherwise a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading headers", total=None)

        def update(state: BuildProgress) -> None:
            bar.update(task, completed=state.bytes, total=state.num_bytes, description=_said(state))

        yield update


def _plain_lines() -> Callable[[BuildProgress], None]:
    last = [time.monotonic()]

    def update(state: BuildProgress) -> None:
        if time.monotonic() - last[0] >= PLAIN_INTERVAL_S:
            last[0] = time.monotonic()
            sys.stderr.write(f"{_said(state)}, {state.bytes / max(state.num_bytes, 1):.0%} of the bytes\n")
            sys.stderr.flush()

    return update


def _said(state: BuildProgress) -> str:
    failed = f", {state.failed} failed" if state.failed else ""
    return f"{state.shards:,} of {state.num_shards:,} shards, {state.samples:,} samples{failed}"
