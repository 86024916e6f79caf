"""Exact answers by exhaustive search for small inputs: the oracle that heuristics and bounds are held against."""

from collections.abc import Callable, Sequence

import pytest

Row = Sequence[int]


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
