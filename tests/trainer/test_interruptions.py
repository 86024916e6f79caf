"""Runs that are stopped from outside: they end soon, say so in a line, leave no process, and can be continued.

The three runs that need processes of their own start together; each test looks at one of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import trainer  # noqa: E402
from balancer.records import read_records  # noqa: E402
from tools.verify_command import verify_run  # noqa: E402
from trainer.cli import main  # noqa: E402

COMMAND = [sys.executable, "-P", "-c", "from balancer._entry import train; train()"]
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
START_S, END_S = 120.0, 60.0
FOREVER = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A run in a process (or a world) of its own."""

    process: subprocess.Popen[str]
    folder: Path
    log: Path

    def wait_for_steps(self, steps: int) -> None:
        """Until the records of `steps` steps are written."""
        path, end = self.folder / "steps.jsonl", time.monotonic() + START_S
        while not path.is_file() or path.read_bytes().count(b"\n") < steps:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def ended(self) -> tuple[int, str]:
        """Exit code and output of the run, which must end by itself, with every process that it started."""
        code = self.process.wait(timeout=END_S)
        end = time.monotonic() + END_S
        while left := members_of_session(self.process.pid):
            assert time.monotonic() < end, f"processes {left} are left"
            time.sleep(0.05)
        return code, self.log.read_text()


def members_of_session(leader: int) -> list[int]:
    """Living processes of a session, its leader not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(fields[3]) == leader != int(entry.name) and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def children_of(parent: int) -> list[int]:
    """Direct children, in the order they were started."""
    return sorted(int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split())


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _hear_interrupts() -> None:
    """A job that a shell started in the background ignores SIGINT, and so do its children unless told otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder: Path, prefix: Sequence[str], options: Sequence[object]) -> Started:
    home = str(Path(trainer.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [*prefix, *COMMAND, "fit", *map(str, options), "--output", str(folder)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=folder.parent,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_interrupts,  # noqa: PLW1509  (no thread runs here yet)
        )
    return Started(process=process, folder=folder, log=log)


@pytest.fixture(scope="module")
def endless(corpus: Path, cache: Path) -> list[object]:
    """Options of a run that has no end of its own and saves every other step."""
    fixed = ["--model", "check", "--data", corpus, "--cache-dir", cache, "--global-batch-size", 4, "--threads", 1]
    length = ["--max-steps", FOREVER, "--checkpoint-interval-steps", 2, "--warmup-steps", 0]
    return [*fixed, "--eval-share", 0, "--compare-steps", 0, "--lr-schedule", "constant", *length]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, endless: list[object]) -> Iterator[dict[str, Started]]:
    """Runs to be interrupted or killed, one to lose its worker, one to lose a rank, and one to lose its launcher."""
    folder = tmp_path_factory.mktemp("runs")
    started = {
        "interrupted": start(folder / "interrupted", [], [*endless, "--num-workers", 0]),
        "worker": start(folder / "worker", [], [*endless, "--num-workers", 1]),
        "trainer": start(folder / "trainer", [], [*endless, "--num-workers", 1]),
        "ranks": start(folder / "ranks", LAUNCHER, [*endless, "--num-workers", 0]),
        "launcher": start(folder / "launcher", LAUNCHER, [*endless, "--num-workers", 0]),
    }
    yield started
    for run in started.values():
        if run.process.poll() is None:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


@pytest.mark.slow
def test_control_c_ends_the_run_with_a_line_and_a_resume_goes_on(runs: dict[str, Started]) -> None:
    run = runs["interrupted"]
    run.wait_for_steps(5)
    run.process.send_signal(signal.SIGINT)
    code, text = run.ended()
    assert code == 1
    assert text.splitlines()[-1] == "interrupted; --resume continues a run from its newest checkpoint"
    assert "Traceback" not in text
    saved = sorted(path.name for path in (run.folder / "checkpoints").iterdir() if path.name.startswith("step_"))
    assert saved
    goal = int(saved[-1].removeprefix("step_")) + 2
    assert main(["fit", "--resume", str(run.folder), "--max-steps", str(goal)]) == 0
    assert [record.step for record in read_records(run.folder / "steps.jsonl")] == list(range(1, goal + 1))
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == goal


@pytest.mark.slow
def test_a_killed_loader_worker_is_replaced_and_the_run_goes_on(runs: dict[str, Started]) -> None:
    run = runs["worker"]
    run.wait_for_steps(3)
    (worker,) = children_of(run.process.pid)
    os.kill(worker, signal.SIGKILL)
    # What it had begun is done again: many more steps than were prepared when it was killed.
    run.wait_for_steps(len(read_records(run.folder / "steps.jsonl")) + 30)
    assert worker not in children_of(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    code, text = run.ended()
    assert code == 1
    assert "Traceback" not in text
    assert "lost_worker" not in (run.folder / "bad_samples.jsonl").read_text()
    assert verify_run(run.folder).holds


@pytest.mark.slow
def test_a_killed_trainer_leaves_no_worker_behind(runs: dict[str, Started]) -> None:
    run = runs["trainer"]
    run.wait_for_steps(2)
    workers = children_of(run.process.pid)
    assert workers
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(is_running(pid) for pid in workers)


@pytest.mark.slow
@pytest.mark.multirank
def test_a_killed_rank_takes_the_other_one_down_with_a_line_instead_of_a_hang(runs: dict[str, Started]) -> None:
    run = runs["ranks"]
    run.wait_for_steps(3)
    first, second = children_of(run.process.pid)
    os.kill(second, signal.SIGKILL)
    code, text = run.ended()
    assert code != 0
    assert f"Signal 9 (SIGKILL) received by PID {second}" in text
    # The launcher may end the other rank before it notices; if it speaks, then in one line.
    assert "[rank0]: Traceback" not in text
    assert text.count("\nerror: lost contact with another rank") <= 1
    assert not Path(f"/proc/{first}").exists()
    records = read_records(run.folder / "steps.jsonl")
    assert [record.step for record in records] == list(range(1, len(records) + 1))


@pytest.mark.slow
@pytest.mark.multirank
def test_ranks_end_when_their_launcher_was_killed(runs: dict[str, Started]) -> None:
    run = runs["launcher"]
    run.wait_for_steps(3)
    ranks = children_of(run.process.pid)
    run.process.kill()
    run.process.wait()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(ranks) == 2
    assert not any(is_running(pid) for pid in ranks)
    assert "is gone, so this rank ends. Start it again with --resume." in run.log.read_text()


def test_an_interrupted_scan_leaves_no_half_index_behind(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "--model", "check", "--data", str(corpus), "--cache-dir", str(tmp_path / "cache")]
    with monkeypatch.context() as patch:
        patch.setattr("dataloaders.index._write_files", interrupt)
        assert main(argv) == 1
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "cache" / "index").iterdir()] == []
    assert main(argv) == 0


