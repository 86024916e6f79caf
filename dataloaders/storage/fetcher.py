"""Requests that fail or stall: bounded retries, and a second request for an answer that is late.

    slot (max_in_flight) -> first request --- late: hedge_factor * usual time --> second request; the first answer wins
                              |                                                      |
                              +-- TemporaryError from all: wait, twice as long each time, jitter; at most max_tries

The usual time is the median of recent ones, scaled by size, so a slow link does not make every request late. Price: at
most `hedge_share` more requests, which may exceed `max_in_flight` by a quarter.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TypeVar

from dataloaders.errors import SourceError
from dataloaders.storage.base import MIB, StorageCounters, StorageOptions
from dataloaders.storage.transport import TemporaryError
from dataloaders.storage.urls import shown

MAX_BACKOFF_S = 20.0
MAX_EXTRA = 3  # further requests for one range at a time: they may stall, too
_GUESS_S = 0.25  # usual time before there is one; a first answer that came late must not pass for one
_GUESSES = 8
_ALIKE_BYTES = MIB  # answers below this size take about as long as each other: the server's time dominates

_T = TypeVar("_T")


class AnswerTimes:
    """Times that recent requests took."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque([(_GUESS_S, 0)] * _GUESSES, maxlen=64)

    def add(self, seconds: float, size: int) -> None:
        """A request for `size` bytes took `seconds`."""
        self._recent.append((seconds, size))

    def usual_s(self, size: int) -> float:
        """Seconds that a request for `size` bytes usually takes."""
        scale = size + _ALIKE_BYTES
        return median(t * scale / (s + _ALIKE_BYTES) for t, s in self._recent)


class Fetcher:
    """Runs requests on one event loop, within the limits of `options`."""

    def __init__(self, options: StorageOptions, counters: StorageCounters) -> None:
        self._options, self._counters = options, counters
        self._times, self._random = AnswerTimes(), random.Random()
        self._slots = asyncio.Semaphore(options.max_in_flight)
        # What is fetched ahead leaves some slots free for what somebody waits for.
        self._slots_ahead = asyncio.Semaphore(max(options.max_in_flight - options.max_in_flight // 8, 1))
        self._in_flight = self._hedges = 0

    async def fetch(
        self, url: str, request: Callable[[], Awaitable[_T]], size: int = 0, *, what: str = "", ahead: bool = False
    ) -> _T:
        """The answer of `request`, repeated while that can help.

        Args:
            url, what: for messages.
            request: starts one request; called once for every try.
            size: bytes of the answer's body.
            ahead: nobody waits for it yet.

        Raises:
            SourceError: not worth repeating, or repeated often enough.
        """
        if ahead:
            async with self._slots_ahead:
                return await self.fetch(url, request, size, what=what)
        failure = TemporaryError("")
        for number in range(self._options.max_tries):
            if number:
                self._counters.retries += 1
                await asyncio.sleep(self._wait_s(number, failure))
            try:
                async with self._slots:
                    return await self._hedged(request, size)
            except TemporaryError as error:
                failure = error
        raise SourceError(
            f"the file cannot be read, {self._options.max_tries} tries failed, the last with: {failure}",
            place=f"{shown(url)}{what and ', '}{what}",
            remedy="Try again when the server is well, or raise StorageOptions.max_tries or timeout_s.",
        )

    async def _hedged(self, request: Callable[[], Awaitable[_T]], size: int) -> _T:
        """The first answer of a request, and of others sent one by one while none comes."""
        running = {asyncio.ensure_future(self._once(request, size))}
        failure: TemporaryError | None = None
        extra, sent_s = 0, time.monotonic()
        try:
            while running:
                timeout_s = self._look_s(size, sent_s) if len(running) <= MAX_EXTRA else None
                done, running = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for error in [task.exception() for task in done]:
                    if isinstance(error, TemporaryError):
                        failure = error
                    elif error is not None:
                        raise error
                for task in done:
                    if task.exception() is None:
                        return task.result()
                if not done and self._left_s(size, sent_s) <= 0 and self._may_hedge():
                    extra, sent_s = extra + 1, time.monotonic()
                    self._hedges += 1
                    self._counters.hedged += 1
                    running.add(asyncio.ensure_future(self._once(request, size)))
            raise failure or TemporaryError("no answer")
        finally:
            self._hedges -= extra
            for task in running:
                task.cancel()
            if running:
                await asyncio.gather(*running, return_exceptions=True)

    def _left_s(self, size: int, sent_s: float) -> float:
        """Seconds until a request sent at `sent_s` is late; below 0 when it is."""
        late_s = max(self._options.hedge_factor * self._times.usual_s(size), self._options.hedge_after_s)
        return sent_s + late_s - time.monotonic()

    def _look_s(self, size: int, sent_s: float) -> float:
        """Seconds to the next look at it: again and again, since the usual time is known as answers to others come."""
        left_s = self._left_s(size, sent_s)
        return min(left_s, self._options.hedge_after_s) if left_s > 0 else self._options.hedge_after_s

    def _may_hedge(self) -> bool:
        """Whether another second request is within its share: a server that is late for all must not get them twice."""
        allowed = 8 + self._options.hedge_share * self._counters.requests
        most = max(self._options.max_in_flight // 4, 1)
        return self._options.hedge_share > 0 and self._counters.hedged < allowed and self._hedges < most

    async def _once(self, request: Callable[[], Awaitable[_T]], size: int) -> _T:
        counters, started = self._counters, time.monotonic()
        counters.requests += 1
        self._in_flight += 1
        counters.max_in_flight = max(counters.max_in_flight, self._in_flight)
        limit_s = self._options.timeout_s + size / MIB
        try:
            async with asyncio.timeout(limit_s):
                answer = await request()
        except TimeoutError:
            raise TemporaryError(f"no answer within {limit_s:.0f} s") from None
        finally:
            self._in_flight -= 1
        self._times.add(time.monotonic() - started, size)
        counters.bytes_read += size
        return answer

    def _wait_s(self, number: int, failure: TemporaryError) -> float:
        """Seconds before try `number`: doubled each time, spread by half, so that clients do not come back together."""
        wait_s = min(self._options.backoff_s * 2.0 ** (number - 1), MAX_BACKOFF_S)
        return failure.retry_after_s + wait_s * self._random.uniform(0.5, 1.5)
