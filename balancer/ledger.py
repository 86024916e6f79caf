"""The ledger of a run: which samples every step has consumed, on which rank, over all starts and world sizes.

    {"kind": "run", index and source fingerprints, number and digest of the ids, seed, global_batch_size, shuffle ...}
    {"kind": "start", "number": 0, "step": 0,  "world_size": 4, "dp_size": 4, "discarded": 0}
    {"kind": "step",  "step": 1, "epoch": 0, "cursor": 0, "start": 0, "ids": [[rank 0], [rank 1], ...], "replaced": []}
    ...                                                                              the process is killed in step 9
    {"kind": "start", "number": 1, "step": 6,  "world_size": 3, "dp_size": 3, "discarded": 2}

Ids are taken from the micro-batches that the ranks have loaded, not from the plan: the ledger is evidence, the plan a
promise, and `balancer-analyze verify` compares them. Steps count finished steps from 1. A start continues a checkpoint:
lines of steps beyond it belong to weights that no later checkpoint descends from, so they are cut off and their number
is kept. What remains is the history of the weights.

Of a mixture the first line names every part, and every start the weights by which its steps are drawn, with their past:
they may change from one start to the next, the parts may not.

Every line ends in a check: a digest of the line and of the check before it. It finds slips and edits; it is no
signature, since whoever rewrites all lines can rewrite the checks. Price: about 8 bytes per sample and step on disk,
one write and flush per step, one fsync per checkpoint.

A start reads the first line and what follows the checkpoint, however long the run is:

    run start step step ... step | step S | step S+1 ... step S+k        `LedgerMark` of the checkpoint of S steps:
    ^ compared     ^ not read      ^ matches its check and the mark's    where the line of S begins, its check and the
                                            ^ counted and cut off        one before

Price: damage before the mark does not stop a start; the chain of checks goes on over it, so that `verify` finds it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike

from balancer.errors import LedgerError
from balancer.ledger_groups import runs_digest
from balancer.ledger_lines import (
    LEDGER_FORMAT_VERSION,
    READABLE_VERSIONS,
    Line,
    PartLine,
    RunLine,
    StartLine,
    StepLine,
)

MAX_LINE_BYTES = 2**28  # a step of ten million samples; a damaged file must not fill the memory
MAX_ID = 2**63
_CHECK_CHARS = 16
_TAIL = ',"check":"'
_TAIL_CHARS = len(_TAIL) + _CHECK_CHARS + len('"}')

_Kind = type[RunLine] | type[StartLine] | type[StepLine]
_KINDS: dict[str, _Kind] = {"run": RunLine, "start": StartLine, "step": StepLine}


def ids_digest(ids: ArrayLike) -> str:
    """Hex digest of a set of ids, whatever their order: equal for equal sets (a repeated id counts)."""
    ordered = np.sort(np.asarray(ids, dtype="<i8").reshape(-1))
    return hashlib.sha256(ordered.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMark:
    """Where a ledger's last line lies, for a checkpoint to keep.

    Attributes:
        begin: bytes before the line.
        before, check: checks of the line before and of the line.
    """

    begin: int
    before: str
    check: str

    def to_state(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: object) -> "LedgerMark | None":
        """The mark that `to_state` wrote; None for anything else, such as a checkpoint that has none."""
        if not isinstance(state, Mapping):
            return None
        begin, before, check = (state.get(field.name) for field in fields(cls))
        if type(begin) is not int or not 0 < begin < MAX_ID or type(before) is not str or type(check) is not str:
            return None
        return cls(begin=begin, before=before, check=check)


class LedgerWriter:
    """Appends to a ledger: a new one, or a run's after `step` finished steps.

    Args:
        path: the file.
        run: what the run is; must be the run of an existing ledger, apart from its hints.
        step: finished steps to go on from.
        weights: of a mixture, see `StartLine`.
        mark: of the ledger after `step` steps; one that does not fit the file (it was edited, or is another) costs a
            pass over all lines, as None does.

    Raises:
        LedgerError: the ledger is of another run (both are named), damaged before `step`, or does not reach it.
    """

    def __init__(
        self,
        path: Path,
        run: RunLine,
        *,
        step: int,
        world_size: int,
        dp_size: int,
        weights: Sequence[dict[str, Any]] = (),
        mark: LedgerMark | None = None,
    ) -> None:
        kept = _Kept() if not path.exists() else _kept(path, run, step, mark)
        if kept.last_step < step:
            raise LedgerError(
                f"{path} ends at step {kept.last_step}, but the checkpoint holds {step} steps: without the lines "
                f"between nobody could tell which samples its weights have seen. Restore the file, or start a new run "
                f"from the exported weights"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = path.open("ab")
        self._file.truncate(kept.num_bytes)
        self._num_bytes, self._check = kept.num_bytes, kept.check
        if not kept.num_bytes:
            self._append(run)
        self.start = StartLine(
            number=kept.next_start,
            step=step,
            world_size=world_size,
            dp_size=dp_size,
            discarded=kept.discarded,
            weights=tuple(weights),
        )
        self.mark = self._append(self.start)
        self.sync()

    def write(self, line: StepLine) -> None:
        """Append a step and hand it to the system: a kill of this process no longer loses it."""
        self.mark = self._append(line)

    def sync(self) -> None:
        """Bring everything written to the disk; a checkpoint must not know more steps than the ledger."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> "LedgerWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, line: Line) -> LedgerMark:
        text, check = _written(line, self._check)
        self._file.write(text)
        self._file.flush()
        mark = LedgerMark(begin=self._num_bytes, before=self._check, check=check)
        self._num_bytes, self._check = self._num_bytes + len(text), check
        return mark


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a ledger in order, each checked; a last line that a crash cut short is left out.

    Raises:
        LedgerError: no ledger, another format version, or a line that was damaged or edited; the text names it.
    """
    for line, _, _ in _read(path):
        yield line


def refuse_other_run(path: Path, run: RunLine) -> None:
    """Raise LedgerError, naming both, unless the ledger is of this run (or holds nothing yet)."""
    first = next(_read(path), None) if path.exists() else None
    if first is not None:
        _refuse_other(path, first[0], run)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """The part of a ledger that a start keeps."""

    num_bytes: int = 0
    check: str = ""
    next_start: int = 0
    discarded: int = 0
    last_step: int = 0


def _kept(path: Path, run: RunLine, step: int, mark: LedgerMark | None) -> _Kept:
    refuse_other_run(path, run)
    kept = None if mark is None else _kept_from(path, step, mark)
    return _cut(_read(path), step) if kept is None else kept


def _kept_from(path: Path, step: int, mark: LedgerMark) -> _Kept | None:
    """What is kept, by the lines from the mark on; None where the mark is of another file or a line is damaged."""
    try:
        lines = _read(path, begin=mark.begin, before=mark.before)
        first = next(lines, None)
        if first is None or isinstance(first[0], RunLine) or first[0].step != step or first[2] != mark.check:
            return None
        return _cut(chain([first], lines), step)
    except LedgerError:  # a pass over all lines knows the number of the line
        return None


def _cut(lines: Iterable[tuple[Line, int, str]], step: int) -> _Kept:
    """What a start after `step` steps keeps, by lines that `_read` gave."""
    num_bytes, check, next_start, discarded, last_step, keeps = 0, "", 0, 0, 0, True
    for line, end, after in lines:
        if not isinstance(line, RunLine):
            keeps = keeps and line.step <= step
            # A step names its start, so that the start's own line need not be among the lines.
            next_start = max(next_start, 1 + (line.number if isinstance(line, StartLine) else line.start))
        if keeps:
            num_bytes, check = end, after
            last_step = line.step if isinstance(line, StepLine) else last_step
        else:
            discarded += line.discarded if isinstance(line, StartLine) else 1
    return _Kept(num_bytes=num_bytes, check=check, next_start=next_start, discarded=discarded, last_step=last_step)


def _refuse_other(path: Path, first: Line, run: RunLine) -> None:
    if not isinstance(first, RunLine):
        raise LedgerError(f"{path} does not begin with its run; start a new run with another --output")
    differences = first.differences(run)
    if differences:
        raise LedgerError(
            f"{path} is the ledger of another run: {'; '.join(differences)} (data {first.data} then, {run.data} now). "
            f"A step number would stand for other samples than before: restore the data and options, or start a new "
            f"run with another --output."
        )


def _written(line: Line, before: str) -> tuple[bytes, str]:
    """(the line with its check, the check)."""
    body = json.dumps({"kind": line.KIND, **asdict(line)}, separators=(",", ":"), allow_nan=False)[:-1]
    check = _check_of(before, body)
    return f'{body}{_TAIL}{check}"}}\n'.encode(), check


def _check_of(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()[:_CHECK_CHARS]


def _read(path: Path, *, begin: int = 0, before: str = "") -> Iterator[tuple[Line, int, str]]:
    """(line, byte offset after it, its check), from the line that begins there after the check `before` on."""
    offset, check, number = begin, before, 0
    try:
        with path.open("rb") as file:
            if begin:
                file.seek(begin - 1)
                if file.read(1) != b"\n":
                    return
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise LedgerError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes")
                # Lines are written in one piece with their end: without it the writer was interrupted.
                if not raw.endswith(b"\n"):
                    return
                offset += len(raw)
                line, check = _parsed(raw, check, place=f"{path}, line {number}")
                yield line, offset, check
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error}") from None


def _parsed(raw: bytes, before: str, *, place: str) -> tuple[Line, str]:
    try:
        text = raw.decode("utf-8").removesuffix("\n")
        content = json.loads(text)
        kind = _KINDS[content.pop("kind")]
        check = content.pop("check")
        if kind is RunLine and content.get("format_version") not in READABLE_VERSIONS:
            raise LedgerError(
                f"{place}: format version {content.get('format_version')}; this version reads {LEDGER_FORMAT_VERSION}"
            )
        line = _typed(kind, content)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, LedgerError):
            raise
        raise LedgerError(f"{place}: no line of a ledger ({error!r})") from None
    if check != _check_of(before, text[:-_TAIL_CHARS]):
        raise LedgerError(f"{place}: it does not match its check: this line or the one before was edited or lost")
    return line, check


def _typed(kind: _Kind, content: dict[str, Any]) -> Line:
    if kind is StepLine:
        content["ids"] = tuple(tuple(_whole(i) for i in rank) for rank in content["ids"])
        content["replaced"] = tuple(_whole(i) for i in content["replaced"])
    elif kind is RunLine:
        _fill_in_defaults(content)
        content["parts"] = tuple(PartLine(**_checked(PartLine, part)) for part in content["parts"])
        content["group_runs"] = tuple((_id(number), _id(length)) for number, length in content["group_runs"])
        if runs_digest(content["group_runs"]) != content["groups_digest"]:
            raise ValueError("its groups do not have the digest that it says")
    else:
        content["weights"] = tuple(dict(entry) for entry in content["weights"])
    return kind(**_checked(kind, content))


def _fill_in_defaults(content: dict[str, Any]) -> None:
    """Give a run line of an older version the fields that it does not have."""
    for field in fields(RunLine):
        if field.default is not MISSING:
            content.setdefault(field.name, field.default)


def _checked(kind: _Kind | type[PartLine], content: dict[str, Any]) -> dict[str, Any]:
    """`content` with every number and text of the type of its field."""
    for field in fields(kind):
        value = content[field.name]
        if field.type is int:
            content[field.name] = _whole(value)
        elif field.type is float:
            content[field.name] = float(value)
        elif field.type is str and type(value) is not str:
            raise TypeError(f"{field.name} is {value!r:.40}")
    return content


def _id(value: Any) -> int:
    if _whole(value) >= MAX_ID:
        raise ValueError(f"{value!r:.40} is no id")
    return int(value)


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2 * MAX_ID:
        raise ValueError(f"{value!r:.40} is no count and no id")
    return value
