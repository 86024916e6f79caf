"""Coalescing: nothing lost, waste bounded, and the cheapest gaps bridged first."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dataloaders.storage.coalesce import Group, coalesce, covered_bytes, split

ranges = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 2000), st.integers(0, 300)), max_size=30)


@given(ranges, st.floats(0, 2), st.one_of(st.none(), st.integers(1, 1000)))
def test_every_range_lies_in_one_group_and_the_waste_is_bounded(
    wanted: list[tuple[str, int, int]], max_waste: float, max_bytes: int | None
) -> None:
    groups = coalesce(wanted, max_waste, max_bytes=max_bytes)
    members = sorted(i for group in groups for i in group.members)
    assert members == [i for i, (_, _, size) in enumerate(wanted) if size]
    for group in groups:
        for i in group.members:
            url, offset, size = wanted[i]
            assert url == group.url
            assert group.start <= offset
            assert offset + size <= group.end
    union = sum(covered_bytes([(o, o + s) for u, o, s in wanted if u == url and s]) for url in "ab")
    fetched = sum(group.end - group.start for group in groups)
    assert fetched - union <= max_waste * union
    assert sum(group.wanted_bytes for group in groups) == union
    for url in "ab":  # no byte is fetched twice
        spans = [(group.start, group.end) for group in groups if group.url == url]
        assert covered_bytes(spans) == sum(end - start for start, end in spans)
    assert [min(group.members) for group in groups] == sorted(min(group.members) for group in groups)


@given(ranges)
def test_without_waste_only_what_touches_is_joined(wanted: list[tuple[str, int, int]]) -> None:
    for group in coalesce(wanted, 0.0):
        spans = [(wanted[i][1], wanted[i][1] + wanted[i][2]) for i in group.members]
        assert covered_bytes(spans) == group.end - group.start == group.wanted_bytes


def test_the_smallest_gaps_are_bridged_first_over_all_files() -> None:
    wanted = [("a", 0, 100), ("a", 110, 100), ("b", 0, 100), ("b", 105, 100), ("b", 300, 100)]
    groups = coalesce(wanted, 0.03)  # 15 bytes: the gaps of 5 and 10, not that of 95
    assert groups == [
        Group(url="a", start=0, end=210, members=(0, 1), wanted_bytes=200),
        Group(url="b", start=0, end=205, members=(2, 3), wanted_bytes=200),
        Group(url="b", start=300, end=400, members=(4,), wanted_bytes=100),
    ]
    assert [group.members for group in coalesce(wanted, 0.019)] == [(0,), (1,), (2, 3), (4,)]


def test_a_group_is_cut_at_its_bound_but_never_inside_a_range() -> None:
    wanted = [("a", i * 100, 100) for i in range(10)] + [("a", 1000, 5000)]
    assert [group.end - group.start for group in coalesce(wanted, 0.0, max_bytes=300)] == [300, 300, 300, 100, 5000]


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**5).filter(lambda n: n > 1000))
def test_a_long_range_is_split_evenly(start: int, size: int, max_bytes: int) -> None:
    pieces = split(start, start + size, max_bytes)
    assert pieces[0][0] == start
    assert pieces[-1][1] == start + size
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    sizes = [end - first for first, end in pieces]
    assert max(sizes) <= max_bytes
    assert max(sizes) - min(sizes) <= 1
