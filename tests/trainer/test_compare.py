"""Before and after, measured: the same steps with the balancer off and on, paired and on unchanged weights."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.layout import Layout  # noqa: E402
from balancer.records import ActionRecord, StepRecord, read_records  # noqa: E402
from balancer.shuffle import epoch_order  # noqa: E402
from tools.compared_steps import choose_pair, read_pairs  # noqa: E402
from trainer.comm import Comm, single_process  # noqa: E402
from trainer.compare import measured  # noqa: E402
from trainer.config import FitConfig  # noqa: E402
from trainer.export import load_trained  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402

MakeConfig = Callable[..., FitConfig]


def folder_of(config: FitConfig) -> Path:
    assert config.output is not None
    return config.output


def act(rank: int, dp_rank: int, microbatch: int, start_ms: float, end_ms: float) -> ActionRecord:
    return ActionRecord(
        rank=rank, dp_rank=dp_rank, stage=1, op="F", microbatch=microbatch, start_ms=start_ms, end_ms=end_ms
    )


def test_metrics_follow_from_the_measured_acts() -> None:
    comm = Comm(layout=Layout(dp_size=2), rank=0, device=torch.device("cpu"))
    # Rank 0 works 30 ms, rank 1 works 10 ms; the step takes 40 ms of which each rank has 40.
    found = measured([act(0, 0, 0, 0.0, 20.0), act(0, 0, 1, 30.0, 40.0), act(1, 1, 0, 0.0, 10.0)], comm)
    assert found.span_ms == 40.0
    assert found.rank_imbalance == 1.5
    assert found.bubble_ratio == 0.5
    assert found.microbatch_imbalance == pytest.approx(20.0 / (40.0 / 3))


def test_pipeline_ranks_of_one_replica_are_not_compared_with_each_other() -> None:
    comm = Comm(layout=Layout(pp_size=2), rank=0, device=torch.device("cpu"))
    found = measured([act(0, 0, 0, 0.0, 30.0), act(1, 0, 0, 30.0, 40.0)], comm)
    assert found.rank_imbalance == 1.0
    assert found.bubble_ratio == 0.5


def test_a_step_in_which_nothing_ran_has_no_metrics() -> None:
    found = measured([], single_process(torch.device("cpu")))
    assert all(math.isnan(value) for value in (found.span_ms, found.rank_imbalance, found.bubble_ratio))


def test_a_run_ends_with_paired_steps_off_and_on(fit_config: MakeConfig) -> None:
    config = fit_config(compare_steps=2, epochs=1)
    assert run_fit(config) == 0
    records = read_records(folder_of(config) / "compare.jsonl")
    assert [record.policy for record in records] == ["sequential"] * 4 + ["joint"] * 4
    off, on = records[:4], records[4:]
    assert [record.step for record in off] == [record.step for record in on]
    assert len({record.step for record in records}) == 2
    for one, other in zip(off, on, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.label_tokens == other.label_tokens
        assert one.actions
        assert one.step_ms == max(action.end_ms for action in one.actions)
    pair = choose_pair(read_pairs(folder_of(config)))
    assert (pair.before.policy, pair.after.policy) == ("sequential", "joint")
    told = json.loads((folder_of(config) / "summary.json").read_text())
    for side, records_of_side in (("before", off), ("after", on)):
        assert told[side]["span_ms"] == pytest.approx(statistics.median(record.step_ms for record in records_of_side))


def test_steps_are_told_apart_by_the_policy_asked_for_even_where_the_order_was_kept(fit_config: MakeConfig) -> None:
    # With one micro-batch on one rank no placement differs from another, so whatever was used, both must be there.
    config = fit_config(compare_steps=1, capacity_tokens=5000, global_batch_size=1)
    assert run_fit(config) == 0
    pairs = read_pairs(folder_of(config))
    assert [(pair.before.policy, pair.after.policy) for pair in pairs] == [("sequential", "joint")] * 2


def test_measuring_changes_no_weight_and_writes_no_step(fit_config: MakeConfig) -> None:
    without, with_it = fit_config("without", compare_steps=0), fit_config("with", compare_steps=3)
    run_fit(without)
    run_fit(with_it)
    assert not (folder_of(without) / "compare.jsonl").exists()
    steps = [[record.step for record in read_records(folder_of(c) / "steps.jsonl")] for c in (without, with_it)]
    assert steps[0] == steps[1] == [1, 2, 3]
    models = [dict(load_trained(folder_of(c), c)[0].named_parameters()) for c in (without, with_it)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_run_without_a_balancer_has_nothing_to_compare(fit_config: MakeConfig) -> None:
    config = fit_config(policy="sequential", compare_steps=2)
    assert run_fit(config) == 0
    assert not (folder_of(config) / "compare.jsonl").exists()
    assert json.loads((folder_of(config) / "summary.json").read_text())["before"] is None


def test_a_fixed_number_of_micro_batches_too_small_for_the_order_of_selection_is_compared_all_the_same(
    fit_config: MakeConfig, write_shard: Callable[..., Path], chat_json: Callable[..., bytes], tmp_path: Path
) -> None:
    # Two packs hold a short and a long sample each, but in the order short, short, long, long it takes three.
    sizes = [20, 20, 70, 70]
    seed = next(seed for seed in range(100) if set(epoch_order(np.arange(4), seed, 0)[:2].tolist()) == {0, 1})
    shard = write_shard(
        tmp_path / "turns.tar", [(f"{i}.json", chat_json("?", "x" * size)) for i, size in enumerate(sizes)]
    )
    options = {"data": str(shard), "global_batch_size": 4, "num_microbatches": 2, "capacity_tokens": 140, "seed": seed}
    config = fit_config(compare_steps=1, max_steps=1, **options)
    assert run_fit(config) == 0
    records: list[StepRecord] = read_records(folder_of(config) / "compare.jsonl")
    by_policy = {record.policy: record.num_microbatches for record in records}
    assert by_policy == {"sequential": 3, "joint": 2}
