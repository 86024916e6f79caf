"""Kernels inside workers, threads, read-only installations and without the compiler: same results everywhere."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import packing
from packing import grouping, pack, partition
from packing.packers import best_fit, next_fit
from packing.partitioners import lpt, refine

PACKAGE = Path(packing.__file__).parent

REPORT = """
import json
import numpy as np
from packing import pack, partition

def report(_=None):
    values = (np.arange(1, 241, dtype=np.int64) * 7919) % 97
    pairs = np.stack([values, values[::-1] % 11], axis=1)
    return [
        pack(values, capacity=128).bin_of.tolist(),
        pack(values, capacity=128, algorithm="next_fit", num_bins_multiple=8).bin_of.tolist(),
        pack(pairs, capacity=[300, 25], max_items_per_bin=6).bin_of.tolist(),
        partition(pairs, 5, sizes=values, capacity=2700).part_of.tolist(),
        partition(pairs, 7, equal_count=True).part_of.tolist(),
    ]
"""

WORKERS = (
    REPORT
    + """
import multiprocessing, sys

if __name__ == "__main__":
    expected = report()
    num_workers = int(sys.argv[2])
    with multiprocessing.get_context(sys.argv[1]).Pool(num_workers) as pool:
        answers = pool.map(report, range(num_workers), chunksize=1)
    print(json.dumps([answer == expected for answer in answers]))
"""
)


def report_here() -> Any:
    scope: dict[str, Any] = {}
    exec(REPORT, scope)
    return scope["report"]()


def run(script: str, folder: Path, *args: str, package: Path = PACKAGE.parent, **environment: str) -> tuple[Any, str]:
    """Run `script` in a fresh interpreter; (its JSON answer, stderr)."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path), *args],
        env={**os.environ, "PYTHONPATH": str(package), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 4), ("spawn", 2), ("forkserver", 2)])
def test_workers_of_every_start_method_call_the_kernels_after_the_parent_did_pk_11(
    method: str, num_workers: int, tmp_path: Path
) -> None:
    answers, _ = run(WORKERS, tmp_path, method, str(num_workers))
    assert answers == [True] * num_workers


def test_no_kernel_runs_in_parallel() -> None:
    if numba.config.DISABLE_JIT:
        pytest.skip("kernels are plain functions without the compiler")
    kernels = {
        f"{module.__name__}.{name}": value.targetoptions
        for module in (best_fit, grouping, lpt, next_fit, refine)
        for name, value in vars(module).items()
        if hasattr(value, "targetoptions")
    }
    assert len(kernels) >= 6
    assert all(not options.get("parallel") and options.get("nogil") for options in kernels.values())
    assert all(not options.get("fastmath") for options in kernels.values())


def test_without_the_compiler_the_results_are_the_same_pk_13(tmp_path: Path) -> None:
    answer, errors = run(REPORT + "\nprint(json.dumps(report()))", tmp_path, NUMBA_DISABLE_JIT="1")
    assert answer == report_here()
    assert errors == ""


def test_a_read_only_installation_without_a_home_works_and_warns_once_pk_13(tmp_path: Path) -> None:
    installed = tmp_path / "site"
    shutil.copytree(PACKAGE, installed / "packing", ignore=shutil.ignore_patterns("__pycache__"))
    # Root ignores permissions, so the cache folder is blocked by a file of its name, and the home is no folder.
    (installed / "packing" / "__pycache__").write_text("", encoding="utf-8")
    environment = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "NUMBA_CACHE_DIR": "", "NUMBA_DISABLE_JIT": "0"}
    answer, errors = run(REPORT + "\nprint(json.dumps(report()))", tmp_path, package=installed, **environment)
    assert answer == report_here()
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
import packing.packers.best_fit, packing.partitioners.refine
kernels = [packing.packers.best_fit._best_fit_scalar, packing.partitioners.refine._refine]
print(json.dumps([[len(getattr(kernel, "signatures", ())) for kernel in kernels], "torch" in sys.modules]))
"""
    answer, _ = run(script, tmp_path)
    assert answer == [[0, 0], False]
