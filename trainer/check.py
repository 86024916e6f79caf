"""`balancer-train check`: one step with the balancer on and off against a plain loop, in several layouts.

    layout (one process | DP=2 | PP=2) x dtype (fp64 | fp32) x micro-batches (1 | 4) x policy (off = sequential | on)
        -> gradients of every tensor, compared with trainer.reference on the same samples

Error of a tensor: max|difference| / max(max|g|, 1e-3 * largest gradient of any tensor). The second term keeps
tensors whose gradient is zero up to rounding (such as key biases) from dominating.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from balancer.layout import Layout
from balancer.plan import StepPlan
from balancer.plan_loader import PlanLoader, SampleReader
from balancer.plan_sequence import PlanSequence
from trainer.comm import Comm
from trainer.errors import CheckFailedError
from trainer.model_source import ModelSource, cost_model_for
from trainer.pieces import ModelPieces
from trainer.reference import reference_step
from trainer.step import StepRunner

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = (torch.float64, torch.float32)
POLICY_OF = {"off": "sequential", "on": "joint"}
SMALL_GRADIENT_SHARE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One comparison.

    Attributes:
        layout: `1 process`, `DP=2`, `PP=2`, ...
        dtype: `float64` or `float32`.
        num_microbatches: per replica.
        balancer: `off` or `on`.
        covers: what the plan held: `text-only`, `label-free` micro-batches.
        loss, reference_loss: of the step.
        worst_tensor, worst_error: the largest error and where.
        tolerance: what passes.
    """

    layout: str
    dtype: str
    num_microbatches: int
    balancer: str
    covers: tuple[str, ...]
    loss: float
    reference_loss: float
    worst_tensor: str
    worst_error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether gradients and loss agree."""
        loss_error = abs(self.loss - self.reference_loss) / max(abs(self.reference_loss), 1e-30)
        return self.worst_error < self.tolerance and loss_error < self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSubject:
    """What is checked: the samples of one step and a model.

    Attributes:
        reader: reads the samples.
        plans: a sequence whose `step` is checked; its policy and micro-batch count are varied.
        model: which model; `seed` makes its weights, the same in every layout.
        step: which step.
    """

    reader: SampleReader
    plans: PlanSequence
    model: ModelSource
    seed: int
    step: int = 0

    def pieces(self, layout: Layout, pp_rank: int, dtype: torch.dtype, device: torch.device) -> ModelPieces:
        """This rank's pieces, weights independent of the layout."""
        return ModelPieces.build(self.model, layout=layout, pp_rank=pp_rank, seed=self.seed, dtype=dtype, device=device)


def layout_name(layout: Layout) -> str:
    """How the tables call a layout."""
    if layout.world_size == 1:
        return "1 process"
    parts = [f"DP={layout.dp_size}"] if layout.dp_size > 1 else []
    parts += [f"PP={layout.pp_size}"] if layout.pp_size > 1 else []
    return " x ".join(parts)


def check_layout(
    subject: CheckSubject,
    comm: Comm,
    *,
    num_microbatches: Sequence[int] = (1, 4),
    runner_class: type[StepRunner] = StepRunner,
    reader: SampleReader | None = None,
    dtypes: Iterable[torch.dtype] = DTYPES,
    policies: Iterable[str] = ("off", "on"),
) -> list[CheckRow]:
    """All comparisons of this process's layout; the same rows on every rank.

    Args:
        runner_class, reader: replaced by the self-test, which plants bugs in them.

    Raises:
        CheckFailedError: the step has no label token.
    """
    rows = []
    if not subject.plans.weight_sum(subject.step, subject.reader.loss_reduction):
        raise CheckFailedError(
            f"step {subject.step + 1} holds no label token, so there is no gradient to compare. Look at a sample with "
            f"balancer-train plan --show-sample 0, choose another --train-on, or a larger --global-batch-size."
        )
    for dtype in dtypes:
        whole = subject.pieces(Layout(), 0, dtype, comm.device)
        ids = subject.plans.sample_ids(subject.step).tolist()
        reference_loss, reference = reference_step(whole, subject.reader, ids, comm)
        pieces = subject.pieces(comm.layout, comm.pp_rank, dtype, comm.device)
        runner = runner_class(pieces, comm, schedule=subject.plans.schedule)
        for count in num_microbatches:
            for balancer in policies:
                plans = _varied(subject, comm.layout, count, POLICY_OF[balancer])
                loader = PlanLoader(
                    reader or subject.reader,
                    plans,
                    dp_rank=comm.dp_rank,
                    steps=range(subject.step, subject.step + 1),
                )
                batches = next(iter(loader))
                pieces.zero_grad()
                planned = plans.weight_sum(subject.step, subject.reader.loss_reduction)
                result = runner.run(batches, planned_weight=planned)
                name, error = _worst(pieces, reference, comm)
                rows.append(
                    CheckRow(
                        layout=layout_name(comm.layout),
                        dtype=str(dtype).removeprefix("torch."),
                        num_microbatches=count,
                        balancer=balancer,
                        covers=_covered(batches.plan),
                        loss=result.loss,
                        reference_loss=reference_loss,
                        worst_tensor=name,
                        worst_error=error,
                        tolerance=TOLERANCE[dtype],
                    )
                )
    return rows


def _varied(subject: CheckSubject, layout: Layout, num_microbatches: int, policy: str) -> PlanSequence:
    return replace(
        subject.plans,
        layout=layout,
        cost_model=cost_model_for(subject.model.config, layout),
        num_microbatches=num_microbatches,
        policy=policy,
    )


def _worst(pieces: ModelPieces, reference: dict[str, torch.Tensor], comm: Comm) -> tuple[str, float]:
    """(tensor, error) of the largest error over the tensors of all ranks."""
    floor = SMALL_GRADIENT_SHARE * max(float(gradient.abs().max()) for gradient in reference.values())
    worst = ("", 0.0)
    for name, parameter in pieces.named_parameters():
        expected = reference[name]
        got = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
        error = float((got - expected).abs().max()) / max(float(expected.abs().max()), floor)
        if not error <= worst[1]:  # a NaN error is the worst of all
            worst = (name, error)
    found = comm.gather(worst)
    return max(found, key=lambda item: float("inf") if item[1] != item[1] else item[1])


def _covered(plan: StepPlan) -> tuple[str, ...]:
    used = plan.num_samples > 0
    covers = []
    if (used & (plan.visual_tokens == 0)).any():
        covers.append("text-only")
    if (used & (plan.label_tokens == 0)).any():
        covers.append("label-free")
    return tuple(covers)


def row_from(plain: Mapping[str, Any]) -> CheckRow:
    """The row that `dataclasses.asdict` made plain, after a round trip through JSON."""
    return CheckRow(**{**plain, "covers": tuple(plain["covers"])})
