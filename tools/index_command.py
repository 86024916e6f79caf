"""`balancer-analyze index` and `merge`: the cost index of a data set, on one machine or several.

    balancer-analyze index 'shards-{000..015}.tar' --model FOLDER --output index
    balancer-analyze index train.jsonl --media-root images --model FOLDER --output index
    balancer-analyze index DATA --model FOLDER --output part0 --part 0/2     (on one machine)
    balancer-analyze index DATA --model FOLDER --output part1 --part 1/2     (on another one)
    balancer-analyze merge part0 part1 --output index

An interrupted build goes on where it was. Shards that did not change are not read again; of other data, a change of a
file means that all of it is.
"""

import errno
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from balancer.printable import printable
from dataloaders.build_progress import BuildProgress
from dataloaders.errors import DataError
from dataloaders.index import CostIndex
from dataloaders.index_build import Part, build_shards
from dataloaders.index_merge import merge_parts
from dataloaders.index_slices import build_slices
from dataloaders.open_source import named_data, open_source
from dataloaders.scan_rows import ScanOptions
from tools.errors import AnalyzeError, UsageError
from tools.model_folder import TextRule, TrainOn, load_rules
from tools.reach import reach

PLAIN_INTERVAL_S = 10.0
WARN_SHARE = 0.5  # of the samples, unusable for one reason: then the model or an option is at fault, not a file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
Switch = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCommand:
    """Build the cost index of a data set: what every sample costs under a model, from headers alone."""

    data: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DATA...")]
    """Tar shards, .jsonl, .json or .parquet files (of one kind), or a folder that datasets' save_to_disk wrote; paths
    or URLs, braces and wildcards are expanded: 'shards-{000..003}.tar' (quote it)."""
    output: Path
    """Folder of this machine for the index. One that is there already is brought up to date; it never loses shards or
    files without --replace."""
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
    """Processes that scan. None: as many as there are CPUs, if there is enough to do."""
    media_root: str | None = None
    """Folder or URL that paths of media in the records start from. None: the folder of the file that names them. Not
    for tars."""
    cache_dir: Path | None = None
    """Folder that keeps ranges of remote files and the tables of members of tars. None: no ranges, and the tables in
    the user's cache folder, where balancer-train looks for them."""
    part: str | None = None
    """i/n: scan only every n-th tar shard, as machine i of n, i from 0 to n - 1; join the parts with merge."""
    replace: Switch = False
    """Replace an index of another model, of other options or of other data that is in the folder."""
    json: Switch = False
    """Print one JSON object in place of text."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise UsageError(f"--workers {self.workers}: at least one process scans.")
        if not self.data:
            raise UsageError("no data is named. Write balancer-analyze index 'shards-{000..015}.tar' ...")


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
    build = _builder(command, part)
    last: list[BuildProgress] = []
    with build_progress() as show:

        def progress(state: BuildProgress) -> None:
            last[:] = [state]
            show(state)

        try:
            index = build(
                rules.estimator,
                command.output,
                options,
                workers=command.workers,
                replace=command.replace,
                progress=progress,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_resumed(last)) from None
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise AnalyzeError(
                f"{command.output} cannot be written: {error}. Free some space and start again, what was finished is "
                "kept; or give another --output."
            ) from None
    return index, Built(progress=last[0] if last else None, note=rules.note)


def _builder(command: IndexCommand, part: Part | None) -> Callable[..., CostIndex]:
    """What builds an index of this kind of data.

    Raises:
        UsageError: an option that is for another kind.
        SourceError: there is no such data.
    """
    reached = reach(command.cache_dir)
    kind, paths = named_data(command.data[0] if len(command.data) == 1 else command.data, storage=reached.storage)
    if kind == "tar":
        if command.media_root is not None:
            raise UsageError("--media-root is not for tars: media are the members beside each .json. Leave it out.")
        return partial(build_shards, paths, part=part, storage=reached.storage, members=reached.members)
    if part is not None:
        raise UsageError(
            f"--part {part.number}/{part.count}: parts are for tar shards. Build the index on one machine (--workers), "
            "or build one of each file and mix them."
        )
    source = open_source(
        command.data[0] if len(command.data) == 1 else command.data,
        media_root=command.media_root,
        storage=reached.storage,
    )
    return partial(build_slices, source)


def _resumed(last: list[BuildProgress]) -> str:
    done = f"{last[0].shards:,} of {last[0].num_shards:,} {last[0].noun}s are done; " if last else ""
    return f"{done}the same command goes on where this one was"


def run_merge(command: MergeCommand) -> CostIndex:
    """Merge the parts."""
    return merge_parts(command.parts, command.output)


def describe(index: CostIndex, built: Built | None = None) -> dict[str, object]:
    """What there is to say about an index, as plain values."""
    folder, progress = index.folder, None if built is None else built.progress
    scanned = {} if progress is None else {progress.noun: progress.shards - progress.reused}
    return {
        "folder": str(folder),
        "part": None if index.part is None else str(index.part),
        "samples": len(index),
        "unusable": len(index.bad),
        "reasons": dict(Counter(bad.reason for bad in index.bad).most_common()),
        "clamped": int(index.samples["clamped"].sum()),
        "media": len(index.items["kind"]),
        "shards": len(index.shards),
        "shards_scanned": scanned.get("shard"),
        "slices_scanned": scanned.get("slice"),
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
    shards = f" in {said['shards']:,} shards{scanned}" if index.shards else ""
    if not index.shards and built is not None:
        shards = ", unchanged" if built.progress is None else ", scanned now"
    lines = [
        f"{index.folder}{part}: {len(index):,} samples{shards}; {said['media']:,} media, "
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
            done, total = (state.bytes, state.num_bytes) if state.num_bytes else (state.samples, state.num_samples)
            bar.update(task, completed=done, total=total, description=_said(state))

        yield update


def _plain_lines() -> Callable[[BuildProgress], None]:
    last = [time.monotonic()]

    def update(state: BuildProgress) -> None:
        if time.monotonic() - last[0] >= PLAIN_INTERVAL_S:
            last[0] = time.monotonic()
            of = "bytes" if state.num_bytes else "samples"
            sys.stderr.write(f"{_said(state)}, {state.share:.0%} of the {of}\n")
            sys.stderr.flush()

    return update


def _said(state: BuildProgress) -> str:
    failed = f", {state.failed} failed" if state.failed else ""
    return f"{state.shards:,} of {state.num_shards:,} {state.noun}s, {state.samples:,} samples{failed}"
