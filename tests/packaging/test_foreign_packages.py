"""A user's own `packing.py` or another distribution's `tools` is named in the error, never used in place of ours."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

POISON = "raise SystemExit('the foreign module was executed')\n"

ENTRY = "import sys; sys.argv = ['balancer', '--help']; from balancer._entry import {0}; {0}()"


def _foreign(folder: Path, name: str, *, as_package: bool) -> Path:
    """A foreign module or package `name`; the file that Python would run."""
    path = folder / name / "__init__.py" if as_package else folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(POISON)
    return path


def _names_the_foreign_file(done: subprocess.CompletedProcess[str], name: str, path: Path) -> None:
    assert done.returncode not in (0, None)
    assert f"import name {name!r} belongs to {path}, not to mllm-balancer" in done.stderr
    assert "Rename or uninstall" in done.stderr
    assert "the foreign module was executed" not in done.stderr


@pytest.mark.parametrize("as_package", [False, True], ids=["module", "package"])
@pytest.mark.parametrize("name", ["packing", "dataloaders"])
def test_a_foreign_module_that_balancer_would_import_is_named(
    name: str, as_package: bool, run_python: Callable, tmp_path: Path
) -> None:
    path = _foreign(tmp_path / "theirs", name, as_package=as_package)
    done = run_python("-c", "import balancer", first=[tmp_path / "theirs"])
    _names_the_foreign_file(done, name, path)


@pytest.mark.parametrize("command", ["train", "analyze"])
@pytest.mark.parametrize("name", ["tools", "trainer"])
def test_a_foreign_package_that_a_command_would_run_is_named_with_exit_code_2(
    name: str, command: str, run_python: Callable, tmp_path: Path
) -> None:
    path = _foreign(tmp_path / "theirs", name, as_package=True)
    done = run_python("-c", ENTRY.format(command), first=[tmp_path / "theirs"])
    _names_the_foreign_file(done, name, path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_foreign_trainer_does_not_disturb_the_loader(run_python: Callable, tmp_path: Path) -> None:
    _foreign(tmp_path / "theirs", "trainer", as_package=False)
    done = run_python("-c", "import balancer; print(balancer.__version__)", first=[tmp_path / "theirs"])
    assert done.returncode == 0, done.stderr


def test_a_packing_module_beside_the_users_script_is_named(run_python: Callable, tmp_path: Path) -> None:
    path = _foreign(tmp_path / "project", "packing", as_package=False)
    script = tmp_path / "project" / "train_my_model.py"
    script.write_text("from balancer import Layout\n")
    _names_the_foreign_file(run_python(str(script)), "packing", path)


def test_an_installation_without_one_of_the_five_packages_says_so(
    home: Path, tmp_path: Path, five_packages: tuple[str, ...]
) -> None:
    lonely = tmp_path / "site"
    lonely.mkdir()
    for name in five_packages:
        if name != "packing":
            _copy_sources(home / name, lonely / name)
    # -S and -I: neither site-packages nor PYTHONPATH may provide the missing one.
    code = f"import sys; sys.path.insert(0, {str(lonely)!r}); import balancer"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "package 'packing' of mllm-balancer is missing" in done.stderr
    assert "Reinstall mllm-balancer" in done.stderr


def _copy_sources(source: Path, destination: Path) -> None:
    for path in source.rglob("*.py"):
        target = destination / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
