"""Rounds of the exchange: equal in number on every rank, bounded, and every byte exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.errors import PlanError  # noqa: E402
from balancer.exchange import RankGroup, _Feed, rounds  # noqa: E402

MATRICES = st.integers(1, 4).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(0, 40) | st.just(0), min_size=size, max_size=size), min_size=size, max_size=size
    )
)


@given(MATRICES, st.integers(1, 100))
def test_every_rank_makes_as_many_rounds_and_both_sides_know_the_sizes(matrix: list[list[int]], limit: int) -> None:
    between = np.array(matrix, dtype=np.int64)
    np.fill_diagonal(between, 0)
    ranks = range(len(between))
    made = [rounds(between, rank, round_bytes=limit) for rank in ranks]
    assert len({len(of_rank) for of_rank in made}) == 1
    arrived = np.zeros_like(between)
    for number in range(len(made[0])):
        for here in ranks:
            sends = made[here][number][0]
            assert int(sends.sum()) <= max(limit, len(between))
            for there in ranks:
                offset, size = made[there][number][1][:, here]
                assert size == sends[there]
                if size:
                    assert offset == arrived[here, there]
                arrived[here, there] += size
    np.testing.assert_array_equal(arrived, between)


def test_nothing_to_move_is_no_round() -> None:
    assert rounds(np.zeros((3, 3), dtype=np.int64), 1, round_bytes=10) == []
    with pytest.raises(PlanError, match="round_bytes=0"):
        rounds(np.zeros((3, 3), dtype=np.int64), 1, round_bytes=0)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=20), max_size=6), st.data())
def test_a_feed_gives_its_blobs_as_one_run_of_bytes(blobs: list[bytes], data: st.DataObject) -> None:
    feed, whole, taken = _Feed(blobs), b"".join(blobs), b""
    assert feed.size == len(whole)
    while len(taken) < len(whole):
        piece = bytearray(data.draw(st.integers(1, len(whole) - len(taken))))
        feed.take_into(memoryview(piece))
        taken += piece
    assert taken == whole


def test_one_process_keeps_everything_and_calls_nobody() -> None:
    group = RankGroup()
    assert (group.rank, group.size) == (0, 1)
    assert group.gather_numbers([1, 2]).tolist() == [[1, 2]]
    assert group.gather_texts("ü\ud800") == ["ü\ud800"]
    (rows,) = group.gather_rows(np.ones((2, 3), dtype=np.int64), [2])
    assert rows.shape == (2, 3)
    assert [bytes(part) for part in group.send_bytes([[b"abc"]], np.array([[3]]))] == [b""]
    assert (group.counters.kept_bytes, group.counters.sent_bytes, group.counters.rounds) == (3, 0, 0)


def test_an_error_in_one_process_stays_what_it_was() -> None:
    group = RankGroup()
    group.raise_together([0], None, "reading")
    with pytest.raises(OSError, match="gone"):
        group.raise_together([1], OSError("gone"), "reading")
