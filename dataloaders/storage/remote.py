"""Remote files of one process: threads ask, one event loop fetches, answers come from cache, buffer or server.

    read_many(wanted) --> prefetched pieces --------------------------------+
                      --> local cache --------------------------------------+--> bytes, in the order of `wanted`
                      --> rest --coalesce--> groups --fetcher--> answers ---+      (also written to the cache)

Everything here belongs to one process: after a fork, the child makes its own and never touches the parent's, whose
connections it would disturb. What grows with the number of files is bounded (`known_states`). Price: one thread
(fsspec's, a daemon), and one copy of the bytes when groups are cut up.
"""

import asyncio
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import fsspec.asyn

from dataloaders.storage.base import FileState, Range, StorageCounters, StorageOptions
from dataloaders.storage.coalesce import Group, coalesce, split
from dataloaders.storage.fetcher import Fetcher
from dataloaders.storage.fsspec_transport import FsspecTransport
from dataloaders.storage.http_transport import HttpTransport
from dataloaders.storage.known_states import KnownStates
from dataloaders.storage.local import check_range, check_unchanged
from dataloaders.storage.prefetch import Piece, PrefetchBuffer
from dataloaders.storage.range_cache import RangeCache
from dataloaders.storage.transport import Transport
from dataloaders.storage.urls import missing_files, scheme_of

CLOSE_S = 2.0
MAX_MERGED_BYTES = 4 * 1024**2  # of ranges bridged into one request; above it, two requests side by side are faster

_T = TypeVar("_T")
_live: "weakref.WeakSet[Remote]" = weakref.WeakSet()


class RemoteFile:
    """An open remote file (a `StoredFile`); holds no connection of its own."""

    def __init__(self, remote: "Remote", state: FileState) -> None:
        self._remote, self._state = remote, state

    @property
    def state(self) -> FileState:
        """The file as it was found, or is expected to be."""
        return self._state

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._state.size

    def read(self, offset: int, size: int) -> bytes:
        """Exactly the bytes [offset, offset + size).

        Raises:
            SourceError: they are not in the file, the file has changed, or it cannot be read.
        """
        self._check(offset, size)
        return self._remote.read_many([(self._state.url, offset, size)], expect=self._state)[0]

    def start(self, offset: int, size: int) -> "Future[bytes]":
        """Begin fetching [offset, offset + size), past buffer and cache; the future raises as `read`."""
        self._check(offset, size)
        return self._remote.start(self._state.url, offset, offset + size, expect=self._state)

    def _check(self, offset: int, size: int) -> None:
        check_range(self._state, offset, size)
        check_unchanged(self._state, self._remote.known.keep(self._state))


