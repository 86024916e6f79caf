"""States of the remote files used lately: what reads of a file expect, for a bounded number of files.

    put(state) / keep(state) --> url -> FileState, least recently used first out --let_go(url)--> what was fetched of it

Media at URLs are one file each, so nothing here may grow with them. A file that falls out is asked for again when it
is next opened; whoever has it open brings its own state back. Price: about 0.5 KB a file.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable

from dataloaders.storage.base import FileState

MAX_FILES = 65_536  # far above the number of shards that one process reads from in turn


class KnownStates:
    """States by URL; safe from several threads.

    Args:
        let_go: called with the URL of a file that has fallen out.
        max_files: that are kept.
    """

    def __init__(self, let_go: Callable[[str], None], *, max_files: int | None = None) -> None:
        self._let_go, self._max_files = let_go, max_files or MAX_FILES
        self._states: OrderedDict[str, FileState] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, url: str) -> FileState | None:
        """The state that reads of a file expect, if it is known."""
        with self._lock:
            state = self._states.get(url)
            if state is not None:
                self._states.move_to_end(url)
            return state

    def put(self, state: FileState) -> FileState | None:
        """Expect `state` from here on; the state that was expected before, if it is known."""
        with self._lock:
            before = self._states.pop(state.url, None)
            self._states[state.url] = state
            gone = self._surplus()
        for url in gone:
            self._let_go(url)
        return before

    def keep(self, state: FileState) -> FileState:
        """The state that is expected of a file: the known one, else `state` from here on."""
        with self._lock:
            known = self._states.setdefault(state.url, state)
            self._states.move_to_end(state.url)
            gone = self._surplus()
        for url in gone:
            self._let_go(url)
        return known

    def _surplus(self) -> list[str]:
        return [self._states.popitem(last=False)[0] for _ in range(len(self._states) - self._max_files)]
