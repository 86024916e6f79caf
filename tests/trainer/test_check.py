"""The proof and the proof of the proof: `check` agrees where all is well and fails on every planted bug."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import trainer  # noqa: E402
from balancer.errors import LayoutError  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from dataloaders.sample import load_sample  # noqa: E402
from trainer import check_command  # noqa: E402
from trainer.check import DTYPES, CheckRow, CheckSubject, check_layout, layout_name, row_from  # noqa: E402
from trainer.check_command import build_subject, run_check  # noqa: E402
from trainer.check_data import GROUP, NUM_SAMPLES, CheckSource  # noqa: E402
from trainer.comm import single_process  # noqa: E402
from trainer.config import CheckConfig  # noqa: E402
from trainer.errors import CheckFailedError  # noqa: E402
from trainer.selftest import (  # noqa: E402
    READER_BUGS,
    RUNNER_BUGS,
    EncoderGradientDoubled,
    LeakAcrossDocuments,
    LosesASample,
    RepeatsASample,
    WrongPositionAxis,
    self_test,
)

COMM = single_process(torch.device("cpu"))
SIX_BUGS = {
    "per-rank mean",
    "lost sample",
    "duplicate sample",
    "leak across documents",
    "encoder gradient x2",
    "wrong position axis",
}


@pytest.fixture(scope="module")
def subject() -> CheckSubject:
    return build_subject(CheckConfig())


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`balancer-train ARGUMENTS` in a process of its own, as its console script starts it."""
    home = str(Path(trainer.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    return subprocess.run(
        [sys.executable, "-P", "-c", "from balancer._entry import train; train()", *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def row(**changed: object) -> CheckRow:
    fixed = {
        "layout": "1 process",
        "dtype": "float64",
        "num_microbatches": 1,
        "balancer": "on",
        "covers": ("text-only",),
    }
    numbers = {"loss": 5.0, "reference_loss": 5.0, "worst_tensor": "w", "worst_error": 1e-12, "tolerance": 1e-10}
    return CheckRow(**{**fixed, **numbers, **changed})  # type: ignore[arg-type]


def test_one_process_agrees_with_the_plain_loop_for_both_types_and_numbers_of_micro_batches(
    subject: CheckSubject,
) -> None:
    rows = check_layout(subject, COMM)
    assert [(r.dtype, r.num_microbatches, r.balancer) for r in rows] == [
        (dtype, count, balancer) for dtype in ("float64", "float32") for count in (1, 4) for balancer in ("off", "on")
    ]
    assert all(r.passed for r in rows), [r for r in rows if not r.passed]
    assert {covered for r in rows for covered in r.covers} == {"text-only", "label-free"}
    limits = {"float64": 1e-10, "float32": 1e-5}
    assert all(r.worst_error < limits[r.dtype] == r.tolerance for r in rows)
    assert all(r.worst_error > 0.0 for r in rows), "an error of zero means that a thing was compared with itself"


def test_the_built_in_samples_put_text_only_and_label_free_packs_into_one_step(subject: CheckSubject) -> None:
    samples = subject.reader.index.samples
    assert len(subject.reader.index) == NUM_SAMPLES
    assert samples["num_items"][:GROUP].tolist() == [0] * GROUP
    assert samples["label_tokens"][GROUP : 2 * GROUP].tolist() == [0] * GROUP
    assert samples["patches"][GROUP : 2 * GROUP].min() > 0
    assert samples["label_tokens"][2 * GROUP :].min() > 0
    assert samples["num_items"].max() > 1
    assert not subject.reader.index.bad


def test_the_built_in_samples_are_the_same_every_time_and_others_with_another_seed() -> None:
    first, again, other = CheckSource(seed=1), CheckSource(seed=1), CheckSource(seed=2)
    assert first.media_bytes(9, 0) == again.media_bytes(9, 0)
    assert first.media_bytes(9, 0) != other.media_bytes(9, 0)
    assert (first.fingerprint, first.fingerprint) == (again.fingerprint, again.fingerprint) != other.fingerprint
    sample = load_sample(
        first, build_subject(CheckConfig(seed=1)).reader.index, 9, build_subject(CheckConfig()).reader.estimator
    )
    assert sample.replaced is None


@pytest.mark.parametrize(
    ("bug", "tensor"),
    [
        pytest.param(EncoderGradientDoubled, "visual.", id="encoder gradient x2"),
        pytest.param(LeakAcrossDocuments, "", id="leak across documents"),
        pytest.param(WrongPositionAxis, "", id="wrong position axis"),
    ],
)
def test_a_bug_in_the_runner_fails_the_check_in_one_process(subject: CheckSubject, bug: type, tensor: str) -> None:
    rows = check_layout(
        subject, COMM, num_microbatches=(2,), runner_class=bug, dtypes=(torch.float64,), policies=("on",)
    )
    assert not any(r.passed for r in rows)
    assert all(r.worst_error > 1e-4 for r in rows)
    assert all(r.worst_tensor.startswith(tensor) for r in rows)


@pytest.mark.parametrize("bug", [LosesASample, RepeatsASample])
def test_a_bug_in_the_reader_fails_the_check_in_one_process(subject: CheckSubject, bug: type) -> None:
    reader = bug(**{name: getattr(subject.reader, name) for name in type(subject.reader).__slots__})
    rows = check_layout(subject, COMM, num_microbatches=(1,), reader=reader, dtypes=(torch.float64,), policies=("on",))
    assert not any(r.passed for r in rows)


def test_a_wrong_loss_scale_fails_even_where_gradients_are_small(subject: CheckSubject) -> None:
    from trainer.step import StepRunner

    class Scaled(StepRunner):
        def loss_scale(self, planned_weight, microbatches):  # type: ignore[no-untyped-def]
            return super().loss_scale(planned_weight, microbatches) * (1 + 1e-8)

    (found,) = check_layout(
        subject, COMM, num_microbatches=(1,), runner_class=Scaled, dtypes=(torch.float64,), policies=("on",)
    )
    assert found.worst_error == pytest.approx(1e-8, rel=0.1)
    assert not found.passed


def test_there_are_six_planted_bugs_and_they_need_two_replicas(subject: CheckSubject) -> None:
    assert {*RUNNER_BUGS, *READER_BUGS} == SIX_BUGS
    with pytest.raises(LayoutError, match="needs dp_size >= 2, this world has 1"):
        self_test(subject, COMM)


@pytest.mark.parametrize(
    "changed",
    [
        {"worst_error": 1e-10},
        {"worst_error": float("nan")},
        {"worst_error": float("inf")},
        {"loss": 5.0 + 1e-8},
        {"loss": float("nan")},
    ],
)
def test_a_row_fails_on_a_large_error_and_on_anything_that_is_no_number(changed: dict[str, float]) -> None:
    assert row().passed
    assert not row(**changed).passed


def test_rows_survive_the_way_between_processes() -> None:
    from dataclasses import asdict

    assert row_from(json.loads(json.dumps(asdict(row())))) == row()


def test_layouts_are_named_by_the_degrees_that_matter() -> None:
    names = [layout_name(Layout(dp_size=dp, pp_size=pp)) for dp, pp in ((1, 1), (2, 1), (1, 3), (2, 2))]
    assert names == ["1 process", "DP=2", "PP=3", "DP=2 x PP=2"]


def test_users_own_data_and_model_can_be_checked(check_config: Callable[..., CheckConfig]) -> None:
    subject = build_subject(check_config(global_batch_size=6, loss_reduction="sqrt", seed=4))
    rows = check_layout(subject, COMM, num_microbatches=(3,), dtypes=DTYPES[:1])
    assert [r.passed for r in rows] == [True, True]


def test_a_step_without_any_label_cannot_be_checked_and_says_so(
    check_config: Callable[..., CheckConfig],
    write_shard: Callable[..., Path],
    members: list[list[tuple[str, bytes]]],
    tmp_path: Path,
) -> None:
    config = check_config(data=str(write_shard(tmp_path / "mute.tar", members[3])))
    with pytest.raises(CheckFailedError, match=r"step 1 holds no label token.*--train-on"):
        check_layout(build_subject(config), COMM)


@pytest.fixture
def one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_command, "WORLDS", ())


@pytest.mark.usefixtures("one_process_only")
def test_what_was_found_is_written_instead_of_printed_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    assert run_check(replace(CheckConfig(), json_output=found)) == 0
    assert "comparisons agree" not in capsys.readouterr().out
    rows = [row_from(item) for item in json.loads(found.read_text())]
    assert len(rows) == 8
    assert all(r.passed for r in rows)


@pytest.mark.usefixtures("one_process_only")
def test_a_comparison_that_fails_makes_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_command, "check_layout", lambda subject, comm: [row(), row(worst_error=0.5)])
    assert run_check(CheckConfig()) == 1
    assert "1 of 2 comparisons agree" in capsys.readouterr().out


def test_a_world_that_ends_early_is_reported_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess(args=[], returncode=1, stdout="", stderr="the machine is on fire")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    with pytest.raises(CheckFailedError, match=r"in 2 processes \(pp_size=1\) ended early:\nthe machine is on fire"):
        run_check(CheckConfig(self_test=True))


@pytest.mark.multirank
@pytest.mark.slow
def test_the_check_command_agrees_in_one_process_with_two_replicas_and_with_two_pipeline_ranks() -> None:
    done = command("check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "24 of 24 comparisons agree" in done.stdout
    for layout in ("1 process", "DP=2", "PP=2"):
        assert done.stdout.count(f" {layout} ") == 8
    assert "text-only" in done.stdout
    assert "label-free" in done.stdout
    assert "FAILED" not in done.stdout


@pytest.mark.multirank
@pytest.mark.slow
def test_the_self_test_catches_every_planted_bug_and_does_not_blame_the_healthy_run() -> None:
    done = command("check", "--self-test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every bug was caught" in done.stdout
    lines = {bug: line for line in done.stdout.splitlines() for bug in (*SIX_BUGS, "none") if f" {bug} " in line}
    assert lines.keys() == {*SIX_BUGS, "none"}
    assert "passes" in lines["none"]
    assert all("fails" in lines[bug] for bug in SIX_BUGS)
