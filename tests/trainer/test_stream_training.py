"""A step from a stream is a step like any other: same loss, same gradients as a plain loop over the same samples."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.layout import Layout  # noqa: E402
from balancer.stream_loader import StreamLoader  # noqa: E402
from balancer.stream_plan import WindowOptions  # noqa: E402
from dataloaders.stream_source import lane_of  # noqa: E402
from dataloaders.tar_stream import TarStream  # noqa: E402
from trainer.check_command import build_subject  # noqa: E402
from trainer.comm import single_process  # noqa: E402
from trainer.config import CheckConfig  # noqa: E402
from trainer.reference import reference_step  # noqa: E402
from trainer.step import StepRunner  # noqa: E402

COMM = single_process(torch.device("cpu"))


def test_loss_and_gradient_of_a_stream_equal_a_plain_loop(
    check_config: Callable[..., CheckConfig], corpus: Path
) -> None:
    subject, reduction = build_subject(check_config()), "sample_mean"
    reader = replace(subject.reader, loss_reduction=reduction)
    pieces = subject.pieces(Layout(), 0, torch.float64, COMM.device)
    plans = subject.plans
    loader = StreamLoader(
        TarStream(str(corpus)),
        reader.estimator,
        WindowOptions(
            global_batch_size=4,
            capacities=plans.capacities,
            cost_model=plans.cost_model,
            samples_per_lane=6,
            oversize="drop",
            bad_records="skip",
        ),
        reader_options={"loss_reduction": reduction},
    )
    runner, seen = StepRunner(pieces, COMM), 0
    for batches in loader:
        pieces.zero_grad()
        result = runner.run(batches, planned_weight=loader.planned_weight(batches.plan, reduction))
        found = {name: parameter.grad.clone() for name, parameter in pieces.named_parameters()}
        ids = [lane_of(int(i), lanes=1)[1] for i in batches.plan.sample_ids]
        loss, expected = reference_step(pieces, reader, ids, COMM)
        assert result.loss == pytest.approx(loss, rel=1e-12)
        assert found.keys() == expected.keys()
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        for name, gradient in expected.items():
            assert float((found[name] - gradient).abs().max()) < 1e-9 * largest
        seen += len(ids)
    assert seen + sum(loader.num_dropped.values()) == len(reader.source)
