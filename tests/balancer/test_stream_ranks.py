"""Streams over two ranks: bytes as planned, nothing lost, balanced, and errors that reach both at one boundary.

A world of gloo processes, started once (see stream_worker.py); every test reads what it found.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.multirank, pytest.mark.slow]

import balancer  # noqa: E402

WORKER = Path(__file__).with_name("stream_worker.py")
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two ranks saw, by scenario."""
    written = tmp_path_factory.mktemp("ranks") / "found.json"
    home = str(Path(balancer.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, "-P", str(WORKER), str(written)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return dict(json.loads(written.read_text(encoding="utf-8")))


def values(found: Found, name: str) -> list[Any]:
    assert all("value" in saw for saw in found[name]), found[name]
    return [saw["value"] for saw in found[name]]


def raised(found: Found, name: str) -> list[str]:
    assert all("raised" in saw for saw in found[name]), found[name]
    return [saw["raised"] for saw in found[name]]


def test_bytes_sent_are_those_of_the_plan_and_nothing_is_lost_or_repeated(found: Found) -> None:
    ranks = values(found, "balance")
    planned = ranks[0]["planned"]
    assert planned == ranks[1]["planned"]
    for rank, saw in enumerate(ranks):
        other = 1 - rank
        assert saw["sent"] == planned[rank][other] > 0
        assert saw["received"] == planned[other][rank] > 0
        assert saw["kept"] == planned[rank][rank] > 0
        assert saw["exactly_once"]
    assert ranks[0]["rounds"] == ranks[1]["rounds"] > 4
    assert ranks[0]["num_ids"] + ranks[1]["num_ids"] == 400


def test_ranks_that_read_unequal_loads_run_equal_ones(found: Found) -> None:
    for saw in values(found, "balance"):
        assert saw["run_imbalance"] <= 1.1
        assert saw["worst_step"] <= 1.1


def test_the_number_of_ranks_may_change_at_any_step(found: Found) -> None:
    for saw in values(found, "resize"):
        assert saw["same_samples"]
        assert saw["steps"] > 12
        assert json.loads(saw["state"])["epoch"] == 2


def test_a_rank_whose_lanes_are_empty_trains_as_many_steps(found: Found) -> None:
    ranks = values(found, "one_rank_dry")
    assert ranks[0]["steps"] == ranks[1]["steps"] == 5
    assert ranks[0]["samples"] + ranks[1]["samples"] == 30
    assert min(saw["samples"] for saw in ranks) > 0
    assert [saw["sent"] > 0 for saw in ranks] == [True, False]


def test_fewer_lanes_or_samples_than_ranks_leave_cells_empty(found: Found) -> None:
    ranks = values(found, "one_lane")
    assert [size for size, _ in ranks[0]["steps"]] == [size for size, _ in ranks[1]["steps"]] == [4, 1]
    assert sorted(saw["steps"][1][1] for saw in ranks) == [0, 1]
    assert sum(saw["samples"] for saw in ranks) == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [("storage_fails", "OSError: the disk is gone"), ("fault", "TypeError: a fault of a row function")],
)
def test_an_error_of_one_rank_is_raised_on_both_at_one_boundary(found: Found, name: str, said: str) -> None:
    ranks = raised(found, name)
    assert ranks[0] == ranks[1]
    assert ranks[0].startswith(
        "RuntimeError: after 2 steps: RankError: reading window 1 of the stream failed on 1 of 2"
    )
    assert f"rank 1: {said}" in ranks[0]


def test_a_bad_record_is_named_on_both(found: Found) -> None:
    ranks = raised(found, "bad_record")
    assert ranks[0] == ranks[1]
    assert "DataError: 1 samples of the window cannot be used:\n  shard lane 1, key 2" in ranks[0]


def test_ranks_with_other_options_or_plans_stop_before_anything_is_sent(found: Found) -> None:
    for name in ("other_options", "other_lanes", "other_policy"):
        ranks = raised(found, name)
        assert ranks[0] == ranks[1]
        assert ranks[0].startswith("PlanMismatchError: ranks [1] planned from other inputs than rank 0")


def test_a_medium_that_does_not_decode_is_named_as_in_the_stream(found: Found) -> None:
    together = [entry for saw in values(found, "undecodable") for entry in saw["replaced"]]
    assert together == [[1 << 32 | 1, "shard lane 1, key 1"]]


def test_texts_and_empty_messages_pass(found: Found) -> None:
    assert values(found, "texts") == [["üüüüü", ""]] * 2
    assert values(found, "nothing_to_send") == [[0, 0, 0, 0], [0, 0, 7, 0]]
