"""How steps are selected in training: token budgets, tails, look-ahead, and samples made to fit."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.errors import OversizeError, PlanError  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.ledger import read_lines  # noqa: E402
from balancer.ledger_lines import StepLine  # noqa: E402
from balancer.plan import Capacities  # noqa: E402
from balancer.plan_sequence import PlanSequence  # noqa: E402
from dataloaders.demo import DEMO_PROCESSOR  # noqa: E402
from dataloaders.errors import DataError  # noqa: E402
from tools.verify_command import verify_run  # noqa: E402
from trainer.check_command import build_subject  # noqa: E402
from trainer.config import CheckConfig, FitConfig, PlacementOptions, PlanConfig  # noqa: E402
from trainer.data import notes, prepare  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.fixed_microbatches import least_num_microbatches  # noqa: E402
from trainer.model_source import cost_model_for, load_model_source  # noqa: E402
from trainer.plan_command import run_plan  # noqa: E402

MakeConfig = Callable[..., FitConfig]
Printed = pytest.CaptureFixture[str]


def consumed(config: FitConfig) -> list[list[int]]:
    """Sample ids of every step, from the ledger."""
    assert config.output is not None
    lines = read_lines(config.output / "ledger.jsonl")
    return [[i for rank in line.ids for i in rank] for line in lines if isinstance(line, StepLine)]


def summary(config: FitConfig) -> dict[str, Any]:
    assert config.output is not None
    return dict(json.loads((config.output / "summary.json").read_text()))


def test_a_token_budget_trains_every_sample_once_per_epoch(fit_config: MakeConfig, capsys: Printed) -> None:
    config = fit_config(step_tokens=300, epochs=2)
    assert run_fit(config) == 0
    steps = consumed(config)
    per_epoch = len(steps) // 2
    for epoch in range(2):
        assert sorted(chain.from_iterable(steps[epoch * per_epoch : (epoch + 1) * per_epoch])) == list(range(12))
    assert len({len(ids) for ids in steps}) > 1
    assert f"steps: {len(steps)} ({per_epoch} per epoch)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tail", "sizes", "told"),
    [
        ("pad", [5, 5, 2], "the last step of every epoch holds 2 samples (tail=pad)"),
        ("drop", [5, 5], "2 samples are left out of every epoch (tail=drop)"),
        ("repeat", [5, 5, 5], "3 samples of every epoch come twice, to fill its last step (tail=repeat)"),
    ],
)
def test_the_tail_of_an_epoch_is_what_was_asked_for_and_counted(
    fit_config: MakeConfig, capsys: Printed, tail: str, sizes: list[int], told: str
) -> None:
    config = fit_config(tail=tail, global_batch_size=5)
    assert run_fit(config) == 0
    assert [len(ids) for ids in consumed(config)] == sizes
    out = " ".join(capsys.readouterr().out.split())
    assert f"note: {told}" in out
    assert summary(config)["tail"]["policy"] == tail
    assert (
        sum(summary(config)["tail"][name] for name in ("num_dropped", "num_repeated"))
        == {
            "pad": 0,
            "drop": 2,
            "repeat": 3,
        }[tail]
    )


def test_look_ahead_is_announced_and_trains_every_sample_once(fit_config: MakeConfig, capsys: Printed) -> None:
    plain, ahead = fit_config("plain"), fit_config("ahead", lookahead_steps=3)
    run_fit(plain)
    assert "ITERATION ORDER" not in capsys.readouterr().out
    run_fit(ahead)
    assert capsys.readouterr().out.count("ITERATION ORDER: samples are exchanged inside blocks of 3 steps") == 1
    assert sorted(chain.from_iterable(consumed(ahead))) == list(range(12))
    assert [sorted(ids) for ids in consumed(ahead)] != [sorted(ids) for ids in consumed(plain)]


@pytest.mark.parametrize(
    "options",
    [
        {"step_tokens": 300},
        {"step_tokens": 300, "lookahead_steps": 2},
        {"lookahead_steps": 3, "tail": "drop", "global_batch_size": 5},
        {"lookahead_steps": 2, "tail": "repeat", "global_batch_size": 5},
        {"capacity_tokens": 100, "oversize": "truncate_text", "oversize_rest": "drop"},
        {"capacity_tokens": 70, "oversize": "shrink", "oversize_rest": "drop", "lookahead_steps": 2},
        {"capacity_memory_gib": 0.0037, "oversize": "drop"},
    ],
)
def test_a_proof_selects_again_what_a_run_has_selected(fit_config: MakeConfig, options: dict[str, Any]) -> None:
    config = fit_config(epochs=2, **options)
    run_fit(config)
    assert config.output is not None
    report = verify_run(config.output)
    assert (report.findings, report.notes) == ((), ())
    assert report.num_selected == report.num_steps == len(consumed(config))
    assert (report.num_complete, report.unfinished) == (2, 0)


def test_a_resume_keeps_how_samples_are_selected(fit_config: MakeConfig) -> None:
    run_fit(fit_config(tail="drop"))
    with pytest.raises(ConfigError, match="of another run: tail was drop and is now pad "):
        run_fit(fit_config(resume=True))
    with pytest.raises(
        ConfigError, match=r"lookahead_steps was 1 and is now 2; lookahead_cost was .* and is now \w{64}"
    ):
        run_fit(fit_config(resume=True, tail="drop", lookahead_steps=2))


def test_samples_whose_modelled_bytes_exceed_the_limit_are_listed_or_left_out(fit_config: MakeConfig) -> None:
    with pytest.raises(OversizeError, match=r"sample \d+ .*: \d+ activation_bytes of stage \d > \d+"):
        run_fit(fit_config("strict", capacity_memory_gib=0.0037))
    config = fit_config("lenient", capacity_memory_gib=0.0037, oversize="drop")
    assert run_fit(config) == 0
    left_out = {item["sample_id"] for item in summary(config)["left_out"]}
    assert 0 < len(left_out) < 12
    assert set(chain.from_iterable(consumed(config))) == set(range(12)) - left_out
    with pytest.raises(DataError, match=r"no sample is left of 12.*activation bytes.*--capacity-memory-gib"):
        run_fit(fit_config("none", capacity_memory_gib=0.00303, oversize="drop"))
    with pytest.raises(
        ConfigError, match=r"capacity_memory_gib=1e-06 holds no sample: .* takes 0.00302 GiB on stage 1"
    ):
        run_fit(fit_config("less", capacity_memory_gib=1e-6, oversize="drop"))


def test_a_limit_on_bytes_holds_in_every_micro_batch(fit_config: MakeConfig) -> None:
    loose = fit_config("loose", capacity_tokens=2000)
    tight = fit_config("tight", capacity_tokens=2000, capacity_memory_gib=0.0039)
    numbers = []
    for config in (loose, tight):
        run_fit(config)
        numbers.append(sum(record["num_microbatches"] for record in _records(config)))
    assert numbers[1] > numbers[0]


def test_plan_and_check_take_the_limit_on_bytes(
    cache: Path, corpus: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    fixed: dict[str, Any] = {"model": "check", "data": str(corpus), "cache_dir": cache, "oversize": "drop"}
    run_plan(PlanConfig(**fixed, eval_share=0.0, capacity_memory_gib=0.0037))
    assert "sample 2: oversize: 830080 activation_bytes of stage 1 > " in capsys.readouterr().out
    subject = build_subject(CheckConfig(**fixed, capacity_memory_gib=0.0037))
    assert subject.plans.ids.tolist() == [i for i in range(12) if i != 2]


def test_a_cost_model_that_knows_no_bytes_is_refused_for_a_limit_on_them(
    fit_config: MakeConfig, tmp_path: Path
) -> None:
    costs = tmp_path / "cost.json"
    model = cost_model_for(load_model_source("check").config, Layout())
    costs.write_text(replace(model, memory=None).to_json())
    with pytest.raises(ConfigError, match=r"--capacity-memory-gib 1 needs modelled bytes, and --cost-model .* no mem"):
        run_fit(fit_config(cost_model=costs, capacity_memory_gib=1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"step_tokens": 0}, "step_tokens=0: a whole number of at least 1"),
        ({"lookahead_steps": 0}, "lookahead_steps=0: a whole number of at least 1"),
        ({"tail": "wrap"}, "tail='wrap' is not one of: pad, drop, repeat"),
        ({"oversize": "squeeze"}, "oversize='squeeze' is not one of: error, drop, shrink, truncate_text"),
        ({"step_tokens": 9, "tail": "drop"}, "step_tokens=9 and tail='drop' do not go together"),
        ({"mixture": Path("m.yaml"), "lookahead_steps": 2}, "lookahead_steps=2: not with a mixture"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FitConfig(**options)
    assert told in str(caught.value)


def test_a_budget_too_small_for_the_samples_is_refused_with_the_remedy(fit_config: MakeConfig) -> None:
    with pytest.raises(PlanError, match="every step holds at least one: raise step_tokens to"):
        run_fit(fit_config(step_tokens=3))


def test_a_fixed_number_of_micro_batches_that_does_not_fit_stops_before_step_one(fit_config: MakeConfig) -> None:
    config = fit_config(num_microbatches=1, global_batch_size=12)
    with pytest.raises(PlanError, match=r"num_microbatches=1 does not hold step 1: .* hold at most 230; it may fit"):
        run_fit(config)
    assert config.output is not None
    assert not config.output.exists()


@pytest.mark.parametrize("policy", ["joint", "sequential"])
def test_a_fixed_number_of_micro_batches_that_does_not_fit_names_the_least_that_does(
    fit_config: MakeConfig, policy: str
) -> None:
    limits: dict[str, Any] = {"global_batch_size": 6, "capacity_tokens": 130, "oversize": "drop", "policy": policy}
    with pytest.raises(PlanError, match=r"The least that holds all 4 steps of the run is --num-microbatches") as told:
        run_fit(fit_config("one", num_microbatches=1, epochs=2, **limits))
    least = int(str(told.value).rpartition(" ")[2])
    assert least > 2
    with pytest.raises(PlanError, match=f"--num-microbatches {least}$"):
        run_fit(fit_config("less", num_microbatches=least - 1, epochs=2, **limits))
    assert run_fit(fit_config("enough", num_microbatches=least, epochs=2, **limits)) == 0


def test_a_step_that_no_number_holds_names_none(fit_config: MakeConfig) -> None:
    side = prepare(fit_config(), fit_config().data, DEMO_PROCESSOR)
    plans = PlanSequence(
        index=side.index,
        ids=np.arange(12),
        global_batch_size=4,
        layout=Layout(),
        cost_model=cost_model_for(load_model_source("check").config, Layout()),
        capacities=Capacities(tokens=20),
        num_microbatches=1,
    )
    assert least_num_microbatches(plans, range(3)) == 0


def test_long_texts_are_cut_and_trained_and_counted(fit_config: MakeConfig, capsys: Printed) -> None:
    limits: dict[str, Any] = {"capacity_tokens": 100, "oversize": "truncate_text", "oversize_rest": "drop"}
    config = fit_config(**limits)
    assert run_fit(config) == 0
    found = summary(config)["oversize"]
    assert found["num_adjusted"] >= 1
    assert found["tokens_in"] == found["tokens_kept"] + found["tokens_cut"] + found["tokens_dropped"]
    assert len(summary(config)["left_out"]) == found["num_left"]
    assert sorted(chain.from_iterable(consumed(config))) == sorted(
        set(range(12)) - {item["sample_id"] for item in summary(config)["left_out"]}
    )
    out = capsys.readouterr().out
    assert f"{found['num_adjusted']} were cut to fit" in out
    assert "made to fit" in out


def test_large_media_are_shrunk_and_trained(fit_config: MakeConfig, cache: Path, corpus: Path) -> None:
    limits: dict[str, Any] = {"capacity_tokens": 70, "oversize": "shrink", "oversize_rest": "drop"}
    config = fit_config(**limits)
    assert run_fit(config) == 0
    options = PlacementOptions(cache_dir=cache, **limits)
    side = prepare(options, str(corpus), DEMO_PROCESSOR)
    assert side.oversize is not None
    adjusted = [i for i in range(12) if side.index.adjustment(i) is not None]
    trained = [*chain.from_iterable(consumed(config))]
    assert set(adjusted) <= set(trained)
    assert (np.asarray(side.index.samples["llm_tokens"])[trained] <= 70).all()
    assert not any(record["replaced"] for record in _records(config))


def _records(config: FitConfig) -> list[dict[str, Any]]:
    assert config.output is not None
    return [json.loads(line) for line in (config.output / "steps.jsonl").read_text().splitlines()]


def test_what_cannot_be_made_to_fit_stops_the_run_unless_it_may_be_dropped(cache: Path, corpus: Path) -> None:
    strict = PlacementOptions(cache_dir=cache, capacity_tokens=70, oversize="shrink")
    with pytest.raises(OversizeError, match=r"text alone needs \d+ tokens > 70"):
        prepare(strict, str(corpus), DEMO_PROCESSOR)
    lenient = PlacementOptions(cache_dir=cache, capacity_tokens=70, oversize="shrink", oversize_rest="drop")
    side = prepare(lenient, str(corpus), DEMO_PROCESSOR)
    assert any("text alone needs" in drop.reason for drop in side.dropped)
    assert any("were shrunk to fit" in note for note in notes(side))


def test_the_plan_command_tells_budget_tail_and_what_was_cut(
    cache: Path, corpus: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    fixed: dict[str, Any] = {"model": "check", "data": str(corpus), "cache_dir": cache, "eval_share": 0.0}
    run_plan(PlanConfig(**fixed, step_tokens=400, lookahead_steps=2))
    out = capsys.readouterr().out
    assert "steps of about 400 tokens" in out
    assert "note: ITERATION ORDER" in out
    run_plan(PlanConfig(**fixed, global_batch_size=5, tail="repeat"))
    assert "3 samples of every epoch come twice" in capsys.readouterr().out
    cut: dict[str, Any] = {"capacity_tokens": 100, "oversize": "truncate_text", "oversize_rest": "drop"}
    run_plan(PlanConfig(**fixed, **cut))
    assert "were cut to fit" in capsys.readouterr().out
    run_plan(PlanConfig(**fixed, **cut, show_sample=2))
    assert "100 LLM tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-h1"},
        {"schedule": "interleaved1f1b", "encoder": "shared", "num_chunks": 2, "num_microbatches": 4},
        {"schedule": "nested", "encoder": "spread", "num_microbatches": 4},
        {"schedule": "phased", "encoder": "spread", "num_microbatches": 4},
    ],
)
def test_schedules_that_training_does_not_run_yet_can_be_planned(
    cache: Path, corpus: Path, capsys: Printed, options: dict[str, Any]
) -> None:
    fixed: dict[str, Any] = {"model": "demo", "data": str(corpus), "cache_dir": cache, "eval_share": 0.0}
    assert run_plan(PlanConfig(**fixed, pp_size=2, global_batch_size=12, **options)) == 0
    assert "makespan / lower bound" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=f"schedule='{options['schedule']}' is not one of: 1f1b, gpipe"):
        FitConfig(schedule=options["schedule"])


def test_a_measured_cost_model_is_not_taken_for_other_stages(cache: Path, corpus: Path) -> None:
    fixed: dict[str, Any] = {"model": "demo", "data": str(corpus), "cache_dir": cache, "eval_share": 0.0}
    with pytest.raises(ConfigError, match=r"cost.json was measured on stages of another layout than encoder=shared"):
        run_plan(PlanConfig(**fixed, pp_size=2, encoder="shared", cost_model=Path("cost.json")))
