"""Planning and analysis work without torch, heavy imports happen on use, and nothing ever calls home."""

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Refuses torch as an environment without it would, also where it is installed.
WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Refuse())
"""

# The only modules outside `trainer` that may need torch.
NEED_TORCH = frozenset(
    {
        "balancer.agreement",
        "balancer.batch",
        "balancer.batch_sampler",
        "balancer.dummy_media",
        "balancer.exchange",
        "balancer.loader",
        "balancer.loader_collate",
        "balancer.loader_options",
        "balancer.loader_place",
        "balancer.loader_state",
        "balancer.loader_steps",
        "balancer.plan_loader",
        "balancer.rank_sampler",
        "balancer.stream_loader",
    }
)
ADAPTERS = "balancer.adapters."  # for libraries that need torch themselves

# Modules that talk to the network. torch.distributed's own connections between ranks are not made through these.
NETWORK_MODULES = frozenset(
    {
        "aiohttp",
        "boto3",
        "botocore",
        "fsspec",
        "ftplib",
        "grpc",
        "http",
        "httpx",
        "huggingface_hub",
        "imaplib",
        "mlflow",
        "opentelemetry",
        "paramiko",
        "poplib",
        "posthog",
        "requests",
        "segment",
        "sentry_sdk",
        "smtplib",
        "statsd",
        "urllib3",
        "wandb",
        "websockets",
        "xmlrpc",
    }
)


def _modules(home: Path, package: str) -> Iterator[str]:
    for path in sorted((home / package).rglob("*.py")):
        yield ".".join(path.relative_to(home).with_suffix("").parts).removesuffix(".__init__")


def test_planning_probing_and_analysis_import_where_there_is_no_torch(home: Path, run_python: Callable) -> None:
    names = [name for package in ("packing", "dataloaders", "balancer", "tools") for name in _modules(home, package)]
    assert set(names) >= NEED_TORCH
    names = [name for name in names if name not in NEED_TORCH and not name.startswith(ADAPTERS)]
    code = f"""{WITHOUT_TORCH}
import importlib, json
failed = {{}}
for name in {[*names, "trainer"]}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


def test_importing_balancer_loads_neither_torch_nor_numba(run_python: Callable) -> None:
    code = "import json, sys, balancer; print(json.dumps([m for m in ('torch', 'numba', 'av') if m in sys.modules]))"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_a_name_that_needs_torch_says_what_to_install(run_python: Callable) -> None:
    done = run_python("-c", f"{WITHOUT_TORCH}\nfrom balancer import BalancedDataLoader")
    assert done.returncode != 0
    assert "balancer.BalancedDataLoader needs torch" in done.stderr
    assert "mllm-balancer[loader]" in done.stderr


def test_an_unknown_name_of_balancer_is_an_attribute_error(run_python: Callable) -> None:
    done = run_python("-c", "import balancer; balancer.PlanStep")
    assert "AttributeError: module 'balancer' has no attribute 'PlanStep'" in done.stderr


EXPORTS = """
import importlib, json, sys
from types import ModuleType

def is_exported(name, value):
    return not name.startswith("_") and not isinstance(value, ModuleType)

packages, modules = json.loads(sys.argv[1])
loaded = {}
for name in packages:
    package = importlib.import_module(name)
    # What is bound already; reading lazy names here would be an import order of its own.
    loaded[name] = {key: value for key, value in vars(package).items() if is_exported(key, value)}
for name in modules:
    importlib.import_module(name)
wrong, seen = [], 0
for name in packages:
    package = sys.modules[name]
    homes = vars(package).get("_HOME_OF", {})
    for key in {*loaded[name], *homes}:
        value = getattr(importlib.import_module(homes[key]), key) if key in homes else loaded[name][key]
        seen += 1
        if getattr(package, key) is not value:
            wrong.append(f"{name}.{key} is {getattr(package, key)!r}")
print(json.dumps([wrong, seen]))
"""


@pytest.mark.torch
def test_exported_names_stay_what_they_are_when_every_submodule_has_been_imported(
    home: Path, five_packages: tuple[str, ...], run_python: Callable
) -> None:
    """A submodule of the same name would take the place of a lazy one."""
    pytest.importorskip("torch")
    modules = [name for package in five_packages for name in _modules(home, package) if not name.endswith("__main__")]
    packages = [name for name in modules if (home / name.replace(".", "/")).is_dir()]
    done = run_python("-c", EXPORTS, json.dumps([packages, modules]))
    assert done.returncode == 0, done.stderr
    wrong, seen = json.loads(done.stdout)
    assert wrong == []
    assert seen > 100


def test_a_function_with_the_name_of_its_module_can_be_imported_in_any_order(run_python: Callable) -> None:
    code = """
import balancer.simulate, balancer.policies
from balancer import simulate
from balancer.simulate import peak_live, simulate as same
assert simulate is same and callable(peak_live)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reaches_network(name: str) -> bool:
    return name.partition(".")[0] in NETWORK_MODULES or name.startswith("urllib.request")


def test_only_remote_storage_imports_a_network_client(home: Path, five_packages: tuple[str, ...]) -> None:
    # The storage layer reaches what the user names by URL; the range server of the benchmarks answers on this machine.
    allowed = {home / "dataloaders" / "storage", home / "tools" / "benchmarks" / "range_server.py"}
    sources = [path for package in five_packages for path in (home / package).rglob("*.py")]
    sources = [path for path in sources if not {path, path.parent} & allowed]
    assert len(sources) > 50
    found = [
        f"{path.relative_to(home)} imports {name}"
        for path in sources
        for name in _imported(ast.parse(path.read_text(encoding="utf-8")))
        if _reaches_network(name)
    ]
    assert found == []


@pytest.mark.parametrize(
    "line", ["import requests", "from urllib import request", "import urllib.request as r", "from http.client import x"]
)
def test_the_network_check_sees_every_form_of_import(line: str) -> None:
    assert any(_reaches_network(name) for name in _imported(ast.parse(line)))


def test_parsing_urls_is_not_networking() -> None:
    assert not any(_reaches_network(name) for name in _imported(ast.parse("from urllib.parse import urlsplit")))
