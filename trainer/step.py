"""One optimizer step over all ranks: agree, execute, reduce, correct.

StepBatches of this rank
  | agree      one exchange: plan digest, errors, sample ids as loaded, stand-ins   -> same decision on every rank
  | execute    schedule on pieces; gradients of sum(w * ce) / planned weight
  | reduce     one sum per stage over the replicas
  | correct    times planned / actual weight where stand-ins removed labels (law 6)
  v
gradients of the global mean loss, equal to a plain loop up to summation order, on every rank
"""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from balancer.batch import MicroBatch
from balancer.errors import PlanMismatchError
from balancer.plan import StepPlan, require_same
from balancer.plan_loader import StepBatches
from balancer.records import ActionRecord, Replaced
from balancer.schedule import Schedule, build_schedule
from balancer.simulate import simulate
from trainer.comm import Comm
from trainer.errors import RemoteError
from trainer.executor import Executor, StepOutcome
from trainer.pieces import ModelPieces


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step after the reduction, the same on every rank unless said otherwise.

    Attributes:
        loss: sum(w * ce) / sum(w) over the global batch; NaN when no label token was left.
        weight_sum: actual loss weight of the global batch.
        label_tokens: label tokens of the global batch that were trained.
        actions: timed actions of *all* ranks, relative to the step's start.
        replaced: samples trained with stand-in media, of all ranks.
        num_conformed: media made to fit their planned shape.
        data_wait_ms, peak_memory_bytes: of the rank with the largest value.
        consumed: per DP rank, the ids of the samples that it loaded, in the order they were run.
    """

    loss: float
    weight_sum: float
    label_tokens: int
    actions: tuple[ActionRecord, ...]
    replaced: tuple[Replaced, ...]
    num_conformed: int
    data_wait_ms: float
    peak_memory_bytes: int
    consumed: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    """What a rank tells the others before the first forward of a step."""

    digests: tuple[str, str]
    error: str | None
    sample_ids: tuple[int, ...]
    replaced: tuple[Replaced, ...]
    num_conformed: int


class StepRunner:
    """Runs planned steps on this rank.

    Args:
        pieces: this rank's part of the model.
        comm: groups and channels.
        schedule: name of the schedule, see `balancer.schedule.build_schedule`.
    """

    def __init__(self, pieces: ModelPieces, comm: Comm, *, schedule: str = "1f1b") -> None:
        self.pieces, self.comm, self._schedule = pieces, comm, schedule
        self._proven: dict[tuple[object, ...], Schedule] = {}

    def run(self, batches: StepBatches, *, planned_weight: float) -> StepResult:
        """Forward and backward of one step; leaves reduced gradients in `.grad`.

        Args:
            batches: this rank's micro-batches and their plan.
            planned_weight: loss weight of the whole step as planned.

        Raises:
            PlanMismatchError: the ranks hold different plans, or loaded other samples than the ranks beside them.
            RemoteError: some rank could not load its data; raised on every rank with that rank's text.
        """
        statuses = self._agree(batches)
        replaced = tuple(item for status in statuses for item in status.replaced)
        microbatches = self.prepare(batches.microbatches, replaced)
        start = time.perf_counter()
        loss_scale = self.loss_scale(planned_weight, microbatches)
        outcome = self._execute(batches.plan, microbatches, train=True, loss_scale=loss_scale, start=start)
        self.reduce_gradients()
        weight, label_tokens = self._actual(microbatches)
        if replaced and weight:
            for parameter in self.pieces.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(planned_weight / weight)
        loss_sum = float(self.comm.sum_over_world(outcome.loss_sum))
        gathered = self.comm.gather((outcome.actions, batches.data_wait_ms, peak_memory_bytes(self.comm.device)))
        return StepResult(
            loss=loss_sum / weight if weight else float("nan"),
            weight_sum=weight,
            label_tokens=label_tokens,
            actions=tuple(action for actions, _, _ in gathered for action in actions),
            replaced=replaced,
            num_conformed=sum(status.num_conformed for status in statuses),
            data_wait_ms=max(wait for _, wait, _ in gathered),
            peak_memory_bytes=max(peak for _, _, peak in gathered),
            consumed=self._consumed(statuses),
        )

    def evaluate(self, batches: StepBatches) -> tuple[StepOutcome, tuple[MicroBatch | None, ...], tuple[Replaced, ...]]:
        """Forward only, without gradients; outcome and micro-batches of this rank, and stand-ins of all ranks."""
        replaced = tuple(item for status in self._agree(batches) for item in status.replaced)
        microbatches = self.prepare(batches.microbatches, replaced)
        with torch.no_grad():
            outcome = self._execute(batches.plan, microbatches, train=False, loss_scale=1.0, start=time.perf_counter())
        return outcome, microbatches, replaced

    def prepare(
        self, microbatches: Sequence[MicroBatch | None], replaced: Sequence[Replaced]
    ) -> tuple[MicroBatch | None, ...]:
        """Micro-batches on the device, without the loss of samples that any rank had to replace."""
        gone = {item.sample_id for item in replaced}
        return tuple(
            None if batch is None else batch.without_loss_of(gone).to(self.comm.device, self.pieces.dtype)
            for batch in microbatches
        )

    def loss_scale(self, planned_weight: float, microbatches: Sequence[MicroBatch | None]) -> float:
        """Factor of every local loss sum: one over the weight of the *global* batch, whoever holds the samples."""
        return 1.0 / planned_weight if planned_weight else 0.0

    def reduce_gradients(self) -> None:
        """Sum gradients over the replicas of each stage; one flat message, parameters in canonical order."""
        parameters = list(self.pieces.parameters())
        for parameter in parameters:
            if parameter.grad is None:  # nothing reached it this step (text only, or an empty replica)
                parameter.grad = torch.zeros_like(parameter)
        if self.comm.layout.dp_size == 1:
            return
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        self.comm.sum_over_stage_group(flat)
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))

    def _agree(self, batches: StepBatches) -> list[_Status]:
        own = [batch for batch in batches.microbatches if batch is not None]
        statuses = self.comm.gather(
            _Status(
                digests=(batches.plan.inputs_digest, batches.plan.digest),
                error=None if batches.error is None else f"{type(batches.error).__name__}: {batches.error}",
                sample_ids=tuple(i for batch in own for i in batch.sample_ids.tolist()),
                replaced=tuple(item for batch in own for item in batch.replaced),
                num_conformed=sum(batch.num_conformed for batch in own),
            )
        )
        require_same([status.digests for status in statuses])
        errors = [f"rank {rank}: {status.error}" for rank, status in enumerate(statuses) if status.error]
        if errors:
            raise RemoteError(f"step {batches.plan.step + 1} has no data on {'; '.join(errors)}") from batches.error
        return statuses

    def _consumed(self, statuses: Sequence[_Status]) -> tuple[tuple[int, ...], ...]:
        """Ids per replica; all pipeline ranks of one have loaded the same samples.

        Raises:
            PlanMismatchError: they have not, on every rank.
        """
        layout, consumed = self.comm.layout, []
        for dp_rank in range(layout.dp_size):
            loaded = [statuses[layout.rank(dp_rank, pp_rank)].sample_ids for pp_rank in range(layout.pp_size)]
            if len(set(loaded)) > 1:
                raise PlanMismatchError(f"the pipeline ranks of replica {dp_rank} have loaded different samples")
            consumed.append(loaded[0])
        return tuple(consumed)

    def _execute(
        self,
        plan: StepPlan,
        microbatches: Sequence[MicroBatch | None],
        *,
        train: bool,
        loss_scale: float,
        start: float,
    ) -> StepOutcome:
        edges = self.pieces.edges(plan, self.comm.dp_rank)
        executor = Executor(pieces=self.pieces.by_stage(), edges=edges, comm=self.comm)
        schedule = self.schedule_for(plan, self.comm.dp_rank, train=train)
        return executor.run(schedule, microbatches, loss_scale=loss_scale, start=start)

    def schedule_for(self, plan: StepPlan, dp_rank: int, *, train: bool) -> Schedule:
        """The replica's schedule for this plan, proven free of deadlock by simulating it.

        Raises:
            ScheduleError: the schedule would block.
        """
        absent = plan.absent(dp_rank)
        key = (plan.num_microbatches, absent, train)
        if key not in self._proven:
            schedule = build_schedule(
                self._schedule, stage_ranks=self.comm.layout.stage_ranks(), num_microbatches=plan.num_microbatches
            ).without(absent)
            schedule = schedule if train else schedule.forward_only()
            unit = np.ones((plan.num_stages, plan.num_microbatches))
            simulate(schedule, forward_ms=unit, backward_ms=unit)
            if len(self._proven) > 4096:  # patterns of presence are few in practice; this bounds the odd case
                self._proven.clear()
            self._proven[key] = schedule
        return self._proven[key]

    def _actual(self, microbatches: Sequence[MicroBatch | None]) -> tuple[float, int]:
        """(loss weight, label tokens) of the global batch as loaded; every pipeline rank holds the labels."""
        own = [batch for batch in microbatches if batch is not None]
        sums = torch.tensor(
            [sum(batch.weight_sum for batch in own), float(sum(batch.num_label_tokens for batch in own))],
            dtype=torch.float64,
            device=self.comm.device,
        )
        weight, label_tokens = self.comm.sum_over_stage_group(sums).tolist()
        return weight, int(label_tokens)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory this process has used: allocated on a CUDA device, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
