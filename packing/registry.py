"""Algorithms by name: one file and one pure signature each. The conformance tests run over everything listed here.

packer       (PackProblem)       ->  (bin_of int32 [n], number of bins); no bin is empty
partitioner  (PartitionProblem)  ->  part_of int32 [n], or None when it finds no assignment
grid placer  (GridProblem)       ->  cell_of int32 [n] = rank * num_slots + slot, or None
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from packing.errors import PackingError
from packing.inputs import PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.packers.next_fit import next_fit
from packing.partitioners.lpt import lpt
from packing.partitioners.refine import lpt_refined
from packing.problem import GridProblem, PackProblem, PartitionProblem

Packer = Callable[[PackProblem], tuple[PartArray, int]]
Partitioner = Callable[[PartitionProblem], PartArray | None]
GridPlacer = Callable[[GridProblem], PartArray | None]
_Algorithm = TypeVar("_Algorithm")

PACKERS: Mapping[str, Packer] = MappingProxyType(
    {"best_fit_decreasing": best_fit_decreasing, "next_fit": next_fit},
)
PARTITIONERS: Mapping[str, Partitioner] = MappingProxyType(
    {"lpt": lpt, "lpt_refined": lpt_refined},
)


def find(algorithms: Mapping[str, _Algorithm], name: str) -> _Algorithm:
    """The algorithm of that name.

    Raises:
        PackingError: an unknown name; the text lists the known ones.
    """
    if name not in algorithms:
        raise PackingError(f"unknown algorithm {name!r}; available: {', '.join(sorted(algorithms))}")
    return algorithms[name]
