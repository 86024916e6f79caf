"""`balancer-train fit` in one process: steps and rates as announced, bit-exact resumes, odd data sets, stand-ins."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.errors import OversizeError, PlanError  # noqa: E402
from balancer.plan import StepPlan  # noqa: E402
from balancer.records import StepRecord, read_records  # noqa: E402
from dataloaders.errors import DataError, SourceError  # noqa: E402
from trainer.checkpoint import latest_complete  # noqa: E402
from trainer.cli import main  # noqa: E402
from trainer.config import FitConfig  # noqa: E402
from trainer.errors import ConfigError, NumericsError, RemoteError, ReplacedBudgetError  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402

MakeConfig = Callable[..., FitConfig]
Losses = Callable[[Path], Sequence[float]]


def records(config: FitConfig) -> list[StepRecord]:
    assert config.output is not None
    return read_records(config.output / "steps.jsonl")


def summary(config: FitConfig) -> dict[str, Any]:
    assert config.output is not None

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return dict(json.loads((config.output / "summary.json").read_text(), parse_constant=refuse))


def interrupted_after(config: FitConfig, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `config` until the record of step `steps` is written, then die without a chance to save."""
    from balancer.records import RecordWriter

    class Killed(BaseException):
        pass

    write = RecordWriter.write

    def write_then_die(self: RecordWriter, record: StepRecord) -> None:
        write(self, record)
        if record.step == steps:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(RecordWriter, "write", write_then_die)
        with pytest.raises(Killed):
            run_fit(config)


