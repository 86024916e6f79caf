"""What a run says about itself: the banner before step 1, and the summary at the end as a table and as JSON."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balancer.mixture_report import MixtureReport
from balancer.oversize import OversizeReport
from balancer.printable import printable
from balancer.select import Dropped, Tail
from dataloaders.scan import count_modalities
from trainer.compare import Comparison
from trainer.config import FitConfig
from trainer.config_yaml import option_values
from trainer.data import DataSide, notes
from trainer.loop import FitResult, Trainer
from trainer.mixture import report_of
from trainer.samples import Shown
from trainer.seen import Seen

ONE_RANK_NOTICE = (
    "One rank waits for nobody: what differs above is noise. To see balancing, two ranks on this machine:\n"
    "  torchrun --nproc-per-node 2 --no-python balancer-train"
)


def banner(trainer: Trainer, side: DataSide) -> str:
    """What will be trained: options, modalities, packing (of the first step), layout, number of steps."""
    config, plans, layout = trainer.config, trainer.plans, trainer.comm.layout
    kinds, plan = count_modalities(side.index), plans.plan(0)
    packs = max(1, int((plan.num_samples > 0).sum()))
    parameters = sum(parameter.numel() for parameter in trainer.pieces.parameters())
    options = " ".join(f"{name}={value}" for name, value in option_values(config).items())
    mixture = report_of(plans, trainer.num_steps)
    said = [*notes(side), *(() if mixture is None else mixture.notes()), *plans.selection_notes()]
    said += _without_effect(config)
    return (
        f"options: {options}\n"
        f"data: {len(side.index)} samples ({kinds.text_only} text only, {kinds.image_only} with images, "
        f"{kinds.video_only} with videos, {kinds.mixed} with both, {kinds.unusable} unusable): {len(plans.ids)} to "
        f"train, {trainer.num_held_out} held out, {len(side.dropped)} left out\n"
        + ("" if mixture is None else f"{_asked(mixture)}\n")
        + f"model: {config.model}, {parameters:,} parameters on rank 0; {layout.dp_size} replica(s) x {layout.pp_size} "
        f"pipeline rank(s) on {trainer.comm.device.type}\n"
        f"packing: on, policy {plan.policy}, {plan.num_microbatches} micro-batch(es) per rank, "
        f"{len(plan.sample_ids) / packs:.1f} samples per pack, fill {plan.fill:.2f}; loss {config.loss_reduction}\n"
        f"steps: {trainer.num_steps} ({plans.steps_per_epoch} per epoch), learning rate {config.lr:g} after "
        f"{trainer.warmup_steps} step(s) of warm-up" + "".join(f"\nnote: {note}" for note in said)
    )


def _without_effect(config: FitConfig) -> list[str]:
    """Options that were given and do nothing beside the others."""
    default = next(field.default for field in fields(FitConfig) if field.name == "sample_timeout_s")
    if config.num_workers or config.sample_timeout_s in (None, default):
        return []
    return [
        f"--sample-timeout-s {config.sample_timeout_s:g} has no effect with --num-workers 0: only a decoding process "
        f"can be stopped. Give --num-workers 1 or more."
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A finished run.

    Attributes:
        run: its folder.
        num_ranks: processes that trained.
        result: losses, validation, comparison.
        seen: right against shuffled media (demo corpus only).
        shown: held-out items with generated answers.
        left_out: samples that no step held, with reasons.
        eval_left_out: the same of --eval-data; empty without it.
        tail: what the end of every epoch held.
        oversize: what became of training samples that were larger than a micro-batch.
    """

    run: Path
    num_ranks: int
    result: FitResult
    seen: Seen | None
    shown: Sequence[Shown]
    left_out: Sequence[Dropped]
    eval_left_out: Sequence[Dropped] = ()
    tail: Tail | None = None
    oversize: OversizeReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values; numbers that are not finite become None."""
        result, comparison = self.result, self.result.comparison
        values = {
            "steps": result.num_steps,
            "first_loss": result.first_loss,
            "last_loss": result.last_loss,
            "final_lr": result.final_lr,
            "validation": None if result.validation is None else asdict(result.validation),
            "seen": None if self.seen is None else {**asdict(self.seen), "gain": self.seen.gain},
            "before": None if comparison is None else asdict(comparison.before),
            "after": None if comparison is None else asdict(comparison.after),
            "time_ratio": None if comparison is None else comparison.time_ratio,
            "skipped_steps": result.skipped_steps,
            "replaced": result.replaced,
            "conformed": result.conformed,
            "mixture": None if result.mixture is None else asdict(result.mixture),
            "left_out": [asdict(item) for item in self.left_out],
            "eval_left_out": [asdict(item) for item in self.eval_left_out],
            "tail": None if self.tail is None else asdict(self.tail),
            "oversize": None if self.oversize is None else asdict(self.oversize),
            "samples": [
                {"files": [str(path) for path in item.files], "truth": item.truth, "generated": item.generated}
                for item in self.shown
            ],
        }
        return {name: _finite(value) for name, value in values.items()}

    def print(self, console: Console) -> None:
        """Held-out items, then the table."""
        for item in self.shown:
            files = ", ".join(map(str, item.files)) or "(text only)"
            text = f"\n{files}\n  asked:     {item.question}\n  truth:     {item.truth}\n  generated: {item.generated}"
            console.print(printable(text), markup=False, highlight=False)
        table = Table(title=f"\nrun {escape(str(self.run))}", show_header=False)
        for name, value in self._rows():
            table.add_row(name, value)
        console.print(table)
        if self.num_ranks == 1:
            console.print(ONE_RANK_NOTICE, markup=False, highlight=False)

    def _rows(self) -> list[tuple[str, str]]:
        result = self.result
        rows = [
            ("steps", str(result.num_steps)),
            ("training loss", f"{result.first_loss:.4f} -> {result.last_loss:.4f}"),
        ]
        if result.validation is not None:
            held_out = result.validation
            stand_ins = f", {held_out.replaced} stand-ins left out" if held_out.replaced else ""
            rows.append(("validation loss", f"{held_out.loss:.4f} on {held_out.label_tokens} label tokens{stand_ins}"))
        if self.seen is not None:
            seen = self.seen
            losses = f"{seen.right:.4f} / {seen.shuffled:.4f}"
            rows.append(("fact loss, right / shuffled media", f"{losses}: {seen.gain:.0%} lower"))
        if result.mixture is not None:
            rows += _parts(result.mixture)
        if result.comparison is not None:
            rows += _before_after(result.comparison)
        rows.append(("samples left out", _left_out(self.left_out)))
        if self.eval_left_out:
            rows.append(("  of --eval-data", _left_out(self.eval_left_out)))
        if self.tail is not None and self.tail.text():
            rows.append(("end of an epoch", self.tail.text()))
        if self.oversize is not None and self.oversize.num_adjusted:
            cut = f"{self.oversize.tokens_cut} of {self.oversize.tokens_in} tokens cut"
            rows.append(("made to fit", f"{self.oversize.num_adjusted} samples, {cut}"))
        rows.append(("replaced by stand-ins", str(result.replaced)))
        if result.conformed:
            rows.append(("media made to fit the plan", f"{result.conformed} (see conformed in steps.jsonl)"))
        if result.skipped_steps:
            rows.append(("steps without any label", str(result.skipped_steps)))
        return rows


def _parts(report: MixtureReport) -> list[tuple[str, str]]:
    """A row for each part of a mixture."""
    return [
        (escape(printable(f"part {part.name}")), escape(printable(line.removeprefix(f"{part.name}: "))))
        for part, line in zip(report.parts, report.lines(), strict=True)
    ]


def _asked(report: MixtureReport) -> str:
    """What the weights ask for, in one line."""
    shares = ", ".join(f"{part.name} {part.asked:.2%} ({part.size} samples)" for part in report.parts)
    return f"mixture by {report.unit.replace('_', ' ')}: {shares}"


def _left_out(samples: Sequence[Dropped]) -> str:
    """Number and reasons: `5 (3 oversize, 2 unusable)`."""
    reasons = Counter(item.reason.split(":")[0] for item in samples)
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return f"{len(samples)} ({why})" if why else "0"


def _before_after(comparison: Comparison) -> list[tuple[str, str]]:
    """Medians of measured steps, the balancer off -> on."""
    before, after = comparison.before, comparison.after
    low, high = comparison.time_ratio_range
    time = f"same steps in {comparison.time_ratio:.2f} of the time (single pairs {low:.2f} to {high:.2f})"
    return [
        ("measured, balancer off -> on", time),
        ("  step", f"{before.span_ms:.0f} -> {after.span_ms:.0f} ms"),
        ("  imbalance over ranks", f"{before.rank_imbalance:.2f} -> {after.rank_imbalance:.2f}"),
        ("  imbalance over micro-batches", f"{before.microbatch_imbalance:.2f} -> {after.microbatch_imbalance:.2f}"),
        ("  bubble ratio", f"{before.bubble_ratio:.2f} -> {after.bubble_ratio:.2f}"),
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return value
