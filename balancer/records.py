"""The log of a run: one `StepRecord` per optimizer step, one JSON line each.

Steps are the trainer's global count of finished steps, from 1, also after a resume: a record never carries a counter
of its own. `RecordWriter` keeps it so: resuming after step 1000 drops what a crashed run wrote beyond it, and the next
record must be 1001.

A resume that knows where the last record begins (a checkpoint keeps it) reads that record alone, however long the log
is. Price: damage elsewhere is then not found by the resume, but by `read_records`.

Numbers that are not known are NaN and become `null`; infinities become the strings "inf" and "-inf" (JSON has neither).
"""

import json
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from balancer.errors import RecordFormatError

RECORD_FORMAT_VERSION = 1
MAX_RANKS = 2**20  # reports hold a row per rank: a damaged number must not fill the memory
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """One measured act: op F or B of a stage on a micro-batch; times in ms from the start of the step."""

    rank: int
    dp_rank: int
    stage: int
    op: str
    microbatch: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A sample whose content was replaced by a zero-loss stand-in, where it came from and why."""

    sample_id: int
    place: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one optimizer step did and took.

    Attributes:
        step: finished steps of the whole training, this one included (1 after the first).
        epoch: from 0.
        loss, lr, grad_norm: of the global batch; the norm is before clipping.
        label_tokens, llm_tokens: trained and executed sequence positions, summed over ranks.
        useful_tokens_per_s: label-carrying samples' tokens without padding and stand-ins, per second, all ranks.
        executed_tokens_per_s: all tokens that went through the LLM, per second, all ranks.
        step_ms, data_wait_ms: wall time of the step; of it waiting for data (largest rank).
        actions: measured acts of all ranks.
        imbalance_before, imbalance_after: predicted, of `sequential` and of the plan.
        measured_imbalance: max / mean over DP ranks of measured busy time; NaN where not measured.
        lower_bound_ms, makespan_ms: predicted.
        fill, samples_per_pack, num_microbatches: of the plan.
        dropped_ids, cut_ids: samples left out or shortened in this step.
        replaced: samples replaced by stand-ins. conformed: media brought to their planned shape.
        peak_memory_bytes: largest rank; 0 where unknown.
        policy: the policy used. plan_digest: of the step's plan.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float
    label_tokens: int
    llm_tokens: int
    useful_tokens_per_s: float
    executed_tokens_per_s: float
    step_ms: float
    data_wait_ms: float
    actions: tuple[ActionRecord, ...] = ()
    imbalance_before: float = math.nan
    imbalance_after: float = math.nan
    measured_imbalance: float = math.nan
    lower_bound_ms: float = math.nan
    makespan_ms: float = math.nan
    fill: float = math.nan
    samples_per_pack: float = math.nan
    num_microbatches: int = 0
    dropped_ids: tuple[int, ...] = ()
    cut_ids: tuple[int, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    conformed: int = 0
    peak_memory_bytes: int = 0
    policy: str = ""
    plan_digest: str = ""

    def to_json(self) -> str:
        """One line without a line break."""
        content: dict[str, Any] = {"format_version": RECORD_FORMAT_VERSION, **_plain(self)}
        content["actions"] = [_plain(action) for action in self.actions]
        content["replaced"] = [_plain(replaced) for replaced in self.replaced]
        return json.dumps(content, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "StepRecord":
        """The record that `to_json` wrote.

        Raises:
            RecordFormatError: not a record, or of another format version.
        """
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RecordFormatError(f"not a step record: {error}") from error
        version = content.pop("format_version", None) if isinstance(content, dict) else None
        if version != RECORD_FORMAT_VERSION:
            raise RecordFormatError(
                f"step record of format {version}; this version reads format {RECORD_FORMAT_VERSION}"
            )
        try:
            content["actions"] = tuple(ActionRecord(**_typed(ActionRecord, entry)) for entry in content["actions"])
            content["replaced"] = tuple(Replaced(**entry) for entry in content["replaced"])
            content["dropped_ids"], content["cut_ids"] = tuple(content["dropped_ids"]), tuple(content["cut_ids"])
            return cls(**_typed(cls, content))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordFormatError(f"step record with missing or unknown fields: {error}") from error


def _plain(record: StepRecord | ActionRecord | Replaced) -> dict[str, Any]:
    return {field.name: _jsonable(getattr(record, field.name)) for field in fields(record)}


def _jsonable(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _typed(kind: type[StepRecord] | type[ActionRecord], content: dict[str, Any]) -> dict[str, Any]:
    """Undo `_jsonable`: fields declared as float come back as floats, and those declared as int have to be whole."""
    floats = {field.name for field in fields(kind) if field.type is float}
    for name in [field.name for field in fields(kind) if field.type is int]:
        value = content.get(name, 0)
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{name} is {value!r:.40}, not a count")
    for name in ("rank", "dp_rank"):
        if content.get(name, 0) >= MAX_RANKS:
            raise ValueError(f"{name} is {content[name]}, above {MAX_RANKS}")
    return {
        name: (math.nan if value is None else float(value)) if name in floats else value
        for name, value in content.items()
    }


def read_records(path: str | Path) -> list[StepRecord]:
    """All complete records of a log; a last line cut short by a crash is left out with a log message.

    Raises:
        RecordFormatError: a damaged line in the middle; the text names file and line.
    """
    return [record for record, _ in _read(Path(path))]


def _read(path: Path) -> Iterator[tuple[StepRecord, int]]:
    """(record, byte offset after its line)."""
    offset = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        offset += len(line)
        # Lines are written in one piece with their end: without it the writer was interrupted.
        if not line.endswith(b"\n"):
            _logger.warning("%s: line %d is cut short and left out", path, number)
            return
        if not line.strip():
            continue
        try:
            yield StepRecord.from_json(line.decode("utf-8")), offset
        except (RecordFormatError, UnicodeDecodeError) as error:
            raise RecordFormatError(
                f"{path}, line {number}: {error}. Restore the file from a copy, or start a new run."
            ) from error


def _num_kept(path: Path, finished_steps: int, last_record: int | None) -> int:
    """Bytes of a log up to the record of `finished_steps`."""
    end = None if last_record is None else _end_of_record(path, last_record, finished_steps)
    if end is not None:
        return end
    return max((end for record, end in _read(path) if record.step <= finished_steps), default=0)


def _end_of_record(path: Path, begin: int, step: int) -> int | None:
    """Byte offset after the record of `step`; None where it does not begin at `begin`."""
    if begin >= path.stat().st_size:
        return None
    with path.open("rb") as file:
        file.seek(max(0, begin - 1))
        if begin and file.read(1) != b"\n":
            return None
        line = file.readline()
    if not line.endswith(b"\n"):
        return None
    try:
        record = StepRecord.from_json(line.decode("utf-8"))
    except (RecordFormatError, UnicodeDecodeError):
        return None
    return begin + len(line) if record.step == step else None


class RecordWriter:
    """Appends records to a log and keeps its steps gapless.

    Args:
        path: the log, created with its folder where missing.
        finished_steps: steps that the training has behind it (0 for a new run). Records beyond it come from a run
            that went on after its last checkpoint; they will be trained again and are cut off.
        last_record: bytes before the record of `finished_steps`; one that does not fit the log costs a pass over all
            of it, as None does.

    Attributes:
        last_record: bytes before the record that was written last; None before the first `write`.

    Raises:
        RecordFormatError: a pass over the log found a damaged line.
    """

    def __init__(self, path: str | Path, *, finished_steps: int = 0, last_record: int | None = None) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._finished_steps = finished_steps
        self._num_bytes = _num_kept(self._path, finished_steps, last_record) if self._path.exists() else 0
        self.last_record: int | None = None
        self._file: IO[bytes] = self._path.open("ab")
        self._file.truncate(self._num_bytes)

    def write(self, record: StepRecord) -> None:
        """Append one record and flush it.

        Raises:
            RecordFormatError: the record is not of the step that follows.
        """
        if record.step != self._finished_steps + 1:
            raise RecordFormatError(
                f"{self._path}: record of step {record.step} after {self._finished_steps} finished steps; "
                f"expected step {self._finished_steps + 1} (records carry the training's global step)"
            )
        line = record.to_json().encode("utf-8") + b"\n"
        self._file.write(line)
        self._file.flush()
        self._finished_steps = record.step
        self.last_record, self._num_bytes = self._num_bytes, self._num_bytes + len(line)

    def sync(self) -> None:
        """Bring everything written to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