class Remote:
    """Remote files, in the process that made it; safe from several threads."""

    def __init__(self, options: StorageOptions) -> None:
        self.pid, self._options, self.counters = os.getpid(), options, StorageCounters()
        self._loop: asyncio.AbstractEventLoop = fsspec.asyn.get_loop()
        self._fetcher = Fetcher(options, self.counters)
        self._transports: dict[str, Transport] = {}
        self._asking: dict[str, asyncio.Task[FileState | None]] = {}  # look-ups under way
        self._cache = RangeCache(options.cache_dir, options.cache_bytes) if options.cache_dir else None
        self._buffer = PrefetchBuffer(options.prefetch_bytes, _starter(weakref.WeakMethod(self.start)))
        self.known = KnownStates(self._buffer.forget)
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _close, self.pid, self._loop, self._transports, self._buffer, self._cache)
        _live.add(self)

    def glob(self, pattern: str) -> list[str]:
        """URLs that match one with wildcards."""
        return self._run(self._fetcher.fetch(pattern, partial(self._transport(pattern).glob, pattern)))

    def states(self, urls: Sequence[str], *, noun: str) -> list[FileState]:
        """States of files as they are now, asked for side by side; reads expect them from here on.

        Raises:
            SourceError: some are missing (all are listed), or one cannot be read.
        """
        for url in urls:
            self._transport(url)
        found = self._run(self._gather_states(urls))
        missing = [url for url, state in zip(urls, found, strict=True) if state is None]
        if missing:
            raise missing_files(missing, len(urls), noun=noun)
        states = [state for state in found if state is not None]
        for state in states:
            self._expect(state)
        return states

    def open(self, url: str, expect: FileState | None) -> RemoteFile:
        """The file at `url`; one that is expected, and told by every answer, costs no request here."""
        transport, known = self._transport(url), self.known.get(url)
        if known is not None and expect in (None, known):
            return RemoteFile(self, known)
        if expect is None or known is not None or not transport.checks_answers:
            found = self.states([url], noun="file")[0]
            check_unchanged(expect or found, found)
            expect = expect or found
        self._expect(expect)
        return RemoteFile(self, expect)

    def read_many(self, wanted: Sequence[Range], *, expect: FileState | None = None) -> list[bytes]:
        """Bytes of ranges, in order.

        Args:
            expect: state of the one file that is read; None: what is known, else what is found.

        Raises:
            SourceError: as `StoredFile.read`.
        """
        results: list[bytes | None] = [None] * len(wanted)
        covers: dict[int, list[Piece]] = {}
        rest: list[Range] = []  # what has to be asked for, and where it belongs
        for i, (url, offset, size) in enumerate(wanted):
            self._transport(url)
            pieces = self._buffer.cover(url, offset, size) if size > 0 else []
            if not any(piece.ahead for piece in pieces):
                results[i] = self._cached(expect or self.known.get(url), offset, size) if size else b""
                if results[i] is not None:
                    continue
            covers[i] = pieces or [Piece(offset, offset + size, None)]
            rest += [(url, piece.start, piece.end - piece.start) for piece in covers[i] if piece.ahead is None]
        asked = self._submit(self._fetch_many(rest, expect)) if rest else None
        try:
            ready = {i: [self._ahead(piece) for piece in pieces] for i, pieces in covers.items()}
            lost = [
                (wanted[i][0], piece.start, piece.end - piece.start)
                for i, pieces in covers.items()
                for piece, data in zip(pieces, ready[i], strict=True)
                if piece.ahead is not None and data is None
            ]
            again = iter(self._run(self._fetch_many(lost, expect)) if lost else [])
            fetched = iter(asked.result() if asked is not None else [])
        except BaseException:
            if asked is not None:
                asked.cancel()
            raise
        for i, pieces in covers.items():
            parts = [
                data if data is not None else next(again if piece.ahead is not None else fetched)
                for piece, data in zip(pieces, ready[i], strict=True)
            ]
            results[i] = parts[0] if len(parts) == 1 else b"".join(parts)
            self._store(expect or self.known.get(wanted[i][0]), wanted[i][1], results[i] or b"")
        return [data or b"" for data in results]

    def prefetch(self, wanted: Sequence[Range]) -> None:
        """Begin fetching ranges; failures show when they are read."""
        for url in {url for url, _, _ in wanted}:
            self._transport(url)
        missing = [
            (url, offset, size) for url, offset, size in wanted if size > 0 and not self._is_cached(url, offset, size)
        ]
        self._buffer.add(self._groups(missing))

    def prefetch_files(self, urls: Sequence[str], max_bytes: int) -> None:
        """Begin fetching whole files of at most `max_bytes` each, as soon as their sizes are known."""
        for url in urls:
            self._transport(url)
        self._submit(self._ask_and_prefetch(list(urls), max_bytes))

    def start(
        self, url: str, start: int, end: int, *, expect: FileState | None = None, ahead: bool = False
    ) -> "Future[bytes]":
        """Begin fetching bytes [start, end) of `url`."""
        return self._submit(self._fetch_span(url, start, end, expect, ahead=ahead))

    # --- on the event loop

    async def _gather_states(self, urls: Sequence[str]) -> list[FileState | None]:
        return list(await asyncio.gather(*(self._state(url) for url in urls)))

    async def _ask_and_prefetch(self, urls: Sequence[str], max_bytes: int) -> None:
        for url in urls:
            known = self.known.get(url)
            if known is not None:
                self._prefetch_whole(known, max_bytes)
                continue
            # Called before those who wait for the same answer to open the file: they find it under way.
            self._ask(url).add_done_callback(partial(_begin_whole, weakref.ref(self), max_bytes))

    def _prefetch_whole(self, state: FileState, max_bytes: int) -> None:
        if 0 < state.size <= max_bytes:
            self.prefetch([(state.url, 0, state.size)])

    async def _state(self, url: str) -> FileState | None:
        """State of a file as it is now; several who ask at one time share one request."""
        return await asyncio.shield(self._ask(url))

    def _ask(self, url: str) -> "asyncio.Task[FileState | None]":
        """The look-up of a file, begun now if none is under way."""
        task = self._asking.get(url)
        if task is None:
            transport = self._transports[scheme_of(url)]
            task = asyncio.ensure_future(self._fetcher.fetch(url, partial(transport.state, url)))
            task.add_done_callback(partial(_answered, self._asking, self.known, url))  # who asked may be gone
            self._asking[url] = task
        return task

    async def _fetch_many(self, wanted: Sequence[Range], expect: FileState | None) -> list[bytes]:
        """Bytes of ranges, by as few requests as the options allow."""
        groups = self._groups(wanted)
        tasks = [asyncio.ensure_future(self._fetch_span(group.url, group.start, group.end, expect)) for group in groups]
        results = [b""] * len(wanted)
        try:
            for group, task in zip(groups, tasks, strict=True):
                data = await task
                for i in group.members:
                    _, offset, size = wanted[i]
                    whole = size == len(data)
                    results[i] = data if whole else data[offset - group.start : offset - group.start + size]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return results

    async def _fetch_span(
        self, url: str, start: int, end: int, expect: FileState | None, *, ahead: bool = False
    ) -> bytes:
        """Bytes [start, end) of a file, by one request or several side by side."""
        state = expect or self.known.get(url)
        if state is None:
            found = await self._state(url)
            if found is None:
                raise missing_files([url], 1, noun="file")
            state = self.known.keep(found)
            check_unchanged(state, found)
        check_range(state, start, end - start)
        fetch = self._transports[scheme_of(url)].fetch
        tasks = [
            asyncio.ensure_future(
                self._fetcher.fetch(url, partial(fetch, state, a, b - a), b - a, what=f"bytes {a} to {b}", ahead=ahead)
            )
            for a, b in split(start, end, self._options.max_request_bytes)
        ]
        try:
            parts = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # --- in the calling thread

    def _groups(self, wanted: Sequence[Range]) -> list[Group]:
        groups = coalesce(wanted, self._options.max_waste, max_bytes=MAX_MERGED_BYTES)
        with self._lock:
            self.counters.wasted_bytes += sum(group.end - group.start - group.wanted_bytes for group in groups)
        return groups

    def _ahead(self, piece: Piece) -> bytes | None:
        """Bytes of a piece that was fetched ahead; None where that failed, or there is nothing."""
        if piece.ahead is None or piece.ahead.future is None:
            return None
        try:
            data = piece.ahead.future.result()
        except Exception:  # the read asks again, and tells the cause if it remains
            self._buffer.drop(piece)
            return None
        self._buffer.used(piece)
        with self._lock:
            self.counters.prefetch_hits += 1
        first = piece.ahead.start
        return data[piece.start - first : piece.end - first]

    def _cached(self, state: FileState | None, offset: int, size: int) -> bytes | None:
        data = self._cache.get(state, offset, size) if self._cache is not None and state is not None else None
        if data is not None:
            with self._lock:
                self.counters.cache_hits += 1
                self.counters.cache_bytes_read += size
        return data

    def _is_cached(self, url: str, offset: int, size: int) -> bool:
        state = self.known.get(url)
        return self._cache is not None and state is not None and self._cache.holds(state, offset, size)

    def _store(self, state: FileState | None, offset: int, data: bytes) -> None:
        if self._cache is not None and state is not None and data:
            self._cache.put(state, offset, data)

    def _expect(self, state: FileState) -> None:
        """Reads of the file expect `state`; what was fetched of another state is dropped."""
        if self.known.put(state) not in (None, state):
            self._buffer.forget(state.url)

    def _transport(self, url: str) -> Transport:
        """Access to the scheme of `url`, made on first use."""
        scheme = scheme_of(url)
        with self._lock:
            if scheme not in self._transports:
                kind = HttpTransport if scheme in ("http", "https") else FsspecTransport
                self._transports[scheme] = kind(scheme, self._options)
            return self._transports[scheme]

    def _submit(self, work: Coroutine[Any, Any, _T]) -> "Future[_T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of `work`; Ctrl-C while waiting cancels it."""
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _answered(
    asking: "dict[str, asyncio.Task[FileState | None]]",
    known: KnownStates,
    url: str,
    task: "asyncio.Task[FileState | None]",
) -> None:
    """End of the look-up of a file, which may have failed."""
    del asking[url]
    state = None if task.cancelled() or task.exception() else task.result()
    if state is not None:
        known.keep(state)


