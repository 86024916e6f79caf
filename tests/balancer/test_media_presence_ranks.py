"""A text-only rank under FSDP2: the step ends, and its gradients are those of one process (media_presence="dummy").

One world of two gloo processes for all scenarios, see media_presence_worker.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.multirank, pytest.mark.slow]


WORKER = Path(__file__).with_name("media_presence_worker.py")
SCENARIOS = ["user-model", "qwen-hooks-before-sharding", "qwen-hooks-after-sharding"]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, run_two_ranks: Callable[..., None]
) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw, by scenario."""
    written = tmp_path_factory.mktemp("media") / "found.json"
    run_two_ranks(WORKER, str(written))
    return dict(json.loads(written.read_text(encoding="utf-8")))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_of_a_sharded_step_with_a_text_only_rank_are_those_of_one_process(
    found: dict[str, list[dict[str, Any]]], scenario: str
) -> None:
    """DU-02: the rank without media runs the vision path on a dummy, which adds nothing to loss or gradients."""
    for rank, seen in enumerate(found[scenario]):
        assert seen["missing"] == [], f"rank {rank}"
        assert seen["difference"] <= 1e-6, f"rank {rank}"
        assert seen["loss_difference"] <= 1e-5, f"rank {rank}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_comparison_could_fail(found: dict[str, list[dict[str, Any]]], scenario: str) -> None:
    """The tower's gradients are thousands of times larger than what is allowed, so a lost one would show."""
    for seen in found[scenario]:
        assert seen["of_tower"] >= 1e-3
        assert seen["largest"] <= 10
