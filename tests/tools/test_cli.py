"""`balancer-analyze` does what it prints, and its exit codes tell usage from failure."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.cli import main


def test_run_prints_the_summary(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(run_folder)]) == 0
    printed = capsys.readouterr()
    assert "4.0000 -> 1.0000" in printed.out
    assert "0.500 (idle share of all ranks, measured)" in printed.out
    assert printed.err == ""


def test_run_prints_json_and_nothing_else(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(run_folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num_steps"] == 4
    assert content["num_ranks"] == 2
    assert content["bubble_ratio_p50"] == pytest.approx(0.5)


def test_timeline_writes_the_picture_and_says_where(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "timeline.svg"
    assert main(["timeline", str(run_folder), "--output", str(output)]) == 0
    assert "80.0 ms before, 50.0 ms after" in capsys.readouterr().out
    root = ElementTree.fromstring(output.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")


def test_timeline_of_a_step_that_was_not_compared_is_a_usage_error(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "timeline.svg"
    assert main(["timeline", str(run_folder), "--step", "1", "--output", str(output)]) == 2
    assert "error: step 1 was not compared. Compared steps: 3." in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("command", ["run", "timeline"])
def test_a_folder_that_does_not_exist_is_a_usage_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path / "gone")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: run folder")


def test_damaged_content_is_a_failure(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "steps.jsonl").write_text("{}\n{}\n", encoding="utf-8")
    assert main(["run", str(run_folder)]) == 1
    assert "steps.jsonl, line 1" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_a_failure_without_a_stack_trace(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(run_folder), "--output", str(run_folder)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "argv", [["bogus"], ["run"], ["run", "x", "--no-such-option"], ["timeline", "x", "--step", "one"]]
)
def test_a_line_that_cannot_be_read_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out + printed.err != ""


def test_without_a_subcommand_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("run", "timeline", "data"))


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["timeline", "--help"], ["data", "--help"]])
def test_help_ends_with_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert "balancer-analyze" in capsys.readouterr().out


def test_a_missing_shard_is_a_failure_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--data", str(tmp_path / "shard-{000..001}.tar")]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "shard-000.tar" in printed


def test_a_model_folder_without_config_is_a_failure_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "--data", "x.tar", "--processor", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def test_the_module_brings_no_torch(run_folder: Path) -> None:
    had_torch = "torch" in sys.modules
    assert main(["run", str(run_folder), "--json"]) == 0
    assert ("torch" in sys.modules) == had_torch
