"""The simulator's kernels: work linear in acts, one signature each, and nothing left to compile after warm_up."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from balancer.schedule import build_schedule
from balancer.simulate import compiled
from balancer.simulation_core import order_acts


class Counted:
    """An array that counts how often an element is read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return int(self.values[index])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 16), (32, 8), (8, 64)])
def test_finding_an_order_reads_every_edge_at_most_three_times(name: str, ranks: int, microbatches: int) -> None:
    """However often ranks stop and go on; edges are at most two per act."""
    schedule = build_schedule(name, stage_ranks=list(range(ranks)), num_microbatches=microbatches)
    links = compiled(schedule)
    assert len(links.sources) <= 2 * len(schedule.op)
    sources = Counted(links.sources)
    plain = getattr(order_acts, "py_func", order_acts)
    order, _ = plain(schedule.rank_offsets, links.offsets, sources)
    assert order.tolist() == links.order.tolist()
    assert sources.reads <= 3 * len(links.sources)


SCRIPT = """
import json, sys
import numpy as np
from balancer.warm_up import warm_up
from packing._kernel_cache import KernelCache, counts

def signatures():
    modules = [module for name, module in sys.modules.items() if name.startswith("balancer.")]
    return {
        f"{value.__module__}.{value.__name__}": len(value.signatures)
        for module in modules
        for value in vars(module).values()
        if isinstance(getattr(value, "_cache", None), KernelCache)
    }

warm_up()
before, compiled = signatures(), sum(counts.values())
from balancer.bubbles import bubbles_of
from balancer.schedule import build_schedule
from balancer.simulate import makespans_of_orders_ns, meeting_makespan_ns, simulate

schedule = build_schedule("nested", stage_ranks=[-1, 0, 1], num_microbatches=4)
times = np.arange(24).reshape(2, 4, 3)
frozen = times.copy()
frozen.setflags(write=False)
for values in (times, frozen, times.astype(np.int32), np.asfortranarray(times), times[::-1]):
    for present in (None, values > 3, np.asfortranarray(values > 3)):
        bubbles_of(schedule, values, values, present, p2p_ns=3, routed=True)
        meeting_makespan_ns(schedule, values, values, present, "unit")
        orders = np.array([[[0, 1, 2, 3]] * 2], dtype=values.dtype)
        makespans_of_orders_ns(schedule.split_backward(), values, values, present, orders, p2p_ns=np.int64(2))
    simulate(schedule, forward_ms=values[0].T, backward_ms=values[1].T, p2p_ms=1, routed=True)
    simulate(schedule, forward_ms=values[0].T.tolist(), backward_ms=values[1].T, edges=[(0, 1), (1, 2)])
    simulate(schedule.forward_only().without({(0, 0)}), forward_ms=values[0].T)
print(json.dumps([before, signatures(), sum(counts.values()) - compiled]))
"""


def test_after_warm_up_no_input_compiles_and_every_kernel_has_one_signature() -> None:
    """Kernels of two signatures cost a second compilation, in the middle of training."""
    if numba.config.DISABLE_JIT:
        pytest.skip("nothing is compiled")
    answer = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    before, after, new = json.loads(answer.stdout)
    assert len(after) >= 4
    assert set(after.values()) == {1}
    assert before == after, "warm_up leaves out these kernels"
    assert new == 0


def test_kernels_compute_the_same_without_a_compiler() -> None:
    tests = str(Path(__file__).with_name("test_simulate.py"))
    chosen = "worked_example or exchange or meet or deadlock or absent or split or orders"
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, "-k", chosen],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
