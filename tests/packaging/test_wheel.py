"""The wheel holds exactly our five packages, complete and typed, and its commands start."""

import email.parser
import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

NEEDED_SETUPTOOLS = 77


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(
    repository: Path, five_packages: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> zipfile.ZipFile:
    """A wheel built from a copy of the tree, so that no build folder of an earlier build takes part."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, tree / name)
    for name in (*five_packages, "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(repository / name, tree / name, ignore=ignored)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), *_isolation()]
    done = subprocess.run([*command, str(tree)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def _isolation() -> list[str]:
    """Build with the setuptools that is here where it is new enough: no download, a few seconds less."""
    try:
        major = int(importlib.metadata.version("setuptools").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return []
    return ["--no-build-isolation"] if major >= NEEDED_SETUPTOOLS else []


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.parser.Parser().parsestr(wheel.read(name).decode("utf-8"))


def test_the_wheel_holds_exactly_the_five_packages(wheel: zipfile.ZipFile, five_packages: tuple[str, ...]) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {*five_packages, info}
    assert info.startswith("mllm_balancer-")


def test_each_package_of_the_wheel_is_marked_as_typed(wheel: zipfile.ZipFile, five_packages: tuple[str, ...]) -> None:
    missing = [name for name in five_packages if f"{name}/py.typed" not in wheel.namelist()]
    assert missing == []


def test_every_module_of_the_tree_is_in_the_wheel(
    wheel: zipfile.ZipFile, repository: Path, five_packages: tuple[str, ...]
) -> None:
    in_tree = {
        path.relative_to(repository).as_posix() for name in five_packages for path in (repository / name).rglob("*.py")
    }
    in_wheel = {name for name in wheel.namelist() if name.endswith(".py")}
    assert in_wheel == in_tree


def test_every_folder_with_modules_is_listed_and_is_a_package(
    project: dict[str, Any], repository: Path, five_packages: tuple[str, ...]
) -> None:
    folders = {path.parent for name in five_packages for path in (repository / name).rglob("*.py")}
    dotted = {folder.relative_to(repository).as_posix().replace("/", ".") for folder in folders}
    assert set(project["tool"]["setuptools"]["packages"]) == dotted
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_metadata_says_what_a_user_must_know(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    assert metadata["Name"] == "mllm-balancer"
    assert metadata["Requires-Python"] == "<3.15,>=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == {"loader", "train", "analyze", "remote", "all", "test"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
    assert len(str(metadata.get_payload())) > 500  # the README is its description


def test_the_base_installation_does_not_ask_for_torch(project: dict[str, Any]) -> None:
    assert not any(line.startswith("torch") for line in project["project"]["dependencies"])
    assert any(line.startswith("torch>=2.13") for line in project["project"]["optional-dependencies"]["train"])


def test_decord_is_asked_for_only_where_it_has_wheels(wheel: zipfile.ZipFile) -> None:
    (line,) = (line for line in _metadata(wheel).get_all("Requires-Dist", []) if line.startswith("decord"))
    condition = line.partition(";")[2]
    assert "Linux" in condition
    assert "x86_64" in condition


def test_the_five_packages_and_the_wheel_carry_one_version(
    wheel: zipfile.ZipFile, five_packages: tuple[str, ...], run_python: Callable
) -> None:
    code = (
        f"import importlib, json; print(json.dumps([importlib.import_module(m).__version__ for m in {five_packages}]))"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {_metadata(wheel)["Version"]}


@pytest.mark.parametrize(
    ("command", "entry"), [("balancer-train", "balancer._entry:train"), ("balancer-analyze", "balancer._entry:analyze")]
)
def test_the_wheel_installs_the_command(wheel: zipfile.ZipFile, command: str, entry: str) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    assert f"{command} = {entry}" in wheel.read(name).decode("utf-8").splitlines()


@pytest.mark.parametrize("entry", ["train", "analyze"])
def test_the_command_explains_itself_with_exit_code_0(entry: str, run_python: Callable) -> None:
    code = f"import sys; sys.argv = ['x', '--help']; from balancer._entry import {entry}; {entry}()"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert f"balancer-{entry}" in done.stdout


@pytest.mark.parametrize("command", ["balancer-train", "balancer-analyze"])
def test_the_installed_script_explains_itself(command: str) -> None:
    script = Path(sys.executable).parent / command
    if not script.exists():
        pytest.skip("mllm-balancer is not installed in this environment (it runs from the tree)")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
