"""Files beside the code: constraints fit pyproject.toml, CI is one valid script, the change log has its classes."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

BREAKING_CLASSES = ("ITERATION ORDER", "CHECKPOINT", "API", "CONFIG", "PLAN")


@pytest.fixture(scope="module")
def pins(repository: Path) -> dict[str, Version]:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==") for line in lines if line.strip() and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pinned), "every line of constraints.txt is name==version"
    return {canonicalize_name(name): Version(version) for name, version in pinned}


@pytest.fixture(scope="module")
def direct(repository: Path) -> list[Requirement]:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(_requirements(project))


def _requirements(project: dict[str, object]) -> Iterator[Requirement]:
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for line in (line for group in groups for line in group):
        requirement = Requirement(line)
        if requirement.name != "mllm-balancer":  # an extra that is made of other extras
            yield requirement


def test_every_direct_dependency_is_pinned_to_a_version_that_is_allowed(
    pins: dict[str, Version], direct: list[Requirement]
) -> None:
    assert len(direct) > 15
    unpinned = [entry.name for entry in direct if canonicalize_name(entry.name) not in pins]
    refused = [str(entry) for entry in direct if not entry.specifier.contains(pins[canonicalize_name(entry.name)])]
    assert (unpinned, refused) == ([], [])


def test_torch_is_pinned_without_a_build_so_that_an_installed_cpu_build_satisfies_it(pins: dict[str, Version]) -> None:
    assert pins["torch"] == Version("2.13.0")
    assert pins["torch"].local is None


def test_pins_are_listed_once(repository: Path, pins: dict[str, Version]) -> None:
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert sum("==" in line and not line.startswith("#") for line in lines) == len(pins)


def test_the_ci_script_is_executable_bash_without_syntax_errors(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


def test_the_change_log_opens_with_unreleased_and_uses_known_classes(repository: Path) -> None:
    text = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections[0] == "Unreleased"
    unreleased = text.partition("## Unreleased")[2].partition("\n## ")[0]
    classes = re.findall(r"^### (.+)$", unreleased, re.MULTILINE)
    assert set(classes) <= {*BREAKING_CLASSES, "Added", "Fixed"}
    assert all(name in text for name in BREAKING_CLASSES)


def test_contributing_names_the_one_command_that_checks_everything(repository: Path) -> None:
    assert ".ci/run" in (repository / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_licence_is_apache_2(repository: Path) -> None:
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
