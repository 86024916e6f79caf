"""`balancer-analyze verify RUN`: whether a run consumed every sample exactly once, as a short report.

The proof is in `tools.ledger_proof`; this module finds the ledger and says in words and numbers what was proven.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from balancer.ledger import read_lines
from balancer.printable import printable
from tools.errors import UsageError
from tools.ledger_proof import Proof, World
from tools.mixture_proof import PartEpochs

LEDGER_FILE = "ledger.jsonl"
MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What the ledger of a run proves; fields are those of `tools.ledger_proof.Proof`.

    Attributes:
        holds: nothing speaks against "exactly once"; also true of a run without a finished step.
        num_ids: eligible ids of an epoch.
        num_complete: epochs that hold every eligible id once. unfinished: samples of the epoch begun last.
        num_selected: steps whose selection was computed again. ids_from: where the eligible ids came from.
        tail: what epochs leave out or repeat at their end; "" where every one holds each sample once in whole steps.
        parts: what was read of each part of a mixture; then no epoch of the whole is counted.
    """

    holds: bool
    findings: tuple[str, ...]
    num_findings: int
    notes: tuple[str, ...]
    num_steps: int
    num_samples: int
    num_ids: int
    num_complete: int
    unfinished: int
    num_starts: int
    num_discarded: int
    worlds: tuple[World, ...]
    replaced: tuple[int, ...]
    num_selected: int
    num_placed: int
    ids_from: str
    tail: str = ""
    parts: tuple[PartEpochs, ...] = ()
    weight_changes: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def verify_run(folder: Path) -> VerifyReport:
    """Check the ledger of a run folder.

    Raises:
        UsageError: no such folder, or one without a ledger.
    """
    path = folder / LEDGER_FILE
    if not folder.is_dir():
        raise UsageError(
            f"run folder {folder} does not exist or is no folder. Give the folder that balancer-train printed."
        )
    if not path.is_file():
        raise UsageError(f"{path} does not exist: {folder} is no run, or was made by a version that kept no ledger.")
    proof = Proof(folder)
    proof.follow(read_lines(path))
    selection = proof.selection
    return VerifyReport(
        holds=not proof.num_findings,
        findings=tuple(proof.findings),
        num_findings=proof.num_findings,
        notes=tuple(proof.notes),
        num_steps=proof.num_steps,
        num_samples=proof.num_samples,
        num_ids=0 if proof.run is None else proof.run.num_ids,
        num_complete=0 if selection is None else selection.num_complete,
        unfinished=0 if selection is None else selection.unfinished,
        num_starts=proof.num_starts,
        num_discarded=proof.num_discarded,
        worlds=tuple(proof.worlds),
        replaced=tuple(sorted(proof.replaced)),
        num_selected=0 if selection is None else selection.num_selected,
        num_placed=proof.num_placed,
        ids_from="" if selection is None else selection.ids_from,
        tail="" if proof.tail is None else proof.tail.text(),
        parts=proof.parts,
        weight_changes=proof.weight_changes,
    )


def print_report(report: VerifyReport, console: Console) -> None:
    """The report as a table, what was not proven, and every finding."""
    table = Table(show_header=False)
    for name, value in _rows(report):
        table.add_row(printable(name), printable(value))
    console.print(table)
    for note in report.notes:
        console.print(printable(f"note: {note}"), markup=False)
    for finding in report.findings:
        console.print(printable(f"WRONG: {finding}"), markup=False)
    if report.num_findings > len(report.findings):
        console.print(f"and {report.num_findings - len(report.findings)} more")


def _rows(report: VerifyReport) -> Iterator[tuple[str, str]]:
    proven = report.holds and report.num_steps > 0
    unproven = "no step was finished: nothing to prove" if report.holds else f"NO: {report.num_findings} findings"
    yield "exactly once", "yes" if proven else unproven
    yield "steps", f"{report.num_steps}, gapless" if proven else str(report.num_steps)
    if report.parts:
        yield "samples", str(report.num_samples)
        for part in report.parts:
            yield f"  of {part.name}", _epochs(part.num_complete, part.num_ids, part.unfinished)
        yield "weights changed after steps", ", ".join(map(str, report.weight_changes)) or "never"
    else:
        yield "samples", f"{report.num_samples}: {_epochs(report.num_complete, report.num_ids, report.unfinished)}"
    if report.tail:
        yield "end of an epoch", report.tail
    ids_from = f", ids from {report.ids_from}" if report.ids_from else ""
    yield "selection computed again", f"{report.num_selected} steps{ids_from}"
    yield "compared with their plan", f"{report.num_placed} steps"
    yield "starts", f"{report.num_starts}; {report.num_discarded} steps lost with a process and executed again"
    yield "ranks (replicas) over time", _worlds(report.worlds)
    yield "trained as stand-ins", _listed(report.replaced)


def _epochs(num_complete: int, num_ids: int, unfinished: int) -> str:
    rest = f" and {unfinished} samples of the next" if unfinished else ""
    return f"{num_complete} epochs of {num_ids}{rest}"


def _worlds(worlds: tuple[World, ...]) -> str:
    said = [f"{w.world_size} ({w.dp_size}) in steps {w.first_step}-{w.last_step}" for w in worlds[:MAX_LISTED]]
    return "; ".join(said) + (f"; {len(worlds) - MAX_LISTED} more changes" if len(worlds) > MAX_LISTED else "")


def _listed(ids: tuple[int, ...]) -> str:
    if not ids:
        return "none"
    more = " ..." if len(ids) > MAX_LISTED else ""
    return f"{len(ids)}: {', '.join(map(str, ids[:MAX_LISTED]))}{more}"
