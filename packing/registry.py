"""Algorithms by name: one file and one pure signature each. The conformance tests run over everything listed here.

packer       (sizes [n, d], capacity [d])  ->  (bin_of int32 [n], number of bins); every item fits `capacity`
partitioner  (problem)                     ->  part_of int32 [n], or None when it finds no assignment
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from packing.best_fit import best_fit_decreasing
from packing.errors import PackingError
from packing.inputs import IntArray, PartArray
from packing.lpt import lpt
from packing.next_fit import next_fit
from packing.problem import PartitionProblem
from packing.refine import lpt_refined

Packer = Callable[[IntArray, IntArray], tuple[PartArray, int]]
Partitioner = Callable[[PartitionProblem], PartArray | None]
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
