"""Any fsspec file system: coroutines where it has them, threads where it has not.

    s3, gs, az, ... (async_impl) --_cat_file on fsspec's loop--> bytes
    hf, memory, ...              --cat_file in a daemon thread--> bytes

Price: such answers do not tell a file's state, so one look-up per file and process comes before its first range; and a
thread cannot be interrupted: after a time-out it goes on in the background until its library gives up.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import fsspec

from dataloaders.errors import DataError, SourceError
from dataloaders.storage.base import FileState, StorageOptions
from dataloaders.storage.transport import TemporaryError, is_temporary, told, unreadable
from dataloaders.storage.urls import scheme_of

_STAMPS = ("ETag", "etag", "generation", "blob_id", "mtime", "LastModified", "last_modified", "updated", "created")


class DaemonPool(Executor):
    """Threads that never keep the interpreter from ending, started as they are needed, at most `max_threads`."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads, self._threads = max_threads, 0
        self._idle = threading.Semaphore(0)  # threads that wait and are not yet counted on by a job
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """A future of `function(*args, **kwargs)`."""
        future: Future[Any] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        with self._lock:
            self._jobs.put(job)
            if not self._idle.acquire(blocking=False) and self._threads < self._max_threads:
                self._threads += 1
                threading.Thread(target=self._work, name="storage", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after their jobs; never waits."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                self._idle.release()
                job = self._jobs.get()
            if job is None:
                return
            job()
            del job  # holds the answer


class FsspecTransport:
    """Files of an fsspec file system (a `Transport`).

    Raises:
        SourceError: the package for the scheme is not installed, or its options are wrong.
    """

    checks_answers = False

    def __init__(self, scheme: str, options: StorageOptions) -> None:
        try:
            self._fs = fsspec.filesystem(scheme, **options.protocol_options.get(scheme, {}))
        except DataError:
            raise
        except ImportError as error:
            raise SourceError(f"{scheme} addresses need a package that is not installed", remedy=f"{error}.") from None
        except Exception as error:
            raise SourceError(
                f"no access to {scheme} addresses: {told(error)}",
                remedy="Check StorageOptions.protocol_options and the credentials.",
            ) from None
        self._scheme = scheme
        self._pool = None if self._fs.async_impl else DaemonPool(options.max_in_flight)
        # Files of fsspec read megabytes ahead unless told not to.
        plain = self._pool is not None and type(self._fs).cat_file is fsspec.AbstractFileSystem.cat_file
        self._reading = {"cache_type": "none"} if plain else {}

    async def state(self, url: str) -> FileState | None:
        """State of a file, as the file system tells it."""
        try:
            info = await self._call("info", self._path(url))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._sorted(url, error) from None
        if info.get("type") == "directory":
            return None
        size = info.get("size")
        if not isinstance(size, int) or size < 0:
            raise unreadable(url, f"its size is {size!r}")
        stamp = next((str(info[name]) for name in _STAMPS if info.get(name)), "")
        return FileState(url=url, size=size, stamp=stamp)

    async def fetch(self, state: FileState, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of a file."""
        try:
            data = await self._call("cat_file", self._path(state.url), start=offset, end=offset + size, **self._reading)
        except Exception as error:
            raise self._sorted(state.url, error) from None
        if len(data) != size:
            raise TemporaryError(f"{len(data)} bytes came instead of {size}")
        return bytes(data)

    async def glob(self, pattern: str) -> list[str]:
        """URLs that match."""
        try:
            paths = await self._call("glob", self._path(pattern))
        except Exception as error:
            raise self._sorted(pattern, error) from None
        prefix = pattern.partition("://")[0]
        return [f"{prefix}://{str(path).removeprefix(f'{self._scheme}://').lstrip('/')}" for path in paths]

    async def close(self) -> None:
        """Let the threads end; fsspec closes its own sessions."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._pool is None:
            return await getattr(self._fs, f"_{name}")(*args, **kwargs)
        function = getattr(self._fs, name)
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def _path(self, url: str) -> str:
        # Never `url_to_fs`: it would resolve chains such as zip://...::https://...
        return str(self._fs._strip_protocol(f"{scheme_of(url)}://{url.partition('://')[2]}"))

    def _sorted(self, url: str, error: Exception) -> Exception:
        if is_temporary(error):
            return TemporaryError(told(error))
        return unreadable(url, told(error))
