"""A run that is killed and resumed again and again, with other numbers of ranks: `python -m tools.benchmarks.soak`.

    start on 1-4 ranks ──some steps──> kill -9 of the whole group ──resume on other ranks──> ... ──> the last start ends
    the same run, never stopped, on one rank                                                     ──> reference
    ledger: proven by `tools.ledger_proof`;   losses and weights: compared with the reference

Kills come at moments drawn from the seed: in the start-up, in a step, while a checkpoint is written. Layouts sum in
another order, so losses and weights agree within a tolerance; with one and the same number of ranks throughout, they
have to be equal to the bit. Price: two to ten seconds of start-up per cycle.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import balancer
from balancer.records import read_records
from tools.benchmarks.soak_corpus import write_soak_corpus
from tools.errors import AnalyzeError
from tools.verify_command import VerifyReport, verify_run

# The console script may not be on PATH; -P keeps the current folder off the module path.
COMMAND = [sys.executable, "-P", "-c", "from balancer._entry import train; train()"]
NUM_SAMPLES = 50
CHECKPOINT_INTERVAL_STEPS = 3
MAX_STEPS_BEFORE_KILL = 6
LAST_STEPS = 4
FOREVER = 1_000_000
POLL_S, START_LIMIT_S, END_LIMIT_S = 0.02, 300.0, 600.0
MARK = "MLLM_BALANCER_SOAK"
WEIGHTS_FILE = "model.safetensors"
# Sums in another order differ in the last bits, and AdamW carries that on from step to step.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 2e-3, 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One start that was killed (the last one: that ended).

    Attributes:
        ranks, workers: processes, and decoding processes per rank.
        killed_after_step: records in steps.jsonl when it was killed.
        seconds: from start to end.
    """

    ranks: int
    workers: int
    killed_after_step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """Outcome of a soak.

    Attributes:
        cycles: all starts. report: of the ledger.
        num_steps: of both runs.
        loss_difference: largest |loss - reference| / |reference| over the steps.
        weight_difference: largest |weight - reference| over all weights, relative to the largest of its tensor.
        same_layout: all starts and the reference had one number of ranks: differences must be 0.
    """

    cycles: tuple[Cycle, ...]
    report: VerifyReport
    num_steps: int
    loss_difference: float
    weight_difference: float
    same_layout: bool

    @property
    def holds(self) -> bool:
        """Whether the ledger is perfect and the result is that of the run that was never stopped."""
        if self.same_layout:
            return self.report.holds and self.loss_difference == self.weight_difference == 0.0
        close = self.loss_difference <= LOSS_TOLERANCE and self.weight_difference <= WEIGHT_TOLERANCE
        return self.report.holds and close


def soak(folder: Path, *, cycles: int, worlds: Sequence[int], seed: int, num_samples: int = NUM_SAMPLES) -> SoakReport:
    """Kill and resume a run `cycles` times, let it end, and compare.

    Args:
        folder: receives corpus, cache and both run folders.
        worlds: numbers of ranks to draw from.

    Raises:
        AnalyzeError: a start ended by itself or did nothing; the text has its output.
    """
    draw = random.Random(seed)
    data = write_soak_corpus(folder / "corpus", num_samples, seed=seed)
    run, made = folder / "run", list[Cycle]()
    for _ in range(cycles):
        made.append(_killed(run, _options(folder, data), ranks=draw.choice(worlds), draw=draw))
    goal = _num_records(run) + LAST_STEPS
    ranks = draw.choice(worlds)
    started = time.monotonic()
    options = [*_options(folder, data), "--max-steps", str(goal), "--num-workers", "0"]
    _finished(run, options, ranks=ranks)
    made.append(Cycle(ranks=ranks, workers=0, killed_after_step=goal, seconds=time.monotonic() - started))
    reference, same_layout = folder / "reference", len({cycle.ranks for cycle in made}) == 1
    _finished(reference, options, ranks=ranks if same_layout else 1)
    return SoakReport(
        cycles=tuple(made),
        report=verify_run(run),
        num_steps=goal,
        loss_difference=_loss_difference(run, reference),
        weight_difference=_weight_difference(_weights(run), _weights(reference)),
        same_layout=same_layout,
    )


def _options(folder: Path, data: str) -> list[str]:
    fixed = {
        "model": "check",
        "data": data,
        "cache-dir": str(folder / "cache"),
        "global-batch-size": "4",
        "shuffle": "block",
        "shuffle-block-shards": "2",
        "eval-share": "0",
        "threads": "1",
        "compare-steps": "0",
        "lr-schedule": "constant",
        "warmup-steps": "0",
        "lr": "1e-3",
        "eps": "1e-6",
        "checkpoint-interval-steps": str(CHECKPOINT_INTERVAL_STEPS),
        "log-interval": "1000",
    }
    return [word for name, value in fixed.items() for word in (f"--{name}", value)]


def _killed(run: Path, options: Sequence[str], *, ranks: int, draw: random.Random) -> Cycle:
    """Start (or resume), let it do some steps, and kill all of it."""
    workers, steps, delay_s = draw.choice((0, 1)), draw.randrange(MAX_STEPS_BEFORE_KILL + 1), draw.uniform(0.0, 0.5)
    before, started = _num_records(run), time.monotonic()
    options = [*options, "--max-steps", str(FOREVER), "--num-workers", str(workers)]
    process, log, mark = _start(run, options, ranks)
    try:
        # After a resume the log is cut back first, so what counts is lines that this start has written.
        lowest = before
        while (now := _num_records(run)) - lowest < steps or not (run / "run.json").exists():
            lowest = min(lowest, now)
            if process.poll() is not None or time.monotonic() - started > START_LIMIT_S:
                raise AnalyzeError(f"a start on {ranks} ranks did not get to its steps:\n{log.read_text()[-4000:]}")
            time.sleep(POLL_S)
        time.sleep(delay_s)
    finally:
        _kill(process, mark)
    return Cycle(ranks=ranks, workers=workers, killed_after_step=_num_records(run), seconds=time.monotonic() - started)


