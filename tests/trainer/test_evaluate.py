"""Validation: the loss rule of training over every held-out sample, however it is packed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.layout import Layout  # noqa: E402
from balancer.weights import LOSS_REDUCTIONS  # noqa: E402
from trainer.check import CheckSubject  # noqa: E402
from trainer.check_command import build_subject  # noqa: E402
from trainer.comm import single_process  # noqa: E402
from trainer.config import CheckConfig  # noqa: E402
from trainer.evaluate import evaluate  # noqa: E402
from trainer.pieces import ModelPieces  # noqa: E402
from trainer.reference import reference_step  # noqa: E402
from trainer.step import StepRunner  # noqa: E402

COMM = single_process(torch.device("cpu"))
MakeCheck = Callable[..., CheckConfig]


@pytest.fixture
def subject(check_config: MakeCheck) -> CheckSubject:
    found = build_subject(check_config())
    return replace(found, plans=replace(found.plans, shuffle=False))


def pieces_of(subject: CheckSubject) -> ModelPieces:
    return subject.pieces(Layout(), 0, torch.float64, COMM.device)


@pytest.mark.parametrize("reduction", LOSS_REDUCTIONS)
def test_the_loss_is_that_of_one_sample_at_a_time_for_any_batch_size_tail_and_packing(
    subject: CheckSubject, reduction: str
) -> None:
    pieces = pieces_of(subject)
    runner, reader = StepRunner(pieces, COMM), replace(subject.reader, loss_reduction=reduction)
    loss, _ = reference_step(pieces, reader, range(12), COMM)
    for size, options in ((12, {}), (5, {"num_microbatches": 4}), (1, {}), (100, {"policy": "sequential"})):
        found = evaluate(runner, reader, replace(subject.plans, global_batch_size=size, **options))  # type: ignore[arg-type]
        assert found.loss == pytest.approx(loss, rel=1e-12)
        assert found.label_tokens == reader.index.samples["label_tokens"].sum()
        assert found.replaced == 0


def test_the_fact_loss_is_taken_over_the_words_listed_as_facts(subject: CheckSubject) -> None:
    runner = StepRunner(pieces_of(subject), COMM)
    found = evaluate(runner, subject.reader, subject.plans)
    assert found.fact_tokens == len("red") + len("Blue") + len("Dark")
    alone = [evaluate(runner, subject.reader, replace(subject.plans, ids=subject.plans.ids[[i]])) for i in (1, 5, 9)]
    mean = sum(one.fact_loss * one.fact_tokens for one in alone) / sum(one.fact_tokens for one in alone)
    assert found.fact_loss == pytest.approx(mean, rel=1e-12)


def test_without_facts_or_without_labels_the_means_are_unknown_not_zero(subject: CheckSubject) -> None:
    runner = StepRunner(pieces_of(subject), COMM)
    no_facts = evaluate(runner, subject.reader, replace(subject.plans, ids=subject.plans.ids[[0, 2]]))
    assert (no_facts.fact_tokens, no_facts.fact_loss == no_facts.fact_loss) == (0, False)
    assert no_facts.loss > 0.0
    no_labels = evaluate(runner, subject.reader, replace(subject.plans, ids=subject.plans.ids[[3]]))
    assert (no_labels.label_tokens, no_labels.loss == no_labels.loss) == (0, False)


def test_evaluation_leaves_no_gradient_and_a_model_that_trains(subject: CheckSubject) -> None:
    pieces = pieces_of(subject)
    before = {name: parameter.clone() for name, parameter in pieces.named_parameters()}
    evaluate(StepRunner(pieces, COMM), subject.reader, subject.plans)
    assert all(parameter.grad is None for parameter in pieces.parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in pieces.named_parameters())
    assert all(module.training for module in pieces.modules.values())


def test_a_medium_that_does_not_decode_is_left_out_of_the_loss_and_counted(
    check_config: MakeCheck, truncated_corpus: Path
) -> None:
    broken = build_subject(check_config(data=str(truncated_corpus)))
    pieces = pieces_of(broken)
    found = evaluate(StepRunner(pieces, COMM), broken.reader, broken.plans)
    others = [i for i in range(12) if i != 5]
    loss, _ = reference_step(pieces, broken.reader, others, COMM)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.replaced == 1
    assert found.fact_tokens == len("red") + len("Dark")
