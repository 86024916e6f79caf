"""`balancer-train fit`: set up a run, train, and say in one table what came of it."""

import os
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from packing import warm_up
from trainer.checkpoint import latest_complete
from trainer.comm import Comm, communicator
from trainer.config import FitConfig
from trainer.data import prepare, split
from trainer.errors import ConfigError
from trainer.export import load_trained
from trainer.loop import Trainer
from trainer.model_source import load_model_source
from trainer.progress import progress_bars
from trainer.run_folder import RUNS, RunFolder, next_free
from trainer.samples import Shown, choose, show
from trainer.seen import measure_seen
from trainer.summary import RunSummary, banner

NUM_SHOWN = 3
_LONG_WARM_UP_S = 1.0  # loading takes less
COMPLETE_NOTICE = "{run} is complete: {steps} steps. Raise --max-steps or --epochs to train on."
DEMO_NOTICE = (
    "No --data given: training a small vision-language model on the demo corpus (built once, then cached).\n"
    "Your own data: balancer-train fit --data 'shards-{000..015}.tar'   (WebDataset tars: media beside .json or .txt)\n"
    "All options: balancer-train fit --help"
)


def run_fit(config: FitConfig) -> int:
    """Train; returns the exit code."""
    model = load_model_source(config.model)
    console = Console(quiet=not _is_main(), soft_wrap=True)
    if config.data is None:
        console.print(DEMO_NOTICE, markup=False)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with progress_bars() as progress:
        side = prepare(config, config.data, model.processor, progress=progress)
        eval_side = side
        if config.eval_data is not None:
            eval_side = prepare(config, config.eval_data, model.processor, progress=progress)
    train_ids, held_out = split(side, share=0.0 if config.eval_data else config.eval_share, seed=config.seed)
    if config.eval_data is not None:
        held_out = eval_side.ids
    with communicator(pp_size=config.pp_size) as comm:
        _warm_up(comm, console)
        run = _choose_run(config, comm)
        trainer = Trainer(
            config,
            model=model,
            side=side,
            train_ids=train_ids,
            eval_side=eval_side,
            held_out_ids=held_out,
            comm=comm,
            checkpoints=RunFolder(run).checkpoints,
            report=lambda line: console.print(line, markup=False, highlight=False),
        )
        console.print(banner(trainer, side), markup=False, highlight=False)
        if not _open_folder(trainer, run):
            console.print(COMPLETE_NOTICE.format(run=run, steps=trainer.num_steps), markup=False)
            return 0
        result = trainer.fit()
        seen = measure_seen(trainer, eval_side, held_out) if config.data is None else None
    folder = trainer.folder
    if folder is None:
        return 0
    if result.comparison is not None:
        lines = [record.to_json() for record in result.comparison.records]
        (folder.path / "compare.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    shown = _show_samples(config, folder, trainer, held_out.tolist())
    summary = RunSummary(
        run=folder.path,
        num_ranks=comm.world_size,
        result=result,
        seen=seen,
        shown=shown,
        left_out=side.dropped,
        eval_left_out=() if eval_side is side else eval_side.dropped,
    )
    folder.write_summary(summary.to_dict())
    summary.print(console)
    return 0


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _warm_up(comm: Comm, console: Console) -> None:
    """Have the planner's kernels ready before a step needs them: compiled once a node, loaded by its other ranks."""
    first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    if first_of_node:
        seconds = warm_up()
        if seconds > _LONG_WARM_UP_S:
            console.print(f"Compiled the planner's kernels in {seconds:.0f} s; later starts load them.", markup=False)
    comm.barrier()
    if not first_of_node:
        warm_up()


def _choose_run(config: FitConfig, comm: Comm) -> Path:
    """Path of the run folder: as given, or the next free one, which rank 0 names for all."""
    return comm.gather(config.output or next_free(RUNS, Path(config.model).name))[0]


def _open_folder(trainer: Trainer, run: Path) -> bool:
    """Make the run folder, or continue its newest complete checkpoint; an error on rank 0 is raised on all.

    Comes after the trainer is built, so that options which cannot work leave no folder behind. False for a run that
    is complete already, which is left as it is.
    """
    config, comm = trainer.config, trainer.comm
    if config.resume:
        (path,) = comm.gather((latest_complete(trainer.checkpoints),))[0]
        if path is not None:
            trainer.resume(path)
        if trainer.finished_steps == trainer.num_steps:
            return False
    failure = ""
    if comm.is_main:
        try:
            if config.resume:
                trainer.folder = RunFolder.resume(run, config, step=trainer.finished_steps)
            else:
                trainer.folder = RunFolder.create(run, config)
        except ConfigError as error:
            failure = str(error)
    failure = comm.gather(failure)[0]
    if failure:
        raise ConfigError(failure)
    return True


def _show_samples(config: FitConfig, folder: RunFolder, trainer: Trainer, held_out: list[int]) -> list[Shown]:
    """Generate answers for held-out items with the whole model of the last checkpoint, in this process alone."""
    if trainer.eval_reader is None:
        return []
    pieces, _ = load_trained(folder.path, config)
    reader = replace(trainer.eval_reader, with_pixels=True)
    return show(pieces, reader, choose(reader, held_out, NUM_SHOWN), folder.write_sample)
