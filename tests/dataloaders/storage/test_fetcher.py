"""Retries and second requests, with requests that are coroutines of the test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dataloaders.errors import SourceError
from dataloaders.storage import StorageCounters, StorageOptions
from dataloaders.storage.fetcher import AnswerTimes, Fetcher
from dataloaders.storage.transport import TemporaryError, is_temporary, told


def _fetch(requests: list[Any], **options: Any) -> tuple[Any, StorageCounters, list[str]]:
    """Run one fetch whose n-th request does requests[n]: an answer, an error, or "stall"."""
    counters, log = StorageCounters(), list[str]()
    waiting = iter(requests)

    async def request() -> bytes:
        step = next(waiting)
        if step == "stall":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                log.append("cancelled")
                raise
        if isinstance(step, Exception):
            raise step
        return bytes(step)

    async def run() -> bytes:
        defaults = {"backoff_s": 0.001, "hedge_after_s": 0.02, "hedge_factor": 0.01, "hedge_share": 1.0}
        fetcher = Fetcher(StorageOptions(**{**defaults, **options}), counters)
        return await fetcher.fetch("http://h/a", request, 3, what="bytes 0 to 3")

    try:
        return asyncio.run(run()), counters, log
    except SourceError as error:
        return error, counters, log


def test_an_answer_that_is_late_is_overtaken_and_cancelled() -> None:
    answer, counters, log = _fetch(["stall", b"abc"])
    assert (answer, log) == (b"abc", ["cancelled"])
    assert (counters.hedged, counters.retries, counters.requests, counters.bytes_read) == (1, 0, 2, 3)


def test_an_answer_is_looked_at_when_it_becomes_late_and_not_a_whole_pause_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetcher = Fetcher(StorageOptions(hedge_after_s=0.25, hedge_factor=4.0), StorageCounters())
    monkeypatch.setattr("dataloaders.storage.fetcher.time.monotonic", lambda: 100.0)
    # Before there are answers, the usual time is taken to be 0.25 s: late is what was sent a second ago.
    looks_s = [fetcher._look_s(0, sent_s) for sent_s in (100.0, 99.125, 98.0)]
    assert looks_s == [0.25, 0.125, 0.25], "soon; when it is late; again, since it may not be repeated yet"


def test_a_second_request_may_fail_or_stall_as_well() -> None:
    answer, counters, log = _fetch(["stall", *[TemporaryError("503")] * 4, "stall", b"abc"])
    assert (answer, log) == (b"abc", ["cancelled", "cancelled"])
    assert (counters.hedged, counters.retries) == (6, 0)


def test_no_more_than_its_share_of_requests_is_sent_twice() -> None:
    answer, counters, _ = _fetch(["stall"] * 2, hedge_share=0.0, timeout_s=0.05, max_tries=2)
    assert "no answer within 0 s" in str(answer)
    assert (counters.hedged, counters.requests) == (0, 2)


def test_failures_are_repeated_and_the_last_one_is_told() -> None:
    answer, counters, _ = _fetch([TemporaryError("first"), TemporaryError("last")], max_tries=2)
    assert "2 tries failed, the last with: last at http://h/a, bytes 0 to 3" in str(answer)
    assert counters.retries == 1


def test_a_final_error_is_not_repeated() -> None:
    answer, counters, _ = _fetch([SourceError("gone"), b"abc"])
    assert (str(answer), counters.requests) == ("gone", 1)


def test_requests_under_way_are_bounded_and_reads_pass_what_is_fetched_ahead() -> None:
    async def run() -> tuple[int, list[str]]:
        fetcher, order = Fetcher(StorageOptions(max_in_flight=8, hedge_share=0), StorageCounters()), list[str]()

        def request(name: str) -> Callable[[], Awaitable[bytes]]:
            async def wait() -> bytes:
                await asyncio.sleep(0.02)
                order.append(name)
                return b""

            return wait

        ahead = [fetcher.fetch("u", request("ahead"), ahead=True) for _ in range(40)]
        tasks = [asyncio.ensure_future(work) for work in ahead]
        await asyncio.sleep(0)
        await fetcher.fetch("u", request("read"))
        await asyncio.gather(*tasks)
        return fetcher._counters.max_in_flight, order

    most, order = asyncio.run(run())
    assert most <= 8
    assert order.index("read") <= 8


def test_usual_times_grow_with_size_and_follow_the_recent_ones() -> None:
    times = AnswerTimes()
    assert times.usual_s(100) == pytest.approx(0.25, rel=0.01)
    for _ in range(64):
        times.add(1.0, 1000)
    assert times.usual_s(1000) == pytest.approx(1.0)
    assert 8 < times.usual_s(8 * 1024**2) < 10
    for _ in range(64):
        times.add(0.1, 1000)
    assert times.usual_s(1000) == pytest.approx(0.1)


class _Foreign(Exception):
    def __init__(self, code: int) -> None:
        super().__init__("https://host/a?secret=1 said no")
        self.code = code


@pytest.mark.parametrize(
    ("error", "temporary"),
    [
        (_Foreign(503), True),
        (_Foreign(429), True),
        (_Foreign(403), False),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (ValueError(), False),
        (type("ReadTimeoutError", (Exception,), {})(), True),
        (type("NoCredentialsError", (Exception,), {})(), False),
    ],
)
def test_errors_of_any_library_are_told_apart(error: Exception, temporary: bool) -> None:
    assert is_temporary(error) is temporary
    assert "secret" not in told(error)
