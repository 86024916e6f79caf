"""The guide to planning names every policy, schedule, rule and bound, and no option that does not exist."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from balancer.layout import EncoderPlace, Meet
from balancer.plan import BINDINGS, BOUNDS
from balancer.policies import policy_names
from balancer.schedule import schedule_names
from tools.plan_command import PlanCommand
from tools.plan_measure import KINDS
from trainer.config import FitConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def guide() -> str:
    return (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def _first_cells(guide: str, heading: str) -> list[str]:
    """Code in the first column of the table whose first heading this is."""
    rows = guide.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [re.findall(r"`([^`]+)`", row)[0] for row in rows]


def test_the_tables_hold_what_is_registered(guide: str) -> None:
    assert sorted(_first_cells(guide, "policy")) == sorted(policy_names())
    assert sorted(_first_cells(guide, "schedule")) == sorted(schedule_names())
    assert _first_cells(guide, "encoder") == list(get_args(EncoderPlace))
    assert _first_cells(guide, "`--meet`") == list(get_args(Meet))
    assert _first_cells(guide, "bound") == list(BOUNDS)


def test_what_binds_and_the_causes_of_idle_time_are_named(guide: str) -> None:
    words = " ".join(guide.split())
    assert all(f"`{binding}`" in words for binding in BINDINGS)
    assert all(f"*{kind.replace('_', ' ')}*" in words for kind in KINDS)


def test_every_option_exists(guide: str) -> None:
    known = {field.name for command in (PlanCommand, FitConfig) for field in fields(command)}
    aliases = {"dp", "pp", "chunks", "steps"}
    named = {name.replace("-", "_") for name in re.findall(r"(?<![\w-])--([a-z][a-z-]+)(?![\w>])", guide)}
    assert named - known - aliases == set()
    assert {"encoder", "meet", "lookahead_steps", "step_tokens", "tail", "oversize", "memory_gib"} <= named
