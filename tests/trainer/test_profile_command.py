"""`balancer-train profile` end to end on a tiny model, and the file it writes in `plan` and `fit`."""

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import torch  # noqa: E402

import trainer  # noqa: E402
from balancer.fit_report import Fit, read_cost_model  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.plan import StepPlan  # noqa: E402
from balancer.records import ActionRecord  # noqa: E402
from trainer.calibrated import chosen_cost_model, model_digest  # noqa: E402
from trainer.cli import main  # noqa: E402
from trainer.cli_parse import parse_or_raise  # noqa: E402
from trainer.comm import single_process  # noqa: E402
from trainer.config import FitConfig, PlanConfig  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.model_source import cost_model_for, load_model_source  # noqa: E402
from trainer.plan_command import run_plan  # noqa: E402
from trainer.profile_command import Subject, profile, run_profile  # noqa: E402
from trainer.profile_config import ProfileConfig  # noqa: E402
from trainer.profile_set import build, designed_set, pixel_pool  # noqa: E402

SMALL = {"capacity_tokens": 256, "profile_microbatches": 14, "verify_microbatches": 4, "repeats": 1, "clock": "cpu"}


@pytest.fixture(scope="module")
def cost_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the `check` model on one rank."""
    path = tmp_path_factory.mktemp("profile") / "made" / "cost.json"
    assert main(["profile", "--model", "check", "--output", str(path), *flags(SMALL)]) == 0
    return path


def flags(options: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def test_the_file_holds_a_usable_model_with_its_evidence(cost_file: Path) -> None:
    model, fitted = read_cost_model(cost_file)
    assert fitted is not None
    assert [(stage.stage, stage.op) for stage in fitted.stages] == [(0, "F"), (0, "B"), (1, "F"), (1, "B")]
    assert model.absolute
    assert model.num_stages == Layout().num_stages
    assert model.memory == cost_model_for(load_model_source("check").config, Layout()).memory
    assert all(stage.num_microbatches >= 8 for stage in fitted.stages)
    assert all(sum(stage.terms.values()) > 0.0 for stage in fitted.stages)
    assert len(fitted.verified) == 4
    assert fitted.subject["model_digest"] == model_digest(load_model_source("check"))
    assert (fitted.subject["clock"], fitted.subject["threads"]) == ("cpu", 1)


def test_the_report_gives_r2_and_error_percentiles_of_every_stage_and_op(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "cost.json"
    run_profile(ProfileConfig(model="check", output=output, pp_size=3, **{**SMALL, "verify_microbatches": 0}))
    out = capsys.readouterr().out
    for stage in range(3):
        for op in "FB":
            assert f"stage {stage} {op} (" in out
    assert "R2 " in out
    assert "held-out error median " in out
    assert "other micro-batches" not in out
    assert out.rstrip().splitlines()[-1].startswith(f"wrote {output}")
    # One process measured all stages of a pipeline of three.
    assert Fit.from_json(output.read_text(encoding="utf-8")).model.num_stages == 3


def with_error(fitted: Fit, median: float) -> Fit:
    """The fit with this held-out error on its last stage and op, and no other."""
    stages = [dataclasses.replace(s, held_out=dataclasses.replace(s.held_out, median=0.01)) for s in fitted.stages]
    stages[-1] = dataclasses.replace(stages[-1], held_out=dataclasses.replace(stages[-1].held_out, median=median))
    verified = tuple(dataclasses.replace(row, median=0.02) for row in fitted.verified)
    return dataclasses.replace(fitted, stages=tuple(stages), verified=verified)


def last_lines(
    fitted: Fit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **options: Any
) -> list[str]:
    """What the command prints for a fit, whatever this machine would have measured."""
    monkeypatch.setattr("trainer.profile_command.profile", lambda *_: fitted)
    assert run_profile(ProfileConfig(**{"model": "check", **options})) == 0
    return capsys.readouterr().out.rstrip().splitlines()


def test_the_recommended_command_works_when_pasted(
    cost_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, fitted = read_cost_model(cost_file)
    assert fitted is not None
    output = tmp_path / "with space" / "cost.json"
    options = {"output": output, "pp_size": 2, "threads": 2, "capacity_tokens": 256, "dtype": "bf16"}
    last = last_lines(with_error(fitted, 0.1), monkeypatch, capsys, **options)[-1]
    command = shlex.split(last.partition("plan with it: ")[2])
    assert command[:2] == ["balancer-train", "fit"]
    given = dict(zip(command[2::2], command[3::2], strict=True))
    assert given == {
        "--model": "check",
        "--pp-size": "2",
        "--capacity-tokens": "256",
        "--threads": "2",
        "--dtype": "bf16",
        "--cost-model": str(output),
    }
    parsed = parse_or_raise(command[1:]).config
    assert isinstance(parsed, FitConfig)
    assert (parsed.model, parsed.pp_size, parsed.threads, parsed.cost_model) == ("check", 2, 2, output)
    # fit has another number of threads by default.
    last = last_lines(with_error(fitted, 0.1), monkeypatch, capsys, output=tmp_path / "cost.json")[-1]
    assert last.endswith(f"balancer-train fit --model check --threads 1 --cost-model {tmp_path / 'cost.json'}")


def test_a_fit_that_predicts_badly_is_written_but_not_recommended(
    cost_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, fitted = read_cost_model(cost_file)
    assert fitted is not None
    output = tmp_path / "cost.json"
    *_, warning, last = last_lines(with_error(fitted, 3.05), monkeypatch, capsys, output=output)
    assert warning.startswith("WARNING: stage 1 B (llm) is predicted with a median error of 305%; ")
    assert "not to be trusted" in last
    assert "plan with it" not in last
    assert "--cost-model cost" not in last
    assert output.is_file()


def test_whoever_plans_with_a_bad_fit_reads_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fit, "doubts", lambda _: ("stage 1 F is predicted badly",))
    config = ProfileConfig(model="check", **{**SMALL, "verify_microbatches": 0})
    fitted = profile(load_model_source("check"), config, single_process(torch.device("cpu")))
    assert fitted.model.note.startswith("NOT TO BE TRUSTED: stage 1 F is predicted badly; valid inside the ranges")
    assert Fit.from_json(fitted.to_json()) == fitted


def test_a_microbatch_runs_every_stage_forward_and_backward_and_text_runs_no_encoder() -> None:
    model = load_model_source("check")
    config = ProfileConfig(model="check", pp_size=3)
    subject = Subject(model, config, single_process(torch.device("cpu")))
    shapes = designed_set(count=12, seed=0, capacity_tokens=128, capacity_patches=512, merge=2)
    pixels = pixel_pool(shapes, model.config)

    def ran(row: int) -> list[str]:
        acts: tuple[ActionRecord, ...] = subject.run(build(shapes[row], model.config, seed=0, pixels=pixels))
        assert all(act.end_ms > act.start_ms for act in acts)
        return [f"{act.stage}{act.op}" for act in acts]

    assert ran(0) == ["1F", "2F", "2B", "1B"]
    assert ran(2) == ["0F", "1F", "2F", "2B", "1B", "0B"]


def test_a_plan_made_with_the_file_carries_its_times_and_another_digest(
    cost_file: Path, fit_config: Callable[..., FitConfig]
) -> None:
    plans = {}
    for name, path in (("closed", None), ("measured", cost_file)):
        run_fit(fit_config(name, cost_model=path, max_steps=1))
        text = (fit_config(name).output / "plans" / "step_000001.json").read_text(encoding="utf-8")  # type: ignore[operator]
        plans[name] = StepPlan.from_json(text)
    assert plans["closed"].inputs_digest != plans["measured"].inputs_digest
    # Real milliseconds of a CPU, not a nominal 1e12 FLOP/s.
    assert plans["measured"].makespan_ns > 10 * plans["closed"].makespan_ns


def test_what_is_planned_beyond_the_calibration_is_said_once(
    cost_file: Path, corpus: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, fitted = read_cost_model(cost_file)
    assert fitted is not None
    narrow = [dataclasses.replace(stage, ranges={**stage.ranges, "tokens": (1, 2)}) for stage in fitted.stages[2:]]
    narrow = [*fitted.stages[:2], *narrow]
    path = tmp_path / "narrow.json"
    path.write_text(dataclasses.replace(fitted, stages=tuple(narrow)).to_json(), encoding="utf-8")
    fixed = {"model": "check", "data": str(corpus), "cache_dir": cache, "global_batch_size": 4, "capacity_tokens": 230}
    run_plan(PlanConfig(**fixed, cost_model=path))
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("is planned beyond the calibration: tokens of stage 1") == 1
    assert "calibrated on 1 to 2" in out
    assert "only their ratios mean something" not in out


def test_a_file_of_another_split_model_or_kind_is_refused_with_the_command_that_helps(
    cost_file: Path, tmp_path: Path
) -> None:
    check = load_model_source("check")
    with pytest.raises(ConfigError, match=r"3 stages: .*\(pp_size=3\).*profile --model check --pp-size 3"):
        chosen_cost_model(cost_file, check, Layout(pp_size=3))
    with pytest.raises(ConfigError, match="measured on 'check', a model of other sizes than 'demo'"):
        chosen_cost_model(cost_file, load_model_source("demo"), Layout())
    # One rank and two have the same stages: the tower, the whole LLM.
    assert chosen_cost_model(cost_file, check, Layout(pp_size=2))[0] == read_cost_model(cost_file)[0]
    model, fitted = read_cost_model(cost_file)
    assert fitted is not None
    assert (model.domains, model.layers) == (("encoder", "llm"), cost_model_for(check.config, Layout()).layers)
    for other in (
        dataclasses.replace(model, domains=("llm", "llm")),
        dataclasses.replace(model, layers=(model.layers[0], model.layers[1] + 1)),
        dataclasses.replace(model, domains=(), layers=(), stages=model.stages * 2, memory=None),
    ):
        (tmp_path / "split.json").write_text(other.to_json(), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"is of \d stages.*layout is 2 stages: encoder \(.*profile --model"):
            chosen_cost_model(tmp_path / "split.json", check, Layout())
    with pytest.raises(ConfigError, match=r"--cost-model ~no_such_user_at_all.*Write one with"):
        chosen_cost_model(Path("~no_such_user_at_all/x"), check, Layout())
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    for name, message in (("other.json", "cannot be read"), ("gone.json", "No such file")):
        with pytest.raises(ConfigError, match=f"(?s){message}.*Write one with balancer-train profile"):
            chosen_cost_model(tmp_path / name, check, Layout())
    assert chosen_cost_model(None, check, Layout())[1] is None


@pytest.mark.multirank
def test_under_torchrun_each_rank_measures_its_own_stage_and_rank_0_writes_the_file(tmp_path: Path) -> None:
    home, output = str(Path(trainer.__file__).parents[1]), tmp_path / "cost.json"
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    worker = ["--no-python", sys.executable, "-P", "-c", "from balancer._entry import train; train()"]
    done = subprocess.run(
        [*launcher, *worker, "profile", "--model", "check", "--pp-size", "2", "--output", str(output), *flags(SMALL)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    fitted = Fit.from_json(output.read_text(encoding="utf-8"))
    assert [(stage.stage, stage.op) for stage in fitted.stages] == [(0, "F"), (0, "B"), (1, "F"), (1, "B")]
    assert done.stdout.count("wrote ") == 1


def test_torchrun_with_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="torchrun started 4 processes for pp_size=2"):
        run_profile(ProfileConfig(model="check", pp_size=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clock": "cpu", "threads": 2}, "clock='cpu' with threads=2"),
        ({"clock": "cpu", "threads": None}, "clock='cpu' with threads=None"),
        ({"profile_microbatches": 11}, "profile_microbatches=11: a whole number of at least 12"),
        ({"clock": "sun"}, "clock='sun' is not one of: wall, cpu"),
        ({"repeats": 0}, "repeats=0"),
        ({"repeats": 10**9}, "repeats=1000000000: a whole number of at most"),
        ({"capacity_tokens": 2**53}, "capacity_tokens=9007199254740992: a whole number of at most 1048576"),
        ({"capacity_patches": 2**53}, "capacity_patches=9007199254740992: a whole number of at most 4194304"),
        ({"profile_microbatches": 10**9}, "profile_microbatches=1000000000: a whole number of at most"),
        ({"verify_microbatches": 10**9}, "verify_microbatches=1000000000: a whole number of at most"),
        ({"pp_size": 10**9}, "pp_size=1000000000: a whole number of at most"),
    ],
)
def test_options_that_would_measure_nonsense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProfileConfig(**options)
