"""The guide to costs names every family, reason code, column and command. Its blocks run in test_readme.py."""

import re
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import DTypeLike

from dataloaders.counts import MediaKind
from dataloaders.errors import Reason
from dataloaders.estimators import registered_estimators
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS
from dataloaders.index_format import Confidence
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


def _columns(guide: str, table: str) -> dict[str, list[str]]:
    """Column -> [type, unit, meaning] of the table whose first heading is `index.` and the name of the table."""
    rows = guide.partition(f"\n| `index.{table}` |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): rest for name, *rest in cells}


@pytest.mark.parametrize(("table", "columns"), [("samples", SAMPLE_COLUMNS), ("items", ITEM_COLUMNS)])
def test_every_column_of_an_index_is_in_the_table_with_its_type(
    guide: str, table: str, columns: Mapping[str, DTypeLike]
) -> None:
    listed = _columns(guide, table)
    assert [(name, cells[0]) for name, cells in listed.items()] == [
        (name, np.dtype(dtype).name) for name, dtype in columns.items()
    ]
    assert [name for name, cells in listed.items() if len(cells) != 3 or not cells[2]] == []


@pytest.mark.parametrize(
    ("table", "name", "codes"), [("items", "kind", MediaKind), ("samples", "confidence", Confidence)]
)
def test_every_code_of_a_column_is_told(guide: str, table: str, name: str, codes: type[IntEnum]) -> None:
    meaning = _columns(guide, table)[name][2]
    assert re.findall(r"(\d+) (\w+)", meaning) == [(str(code.value), code.name.lower()) for code in codes]
