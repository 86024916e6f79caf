"""Where the packages under test and the repository lie, and helpers to start Python the way a user does."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

import balancer

REPOSITORY = Path(__file__).resolve().parents[2]
FIVE_PACKAGES = ("balancer", "dataloaders", "packing", "tools", "trainer")

RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The source tree (its packages are not necessarily the ones that are imported)."""
    return REPOSITORY


@pytest.fixture(scope="session")
def home() -> Path:
    """The folder from which `balancer` is imported: site-packages, or the tree in development."""
    return Path(balancer.__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def five_packages() -> tuple[str, ...]:
    return FIVE_PACKAGES


@pytest.fixture(scope="session")
def readme_blocks() -> ModuleType:
    """The parser that .ci/run uses, loaded by path as .ci/run does."""
    spec = importlib.util.spec_from_file_location("readme_blocks", Path(__file__).with_name("readme_blocks.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["readme_blocks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run_python(home: Path, tmp_path: Path) -> RunPython:
    """Run `python ARGS` in an empty folder, with `first` ahead of everything else on the module path."""

    def run(*args: str, first: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        path = os.pathsep.join(str(entry) for entry in (*first, home))
        return subprocess.run(
            [sys.executable, *args],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
