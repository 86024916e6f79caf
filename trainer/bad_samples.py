"""bad_samples.jsonl: every sample that was left out or replaced, one line each, to repair or to delete.

    {"kind": "scan", "sample_id": 7, "shard": "a.tar", "key": "0007", "reason": "truncated: ...", "step": null}
    {"kind": "oversize", ...}                              left out by --oversize drop; step is null
    {"kind": "replaced", ..., "step": 812}                 trained as a zero-loss stand-in in that step
    {"kind": "timeout", ..., "step": 813}                  the same, because it took too long
    {"kind": "lost_worker", ..., "step": 814}              the same, because its worker died twice over it
    {"kind": "validation", ..., "step": 900}               held out; left out of the loss of the validation after that
                                                           step and of later ones, within no budget, listed once

Lines without a step are written when the run starts. A resume drops the lines of steps that will be trained again.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from balancer.records import Replaced
from dataloaders.index import CostIndex
from trainer.data import DataSide

_POOL_REASONS = ("timeout", "lost_worker")
_VALIDATION = "validation"


class BadSamples:
    """Appends to the list of a run.

    Args:
        path: the file; what an earlier start wrote about steps up to `finished_steps` stays.
        side: the training data with what the scan and the oversize policy left out.
    """

    def __init__(self, path: Path, side: DataSide, *, finished_steps: int) -> None:
        self._index = side.index
        kept = [line for line in _lines(path) if line["step"] is not None and line["step"] <= finished_steps]
        self._held_out = {line["sample_id"] for line in kept if line["kind"] == _VALIDATION}
        draft = path.with_name(f".{path.name}.tmp")
        with draft.open("w", encoding="utf-8") as file:
            file.writelines(_text(line) for line in (*_left_out(side), *kept))
        os.replace(draft, path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def add(self, step: int, replaced: Iterable[Replaced]) -> None:
        """Append the samples that were replaced in a step (from 1)."""
        for item in replaced:
            code = item.reason.partition(":")[0]
            kind = code if code in _POOL_REASONS else "replaced"
            self._file.write(_text(_line(self._index, kind, item.sample_id, item.reason, step)))
        self._file.flush()

    def add_held_out(self, step: int, replaced: Iterable[Replaced], index: CostIndex) -> None:
        """Append held-out samples that were left out of a validation after `step`; one that is listed is passed over.

        Args:
            index: that of the validation, which --eval-data gives one of its own.
        """
        for item in replaced:
            if item.sample_id not in self._held_out:
                self._held_out.add(item.sample_id)
                self._file.write(_text(_line(index, _VALIDATION, item.sample_id, item.reason, step)))
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> "BadSamples":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _left_out(side: DataSide) -> Iterable[dict[str, Any]]:
    unusable = set()
    for bad in side.bad:
        unusable.add(bad.sample_id)
        yield _line(side.index, "scan", bad.sample_id, f"{bad.reason}: {bad.message}", None)
    for dropped in side.dropped:
        if dropped.sample_id not in unusable:
            yield _line(side.index, "oversize", dropped.sample_id, dropped.reason, None)


def _line(index: CostIndex, kind: str, sample_id: int, reason: str, step: int | None) -> dict[str, Any]:
    return {
        "kind": kind,
        "sample_id": sample_id,
        "shard": index.shard(sample_id),
        "key": index.keys(sample_id),
        "reason": reason,
        "step": step,
    }


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"


def _lines(path: Path) -> list[dict[str, Any]]:
    """What an earlier start has written; a line that a crash cut short is left out, it is written again."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
            found.append({name: line[name] for name in ("kind", "sample_id", "shard", "key", "reason", "step")})
        except (ValueError, KeyError, TypeError):
            continue
    return found
