"""Files wherever they lie: one object that lists, opens and reads them, in any process.

    urls --list--> files --states--> sizes and stamps
    files --open / read_many / prefetch--> local: pread          (nothing between a reader and the file)
                                       --> remote: cache, buffer, coalesced parallel requests (remote.py)

A storage travels to loader workers as its options: handles, connections and threads are opened by the process that
first needs them, and a forked child opens its own. Price: nothing that one process has fetched ahead serves another;
the local cache does.
"""

import builtins
import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dataloaders.storage.base import FileState, Range, StorageCounters, StorageOptions, StoredFile
from dataloaders.storage.local import LocalFiles, local_state
from dataloaders.storage.urls import check_scheme, is_local, list_urls, missing_files

if TYPE_CHECKING:
    from dataloaders.storage.remote import Remote

_opening = threading.Lock()


class Storage:
    """Access to files, local and remote; picklable, and safe from several threads.

    Args:
        options: limits, schemes and credentials.
    """

    def __init__(self, options: StorageOptions | None = None) -> None:
        self.options = options or StorageOptions()
        self._local: tuple[int, LocalFiles] | None = None
        self._remote: Remote | None = None

    def list(self, urls: str | Sequence[str], *, noun: str = "shard") -> builtins.list[str]:
        """The files that `urls` name, in order; see `list_urls`.

        Raises:
            SourceError: nothing matches, one is listed twice, or a scheme is not allowed; `pipe:` is none.
        """
        return list_urls(
            urls, schemes=self.options.schemes, remote_glob=lambda pattern: self._here().glob(pattern), noun=noun
        )

    def states(self, urls: Sequence[str], *, noun: str = "shard") -> builtins.list[FileState]:
        """States of files as they are now, in order.

        Raises:
            SourceError: some are missing (all are listed), or a remote one cannot be read.
        """
        for url in urls:
            check_scheme(url, self.options.schemes)
        found = {url: local_state(url) for url in urls if is_local(url)}
        if missing := [url for url, state in found.items() if state is None]:
            raise missing_files(missing, len(urls), noun=noun)
        if remote := [url for url in urls if url not in found]:
            found |= zip(remote, self._here().states(remote, noun=noun), strict=True)
        return [state for url in urls if (state := found[url]) is not None]

    def open(self, url: str, expect: FileState | None = None) -> StoredFile:
        """The file at `url`.

        Args:
            expect: its state as it was; None: as it is now.

        Raises:
            SourceError: it is missing or not as expected. Where a server tells the state with every answer (HTTP),
                an expected file is checked with the first read instead.
            OSError: a local file cannot be opened.
        """
        check_scheme(url, self.options.schemes)
        return self._files().open(url, expect) if is_local(url) else self._here().open(url, expect)

    def read_many(self, wanted: Sequence[Range]) -> builtins.list[bytes]:
        """Bytes of ranges (url, offset, size), in order; remote ones side by side, neighbours by one request.

        Raises:
            SourceError: as `StoredFile.read`.
        """
        remote = self._remote_ones(wanted)
        answers = iter(self._here().read_many(remote) if remote else [])
        return [self.open(url).read(offset, size) if is_local(url) else next(answers) for url, offset, size in wanted]

    def prefetch(self, wanted: Sequence[Range]) -> None:
        """Begin fetching remote ranges that are read soon, in this order; returns at once. A hint: never fails a read.

        Raises:
            SourceError: a scheme is not allowed, or its package is not installed.
        """
        if (remote := self._remote_ones(wanted)) and self.options.prefetch_bytes:
            self._here().prefetch(remote)

    def prefetch_files(self, urls: Sequence[str], *, max_bytes: int) -> None:
        """Begin fetching whole remote files of at most `max_bytes` that are read soon; as `prefetch`.

        What is asked first, how large each is, is asked of all of them side by side.
        """
        for url in urls:
            check_scheme(url, self.options.schemes)
        if (remote := [url for url in urls if not is_local(url)]) and self.options.prefetch_bytes:
            self._here().prefetch_files(remote, max_bytes)

    @property
    def counters(self) -> StorageCounters:
        """What this process has done with remote files so far: a copy."""
        remote = self._remote
        return (
            StorageCounters() if remote is None or remote.pid != os.getpid() else dataclasses.replace(remote.counters)
        )

    def close(self) -> None:
        """Cancel what is under way and close connections and files; a later use opens them again."""
        remote, self._remote, self._local = self._remote, None, None
        if remote is not None and remote.pid == os.getpid():
            remote.close()

    def __enter__(self) -> "Storage":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.options,))

    def _remote_ones(self, wanted: Sequence[Range]) -> builtins.list[Range]:
        for url in {url for url, _, _ in wanted}:
            check_scheme(url, self.options.schemes)
        return [(url, offset, size) for url, offset, size in wanted if not is_local(url)]

    def _files(self) -> LocalFiles:
        """Local files of this process."""
        local = self._local
        if local is None or local[0] != os.getpid():  # its lock may have been held when the process was forked
            local = self._local = (os.getpid(), LocalFiles(self.options.max_open_files))
        return local[1]

    def _here(self) -> "Remote":
        """Remote files of this process."""
        remote = self._remote
        if remote is None or remote.pid != os.getpid():
            with _opening:
                remote = self._remote
                if remote is None or remote.pid != os.getpid():
                    # Not at the top: asyncio and fsspec take longer to import than all of the package.
                    from dataloaders.storage.remote import Remote

                    remote = self._remote = Remote(self.options)
        return remote


def _new_lock() -> None:
    global _opening  # noqa: PLW0603  (a child must not wait for a thread of its parent)
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