def test_an_interrupted_checkpoint_is_not_taken_for_one(
    corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    options = ["--model", "check", "--compare-steps", "0", "--num-workers", "0", "--threads", "1", "--eval-share", "0"]
    argv = ["fit", *options, "--data", str(corpus), "--cache-dir", str(cache), "--output", str(run)]
    argv += ["--max-steps", "4", "--checkpoint-interval-steps", "1", "--global-batch-size", "4"]
    with monkeypatch.context() as patch:
        patch.setattr("trainer.checkpoint._complete", after(2, original("trainer.checkpoint", "_complete")))
        assert main(argv) == 1
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        ".step_000003.tmp",
        "step_000001",
        "step_000002",
    ]
    assert main(["fit", "--resume", str(run)]) == 0
    assert [record.step for record in read_records(run / "steps.jsonl")] == [1, 2, 3, 4]
    assert not list((run / "checkpoints").glob(".step_*"))


def test_an_interrupt_before_the_first_step_can_be_started_anew(
    corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["fit", "--model", "check", "--data", str(corpus), "--cache-dir", str(cache), "--output"]
    argv += [str(tmp_path / "run"), "--max-steps", "1", "--num-workers", "0", "--compare-steps", "0"]
    with monkeypatch.context() as patch:
        patch.setattr("trainer.loop.ModelPieces.build", interrupt)
        assert main(argv) == 1
    assert not (tmp_path / "run").exists()
    assert main(argv) == 0


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def original(module: str, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(sys.modules[module], name)
    return found


def after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for so many calls, then an interrupt."""
    done: list[None] = []

    def call(*args: Any, **options: Any) -> Any:
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(None)
        return function(*args, **options)

    return call
