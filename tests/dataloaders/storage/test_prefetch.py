"""The buffer of what is fetched ahead: bounded, exact at any overlap, and free of stale hints."""

from concurrent.futures import Future

from hypothesis import given
from hypothesis import strategies as st

from dataloaders.storage.coalesce import coalesce
from dataloaders.storage.prefetch import MISSES_UNTIL_STALE, PrefetchBuffer

CONTENT = bytes(range(256)) * 8


class _Fetches:
    """Fetches that are finished by hand."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.started: list[tuple[int, int, Future[bytes]]] = []
        self.at_once = at_once

    def __call__(self, url: str, start: int, end: int) -> "Future[bytes]":
        future: Future[bytes] = Future()
        self.started.append((start, end, future))
        if self.at_once:
            future.set_result(CONTENT[start:end])
        return future

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(start, end) for start, end, _ in self.started]


def _add(buffer: PrefetchBuffer, *ranges: tuple[int, int]) -> None:
    buffer.add(coalesce([("a", offset, size) for offset, size in ranges], 0.0))


def _read(buffer: PrefetchBuffer, offset: int, size: int) -> tuple[bytes, int]:
    """The bytes, and how many of them came from the buffer."""
    parts, ahead = [], 0
    for piece in buffer.cover("a", offset, size):
        if piece.ahead is None:
            parts.append(CONTENT[piece.start : piece.end])
        else:
            assert piece.ahead.future is not None
            data = piece.ahead.future.result(0)
            parts.append(data[piece.start - piece.ahead.start : piece.end - piece.ahead.start])
            ahead += piece.end - piece.start
            buffer.used(piece)
    return b"".join(parts), ahead


@given(
    st.integers(0, 400),
    st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 200)), max_size=4)),
        max_size=20,
    ),
)
def test_any_mixture_of_hints_and_reads_gives_the_right_bytes_within_the_bound(
    limit: int, steps: list[tuple[bool, list[tuple[int, int]]]]
) -> None:
    fetches = _Fetches(at_once=True)
    buffer = PrefetchBuffer(limit, fetches)
    over = 0  # a read may start what waits
    for is_hint, ranges in steps:
        if is_hint:
            _add(buffer, *ranges)
            assert buffer.started_bytes <= max(limit, over)
        for offset, size in [] if is_hint else ranges:
            assert _read(buffer, offset, size)[0] == CONTENT[offset : offset + size]
        over = buffer.started_bytes
    buffer.clear()
    assert buffer.started_bytes == 0


def test_groups_start_in_order_while_there_is_room_and_go_when_read() -> None:
    fetches = _Fetches(at_once=True)
    buffer = PrefetchBuffer(250, fetches)
    _add(buffer, (0, 100), (200, 100), (400, 100), (600, 100))
    assert fetches.spans == [(0, 100), (200, 300)]
    assert _read(buffer, 0, 60) == (CONTENT[:60], 60)
    assert len(fetches.spans) == 2  # 40 bytes of the first group are still to come
    assert _read(buffer, 60, 40) == (CONTENT[60:100], 40)
    assert fetches.spans[2:] == [(400, 500)]
    assert _read(buffer, 0, 100) == (CONTENT[:100], 0)  # gone


def test_what_waits_is_started_when_it_is_read_first() -> None:
    fetches = _Fetches(at_once=True)
    buffer = PrefetchBuffer(100, fetches)
    _add(buffer, (0, 100), (200, 100))
    assert _read(buffer, 200, 100) == (CONTENT[200:300], 100)
    assert fetches.spans == [(0, 100), (200, 300)]


def test_a_second_hint_fetches_only_what_is_new() -> None:
    fetches = _Fetches()
    buffer = PrefetchBuffer(1000, fetches)
    _add(buffer, (100, 100))
    _add(buffer, (50, 200))
    assert sorted(fetches.spans) == [(50, 100), (100, 200), (200, 250)]


def test_hints_that_are_never_read_make_room_after_a_while() -> None:
    fetches = _Fetches()
    buffer = PrefetchBuffer(100, fetches)
    _add(buffer, (0, 100))
    _add(buffer, (1000, 100))
    for _ in range(MISSES_UNTIL_STALE):
        assert _read(buffer, 500, 10)[1] == 0
    assert fetches.spans == [(0, 100)]
    _read(buffer, 500, 10)
    assert fetches.spans == [(0, 100), (1000, 1100)]
    assert fetches.started[0][2].cancelled()


def test_a_group_above_the_bound_is_not_fetched_ahead() -> None:
    fetches = _Fetches()
    buffer = PrefetchBuffer(100, fetches)
    _add(buffer, (0, 101))
    assert fetches.spans == []


def test_dropping_a_file_or_everything_cancels_what_is_under_way() -> None:
    fetches = _Fetches()
    buffer = PrefetchBuffer(1000, fetches)
    _add(buffer, (0, 100), (200, 100))
    buffer.forget("a")
    assert [future.cancelled() for _, _, future in fetches.started] == [True, True]
    _add(buffer, (0, 100))
    buffer.clear()
    assert fetches.started[2][2].cancelled()
    assert buffer.started_bytes == 0


def test_a_part_that_is_read_twice_counts_once() -> None:
    fetches = _Fetches(at_once=True)
    buffer = PrefetchBuffer(1000, fetches)
    _add(buffer, (0, 100), (100, 100))
    for _ in range(3):
        assert _read(buffer, 0, 100) == (CONTENT[:100], 100)
        assert _read(buffer, 0, 40) == (CONTENT[:40], 40)
    assert _read(buffer, 100, 100) == (CONTENT[100:200], 100)
    assert len(fetches.spans) == 1
    assert buffer.started_bytes == 0
