"""The cache of compiled kernels: stale or damaged code never runs, and nothing that is wrong with it raises."""

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest

import packing
from packing import _kernel_cache

PACKAGE = Path(packing.__file__).parent
VALUES = np.arange(10, dtype=np.int64)
TOTAL = """
from packing._jit import jit

@jit
def total(values):
    result = 0
    for value in values:
        result += value
    return result
"""

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, where every warning is the first of its kind; numba's setting is restored afterwards."""
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
        patch.setattr(_kernel_cache, "_warned", set())
        patch.setattr(_kernel_cache, "counts", type(_kernel_cache.counts)())
        numba.config.reload_config()
        yield tmp_path
    numba.config.reload_config()


def load(folder: Path, source: str = TOTAL) -> ModuleType:
    """The module of that source, executed as if in a fresh process."""
    path = folder / "kernels.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernels", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.*"))


def counts() -> dict[str, int]:
    return dict(_kernel_cache.counts)


def flip(position: int) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position] ^= 0x10
        return bytes(changed)

    return damage


def garbage_with_a_right_checksum(data: bytes) -> bytes:
    rest = data[32:64] + b"no pickle"
    return hashlib.sha256(rest).digest() + rest


def test_a_second_process_loads_what_the_first_compiled(folder: Path) -> None:
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 1}
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 1, "loaded": 1}
    (entry,) = entries(folder)
    assert entry.name.startswith(f"kernels.total.{sys.implementation.cache_tag}.")
    assert oct(entry.stat().st_mode & 0o777) == "0o644"
    assert oct(entry.parent.stat().st_mode & 0o777) == "0o755"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"garbage" * 1000,
        *(flip(position) for position in (0, 40, 2000, -3000, -1)),
        garbage_with_a_right_checksum,
    ],
    ids=["empty", "cut in the head", "cut", "longer", "garbage", *(f"flip {n}" for n in range(5)), "no pickle"],
)
def test_a_damaged_entry_is_compiled_anew_and_rewritten_with_one_warning(
    damage: Callable[[bytes], bytes], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder).total(VALUES)
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert load(folder).total(VALUES) == 45
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 2, "loaded": 1}
    assert entries(folder) == [entry]
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "compiled anew" in warning.getMessage()


def test_a_pipe_of_the_name_of_an_entry_does_not_wait_for_a_writer(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder).total(VALUES)
    (entry,) = entries(folder)
    entry.unlink()
    os.mkfifo(entry)
    assert load(folder).total(VALUES) == 45
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 2, "loaded": 1}
    (warning,) = caplog.records
    assert f"{entry} is not a regular file" in warning.getMessage()


def test_a_folder_of_the_name_of_an_entry_is_what_the_warning_names(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder).total(VALUES)
    (entry,) = entries(folder)
    entry.unlink()
    entry.mkdir()
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 2}
    assert entries(folder) == [entry]
    (warning,) = caplog.records
    assert f"{entry} is not a regular file" in warning.getMessage()


def test_a_link_to_an_entry_is_followed(folder: Path) -> None:
    load(folder).total(VALUES)
    (entry,) = entries(folder)
    entry.symlink_to(entry.rename(folder / "elsewhere"))
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 1, "loaded": 1}


def test_an_interrupted_write_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load(folder).total(VALUES)
    assert entries(folder) == []


def test_the_start_of_compiling_is_logged_once_and_only_where_nothing_was_loaded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "packing")
    other = TOTAL.replace("def total", "def again")
    load(folder, TOTAL).total(VALUES)
    load(folder, other).again(VALUES)
    assert caplog.messages == ["compiling kernels, once per installation"]
    caplog.clear()
    _kernel_cache.counts.clear()
    _kernel_cache._warned.clear()
    load(folder, other).again(VALUES)
    load(folder, TOTAL.replace("def total", "def third")).third(VALUES)
    assert counts() == {"loaded": 1, "compiled": 1}
    assert caplog.messages == []


def test_a_changed_kernel_is_compiled_anew_in_the_same_file(folder: Path) -> None:
    load(folder).total(VALUES)
    before = entries(folder)
    assert load(folder, TOTAL.replace("+= value", "+= 2 * value")).total(VALUES) == 90
    assert counts() == {"compiled": 2}
    assert entries(folder) == before


