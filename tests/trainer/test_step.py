"""LN-01, LN-04, LN-05, LN-07, AM-08, PS-02 and law 6 on the real model: any packing, one loss and one gradient."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.errors import PlanMismatchError  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.plan import Capacities  # noqa: E402
from balancer.plan_loader import PlanLoader, SampleReader, StepBatches  # noqa: E402
from balancer.plan_sequence import PlanSequence  # noqa: E402
from balancer.weights import LOSS_REDUCTIONS  # noqa: E402
from trainer.check import CheckSubject  # noqa: E402
from trainer.check_command import build_subject  # noqa: E402
from trainer.comm import single_process  # noqa: E402
from trainer.config import CheckConfig  # noqa: E402
from trainer.errors import RemoteError, TrainerError  # noqa: E402
from trainer.pieces import ModelPieces  # noqa: E402
from trainer.reference import reference_step  # noqa: E402
from trainer.step import StepResult, StepRunner  # noqa: E402

COMM = single_process(torch.device("cpu"))
TRUNCATED_ID = 5
MakeCheck = Callable[..., CheckConfig]
Gradients = dict[str, Any]


@pytest.fixture
def subject(check_config: MakeCheck) -> CheckSubject:
    return build_subject(check_config())


@pytest.fixture
def pieces(subject: CheckSubject) -> ModelPieces:
    return subject.pieces(Layout(), 0, torch.float64, COMM.device)


def load(reader: SampleReader, plans: PlanSequence, step: int = 0) -> StepBatches:
    return next(iter(PlanLoader(reader, plans, dp_rank=0, steps=range(step, step + 1))))


def run(pieces: ModelPieces, reader: SampleReader, plans: PlanSequence, step: int = 0) -> tuple[StepResult, Gradients]:
    pieces.zero_grad()
    runner = StepRunner(pieces, COMM)
    result = runner.run(load(reader, plans, step), planned_weight=plans.weight_sum(step, reader.loss_reduction))
    return result, {name: parameter.grad.clone() for name, parameter in pieces.named_parameters()}


def error_of(got: Gradients, expected: Gradients) -> float:
    """Largest error of any tensor, as `check` defines it."""
    floor = 1e-3 * max(float(g.abs().max()) for g in expected.values())
    assert got.keys() == expected.keys()
    return max(
        float((got[name] - expected[name]).abs().max()) / max(float(expected[name].abs().max()), floor) for name in got
    )


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_loss_and_gradient_equal_one_sample_at_a_time_for_any_packing(
    subject: CheckSubject, pieces: ModelPieces, reduction: str
) -> None:
    reader = replace(subject.reader, loss_reduction=reduction)
    ids = subject.plans.sample_ids(0).tolist()
    loss, expected = reference_step(pieces, reader, ids, COMM)
    for num_microbatches, policy in ((1, "lpt"), (2, "sequential"), (5, "lpt"), (len(ids), "length_grouped")):
        plans = replace(subject.plans, num_microbatches=num_microbatches, policy=policy)
        result, gradients = run(pieces, reader, plans)
        assert result.loss == pytest.approx(loss, rel=1e-12)
        assert error_of(gradients, expected) < 1e-10
        assert result.weight_sum == pytest.approx(plans.weight_sum(0, reduction), rel=1e-12)


def test_the_three_reductions_are_three_different_losses(subject: CheckSubject, pieces: ModelPieces) -> None:
    found = {r: run(pieces, replace(subject.reader, loss_reduction=r), subject.plans)[0].loss for r in LOSS_REDUCTIONS}
    assert len({round(loss, 6) for loss in found.values()}) == 3


def test_the_mean_is_over_the_tokens_of_the_step_not_over_micro_batches(
    subject: CheckSubject, pieces: ModelPieces
) -> None:
    # Samples 2 (many labels) and 10 (few) in packs of their own: a mean of means would be another number.
    plans = replace(subject.plans, ids=subject.plans.ids[[2, 10]], num_microbatches=2, shuffle=False)
    alone = [run(pieces, subject.reader, replace(plans, ids=plans.ids[[k]], num_microbatches=1))[0] for k in (0, 1)]
    both, _ = run(pieces, subject.reader, plans)
    labels = [one.label_tokens for one in alone]
    assert labels[0] > 20 * labels[1]
    weighted = sum(one.loss * one.label_tokens for one in alone) / sum(labels)
    assert both.loss == pytest.approx(weighted, rel=1e-12)
    assert both.loss != pytest.approx(sum(one.loss for one in alone) / 2, rel=1e-6)


def test_an_alignment_tail_changes_neither_loss_nor_gradient(subject: CheckSubject, pieces: ModelPieces) -> None:
    plans = replace(subject.plans, num_microbatches=3)
    plain, expected = run(pieces, subject.reader, plans)
    longest = int(subject.reader.index.samples["llm_tokens"].max())
    for align in (8, 1024):
        aligned, gradients = run(pieces, replace(subject.reader, align_tokens=align), plans)
        assert aligned.loss == pytest.approx(plain.loss, rel=1e-12)
        assert aligned.label_tokens == plain.label_tokens
        assert error_of(gradients, expected) < 1e-10
    batch = replace(subject.reader, align_tokens=1024).read([0, 1])
    assert batch.max_seqlen > longest, "the tail must be the longest segment for this test to mean anything"


def test_a_micro_batch_without_labels_adds_an_exact_zero(subject: CheckSubject, pieces: ModelPieces) -> None:
    ids = subject.plans.ids
    with_it = replace(subject.plans, ids=ids[[1, 3]], num_microbatches=2, shuffle=False, policy="sequential")
    without = replace(with_it, ids=ids[[1]], num_microbatches=1)
    assert (load(subject.reader, with_it).plan.label_tokens == 0).any()
    result, gradients = run(pieces, subject.reader, with_it)
    alone, expected = run(pieces, subject.reader, without)
    assert result.loss == alone.loss
    assert error_of(gradients, expected) < 1e-14


def test_a_step_without_labels_has_no_loss_and_zero_gradients(subject: CheckSubject, pieces: ModelPieces) -> None:
    result, gradients = run(pieces, subject.reader, replace(subject.plans, ids=subject.plans.ids[[3]]))
    assert result.loss != result.loss
    assert (result.weight_sum, result.label_tokens) == (0.0, 0)
    assert all(not gradient.any() for gradient in gradients.values())


def test_parameters_that_nothing_reached_get_zeros_so_that_all_replicas_reduce_alike(
    subject: CheckSubject, pieces: ModelPieces
) -> None:
    _, gradients = run(pieces, subject.reader, replace(subject.plans, ids=subject.plans.ids[[0]]))
    visual = [gradient for name, gradient in gradients.items() if name.startswith("visual.")]
    assert visual
    assert all(not gradient.any() for gradient in visual)


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_a_stand_in_leaves_the_gradient_of_the_step_without_its_sample(
    check_config: MakeCheck, truncated_corpus: Path, reduction: str
) -> None:
    broken = build_subject(check_config(data=str(truncated_corpus), loss_reduction=reduction))
    pieces = broken.pieces(Layout(), 0, torch.float64, COMM.device)
    ids = [i for i in broken.plans.sample_ids(0).tolist() if i != TRUNCATED_ID]
    loss, expected = reference_step(pieces, broken.reader, ids, COMM)
    for num_microbatches in (1, 4):
        result, gradients = run(pieces, broken.reader, replace(broken.plans, num_microbatches=num_microbatches))
        assert [item.sample_id for item in result.replaced] == [TRUNCATED_ID]
        assert result.loss == pytest.approx(loss, rel=1e-12)
        assert error_of(gradients, expected) < 1e-10
        assert result.weight_sum < broken.plans.weight_sum(0, reduction)
        assert result.label_tokens == broken.plans.plan(0).num_label_tokens - len("Blue.") - 1


def test_a_step_of_stand_ins_alone_has_no_loss_and_no_gradient(check_config: MakeCheck, truncated_corpus: Path) -> None:
    broken = build_subject(check_config(data=str(truncated_corpus)))
    pieces = broken.pieces(Layout(), 0, torch.float64, COMM.device)
    plans = replace(broken.plans, ids=broken.plans.ids[[TRUNCATED_ID]])
    result, gradients = run(pieces, broken.reader, plans)
    assert result.weight_sum == 0.0
    assert result.loss != result.loss
    assert all(not gradient.any() for gradient in gradients.values())


def test_an_error_while_loading_names_the_rank_the_step_and_the_cause(
    subject: CheckSubject, pieces: ModelPieces
) -> None:
    batches = replace(load(subject.reader, subject.plans, step=3), error=OSError("the shard is gone"))
    with pytest.raises(RemoteError, match="step 4 has no data on rank 0: OSError: the shard is gone") as caught:
        StepRunner(pieces, COMM).run(batches, planned_weight=1.0)
    assert isinstance(caught.value.__cause__, OSError)


def test_data_that_are_not_those_of_the_plan_never_train(subject: CheckSubject, pieces: ModelPieces) -> None:
    plans = replace(subject.plans, ids=subject.plans.ids[[1]])
    batches = replace(load(subject.reader, plans), microbatches=(subject.reader.read([5]),))
    with pytest.raises(TrainerError, match="the batch does not match its plan"):
        StepRunner(pieces, COMM).run(batches, planned_weight=1.0)


def test_actions_and_waits_are_reported_with_the_step(subject: CheckSubject, pieces: ModelPieces) -> None:
    batches = replace(load(subject.reader, replace(subject.plans, num_microbatches=2)), data_wait_ms=12.5)
    result = StepRunner(pieces, COMM).run(batches, planned_weight=1.0)
    assert {(action.rank, action.dp_rank) for action in result.actions} == {(0, 0)}
    assert result.data_wait_ms == 12.5
    assert result.peak_memory_bytes > 10_000_000


def test_the_plan_decides_which_acts_run_and_equal_patterns_are_proven_once(
    subject: CheckSubject, pieces: ModelPieces
) -> None:
    runner = StepRunner(pieces, COMM)
    plan = replace(subject.plans, num_microbatches=4, policy="sequential", shuffle=False).plan(0)
    schedule = runner.schedule_for(plan, 0, train=True)
    assert runner.schedule_for(plan, 0, train=True) is schedule
    forward = runner.schedule_for(plan, 0, train=False)
    assert {act.op for act in forward.ranks[0]} == {"F"}
    present = {(act.stage, act.microbatch) for act in schedule.ranks[0]}
    assert present == {(s, m) for s in range(2) for m in range(4)} - plan.absent(0)


def test_ranks_with_other_plans_are_told_apart_by_inputs_or_version(subject: CheckSubject) -> None:
    from balancer.plan import require_same

    plan = subject.plans.plan(0)
    other = replace(subject.plans, capacities=Capacities(tokens=10_000)).plan(0)
    with pytest.raises(PlanMismatchError, match=r"ranks \[1\] planned from other inputs than rank 0"):
        require_same([(plan.inputs_digest, plan.digest), (other.inputs_digest, other.digest)])
    with pytest.raises(PlanMismatchError, match=r"ranks \[1\] made another plan of the same inputs"):
        require_same([(plan.inputs_digest, plan.digest), (plan.inputs_digest, "0" * 64)])
