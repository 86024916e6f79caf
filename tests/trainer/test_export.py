"""`balancer-train export`: what a run learned, in a folder that another run starts from."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from balancer.layout import Layout  # noqa: E402
from trainer.checkpoint import latest_complete  # noqa: E402
from trainer.config import ExportConfig, FitConfig  # noqa: E402
from trainer.errors import CheckpointError, ConfigError  # noqa: E402
from trainer.export import load_trained, run_export  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.model_source import load_model_source  # noqa: E402
from trainer.pieces import ModelPieces  # noqa: E402

MakeConfig = Callable[..., FitConfig]


@pytest.fixture
def run(fit_config: MakeConfig) -> FitConfig:
    config = fit_config("trained", max_steps=2, eval_share=0.25)
    assert run_fit(config) == 0
    return config


def exported(config: FitConfig, name: str = "model") -> Path:
    assert config.output is not None
    destination = config.output.parent / name
    assert run_export(ExportConfig(run=config.output, destination=destination)) == 0
    return destination


def built(source: str, pp_rank: int = 0, pp_size: int = 1) -> ModelPieces:
    return ModelPieces.build(
        load_model_source(source),
        layout=Layout(pp_size=pp_size),
        pp_rank=pp_rank,
        seed=99,
        device=torch.device("cpu"),
    )


def test_an_exported_folder_holds_config_processor_and_all_weights_and_nothing_else(run: FitConfig) -> None:
    folder = exported(run)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "processor.json"]
    trained, step = load_trained(run.output, run)  # type: ignore[arg-type]
    assert step == 2
    weights = load_file(folder / "model.safetensors")
    expected = dict(trained.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    source, preset = load_model_source(str(folder)), load_model_source("check")
    assert source.config == preset.config
    assert json.loads(json.dumps(source.processor)) == json.loads(json.dumps(dict(preset.processor)))


def test_training_from_an_exported_folder_starts_at_its_weights(run: FitConfig, fit_config: MakeConfig) -> None:
    folder = exported(run)
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(parameter, weights[name]) for name, parameter in built(str(folder)).named_parameters())
    # A rate of (almost) zero: the validation loss after the run is that of the weights it started from.
    again = fit_config(
        "again", model=str(folder), max_steps=1, eval_share=0.25, lr=1e-30, weight_decay=0.0, seed=run.seed
    )
    assert run_fit(again) == 0
    losses = [json.loads((c.output / "summary.json").read_text())["validation"]["loss"] for c in (run, again)]  # type: ignore[operator]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_pipeline_ranks_load_their_own_parts_of_an_exported_folder(run: FitConfig) -> None:
    folder = exported(run)
    weights = load_file(folder / "model.safetensors")
    parts = [dict(built(str(folder), pp_rank=rank, pp_size=3).named_parameters()) for rank in range(3)]
    assert sorted(name for part in parts for name in part) == sorted(weights)
    assert all(torch.equal(parameter, weights[name]) for part in parts for name, parameter in part.items())


def test_the_newest_complete_checkpoint_is_exported(fit_config: MakeConfig) -> None:
    config = fit_config(max_steps=3, checkpoint_interval_steps=1, keep_last=5)
    run_fit(config)
    assert config.output is not None
    newest = latest_complete(config.output / "checkpoints")
    assert newest is not None
    (newest / "meta.json").unlink()
    assert load_trained(config.output, config)[1] == 2


def test_nothing_is_overwritten_and_an_empty_folder_may_be_used(run: FitConfig, tmp_path: Path) -> None:
    folder = exported(run)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="exists and is not an empty folder; nothing is overwritten"):
        exported(run)
    assert (folder / "model.safetensors").read_bytes() == before
    (tmp_path / "empty").mkdir()
    assert exported(run, "empty") == tmp_path / "empty"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "drafts are cleared away"


def test_a_run_without_a_checkpoint_and_a_folder_without_a_run_are_named(
    fit_config: MakeConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        run_export(ExportConfig(run=tmp_path, destination=tmp_path / "model"))
    config = fit_config(max_steps=1)
    run_fit(config)
    assert config.output is not None
    (config.output / "checkpoints" / "step_000001" / "meta.json").unlink()
    with pytest.raises(CheckpointError, match="has no complete checkpoint yet"):
        exported(config)
    assert not (tmp_path / "model").exists()


def test_a_model_that_does_not_exist_or_does_not_fit_together_says_so(run: FitConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a preset \(check, demo\) nor a folder with a config.json"):
        load_model_source(str(tmp_path / "nowhere"))
    folder = exported(run)
    weights = load_file(folder / "model.safetensors")
    weights.pop("llm.norm.weight")
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"llm\.norm\.weight is missing, the model needs \(24,\)"):
        built(str(folder))
    (folder / "processor.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"processor\.json holds a list"):
        load_model_source(str(folder))
    (folder / "processor.json").unlink()
    with pytest.raises(ConfigError, match=r"processor\.json is missing"):
        load_model_source(str(folder))


def test_a_resumed_run_may_not_change_its_model(run: FitConfig) -> None:
    from trainer.resume_options import refuse_changed_trajectory

    with pytest.raises(ConfigError, match="model was 'check' and is now 'demo'"):
        refuse_changed_trajectory(run, replace(run, model="demo"))


def test_a_run_of_format_version_1_is_exported_though_not_resumed(run: FitConfig) -> None:
    """Its samples came in another order; its weights are as good as any."""
    assert run.output is not None
    mark = run.output / "run.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "format_version": 1}))
    assert (exported(run) / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match=r"format version 1; this version reads 2\. A step would hold other samples"):
        run_fit(replace(run, resume=True, max_steps=3))
