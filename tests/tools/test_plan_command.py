"""`balancer-analyze plan`: what it says is what the planner does, on small indices made on the spot."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel
from balancer.counts import StepCounts
from balancer.layout import Layout, ParallelSpec
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.policies import policy_names
from balancer.schedule import build_schedule, schedule_names
from balancer.simulate import peak_live
from dataloaders.index import CostIndex
from tools.cli import main
from tools.errors import UsageError
from tools.plan_before import sampled
from tools.plan_command import PlanCommand
from tools.plan_inputs import prepare
from tools.plan_measure import peaks
from tools.plan_report import sampled_of

Capture = pytest.CaptureFixture[str]
Folder = Callable[..., str]

QUICK = ("--steps", "2", "--what-if-steps", "0", "--policies", "sequential", "lpt")


def _planned(capsys: Capture, *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def _kinds(report: dict[str, Any]) -> list[str]:
    return [limit["kind"] for limit in report["limits"]]


def _limit(report: dict[str, Any], kind: str) -> str:
    (text,) = [limit["text"] for limit in report["limits"] if limit["kind"] == kind]
    return str(text)


def test_the_report_is_that_of_the_planner(mixed: str, model: str, capsys: Capture) -> None:
    options = ["--dp", "2", "--pp", "3", "--global-batch-size", "16", "--capacity-tokens", "1024", "--seed", "5"]
    report = _planned(capsys, mixed, "--model", model, *options, *QUICK)
    parallel = ParallelSpec.pipeline(dp_size=2, pp_size=3)
    index = CostIndex.open(mixed)
    plans = PlanSequence(
        index=index,
        ids=np.arange(len(index)),
        global_batch_size=16,
        layout=Layout(),
        parallel=parallel,
        cost_model=CostModel.from_config(model, parallel),
        capacities=Capacities(tokens=1024, patches=4096),
        seed=5,
    )
    assert report["steps"] == [1, 3]
    assert report["steps_per_epoch"] == 4
    for policy in report["policies"]:
        made = [plans.plan(step, policy=policy["policy"]) for step in report["steps"]]
        spans = [plan.makespan_ns for plan in made]
        assert policy["step_ms"]["mean"] == pytest.approx(sum(spans) / 2e6)
        assert policy["step_ms"]["max"] == pytest.approx(max(spans) / 1e6)
        assert policy["relative_time"] == pytest.approx(sum(spans) / sum(plan.makespan_before_ns for plan in made))
        assert policy["ratio_to_bound"] == pytest.approx(sum(spans) / sum(plan.lower_bound_ns for plan in made))
        assert policy["imbalance_after"] == pytest.approx(sum(plan.imbalance_after for plan in made) / 2)
        assert policy["label_imbalance_after"] == pytest.approx(sum(plan.label_imbalance_after for plan in made) / 2)
        assert policy["num_microbatches"] == [
            min(p.num_microbatches for p in made),
            max(p.num_microbatches for p in made),
        ]
        assert sum(policy["binding"].values()) == sum(policy["bounds"].values()) == 2


def test_idle_time_by_kind_adds_up_to_the_bubble(mixed: str, model: str, capsys: Capture) -> None:
    for meet in ("step", "microbatch", "unit"):
        report = _planned(capsys, mixed, "--model", model, "--dp", "4", "--pp", "2", "--meet", meet, *QUICK)
        for policy in report["policies"]:
            assert sum(policy["bubbles"].values()) == pytest.approx(policy["bubble_ratio"], abs=1e-9)
            assert policy["bubbles"]["meeting"] >= 0
        sequential = report["policies"][0]
        assert (sequential["bubbles"]["meeting"] > 0.001) == (meet != "step")


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(schedule_names()),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_peaks_of_all_replicas_are_those_of_the_simulator(
    name: str, num_ranks: int, num_microbatches: int, seed: int
) -> None:
    head = (-1,) if name in ("nested", "phased") else ()
    chunks = 2 if name == "interleaved1f1b" and num_microbatches % num_ranks == 0 else 1
    stage_ranks = (*head, *(tuple(range(num_ranks)) * chunks))
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    sizes = np.random.default_rng(seed).integers(0, 50, size=(3, num_microbatches, len(stage_ranks)))
    expected = np.max([peak_live(schedule, weights=replica.T) for replica in sizes], axis=0)
    assert peaks(schedule, sizes).tolist() == expected.tolist()


def test_the_memory_of_a_nested_encoder_is_below_that_of_a_phased_one(mixed: str, model: str, capsys: Capture) -> None:
    options = ["--dp", "1", "--pp", "2", "--encoder", "spread", "--num-microbatches", "16", "--global-batch-size", "64"]
    nested = _planned(capsys, mixed, "--model", model, *options, *QUICK)
    phased = _planned(capsys, mixed, "--model", model, *options, "--schedule", "phased", *QUICK)
    assert nested["layout"]["schedule"] == "nested"
    first, second = (
        max(rank["peak_activation_bytes"] for rank in report["layout"]["ranks"]) for report in (nested, phased)
    )
    assert first < second


def test_all_policies_are_compared_and_sequential_is_the_base(mixed: str, model: str, capsys: Capture) -> None:
    report = _planned(capsys, mixed, "--model", model, "--dp", "4", "--steps", "2", "--what-if-steps", "0")
    assert {policy["policy"] for policy in report["policies"]} == set(policy_names())
    assert report["policies"][0]["policy"] == "sequential"
    assert report["policies"][0]["relative_time"] == 1.0
    assert all(policy["ratio_to_bound"] >= 1 for policy in report["policies"])
    assert report["main_policy"] == report["policies"][-1]["policy"]
    assert report["policies"][-1]["relative_time"] < 1


def test_the_same_command_gives_the_same_text_and_no_torch(mixed: str, model: str, capsys: Capture) -> None:
    had_torch = "torch" in sys.modules
    argv = ["plan", mixed, "--model", model, "--dp", "2", "--pp", "2", "--steps", "3"]
    said = []
    for form in ([], [], ["--json"], ["--json"]):
        assert main([*argv, *form]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        said.append(printed.out)
    assert said[0] == said[1]
    assert said[2] == said[3]
    assert "\x1b" not in said[0]
    assert max(map(len, said[0].splitlines())) < 400
    assert ("torch" in sys.modules) == had_torch


def test_the_tables_say_what_the_json_says(mixed: str, model: str, capsys: Capture) -> None:
    argv = [mixed, "--model", model, "--dp", "2", "--pp", "3", "--steps", "2"]
    report = _planned(capsys, *argv)
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert "64 samples, 64 planned, 0 left out" in text
    assert "on 2 replicas x 3 pipeline ranks: encoder own, schedule 1f1b, replicas meet per step" in text
    assert "2 of 2 steps were planned, of 32 samples and " in text
    assert "asked for 32" not in text
    assert "nominal: only their ratios mean something" in text
    assert "│    0 │ encoder │" in text
    for policy in report["policies"]:
        assert f"{policy['ratio_to_bound']:.3f}" in text
        assert f"{policy['imbalance_before']:.2f} -> {policy['imbalance_after']:.2f}" in text
    assert all(limit["text"] in text for limit in report["limits"])
    assert "Where it does not help:" in text


# ---------------------------------------------------------------------------------------------- what does not help


def test_equal_samples_leave_nothing_to_gain(folder: Folder, model: str, capsys: Capture) -> None:
    report = _planned(capsys, folder([100] * 32), "--model", model, "--dp", "2", *QUICK)
    assert _limit(report, "nothing to gain").startswith("nothing to gain: sequential is within 0.0% of the lower bound")
    assert "imbalance over replicas is 1.00" in _limit(report, "nothing to gain")


def test_an_uneven_stage_split_is_named_with_what_another_layout_would_do(
    folder: Folder, model: str, capsys: Capture
) -> None:
    index = folder([300] * 64, [1200] * 64)
    argv = [index, "--model", model, "--dp", "2", "--pp", "4", "--encoder", "shared", "--num-microbatches", "16"]
    report = _planned(capsys, *argv, "--global-batch-size", "32", "--steps", "2", "--policies", "sequential", "lpt")
    said = _limit(report, "stage split")
    assert said.startswith("stage split binds in 2 of 2 steps: pipeline rank 0 (encoder + llm) has ")
    ranks = report["layout"]["ranks"]
    assert f"has {ranks[0]['relative_work']:.2f}x the mean work" in said
    assert sum(rank["work_share"] for rank in ranks) == pytest.approx(1)
    best = min(report["what_if"], key=lambda other: other["relative_time"])
    assert best["encoder"] == "spread"
    assert best["relative_time"] < 0.9
    assert said.endswith(
        f"--encoder spread --schedule nested would take {best['relative_time']:.2f}x (planned and simulated; training "
        "does not execute it yet)"
    )
    assert "stage split" not in _kinds(_planned(capsys, *argv, "--encoder", "spread", "--steps", "2"))


def test_a_measured_cost_model_names_no_layout_that_it_cannot_cost(
    folder: Folder, model: str, tmp_path: Path, capsys: Capture
) -> None:
    costs = CostModel.from_config(model, ParallelSpec.pipeline(pp_size=2), "h100")
    (tmp_path / "cost.json").write_text(costs.to_json(), encoding="utf-8")
    argv = [folder([100] * 64, [4000] * 64), "--cost-model", str(tmp_path / "cost.json"), "--pp", "2", "--steps", "1"]
    report = _planned(capsys, *argv)
    assert {other["encoder"] for other in report["what_if"]} == {"own"}
    assert "--layers-per-stage" in _limit(report, "stage split")
    assert report["layout"]["absolute_times"]
    assert main(["plan", *argv]) == 0
    assert "step times are predicted from measured costs" in capsys.readouterr().out


def test_the_largest_sample_is_named_with_its_key(folder: Folder, model: str, capsys: Capture) -> None:
    tokens = [50] * 31 + [4000]
    names = [f"k{i}" for i in range(31)] + ["the\x1b[2J[red]giant\n"]
    index = folder(tokens, names=names)
    argv = [index, "--model", model, "--dp", "4", "--global-batch-size", "32", "--steps", "1"]
    report = _planned(capsys, *argv)
    said = _limit(report, "largest sample")
    assert said.startswith("the largest sample binds in 1 of 1 steps; alone it is up to ")
    assert r"sample 31, shard a.tar, key the\x1b[2J[red]giant\n: 4,000 tokens, 0 patches" in said
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert r"key the\x1b[2J[red]giant\n: 4,000 tokens" in text
    assert "\x1b" not in text


def test_full_microbatches_decide_their_number(folder: Folder, model: str, capsys: Capture) -> None:
    argv = ["--model", model, "--dp", "2", "--capacity-tokens", "1000", "--global-batch-size", "32", *QUICK]
    index = folder([500 - i % 7 for i in range(64)])
    said = _limit(_planned(capsys, index, *argv), "capacity")
    assert said.startswith("capacity in tokens, not time, decides M = 8")
    assert "full of tokens; a larger capacity or more micro-batches (--min-num-microbatches)" in said
    fixed = _limit(_planned(capsys, index, *argv, "--num-microbatches", "8"), "capacity")
    assert fixed.startswith("M = 8 leaves little to choose")
    assert "capacity" not in _kinds(_planned(capsys, index, *argv, "--min-num-microbatches", "16"))


def test_too_few_microbatches_leave_a_pipeline_empty(mixed: str, model: str, capsys: Capture) -> None:
    argv = [mixed, "--model", model, "--pp", "4", "--capacity-tokens", "16384", *QUICK]
    said = _limit(_planned(capsys, *argv), "pipeline fill")
    assert "M = 1 on 4 pipeline ranks, which placement does not change; a larger step with M = 16 or more" in said
    simulated = _planned(capsys, *argv, "--what-if-steps", "2")
    (more,) = [other for other in simulated["what_if"] if other["min_num_microbatches"] == 16]
    assert more["num_microbatches"] == [16, 16]
    assert more["relative_time"] < 0.9
    assert f"--min-num-microbatches 16 would take {more['relative_time']:.2f}x (simulated)" in _limit(
        simulated, "pipeline fill"
    )
    full = _planned(capsys, *argv, "--num-microbatches", "32", "--global-batch-size", "64")
    assert "pipeline fill" not in _kinds(full)


def test_fewer_samples_than_replicas_leave_some_idle(mixed: str, model: str, capsys: Capture) -> None:
    report = _planned(
        capsys, mixed, "--model", model, "--dp", "8", "--global-batch-size", "6", "--steps", "3", *QUICK[2:]
    )
    assert _limit(report, "idle replicas").startswith("3 of 3 steps hold fewer samples (6) than there are replicas (8)")


def test_steps_that_differ_are_not_evened_by_placement_but_by_lookahead(
    folder: Folder, model: str, capsys: Capture
) -> None:
    index = folder([3000 if i % 5 == 0 else 30 for i in range(80)])
    argv = [index, "--model", model, "--dp", "2", "--global-batch-size", "8", "--steps", "10", *QUICK[2:]]
    report = _planned(capsys, *argv)
    assert "--lookahead-steps 4" in _limit(report, "uneven steps")
    ahead = _planned(capsys, *argv, "--lookahead", "10")
    spread = [r["policies"][-1]["step_ms"]["p99"] / r["policies"][-1]["step_ms"]["p50"] for r in (report, ahead)]
    assert spread[1] < spread[0]
    assert any("ITERATION ORDER" in note for note in ahead["notes"])


def test_where_nothing_was_found_it_says_so(mixed: str, model: str, capsys: Capture) -> None:
    argv = [mixed, "--model", model, "--dp", "4", "--capacity-tokens", "4096", "--global-batch-size", "64"]
    report = _planned(capsys, *argv)
    assert report["limits"] == []
    assert main(["plan", *argv]) == 0
    assert "no limit beside the placement of samples was found" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- what if


def test_other_layouts_are_simulated_on_the_same_steps(mixed: str, model: str, capsys: Capture) -> None:
    argv = [mixed, "--model", model, "--dp", "2", "--pp", "2", "--steps", "2", "--num-microbatches", "4"]
    own = _planned(capsys, *argv)
    assert [(other["encoder"], other["schedule"], other["chosen"]) for other in own["what_if"]] == [
        ("own", "1f1b", True),
        ("shared", "1f1b", False),
        ("spread", "phased", False),
        ("spread", "nested", False),
    ]
    shared = _planned(capsys, *argv, "--encoder", "shared")
    ratio = shared["policies"][-1]["step_ms"]["mean"] / own["policies"][-1]["step_ms"]["mean"]
    assert own["what_if_steps"] == 2
    assert own["what_if"][1]["relative_time"] == pytest.approx(ratio)


def test_a_text_model_compares_schedules_and_one_rank_nothing(folder: Folder, capsys: Capture) -> None:
    index = folder([100, 200] * 32)
    report = _planned(capsys, index, "--model", "qwen2.5-7b", "--pp", "2", "--steps", "1")
    assert report["layout"]["encoder"] == "none"
    assert [other["schedule"] for other in report["what_if"]] == ["1f1b", "gpipe", "zb-h1", "1f1b"]
    assert report["what_if"][-1]["min_num_microbatches"] == 8
    alone = _planned(capsys, index, "--model", "qwen2.5-7b", "--steps", "1")
    assert alone["what_if"] == []
    assert alone["what_if_steps"] == 0


def test_a_layout_that_cannot_run_says_why(folder: Folder, model: str, capsys: Capture) -> None:
    index = folder([1000] * 16)
    counts = StepCounts.from_index(CostIndex.open(index), [0])
    # Three LLM ranks have three layers each where four have two: an activation limit between them.
    own, shared = (
        int(
            CostModel.from_config(model, ParallelSpec.pipeline(pp_size=4, encoder=place)).activation_bytes(counts).max()
        )
        for place in ("own", "shared")
    )
    limit = ["--memory-gib", str((own + shared) / 2 / 2**30)]
    argv = [index, "--model", model, "--pp", "4", "--encoder", "shared", "--steps", "1", *limit]
    report = _planned(capsys, *argv)
    (failed,) = [other for other in report["what_if"] if other["error"]]
    assert (failed["encoder"], failed["relative_time"]) == ("own", None)
    assert failed["error"].startswith("samples larger than the capacity of ")
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert "cannot run" in text
    assert f"own 1f1b: {failed['error']}" in text


# ------------------------------------------------------------------------------------------------- samples left out


def test_samples_left_out_are_counted_and_listed(folder: Folder, model: str, capsys: Capture) -> None:
    index = folder([100] * 20 + [5000, 100, 100], bad=2, names=[f"k{i}" for i in range(22)] + ["bad\nname"])
    argv = [index, "--model", model, *QUICK]
    report = _planned(capsys, *argv)
    assert (report["data"]["num_samples"], report["data"]["num_planned"]) == (23, 20)
    assert report["data"]["reasons"] == {"unusable: corrupt": 2, "oversize": 1}
    assert [drop["sample_id"] for drop in report["data"]["left_out"]] == [20, 21, 22]
    assert any(note.startswith("1 samples are larger than a micro-batch") for note in report["notes"])
    assert main(["plan", *argv]) == 0
    text = capsys.readouterr().out
    assert "sample 20, shard a.tar, key k20: oversize: 5000 tokens > 4096" in text
    assert r"sample 22, shard a.tar, key bad\nname: unusable: corrupt" in text


def test_a_long_list_of_samples_left_out_is_cut_and_says_so(folder: Folder, model: str, capsys: Capture) -> None:
    index = folder([100] * 8 + [5000] * 30)
    assert main(["plan", index, "--model", model, *QUICK]) == 0
    assert "and 10 more; --json lists all" in capsys.readouterr().out


def test_oversize_error_stops_and_lists_them(folder: Folder, model: str, capsys: Capture) -> None:
    argv = ["plan", folder([100] * 8 + [5000]), "--model", model, "--oversize", "error"]
    assert main(argv) == 1
    assert "sample 8 (shard a.tar, key k8): 5000 tokens > 4096" in capsys.readouterr().err


def test_without_any_sample_left_it_fails(folder: Folder, model: str, capsys: Capture) -> None:
    assert main(["plan", folder([100] * 4), "--model", model, "--capacity-tokens", "50"]) == 1
    assert (
        "no sample of 4 is left to plan: the first is left out as oversize: 100 tokens > 50" in capsys.readouterr().err
    )


def test_data_are_scanned_and_large_samples_made_to_fit(
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
    image_bytes: Callable[..., bytes],
    model: str,
    capsys: Capture,
) -> None:
    members = [("0.json", chat_json("<image>What?", "A wall.")), ("0.png", image_bytes(640, 480))]
    members += [("1.json", chat_json("What?", "A very long answer. " * 20)), ("2.json", chat_json("1?", "2."))]
    shard = write_shard(Path(model).parent / "data.tar", members)
    argv = [str(shard), "--model", model, "--text", "bytes", "--train-on", "all", *QUICK, "--capacity-tokens"]
    assert _planned(capsys, *argv, "1000")["data"]["num_planned"] == 3
    assert _planned(capsys, *argv, "200")["data"]["num_planned"] == 1
    for policy, word, left in (("shrink", "shrunk", 1), ("truncate_text", "cut", 0)):
        fitted = _planned(capsys, *argv, "200", "--oversize", policy)
        assert [drop["sample_id"] for drop in fitted["data"]["left_out"]] == [left]
        assert any(f"1 were {word} to fit" in note for note in fitted["notes"])
        assert fitted["data"]["counts"]["llm_tokens"]["max"] <= 200


def test_an_index_has_no_text_to_cut_and_its_own_processor(folder: Folder, model: str, capsys: Capture) -> None:
    index = folder([100] * 8 + [5000])
    assert main(["plan", index, "--model", model, "--oversize", "truncate_text"]) == 2
    assert "an index has none: name the data in its place" in capsys.readouterr().err
    assert main(["plan", index, "--model", model, "--oversize", "shrink"]) == 2
    assert "--processor FOLDER" in capsys.readouterr().err


def test_media_without_an_encoder_are_noted(mixed: str, capsys: Capture) -> None:
    report = _planned(capsys, mixed, "--model", "qwen2.5-7b", *QUICK)
    assert "22 samples hold media, and no encoder is planned: only their tokens in the LLM cost time" in report["notes"]


# ------------------------------------------------------------------------------------------------------- options

Check = Callable[[dict[str, Any]], bool]
CHANGES: dict[str, tuple[list[str], Check]] = {
    "hardware": (["--hardware", "h100"], lambda r: r["layout"]["absolute_times"] is True),
    "frozen": (["--frozen", "encoder"], lambda r: r["layout"]["ranks"][0]["work_share"] < 0.2),
    "recompute": (["--recompute", "all"], lambda r: r["layout"]["ranks"][0]["peak_activation_bytes"] > 0),
    "lora_rank": (["--lora-rank", "4"], lambda r: True),
    "layers_per_stage": (["--layers-per-stage", "8"], lambda r: True),
    "dp_size": (["--dp-size", "4"], lambda r: r["layout"]["dp_size"] == 4 and r["step_size"] == "64 samples"),
    "pp_size": (["--pp-size", "3"], lambda r: len(r["layout"]["ranks"]) == 3),
    "encoder": (["--encoder", "shared"], lambda r: r["layout"]["ranks"][0]["stages"] == ["encoder", "llm 0"]),
    "num_chunks": (
        ["--num-chunks", "2", "--encoder", "shared"],
        lambda r: (
            r["layout"]["ranks"][1]["stages"] == ["llm 1", "llm 3"] and r["layout"]["schedule"] == "interleaved1f1b"
        ),
    ),
    "schedule": (["--schedule", "ZB-H1"], lambda r: r["layout"]["schedule"] == "zb-h1"),
    "meet": (["--meet", "microbatch"], lambda r: r["layout"]["meet"] == "microbatch"),
    "global_batch_size": (["--global-batch-size", "8"], lambda r: r["steps_per_epoch"] == 8),
    "step_tokens": (["--step-tokens", "4000"], lambda r: r["step_size"] == "about 4,000 tokens"),
    "tail": (
        ["--tail", "drop", "--global-batch-size", "60"],
        lambda r: r["steps_per_epoch"] == 1 and any("tail=drop" in note for note in r["notes"]),
    ),
    "lookahead_steps": (["--lookahead-steps", "2"], lambda r: any("look-ahead" in note for note in r["notes"])),
    "shuffle": (["--shuffle", "none"], lambda r: True),
    "num_microbatches": (["--num-microbatches", "9"], lambda r: r["policies"][0]["num_microbatches"] == [9, 9]),
    "min_num_microbatches": (
        ["--min-num-microbatches", "11"],
        lambda r: r["policies"][0]["num_microbatches"] == [11, 11],
    ),
    "num_microbatches_multiple": (
        ["--num-microbatches-multiple", "13"],
        lambda r: r["policies"][0]["num_microbatches"] == [13, 13],
    ),
    "capacity_tokens": (
        ["--capacity-tokens", "2048"],
        lambda r: r["layout"]["capacities"] == {"tokens": 2048, "patches": 8192},
    ),
    "capacity_patches": (["--capacity-patches", "5000"], lambda r: r["layout"]["capacities"]["patches"] == 5000),
    "capacity_items": (["--capacity-items", "1"], lambda r: r["policies"][0]["num_microbatches"][1] >= 3),
    "memory_gib": (["--memory-gib", "0.5"], lambda r: r["layout"]["capacities"]["activation_bytes"] == 2**29),
    "oversize": (["--oversize", "error"], lambda r: r["data"]["num_planned"] == 64),
    "plan_steps": (["--plan-steps", "1"], lambda r: len(r["steps"]) == 1),
    "what_if_steps": (["--what-if-steps", "1"], lambda r: r["what_if_steps"] == 1 and len(r["what_if"]) == 5),
    "policies": (["--policies", "lpt,length_grouped"], lambda r: len(r["policies"]) == 2),
    "seed": (["--seed", "7"], lambda r: True),
}
ELSEWHERE = {"sources", "model", "cost_model", "processor", "text", "train_on", "preprocessing", "media_root"} | {
    "cache_dir",
    "output",
    "json",
}


@pytest.mark.parametrize("option", CHANGES)
def test_the_option_changes_the_report(option: str, mixed: str, model: str, capsys: Capture) -> None:
    argv = [mixed, "--model", model, "--pp", "2", "--shuffle", "full", *QUICK]
    added, check = CHANGES[option]
    plain, changed = _planned(capsys, *argv), _planned(capsys, *argv, *added)
    assert check(changed), changed["layout"]
    if option not in ("layers_per_stage", "oversize"):  # eight layers on the one LLM stage; and none is too large
        assert changed != plain


def test_every_option_is_tested() -> None:
    assert {field.name for field in dataclasses.fields(PlanCommand)} == set(CHANGES) | ELSEWHERE


def test_the_report_goes_to_a_file(mixed: str, model: str, tmp_path: Path, capsys: Capture) -> None:
    argv = ["plan", mixed, "--model", model, *QUICK]
    output = tmp_path / "new" / "plan.json"
    assert main([*argv, "--json", "--output", str(output)]) == 0
    assert capsys.readouterr().out == f"written to {output}\n"
    assert json.loads(output.read_text(encoding="utf-8"))["steps"] == [1, 3]
    assert main([*argv, "--output", str(output)]) == 0
    capsys.readouterr()
    assert main(argv) == 0
    assert output.read_text(encoding="utf-8") == capsys.readouterr().out
    assert main([*argv, "--output", str(tmp_path)]) == 1
    assert "Give another --output" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (
            ["--encoder", "spread", "--schedule", "1f1b"],
            "a spread encoder needs --schedule phased or nested.",
        ),
        (["--schedule", "bogus"], "schedule 'bogus' is not available"),
        (["--policies", "bogus"], "policy 'bogus'"),
        (["--layers-per-stage", "3"], "error: --layers-per-stage 3 for 1 llm stages of 8 layers"),
        (
            ["--frozen", "bogus"],
            "error: --frozen bogus: there is no such module. Modules: patch_embed, encoder, ",
        ),
        (["--num-microbatches", "3", "--num-microbatches-multiple", "2"], "use 2 or 4"),
        (["--recompute", "bogus"], "Modules: encoder, projector, llm, head, generator, all."),
        (
            ["--hardware", "h101"],
            "h101 is not known. Did you mean h100-nvl or h100-pcie or h100-sxm?",
        ),
        (["--hardware", "zzz"], "error: --hardware zzz is not known. Known are a100-pcie, "),
        (["--text", "bytes"], "an index is counted already"),
        (["--media-root", "x"], "an index is counted already"),
    ],
)
def test_what_cannot_be_planned_is_a_usage_error(
    added: list[str], said: str, mixed: str, model: str, capsys: Capture
) -> None:
    assert main(["plan", mixed, "--model", model, *added]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "m", "cost_model": Path("c")}, "and not both"),
        ({}, "give --model MODEL"),
        ({"model": "m", "sources": ()}, "name the folder of an index"),
        ({"model": "m", "dp_size": 0}, "--dp-size 0"),
        ({"model": "m", "seed": 2**64}, "--seed"),
        ({"model": "m", "memory_gib": float("nan")}, "--memory-gib nan"),
        ({"model": "m", "step_tokens": 5, "global_batch_size": 5}, "leave --global-batch-size and --tail out"),
        ({"cost_model": Path("c"), "hardware": "h100"}, "--hardware: not with --cost-model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        PlanCommand(**{"sources": ("index",), **options})
    assert said in str(caught.value)


def test_names_of_nothing_are_usage_errors(mixed: str, model: str, tmp_path: Path, capsys: Capture) -> None:
    for argv, said in (
        ([str(tmp_path / "gone"), "--model", model], "is neither an index"),
        ([mixed, "--model", "no-such-model"], "neither a preset"),
        ([mixed, "--cost-model", str(tmp_path / "gone.json")], "no such file"),
        ([mixed, mixed, "--model", model], "name one index alone"),
    ):
        assert main(["plan", *argv]) == 2
        assert said in capsys.readouterr().err


def test_a_cost_model_of_other_stages_is_a_usage_error(mixed: str, model: str, tmp_path: Path, capsys: Capture) -> None:
    costs = CostModel.from_config(model, ParallelSpec.pipeline(pp_size=3))
    (tmp_path / "cost.json").write_text(costs.to_json(), encoding="utf-8")
    assert main(["plan", mixed, "--cost-model", str(tmp_path / "cost.json"), "--pp", "4"]) == 2
    said = capsys.readouterr().err
    assert "is of 3 stages: encoder (" in said
    assert "the layout is 4 stages: encoder, llm, llm, llm." in said
    (tmp_path / "cost.json").write_text("{}", encoding="utf-8")
    assert main(["plan", mixed, "--cost-model", str(tmp_path / "cost.json"), "--pp", "3"]) == 1


def test_a_policy_that_cannot_place_says_why_and_the_others_go_on(folder: Folder, model: str, capsys: Capture) -> None:
    # Two replicas x one micro-batch of 100: the order of selection needs more, sorting does not.
    index = folder([60, 60, 40, 40])
    argv = [index, "--model", model, "--dp", "2", "--capacity-tokens", "100", "--num-microbatches", "1"]
    argv += ["--shuffle", "none", "--what-if-steps", "0"]
    report = _planned(capsys, *argv)
    by_name = {policy["policy"]: policy for policy in report["policies"]}
    assert "cannot place 1 of 1 steps: num_microbatches=1 does not hold" in by_name["sequential"]["error"]
    assert by_name["sequential"]["step_ms"] is None
    assert by_name["lpt"]["error"] == ""
    assert main(["plan", *argv]) == 0
    assert "sequential cannot place 1 of 1 steps" in capsys.readouterr().out
    assert main(["plan", *argv, "--policies", "sequential"]) == 1
    assert "no policy can place these steps; sequential cannot place" in capsys.readouterr().err


@given(per_epoch=st.integers(1, 500), count=st.integers(1, 60))
def test_sampled_steps_are_distinct_even_and_inside_the_epoch(per_epoch: int, count: int) -> None:
    steps = sampled(per_epoch, count)
    assert len(steps) == min(count, per_epoch)
    assert steps == sorted(set(steps))
    assert steps[0] >= 0
    assert steps[-1] < per_epoch
    gaps = np.diff(steps)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1
    assert set(sampled_of(steps, 3)) <= set(steps)
    assert sampled_of(steps, 0) == []


def test_preparing_keeps_every_sample_planned_or_left_out(folder: Folder, model: str) -> None:
    index = folder([100] * 10 + [9000, 100], bad=1)
    inputs = prepare(PlanCommand(sources=(index,), model=model))
    left = [drop.sample_id for drop in inputs.eligibility.dropped]
    assert sorted([*inputs.eligibility.ids.tolist(), *left]) == list(range(12))
