"""Sections `startup` and `memory`: what only a fresh process shows.

startup   import packing, first `pack` and first `partition`, with an empty cache of compiled kernels (cold) and with
          the cache that this left (warm)
memory    peak resident memory of a process that packs 10 million items, and how much of it packing added
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import packing
from tools.benchmarks.measuring import Row
from tools.benchmarks.options import Options, progress
from tools.benchmarks.workloads import clipped

MEMORY_ITEMS = 10_000_000
MEMORY_CAPACITY = 8_192
WARM_RUNS = 3
MIB = 2**20

STARTUP_PROGRAM = """
import json, time
wall, cpu = time.perf_counter(), time.process_time()
import numpy as np
import packing
imported = time.perf_counter()
sizes = np.arange(1, 1001, dtype=np.int64)
packing.pack(sizes, capacity=4096)
packed = time.perf_counter()
packing.partition(sizes, 8)
done = time.perf_counter()
print(json.dumps({"wall_s": done - wall, "cpu_s": time.process_time() - cpu, "import_s": imported - wall,
                  "pack_s": packed - imported, "partition_s": done - packed}))
"""

MEMORY_PROGRAM = """
import json, resource, sys
import numpy as np
import packing
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
packing.pack(np.arange(1, 65, dtype=np.int64), capacity=int(sys.argv[2]))
sizes = np.load(sys.argv[1])
before = peak()
result = packing.pack(sizes, capacity=int(sys.argv[2]))
print(json.dumps({"peak_bytes": peak(), "added_bytes": peak() - before, "bins": result.num_bins}))
"""


def _run(program: str, arguments: list[str], cache: Path) -> dict[str, float]:
    """The figures that a fresh interpreter prints."""
    root = str(Path(packing.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program, *arguments]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    figures: dict[str, float] = json.loads(finished.stdout)
    return figures


def startup_rows() -> Iterator[Row]:
    """One cold start and three warm ones."""
    progress("startup: cold and warm")
    with tempfile.TemporaryDirectory(prefix="packing-startup-") as folder:
        runs = [_run(STARTUP_PROGRAM, [], Path(folder)) for _ in range(1 + WARM_RUNS)]
    for setting, chosen in (("cold cache", runs[:1]), ("warm cache", runs[1:])):
        quality = {name: float(np.median([run[name] for run in chosen])) for name in chosen[0]}
        yield Row(
            section="startup",
            workload="1,000 items",
            real=False,
            setting=setting,
            num_items=1_000,
            method="import, pack, partition",
            kind="ours",
            runs_ms=tuple(1e3 * run["cpu_s"] for run in chosen),
            quality=quality,
        )


def memory_rows(options: Options, *, num_items: int = MEMORY_ITEMS) -> Iterator[Row]:
    """Packing many items of the text workload, given as int64."""
    progress(f"memory: n = {num_items:,}")
    with tempfile.TemporaryDirectory(prefix="packing-memory-") as folder:
        file = Path(folder) / "sizes.npy"
        np.save(file, clipped(options.samples("text", num_items).tokens, MEMORY_CAPACITY))
        figures = _run(MEMORY_PROGRAM, [str(file), str(MEMORY_CAPACITY)], Path(folder))
    yield Row(
        section="memory",
        workload="text",
        real=False,
        setting=f"{MEMORY_CAPACITY:,} tokens",
        num_items=num_items,
        method="best_fit_decreasing",
        kind="ours",
        quality={
            "peak_mib": figures["peak_bytes"] / MIB,
            "added_mib": figures["added_bytes"] / MIB,
            "input_mib": num_items * 8 / MIB,
        },
    )