def _begin_whole(remote: "weakref.ref[Remote]", max_bytes: int, task: "asyncio.Task[FileState | None]") -> None:
    """Fetch a whole file whose state was found; where it was not, the read says why."""
    state = None if task.cancelled() or task.exception() else task.result()
    owner = remote()
    if state is not None and owner is not None:
        owner._prefetch_whole(state, max_bytes)


def _starter(start: "weakref.WeakMethod[Callable[..., Future[bytes]]]") -> Callable[[str, int, int], "Future[bytes]"]:
    """`Remote.start` for what is fetched ahead, without keeping the `Remote` alive."""

    def begin(url: str, first: int, end: int) -> "Future[bytes]":
        method = start()
        if method is None:
            raise RuntimeError("the storage is closed")
        return method(url, first, end, ahead=True)

    return begin


def _close(
    pid: int,
    loop: asyncio.AbstractEventLoop,
    transports: dict[str, Transport],
    buffer: PrefetchBuffer,
    cache: RangeCache | None,
) -> None:
    """Cancel what is under way and end connections; at the end of the process, too."""
    if pid != os.getpid() or not loop.is_running():
        return
    buffer.clear()
    if cache is not None:
        cache.close()
    closing = asyncio.run_coroutine_threadsafe(_close_transports(transports), loop)
    if threading.current_thread() is not fsspec.asyn.iothread[0]:  # a collector may call this on the loop itself
        try:
            closing.result(CLOSE_S)
        except Exception:  # nothing depends on it, and it must not hide what ended the process
            closing.cancel()


async def _close_transports(transports: dict[str, Transport]) -> None:
    await asyncio.gather(*(transport.close() for transport in transports.values()), return_exceptions=True)


def _keep_parents() -> None:
    """In a child after a fork: keep the parent's sessions for ever, since their destructors would disturb the parent.

    Parent and child share the epoll object of the event loop: closing a socket here would end its watch there.
    """
    for remote in list(_live):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(remote))
    _live.clear()


os.register_at_fork(after_in_child=_keep_parents)
