"""The guide to the loader names every argument with its default, and nothing that does not exist.

Its marked code blocks run as printed, as those of every page do: `test_the_block_runs_as_printed` in test_readme.py.
"""

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils.data import DataLoader  # noqa: E402

import balancer  # noqa: E402
from balancer import BalancedDataLoader, MicroBatch, ParallelSpec  # noqa: E402
from balancer.counts import COUNT_COLUMNS  # noqa: E402
from balancer.dataset_costs import LENGTH_COLUMNS  # noqa: E402
from balancer.layout import Meet  # noqa: E402
from balancer.loader_collate import MediaPresence, Output  # noqa: E402
from balancer.loader_report import LoaderReport  # noqa: E402
from balancer.mesh import DATA_DIMS, SHARING_DIMS  # noqa: E402
from balancer.microbatch_info import MicroBatchInfo  # noqa: E402
from balancer.packed_cell import LOSS_REDUCTIONS  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "loader.md"
LEAST_BLOCKS = 6


@pytest.fixture(scope="module")
def guide() -> str:
    return PAGE.read_text(encoding="utf-8")


def rows(guide: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first heading this is, without headings."""
    found = guide.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert found, heading
    return [[cell.strip() for cell in row.strip().removeprefix("|").removesuffix("|").split("|")] for row in found]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def parameters(made: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(made.__init__).parameters)


def test_every_argument_beyond_those_of_dataloader_is_in_the_table_with_its_default(guide: str) -> None:
    ours = [(name, given.default) for name, given in parameters(BalancedDataLoader).items()
            if name not in parameters(DataLoader)]  # fmt: skip
    listed = [(code(name)[0], default.strip("`").strip('"')) for name, default, _ in rows(guide, "argument")]
    assert listed == [(name, str(default)) for name, default in ours]


def test_arguments_that_differ_from_dataloader_are_arguments_of_dataloader(guide: str) -> None:
    listed = {code(name)[0] for name, _ in rows(guide, "argument of DataLoader")}
    assert {"batch_size", "sampler", "collate_fn", "drop_last"} <= listed <= set(parameters(DataLoader))


@pytest.mark.parametrize(
    ("argument", "values"),
    [("meet", set(get_args(Meet)) - {"unit"}), ("output", get_args(Output)), ("loss_reduction", LOSS_REDUCTIONS)],
)
def test_every_value_of_an_argument_is_told(guide: str, argument: str, values: set[str]) -> None:
    row = next(row for row in rows(guide, "argument") if code(row[0]) == [argument])
    assert [value for value in values if value not in " ".join(row)] == []


def test_every_way_of_media_presence_has_its_row(guide: str) -> None:
    assert [code(row[0])[0].strip('"') for row in rows(guide, "`media_presence=`")] == list(get_args(MediaPresence))


def test_the_table_of_current_is_what_current_has(guide: str) -> None:
    listed = [code(row[0])[0] for row in rows(guide, "`loader.current`")]
    assert sorted(listed) == sorted([field.name for field in fields(MicroBatchInfo)] + ["is_last_microbatch"])


def test_columns_of_costs_are_those_that_are_known(guide: str) -> None:
    listed = guide.partition("\nColumns are ")[2].partition(", [n]")[0]
    assert sorted(code(listed)) == sorted(COUNT_COLUMNS)
    assert all(f"`{name}`" in guide for name in LENGTH_COLUMNS)


def test_dims_of_a_mesh_are_known_ones(guide: str) -> None:
    sentence = guide.partition("takes dims named ")[2].partition("replica.")[0]
    assert set(code(sentence)) <= {*DATA_DIMS, *SHARING_DIMS, "pp"}


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_named(guide: str, path: Path) -> None:
    assert f"](examples/{path.name})" in guide


def test_links_and_files_lead_somewhere(guide: str) -> None:
    targets = [target for target in re.findall(r"\]\(([^)\s#]+)\)", guide) if "://" not in target]
    assert [target for target in targets if not (PAGE.parent / target).exists()] == []
    assert [name for name in re.findall(r"`(balancer/[\w/]+\.py)`", guide) if not (ROOT / name).exists()] == []


def test_everything_that_is_imported_or_named_with_its_module_exists(guide: str) -> None:
    imported = [
        (module, name.strip())
        for module, names in re.findall(r"^from (balancer[\w.]*) import (.+)$", guide, re.MULTILINE)
        for name in names.split(",")
    ]
    dotted = re.findall(r"`(balancer(?:\.[a-z_]+)*)\.(\w+)(?:\([^`]*\))?`", guide)
    assert len(imported) > LEAST_BLOCKS
    assert len(dotted) >= 4
    missing = [f"{module}.{name}" for module, name in (*imported, *dotted) if not _exists(module, name)]
    assert missing == []


def _exists(module: str, name: str) -> bool:
    """Read, not imported: an adapter may need a package that is not there."""
    if module == "balancer":
        return name in balancer.__all__ or importlib.util.find_spec(f"balancer.{name}") is not None
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    source = Path(spec.origin).read_text(encoding="utf-8")
    if re.search(rf"^(?:class|def) {name}\b|^{name}\b.* = ", source, re.MULTILINE):
        return True
    return spec.submodule_search_locations is not None and importlib.util.find_spec(f"{module}.{name}") is not None


def test_members_of_the_loader_of_batches_and_of_reports_exist(guide: str) -> None:
    for owner, prefix in ((BalancedDataLoader, "loader."), (MicroBatch, "batch."), (ParallelSpec, "ParallelSpec.")):
        named = set(re.findall(rf"(?<![\w./-]){re.escape(prefix)}([a-z_]+)", guide)) - {"current", "md"}
        known = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
        assert named - known - {"tolist"} == set(), prefix
    reported = set(re.findall(r"report\(\)\.([a-z_]+)", guide))
    assert reported <= {field.name for field in fields(LoaderReport)}
    assert len(reported) >= 2


def test_blocks_run_and_show_what_they_print(guide: str, readme_blocks: ModuleType) -> None:
    blocks = [block for block in readme_blocks.blocks(guide) if block.language == "python"]
    run = [block for block in blocks if block.mark == "run: torch"]
    assert len(run) >= LEAST_BLOCKS
    assert [block.line for block in run if "# -> " not in block.code] == []
    assert all(block.mark.startswith("not run: ") for block in blocks if block not in run)
