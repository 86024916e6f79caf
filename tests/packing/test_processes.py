"""Kernels inside workers, threads, read-only installations and without the compiler: same results everywhere."""

import importlib
import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import packing
from packing import pack, partition

PACKAGE = Path(packing.__file__).parent

# Answers of the public functions, and of every registered algorithm on inputs small enough for exact ones.
REPORT = """
import numpy as np
from packing import pack, pack_stream, partition, partition_grid, registry
from packing.registry import GRID_PLACERS

VALUES = (np.arange(1, 241, dtype=np.int64) * 7919) % 97
PAIRS = np.stack([VALUES, VALUES[::-1] % 11], axis=1)

def report_defaults(kind=np.asarray):
    values, pairs = kind(VALUES), kind(PAIRS)
    return [
        pack(values, capacity=128).bin_of.tolist(),
        pack(pairs, capacity=[300, 25], max_items_per_bin=6).bin_of.tolist(),
        pack(values, capacity=2**40).bin_of.tolist(),
        partition(values, 64).part_of.tolist(),
        partition(pairs, 5, sizes=values, capacity=2700).part_of.tolist(),
        partition(pairs, 7, equal_count=True).part_of.tolist(),
        partition(pairs, 7, stage_norm="sum").part_of.tolist(),
        *grids(pairs, 5, 4, sizes=values, capacity=900),
    ]

def grids(weights, num_ranks, num_slots, **options):
    for objective in ("per_rank", "per_slot"):
        result = partition_grid(weights, num_ranks, num_slots, objective=objective, **options)
        yield [result.rank_of.tolist(), result.slot_of.tolist()]

def report(kind=np.asarray):
    values, pairs = kind(VALUES[:9]), kind(PAIRS[:9])
    answers = report_defaults(kind)
    for name in sorted(registry.PACKERS):
        answers.append(pack(values, capacity=128, algorithm=name, num_bins_multiple=4).bin_of.tolist())
        answers.append(pack(pairs, capacity=[300, 25], algorithm=name).bin_of.tolist())
    for name in sorted(registry.PARTITIONERS):
        answers.append(partition(values, 3, algorithm=name).part_of.tolist())
        answers.append(partition(pairs, 3, algorithm=name, equal_count=True).part_of.tolist())
        answers.append(partition(pairs, 3, algorithm=name, sizes=values, capacity=200).part_of.tolist())
    for name in sorted(GRID_PLACERS):
        answers.extend(grids(pairs, 2, 2, algorithm=name))
    answers.append([ready.items.tolist() for ready in pack_stream(kind(PAIRS), capacity=[300, 25], lookahead=9)])
    return answers
"""

REPORT_HERE = REPORT + "\nimport json\nprint(json.dumps(report()))"

# One packer: two kernels to compile.
REPORT_SHORT = (
    REPORT
    + """
import json
print(json.dumps(pack(VALUES, capacity=128, algorithm="next_fit").bin_of.tolist()))
"""
)

WORKERS = (
    REPORT
    + """
import json, multiprocessing, sys

def work(_):
    return report()

if __name__ == "__main__":
    expected = report()
    num_workers = int(sys.argv[2])
    with multiprocessing.get_context(sys.argv[1]).Pool(num_workers) as pool:
        answers = pool.map(work, range(num_workers), chunksize=1)
    print(json.dumps([answer == expected for answer in answers]))
"""
)


def report_here() -> Any:
    return report_scope()["report"]()


def report_scope() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(REPORT, scope)
    return scope


def next_fit_here() -> list[int]:
    return pack(report_scope()["VALUES"], capacity=128, algorithm="next_fit").bin_of.tolist()


def start(
    script: str, folder: Path, *args: str, package: Path = PACKAGE.parent, **environment: str
) -> subprocess.Popen[str]:
    """A fresh interpreter that runs `script`."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path), *args],
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """End a process with all its children, and close its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[Any, str]:
    """(JSON answer of the script, its stderr)."""
    try:
        answer, errors = process.communicate(timeout=250)
    finally:
        end(process)
    assert process.returncode == 0, errors
    return json.loads(answer), errors


