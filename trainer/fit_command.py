"""`balancer-train fit`: set up a run, train, and say in one table what came of it."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from balancer.errors import BalancerError, LedgerError
from balancer.layout import Layout
from balancer.ledger import refuse_other_run
from balancer.ledger_lines import RunLine
from balancer.run_evidence import RunEvidence
from balancer.select import Selector
from trainer.calibrated import memory_model
from trainer.checkpoint import latest_complete, read_meta
from trainer.comm import Comm, communicator
from trainer.config import FitConfig
from trainer.data import DataSide, prepare, split, training_side
from trainer.errors import ConfigError, TrainerError
from trainer.export import load_trained
from trainer.kernels import ready_planner
from trainer.loop import Trainer
from trainer.mixture import mixture_selector
from trainer.model_source import load_model_source, lookahead_cost_for
from trainer.progress import progress_bars
from trainer.run_folder import RUNS, RunFolder, RunLock, next_free
from trainer.run_log import RunLog, run_line
from trainer.samples import Shown, choose, show
from trainer.seen import measure_seen
from trainer.summary import RunSummary, banner

NUM_SHOWN = 3
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
    if not config.has_data:
        console.print(DEMO_NOTICE, markup=False)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    memory = memory_model(config, model, Layout(pp_size=config.pp_size))
    with progress_bars() as progress:
        side = training_side(config, model.processor, memory=memory, progress=progress)
        eval_side = side
        if config.eval_data is not None:
            eval_side = prepare(config, config.eval_data, model.processor, memory=memory, progress=progress)
    train_ids, held_out = split(side, share=0.0 if config.eval_data else config.eval_share, seed=config.seed)
    if config.eval_data is not None:
        held_out = eval_side.ids
    evidence = RunEvidence(
        index=side.index,
        lookahead_cost=lookahead_cost_for(model.config) if config.lookahead_steps > 1 else None,
        memory_cost=memory,
    )
    with communicator(pp_size=config.pp_size) as comm, RunLock() as lock:
        ready_planner(
            comm,
            lambda text: console.print(text, markup=False, highlight=False),
            pipeline=config.pp_size > 1,
        )
        run = RunFolder(_choose_run(config, comm))
        # Rank 0 alone needs it, and it passes over all ids.
        line = cache(lambda: run_line(config, side, train_ids, evidence))
        newest = _newest_checkpoint(run, line, comm, lock) if config.resume else None
        trainer = Trainer(
            config,
            model=model,
            side=side,
            train_ids=train_ids,
            eval_side=eval_side,
            held_out_ids=held_out,
            comm=comm,
            checkpoints=run.checkpoints,
            report=lambda text: console.print(text, markup=False, highlight=False),
            selector=_selector(config, side, train_ids, newest),
        )
        console.print(banner(trainer, side), markup=False, highlight=False)
        if newest is not None:
            trainer.resume(newest)
            if trainer.finished_steps == trainer.num_steps:
                console.print(COMPLETE_NOTICE.format(run=run.path, steps=trainer.num_steps), markup=False)
                return 0
        _on_main(comm, lambda: _open_log(trainer, run, line(), side, lock, evidence=evidence))
        result = trainer.fit()
        seen = None if config.has_data else measure_seen(trainer, eval_side, held_out)
    if not comm.is_main:
        return 0
    if result.comparison is not None:
        lines = [record.to_json() for record in result.comparison.records]
        (run.path / "compare.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    shown = _show_samples(config, run, trainer, held_out.tolist())
    summary = RunSummary(
        run=run.path,
        num_ranks=comm.world_size,
        result=result,
        seen=seen,
        shown=shown,
        left_out=side.dropped,
        eval_left_out=() if eval_side is side else eval_side.dropped,
        tail=trainer.plans.epoch_tail,
        oversize=side.oversize,
    )
    run.write_summary(summary.to_dict())
    summary.print(console)
    return 0


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _choose_run(config: FitConfig, comm: Comm) -> Path:
    """Path of the run folder: as given, or the next free one, which rank 0 names for all."""
    return comm.gather(config.output or next_free(RUNS, Path(config.model).name))[0]


def _newest_checkpoint(run: RunFolder, line: Callable[[], RunLine], comm: Comm, lock: RunLock) -> Path | None:
    """The checkpoint that a resume continues, the same on every rank; None: the run has none yet.

    Raises:
        ConfigError: another process writes to the run, or its ledger is of another run, or gone.
    """
    _on_main(comm, lambda: lock.take(run.path))
    _on_main(comm, lambda: refuse_other_run(run.ledger_path, line()))
    (newest,) = comm.gather((latest_complete(run.checkpoints),))[0]
    if newest is not None and not comm.gather(run.ledger_path.is_file())[0]:
        raise ConfigError(
            f"{run.path} has a checkpoint, but no ledger.jsonl: nobody could tell which samples its weights have seen. "
            f"Restore the file, or export the model and start a new run from it with --model."
        )
    return newest


def _selector(config: FitConfig, side: DataSide, train_ids: np.ndarray, newest: Path | None) -> Selector | None:
    """What selects the samples of a mixture, in a new run or after a checkpoint."""
    if newest is None:
        return mixture_selector(side, train_ids, config)
    meta = read_meta(newest)
    return mixture_selector(side, train_ids, config, progress=meta["progress"], at_step=meta["step"])


def _open_log(
    trainer: Trainer, run: RunFolder, line: RunLine, side: DataSide, lock: RunLock, *, evidence: RunEvidence
) -> None:
    """Make the run folder, or cut it back to the checkpoint, and open its files.

    Comes after the trainer is built, so that options which cannot work leave no folder behind.
    """
    if trainer.config.resume:
        folder = RunFolder.resume(run.path, trainer.config, step=trainer.finished_steps)
    else:
        folder = RunFolder.create(run.path, trainer.config)
        lock.take(run.path)
    evidence.write(folder.path)
    trainer.log = RunLog(
        folder,
        line,
        side,
        trainer.plans,
        finished_steps=trainer.finished_steps,
        comm=trainer.comm,
        reached=trainer.reached,
    )


def _on_main(comm: Comm, action: Callable[[], None]) -> None:
    """Do something on rank 0; when it fails there, raise on every rank: that error there, ConfigError elsewhere."""
    failed: Exception | None = None
    if comm.is_main:
        try:
            action()
        except LedgerError as error:  # of another run: the options do not fit, as with any other of them
            failed = ConfigError(str(error))
        except (BalancerError, TrainerError, OSError) as error:
            failed = error
    failure = comm.gather("" if failed is None else str(failed) or type(failed).__name__)[0]
    if failed is not None:
        raise failed
    if failure:
        raise ConfigError(failure)


def _show_samples(config: FitConfig, folder: RunFolder, trainer: Trainer, held_out: list[int]) -> list[Shown]:
    """Generate answers for held-out items with the whole model of the last checkpoint, in this process alone."""
    if trainer.eval_reader is None:
        return []
    pieces, _ = load_trained(folder.path, config)
    reader = replace(trainer.eval_reader, with_pixels=True)
    return show(pieces, reader, choose(reader, held_out, NUM_SHOWN), folder.write_sample)
