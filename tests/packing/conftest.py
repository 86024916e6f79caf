"""What all tests of `packing` share: the oracle, the invariants of results, and the algorithms to run them over.

- Exact answers by exhaustive search for small inputs, written as plainly as possible.
- `check_packing` and `check_partition`: what holds for every result of every algorithm.
- A test with an argument `packer`, `partitioner` or `grid_placer` runs for every name in the registry. `most_items`
  says how many items the algorithm takes: it is asked once with many items, and one that refuses them has to say how
  many it takes. Nothing else exempts an algorithm from a test.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from packing import PackingError, PackResult, PartitionResult, pack, registry
from packing.inputs import MAX_ITEMS

Row = Sequence[int]

REGISTRY: dict[str, list[str]] = {
    "packer": sorted(registry.PACKERS),
    "partitioner": sorted(registry.PARTITIONERS),
    "grid_placer": sorted(getattr(registry, "GRID_PLACERS", {})),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for kind, names in REGISTRY.items():
        if kind in metafunc.fixturenames:
            metafunc.parametrize(kind, names)


@functools.cache
def _most_items(run: Callable[..., Any], algorithm: str) -> int:
    """Items that an algorithm of `pack` or `partition` takes, `MAX_ITEMS` where it has no limit of its own."""
    needs = {"capacity": 1} if run is pack else {"num_parts": 3}
    try:
        run(np.ones(5000, np.int64), algorithm=algorithm, **needs)
    except PackingError as refusal:
        stated = re.search(r"takes at most (\d+) items, not 5000; choose another algorithm", str(refusal))
        if stated is None:
            raise
        return int(stated[1])
    return MAX_ITEMS


@pytest.fixture(scope="session")
def most_items() -> Callable[[Callable[..., Any], str], int]:
    return _most_items


def _check_packing(result: PackResult, sizes: npt.ArrayLike, capacity: int | Sequence[int]) -> None:
    """Each item in one bin, every view consistent, no capacity exceeded, no empty bin, arrays read-only."""
    limits = np.atleast_1d(np.asarray(capacity, np.int64))
    table = np.asarray(sizes, np.int64).reshape(-1, len(limits))
    assert result.bin_of.shape == (len(table),)
    assert result.load.shape == (result.num_bins, len(limits))
    assert sorted(result.order.tolist()) == list(range(len(table)))
    assert result.offsets[0] == 0
    assert result.offsets[-1] == len(table)
    for index in range(result.num_bins):
        items = result.items(index)
        assert len(items) > 0
        assert (np.diff(items) > 0).all()
        assert (result.bin_of[items] == index).all()
        assert (result.load[index] == table[items].sum(axis=0)).all()
    assert (result.load <= limits).all()
    assert result.lower_bound <= result.num_bins
    assert result.gap == (result.num_bins / result.lower_bound - 1 if len(table) else 0)
    assert [array.dtype for array in (result.bin_of, result.load, result.order)] == [np.int32, np.int64, np.int64]
    for array in (result.bin_of, result.load, result.order, result.offsets, result.fill):
        assert not array.flags.writeable


@pytest.fixture(scope="session")
def check_packing() -> Callable[..., None]:
    return _check_packing


def _check_partition(
    result: PartitionResult,
    weights: npt.ArrayLike,
    num_parts: int,
    *,
    equal_count: bool = False,
    sizes: npt.ArrayLike | None = None,
    capacity: int | Sequence[int] = (),
) -> None:
    """Each item in one part, loads are sums, capacities and counts hold, the bound is one, arrays read-only."""
    num_items = len(result.part_of)
    table = np.asarray(weights, np.int64).reshape(num_items, -1 if num_items else result.load.shape[1])
    assert result.part_of.dtype == np.int32
    assert result.load.shape == (num_parts, table.shape[1])
    expected = np.zeros_like(result.load)
    np.add.at(expected, result.part_of, table)
    assert (result.load == expected).all()
    assert result.part_of.min(initial=0) >= 0
    assert result.makespan == result.load.max()
    assert result.lower_bound <= result.makespan
    if equal_count:
        counts = np.bincount(result.part_of, minlength=num_parts)
        assert counts.max() - counts.min() <= 1
    if sizes is not None:
        limits = np.atleast_1d(np.asarray(capacity, np.int64))
        used = np.zeros((num_parts, len(limits)), np.int64)
        np.add.at(used, result.part_of, np.asarray(sizes, np.int64).reshape(num_items, len(limits)))
        assert (used <= limits).all()
    assert not result.part_of.flags.writeable
    assert not result.load.flags.writeable


@pytest.fixture(scope="session")
def check_partition() -> Callable[..., None]:
    return _check_partition


def _assignments(num_items: int, num_parts: int) -> list[list[int]]:
    """Every partition of items into at most `num_parts` unnamed parts (part p + 1 is used only after part p)."""
    found: list[list[int]] = [[]]
    for _ in range(num_items):
        found = [[*head, part] for head in found for part in range(min(max(head, default=-1) + 2, num_parts))]
    return found


def _loads(rows: Sequence[Row], assignment: Sequence[int], num_parts: int) -> list[list[int]]:
    loads = [[0] * (len(rows[0]) if rows else 1) for _ in range(num_parts)]
    for row, part in zip(rows, assignment, strict=True):
        for column, value in enumerate(row):
            loads[part][column] += value
    return loads


def _within(loads: list[list[int]], capacity: Sequence[int]) -> bool:
    return all(used <= limit for load in loads for used, limit in zip(load, capacity, strict=True))


def optimal_num_bins(sizes: Sequence[Row], capacity: Sequence[int]) -> int:
    """Fewest bins for `sizes` [n][d] by exhaustive search with early rejection."""
    best = len(sizes)

    def place(item: int, loads: list[list[int]]) -> None:
        nonlocal best
        if len(loads) >= best:
            return
        if item == len(sizes):
            best = len(loads)
            return
        for index in range(len(loads) + 1):
            load = loads[index] if index < len(loads) else [0] * len(capacity)
            grown = [used + size for used, size in zip(load, sizes[item], strict=True)]
            if all(used <= limit for used, limit in zip(grown, capacity, strict=True)):
                place(item + 1, [*loads[:index], grown, *loads[index + 1 :]])

    place(0, [])
    return best


def optimal_makespan(
    weights: Sequence[Row],
    num_parts: int,
    *,
    equal_count: bool = False,
    sizes: Sequence[Row] | None = None,
    capacity: Sequence[int] = (),
) -> int | None:
    """Smallest largest load of `weights` [n][S], or None when no assignment is legal."""
    best = None
    for assignment in _assignments(len(weights), num_parts):
        counts = [assignment.count(part) for part in range(num_parts)]
        if equal_count and max(counts) - min(counts) > 1:
            continue
        if sizes is not None and not _within(_loads(sizes, assignment, num_parts), capacity):
            continue
        value = max(max(load) for load in _loads(weights, assignment, num_parts))
        best = value if best is None else min(best, value)
    return best


@pytest.fixture(scope="session")
def exact_bins() -> Callable[..., int]:
    return optimal_num_bins


@pytest.fixture(scope="session")
def exact_makespan() -> Callable[..., int | None]:
    return optimal_makespan