def test_a_change_in_a_file_that_the_kernel_imports_is_compiled_anew(folder: Path) -> None:
    """Only bitset.py changes; numba's own cache would run the old code of the caller."""
    installed = folder / "site" / "packing"
    shutil.copytree(PACKAGE, installed, ignore=shutil.ignore_patterns("__pycache__"))
    source = TOTAL.replace("import jit", "import jit\nfrom packing.bitset import lowest_bit")
    path = folder / "script.py"
    path.write_text(
        source.replace("result += value", "result += value + 0 * lowest_bit(value)")
        + "\nimport json, numpy\nfrom packing._kernel_cache import counts"
        + "\nprint(json.dumps([int(total(numpy.arange(10))), counts]))",
        encoding="utf-8",
    )

    def answer() -> Any:
        environment = {**os.environ, "PYTHONPATH": str(installed.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        return json.loads(subprocess.check_output([sys.executable, str(path)], env=environment, timeout=200))

    assert answer() == [45, {"compiled": 1}]
    bitset = installed / "bitset.py"
    text = bitset.read_text(encoding="utf-8")
    changed = text.replace("    return int(_LOWEST_BIT", "    return 1 + int(_LOWEST_BIT")
    assert changed != text
    bitset.write_text(changed, encoding="utf-8")
    assert answer() == [45, {"compiled": 1}]
    for untouched in (installed / "bins.py", installed / "registry.py"):
        untouched.write_text(untouched.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert answer() == [45, {"loaded": 1}]


def test_the_stamp_follows_imports_of_imports_and_of_whole_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "packing.a": b"from packing.b import x",
        "packing.b": b"if True:\n    import packing.c.d\n",
        "packing.c.d": b"import numpy\nfrom third import z\n",
        "above.e": b"2",
    }
    own = b"from packing.a import (\n    y,\n)\nfrom above.e import w\n"
    monkeypatch.setattr(_kernel_cache, "_text", texts.__getitem__)
    function = SimpleNamespace(
        __globals__={"__loader__": SimpleNamespace(get_data=lambda path: own)},
        __code__=SimpleNamespace(co_filename="kernels.py", co_firstlineno=1),
        __module__="above.kernels",
    )
    stamps = [_kernel_cache._stamp(function)]  # type: ignore[arg-type]
    for module in texts:
        texts[module] += b"\n# changed"
        stamps.append(_kernel_cache._stamp(function))  # type: ignore[arg-type]
    assert len(set(stamps)) == 5


def test_the_text_of_a_subpackage_is_that_of_everything_in_it() -> None:
    packers = _kernel_cache._text("packing.packers")
    assert (PACKAGE / "packers" / "next_fit.py").read_bytes() in packers
    everything = _kernel_cache._text("packing")
    assert packers in everything
    assert (PACKAGE / "bitset.py").read_bytes() in everything
    assert _kernel_cache._text("packing.bitset") == (PACKAGE / "bitset.py").read_bytes()


@pytest.mark.parametrize("target", ["folder", "file"])
def test_code_that_anybody_could_have_written_is_not_loaded(
    target: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder).total(VALUES)
    (entry,) = entries(folder)
    path = entry if target == "file" else entry.parent
    path.chmod(path.stat().st_mode | 0o002)
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 2}
    assert f"is not used: anybody may write {path}" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_code_of_another_user_is_not_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(folder).total(VALUES)
    (entry,) = entries(folder)
    os.chown(entry, 12345, -1)
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 2}
    assert f"is not used: {entry} belongs to user 12345" in caplog.text


def test_without_a_writable_folder_each_process_compiles_with_one_warning_pk_13(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "cache").write_text("not a folder", encoding="utf-8")  # root ignores permissions
    for _ in range(2):
        assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 2}
    (warning,) = caplog.records
    assert "Set NUMBA_CACHE_DIR to a writable folder" in warning.getMessage()


def test_a_read_only_folder_that_was_filled_before_is_used_pk_13(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder).total(VALUES)

    def refuse(name: str, data: bytes) -> None:
        raise AssertionError("nothing is left to write")

    monkeypatch.setattr(_kernel_cache, "_write", refuse)
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 1, "loaded": 1}
    assert not caplog.records


