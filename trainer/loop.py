"""`balancer-train fit`: the training loop and everything around it.

    data -> plans -> for each step: read | run (trainer.step) | clip by the global norm | AdamW | record
                     now and then:  validation, checkpoint
    at the end:      validation, off/on comparison, generated samples, summary

The number of steps is fixed before step 1. State is the step number: plans, learning rate and data all follow from it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from balancer.mixture_report import MixtureReport
from balancer.plan_loader import PlanLoader, SampleReader, StepBatches
from balancer.plan_sequence import PlanSequence
from balancer.records import StepRecord
from balancer.select import Selector
from trainer.calibrated import RangeWatch, chosen_cost_model
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.comm import Comm
from trainer.compare import OFF, Comparison, compare, measured
from trainer.config import FitConfig
from trainer.data import DataSide, capacities_of, read_groups, sample_reader
from trainer.errors import ConfigError, NumericsError
from trainer.evaluate import Evaluation, evaluate
from trainer.fixed_microbatches import check_fixed_microbatches
from trainer.launcher import Launcher
from trainer.lr_schedule import learning_rate, resolve_warmup
from trainer.mixture import last_step, report_of, to_progress
from trainer.model_source import ModelSource, lookahead_cost_for
from trainer.optim import build_optimizer, clip_factor, squared_norm
from trainer.pieces import ModelPieces
from trainer.run_log import REACHED_KEY, RunLog
from trainer.step import StepResult, StepRunner
from trainer.tally import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """What a finished run has to say.

    Attributes:
        first_loss, last_loss: training loss of the run's first step, and mean over the last tenth of the executed ones.
        validation: final loss on the held-out samples (None without any).
        comparison: balancer off and on, measured (None when switched off).
        num_steps: steps executed over the whole run, resumed parts included.
        skipped_steps: steps without any label token, which changed no weight.
        replaced: samples trained as stand-ins with zero loss.
        conformed: media that differed from their headers and were made to fit the plan, summed over the steps.
        mixture: what the steps held of each part of a mixture (None where there is none).
    """

    first_loss: float
    last_loss: float
    validation: Evaluation | None
    comparison: Comparison | None
    num_steps: int
    skipped_steps: int
    replaced: int
    conformed: int
    final_lr: float
    mixture: MixtureReport | None = None


class Trainer:
    """One run on one rank.

    Args:
        config: resolved options.
        side: training source with its costs.
        train_ids, eval_side, held_out_ids: what to train and what to validate on.
        comm: groups of this rank.
        checkpoints: folder of the checkpoints, the same on every rank.
        report: called on rank 0 with a line of text to show.
        selector: decides the samples of every training step (a mixture); None: all of `train_ids`, epoch by epoch.

    Attributes:
        log: what rank 0 writes while it trains; None on other ranks, and where nothing is kept.
        reached: of the checkpoint that was resumed: how far the files of the log reached; None: not known.
    """

    def __init__(
        self,
        config: FitConfig,
        *,
        model: ModelSource,
        side: DataSide,
        train_ids: np.ndarray,
        eval_side: DataSide,
        held_out_ids: np.ndarray,
        comm: Comm,
        checkpoints: Path,
        report: Callable[[str], None],
        selector: Selector | None = None,
    ) -> None:
        self.config, self.comm, self._report, self._selector = config, comm, report, selector
        self.log: RunLog | None = None  # opened on rank 0 once the options have proved to work
        self.reached: Mapping[str, Any] | None = None
        self.checkpoints = checkpoints
        self.pieces = ModelPieces.build(
            model,
            layout=comm.layout,
            pp_rank=comm.pp_rank,
            seed=config.seed,
            device=comm.device,
            autocast=config.dtype == "bf16" and comm.device.type == "cuda",
        )
        self._cost_model, fitted = chosen_cost_model(config.cost_model, model, comm.layout)
        self._ranges = RangeWatch(fitted, report)
        self.runner = StepRunner(self.pieces, comm, schedule=config.schedule)
        self.optimizer = build_optimizer(dict(self.pieces.named_parameters()), config)
        self._selection_cost = lookahead_cost_for(model.config)
        self.reader, self.plans = self.planned(side, train_ids, shuffle=True)
        self.eval_reader, self.eval_plans = None, None
        if len(held_out_ids):
            self.eval_reader, self.eval_plans = self.planned(eval_side, held_out_ids, shuffle=False)
        self.num_steps = last_step(self.plans, config.num_steps(self.plans.steps_per_epoch))
        self.warmup_steps = resolve_warmup(config.warmup_steps, self.num_steps)
        self.num_held_out = len(held_out_ids)
        self._launcher = Launcher()
        self.finished_steps = 0
        self.tally = Tally()
        if config.num_microbatches is not None:
            check_fixed_microbatches(self.plans, self.num_steps, comm)

    def planned(self, side: DataSide, ids: np.ndarray, *, shuffle: bool) -> tuple[SampleReader, PlanSequence]:
        """How samples `ids` of a source are read and planned; `shuffle` off is the order of evaluation."""
        config = self.config
        reader = sample_reader(side, config, with_pixels=self.comm.pp_rank == 0)
        selector = self._selector if shuffle else None
        plans = PlanSequence(
            index=side.index,
            ids=ids,
            global_batch_size=config.global_batch_size,
            layout=self.comm.layout,
            cost_model=self._cost_model,
            capacities=capacities_of(config),
            schedule=config.schedule,
            policy=config.policy,
            num_microbatches=config.num_microbatches if shuffle else None,
            min_num_microbatches=config.min_num_microbatches,
            seed=config.seed,
            shuffle=config.shuffle if shuffle else "none",
            block_shards=config.shuffle_block_shards,
            groups=read_groups(side, config) if shuffle and selector is None else None,  # a selector has its own
            selector=selector,
            step_tokens=config.step_tokens if shuffle else None,
            tail=config.tail if shuffle else "pad",
            lookahead_steps=config.lookahead_steps if shuffle else 1,
            selection_cost=self._selection_cost,
            dropped=side.dropped if shuffle else (),
        )
        return reader, plans

    def fit(self) -> FitResult:
        """Train from the last finished step to the end; the same result object on every rank."""
        losses: list[float] = []
        loader = PlanLoader(
            self.reader,
            self.plans,
            dp_rank=self.comm.dp_rank,
            steps=range(self.finished_steps, self.num_steps),
            num_workers=self.config.num_workers,
            pin_memory=self.comm.device.type == "cuda",
            sample_timeout_s=self.config.sample_timeout_s,
        )
        with self.log or nullcontext():
            return self._finish(losses, self._train(loader, losses))

    def _train(self, loader: PlanLoader, losses: list[float]) -> float:
        """All steps of `loader`; the learning rate of the last one (0 without any)."""
        lr, started = 0.0, time.perf_counter()
        for batches in loader:
            self._launcher.check()
            lr = self._learning_rate(batches.plan.step)
            self._ranges.look(batches.plan, partial(self.plans.counts, batches.plan.step))
            if self.log is not None:
                self.log.before(batches.plan)
            result, norm = self._update(batches, lr)
            now = time.perf_counter()
            record = self._record(batches, result, lr=lr, norm=norm, step_ms=(now - started) * 1e3)
            started = now
            losses.append(result.loss)
            if math.isnan(self.tally.first_loss):
                self.tally.first_loss = result.loss
            self.finished_steps = batches.plan.step + 1
            if self.log is not None:
                self.log.after(batches.plan, record, result.consumed)
                if self.finished_steps % self.config.log_interval == 0 or self.finished_steps == self.num_steps:
                    self._report(step_line(record, self.num_steps))
            self._now_and_then()
            if self._due(self.config.eval_interval_steps) or self._due(self.config.checkpoint_interval_steps):
                started = time.perf_counter()
        return lr

    def _learning_rate(self, step: int) -> float:
        config = self.config
        return learning_rate(
            step,
            self.num_steps,
            peak=config.lr,
            min_ratio=config.min_lr_ratio,
            schedule=config.lr_schedule,
            warmup_steps=self.warmup_steps,
            wsd_decay_share=config.wsd_decay_share,
        )

    def _update(self, batches: StepBatches, lr: float) -> tuple[StepResult, float]:
        """Run one step and move the weights; a step without label tokens is a counted no-op on every rank."""
        self.pieces.zero_grad()
        planned = self.plans.weight_sum(batches.plan.step, self.config.loss_reduction)
        result = self.runner.run(batches, planned_weight=planned)
        if self.log is not None:
            self.log.replaced(batches.plan, result.replaced)
        self.tally.add(batches.plan.step + 1, result, self.config)
        if not result.weight_sum:
            return result, float("nan")
        norm = self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return result, norm

    def _clip(self) -> float:
        """Scale gradients so that their global norm, over all stages, stays within the limit; the norm before.

        Raises:
            NumericsError: the norm is not finite, the same on every rank.
        """
        squared = squared_norm(dict(self.pieces.named_parameters())).to(self.comm.device)
        # Replicas hold the same sums after the reduction, so one replica's stages make up the whole model.
        norm = math.sqrt(float(self.comm.sum_over_replica_group(squared)))
        if not math.isfinite(norm):
            raise NumericsError(
                f"step {self.finished_steps + 1}: the gradient norm is {norm}. Lower --lr, lengthen --warmup-steps, "
                f"or look at the samples of this step in its plan's file."
            )
        factor = clip_factor(norm, self.config.clip_norm)
        if factor != 1.0:
            for parameter in self.pieces.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return norm

    def _record(
        self, batches: StepBatches, result: StepResult, *, lr: float, norm: float, step_ms: float
    ) -> StepRecord:
        plan = batches.plan
        metrics = measured(result.actions, self.comm)
        executed = int(plan.llm_tokens.sum())
        seconds = max(step_ms, 1e-6) / 1e3
        gone = sum(int(self.reader.index.samples["llm_tokens"][item.sample_id]) for item in result.replaced)
        return StepRecord(
            step=plan.step + 1,
            epoch=plan.epoch,
            loss=result.loss,
            lr=lr,
            grad_norm=norm,
            label_tokens=result.label_tokens,
            llm_tokens=executed,
            useful_tokens_per_s=(executed - gone) / seconds,
            executed_tokens_per_s=executed / seconds,
            step_ms=step_ms,
            data_wait_ms=result.data_wait_ms,
            actions=result.actions,
            imbalance_before=plan.imbalance_before,
            imbalance_after=plan.imbalance_after,
            measured_imbalance=metrics.rank_imbalance,
            lower_bound_ms=plan.lower_bound_ns / 1e6,
            makespan_ms=plan.makespan_ns / 1e6,
            fill=plan.fill,
            samples_per_pack=len(plan.sample_ids) / max(1, int((plan.num_samples > 0).sum())),
            num_microbatches=plan.num_microbatches,
            replaced=result.replaced,
            conformed=result.num_conformed,
            peak_memory_bytes=result.peak_memory_bytes,
            policy=plan.policy_used,
            plan_digest=plan.digest,
        )

    def save(self) -> None:
        """Write a checkpoint of the finished steps; called by all ranks together."""
        reached = self.comm.gather(None if self.log is None else self.log.sync())[0]  # the same on every rank
        save_checkpoint(
            self.checkpoints,
            self.finished_steps,
            model=dict(self.pieces.named_parameters()),
            optimizer=self.optimizer,
            progress={**self.tally.to_progress(), **to_progress(self.plans), REACHED_KEY: reached},
            comm=self.comm,
            keep_last=self.config.keep_last,
        )

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint: weights, optimizer, generators and the number of finished steps."""
        loaded = load_checkpoint(
            path, model=dict(self.pieces.named_parameters()), optimizer=self.optimizer, comm=self.comm
        )
        self.finished_steps = loaded.step
        self.tally = Tally.from_progress(loaded.progress)
        self.reached = loaded.progress.get(REACHED_KEY)
        if self.finished_steps > self.num_steps:
            raise ConfigError(
                f"the run has finished {self.finished_steps} steps, more than the {self.num_steps} asked for. Raise "
                f"--max-steps or --epochs, or leave them out."
            )
        self._report(f"resumed after step {self.finished_steps} of {self.num_steps}")

    def _due(self, interval: int | None) -> bool:
        return interval is not None and self.finished_steps % interval == 0 and self.finished_steps < self.num_steps

    def _now_and_then(self) -> None:
        """What is due after a step: validation and checkpoints, at the same steps on every rank."""
        if self._due(self.config.eval_interval_steps):
            self._validate()
        if self._due(self.config.checkpoint_interval_steps):
            self.save()

    def _validate(self) -> Evaluation | None:
        if self.eval_plans is None or self.eval_reader is None:
            return None
        log, step, index = self.log, self.finished_steps, self.eval_reader.index
        evaluation = evaluate(
            self.runner,
            self.eval_reader,
            self.eval_plans,
            on_replaced=None if log is None else lambda items: log.left_out_of_validation(step, items, index),
        )
        self._report(f"validation after step {self.finished_steps}: loss {evaluation.loss:.4f}")
        return evaluation

    def _compare(self) -> Comparison | None:
        """Off against on over the last steps of the run, measured on the trained weights."""
        count = min(self.config.compare_steps, self.plans.steps_per_epoch, self.num_steps)
        if not count or self.config.policy == OFF:
            return None
        last = self.num_steps - (1 if self.num_steps % self.plans.steps_per_epoch == 0 else 0)
        steps = list(range(max(0, last - count), last)) or [0]
        return compare(self.runner, self.reader, self.plans, steps=steps, record=self._comparison_record)

    def _comparison_record(self, batches: StepBatches, result: StepResult) -> StepRecord:
        span = max((action.end_ms for action in result.actions), default=0.0)
        record = self._record(batches, result, lr=0.0, norm=float("nan"), step_ms=span)
        # What was asked for tells off from on, also where the policy kept the sequential placement.
        return replace(record, policy=batches.plan.policy)

    def _finish(self, losses: Sequence[float], lr: float) -> FitResult:
        if self.finished_steps == self.num_steps and losses:
            self.save()
        validation = self._validate()
        comparison = self._compare() if losses else None
        known = [loss for loss in losses if math.isfinite(loss)]
        tail = known[-max(1, len(known) // 10) :]
        return FitResult(
            first_loss=self.tally.first_loss,
            last_loss=sum(tail) / len(tail) if tail else float("nan"),
            validation=validation,
            comparison=comparison,
            num_steps=self.finished_steps,
            skipped_steps=self.tally.skipped_steps,
            replaced=len(self.tally.replaced),
            conformed=self.tally.conformed,
            final_lr=lr,
            mixture=report_of(self.plans, self.finished_steps),
        )


def step_line(record: StepRecord, num_steps: int) -> str:
    """One line of the log: what was learned, how even the step was, how far from the bound."""
    gap = record.makespan_ms / record.lower_bound_ms if record.lower_bound_ms else float("nan")
    return (
        f"step {record.step}/{num_steps}  loss {record.loss:.4f}  lr {record.lr:.2e}  norm {record.grad_norm:.2f}  "
        f"{record.step_ms:.0f} ms  {record.useful_tokens_per_s:.0f} tok/s  imbalance {record.imbalance_before:.2f} -> "
        f"{record.imbalance_after:.2f} (time / bound {gap:.3f})  fill {record.fill:.2f}  M {record.num_microbatches}  "
        f"wait {record.data_wait_ms:.0f} ms"
    )
