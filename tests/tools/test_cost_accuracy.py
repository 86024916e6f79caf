"""The benchmark of the cost model: its table, its verdict, and model folders that the trainer reads."""

from pathlib import Path

import pytest

from balancer.cost_model import CostModel
from balancer.cost_terms import StageCost, StageTerms
from balancer.fit_report import Accuracy, Fit, StageFit
from tools.benchmarks.cost_accuracy import MODELS, _model, markdown, rows_of


def fitted(median: float, p95: float) -> Fit:
    stage = StageFit(
        stage=1,
        op="B",
        domain="llm",
        num_microbatches=40,
        repeats=3.0,
        terms={"constant": 1.0},
        left_out={},
        r2=0.99,
        held_out=Accuracy(stage=1, op="B", num_microbatches=40, median=0.02, p95=0.1, largest=0.2, bias=0.0),
        ranges={"tokens": (1, 2)},
    )
    checked = Accuracy(stage=1, op="B", num_microbatches=12, median=median, p95=p95, largest=p95, bias=-0.01)
    terms = StageTerms(constant_ns=1.0)
    model = CostModel(stages=(StageCost(forward=terms, backward=terms),) * 2)
    return Fit(model=model, stages=(stage,), verified=(checked,))


def test_a_row_says_what_was_fitted_and_what_was_checked() -> None:
    table = markdown(rows_of("demo", fitted(0.031, 0.12)))
    assert "| demo | 1 | B | 40 | 0.9900 | 2.0% | 12 | 3.1% | 12.0% | -1.0% |" in table
    assert "Worst row: median 3.1%, p95 12.0%." in table
    assert "met by all rows" in table


@pytest.mark.parametrize(("median", "p95"), [(0.101, 0.2), (0.05, 0.26)])
def test_a_row_above_either_limit_fails_the_table(median: float, p95: float) -> None:
    assert "met by NOT all rows" in markdown(rows_of("demo", fitted(0.01, 0.02)) + rows_of("deep", fitted(median, p95)))


@pytest.mark.torch
def test_the_folders_it_writes_are_models_of_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from trainer.model_source import load_model_source

    for name in MODELS:
        source = load_model_source(_model(name, tmp_path))
        assert source.config.vision.out_dim == source.config.llm.dim
