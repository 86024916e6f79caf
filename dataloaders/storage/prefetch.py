"""What is fetched ahead: hints become requests within a bound on bytes, and later reads are served from their answers.

    add(groups) --> waiting groups --room--> requests under way, or answers --cover(read)--> pieces --used--> dropped

A group leaves when the bytes that were wanted of it have been read once, and the next waiting group starts. Reads may
cover parts of groups or several of them. Price: a hint that is never read stays until reads keep finding nothing while
the buffer is full; then the oldest goes.
"""

import threading
from bisect import bisect_right, insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

from dataloaders.storage.coalesce import Group, covered_bytes

MAX_WAITING = 100_000  # groups
MISSES_UNTIL_STALE = 16


@dataclass(slots=True, eq=False)
class Ahead:
    """Bytes [start, end) of `url`, fetched ahead; `future` is None while they wait for room."""

    url: str
    start: int
    end: int
    wanted_bytes: int
    number: int
    read: set[tuple[int, int]] = field(default_factory=set)
    future: "Future[bytes] | None" = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of a read; `ahead` holds them, or nothing does."""

    start: int
    end: int
    ahead: Ahead | None


class PrefetchBuffer:
    """Groups fetched ahead; safe from several threads.

    Args:
        limit_bytes: of groups started and unread, besides those that a read has started; 0: nothing is fetched ahead.
        start: begins fetching (url, start, end).
    """

    def __init__(self, limit_bytes: int, start: Callable[[str, int, int], "Future[bytes]"]) -> None:
        self._limit_bytes, self._start = limit_bytes, start
        self._lock, self._numbers = threading.Lock(), count()
        self._started_bytes = self._misses = 0
        # All groups by number, in order of their hints; and by file, as sorted (start, number): they do not overlap.
        self._all: OrderedDict[int, Ahead] = OrderedDict()
        self._waiting: OrderedDict[int, Ahead] = OrderedDict()
        self._by_file: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    @property
    def started_bytes(self) -> int:
        """Bytes under way or unread."""
        return self._started_bytes

    def add(self, groups: Iterable[Group]) -> None:
        """Fetch what `groups` cover and nothing here does yet."""
        with self._lock:
            for group in groups:
                size = group.end - group.start
                if size > self._limit_bytes or len(self._waiting) >= MAX_WAITING:
                    continue
                for piece in self._pieces(group.url, group.start, group.end):
                    if piece.ahead is None:
                        share = group.wanted_bytes * (piece.end - piece.start) // size
                        self._insert(Ahead(group.url, piece.start, piece.end, max(share, 1), next(self._numbers)))
            self._start_waiting()

    def cover(self, url: str, offset: int, size: int) -> list[Piece]:
        """[offset, offset + size) in pieces, in order; whatever waits and is needed is started."""
        with self._lock:
            pieces = self._pieces(url, offset, offset + size)
            found = [piece.ahead for piece in pieces if piece.ahead is not None]
            for ahead in found:
                if ahead.future is None:
                    self._begin(ahead)
            self._misses = 0 if found else self._misses + 1
            if self._waiting and self._misses > MISSES_UNTIL_STALE:
                oldest = next((ahead for ahead in self._all.values() if ahead.future is not None), None)
                if oldest is not None:
                    self._remove(oldest)
            return pieces

    def used(self, piece: Piece) -> None:
        """The bytes of `piece` have been read."""
        with self._lock:
            if piece.ahead is not None:
                piece.ahead.read.add((piece.start, piece.end))  # a text may be read twice before its media are
                if covered_bytes(list(piece.ahead.read)) >= piece.ahead.wanted_bytes:
                    self._remove(piece.ahead)

    def drop(self, piece: Piece) -> None:
        """What `piece` lies in could not be fetched."""
        with self._lock:
            if piece.ahead is not None:
                self._remove(piece.ahead)

    def forget(self, url: str) -> None:
        """Drop all groups of a file."""
        with self._lock:
            for _, number in list(self._by_file.get(url, [])):
                self._remove(self._all[number])

    def clear(self) -> None:
        """Drop everything and cancel what is under way."""
        with self._lock:
            self._waiting.clear()
            for ahead in list(self._all.values()):
                self._remove(ahead)

    def _pieces(self, url: str, start: int, end: int) -> list[Piece]:
        """[start, end) cut at the edges of the groups here, and what lies between them."""
        index = self._by_file.get(url, [])
        at = max(bisect_right(index, (start, 1 << 62)) - 1, 0)
        pieces, reached = [], start
        for first, number in index[at:]:
            if first >= end:
                break
            ahead = self._all[number]
            if ahead.end <= reached:
                continue
            if first > reached:
                pieces.append(Piece(reached, first, None))
                reached = first
            pieces.append(Piece(reached, min(ahead.end, end), ahead))
            reached = min(ahead.end, end)
        if reached < end:
            pieces.append(Piece(reached, end, None))
        return pieces

    def _insert(self, ahead: Ahead) -> None:
        self._all[ahead.number] = self._waiting[ahead.number] = ahead
        insort(self._by_file[ahead.url], (ahead.start, ahead.number))

    def _begin(self, ahead: Ahead) -> None:
        self._waiting.pop(ahead.number, None)
        self._started_bytes += ahead.end - ahead.start
        ahead.future = self._start(ahead.url, ahead.start, ahead.end)

    def _start_waiting(self) -> None:
        while self._waiting:
            ahead = next(iter(self._waiting.values()))
            if self._started_bytes + ahead.end - ahead.start > self._limit_bytes:
                return
            self._begin(ahead)

    def _remove(self, ahead: Ahead) -> None:
        if self._all.pop(ahead.number, None) is None:
            return
        self._waiting.pop(ahead.number, None)
        index = self._by_file[ahead.url]
        index.remove((ahead.start, ahead.number))
        if not index:
            del self._by_file[ahead.url]
        if ahead.future is not None:
            self._started_bytes -= ahead.end - ahead.start
            ahead.future.cancel()
        self._start_waiting()
