"""DP, PP and both at once: the same losses, norms and weights as one process, and errors that reach every rank.

Worlds of gloo processes, each started once (see multirank_worker.py); every test reads what its world found.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.multirank, pytest.mark.slow]

import trainer  # noqa: E402
from balancer.metrics import imbalance  # noqa: E402
from balancer.plan import StepPlan  # noqa: E402
from balancer.records import StepRecord, read_records  # noqa: E402
from tools.verify_command import verify_run  # noqa: E402
from trainer.config import FitConfig  # noqa: E402
from trainer.export import load_trained  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.run_folder import read_config  # noqa: E402

WORKER = Path(__file__).with_name("multirank_worker.py")
TWO_RANKS = [
    "fits",
    "fits-pp",
    "fewer-samples-than-ranks",
    "stand-in",
    "stand-in-pp",
    "budget-pp",
    "image-text-image-pp",
    "tampered-plan",
    "tampered-plan-pp",
    "unreadable",
    "unreadable-pp",
    "ddp",
    "mixture",
]
Found = dict[str, list[dict[str, Any]]]


def start(processes: int, options: dict[str, Any], folder: Path) -> Found:
    """Run the worker's scenarios in a world of `processes`."""
    found, written = folder / "found.json", folder / "options.json"
    written.write_text(json.dumps({**options, "found": str(found), "out": str(folder)}), encoding="utf-8")
    home = str(Path(trainer.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*launcher, "--no-python", sys.executable, "-P", str(WORKER), str(written)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return dict(json.loads(found.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def options(
    *,
    corpus: Path,
    truncated_corpus: Path,
    text_corpus: Path,
    cache: Path,
    write_shard: Callable[..., Path],
    members: Sequence[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    fit = {
        "model": "check",
        "data": str(corpus),
        "cache_dir": str(cache),
        "global_batch_size": 4,
        "capacity_tokens": 150,
        "oversize": "drop",
        "eval_share": 0.25,
        "num_workers": 0,
        "threads": 1,
        "compare_steps": 1,
        "max_steps": 3,
        "lr": 2e-3,
        "min_lr_ratio": 0.5,
        "eps": 1e-6,
    }
    one = write_shard(tmp_path_factory.mktemp("one") / "one.tar", members[1])
    mixture = tmp_path_factory.mktemp("mixture") / "mixture.json"
    parts = [
        {"name": "all", "data": str(corpus), "weight": 2},
        {"name": "texts", "data": str(text_corpus), "weight": 1},
    ]
    mixture.write_text(json.dumps({"unit": "llm_tokens", "parts": parts}), encoding="utf-8")
    return {
        "fit": fit,
        "name": "run",
        "truncated": str(truncated_corpus),
        "one_sample": str(one),
        "mixture": str(mixture),
    }


@pytest.fixture(scope="module")
def alone(options: dict[str, Any], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`alone(name, **options)`: the run folder of the same training in this process."""
    folder, made = tmp_path_factory.mktemp("alone"), dict[str, Path]()

    def run(name: str, **changed: Any) -> Path:
        if name not in made:
            config = FitConfig(output=folder / name, **{**options["fit"], "cache_dir": cache, **changed})
            assert run_fit(config) == 0
            made[name] = folder / name
        return made[name]

    return run


@pytest.fixture(scope="module")
def two(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    folder = tmp_path_factory.mktemp("two")
    return start(2, {**options, "scenarios": TWO_RANKS}, folder), folder


@pytest.fixture(scope="module")
def three(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    folder = tmp_path_factory.mktemp("three")
    return start(
        3, {**options, "scenarios": ["fits-pp", "image-text-image-pp", "stand-in-pp", "check-pp"]}, folder
    ), folder


@pytest.fixture(scope="module")
def four(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Path]:
    folder = tmp_path_factory.mktemp("four")
    return start(4, {**options, "scenarios": ["fits-pp2", "check-pp2"]}, folder), folder


def steps(run: Path) -> list[StepRecord]:
    return read_records(run / "steps.jsonl")


def plan_of(run: Path, step: int) -> StepPlan:
    return StepPlan.from_json((run / "plans" / f"step_{step:06d}.json").read_text())


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def assert_all(found: Found, scenario: str, value: object) -> None:
    assert [seen.get("value", seen.get("raised")) for seen in found[scenario]] == [value] * len(found[scenario])


WORLDS = [
    ("two", "run", "fits"),
    ("two", "run-pp", "fits-pp"),
    ("three", "run-pp", "fits-pp"),
    ("four", "run-pp", "fits-pp2"),
]


@pytest.fixture(params=WORLDS, ids=["DP=2", "PP=2", "PP=3", "DP=2 x PP=2"])
def world_run(request: pytest.FixtureRequest) -> Path:
    world, name, scenario = request.param
    found, folder = request.getfixturevalue(world)
    assert_all(found, scenario, 0)
    return Path(folder / name)


def test_losses_norms_and_rates_equal_those_of_one_process(world_run: Path, alone: Callable[..., Path]) -> None:
    expected, got = steps(alone("run")), steps(world_run)
    assert [record.step for record in got] == [1, 2, 3]
    for one, other in zip(expected, got, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4), "clipping takes the norm over all stages"
        assert other.grad_norm > 1.0, "nothing was clipped: the test shows less than it says"
        assert (other.lr, other.label_tokens, other.llm_tokens) == (one.lr, one.label_tokens, one.llm_tokens)
    assert got[-1].lr == 2e-3 * 0.5
    assert summary(world_run)["steps"] == 3


def test_weights_after_the_run_equal_those_of_one_process(world_run: Path, alone: Callable[..., Path]) -> None:
    models = [load_trained(run, read_config(run))[0] for run in (alone("run"), world_run)]
    expected, got = (dict(model.named_parameters()) for model in models)
    assert expected.keys() == got.keys()
    # The gradient of a key bias is zero up to rounding, and AdamW makes a step of any gradient.
    learned = [name for name in expected if "k_proj.bias" not in name]
    worst = max(float((expected[name] - got[name]).detach().abs().max()) for name in learned)
    assert worst < 3e-5


def test_validation_loss_is_equal_with_a_tail_that_leaves_cells_empty(
    world_run: Path, alone: Callable[..., Path]
) -> None:
    expected, got = summary(alone("run"))["validation"], summary(world_run)["validation"]
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert (got["label_tokens"], got["fact_tokens"]) == (expected["label_tokens"], expected["fact_tokens"])
    if expected["fact_tokens"]:
        assert got["fact_loss"] == pytest.approx(expected["fact_loss"], rel=1e-5)


def test_every_rank_ran_its_acts_and_steps_had_several_micro_batches(world_run: Path) -> None:
    records = steps(world_run)
    plans = [plan_of(world_run, record.step) for record in records]
    config = read_config(world_run)
    world = plans[0].dp_size * config.pp_size
    assert {action.rank for record in records for action in record.actions} == set(range(world))
    assert max(plan.num_microbatches * plan.dp_size for plan in plans) > 1
    for record, plan in zip(records, plans, strict=True):
        assert record.plan_digest == plan.digest
        for dp_rank in range(plan.dp_size):
            ran = {(a.stage, a.microbatch) for a in record.actions if a.dp_rank == dp_rank}
            stages = {(s, m) for s in range(plan.num_stages) for m in range(plan.num_microbatches)}
            assert ran == stages - plan.absent(dp_rank)


def test_off_and_on_were_measured_in_the_world(world_run: Path) -> None:
    compared = read_records(world_run / "compare.jsonl")
    assert [record.policy for record in compared] == ["sequential"] * 2 + ["joint"] * 2
    assert len({record.step for record in compared}) == 1
    for record in compared[1:]:
        assert record.loss == pytest.approx(compared[0].loss, rel=1e-5)


def test_fewer_samples_than_ranks_train_on_all_ranks_without_a_hang(
    two: tuple[Found, Path], alone: Callable[..., Path], options: dict[str, Any]
) -> None:
    found, folder = two
    assert_all(found, "fewer-samples-than-ranks", 0)
    expected = steps(alone("one-sample", data=options["one_sample"]))
    for one, other in zip(expected, steps(folder / "one-sample"), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
    assert (plan_of(folder / "one-sample", 1).num_samples == 0).any()


@pytest.mark.parametrize(
    ("world", "scenario", "name"),
    [
        ("two", "stand-in", "stand-in-pp1"),
        ("two", "stand-in-pp", "stand-in-pp2"),
        ("three", "stand-in-pp", "stand-in-pp3"),
    ],
)
def test_a_stand_in_seen_by_one_rank_alone_counts_on_all(
    *,
    world: str,
    scenario: str,
    name: str,
    request: pytest.FixtureRequest,
    alone: Callable[..., Path],
    options: dict[str, Any],
) -> None:
    """ID-01."""
    found, folder = request.getfixturevalue(world)
    assert_all(found, scenario, 0)
    one = alone("stand-in", data=options["truncated"], max_replaced=1)
    assert {item.sample_id for record in steps(one) for item in record.replaced} == {5}
    for expected, got in zip(steps(one), steps(folder / name), strict=True):
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert got.label_tokens == expected.label_tokens
        assert got.replaced == expected.replaced
    assert summary(folder / name)["replaced"] == 1


def test_a_stand_in_beyond_the_budget_stops_every_rank_of_a_pipeline(two: tuple[Found, Path]) -> None:
    for seen in two[0]["budget-pp"]:
        assert seen["raised"].startswith("ReplacedBudgetError: step ")
        assert "005" in seen["raised"]


@pytest.mark.parametrize("world", ["two", "three"])
def test_three_lengths_and_a_text_only_micro_batch_go_through_the_pipeline_exactly(
    world: str, request: pytest.FixtureRequest
) -> None:
    found, _ = request.getfixturevalue(world)
    for seen in found["image-text-image-pp"]:
        value = seen["value"]
        assert value["error"] < 1e-10
        assert len(set(value["tokens"][0])) == 3
        assert [patches > 0 for patches in value["patches"][0]] == [True, False, True]
        assert "0:0F0" in value["acts"]
        assert "0:0F1" not in value["acts"]


@pytest.mark.parametrize(("world", "scenario"), [("three", "check-pp"), ("four", "check-pp2")])
def test_the_check_agrees_in_layouts_that_the_command_does_not_start_itself(
    world: str, scenario: str, request: pytest.FixtureRequest
) -> None:
    found, _ = request.getfixturevalue(world)
    assert_all(found, scenario, [True, True])


@pytest.mark.parametrize("scenario", ["tampered-plan", "tampered-plan-pp"])
def test_a_rank_with_another_plan_stops_all_ranks_at_once(two: tuple[Found, Path], scenario: str) -> None:
    for seen in two[0][scenario]:
        assert seen["raised"].startswith("PlanMismatchError: ranks [1] planned from other inputs than rank 0")
        assert seen["seconds"] < 5.0


@pytest.mark.parametrize("scenario", ["unreadable", "unreadable-pp"])
def test_an_error_while_loading_on_one_rank_is_raised_on_all_at_the_same_step(
    two: tuple[Found, Path], scenario: str
) -> None:
    texts = [seen["raised"] for seen in two[0][scenario]]
    assert texts[0] == texts[1]
    assert texts[0].startswith("RemoteError: step 1 has no data on rank 1: OSError: storage of sample ")
    assert all(seen["seconds"] < 5.0 for seen in two[0][scenario])


def test_a_users_own_loop_with_ddp_gets_balanced_disjoint_batches_and_exact_gradients(two: tuple[Found, Path]) -> None:
    first, second = (seen["value"] for seen in two[0]["ddp"])
    assert first == second
    assert (first["steps"], first["dropped"]) == (4, 0)
    visited = [i for step in first["seen"] for ids in step for i in ids]
    assert sorted(visited) == list(range(26))
    # The last step holds two samples, one for each rank: nothing to balance.
    assert all(imbalance(costs) < 1.15 for costs in first["costs"][:-1])
    assert first["error"] < 1e-5


def test_a_mixture_is_drawn_alike_on_all_ranks_and_every_part_is_read_once_per_epoch(
    two: tuple[Found, Path], alone: Callable[..., Path], options: dict[str, Any]
) -> None:
    found, folder = two
    assert_all(found, "mixture", 0)
    one = alone("mixture", data=None, mixture=Path(options["mixture"]), max_steps=6)
    losses = [[record.loss for record in steps(run)] for run in (one, folder / "mixture")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    report = verify_run(folder / "mixture")
    assert report.holds, report.findings
    assert (report.num_selected, report.num_placed) == (6, 6)
    assert [part.name for part in report.parts] == ["all", "texts"]
    assert report.parts[1].num_complete >= 1
