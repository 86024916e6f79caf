"""One request to one kind of server: what a transport does, and which failures are worth another try.

    fetch(state, offset, size) -> bytes | TemporaryError (try again) | SourceError (will not get better)

Retries, hedging and limits are not its business: `fetcher` has them once for all transports.
"""

from typing import Protocol

from dataloaders.errors import SourceError
from dataloaders.storage.base import FileState
from dataloaders.storage.urls import shown

MAX_RETRY_AFTER_S = 60.0
_TEMPORARY_STATUS = (408, 425, 429)
_TEMPORARY_WORDS = ("Timeout", "Connection", "Disconnected", "Incomplete", "Payload", "Protocol")


class TemporaryError(Exception):
    """A request that failed and may succeed when repeated.

    Args:
        how: what happened, for messages.
        retry_after_s: how long the server asks to wait, or 0.
    """

    def __init__(self, how: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(how)
        self.retry_after_s = retry_after_s


class Transport(Protocol):
    """Access to the files of one scheme; its coroutines run on one event loop."""

    checks_answers: bool
    """Whether every answer tells the state of its file, so that none has to be asked for before reading."""

    async def state(self, url: str) -> FileState | None:
        """State of a file; None where there is none. One request; raises as `fetch`."""
        ...

    async def fetch(self, state: FileState, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of a file, by one request.

        Raises:
            TemporaryError: worth another try.
            SourceError: not worth one: no access, no such file, another file than `state` tells.
        """
        ...

    async def glob(self, pattern: str) -> list[str]:
        """URLs that match one with wildcards."""
        ...

    async def close(self) -> None:
        """End connections."""
        ...


def is_temporary_status(status: int) -> bool:
    """Whether an answer of this HTTP status may be another one later."""
    return status >= 500 or status in _TEMPORARY_STATUS


def is_temporary(error: BaseException) -> bool:
    """Whether a library's error is worth another try; by status, class and, for foreign classes, their name."""
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 100 <= status < 600:
            return is_temporary_status(status)
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
        return False
    if isinstance(error, OSError | EOFError | TimeoutError):
        return True
    return any(word in type(error).__name__ for word in _TEMPORARY_WORDS)


def unreadable(url: str, how: str, *, remedy: str = "Check the address and the access rights.") -> SourceError:
    """The error for a file that cannot be read."""
    return SourceError(f"the file cannot be read: {how}", place=shown(url), remedy=remedy)


def told(error: BaseException) -> str:
    """A library's error in one short line, without addresses (which may hold signatures)."""
    line = str(error).split("\n", 1)[0]
    text = " ".join(word for word in line.split() if "://" not in word)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