def run(script: str, folder: Path, *args: str, **environment: Any) -> tuple[Any, str]:
    return finish(start(script, folder, *args, **environment))


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 4), ("spawn", 2), ("forkserver", 2)])
def test_workers_of_every_start_method_call_the_kernels_after_the_parent_did_pk_11(
    method: str, num_workers: int, tmp_path: Path
) -> None:
    answers, _ = run(WORKERS, tmp_path, method, str(num_workers))
    assert answers == [True] * num_workers


FORK_BESIDE_A_THREAD = """
import json, multiprocessing, sys, threading, warnings
import numpy as np
from packing import pack, partition, partition_grid

def work(seed):
    table = np.random.default_rng(seed).integers(1, 4096, 500)
    options = {"capacity": 100_000, "sizes": table, "objective": "per_slot"}
    return [
        pack(table, capacity=4096).num_bins,
        partition(table, 8).makespan,
        partition_grid(table, 4, 4, **options).makespan,
    ]

def work_on():
    while True:
        work(1)

if __name__ == "__main__":
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # what this test is about
    if sys.argv[1] == "after":
        work(0)
    threading.Thread(target=work_on, daemon=True).start()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(json.dumps(pool.map(work, range(4))))
"""


@pytest.mark.parametrize("first_call", ["after", "never"])
def test_a_fork_beside_a_thread_that_loads_kernels_does_not_hang(first_call: str, tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": "here"}
    exec(FORK_BESIDE_A_THREAD, scope)
    expected = [scope["work"](seed) for seed in range(4)]  # fills the cache
    process = start(FORK_BESIDE_A_THREAD, tmp_path, first_call)
    try:
        answer, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail("a child waits for a lock that nobody will release")
    finally:
        end(process)
    assert process.returncode == 0, errors
    assert json.loads(answer) == expected


def test_a_fork_waits_for_the_thread_that_holds_the_compiler(tmp_path: Path) -> None:
    if numba.config.DISABLE_JIT:
        pytest.skip("there is no compiler to wait for")
    script = """
import json, os, threading, time, warnings
import packing
from numba.core.compiler_lock import global_compiler_lock

held, free = threading.Event(), []

def compile_for_a_while():
    with global_compiler_lock:
        held.set()
        time.sleep(0.3)
        free.append(True)

threading.Thread(target=compile_for_a_while).start()
held.wait()
warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # what this test is about
child = os.fork()
if child == 0:
    got = global_compiler_lock._lock.acquire(timeout=5)
    os._exit(0 if got and free else 1)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert run(script, tmp_path)[0] == 0


def test_calls_import_nothing_outside_the_lock_that_a_fork_waits_for(tmp_path: Path) -> None:
    if numba.config.DISABLE_JIT:
        pytest.skip("there is no compiler to wait for")
    script = """
import json, sys
import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from packing import pack, partition, partition_grid

def note(event, args):
    if event == "import" and not global_compiler_lock._lock._is_owned():
        late.append(args[0])

late, table = [], np.random.default_rng(0).integers(1, 4096, 500)
sys.addaudithook(note)
pack(table, capacity=4096)
pack(np.stack([table, table], axis=1), capacity=(4096, 5000))
partition(table, 8)
partition_grid(table, 4, 4, capacity=100_000, sizes=table, objective="per_slot")
print(json.dumps(late))
"""
    assert run(script, tmp_path)[0] == []


def test_a_numba_without_that_lock_has_no_guard(tmp_path: Path) -> None:
    script = """
import json
import numba.core.compiler_lock as owner
del owner.global_compiler_lock
import packing._jit
print(json.dumps(packing._jit._guard_forks()))
"""
    assert run(script, tmp_path)[0] is None


def test_no_kernel_runs_in_parallel() -> None:
    if numba.config.DISABLE_JIT:
        pytest.skip("kernels are plain functions without the compiler")
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(packing.__path__, "packing.")]
    options = {
        f"{module.__name__}.{name}": value.targetoptions
        for module in modules
        for name, value in vars(module).items()
        if hasattr(value, "targetoptions")
    }
    assert len(options) >= 20
    assert all(not given.get("parallel") and given.get("nogil") for given in options.values())
    assert all(not given.get("fastmath") for given in options.values())


def test_without_the_compiler_every_algorithm_gives_the_same_results_pk_13(tmp_path: Path) -> None:
    answer, errors = run(REPORT_HERE, tmp_path, NUMBA_DISABLE_JIT="1")
    assert answer == report_here()
    assert errors == ""


def test_a_read_only_installation_without_a_home_works_and_warns_once_pk_13(tmp_path: Path) -> None:
    installed = tmp_path / "site"
    shutil.copytree(PACKAGE, installed / "packing", ignore=shutil.ignore_patterns("__pycache__"))
    # Root ignores permissions, so the cache folder is blocked by a file of its name, and the home is no folder.
    (installed / "packing" / "__pycache__").write_text("", encoding="utf-8")
    environment = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "NUMBA_CACHE_DIR": "", "NUMBA_DISABLE_JIT": "0"}
    answer, errors = run(REPORT_SHORT, tmp_path, package=installed, **environment)
    assert answer == next_fit_here()
    assert errors.count("no writable cache for compiled kernels") == 1
    assert "Set NUMBA_CACHE_DIR to a writable folder" in errors


def test_threads_at_once_get_the_results_of_one_thread() -> None:
    random = np.random.Generator(np.random.Philox(6))
    inputs = [random.integers(0, 500, (300, 2)) for _ in range(8)]

    def both(sizes: np.ndarray) -> list[list[int]]:
        return [pack(sizes, capacity=[900, 900]).bin_of.tolist(), partition(sizes, 6).part_of.tolist()]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(both, inputs)) == [both(sizes) for sizes in inputs]


def test_importing_packing_compiles_nothing_and_imports_no_torch(tmp_path: Path) -> None:
    script = """
import json, sys
import packing
from packing._kernel_cache import counts
modules = [module for name, module in sys.modules.items() if name.startswith("packing.")]
kernels = [value for module in modules for value in vars(module).values() if hasattr(value, "signatures")]
print(json.dumps([sum(len(kernel.signatures) for kernel in kernels), counts, "torch" in sys.modules]))
"""
    answer, _ = run(script, tmp_path)
    assert answer == [0, {}, False]


def test_after_warm_up_no_input_compiles_and_every_kernel_has_one_signature_pk_14(tmp_path: Path) -> None:
    """Kernels of two signatures cost a second compilation, in the middle of training."""
    if numba.config.DISABLE_JIT:
        pytest.skip("nothing is compiled")
    script = (
        REPORT
        + """
import json, logging, sys
from packing.warm_up import warm_up
from packing._kernel_cache import KernelCache

def read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array

logging.basicConfig(level=logging.INFO)
def signatures():
    modules = [module for name, module in sys.modules.items() if name.startswith("packing.")]
    return {
        f"{value.__module__}.{value.__name__}": len(value.signatures)
        for module in modules
        for value in vars(module).values()
        if isinstance(getattr(value, "_cache", None), KernelCache)
    }

seconds = [warm_up(grid=True, every_algorithm=True) for _ in range(2)]
before = signatures()
expected = report()
kinds = [
    lambda array: array.tolist(),
    lambda array: array.astype(np.int32),
    lambda array: array.astype(np.uint16),
    lambda array: np.repeat(array, 2, axis=0)[::2],
    lambda array: array[::-1].copy()[::-1],
    read_only,
    np.asfortranarray,
]
same = [report(kind) == expected for kind in kinds]
print(json.dumps([same, before, signatures(), seconds]))
"""
    )
    (same, before, after, seconds), errors = run(script, tmp_path)
    assert all(same)
    assert len(after) >= 15
    assert {name: count for name, count in after.items() if count > 1} == {}
    assert {name for name in after if after[name] != before[name]} == set(), "warm_up leaves out these kernels"
    assert seconds[1] < seconds[0]
    assert errors.count("INFO:packing:kernels ready in ") == 1


@pytest.mark.slow
def test_sixteen_processes_start_at_once_on_an_empty_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folders = [tmp_path / str(index) for index in range(16)]
    for folder in folders:
        folder.mkdir()
    processes = [start(REPORT_SHORT, folder, NUMBA_CACHE_DIR=str(cache)) for folder in folders]
    answers = [finish(process) for process in processes]
    assert answers == [(next_fit_here(), "")] * 16
    assert [path.suffix for path in cache.rglob("*.*")] == [".nbc"] * 2
