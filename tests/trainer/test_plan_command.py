"""`balancer-train plan`: what it announces is what training does, and a sample is shown as the model sees it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import dataloaders.sample  # noqa: E402
from balancer.errors import OversizeError  # noqa: E402
from balancer.records import read_records  # noqa: E402
from trainer.config import FitConfig, PlanConfig  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.plan_command import run_plan  # noqa: E402

Printed = pytest.CaptureFixture[str]


@pytest.fixture
def plan_config(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanConfig]:
    """`plan_config(**options)`, printed on lines that are wide enough to be read by a test."""
    monkeypatch.setenv("COLUMNS", "200")

    def make(**options: Any) -> PlanConfig:
        fixed = {"model": "check", "data": str(corpus), "cache_dir": cache, "global_batch_size": 4}
        return PlanConfig(**{**fixed, "capacity_tokens": 230, "eval_share": 0.25, **options})

    return make


def test_statistics_name_samples_steps_balance_and_the_slowest_step(
    plan_config: Callable[..., PlanConfig], capsys: Printed
) -> None:
    assert run_plan(plan_config(dp_size=2, epochs=2)) == 0
    out = capsys.readouterr().out
    assert "12 samples: 9 to train, 3 held out" in out
    assert "6 steps of 4 samples (3 per epoch), 2 replicas x 1 pipeline ranks, policy joint; 3 of them planned" in out
    for row in (
        "llm tokens",
        "label tokens",
        "imbalance over ranks, planned",
        "makespan / lower bound",
        "fill of used",
    ):
        assert row in out
    assert "slowest step: " in out


def test_what_is_planned_is_what_training_does(
    plan_config: Callable[..., PlanConfig], fit_config: Callable[..., FitConfig], capsys: Printed
) -> None:
    config = fit_config(eval_share=0.25)
    run_fit(config)
    capsys.readouterr()
    run_plan(plan_config())
    out = capsys.readouterr().out
    records = read_records(config.output / "steps.jsonl")  # type: ignore[operator]
    assert f"{len(records)} steps of 4 samples" in out
    counts = sorted(record.num_microbatches for record in records)
    (row,) = [line for line in out.splitlines() if "micro-batches per rank" in line]
    assert row.split("│")[2].strip() == f"{counts[len(counts) // 2]}"
    assert row.split("│")[3].strip() == f"{counts[-1]}"


def test_planning_decodes_no_pixel_and_no_media(
    plan_config: Callable[..., PlanConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a pixel was decoded")

    monkeypatch.setattr(dataloaders.sample, "decode_media", refuse)
    assert run_plan(plan_config(pp_size=3)) == 0
    assert run_plan(plan_config(show_sample=4)) == 0


def test_a_shown_sample_names_its_place_media_and_trained_text(
    plan_config: Callable[..., PlanConfig], capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_plan(plan_config(show_sample=4)) == 0
    out = capsys.readouterr().out
    assert "good.tar" in out
    assert "004" in out
    assert "medium 0: 60 x 90 px" in out
    assert "medium 1: 120 x 60 px" in out
    assert "labels (train_on=assistant) are underlined" in out
    assert out.count("visual tokens]") == 2
    assert "The second." in out


def test_only_what_is_trained_is_underlined() -> None:
    from dataloaders.chat import encode_record
    from dataloaders.record import Record, TextPart, Turn
    from trainer.plan_command import _marked

    turns = (Turn(role="user", parts=(TextPart("asked"),)), Turn(role="assistant", parts=(TextPart("answer"),)))
    encoded = encode_record(Record(shard="s", key="k", turns=turns, media=()), [])
    text = _marked(encoded.tokens.tolist(), encoded.labels.tolist())
    underlined = "".join(text.plain[span.start : span.end] for span in text.spans if span.style == "underline")
    assert underlined.startswith("answer")
    assert "asked" not in underlined
    assert "assistant" not in underlined


def test_a_sample_that_does_not_exist_is_refused_with_the_range(plan_config: Callable[..., PlanConfig]) -> None:
    with pytest.raises(ConfigError, match="show_sample=12: the index has samples 0 to 11"):
        run_plan(plan_config(show_sample=12))


def test_samples_left_out_are_listed(plan_config: Callable[..., PlanConfig], capsys: Printed) -> None:
    with pytest.raises(OversizeError, match="exceed the capacity"):
        run_plan(plan_config(capacity_tokens=100))
    assert run_plan(plan_config(capacity_tokens=100, oversize="drop")) == 0
    out = capsys.readouterr().out
    assert "samples left out:" in out
    assert "  sample 2: oversize: " in out


def test_an_unusable_sample_can_still_be_asked_for(
    plan_config: Callable[..., PlanConfig],
    write_shard: Callable[..., Path],
    members: Any,
    tmp_path: Path,
    capsys: Printed,
) -> None:
    broken = [*members[0], members[1][0], ("001.png", b"no picture")]
    config = plan_config(data=str(write_shard(tmp_path / "b.tar", broken)), bad_records="skip", show_sample=1)
    with pytest.raises(ConfigError, match=r"sample 1 cannot be used: .*b\.tar, key 001"):
        run_plan(config)


def test_a_sample_with_text_like_markup_is_printed_as_it_is(
    plan_config: Callable[..., PlanConfig],
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
    tmp_path: Path,
    capsys: Printed,
) -> None:
    shard = write_shard(tmp_path / "m.tar", [("[/a].json", chat_json("[bold]x[/bold]?", "[/red]"))])
    assert run_plan(plan_config(data=str(shard), show_sample=0)) == 0
    out = capsys.readouterr().out
    assert "[bold]x[/bold]?" in out
    assert "[/red]" in out


@pytest.mark.parametrize("shape", [{"dp_size": 4}, {"pp_size": 2}, {"dp_size": 2, "pp_size": 3}])
def test_any_layout_can_be_planned_for_in_one_process(
    plan_config: Callable[..., PlanConfig], shape: dict[str, int], capsys: Printed
) -> None:
    assert run_plan(plan_config(plan_steps=1, **shape)) == 0
    out = capsys.readouterr().out
    assert f"{shape.get('dp_size', 1)} replicas x {shape.get('pp_size', 1)} pipeline ranks" in out
    assert "1 of them planned below" in out
