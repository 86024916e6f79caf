"""DU-01, DU-11, LN-01, LN-04, LN-05: loaders of two ranks agree, fail together, and train like one process.

A world of two gloo processes, started once (see loader_rank_worker.py); every test reads what it found.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.multirank, pytest.mark.slow]


WORKER = Path(__file__).with_name("loader_rank_worker.py")
Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, run_two_ranks: Callable[..., None]) -> Found:
    """What each of two ranks saw, by scenario."""
    written = tmp_path_factory.mktemp("ranks") / "found.json"
    run_two_ranks(WORKER, str(written))
    return dict(json.loads(written.read_text(encoding="utf-8")))


def values(found: Found, name: str) -> list[Any]:
    assert all("value" in saw for saw in found[name]), found[name]
    return [saw["value"] for saw in found[name]]


def raised(found: Found, name: str) -> list[str]:
    assert all("raised" in saw for saw in found[name]), found[name]
    return [saw["raised"] for saw in found[name]]


# Errors.


def test_an_error_of_one_rank_is_raised_on_both_at_its_step_and_iteration_goes_on(found: Found) -> None:
    first, second = values(found, "fails_on_one")
    assert first == second
    assert first[:2] == [[0, 0], [0, 1]]
    assert first[2].startswith(
        "RankError: loading step 1 of epoch 0 failed on 1 of 2 ranks:\nrank 1: OSError: the disk"
    )
    assert first[3:] == [[2, 0], [2, 1], [3, 0], [3, 1]]


def test_a_stop_iteration_that_a_dataset_lets_out_is_no_end_of_the_epoch(found: Found) -> None:
    first, second = values(found, "stops_on_one")
    assert first == second
    assert "rank 1: RuntimeError: a sample could not be loaded: the dataset or collate_fn raised Stop" in first[2]
    assert "while loading samples " in first[2]
    assert [first[:2], first[3:]] == [[[0, 0], [0, 1]], [[2, 0], [2, 1], [3, 0], [3, 1]]]


def test_two_ranks_that_take_themselves_for_one_replica_are_refused(found: Found) -> None:
    first, second = values(found, "same_replica_twice")
    assert first == second
    assert first[0].startswith("LayoutError: the ranks load for the replicas [0, 0], in rank order, of dp_size=2: each")


def test_errors_of_several_ranks_are_told_together(found: Found) -> None:
    first, second = values(found, "fails_on_both")
    assert first == second
    assert [entry for entry in first if isinstance(entry, list)] == [[0, 0], [2, 0], [3, 0]]
    assert first[1].startswith(
        "RankError: loading step 1 of epoch 0 failed on 2 of 2 ranks:\nrank 0: OSError: Caught OSE"
    )
    assert "rank 1: OSError: Caught OSError in DataLoader worker process 0" in first[1]


def test_a_worker_that_is_gone_is_an_error_of_both_ranks_in_every_step_that_it_should_have_loaded(found: Found) -> None:
    first, second = values(found, "loses_a_worker")
    assert first == second
    assert first[:2] == [[0, 0], [0, 1]]
    assert first[2].startswith("RankError: loading step 1 of epoch 0 failed on 1 of 2 ranks:\nrank 1: RuntimeError: ")
    assert "DataLoader worker (pid" in first[2]
    assert [entry.split(" failed")[0] for entry in first[3:]] == [
        "RankError: loading step 2 of epoch 0",
        "RankError: loading step 3 of epoch 0",
    ]


def test_after_an_error_both_ranks_stand_at_the_same_step_and_can_start_anew(found: Found) -> None:
    ranks = values(found, "goes_on_after_an_error")
    assert ranks[0]["said"] == ranks[1]["said"]
    assert ranks[0]["said"].startswith("RankError: loading step ")
    assert ranks[0]["steps"] == ranks[1]["steps"] == ranks[0]["state"] == ranks[1]["state"] == 2
    assert sorted(ranks[0]["ids"] + ranks[1]["ids"]) == list(range(32))


@pytest.mark.parametrize(
    "name",
    [
        "other_costs",
        "other_seed",
        "other_policy",
        "other_number_of_samples",
        "other_capacity",
        "other_epoch",
        "other_order_of_a_sampler",
        "other_length_of_a_sampler",
    ],
)
def test_ranks_that_would_go_different_ways_stop_before_the_first_step(found: Found, name: str) -> None:
    """DU-01, DU-11: both say so within seconds, instead of waiting for ever."""
    ranks = raised(found, name)
    assert ranks[0] == ranks[1]
    assert ranks[0].startswith("PlanMismatchError: ranks [1] planned from other inputs than rank 0")
    assert all(saw["seconds"] < 5 for saw in found[name])


def test_a_sampler_with_the_same_seed_on_both_ranks_is_an_order_like_any_other(found: Found) -> None:
    ranks = values(found, "same_order_of_a_sampler")
    assert sorted(ranks[0] + ranks[1]) == sorted([*range(32)] * 2)


def test_plans_do_not_depend_on_how_a_process_hashes_strings(found: Found) -> None:
    """DU-11."""
    first, second = values(found, "digests")
    assert first.pop("hash") != second.pop("hash")
    assert first == second
    assert len(set(first["plans"])) == len(first["plans"]) == 4


# Losses.


def test_label_tokens_of_a_step_are_those_of_both_ranks(found: Found) -> None:
    ranks = values(found, "label_tokens")
    own: dict[int, int] = {}
    for step, count in ranks[0]["own"] + ranks[1]["own"]:
        own[step] = own.get(step, 0) + count
    for saw in ranks:
        assert [total for _, total in saw["told"]] == [own[step] for step, _ in saw["told"]]
        assert saw["report"] == saw["all"] == sum(own.values())
    assert own[1] == 0
    assert min(own[0], own[2]) > 0


def test_plain_ddp_has_the_gradients_of_one_process_however_a_step_is_cut(found: Found) -> None:
    """LN-01, LN-04: a sum of token losses, divided once by the label tokens of the step."""
    ranks = values(found, "ddp")
    for name in ranks[0]:
        first, second = (saw[name] for saw in ranks)
        assert len(first["errors"]) == 2, name
        assert max(first["errors"] + second["errors"]) < 1e-12, name
        np.testing.assert_allclose(first["losses"], ranks[0]["1 x 8"]["losses"], rtol=1e-12)
        assert first["losses"] == second["losses"]
    assert max(ranks[0]["8 x 1"]["own_labels"]) > 20 * min(ranks[0]["8 x 1"]["own_labels"]), "micro-batches differ"


def test_a_rank_or_a_step_without_labels_adds_nothing_and_breaks_nothing(found: Found) -> None:
    """LN-05."""
    ranks = values(found, "no_labels_on_one")
    assert [[step["own"] for step in saw["steps"]] for saw in ranks] == [[12, 0], [0, 0]]
    assert [[step["step"] for step in saw["steps"]] for saw in ranks] == [[12, 0]] * 2
    for saw in ranks:
        assert saw["steps"][0]["loss"] > 0
        assert min(saw["steps"][0]["grads"]) > 0
        assert np.isfinite(saw["steps"][0]["grads"]).all()
        assert saw["steps"][1]["loss"] == 0
        assert max(saw["steps"][1]["grads"]) == 0
    assert ranks[0]["steps"][0]["grads"] == ranks[1]["steps"][0]["grads"]


def test_a_loader_may_run_inside_the_loop_of_another_one(found: Found) -> None:
    ranks = values(found, "two_loaders_at_once")
    assert sorted(ranks[0] + ranks[1]) == [*range(16), *range(100, 106)]
