"""Files of an HTTP server: exact bytes from a server that fails, stalls, lies or changes its files."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dataloaders.errors import SourceError
from dataloaders.storage import FileState, Range, Storage, StorageOptions, StoredFile
from tools.benchmarks.range_server import RangeServer

pytest.importorskip("aiohttp")

Serve = Callable[..., RangeServer]
Quick = Callable[..., StorageOptions]


def _ranges(url: str, count: int, size: int = 1000, step: int = 3000) -> list[Range]:
    return [(url, i * step, size) for i in range(count)]


def _expected(content: bytes, wanted: list[Range]) -> list[bytes]:
    return [content[offset : offset + size] for _, offset, size in wanted]


def test_ranges_come_exactly_in_order_and_side_by_side(serve: Serve, quick: Quick, content: bytes) -> None:
    server = serve(latency_s=0.2)
    wanted = _ranges(server.url("a.bin"), 90)[::-1]
    with Storage(quick(max_in_flight=24, max_waste=0.0)) as storage:
        assert storage.read_many(wanted) == _expected(content, wanted)
        counters = storage.counters
    assert counters.requests == 91  # one for the state
    assert counters.bytes_read == 90_000
    assert 16 <= server.counts.max_in_flight <= 24
    assert counters.max_in_flight >= 16


def test_neighbours_come_by_one_request_within_the_bound_on_waste(serve: Serve, quick: Quick, content: bytes) -> None:
    server = serve()
    wanted = _ranges(server.url("a.bin"), 50, size=1000, step=1050)
    with Storage(quick(max_waste=0.08)) as storage:
        assert storage.read_many(wanted) == _expected(content, wanted)
        assert storage.counters.requests == 2
        assert storage.counters.wasted_bytes == 49 * 50
    assert server.counts.bytes_sent <= 1.08 * 50_000 + 1


def test_long_ranges_are_split(serve: Serve, quick: Quick, content: bytes) -> None:
    server = serve(latency_s=0.02)
    with Storage(quick(max_request_bytes=40_000)) as storage:
        file = storage.open(server.url("a.bin"))
        assert isinstance(file, StoredFile)
        assert (file.size, file.read(0, file.size)) == (len(content), content)
    assert len(server.counts.ranges) == 1 + 8


def test_errors_stalls_and_cut_answers_lose_nothing(serve: Serve, quick: Quick, content: bytes) -> None:
    server = serve(error_share=0.1, truncate_share=0.05, stall_share=0.05, stall_s=30.0)
    wanted = _ranges(server.url("a.bin"), 100)
    with Storage(quick(hedge_after_s=0.05, hedge_share=0.5)) as storage:
        for _ in range(2):
            assert storage.read_many(wanted) == _expected(content, wanted)
        counters = storage.counters
    assert server.counts.errors
    assert server.counts.truncated
    assert server.counts.stalls
    assert counters.retries > 0
    assert counters.hedged >= server.counts.stalls  # each stalled request was overtaken, not waited for


def test_a_server_that_keeps_failing_ends_in_an_error_that_names_the_last_cause(serve: Serve, quick: Quick) -> None:
    server = serve(error_share=1.0)
    with (
        Storage(quick(max_tries=3)) as storage,
        pytest.raises(SourceError, match=r"3 tries failed, the last with: 503 Service Unavailable at http://.*a\.bin"),
    ):
        storage.open(server.url("a.bin"))
    assert server.counts.requests == 3


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (400, 1), (401, 1), (500, 4), (429, 4), (502, 4)])
def test_only_what_may_get_better_is_tried_again(serve: Serve, quick: Quick, status: int, tries: int) -> None:
    server = serve(error_share=1.0, error_status=status)
    with Storage(quick(max_tries=4)) as storage, pytest.raises(SourceError, match=f"{status} .*a.bin"):
        storage.read_many([(server.url("a.bin"), 0, 10)])
    assert server.counts.requests == tries


def test_nobody_at_the_address_is_an_error_after_the_tries(serve: Serve, quick: Quick) -> None:
    with (
        Storage(quick(max_tries=2)) as storage,
        pytest.raises(SourceError, match=r"2 tries failed.*ClientConnectorError.*at http://127\.0\.0\.1:9/a"),
    ):
        storage.open("http://127.0.0.1:9/a")


def test_missing_files_are_listed_together(serve: Serve, quick: Quick) -> None:
    server = serve()
    urls = [server.url(name) for name in ("a.bin", "x.bin", "b.bin", "y.bin")]
    with Storage(quick()) as storage:
        with pytest.raises(SourceError, match=r"2 of 4 shards are missing or no files: http.*/x\.bin, http.*/y\.bin"):
            storage.states(urls)
        with pytest.raises(SourceError, match=r"1 of 1 files are missing"):
            storage.read_many([(urls[1], 0, 1)])
        states = storage.states([urls[2], urls[0]])
    assert [state.url for state in states] == [urls[2], urls[0]]
    assert all(state.size == 300_000 and state.stamp for state in states)


def test_wildcards_are_found_in_the_page_of_the_folder(serve: Serve, quick: Quick) -> None:
    server = serve()
    with Storage(quick()) as storage:
        assert storage.list(f"{server.url()}?.bin") == [f"{server.url()}?.bin"]
        assert storage.list(f"{server.url()}[ab]*.bin") == [server.url("a.bin"), server.url("b.bin")]
        with pytest.raises(SourceError, match=r"no shard matches 'http.*z\*\.bin'"):
            storage.list(f"{server.url()}z*.bin")


def test_a_server_that_ignores_ranges_is_refused_before_it_sends_the_file(
    serve: Serve, quick: Quick, folder: Path
) -> None:
    server = serve(ignore_range=True)
    with (folder / "huge.bin").open("wb") as file:
        file.truncate(10**12)  # a sparse terabyte
    with Storage(quick()) as storage:
        with pytest.raises(SourceError, match=r"ignores ranges and would send the whole file at .*huge.bin"):
            storage.open(server.url("huge.bin"))
        state = FileState(url=server.url("huge.bin"), size=10**12, stamp="")
        with pytest.raises(SourceError, match=r"ignores ranges"):
            storage.open(state.url, state).read(0, 100)
    assert server.counts.bytes_sent < 50_000_000  # what fits into buffers before the connection is closed


def test_another_range_than_asked_for_is_never_taken(serve: Serve, quick: Quick) -> None:
    server = serve()
    with Storage(quick(max_tries=2)) as storage:
        file = storage.open(server.url("a.bin"))
        server.behaviour.shift_bytes = 1
        with pytest.raises(SourceError, match=r"bytes 101 to 110 were sent for 100 to 110"):
            file.read(100, 10)


@pytest.mark.parametrize("how", ["etag", "size", "shorter"])
def test_a_file_that_changes_between_reads_is_an_error(serve: Serve, quick: Quick, folder: Path, how: str) -> None:
    server = serve()
    with Storage(quick()) as storage:
        file = storage.open(server.url("a.bin"))
        file.read(0, 10)
        if how == "etag":
            server.behaviour.etag = '"other"'
        else:
            (folder / "a.bin").write_bytes(b"x" * (300_001 if how == "size" else 5))
        with pytest.raises(SourceError, match=r"the file has changed since it was opened: .* at http.*a\.bin"):
            file.read(1000, 10)


def test_an_expected_state_costs_no_request_and_is_checked_with_the_first_answer(serve: Serve, quick: Quick) -> None:
    server = serve()
    with Storage(quick()) as storage:
        (state,) = storage.states([server.url("a.bin")])
    requests = server.counts.requests
    with Storage(quick()) as storage:
        file = storage.open(state.url, state)
        assert server.counts.requests == requests
        file.read(5, 5)
        server.behaviour.etag = '"new"'
        with pytest.raises(SourceError, match=r"has changed since it was opened: its stamp was"):
            file.read(500, 5)


def test_opening_what_is_not_as_expected_is_an_error(serve: Serve, quick: Quick) -> None:
    server = serve()
    with Storage(quick()) as storage:
        (state,) = storage.states([server.url("a.bin")])
        wrong = FileState(url=state.url, size=7, stamp=state.stamp)
        with pytest.raises(SourceError, match=r"it had 7 bytes and has 300000"):
            storage.open(state.url, wrong)
        assert storage.open(state.url, state).read(0, 0) == b""


def test_asking_again_sees_the_new_state_and_old_readers_see_the_change(
    serve: Serve, quick: Quick, folder: Path
) -> None:
    server = serve()
    url = server.url("a.bin")
    with Storage(quick()) as storage:
        file = storage.open(url)
        storage.prefetch([(url, 0, 10)])
        (folder / "a.bin").write_bytes(b"new" * 100)
        (state,) = storage.states([url])
        assert state.size == 300
        assert storage.read_many([(url, 0, 6)]) == [b"newnew"]
        with pytest.raises(SourceError, match="has changed"):
            file.read(0, 6)


def test_ranges_outside_of_the_file_are_refused_and_empty_ones_are_free(serve: Serve, quick: Quick) -> None:
    server = serve()
    url = server.url("empty.bin")
    with Storage(quick()) as storage:
        assert storage.open(url).size == 0
        assert storage.read_many([(url, 0, 0)]) == [b""]
        for offset, size in [(0, 1), (300_000, 1), (10**12, 10**12)]:
            with pytest.raises(SourceError, match=r"are not in a file of \d+ bytes"):
                storage.read_many([(server.url("a.bin"), offset, size), (url, 0, 1)])


def test_what_is_fetched_ahead_serves_reads_of_parts_and_more(serve: Serve, quick: Quick, content: bytes) -> None:
    server = serve(latency_s=0.02)
    url = server.url("a.bin")
    with Storage(quick(max_waste=0.0)) as storage:
        storage.open(url)
        storage.prefetch([(url, 10_000, 10_000), (url, 40_000, 10_000)])
        assert storage.read_many([(url, 12_000, 1000), (url, 5_000, 50_000)]) == [
            content[12_000:13_000],
            content[5_000:55_000],
        ]
        assert storage.counters.prefetch_hits == 3
        assert storage.counters.bytes_read == 50_000  # nothing twice


def test_a_failed_prefetch_is_asked_for_again_by_the_read(serve: Serve, quick: Quick, content: bytes) -> None:
    server = serve()
    url = server.url("a.bin")
    with Storage(quick(max_tries=1)) as storage:
        storage.open(url)
        server.behaviour.error_share = 1.0
        storage.prefetch([(url, 0, 1000), (url, 5000, 1000)])
        while server.counts.errors < 2:
            time.sleep(0.01)
        server.behaviour.error_share = 0.0
        assert storage.read_many([(url, 500, 5000)]) == [content[500:5500]]
        server.behaviour.error_share = 1.0
        storage.prefetch([(url, 20_000, 1000)])
        with pytest.raises(SourceError, match="1 tries failed, the last with: 503"):
            storage.read_many([(url, 20_000, 1000)])


def test_a_prefetch_of_an_unknown_or_missing_file_fails_with_the_read_alone(serve: Serve, quick: Quick) -> None:
    server = serve()
    with Storage(quick()) as storage:
        storage.prefetch([(server.url("x.bin"), 0, 10), (server.url("a.bin"), 0, 10)])
        assert len(storage.read_many([(server.url("a.bin"), 0, 10)])[0]) == 10
        with pytest.raises(SourceError, match="missing"):
            storage.read_many([(server.url("x.bin"), 0, 10)])


def test_a_redirect_to_a_scheme_that_is_not_configured_is_refused(serve: Serve, quick: Quick) -> None:
    target = serve()
    server = serve(redirect=target.url("a.bin"))
    with Storage(quick()) as storage:
        assert storage.open(server.url("anything")).size == 300_000
    with Storage(quick(schemes=("http",))) as storage:
        server.behaviour.redirect = "file:///etc/passwd"
        with pytest.raises(SourceError, match=r"cannot be read"):
            storage.open(server.url("anything"))


def test_headers_of_the_options_are_sent_and_a_compressed_answer_is_never_asked_for(
    serve: Serve, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.benchmarks import range_server

    seen: list[dict[str, str]] = []
    answer = range_server._Handler._answer

    def noting(self: range_server._Handler, *, body: bool) -> None:
        seen.append(dict(self.headers))
        answer(self, body=body)

    monkeypatch.setattr(range_server._Handler, "_answer", noting)
    server = serve()
    with Storage(quick(protocol_options={"http": {"headers": {"Authorization": "Bearer x"}}})) as storage:
        storage.open(server.url("a.bin")).read(0, 10)
    assert len(seen) == 2
    assert all(head["Authorization"] == "Bearer x" and head["Accept-Encoding"] == "identity" for head in seen)


def test_without_aiohttp_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(SourceError, match=r"need the package aiohttp.*pip install 'mllm-balancer\[remote\]'"):
        Storage().open("https://host/a.tar")


def test_a_closed_storage_opens_again(serve: Serve, quick: Quick, content: bytes) -> None:
    server = serve()
    storage = Storage(quick())
    for _ in range(2):
        assert storage.read_many([(server.url("a.bin"), 0, 10)]) == [content[:10]]
        storage.close()
    del storage


def test_dropping_a_storage_ends_its_connections(serve: Serve, quick: Quick) -> None:
    server = serve()
    storage = Storage(quick())
    storage.open(server.url("a.bin"))
    before = len(os.listdir("/proc/self/fd"))
    del storage
    while len(os.listdir("/proc/self/fd")) >= before:  # the event loop closes them soon
        time.sleep(0.01)


def test_the_server_serves_nothing_outside_of_its_folder(serve: Serve, quick: Quick, folder: Path) -> None:
    (folder.parent / "secret").write_bytes(b"x")
    server = serve()
    with Storage(quick()) as storage, pytest.raises(SourceError, match="missing"):
        storage.states([f"http://127.0.0.1:{server.port}/%2e%2e/secret"])
