"""`balancer-train export`: the newest complete checkpoint of a run as one model folder.

    config.json          sizes of the model
    processor.json       the rule that turns pixels into tokens
    model.safetensors    all weights by canonical name

`--model FOLDER` starts from it.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from balancer.layout import Layout
from trainer.checkpoint import latest_complete, load_checkpoint
from trainer.comm import single_process
from trainer.config import ExportConfig, FitConfig
from trainer.errors import CheckpointError, ConfigError
from trainer.model_source import CONFIG_FILE, PROCESSOR_FILE, WEIGHTS_FILE, load_model_source
from trainer.pieces import ModelPieces
from trainer.run_folder import READABLE_FORMATS, RunFolder, read_config


def run_export(config: ExportConfig) -> int:
    """Write `config.destination`; it appears complete or not at all."""
    destination = config.destination
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"destination {destination} exists and is not an empty folder; nothing is overwritten")
    pieces, step = load_trained(config.run, read_config(config.run, formats=READABLE_FORMATS))
    destination.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        write_model_folder(draft, pieces)
        draft.chmod(0o755)
        draft.rename(destination)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    Console().print(f"model after step {step} written to {destination}; start from it with --model {destination}")
    return 0


def load_trained(run: Path, config: FitConfig) -> tuple[ModelPieces, int]:
    """The whole model of a run's newest complete checkpoint, on the CPU of this process, and its step.

    Raises:
        CheckpointError: the run has no complete checkpoint.
    """
    path = latest_complete(RunFolder(run).checkpoints)
    if path is None:
        raise CheckpointError(f"{run} has no complete checkpoint yet. Let it run to the end or to a checkpoint.")
    comm = single_process(torch.device("cpu"))
    pieces = ModelPieces.build(
        load_model_source(config.model), layout=Layout(), pp_rank=0, seed=config.seed, device=comm.device
    )
    loaded = load_checkpoint(path, model=dict(pieces.named_parameters()), comm=comm, restore_rng=False)
    return pieces, loaded.step


def write_model_folder(folder: Path, pieces: ModelPieces) -> None:
    """Config, processor and weights of a whole model."""
    (folder / CONFIG_FILE).write_text(pieces.source.config.to_json() + "\n", encoding="utf-8")
    processor = {name: dict(value) for name, value in pieces.source.processor.items()}
    (folder / PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
    weights = {name: parameter.detach().contiguous() for name, parameter in pieces.named_parameters()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
