"""State of a run: wherever it is stopped, every sample is consumed exactly once, and the ledger proves it."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.errors import RecordFormatError  # noqa: E402
from balancer.records import Replaced, read_records  # noqa: E402
from tools.verify_command import VerifyReport, verify_run  # noqa: E402
from trainer.bad_samples import BadSamples  # noqa: E402
from trainer.checkpoint import latest_complete  # noqa: E402
from trainer.config import FitConfig  # noqa: E402
from trainer.data import prepare  # noqa: E402
from trainer.errors import ConfigError, ReplacedBudgetError, SkippedBudgetError  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.model_source import load_model_source  # noqa: E402
from trainer.run_folder import RunLock  # noqa: E402
from trainer.tally import Tally  # noqa: E402

MakeConfig = Callable[..., FitConfig]
KilledAfter = Callable[..., None]
Consumed = Callable[[FitConfig], list[list[int]]]
Proven = Callable[[FitConfig], VerifyReport]
KILLED_AT = (3, 5, 5, 8, 11)


def bad_lines(config: FitConfig) -> list[dict[str, Any]]:
    assert config.output is not None
    return [json.loads(text) for text in (config.output / "bad_samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_a_run_is_proven_exactly_once_by_its_ledger(
    fit_config: MakeConfig, shuffle: str, consumed: Consumed, proven: Proven
) -> None:
    config = fit_config(shuffle=shuffle, epochs=2.5, eval_share=0.2)
    assert run_fit(config) == 0
    report = proven(config)
    assert (report.num_ids, report.num_complete, report.num_starts) == (10, 2, 1)
    assert report.num_selected == report.num_placed == report.num_steps == 8
    assert report.unfinished == 8
    steps = consumed(config)
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2, 4, 4]


def test_epochs_advance_by_themselves_and_follow_the_seed(fit_config: MakeConfig, consumed: Consumed) -> None:
    """DR-14."""
    config, again = fit_config("one", epochs=2), fit_config("two", epochs=2)
    for made in (config, again):
        assert run_fit(made) == 0
    steps = consumed(config)
    assert sorted(chain(*steps[:3])) == sorted(chain(*steps[3:])) == list(range(12))
    assert steps[:3] != steps[3:]
    assert consumed(again) == steps
    other = fit_config("three", epochs=2, seed=1)
    assert run_fit(other) == 0
    assert consumed(other) != steps


def test_stopping_in_the_middle_gives_the_sequence_of_samples_of_one_run(
    fit_config: MakeConfig, killed_after: KilledAfter, consumed: Consumed, proven: Proven
) -> None:
    """DR-01, DR-04."""
    whole, parts = fit_config("whole", max_steps=8), fit_config("parts", max_steps=8, checkpoint_interval_steps=2)
    assert run_fit(whole) == 0
    killed_after(parts, 5)
    assert run_fit(dataclasses.replace(parts, resume=True)) == 0
    assert consumed(parts) == consumed(whole)
    report = proven(parts)
    assert (report.num_starts, report.num_discarded) == (2, 1)


def test_a_chain_of_five_resumes_with_other_workers_each_time_is_one_run(
    fit_config: MakeConfig,
    losses: Callable[[Path], Sequence[float]],
    killed_after: KilledAfter,
    consumed: Consumed,
    proven: Proven,
) -> None:
    """DR-07."""
    whole = fit_config("whole", max_steps=13)
    parts = fit_config("parts", max_steps=13, checkpoint_interval_steps=3)
    assert run_fit(whole) == 0
    for number, step in enumerate(KILLED_AT):
        killed_after(dataclasses.replace(parts, resume=number > 0, num_workers=number == 2), step)
    assert run_fit(dataclasses.replace(parts, resume=True)) == 0
    assert consumed(parts) == consumed(whole)
    assert losses(parts.output) == losses(whole.output)
    report = proven(parts)
    assert report.num_starts == len(KILLED_AT) + 1
    assert report.num_discarded == 3 + 2 + 2 + 2 + 2  # the checkpoint of step 3 comes after its record


def test_a_kill_between_the_ledger_and_the_record_of_a_step_is_no_gap(
    fit_config: MakeConfig, killed_after: KilledAfter, proven: Proven
) -> None:
    config = fit_config(max_steps=6, checkpoint_interval_steps=2)

    killed_after(config, 1, is_recorded=False)
    assert run_fit(dataclasses.replace(config, resume=True)) == 0
    assert proven(config).num_discarded == 1
    assert [record.step for record in read_records(config.output / "steps.jsonl")] == list(range(1, 7))  # type: ignore[operator]


def test_a_resume_reads_the_ledger_from_its_checkpoint_on_and_the_proof_reads_all(
    fit_config: MakeConfig, tmp_path: Path, killed_after: KilledAfter
) -> None:
    config = fit_config(max_steps=8, checkpoint_interval_steps=2)
    killed_after(config, 5)
    meta = tmp_path / "run" / "checkpoints" / "step_000004" / "meta.json"
    reached = json.loads(meta.read_text())["progress"]["reached"]
    lines = (tmp_path / "run" / "steps.jsonl").read_bytes().splitlines(keepends=True)
    assert reached["last_record"] == sum(map(len, lines[:3]))

    for name in ("ledger.jsonl", "steps.jsonl"):  # edits of steps that no resume executes again
        path = tmp_path / "run" / name
        texts = path.read_bytes().splitlines(keepends=True)
        at = next(k for k, text in enumerate(texts) if json.loads(text).get("step") == 1)
        path.write_bytes(b"".join([*texts[:at], texts[at].replace(b'"epoch":0', b'"epoch":x'), *texts[at + 1 :]]))
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "run", whole)
    assert run_fit(dataclasses.replace(config, resume=True)) == 0
    assert "line 3: no line of a ledger" in verify_run(tmp_path / "run").findings[0]

    # A checkpoint of an earlier version does not say how far the files reached: they are read whole.
    meta = whole / "checkpoints" / "step_000004" / "meta.json"
    content = json.loads(meta.read_text())
    del content["progress"]["reached"]
    meta.write_text(json.dumps(content))
    with pytest.raises(RecordFormatError, match=r"steps\.jsonl, line 1: not a step record"):
        run_fit(dataclasses.replace(config, output=whole, resume=True))


@pytest.mark.parametrize("reached", [None, [], {"ledger": 3, "last_record": "x"}, {"last_record": -1}])
def test_a_checkpoint_that_does_not_say_how_far_the_files_reached_is_resumed(
    fit_config: MakeConfig, tmp_path: Path, reached: object, killed_after: KilledAfter, proven: Proven
) -> None:
    config = fit_config(max_steps=4, checkpoint_interval_steps=2)
    killed_after(config, 3)
    meta = tmp_path / "run" / "checkpoints" / "step_000002" / "meta.json"
    content = json.loads(meta.read_text())
    content["progress"]["reached"] = reached
    meta.write_text(json.dumps(content))
    assert run_fit(dataclasses.replace(config, resume=True)) == 0
    assert proven(config).num_steps == 4


def test_the_number_of_steps_and_the_last_rate_are_those_announced(
    fit_config: MakeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """TR-02."""
    config = fit_config(epochs=3, lr=1e-2, min_lr_ratio=0.1, lr_schedule="cosine")
    assert run_fit(config) == 0
    assert "steps: 9 (3 per epoch)" in capsys.readouterr().out
    written = read_records(config.output / "steps.jsonl")  # type: ignore[operator]
    assert len(written) == 9
    assert written[-1].lr == pytest.approx(1e-3)


def test_state_stays_small_for_a_million_samples() -> None:
    """DR-05: what a checkpoint keeps besides tensors does not grow with the data; the budget bounds the bad ones."""
    tally = Tally(replaced=set(range(1_000_000 - 50_000, 1_000_000)), skipped_steps=10**6, conformed=10**6)
    text = json.dumps(tally.to_progress())
    assert len(text) < 1_000_000
    assert len(json.dumps(Tally(skipped_steps=10**6, conformed=10**9).to_progress())) < 200
    assert Tally.from_progress(json.loads(text)).replaced == tally.replaced


def test_a_checkpoint_of_an_earlier_version_has_no_counts_in_a_row() -> None:
    old = {"skipped_steps": 2, "replaced": [3], "conformed": 1, "first_loss": None}
    tally = Tally.from_progress(old)
    assert (tally.replaced_in_a_row, tally.skipped_in_a_row, tally.replaced) == (0, 0, {3})


def test_a_resume_on_other_data_of_the_same_name_is_refused_with_both_named(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    data = write_shard(tmp_path / "data.tar", [item for sample in members[:8] for item in sample])
    config = fit_config(data=str(data), max_steps=2)
    assert run_fit(config) == 0
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    data.unlink()
    write_shard(tmp_path / "data.tar", [item for sample in members[4:] for item in sample])
    with pytest.raises(ConfigError, match=r"ledger of another run: index was [0-9a-f]{64} and is now [0-9a-f]{64}"):
        run_fit(dataclasses.replace(config, resume=True, max_steps=4))
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
    data.unlink()
    write_shard(tmp_path / "data.tar", [item for sample in members[:8] for item in sample])
    assert run_fit(dataclasses.replace(config, resume=True, max_steps=4)) == 0


def test_data_that_moved_is_the_same_data(fit_config: MakeConfig, corpus: Path, tmp_path: Path, proven: Proven) -> None:
    moved = tmp_path / "moved" / corpus.name
    moved.parent.mkdir()
    shutil.copy(corpus, moved)
    config = fit_config(max_steps=2)
    assert run_fit(config) == 0
    # The command line refuses another --data; a YAML file that is edited by hand gets this far.
    assert run_fit(dataclasses.replace(config, data=str(moved), resume=True, max_steps=4)) == 0
    assert proven(config).num_steps == 4


def test_a_run_that_is_being_written_is_not_resumed_by_another_process(fit_config: MakeConfig) -> None:
    config = fit_config(max_steps=2)
    assert run_fit(config) == 0
    assert config.output is not None
    with RunLock() as other:
        other.take(config.output)
        with pytest.raises(ConfigError, match=r"another process is writing to the run .* End it, then resume"):
            run_fit(dataclasses.replace(config, resume=True, max_steps=4))
    assert run_fit(dataclasses.replace(config, resume=True, max_steps=4)) == 0


def test_what_the_scan_left_out_is_listed_once_with_its_place(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    broken = [*members[0], members[1][0], ("001.png", b"no picture"), *members[2], *members[7], *members[10]]
    data = str(write_shard(tmp_path / "broken.tar", broken))
    config = fit_config(data=data, bad_records="skip", oversize="drop", capacity_tokens=100, max_steps=1)
    assert run_fit(config) == 0
    lines = bad_lines(config)
    assert [(line["kind"], line["sample_id"], line["key"], line["step"]) for line in lines] == [
        ("scan", 1, "001", None),
        ("oversize", 2, "002", None),
    ]
    assert all(Path(line["shard"]).name == "broken.tar" and line["reason"] for line in lines)
    assert run_fit(dataclasses.replace(config, resume=True, max_steps=2)) == 0
    assert bad_lines(config) == lines


def test_what_was_replaced_is_listed_with_its_step_also_across_a_kill(
    fit_config: MakeConfig, truncated_corpus: Path, killed_after: KilledAfter, consumed: Consumed, proven: Proven
) -> None:
    config = fit_config(data=str(truncated_corpus), max_replaced=1, max_steps=9, checkpoint_interval_steps=2)
    killed_after(config, 5)
    assert run_fit(dataclasses.replace(config, resume=True)) == 0
    steps = [number for number, ids in enumerate(consumed(config), start=1) if 5 in ids]
    assert len(steps) == 3
    found = [(line["kind"], line["sample_id"], line["key"], line["step"]) for line in bad_lines(config)]
    assert found == [("replaced", 5, "005", step) for step in steps]
    assert proven(config).replaced == (5,)


def test_a_sample_over_the_budget_is_listed_before_the_run_stops(
    fit_config: MakeConfig, truncated_corpus: Path, consumed: Consumed
) -> None:
    config = fit_config(data=str(truncated_corpus))
    with pytest.raises(ReplacedBudgetError, match="max_replaced=0"):
        run_fit(config)
    assert [line["sample_id"] for line in bad_lines(config)] == [5]
    # The step did not move the weights, so it was not consumed.
    assert 5 not in set(chain(*consumed(config)))


def test_steps_in_a_row_with_replaced_samples_have_a_budget_of_their_own(
    fit_config: MakeConfig, truncated_corpus: Path
) -> None:
    options = {"data": str(truncated_corpus), "max_replaced": 5, "max_steps": 6}
    assert run_fit(fit_config("spread", **options, max_replaced_consecutive=1)) == 0
    # One step holds everything, so every step has the broken sample.
    config = fit_config("failing", **options, max_replaced_consecutive=2, global_batch_size=12)
    with pytest.raises(ReplacedBudgetError, match=r"step 3: 3 steps in a row .* max_replaced_consecutive=2"):
        run_fit(config)


def test_steps_in_a_row_without_a_label_have_a_budget(
    fit_config: MakeConfig, write_shard: Callable[..., Path], members: Any, tmp_path: Path
) -> None:
    """PK-04."""
    two = str(write_shard(tmp_path / "two.tar", [*members[0], *members[3]]))
    config = fit_config("enough", data=two, global_batch_size=1, max_steps=6, max_skipped_consecutive=2)
    assert run_fit(config) == 0
    with pytest.raises(SkippedBudgetError, match=r"step \d: 1 steps in a row had no label token"):
        run_fit(dataclasses.replace(config, output=tmp_path / "strict", max_skipped_consecutive=0))


def test_counts_in_a_row_outlive_a_resume(
    fit_config: MakeConfig, truncated_corpus: Path, killed_after: KilledAfter
) -> None:
    config = fit_config(
        data=str(truncated_corpus),
        max_replaced=5,
        max_replaced_consecutive=3,
        max_steps=9,
        global_batch_size=12,
        checkpoint_interval_steps=1,
    )
    killed_after(config, 2)
    assert latest_complete(config.output / "checkpoints") is not None  # type: ignore[operator]
    with pytest.raises(ReplacedBudgetError, match="step 4: 4 steps in a row"):
        run_fit(dataclasses.replace(config, resume=True))


def test_a_mode_of_shuffling_may_not_change_in_a_run(fit_config: MakeConfig) -> None:
    config = fit_config(max_steps=2)
    assert run_fit(config) == 0
    with pytest.raises(ConfigError, match="shuffle was full and is now none"):
        run_fit(dataclasses.replace(config, resume=True, shuffle="none", max_steps=4))


def test_json_lines_with_a_folder_of_media_train_too(
    fit_config: MakeConfig, image_bytes: Callable[..., bytes], tmp_path: Path, proven: Proven
) -> None:
    media = tmp_path / "media"
    media.mkdir()
    lines = []
    for number in range(6):
        (media / f"{number}.png").write_bytes(image_bytes(60, 60, seed=number))
        messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": f"Number {number}."}]
        lines.append(json.dumps({"id": str(number), "messages": messages, "images": [f"{number}.png"]}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    config = fit_config(data=str(tmp_path / "data.jsonl"), media_root=str(media), shuffle="block")
    assert run_fit(config) == 0
    report = proven(config)
    assert (report.num_complete, report.num_ids) == (1, 6)
    losses = [record.loss for record in read_records(config.output / "steps.jsonl")]  # type: ignore[operator]
    assert all(loss > 0 for loss in losses)


def test_a_sample_that_hangs_or_kills_its_worker_is_told_from_one_that_does_not_decode(
    fit_config: MakeConfig, tmp_path: Path
) -> None:
    config = fit_config(max_steps=1)
    side = prepare(config, config.data, load_model_source(config.model).processor)
    path = tmp_path / "bad_samples.jsonl"
    reasons = ["timeout: not loaded within 1 s", "lost_worker: died twice", "truncated: ends early"]
    with BadSamples(path, side, finished_steps=0) as bad:
        bad.add(4, [Replaced(sample_id=k, place="", reason=reason) for k, reason in enumerate(reasons)])
    with path.open("a") as file:
        file.write('{"kind": "cut sh')
    with BadSamples(path, side, finished_steps=4) as bad:
        bad.add(5, [])
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["timeout", "lost_worker", "replaced"]
    with BadSamples(path, side, finished_steps=3):
        assert path.read_text() == ""
