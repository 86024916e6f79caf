"""Algorithms by name: one file and one pure signature each. The conformance tests run over everything listed here.

packer       (PackProblem)       ->  (bin_of int32 [n], number of bins); no bin is empty
partitioner  (PartitionProblem)  ->  part_of int32 [n], or None when it finds no assignment
grid placer  (GridProblem)       ->  cell_of int32 [n] = rank * num_slots + slot, or None
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from packing.errors import PackingError
from packing.grids.auto import auto as grid_auto
from packing.grids.level_fill import level_fill
from packing.grids.ranks_first import ranks_first
from packing.packers.auto import auto as pack_auto
from packing.packers.best_fit import best_fit_decreasing
from packing.packers.exact import exact as exact_packing
from packing.packers.exact_fill import exact_fill
from packing.packers.first_fit import first_fit, first_fit_decreasing
from packing.packers.next_fit import next_fit
from packing.packers.pattern_fill import pattern_fill
from packing.partitioners.auto import auto as partition_auto
from packing.partitioners.even_mix import even_mix
from packing.partitioners.exact import exact as exact_partition
from packing.partitioners.karmarkar_karp import karmarkar_karp
from packing.partitioners.lpt import lpt
from packing.partitioners.lpt_refined import lpt_refined
from packing.partitioners.multifit import multifit
from packing.problem import GridPlacer, Packer, Partitioner

_Algorithm = TypeVar("_Algorithm")

PACKERS: Mapping[str, Packer] = MappingProxyType(
    {
        "auto": pack_auto,
        "best_fit_decreasing": best_fit_decreasing,
        "exact": exact_packing,
        "exact_fill": exact_fill,
        "first_fit": first_fit,
        "first_fit_decreasing": first_fit_decreasing,
        "next_fit": next_fit,
        "pattern_fill": pattern_fill,
    }
)
PARTITIONERS: Mapping[str, Partitioner] = MappingProxyType(
    {
        "auto": partition_auto,
        "even_mix": even_mix,
        "exact": exact_partition,
        "karmarkar_karp": karmarkar_karp,
        "lpt": lpt,
        "lpt_refined": lpt_refined,
        "multifit": multifit,
    }
)
GRID_PLACERS: Mapping[str, GridPlacer] = MappingProxyType(
    {
        "auto": grid_auto,
        "level_fill": level_fill,
        "ranks_first": ranks_first,
    }
)


def find(algorithms: Mapping[str, _Algorithm], name: str) -> _Algorithm:
    """The algorithm of that name.

    Raises:
        PackingError: an unknown name; the text lists the known ones.
    """
    if not isinstance(name, str) or name not in algorithms:
        raise PackingError(f"unknown algorithm {name!r}; available: {', '.join(sorted(algorithms))}")
    return algorithms[name]
