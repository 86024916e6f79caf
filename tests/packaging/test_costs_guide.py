"""The guide to costs names every family, reason code and command that there is. Its blocks run in test_readme.py."""

import re
from pathlib import Path

import pytest

from dataloaders.errors import Reason
from dataloaders.estimators import registered_estimators
from dataloaders.scan_rows import UNFIT
from tools.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def guide() -> str:
    return (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")


def _second_cells(guide: str, heading: str) -> set[str]:
    """Code in the second column of the table under a heading."""
    section = guide.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")]
    return {name for cell in rows[2:] for name in re.findall(r"`([^`]+)`", cell)}


def test_the_table_of_families_has_exactly_the_registered_model_types(guide: str) -> None:
    built_in = {kind for kind in registered_estimators() if not kind[0].isupper() and not kind.startswith("my_")}
    assert _second_cells(guide, "Families") == built_in


def test_the_table_of_refusals_has_exactly_the_reason_codes(guide: str) -> None:
    section = guide.partition("\n### Limits and refusals\n")[2].partition("\n#")[0]
    listed = section.partition("| reason |")[2]
    assert sorted(re.findall(r"^\| `(\w+)` \|", listed, re.MULTILINE)) == sorted(Reason)


def test_the_policies_and_the_commands_of_costs_are_named(guide: str) -> None:
    assert re.findall(r"^\| `(skip|clamp|error)`", guide, re.MULTILINE) == list(UNFIT)
    named = set(re.findall(r"balancer-analyze (\w+)", guide))
    assert {"tokens", "index", "merge", "data"} <= named <= set(COMMANDS)
