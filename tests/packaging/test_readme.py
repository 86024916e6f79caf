"""README and docs tell the truth: their blocks run as printed, and the README's file tree is the tree.

Blocks marked `run` are executed in order in one folder that starts empty, so a later block may use what an earlier one
made. What a mark means is said in readme_blocks.py.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_MARK = ("bash", "sh", "shell", "console", "python")
MARKS = re.compile(r"run|run: torch|ci: (test|train)|not run: .+")
TREE_MARK = "file tree"
TREE_GLYPHS = "│├└─ \t"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per block that is to be run; their number is only known from the pages."""
    if "block_number" not in metafunc.fixturenames:
        return
    places = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8") if page.exists() else ""  # other tests fail without the README
        count = len(re.findall(r"^\s*<!--\s*run(?:: torch)?\s*-->", text, re.MULTILINE))
        places += [pytest.param(page, number, id=f"{page.stem}-{number}") for number in range(count)]
    metafunc.parametrize(("page", "block_number"), places)


def test_the_block_runs_as_printed(page: Path, block_number: int, readme_blocks: ModuleType, folder: Path) -> None:
    text = page.read_text(encoding="utf-8")
    to_run = [block for block in readme_blocks.blocks(text) if block.mark in ("run", "run: torch")]
    block = to_run[block_number]
    if block.mark == "run: torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    scripts = Path(sys.executable).parent
    if "balancer-" in block.code and not (scripts / "balancer-analyze").exists():
        pytest.skip("mllm-balancer is not installed in this environment (it runs from the tree)")
    if block.language == "python":
        command = [sys.executable, "-c", block.code]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.code]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{page.name} line {block.line}:\n{block.code}\n{done.stdout}\n{done.stderr}"
    assert readme_blocks.missing(block.code, done.stdout) == [], f"{page.name} line {block.line}:\n{done.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_says_who_runs_it(page: Path, readme_blocks: ModuleType) -> None:
    unmarked = [
        f"line {block.line}: {block.mark or 'no mark'}"
        for block in readme_blocks.blocks(page.read_text(encoding="utf-8"))
        if block.language in NEEDS_MARK and not MARKS.fullmatch(block.mark)
    ]
    assert unmarked == []


def test_the_test_command_installs_with_the_constraints_and_leaves_the_tree(
    text: str, readme_blocks: ModuleType
) -> None:
    command = readme_blocks.marked(text, "ci: test").code
    assert "-c constraints.txt" in command
    assert "cd tests" in command
    assert "-e ." not in command  # an editable install would test the tree, not the wheel


def tree_entries(code: str) -> dict[str, str]:
    """Path -> comment of a drawn file tree; nesting is by indentation, folders end in `/`."""
    entries: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in code.splitlines():
        name_and_comment = line.lstrip(TREE_GLYPHS)
        if not name_and_comment:
            continue
        indent = len(line) - len(name_and_comment)
        name, _, comment = name_and_comment.partition(" ")
        parents = [parent for parent in parents if parent[0] < indent]
        path = (parents[-1][1] if parents else "") + name
        entries[path] = comment.strip(" #")
        if name.endswith("/"):
            parents.append((indent, path))
    return entries


def test_a_drawn_tree_is_read_by_its_indentation() -> None:
    lines = (
        "packing/   numbers",
        "├── bins.py   pack",
        "└── deep/   more",
        "    └── one.py   # one",
        "tools/   reports",
    )
    drawn = "\n".join(lines)
    assert tree_entries(drawn) == {
        "packing/": "numbers",
        "packing/bins.py": "pack",
        "packing/deep/": "more",
        "packing/deep/one.py": "one",
        "tools/": "reports",
    }


def _public_children(package: Path) -> set[str]:
    """Modules and sub-packages directly in a package; names with an underscore are not for readers."""
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("_")}
    return modules | {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}


def test_the_file_tree_lists_exactly_the_modules_that_exist(
    text: str, readme_blocks: ModuleType, repository: Path, five_packages: tuple[str, ...]
) -> None:
    listed = tree_entries(readme_blocks.marked(text, TREE_MARK).code)
    expected = {f"{name}/{child}" for name in five_packages for child in _public_children(repository / name)}
    level = {
        path
        for path in listed
        if path.partition("/")[0] in five_packages and path.rstrip("/").count("/") == 1 and "/_" not in path
    }
    assert level == expected


def test_all_else_that_the_file_tree_lists_exists(text: str, readme_blocks: ModuleType, repository: Path) -> None:
    listed = tree_entries(readme_blocks.marked(text, TREE_MARK).code)
    assert [path for path in listed if not (repository / path).exists()] == []


def test_every_line_of_the_file_tree_has_a_comment(text: str, readme_blocks: ModuleType) -> None:
    listed = tree_entries(readme_blocks.marked(text, TREE_MARK).code)
    assert [path for path, comment in listed.items() if not comment] == []


def test_links_and_pictures_of_the_readme_that_name_files_lead_somewhere(text: str, repository: Path) -> None:
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text)
    files = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in files if not (repository / target).exists()] == []
