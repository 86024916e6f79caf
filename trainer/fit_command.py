"""`balancer-train fit`: set up a run, train, and say in one table what came of it."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dataloaders.counts import MediaKind
from trainer.checkpoint import latest_complete
from trainer.comm import Comm, communicator
from trainer.config import FitConfig
from trainer.data import DataSide, prepare, split
from trainer.errors import ConfigError
from trainer.export import load_trained
from trainer.loop import FitResult, Trainer
from trainer.model_source import load_model_source
from trainer.progress import progress_bars
from trainer.run_folder import RUNS, RunFolder, next_free, read_config
from trainer.samples import Shown, choose, show
from trainer.seen import Seen, measure_seen

NUM_SHOWN = 3
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
        folder = _open_folder(config, comm)
        trainer = Trainer(
            config,
            model=model,
            side=side,
            train_ids=train_ids,
            eval_side=eval_side,
            held_out_ids=held_out,
            comm=comm,
            folder=folder if comm.is_main else None,
            checkpoints=folder.checkpoints,
            report=lambda line: console.print(line, markup=False, highlight=False),
        )
        _banner(trainer, side, console)
        if config.resume:
            _resume(trainer, config, comm)
        result = trainer.fit()
        seen = measure_seen(trainer, eval_side, held_out) if config.data is None else None
    if not _is_main():
        return 0
    shown = _show_samples(config, folder, trainer, held_out.tolist())
    if result.comparison is not None:
        lines = [record.to_json() for record in result.comparison.records]
        (folder.path / "compare.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    folder.write_summary(_summary(result, side, seen, shown))
    _print_summary(result, side, seen, shown, folder, console)
    return 0


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _open_folder(config: FitConfig, comm: Comm) -> RunFolder:
    """The run folder: rank 0 makes it, the others learn its path; an error there is raised on all."""
    path, failure = None, ""
    if comm.is_main:
        path = config.output or next_free(RUNS, Path(config.model).name)
        try:
            if config.resume:
                read_config(path)
            else:
                RunFolder.create(path, config)
        except ConfigError as error:
            failure = str(error)
    path, failure = comm.gather((path, failure))[0]
    if failure or path is None:
        raise ConfigError(failure or "rank 0 named no run folder")
    return RunFolder(path)


def _resume(trainer: Trainer, config: FitConfig, comm: Comm) -> None:
    """Load the newest complete checkpoint (none yet: start from step 0) and cut records that lie beyond it."""
    (path,) = comm.gather((latest_complete(trainer.checkpoints),))[0]
    if path is not None:
        trainer.resume(path)
    if trainer.folder is not None:
        trainer.folder = RunFolder.resume(trainer.folder.path, config, step=trainer.finished_steps)
    comm.barrier()


def _banner(trainer: Trainer, side: DataSide, console: Console) -> None:
    """What will be trained, said before step 1: modalities, packing, layout, number of steps."""
    samples = side.index.samples
    kinds = side.index.items["kind"]
    layout, plan = trainer.comm.layout, trainer.plans.plan(trainer.finished_steps % trainer.plans.steps_per_epoch)
    parameters = sum(parameter.numel() for parameter in trainer.pieces.parameters())
    console.print(
        f"{len(side.index)} samples: {int((samples['num_items'] == 0).sum())} text only, "
        f"{int((kinds == MediaKind.IMAGE).sum())} images, {int((kinds == MediaKind.VIDEO).sum())} videos; "
        f"{len(trainer.plans.ids)} to train, {len(side.dropped)} left out\n"
        f"model {trainer.config.model}: {parameters:,} parameters on rank 0; {layout.dp_size} replicas x "
        f"{layout.pp_size} pipeline ranks on {trainer.comm.device.type}\n"
        f"packing on: policy {plan.policy}, {plan.num_microbatches} micro-batches per rank, "
        f"{len(plan.sample_ids) / max(1, int((plan.num_samples > 0).sum())):.1f} samples per pack, fill {plan.fill:.2f}; "
        f"loss {trainer.config.loss_reduction}\n"
        f"{trainer.num_steps} steps, learning rate {trainer.config.lr:g} after {trainer.warmup_steps} steps of warm-up",
        markup=False,
        highlight=False,
    )


def _show_samples(config: FitConfig, folder: RunFolder, trainer: Trainer, held_out: list[int]) -> list[Shown]:
    """Generate answers for held-out items with the whole model of the last checkpoint, in this process alone."""
    if trainer.eval_reader is None:
        return []
    pieces, _ = load_trained(folder.path, config)
    reader = replace(trainer.eval_reader, with_pixels=True)
    return show(pieces, reader, choose(reader, held_out, NUM_SHOWN), folder.path / "samples")


def _summary(result: FitResult, side: DataSide, seen: Seen | None, shown: list[Shown]) -> dict[str, Any]:
    return {
        "steps": result.num_steps,
        "first_loss": result.first_loss,
        "last_loss": result.last_loss,
        "final_lr": result.final_lr,
        "validation": None if result.validation is None else asdict(result.validation),
        "seen": None if seen is None else {**asdict(seen), "gain": seen.gain},
        "before": None if result.comparison is None else asdict(result.comparison.before),
        "after": None if result.comparison is None else asdict(result.comparison.after),
        "skipped_steps": result.skipped_steps,
        "replaced": result.replaced,
        "left_out": [{"sample_id": item.sample_id, "reason": item.reason} for item in side.dropped],
        "samples": [
            {"files": [str(path) for path in item.files], "truth": item.truth, "generated": item.generated}
            for item in shown
        ],
    }


def _print_summary(
    result: FitResult, side: DataSide, seen: Seen | None, shown: list[Shown], folder: RunFolder, console: Console
) -> None:
    for item in shown:
        console.print(f"\n{', '.join(map(str, item.files)) or '(text only)'}", markup=False, highlight=False)
        console.print(f"  asked:     {item.question}\n  truth:     {item.truth}", markup=False, highlight=False)
        console.print(f"  generated: {item.generated}", markup=False, highlight=False)
    table = Table(title=f"\nrun {folder.path}", show_header=False)
    table.add_row("steps", str(result.num_steps))
    table.add_row("training loss", f"{result.first_loss:.4f} -> {result.last_loss:.4f}")
    if result.validation is not None:
        table.add_row("validation loss", f"{result.validation.loss:.4f} on {result.validation.label_tokens} label tokens")
    if seen is not None:
        table.add_row(
            "facts, right media / shuffled",
            f"{seen.right:.4f} / {seen.shuffled:.4f} ({seen.gain:.0%} lower, {seen.num_samples} samples)",
        )
    if result.comparison is not None:
        before, after = result.comparison.before, result.comparison.after
        table.add_row("measured, balancer off -> on", "")
        table.add_row("  step", f"{before.step_ms:.0f} -> {after.step_ms:.0f} ms")
        table.add_row("  imbalance over ranks", f"{before.rank_imbalance:.2f} -> {after.rank_imbalance:.2f}")
        table.add_row(
            "  imbalance over micro-batches", f"{before.microbatch_imbalance:.2f} -> {after.microbatch_imbalance:.2f}"
        )
        table.add_row("  bubble ratio", f"{before.bubble_ratio:.2f} -> {after.bubble_ratio:.2f}")
    left_out = f"{len(side.dropped)} left out, {result.replaced} replaced by stand-ins, {result.skipped_steps} steps skipped"
    table.add_row("samples", left_out)
    console.print(table)
