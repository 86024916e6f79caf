"""`balancer-analyze plan --cost-model`, and models by name: other splits, damaged files and odd names."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from balancer.cost_model import CostModel
from balancer.layout import ParallelSpec
from tools.cli import main

Capture = pytest.CaptureFixture[str]
TEXT_ONLY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 512,
}
QUICK = ("--steps", "1", "--what-if-steps", "0", "--policies", "sequential", "lpt")


@pytest.fixture
def cost_file(model: str, tmp_path: Path) -> Path:
    """Costs of an encoder and a whole LLM."""
    path = tmp_path / "cost.json"
    path.write_text(CostModel.from_config(model, ParallelSpec.pipeline()).to_json(), encoding="utf-8")
    return path


def test_an_encoders_times_are_not_taken_for_those_of_an_llm_stage(
    mixed: str, cost_file: Path, capsys: Capture
) -> None:
    argv = ["plan", mixed, "--cost-model", str(cost_file), *QUICK]
    assert main([*argv, "--encoder", "none", "--pp", "2"]) == 2
    said = capsys.readouterr().err
    assert f"--cost-model {cost_file} is of 2 stages: encoder (" in said
    assert "the layout is 2 stages: llm, llm. Measure this layout, or give --pp, --encoder and --chunks" in said


@pytest.mark.parametrize("options", [(), ("--pp", "2"), ("--encoder", "shared"), ("--dp", "2")])
def test_layouts_with_the_same_stages_take_each_others_files(
    mixed: str, cost_file: Path, options: tuple[str, ...]
) -> None:
    assert main(["plan", mixed, "--cost-model", str(cost_file), *QUICK, *options]) == 0


@pytest.mark.parametrize("name", ["~no_such_user_at_all/x", "a" * 5000])
@pytest.mark.parametrize("option", ["--model", "--cost-model"])
def test_a_name_that_can_be_no_path_is_a_usage_error(mixed: str, capsys: Capture, option: str, name: str) -> None:
    assert main(["plan", mixed, option, name, *QUICK]) == 2
    assert option in capsys.readouterr().err


def test_a_damaged_cost_model_is_one_kind_of_error(mixed: str, cost_file: Path, capsys: Capture) -> None:
    content = json.loads(cost_file.read_text(encoding="utf-8"))
    content["stages"][0]["forward"]["per_patch_ns"] = 10**400
    cost_file.write_text(json.dumps(content), encoding="utf-8")
    assert main(["plan", mixed, "--cost-model", str(cost_file), *QUICK]) == 1
    assert f"{cost_file}: per_patch_ns=1000" in capsys.readouterr().err


@pytest.mark.parametrize("reported", ["NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"])
def test_a_device_is_known_by_the_name_that_its_driver_reports(
    mixed: str, model: str, planned: Callable[..., dict[str, Any]], reported: str
) -> None:
    report = planned(mixed, "--model", model, "--hardware", reported, *QUICK)
    assert report["layout"]["absolute_times"]


def test_a_language_model_alone_plans_the_data_that_its_preset_plans(
    tmp_path: Path, planned: Callable[..., dict[str, Any]]
) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(TEXT_ONLY), encoding="utf-8")
    data = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "why " * 9}, {"role": "assistant", "content": "because " * 7}]
    data.write_text("".join(json.dumps({"messages": chat}) + os.linesep for _ in range(16)), encoding="utf-8")
    for model in (str(tmp_path / "llama"), str(tmp_path / "llama" / "config.json"), "qwen2.5-7b"):
        report = planned(str(data), "--model", model, *QUICK)
        assert report["step_samples"]["max"] == 16
