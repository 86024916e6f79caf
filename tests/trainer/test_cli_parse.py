"""CL-01: the command line and YAML; every mistake ends with exit code 2 and names what was meant."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.cli_parse import CONFIGS, Command, parse, parse_or_raise
from trainer.config import CheckConfig, Config, ExportConfig, FitConfig, PlanConfig
from trainer.config_yaml import from_yaml, to_yaml
from trainer.errors import ConfigError
from trainer.run_folder import RunFolder


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What stands on stderr after a command line that must end with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def fit(*argv: str) -> FitConfig:
    config = parse(argv).config
    assert isinstance(config, FitConfig)
    return config


# --- subcommands


def test_no_argument_means_fit_with_defaults() -> None:
    assert parse([]) == Command(kind="fit", config=FitConfig())


def test_options_alone_mean_fit() -> None:
    assert parse(["--max-steps", "3"]) == Command(kind="fit", config=FitConfig(max_steps=3))


def test_each_subcommand_gives_its_config() -> None:
    assert parse(["fit", "--lr", "0.5"]).config == FitConfig(lr=0.5)
    assert parse(["check", "--self-test"]).config == CheckConfig(self_test=True)
    assert parse(["plan", "--show-sample", "4"]).config == PlanConfig(show_sample=4)
    expected = ExportConfig(run=Path("runs/demo-001"), destination=Path("out"))
    assert parse(["export", "--run", "runs/demo-001", "--destination", "out"]).config == expected


def test_an_unknown_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'chek' is no subcommand" in (text := refused(["chek"], capsys))
    assert "Did you mean check?" in text


def test_an_option_without_dashes_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-steps 3" in refused(["max_steps=3"], capsys)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], *[[kind, "--help"] for kind in CONFIGS]])
def test_help_ends_with_zero(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code in (0, None)
    text = capsys.readouterr().out
    assert f"usage: balancer-train {argv[0] if argv[0] in CONFIGS else ''}" in text
    if argv[0].startswith("-"):
        assert all(kind in text for kind in CONFIGS)


def test_help_is_given_even_with_a_run_that_does_not_exist() -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["fit", "--resume", "nowhere", "--help"])
    assert caught.value.code in (0, None)


# --- unknown options


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num-epochs", "3"], "did you mean --epochs?"),
        (["--epoch", "3"], "did you mean --epochs?"),
        (["--max-step=3"], "did you mean --max-steps?"),
        (["--capacity", "3"], "did you mean --capacity-"),
        (["--globl_batch_size", "3"], "did you mean --global-batch-size?"),
        (["-lr", "3"], "did you mean --lr?"),
        (["--per_device_train_batch_size", "1"], "per-device size x accumulation x replicas"),
        (["--seq-length", "4096"], "did you mean --capacity-tokens?"),
        (["--packing"], "packed without padding"),
        (["--no-lr"], "unknown option --no-lr"),
        (["--qqqq"], "no option has a similar name; --help lists them all"),
        (["plan", "--lr", "1"], "--lr is an option of fit, not of plan"),
        (["fit", "--self-test"], "--self-test is an option of check, not of fit"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refused(argv, capsys)
    assert text.startswith("error: ")
    assert expected in text


def test_abbreviations_are_not_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean --global-batch-size?" in refused(["--global-batch", "4"], capsys)


def test_underscores_and_equals_signs_are_accepted() -> None:
    assert fit("--global_batch_size=4", "--no-apply-orientation") == FitConfig(
        global_batch_size=4, apply_orientation=False
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lr", "fast"], "--lr"),
        (["--lr"], "--lr"),
        (["--lr", "-1"], "lr=-1"),
        (["--policy", "best"], "best"),
        (["--epochs", "1", "--max-steps", "2"], "max_steps=2"),
        (["stray"], "stray"),
        (["fit", "stray"], "stray"),
        (["export", "--run", "x"], "--destination"),
    ],
)
def test_bad_values_end_with_two(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused(argv, capsys)


# --- YAML


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 1e-3\nseed: 7\nbetas: [0.8, 0.9]\ndata: s-{0..3}.tar\napply-orientation: false\n")
    config = fit("--config", str(file), "--seed", "9")
    assert config == FitConfig(lr=1e-3, seed=9, betas=(0.8, 0.9), data="s-{0..3}.tar", apply_orientation=False)
    assert fit(f"--config={file}").seed == 7


def test_an_alternative_on_the_command_line_replaces_the_one_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 3\n")
    assert fit("--config", str(file), "--max-steps", "5") == FitConfig(max_steps=5)
    assert fit("--config", str(file), "--epochs", "2") == FitConfig(epochs=2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("num-epochs: 3\n", "did you mean epochs?"),
        ("lrr: 3\n", "key 'lrr': did you mean lr?"),
        ("cutoff_len: 3\n", "did you mean capacity_tokens?"),
        ("training:\n  lr: 3\n", "section training.lr: options are not nested"),
        ("lr: fast\n", "lr='fast'"),
        ("lr: -1\n", "lr=-1: a finite number above 0"),
        ("seed: 1.5\n", "seed=1.5"),
        ("policy: best\n", "policy='best'"),
        ("betas: [0.9]\n", "betas"),
        ("lr: 1\nlr: 2\n", "'lr' is given twice (line 2)"),
        ("- lr\n", "holds a list"),
        ("lr: [1\n", "is not YAML"),
        ("? [a]\n: 1\n", "unhashable"),
        ("self_test: true\n", "key 'self_test'"),
        ("epochs: 1\nmax_steps: 1\n", "epochs=1 and max_steps=1"),
    ],
)
def test_a_mistake_in_the_file_names_the_file_and_the_key(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    message = refused(["--config", str(file)], capsys)
    assert str(file) in message
    assert expected in message


def test_a_file_executes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"model: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    assert "is not YAML" in refused(["--config", str(file)], capsys)
    assert not (tmp_path / "made").exists()


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml cannot be read" in refused(["--config", "nowhere.yaml"], capsys)
    assert "--config takes one YAML file" in refused(["--config"], capsys)


def test_an_empty_file_gives_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert fit("--config", str(tmp_path / "c.yaml")) == FitConfig()


def test_a_training_file_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(FitConfig(lr=0.5, seed=3, global_batch_size=4)))
    assert parse(["plan", "--config", str(file)]).config == PlanConfig(seed=3, global_batch_size=4)
    assert "key 'eval_data'" in refused(["check", "--config", str(file)], capsys)


@pytest.mark.parametrize(
    "config",
    [
        FitConfig(),
        FitConfig(data="a b-{0..1}.tar", output=Path("001"), epochs=0.5, lr=1e-8, clip_norm=None, betas=(0.0, 0.5)),
        FitConfig(data="yes", model="1e3", eval_data="größe.tar"),
        CheckConfig(self_test=True),
        PlanConfig(show_sample=0),
        ExportConfig(run=Path("runs/x"), destination=Path("y")),
    ],
)
def test_a_dumped_config_comes_back_equal(config: Config) -> None:
    again = from_yaml(to_yaml(config), type(config))
    assert again == config
    assert type(again) is type(config)
    assert [line.partition(":")[0] for line in to_yaml(config).splitlines() if not line.startswith("-")] == [
        field.name for field in dataclasses.fields(config)
    ]


@given(lr=st.floats(1e-300, 1e300), seed=st.integers(0, 2**63), data=st.text(min_size=1).filter(str.strip))
def test_any_value_survives_the_file(lr: float, seed: int, data: str) -> None:
    config = FitConfig(lr=lr, seed=seed, data=data)
    assert from_yaml(to_yaml(config), FitConfig) == config


# --- resume


def a_run(path: Path, config: FitConfig) -> None:
    RunFolder.create(path, config)


def test_a_resume_takes_the_options_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    a_run(run, FitConfig(seed=5, lr=0.5, max_steps=8))
    expected = FitConfig(seed=5, lr=0.5, max_steps=8, output=run, resume=True)
    assert fit("--resume", str(run)) == expected
    assert fit(f"--resume={run}") == expected
    assert fit("--resume", "--output", str(run)) == expected
    assert fit("--output", str(run), "--resume") == expected
    assert fit("--resume", str(run), "--num-workers", "0") == dataclasses.replace(expected, num_workers=0)


def test_a_bare_resume_takes_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run under runs/"):
        parse_or_raise(["--resume"])
    a_run(Path("runs/demo-001"), FitConfig(seed=1))
    assert fit("--resume").seed == 1


def test_a_resume_refuses_other_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    a_run(run, FitConfig(seed=5))
    assert "seed was 5 and is now 6" in refused(["--resume", str(run), "--seed", "6"], capsys)
    file = tmp_path / "c.yaml"
    file.write_text("seed: 7\n")
    assert "seed was 5 and is now 7" in refused(["--resume", str(run), "--config", str(file)], capsys)


def test_a_resume_can_be_asked_for_in_the_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    a_run(run, FitConfig(seed=5))
    file = tmp_path / "c.yaml"
    file.write_text(f"resume: true\noutput: {run}\nseed: 5\n")
    assert fit("--config", str(file)) == FitConfig(seed=5, output=run, resume=True)


def test_a_resume_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no run folder" in refused(["--resume", str(tmp_path)], capsys)
    assert "name two run folders" in refused(["--resume", "a", "--output", "b"], capsys)