def test_a_run_executes_the_steps_it_announces_and_ends_at_the_floor_of_the_rate(
    fit_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = fit_config(epochs=1.5, lr=0.02, min_lr_ratio=0.25)
    assert run_fit(config) == 0
    assert "step 1/5 " in capsys.readouterr().out
    written = records(config)
    assert [record.step for record in written] == [1, 2, 3, 4, 5]
    assert [record.epoch for record in written] == [0, 0, 0, 1, 1]
    assert written[0].lr == 0.02
    assert written[-1].lr == pytest.approx(0.005, abs=0.0)
    assert (summary(config)["steps"], summary(config)["final_lr"]) == (5, written[-1].lr)


def test_the_loss_falls_on_a_set_that_can_be_learned(fit_config: MakeConfig, losses: Losses) -> None:
    config = fit_config(max_steps=12, lr=0.02, global_batch_size=12)
    run_fit(config)
    seen = losses(config.output)  # type: ignore[arg-type]
    assert 5.0 < seen[0] < 6.2  # log(264) = 5.58: an untrained model knows nothing
    assert seen[-1] < seen[0] - 1.0


def test_records_and_plans_describe_the_steps_that_were_run(fit_config: MakeConfig) -> None:
    config = fit_config()
    run_fit(config)
    assert config.output is not None
    for record in records(config):
        plan = StepPlan.from_json((config.output / "plans" / f"step_{record.step:06d}.json").read_text())
        assert record.plan_digest == plan.digest
        assert record.label_tokens == plan.num_label_tokens
        assert record.llm_tokens == plan.llm_tokens.sum()
        assert record.num_microbatches == plan.num_microbatches
        acts = {(act.stage, act.op, act.microbatch) for act in record.actions}
        absent = plan.absent(0)
        stages_by_microbatch = {(s, m) for s in range(2) for m in range(plan.num_microbatches)} - absent
        assert acts == {(stage, op, m) for stage, m in stages_by_microbatch for op in "FB"}
        assert all(0.0 <= act.start_ms <= act.end_ms for act in record.actions)
        assert record.useful_tokens_per_s == record.executed_tokens_per_s > 0.0
        assert record.step_ms >= max(act.end_ms for act in record.actions)
    assert max(record.num_microbatches for record in records(config)) > 1
    assert sorted(i for record in records(config) for i in plan_ids(config, record.step)) == list(range(12))


def plan_ids(config: FitConfig, step: int) -> list[int]:
    assert config.output is not None
    text = (config.output / "plans" / f"step_{step:06d}.json").read_text()
    return StepPlan.from_json(text).sample_ids.tolist()


def test_a_resume_goes_on_bit_for_bit_with_the_next_step(
    fit_config: MakeConfig, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_steps": 7, "checkpoint_interval_steps": 2}
    whole, parts = fit_config("whole", **options), fit_config("parts", **options)
    assert whole.output is not None
    assert parts.output is not None
    run_fit(whole)
    # Died in step 5, one step after the checkpoint of step 4: the record of step 5 is written again, not twice.
    interrupted_after(parts, 5, monkeypatch)
    assert [record.step for record in records(parts)] == [1, 2, 3, 4, 5]
    kept = latest_complete(parts.output / "checkpoints")
    assert kept is not None
    assert kept.name == "step_000004"
    run_fit(dataclasses.replace(parts, resume=True))
    assert [record.step for record in records(parts)] == [1, 2, 3, 4, 5, 6, 7]
    assert losses(parts.output) == losses(whole.output)
    assert [r.grad_norm for r in records(parts)] == [r.grad_norm for r in records(whole)]
    assert [r.lr for r in records(parts)] == [r.lr for r in records(whole)]
    assert [r.plan_digest for r in records(parts)] == [r.plan_digest for r in records(whole)]
    assert summary(parts)["steps"] == 7


def test_a_run_may_be_resumed_again_and_again(
    fit_config: MakeConfig, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_steps": 6, "checkpoint_interval_steps": 1}
    whole, parts = fit_config("whole", **options), fit_config("parts", **options)
    run_fit(whole)
    for stop in (2, 3, 5):
        interrupted_after(parts, stop, monkeypatch)
        parts = dataclasses.replace(parts, resume=True)
    run_fit(parts)
    assert losses(parts.output) == losses(whole.output)  # type: ignore[arg-type]


def test_a_resume_before_the_first_checkpoint_starts_over(
    fit_config: MakeConfig, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = fit_config("whole", max_steps=3), fit_config("parts", max_steps=3)
    run_fit(whole)
    interrupted_after(parts, 2, monkeypatch)
    run_fit(dataclasses.replace(parts, resume=True))
    assert [record.step for record in records(parts)] == [1, 2, 3]
    assert losses(parts.output) == losses(whole.output)  # type: ignore[arg-type]


def test_resuming_a_finished_run_trains_nothing_more_and_leaves_it_as_it_is(
    fit_config: MakeConfig, losses: Losses, capsys: pytest.CaptureFixture[str]
) -> None:
    config = fit_config(max_steps=2, eval_share=0.2)
    run_fit(config)
    before, said = losses(config.output), summary(config)  # type: ignore[arg-type]
    assert run_fit(dataclasses.replace(config, resume=True)) == 0
    assert "is complete: 2 steps" in capsys.readouterr().out
    assert losses(config.output) == before  # type: ignore[arg-type]
    assert summary(config) == said


def test_the_number_of_loader_workers_changes_no_loss(fit_config: MakeConfig, losses: Losses) -> None:
    here, worker = fit_config("here"), fit_config("worker", num_workers=1)
    run_fit(here)
    run_fit(worker)
    assert losses(here.output) == losses(worker.output)  # type: ignore[arg-type]


def test_balancing_changes_the_placement_but_neither_samples_nor_losses(fit_config: MakeConfig) -> None:
    on, off = fit_config("on", policy="lpt"), fit_config("off", policy="sequential")
    run_fit(on)
    run_fit(off)
    for one, other in zip(records(on), records(off), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
        assert sorted(plan_ids(on, one.step)) == sorted(plan_ids(off, one.step))


def test_a_truncated_image_trains_as_a_counted_and_named_stand_in(
    fit_config: MakeConfig, truncated_corpus: Path
) -> None:
    config = fit_config(data=str(truncated_corpus), max_replaced=1, global_batch_size=12, max_steps=1)
    assert run_fit(config) == 0
    (record,) = records(config)
    assert [item.sample_id for item in record.replaced] == [5]
    assert "bad.tar" in record.replaced[0].place
    assert "005" in record.replaced[0].place
    assert "truncated" in record.replaced[0].reason
    assert (
        record.label_tokens
        == StepPlan.from_json(
            (config.output / "plans" / "step_000001.json").read_text()  # type: ignore[operator]
        ).num_label_tokens
        - len("Blue.")
        - 1
    )
    assert record.useful_tokens_per_s < record.executed_tokens_per_s
    assert summary(config)["replaced"] == 1


def test_one_stand_in_too_many_stops_the_run_and_names_it(
    fit_config: MakeConfig, truncated_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ReplacedBudgetError, match=r"the budget is max_replaced=0\..*005.*--max-replaced"):
        run_fit(fit_config(data=str(truncated_corpus)))
    arguments = ["--data", str(truncated_corpus), "--output", str(fit_config("cli").output), "--model", "check"]
    arguments += ["--capacity-tokens", "230", "--num-workers", "0", "--threads", "1", "--eval-share", "0"]
    arguments += ["--cache-dir", str(fit_config().cache_dir)]
    assert main(["fit", *arguments]) == 1
    assert "error: step 1: 1 samples could not be decoded" in capsys.readouterr().err


def test_a_held_out_sample_that_does_not_decode_is_listed_once_and_counts_for_no_budget(
    fit_config: MakeConfig, truncated_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fit_config(
        eval_data=str(truncated_corpus), eval_interval_steps=1, checkpoint_interval_steps=2, max_steps=4
    )
    interrupted_after(config, 3, monkeypatch)
    assert run_fit(dataclasses.replace(config, resume=True)) == 0
    assert (summary(config)["replaced"], summary(config)["validation"]["replaced"]) == (0, 1)
    assert config.output is not None
    (line,) = [json.loads(text) for text in (config.output / "bad_samples.jsonl").read_text().splitlines()]
    assert (line["kind"], line["sample_id"], line["step"]) == ("validation", 5, 1)
    assert (line["shard"], line["key"]) == (str(truncated_corpus), "005")
    assert "truncated" in line["reason"]


def test_a_limit_of_time_without_a_worker_to_stop_is_told_before_step_1(
    fit_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fit(fit_config("asked", max_steps=1, sample_timeout_s=7.0)) == 0
    assert "note: --sample-timeout-s 7 has no effect with --num-workers 0" in capsys.readouterr().out
    assert run_fit(fit_config("default", max_steps=1)) == 0
    assert "has no effect" not in capsys.readouterr().out


def test_a_bad_sample_counts_once_over_epochs_and_resumes(
    fit_config: MakeConfig, truncated_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"data": str(truncated_corpus), "global_batch_size": 12, "checkpoint_interval_steps": 1}
    config = fit_config(max_steps=4, max_replaced=1, **options)
    interrupted_after(config, 3, monkeypatch)
    assert run_fit(dataclasses.replace(config, resume=True)) == 0
    assert [[item.sample_id for item in record.replaced] for record in records(config)] == [[5]] * 4
    assert summary(config)["replaced"] == 1


def test_a_shard_that_vanishes_after_the_scan_stops_the_run_with_its_name(
    fit_config: MakeConfig, corpus: Path, tmp_path: Path
) -> None:
    shard = tmp_path / "moving.tar"
    shutil.copy(corpus, shard)
    config = fit_config(data=str(shard), max_steps=4, checkpoint_interval_steps=1)
    run_fit(config)
    shard.write_bytes(shard.read_bytes()[:1024])
    with pytest.raises((RemoteError, DataError), match=r"moving\.tar"):
        run_fit(dataclasses.replace(config, output=tmp_path / "again"))


def test_a_set_of_text_only_trains_without_any_encoder_act(fit_config: MakeConfig, text_corpus: Path) -> None:
    config = fit_config(data=str(text_corpus), eval_share=0.25)
    assert run_fit(config) == 0
    assert {act.stage for record in records(config) for act in record.actions} == {1}
    assert all(math.isfinite(record.loss) for record in records(config))
    assert summary(config)["validation"]["label_tokens"] > 0


def test_a_set_of_one_sample_trains_and_holds_nothing_out(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    config = fit_config(data=str(write_shard(tmp_path / "one.tar", members[1])), eval_share=0.1, max_steps=2)
    assert run_fit(config) == 0
    assert [len(plan_ids(config, step)) for step in (1, 2)] == [1, 1]
    assert summary(config)["validation"] is None


def test_a_step_without_label_tokens_is_a_counted_no_op(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    # One sample per step: the one without an answer has no label.
    config = fit_config(data=str(write_shard(tmp_path / "two.tar", [*members[0], *members[3]])), global_batch_size=1)
    assert run_fit(config) == 0
    written = records(config)
    assert sorted(record.label_tokens for record in written)[0] == 0
    assert [math.isnan(record.loss) for record in written] == [record.label_tokens == 0 for record in written]
    assert summary(config)["skipped_steps"] == 1
    assert math.isfinite(summary(config)["last_loss"])


def test_a_set_without_any_label_is_refused_before_step_1(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    config = fit_config(data=str(write_shard(tmp_path / "none.tar", members[3])), max_steps=2)
    with pytest.raises(DataError, match=r"none of the 1 training samples has a label token.*--train-on"):
        run_fit(config)
    assert not config.output.exists()


def test_a_set_of_nothing_or_no_set_at_all_is_an_error_that_names_it(
    fit_config: MakeConfig, write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"missing\.tar"):
        run_fit(fit_config(data=str(tmp_path / "missing.tar")))
    with pytest.raises(SourceError, match=r"empty\.tar"):
        run_fit(fit_config(data=str(write_shard(tmp_path / "empty.tar", []))))


def test_samples_above_the_capacity_stop_the_launch_or_are_dropped_and_listed(fit_config: MakeConfig) -> None:
    """CE-05."""
    with pytest.raises(OversizeError, match=r"sample 2 .*tokens > 100"):
        run_fit(fit_config(capacity_tokens=100))
    config = fit_config("dropped", capacity_tokens=100, oversize="drop")
    assert run_fit(config) == 0
    left_out = summary(config)["left_out"]
    assert {2}.issubset({item["sample_id"] for item in left_out})
    trained = {i for record in records(config) for i in plan_ids(config, record.step)}
    assert trained.isdisjoint({item["sample_id"] for item in left_out})
    assert len(trained) + len(left_out) == 12


def test_unusable_media_stop_the_launch_or_are_skipped_and_listed(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    broken = [*members[0], (members[1][0][0], members[1][0][1]), ("001.png", b"no picture"), *members[7]]
    data = str(write_shard(tmp_path / "broken.tar", broken))
    with pytest.raises(DataError, match=r"1 of 3 samples cannot be used:\n.*broken\.tar.*001"):
        run_fit(fit_config(data=data))
    config = fit_config("skipped", data=data, bad_records="skip")
    assert run_fit(config) == 0
    assert [item["sample_id"] for item in summary(config)["left_out"]] == [1]


def test_validation_data_of_its_own_is_used_whole(fit_config: MakeConfig, text_corpus: Path) -> None:
    config = fit_config(eval_data=str(text_corpus), eval_share=0.5, eval_interval_steps=1)
    assert run_fit(config) == 0
    trained = {i for record in records(config) for i in plan_ids(config, record.step)}
    assert trained == set(range(12))
    answers = ["2.", "Yes, and once more, at length. " * 3, "Nothing else to say here.", "No.", "It is."]
    assert summary(config)["validation"]["label_tokens"] == sum(len(answer) + 1 for answer in answers)


def test_held_out_samples_are_never_trained_and_are_shown_with_their_files(fit_config: MakeConfig) -> None:
    config = fit_config(eval_share=0.5, epochs=1)
    assert run_fit(config) == 0
    assert config.output is not None
    trained = {i for record in records(config) for i in plan_ids(config, record.step)}
    assert len(trained) == 6
    shown = summary(config)["samples"]
    assert len(shown) == 3
    files = [Path(name) for item in shown for name in item["files"]]
    assert files
    for path in files:
        assert path.parent == config.output / "samples"
        assert path.stat().st_size > 0
        assert int(path.name.split("_")[1]) not in trained
    assert all(item["truth"] for item in shown)


def test_samples_without_an_answer_are_not_shown(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    # Under train_on=all they carry labels all the same.
    alone = write_shard(tmp_path / "questions.tar", members[3])
    config = fit_config(eval_data=str(alone), train_on="all")
    assert run_fit(config) == 0
    assert summary(config)["samples"] == []
    assert summary(config)["validation"]["label_tokens"] > 0


def test_a_fixed_number_of_micro_batches_that_does_not_fit_is_an_error_before_step_one(
    fit_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PlanError, match="num_microbatches"):
        run_fit(fit_config(num_microbatches=1, global_batch_size=12))
    assert "step 1/" not in capsys.readouterr().out


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(fit_config: MakeConfig) -> None:
    with pytest.raises(NumericsError, match=r"step \d+: the gradient norm is (nan|inf)\. Lower --lr"):
        run_fit(fit_config(lr=1e30, clip_norm=None, max_steps=6))


def test_an_existing_run_folder_is_never_written_into(fit_config: MakeConfig) -> None:
    config = fit_config(max_steps=1)
    run_fit(config)
    before = (config.output / "steps.jsonl").read_bytes()  # type: ignore[operator]
    with pytest.raises(ConfigError, match="holds a run already"):
        run_fit(config)
    assert (config.output / "steps.jsonl").read_bytes() == before  # type: ignore[operator]


def test_a_path_with_square_brackets_is_printed_as_it_is(
    fit_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fit(fit_config("a[/b]", max_steps=1)) == 0
    assert "a[/b]" in capsys.readouterr().out
