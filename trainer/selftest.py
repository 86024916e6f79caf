"""`check --self-test`: plant six bugs that real trainers have had, and see the check fail on each.

A check that cannot fail proves nothing. Every bug is a small subclass of the real runner or reader, so all the rest
of the run is the real thing. Two processes (DP=2) are enough to show all six.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from balancer.batch import MicroBatch
from balancer.errors import LayoutError
from balancer.plan_loader import SampleReader
from balancer.records import Replaced
from trainer.check import CheckRow, CheckSubject, check_layout
from trainer.comm import Comm
from trainer.pieces import VISUAL_PREFIX
from trainer.step import StepRunner

NUM_MICROBATCHES = (2,)
HEALTHY = "none"


class PerRankMean(StepRunner):
    """Divides by this rank's label weight and averages over ranks, instead of by the global weight."""

    def loss_scale(self, planned_weight: float, microbatches: Sequence[MicroBatch | None]) -> float:
        own = sum(batch.weight_sum for batch in microbatches if batch is not None)
        return 1.0 / (own * self.comm.layout.dp_size) if own else 0.0


class EncoderGradientDoubled(StepRunner):
    """Sums the encoder's gradient twice, as a wrong reduction group does."""

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        for name, parameter in self.pieces.named_parameters():
            if name.startswith(VISUAL_PREFIX) and parameter.grad is not None:
                parameter.grad.mul_(2.0)


class LeakAcrossDocuments(StepRunner):
    """Attends over the whole pack: boundaries are lost."""

    def prepare(
        self, microbatches: Sequence[MicroBatch | None], replaced: Sequence[Replaced]
    ) -> tuple[MicroBatch | None, ...]:
        return tuple(
            batch and replace(batch, cu_seqlens=batch.cu_seqlens[[0, -1]], max_seqlen=int(batch.cu_seqlens[-1]))
            for batch in super().prepare(microbatches, replaced)
        )


class WrongPositionAxis(StepRunner):
    """Swaps the height and width axes of the rotary positions."""

    def prepare(
        self, microbatches: Sequence[MicroBatch | None], replaced: Sequence[Replaced]
    ) -> tuple[MicroBatch | None, ...]:
        return tuple(
            batch and replace(batch, position_ids=batch.position_ids[torch.tensor([0, 2, 1])])
            for batch in super().prepare(microbatches, replaced)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LosesASample(SampleReader):
    """Drops the first text-only sample that shares a pack (one with pixels would be caught by its shape)."""

    def read(self, sample_ids: Sequence[int], *, step: int = 0, microbatch_index: int = 0) -> MicroBatch:
        victim = _text_only(self, sample_ids)
        kept = [sample for sample in sample_ids if sample != victim or len(sample_ids) == 1]
        return SampleReader.read(self, kept, step=step, microbatch_index=microbatch_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatsASample(SampleReader):
    """Reads the first text-only sample of a pack twice."""

    def read(self, sample_ids: Sequence[int], *, step: int = 0, microbatch_index: int = 0) -> MicroBatch:
        victim = _text_only(self, sample_ids)
        again = list(sample_ids) if victim is None else [*sample_ids, victim]
        return SampleReader.read(self, again, step=step, microbatch_index=microbatch_index)


def _text_only(reader: SampleReader, sample_ids: Sequence[int]) -> int | None:
    return next((i for i in sample_ids if reader.index.samples["num_items"][i] == 0), None)


RUNNER_BUGS: dict[str, type[StepRunner]] = {
    "per-rank mean": PerRankMean,
    "encoder gradient x2": EncoderGradientDoubled,
    "leak across documents": LeakAcrossDocuments,
    "wrong position axis": WrongPositionAxis,
}
READER_BUGS: dict[str, type[SampleReader]] = {"lost sample": LosesASample, "duplicate sample": RepeatsASample}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedBug:
    """What the check said about one planted bug (`none` is the healthy run)."""

    bug: str
    worst_error: float
    worst_tensor: str
    caught: bool


def self_test(subject: CheckSubject, comm: Comm) -> list[PlantedBug]:
    """Run the check healthy and with each bug, in fp64.

    Raises:
        LayoutError: not run on at least two replicas, where a per-rank mean could not show.
    """
    if comm.layout.dp_size < 2:
        raise LayoutError(f"the self-test needs dp_size >= 2, this world has {comm.layout.dp_size}")
    found = [_planted(HEALTHY, _check(subject, comm))]
    for bug, runner_class in RUNNER_BUGS.items():
        found.append(_planted(bug, _check(subject, comm, runner_class=runner_class)))
    for bug, reader_class in READER_BUGS.items():
        reader = reader_class(**{name: getattr(subject.reader, name) for name in SampleReader.__slots__})
        found.append(_planted(bug, _check(subject, comm, reader=reader)))
    return found


def _check(
    subject: CheckSubject,
    comm: Comm,
    *,
    runner_class: type[StepRunner] = StepRunner,
    reader: SampleReader | None = None,
) -> list[CheckRow]:
    return check_layout(
        subject,
        comm,
        num_microbatches=NUM_MICROBATCHES,
        runner_class=runner_class,
        reader=reader,
        dtypes=(torch.float64,),
        policies=("on",),
    )


def _planted(bug: str, rows: Sequence[CheckRow]) -> PlantedBug:
    worst = max(rows, key=lambda row: row.worst_error)
    return PlantedBug(
        bug=bug,
        worst_error=worst.worst_error,
        worst_tensor=worst.worst_tensor,
        caught=not all(row.passed for row in rows),
    )