def _finished(run: Path, options: Sequence[str], *, ranks: int) -> None:
    process, log, mark = _start(run, options, ranks)
    try:
        code = process.wait(timeout=END_LIMIT_S)
    finally:
        _kill(process, mark)
    if code:
        raise AnalyzeError(f"a start on {ranks} ranks failed:\n{log.read_text()[-4000:]}")


def _start(run: Path, options: Sequence[str], ranks: int) -> tuple[subprocess.Popen[bytes], Path, str]:
    """Processes that begin the run or go on with it, their output, and the mark that all of them carry."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    where = ["--resume", str(run)] if (run / "run.json").exists() else ["--output", str(run)]
    log, mark = run.with_suffix(".log"), uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launcher, "--no-python", *COMMAND, "fit", *options, *where],
            env={**_environment(), MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return process, log, mark


def _kill(process: subprocess.Popen[bytes], mark: str) -> None:
    """kill -9 of the launcher and of all that came from it, until nothing of it runs.

    The launcher gives every rank a session of its own, so a group or a session is not enough: whoever inherited the
    mark in its environment is killed (Linux).
    """
    process.kill()
    process.wait()
    end = time.monotonic() + END_LIMIT_S
    while left := _marked(mark):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            raise AnalyzeError(f"processes {left} cannot be killed")
        time.sleep(POLL_S)


def _marked(mark: str) -> list[int]:
    """Living processes with the mark in their environment; a dead one's is empty."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _environment() -> dict[str, str]:
    root = str(Path(balancer.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _num_records(run: Path) -> int:
    path = run / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _loss_difference(run: Path, reference: Path) -> float:
    ours, theirs = ([record.loss for record in read_records(path / "steps.jsonl")] for path in (run, reference))
    if len(ours) != len(theirs):
        raise AnalyzeError(f"{run} has {len(ours)} steps, {reference} has {len(theirs)}")
    differences = np.abs(np.array(ours) - np.array(theirs)) / np.abs(theirs)
    return float(np.nanmax(differences))


def _weight_difference(ours: dict[str, NDArray[np.float32]], theirs: dict[str, NDArray[np.float32]]) -> float:
    if ours.keys() != theirs.keys():
        raise AnalyzeError("the two models have different weights")
    largest = [
        float(np.abs(ours[name] - theirs[name]).max() / max(float(np.abs(theirs[name]).max()), 1e-12)) for name in ours
    ]
    return max(largest)


def _weights(run: Path) -> dict[str, NDArray[np.float32]]:
    """Weights of a run's last checkpoint, by way of `balancer-train export`; this package imports no torch."""
    destination = run.with_name(f"{run.name}-model")
    command = [*COMMAND, "export", "--run", str(run), "--destination", str(destination)]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise AnalyzeError(f"{run} cannot be exported: {done.stderr[-2000:]}")
    content = (destination / WEIGHTS_FILE).read_bytes()
    # safetensors: the length of the header (uint64), the header (JSON), then all tensors.
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    return {
        name: np.frombuffer(content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]], np.float32)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def print_report(report: SoakReport, console: Console) -> None:
    """One row per start, then what came of it."""
    table = Table(title="starts")
    for name in ("start", "ranks", "workers", "killed after step", "seconds"):
        table.add_column(name, justify="right")
    for number, cycle in enumerate(report.cycles):
        end = f"{cycle.killed_after_step}" if cycle is not report.cycles[-1] else f"{cycle.killed_after_step} (ended)"
        table.add_row(str(number), str(cycle.ranks), str(cycle.workers), end, f"{cycle.seconds:.1f}")
    console.print(table)
    ledger = report.report
    console.print(
        f"ledger: {'perfect' if ledger.holds else 'NOT perfect'}; {ledger.num_steps} steps, {ledger.num_samples} "
        f"samples, {ledger.num_complete} complete epochs of {ledger.num_ids}, {ledger.num_discarded} steps discarded "
        f"in {ledger.num_starts} starts"
    )
    for finding in ledger.findings:
        console.print(f"WRONG: {finding}", markup=False)
    kind = "must be 0: one layout" if report.same_layout else f"at most {LOSS_TOLERANCE:g}, {WEIGHT_TOLERANCE:g}"
    console.print(
        f"against the run that was never stopped: loss {report.loss_difference:.2g}, weights "
        f"{report.weight_difference:.2g} ({kind})"
    )
    console.print("holds" if report.holds else "DOES NOT HOLD")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; see the module."""
    parser = argparse.ArgumentParser(prog="tools.benchmarks.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks to draw from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--folder", type=Path, help="where to work; None: a temporary folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        report = soak(
            folder,
            cycles=arguments.cycles,
            worlds=arguments.worlds,
            seed=arguments.seed,
            num_samples=arguments.samples,
        )
    if arguments.json:
        sys.stdout.write(json.dumps({"holds": report.holds, **asdict(report)}, indent=1) + "\n")
    else:
        print_report(report, Console(highlight=False))
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
