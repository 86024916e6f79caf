"""What the report of `balancer-analyze plan` claims: for which model, against what, and what of it can be had today."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.cost_model import CostModel
from balancer.flops import FREEZABLE, RECOMPUTABLE
from balancer.layout import Layout, ParallelSpec
from balancer.model_config import model_shape, preset_names
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from dataloaders.index import CostIndex
from tools.cli import main
from tools.plan_before import sampled
from tools.plan_command import PlanCommand
from tools.plan_family import family_of, model_family
from tools.plan_inputs import prepare
from tools.plan_memory import RankStates, rank_states, too_large

Capture = pytest.CaptureFixture[str]
Folder = Callable[..., str]
Planned = Callable[..., dict[str, Any]]

QUICK = ("--steps", "2", "--what-if-steps", "0", "--policies", "sequential", "lpt")
GIB = 2**30


def _text(capsys: Capture, *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def _limits(report: dict[str, Any]) -> dict[str, str]:
    return {limit["kind"]: limit["text"] for limit in report["limits"]}


# ------------------------------------------------------------------------------------- whose processor has counted


@pytest.fixture
def pictures(
    write_shard: Callable[..., Path], chat_json: Callable[..., bytes], image_bytes: Callable[..., bytes], tmp_path: Path
) -> str:
    """A shard of four pictures of 640 x 480."""
    members = [
        member
        for i in range(4)
        for member in ((f"{i}.json", chat_json("<image>What?", "A wall.")), (f"{i}.png", image_bytes(640, 480)))
    ]
    return str(write_shard(tmp_path / "pictures.tar", members))


@pytest.mark.parametrize("preset", ["llava-1.5-7b", "internvl3-8b", "qwen3-vl-8b"])
def test_data_are_not_counted_by_the_published_rules_for_a_preset_of_another_family(
    preset: str, pictures: str, capsys: Capture
) -> None:
    assert main(["plan", pictures, "--model", preset, *QUICK]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"--model {preset} is {model_family(preset)} and brings no processor of its own" in printed.err
    assert "published Qwen2.5-VL settings" in printed.err
    assert "--processor FOLDER" in printed.err


def test_presets_of_the_published_family_and_of_text_are_counted_as_they_are(pictures: str, planned: Planned) -> None:
    for preset in ("qwen2.5-vl-3b", "qwen2-vl-7b", "qwen2.5-7b"):
        report = planned(pictures, "--model", preset, *QUICK)
        assert report["warnings"] == []
        assert report["data"]["rules"]["media"].startswith("Qwen2.5-VL, ")
        assert report["data"]["counts"]["patches"]["max"] == 2 * 17 * 2 * 23


def test_a_model_folder_counts_by_its_own_processor_also_by_the_name_of_its_config(
    pictures: str, tmp_path: Path, planned: Planned
) -> None:
    folder = tmp_path / "llava"
    folder.mkdir()
    config = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 256},
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2}
        | {"num_attention_heads": 2, "intermediate_size": 64, "image_size": 336, "patch_size": 14},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}), encoding="utf-8"
    )
    for model in (folder, folder / "config.json"):
        report = planned(pictures, "--model", str(model), *QUICK)
        assert report["warnings"] == []
        assert report["data"]["rules"]["media"].startswith("LLaVA, ")
        assert report["data"]["counts"]["patches"]["max"] == 24**2 + 1  # and a class token
    given_processor = planned(pictures, "--model", "llava-1.5-7b", "--processor", str(folder), *QUICK)
    assert given_processor["warnings"] == []
    (other,) = planned(pictures, "--model", "qwen2.5-vl-7b", "--processor", str(folder), *QUICK)["warnings"]
    assert other.startswith("media are counted by the rules of LLaVA, but the costs are those of Qwen2.5-VL (")
    assert other.endswith("name the model's own with --processor FOLDER")


def test_an_index_of_another_familys_rules_is_named_at_the_top(
    folder: Folder, planned: Planned, capsys: Capture
) -> None:
    index = folder([300] * 32, [1200] * 32, media="Qwen2.5-VL, processor of transformers")
    argv = [index, "--model", "internvl3-8b", *QUICK]
    (warning,) = planned(*argv)["warnings"]
    assert warning.startswith("media are counted by the rules of Qwen2.5-VL, but the costs are those of InternVL (")
    assert "balancer-analyze index DATA --model FOLDER" in warning
    first, second, *_ = _text(capsys, *argv).splitlines()
    assert first == f"note: {warning}"
    assert "32 samples, 32 planned" in second
    assert planned(index, "--model", "qwen2.5-vl-3b", *QUICK)["warnings"] == []
    assert planned(index, "--model", "qwen2.5-7b", *QUICK)["warnings"] == []  # a text model sees no media


def test_every_preset_with_an_encoder_has_a_family_and_the_others_none() -> None:
    for preset in preset_names():
        assert bool(model_family(preset)) == (model_shape(preset).encoder is not None), preset
    assert model_family(None) == ""
    assert family_of("") == ""
    assert family_of("Qwen2-VL, processor") == family_of("Qwen2.5-VL, other words")


# ------------------------------------------------------------------------------------------------------ look-ahead


def test_before_is_the_same_epoch_without_lookahead(
    folder: Folder, model: str, planned: Planned, capsys: Capture
) -> None:
    index = folder([2000 if i % 4 == 0 else 30 + i for i in range(192)])
    argv = [index, "--model", model, "--dp", "2", "--global-batch-size", "16", "--steps", "7", "--what-if-steps", "0"]
    argv += ["--policies", "sequential", "joint"]
    report = planned(*argv, "--lookahead-steps", "3")
    assert report["steps"] == [3, 4, 5, 9, 10, 11]  # whole blocks of three
    parallel = ParallelSpec.pipeline(dp_size=2)
    opened = CostIndex.open(index)
    plain = PlanSequence(
        index=opened,
        ids=np.arange(len(opened)),
        global_batch_size=16,
        layout=Layout(),
        parallel=parallel,
        cost_model=CostModel.from_config(model, parallel),
        capacities=Capacities(tokens=4096, patches=16384),
    )
    before = [plain.plan(step, policy="sequential").makespan_ns for step in report["steps"]]
    without = [plain.plan(step, policy="joint").makespan_ns for step in report["steps"]]
    assert report["before"]["step_ms"]["mean"] == pytest.approx(sum(before) / 6e6)
    for policy in report["policies"]:
        ms = policy["step_ms"]["mean"] * 6e6
        assert policy["relative_time"] == pytest.approx(ms / sum(before))
        assert policy["imbalance_before"] == pytest.approx(report["before"]["imbalance_before"])
    effect, joint = report["lookahead"], report["policies"][-1]
    assert effect["mean"] == pytest.approx(joint["step_ms"]["mean"] * 6e6 / sum(without))
    assert effect["max"] == pytest.approx(joint["step_ms"]["max"] * 1e6 / max(without))
    assert effect["max"] < 0.9  # heavy samples are shared out
    text = _text(capsys, *argv, "--lookahead-steps", "3")
    assert "│ sequential, no look-ahead │" in text
    assert f"look-ahead of 3 steps evens steps: joint takes {effect['p99']:.2f}x at p99" in text
    plainly = planned(*argv)
    assert plainly["before"] is None
    assert plainly["lookahead"] is None


def test_steps_that_only_lookahead_can_place_are_said_to_lack_a_comparison(
    folder: Folder, model: str, planned: Planned
) -> None:
    # Two steps of four: in order [90 90 90 90] and [10 10 10 10]; one micro-batch of 300 holds either half evened.
    index = folder([90] * 4 + [10] * 4)
    argv = [index, "--model", model, "--global-batch-size", "4", "--shuffle", "none", "--capacity-tokens", "300"]
    report = planned(*argv, "--num-microbatches", "1", "--lookahead-steps", "2", *QUICK)
    assert report["before"] is None
    assert any("without look-ahead these steps cannot be placed" in note for note in report["notes"])


@given(per_epoch=st.integers(1, 300), count=st.integers(1, 60), block=st.integers(2, 12))
def test_steps_with_lookahead_are_sampled_in_whole_blocks(per_epoch: int, count: int, block: int) -> None:
    steps = sampled(per_epoch, count, block)
    assert steps == sorted(set(steps))
    assert steps[0] >= 0
    assert steps[-1] < per_epoch
    blocks = {step // block for step in steps}
    assert steps == [step for step in range(per_epoch) if step // block in blocks]
    assert len(blocks) == min(max(1, count // block), -(-per_epoch // block))


# ------------------------------------------------------------------------------------------------- sizes and times


def test_steps_are_told_by_what_they_hold(mixed: str, model: str, planned: Planned, capsys: Capture) -> None:
    argv = [mixed, "--model", model, "--global-batch-size", "24", "--steps", "9", *QUICK[2:]]
    report = planned(*argv)
    assert report["step_samples"] == {"mean": pytest.approx(64 / 3), "min": 16, "max": 24}
    total = report["data"]["counts"]["llm_tokens"]["total"]
    assert report["step_tokens"]["mean"] == pytest.approx(total / 3)
    assert "3 of 3 steps were planned, of 21 (16 to 24) samples and " in (text := _text(capsys, *argv))
    assert "asked for 24 samples" in text
    tokens = [mixed, "--model", model, "--step-tokens", "5000", *QUICK]
    sizes = planned(*tokens)["step_tokens"]
    said = f"{sizes['mean']:,.0f} ({sizes['min']:,} to {sizes['max']:,}) LLM tokens, asked for about 5,000 tokens"
    assert said in _text(capsys, *tokens)


def test_nominal_times_have_no_unit_and_known_hardware_has(mixed: str, model: str, capsys: Capture) -> None:
    argv = [mixed, "--model", model, "--dp", "2", *QUICK]
    nominal = _text(capsys, *argv)
    assert "Step time, x the mean of lpt" in nominal
    assert " ms" not in nominal
    (row,) = re.findall(r"│ lpt +│ +([0-9.]+) │.*peak|│ lpt +│ +([0-9.]+) │ +[0-9.]+ │ +[0-9.]+ │ +[0-9.]+ │", nominal)
    assert "1.000" in row
    known = _text(capsys, *argv, "--hardware", "h100")
    assert "Step time, in ms" in known


# ------------------------------------------------------------------------------------------------- what fits


def test_parameters_of_all_ranks_are_those_of_the_model() -> None:
    shape = model_shape("qwen2.5-vl-7b")
    command = PlanCommand(sources=("index",), model="qwen2.5-vl-7b")
    for encoder, num_chunks in (("own", 1), ("shared", 2), ("own", 3)):
        parallel = ParallelSpec.pipeline(pp_size=4, encoder=encoder, num_chunks=num_chunks)  # type: ignore[arg-type]
        ranks = rank_states(command, shape, parallel)
        assert sum(rank.trained for rank in ranks) == shape.num_parameters
        assert sum(rank.frozen for rank in ranks) == 0
    spread = rank_states(command, shape, ParallelSpec.pipeline(pp_size=4, encoder="spread"))
    tower = rank_states(command, shape, ParallelSpec.pipeline(pp_size=4))[0].trained
    assert sum(rank.trained for rank in spread) == shape.num_parameters + 3 * tower  # whole on every rank


def test_a_tied_head_is_held_once_where_both_ends_are_on_one_rank() -> None:
    shape = model_shape("qwen2.5-vl-3b")
    command = PlanCommand(sources=("index",), model="qwen2.5-vl-3b")
    (alone,) = rank_states(command, shape, ParallelSpec.pipeline())
    assert alone.trained == shape.num_parameters
    apart = rank_states(command, shape, ParallelSpec.pipeline(pp_size=3))
    assert sum(rank.trained for rank in apart) == shape.num_parameters + shape.llm.vocab_size * shape.llm.dim


def test_frozen_modules_have_their_weights_alone_and_adapters_train() -> None:
    shape = model_shape("qwen2.5-vl-7b")
    parallel = ParallelSpec.pipeline(pp_size=2)
    whole = rank_states(PlanCommand(sources=("i",), model="m"), shape, parallel)
    frozen = rank_states(PlanCommand(sources=("i",), model="m", frozen=("encoder", "projector")), shape, parallel)
    assert (frozen[0].trained, frozen[0].frozen) == (0, whole[0].trained)
    assert whole[0].state_bytes() == 16 * whole[0].trained
    assert frozen[0].state_bytes() == 2 * whole[0].trained
    (adapted,) = rank_states(PlanCommand(sources=("i",), model="m", lora_rank=8), shape, parallel)[1:]
    d, kv, hidden, layers = 3584, 4 * 128, 18944, 28
    per_layer = 8 * (2 * (d + d) + 2 * (d + kv) + 3 * (d + hidden))
    assert (adapted.trained, adapted.frozen) == (layers * per_layer, whole[1].trained)


def test_what_does_not_fit_is_said_with_what_sharding_would_do() -> None:
    states = [RankStates(trained=GIB, frozen=0), RankStates(trained=4 * GIB, frozen=GIB)]
    said = too_large(states, [GIB, 16 * GIB], 80, device="h100", dp_size=4)
    assert said.startswith(
        "does not fit: pipeline rank 1 holds 82 GiB, 66 of weights and optimizer and 16 of activations"
    )
    assert "h100 has 80; over 4 replicas it would be 46 GiB with ZeRO-1 and 32 GiB with ZeRO-3" in said
    assert too_large(states, [GIB, 14 * GIB], 80, device="h100", dp_size=4) == ""
    assert "ZeRO" not in too_large(states, [GIB, 16 * GIB], 80, device="h100", dp_size=1)


def test_the_report_says_whether_it_fits(folder: Folder, model: str, planned: Planned, capsys: Capture) -> None:
    index = folder([300] * 32, [1200] * 32)
    argv = [index, "--model", "qwen2.5-vl-7b", "--pp", "2", *QUICK]
    report = planned(*argv, "--hardware", "h100")
    assert report["layout"]["device_memory_gib"] == 80
    assert report["layout"]["ranks"][1]["state_bytes"] > 100 * GIB
    assert _limits(report)["does not fit"].startswith("does not fit: pipeline rank 1 holds ")
    text = _text(capsys, *argv, "--hardware", "h100")
    assert "16 bytes a trained parameter, 2 a frozen one; h100 has 80 GiB" in text
    nominal = planned(*argv)
    assert nominal["layout"]["device_memory_gib"] is None
    assert "does not fit" not in _limits(nominal)
    assert "does not fit" not in _limits(planned(index, "--model", model, *QUICK, "--hardware", "h100"))


# ------------------------------------------------------------------------------------------------- advice


def test_advice_says_what_training_executes(folder: Folder, model: str, planned: Planned, capsys: Capture) -> None:
    index = folder([300] * 64, [1200] * 64)
    argv = [index, "--model", model, "--dp", "2", "--pp", "4", "--num-microbatches", "8", "--steps", "2"]
    own = planned(*argv, "--policies", "lpt")
    assert "training does not execute it yet" in _limits(own)["stage split"]
    sentence = "training executes --encoder own with --schedule 1f1b or gpipe and --meet step today"
    assert not any(sentence in note for note in own["notes"])
    assert _text(capsys, *argv, "--policies", "lpt").count(sentence) == 1
    for added in (["--encoder", "spread"], ["--meet", "microbatch"], ["--schedule", "zb-h1"]):
        other = planned(*argv[:-2], *QUICK, *added)
        assert any(note.startswith(sentence) for note in other["notes"]), added


def test_the_least_number_of_microbatches_is_said_beside_what_more_would_take(
    mixed: str, model: str, planned: Planned, capsys: Capture
) -> None:
    argv = [mixed, "--model", model, "--pp", "4", "--capacity-tokens", "16384", "--steps", "2", "--policies", "lpt"]
    (more,) = [other for other in planned(*argv)["what_if"] if other["min_num_microbatches"] == 16]
    said = f"M = 1 is the least that fits; --min-num-microbatches 16 takes {more['relative_time']:.2f}x (simulated)"
    lines = _text(capsys, *argv).splitlines()
    below = lines.index(said)
    assert any("└" in line for line in lines[below - 3 : below])
    assert said not in _text(capsys, *argv, "--num-microbatches", "16")


def test_the_largest_cause_of_idle_time_and_the_meaning_of_columns_are_said(
    mixed: str, model: str, planned: Planned, capsys: Capture
) -> None:
    argv = [mixed, "--model", model, "--pp", "4", "--capacity-tokens", "16384", *QUICK]
    (lpt,) = [policy for policy in planned(*argv)["policies"] if policy["policy"] == "lpt"]
    kind = max(lpt["bubbles"], key=lambda name: lpt["bubbles"][name])
    text = _text(capsys, *argv)
    cause = f"{kind.replace('_', ' ')} ({lpt['bubbles'][kind]:.1%})"
    assert f"lpt leaves {lpt['bubble_ratio']:.1%} of all rank time idle, above all {cause}" in text
    assert 'the lower bound holds the bubble of the pipeline already, so "none" may bind beside much idle time' in text
    assert "of labels: max / mean of label tokens over DP ranks, only a tie-break of placement" in text


# ------------------------------------------------------------------------------------------------- words of options


@pytest.mark.parametrize("argv", [["plan", "index"], ["plan"], ["plan", "index", "--bogus"]])
def test_a_usage_error_names_the_help_of_the_command(argv: Sequence[str], capsys: Capture) -> None:
    assert main(list(argv)) == 2
    assert "balancer-analyze plan --help" in capsys.readouterr().err


def test_help_names_every_module_that_can_be_frozen_or_recomputed(capsys: Capture) -> None:
    assert main(["plan", "--help"]) == 0
    words = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    frozen, recompute = (words.partition(name)[2].partition("(default")[0] for name in ("--frozen", "--recompute"))
    assert all(re.search(rf"\b{name}\b", frozen) for name in FREEZABLE)
    assert all(re.search(rf"\b{name}\b", recompute) for name in (*RECOMPUTABLE, "all"))


def test_a_preset_counts_no_data(pictures: str, tmp_path: Path, capsys: Capture) -> None:
    for argv in (
        ["index", pictures, "--model", "qwen2.5-vl-7b", "--output", str(tmp_path / "index")],
        ["data", pictures, "--model", "qwen2.5-vl-7b"],
        ["tokens", "640x480", "--model", "qwen2.5-vl-7b"],
    ):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "presets name costs for balancer-analyze plan alone" in said
        assert "preprocessor_config.json" in said


def test_unknown_hardware_is_no_error_of_the_planner(model: str) -> None:
    costs = CostModel.from_config(model, ParallelSpec.pipeline(), "future-1")
    assert not costs.absolute
    assert "'future-1' is not known" in costs.note


def test_nominal_costs_need_no_note(mixed: str, model: str) -> None:
    assert prepare(PlanCommand(sources=(mixed,), model=model)).notes == ()
