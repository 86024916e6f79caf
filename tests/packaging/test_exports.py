"""Names that users import from `dataloaders`: all there, the same whatever is imported first, and cheap."""

import json
from collections.abc import Callable
from types import ModuleType

import pytest

import dataloaders

SOURCES = {
    *("TarSource", "JsonlSource", "ParquetSource", "HFDatasetSource", "MapDatasetSource", "MemorySource", "RawSample"),
    *("MixtureSource", "IndexConcat", "open_source", "open_mixture", "read_mixture", "RowFields", "RowOptions"),
    *("Storage", "StorageOptions", "TarStream", "IterableStream", "HFStream", "StreamLimits", "MissingFileError"),
}
EXPORTED: list[str] = vars(dataloaders)["__all__"]


@pytest.mark.parametrize("name", EXPORTED)
def test_every_name_is_there_and_is_no_module(name: str) -> None:
    assert not isinstance(getattr(dataloaders, name), ModuleType)
    assert name in dir(dataloaders)


def test_sources_can_be_imported_from_the_package() -> None:
    assert set(EXPORTED) >= SOURCES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dataloaders' has no attribute 'TarSink'"):
        _ = dataloaders.TarSink  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["open_source", "open_mixture"])
def test_a_function_stays_one_when_its_module_of_the_same_name_is_imported(name: str, run_python: Callable) -> None:
    done = run_python("-c", f"import dataloaders.{name}\nfrom dataloaders import {name}\nprint(type({name}).__name__)")
    assert done.stdout.strip() == "function", done.stderr


def test_importing_the_package_loads_nothing_that_few_programs_need(run_python: Callable) -> None:
    heavy = ("torch", "datasets", "fsspec", "aiohttp", "jinja2", "numba", "decord", "torchcodec", "pandas")
    code = f"import json, sys, dataloaders; print(json.dumps([m for m in {heavy} if m in sys.modules]))"
    done = run_python("-c", code)
    assert json.loads(done.stdout) == [], done.stderr
