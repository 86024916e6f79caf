"""Reading ahead: the same bytes, blocks side by side while reads are in order, small reads where they jump."""

from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import SourceError
from dataloaders.storage import FileState, ReadAhead, Storage, StorageOptions
from tools.benchmarks.range_server import RangeServer

CONTENT = bytes(i * 7 % 251 for i in range(50_000))


class _File:
    """A remote file in memory that notes what is asked of it."""

    def __init__(self) -> None:
        self.state = FileState(url="memory://a", size=len(CONTENT), stamp="1")
        self.size, self.reads, self.started = len(CONTENT), list[tuple[int, int]](), list[tuple[int, int]]()

    def read(self, offset: int, size: int) -> bytes:
        self.reads.append((offset, size))
        assert 0 <= offset <= offset + size <= self.size
        return CONTENT[offset : offset + size]

    def start(self, offset: int, size: int) -> "Future[bytes]":
        assert 0 <= offset < offset + size <= self.size
        self.started.append((offset, size))
        future: Future[bytes] = Future()
        future.set_result(CONTENT[offset : offset + size])
        return future


@given(st.lists(st.tuples(st.integers(-3000, 8000), st.integers(0, 3000)), max_size=40))
def test_any_reads_give_the_bytes_of_the_file(steps: list[tuple[int, int]]) -> None:
    file = _File()
    ahead = ReadAhead(file, block_bytes=1000, blocks_ahead=3, jump_bytes=2500, window_bytes=100)
    at = 0
    for move, size in steps:
        at = max(at + move, 0)
        assert ahead.read(at, size) == CONTENT[at : at + size]
        assert len(ahead._blocks) <= 3 + 2
        at += size


def test_reads_in_order_begin_ever_more_blocks_and_fetch_each_once() -> None:
    file = _File()
    ahead = ReadAhead(file, block_bytes=1000, blocks_ahead=4, jump_bytes=2500)
    for offset in range(0, 20_000, 500):
        ahead.read(offset, 100)
    assert file.reads == []
    assert file.started == [(first, 1000) for first in range(0, 1000 * len(file.started), 1000)]
    assert len(file.started) == 20 + 4


def test_jumps_fetch_only_what_stands_at_their_target() -> None:
    file = _File()
    ahead = ReadAhead(file, block_bytes=1000, blocks_ahead=4, jump_bytes=2000, window_bytes=64)
    for offset in range(0, 50_000, 10_000):
        ahead.read(offset, 32)
        ahead.read(offset + 32, 32)
    assert file.started == [(0, 1000)]
    assert file.reads == [(offset, 64) for offset in range(10_000, 50_000, 10_000)]


def test_a_remote_file_is_read_ahead_and_its_errors_are_kept(
    serve: Callable[..., RangeServer], content: bytes, quick: Callable[..., StorageOptions]
) -> None:
    pytest.importorskip("aiohttp")
    server = serve(latency_s=0.01, error_share=0.05)
    with Storage(quick()) as storage:
        ahead = ReadAhead(storage.open(server.url("a.bin")), block_bytes=10_000)
        found = b"".join(ahead.read(offset, 512) for offset in range(0, 300_000, 512))
        assert found == content
        assert server.counts.bytes_sent <= 300_001
        server.behaviour.etag = '"new"'
        again = ReadAhead(storage.open(server.url("a.bin")), block_bytes=10_000)
        with pytest.raises(SourceError, match="has changed"):
            again.read(0, 512)
        again.close()


def test_a_local_file_is_read_as_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("a") / "a.bin"
    path.write_bytes(CONTENT)
    ahead = ReadAhead(Storage().open(str(path)))
    assert ahead.read(49_990, 100) == CONTENT[49_990:]
    assert ahead.read(60_000, 1) == b""