def test_without_a_home_the_folders_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kernel_cache._numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for a user without a home
    assert list(_kernel_cache._folders()) == [PACKAGE / "__pycache__"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert [path.parent for path in _kernel_cache._folders()][1:] == [Path("/somewhere/numba")]


@pytest.mark.parametrize("part", ["_rebuild", "_externals", "_file_name"])
def test_a_numba_with_other_insides_compiles_and_warns(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder).total(VALUES)

    def fail(*_: object) -> None:
        raise AttributeError("gone")

    owner = _kernel_cache.KernelCache if part == "_file_name" else _kernel_cache
    monkeypatch.setattr(owner, part, fail)
    if part == "_externals":
        entries(folder)[0].unlink()
    assert load(folder).total(VALUES) == 45
    assert counts() == {"compiled": 2}
    assert "anew: AttributeError: gone" in caplog.text


def test_a_dispatcher_without_a_place_for_a_cache_stays_without(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    other = SimpleNamespace()
    _kernel_cache.add_cache(other, load(folder).total.py_func)
    assert vars(other) == {}
    assert "compiled kernels are not cached" in caplog.text
    assert numba.__version__ in caplog.text


def test_symbols_that_are_not_loaded_yet_make_the_whole_compiler_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(folder).total(VALUES)
    asked: list[str] = []
    llvm = SimpleNamespace(address_of_symbol=asked.append, llvm_version_info=_kernel_cache._llvm.llvm_version_info)
    monkeypatch.setattr(_kernel_cache, "_llvm", llvm)
    refreshed: list[bool] = []
    context = type(load(folder).total.targetctx)
    original = context.refresh
    monkeypatch.setattr(context, "refresh", lambda self: (refreshed.append(True), original(self))[1])
    assert load(folder).total(VALUES) == 45
    assert counts()["loaded"] == 1
    assert asked
    assert refreshed


def test_a_kernel_with_a_closure_is_refused(folder: Path) -> None:
    source = "from packing._jit import jit\ndef make(step):\n    @jit\n    def add(x):\n        return x + step\n"
    with pytest.raises(TypeError, match=r"kernel make\.<locals>\.add has a closure"):
        load(folder, source).make(1)


def test_recompile_does_not_load(folder: Path) -> None:
    load(folder).total(VALUES)
    kernel = load(folder).total
    kernel(VALUES)
    kernel.recompile()
    assert kernel(VALUES) == 45
    assert counts() == {"compiled": 2, "loaded": 1}
    assert str(folder) in kernel.stats.cache_path


def test_an_inner_function_is_compiled_once_for_literals_and_variables(folder: Path) -> None:
    source = """
from packing._jit import jit, jit_inner

@jit_inner
def power(base, exponent):
    return base ** exponent if exponent >= 0 else 0

@jit
def total(base):
    return power(base, 0) + power(2, -1) + power(base, exponent=3) + power(1, base)
"""
    module = load(folder, source)
    assert module.total(2) == 1 + 0 + 8 + 1
    assert len(module.power.signatures) == 1


RACE = (
    TOTAL
    + """
import json, multiprocessing
import numba, numpy
from packing._kernel_cache import counts

def work(barrier, answers):
    barrier.wait()
    answers.put([int(total(numpy.arange(10))), dict(counts)])

if __name__ == "__main__":
    numba.njit(lambda value: value)(1)  # load the compiler once, so that the children reach the cache together
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(16), context.Queue()
    workers = [context.Process(target=work, args=(barrier, answers)) for _ in range(16)]
    for worker in workers:
        worker.start()
    print(json.dumps([answers.get() for _ in workers]))
"""
)


def test_sixteen_processes_at_once_leave_one_whole_entry(folder: Path) -> None:
    script = folder / "race.py"
    script.write_text(RACE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers = json.loads(done.stdout)
    assert [total for total, _ in answers] == [45] * 16
    assert {"compiled": 1} in [counted for _, counted in answers]
    (entry,) = entries(folder)
    data = entry.read_bytes()
    assert hashlib.sha256(data[32:]).digest() == data[:32]
