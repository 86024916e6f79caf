"""Section `bounds`: where the simple bound is not reached, is it the packing or the bound?

Rows compare the best of our packers with a bound by column generation (`lp_bound`), and the simple bound with that, on
a thousand samples.
"""

from collections.abc import Iterator
from itertools import chain

import packing
from tools.benchmarks.lp_bound import lp_bound
from tools.benchmarks.measuring import Row
from tools.benchmarks.options import Options, progress
from tools.benchmarks.packing_rows import Cell, our_packers, token_cells
from tools.benchmarks.vector_rows import vector_cells

SAMPLES = 1_000
TIGHT = 1e-3


def bound_rows(options: Options, *, num_items: int = SAMPLES) -> Iterator[Row]:
    """Cells of the sections `pack` and `vector` with `num_items` samples that miss the simple bound by over 0.1 %."""
    for cell in chain(token_cells(options, num_items), vector_cells(options, num_items)):
        simple = packing.bin_lower_bound(cell.sizes, capacity=cell.capacity)
        found = {
            name: packing.pack(cell.sizes, capacity=cell.capacity, algorithm=name).num_bins for name in our_packers()
        }
        best = min(found, key=found.__getitem__)
        if found[best] - simple > TIGHT * simple:
            yield _row(cell, best, found[best], simple)


def _row(cell: Cell, method: str, num_bins: int, simple: int) -> Row:
    progress(f"bounds: {cell.samples.name}, {cell.setting}, n = {len(cell.samples):,}")
    bound = lp_bound(cell.sizes, capacity=cell.capacity)
    return Row(
        section="bounds",
        workload=cell.samples.name,
        real=cell.samples.real,
        setting=cell.setting,
        num_items=len(cell.samples),
        method=method,
        kind="ours",
        quality={
            "bins": num_bins,
            "lp_bound": bound.num_bins,
            "lp_value": bound.value,
            "simple_bound": simple,
            "excess": num_bins / bound.num_bins - 1.0,
            "bound_excess": bound.num_bins / simple - 1.0,
        },
    )
