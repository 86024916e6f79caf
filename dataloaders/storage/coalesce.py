"""Coalescing: ranges that lie close together become one request, within a budget of bytes that nobody asked for.

    wanted  a: [0, 100) [104, 200) [900, 950)        gaps 4, 700       budget = max_waste * 246 = 19
    groups  a: [0, 200)            [900, 950)        waste 4

Smallest gaps are bridged first, over all files together, while their sum stays within `max_waste` times the bytes asked
for (each counted once): the most requests saved for the waste. Price: O(n log n); groups come in order of their first
range, and answers of a group have to be cut up again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dataloaders.storage.base import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One request: bytes [start, end) of `url`, which hold the ranges numbered `members` (in order of offset).

    Attributes:
        wanted_bytes: of [start, end) that were asked for, each counted once.
    """

    url: str
    start: int
    end: int
    members: tuple[int, ...]
    wanted_bytes: int


@dataclass(slots=True)
class _Run:
    """Ranges that touch or overlap; `gap` bytes lie between it and the run before in its file (-1: there is none)."""

    url: str
    start: int
    end: int
    members: list[int]
    gap: int


def coalesce(wanted: Sequence[Range], max_waste: float, *, max_bytes: int | None = None) -> list[Group]:
    """Groups that cover every non-empty range of `wanted`, each range in exactly one group.

    Args:
        wanted: (url, offset, size in bytes), in any order; ranges may overlap or repeat.
        max_waste: bytes of bridged gaps, at most this share of the bytes asked for.
        max_bytes: of a group, where it can be cut without fetching a byte twice; None: unbounded.

    Returns:
        groups, in order of the first range of `wanted` that each holds.
    """
    runs = _runs(wanted)
    budget = max_waste * sum(run.end - run.start for run in runs)
    bridged: set[int] = set()
    for gap, number in sorted((run.gap, number) for number, run in enumerate(runs) if run.gap >= 0):
        if gap > budget:
            break
        budget -= gap
        bridged.add(number)
    groups: list[list[_Run]] = []
    for number, run in enumerate(runs):
        fits = max_bytes is None or (number in bridged and run.end - groups[-1][0].start <= max_bytes)
        if number in bridged and fits:
            groups[-1].append(run)
        else:
            groups.append([run])
    return sorted(map(_group, groups), key=lambda group: min(group.members))


def covered_bytes(spans: Sequence[tuple[int, int]]) -> int:
    """Bytes in the union of `spans` (start, end)."""
    total, reached = 0, -1
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def split(start: int, end: int, max_bytes: int) -> list[tuple[int, int]]:
    """[start, end) in pieces of at most `max_bytes`, as even as can be."""
    count = max(-(-(end - start) // max_bytes), 1)
    edges = [start + (end - start) * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def _runs(wanted: Sequence[Range]) -> list[_Run]:
    """Runs in order of file and offset. Ranges that only touch stay apart (gap 0): a group may be cut there."""
    runs: list[_Run] = []
    ordered = sorted((url, offset, offset + size, i) for i, (url, offset, size) in enumerate(wanted) if size > 0)
    for url, start, end, i in ordered:
        last = runs[-1] if runs and runs[-1].url == url else None
        if last is not None and start < last.end:
            last.end = max(last.end, end)
            last.members.append(i)
        else:
            runs.append(_Run(url, start, end, [i], start - last.end if last is not None else -1))
    return runs


def _group(runs: list[_Run]) -> Group:
    return Group(
        url=runs[0].url,
        start=runs[0].start,
        end=runs[-1].end,
        members=tuple(i for run in runs for i in run.members),
        wanted_bytes=sum(run.end - run.start for run in runs),
    )
