"""HTTP(S): one range request at a time, every answer checked before its body is read.

    GET, Range: bytes=a-b -> 206, Content-Range: bytes a-b/size, ETag -> exactly b - a + 1 bytes
                          -> 200: the server ignores ranges; refused before a byte of the body is read

fsspec's file system gives the session (so its options for headers, proxies and authentication hold); its own reading is
not used, because it takes whatever body comes. Price: a server must serve ranges.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fsspec

from dataloaders.errors import SourceError
from dataloaders.storage.base import FileState, StorageOptions
from dataloaders.storage.local import changed, check_unchanged
from dataloaders.storage.transport import MAX_RETRY_AFTER_S, TemporaryError, is_temporary_status, told, unreadable
from dataloaders.storage.urls import scheme_of, shown

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19}|\*)")
_NOT_FOUND = (404, 410)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What the head of an answer says: bytes [start, end) of a file of `size`; None: it does not say."""

    start: int
    end: int
    size: int | None
    stamp: str


class HttpTransport:
    """Files of http and https servers (a `Transport`).

    Raises:
        SourceError: aiohttp is not installed.
    """

    checks_answers = True

    def __init__(self, scheme: str, options: StorageOptions) -> None:
        try:
            import aiohttp
        except ImportError:
            raise SourceError(
                f"{scheme} addresses need the package aiohttp, which is not installed",
                remedy="Install it: pip install 'mllm-balancer[remote]'.",
            ) from None
        self._aiohttp, self._schemes, self._max_in_flight = aiohttp, options.schemes, options.max_in_flight
        arguments = {"get_client": self._client, **options.protocol_options.get(scheme, {})}
        self._fs = fsspec.get_filesystem_class(scheme)(asynchronous=True, skip_instance_cache=True, **arguments)
        self._session: Any = None

    async def state(self, url: str) -> FileState | None:
        """State of a file, by its first byte: so a server without ranges is found at once."""
        try:
            async with await self._get(url, 0, 1) as answer:
                if answer.status in _NOT_FOUND:
                    return None
                head = self._head(url, answer)
                if head.size is None:
                    raise unreadable(url, "the server does not tell its size", remedy="Use another server.")
                if head.size:
                    await answer.content.readexactly(1)
                return FileState(url=url, size=head.size, stamp=head.stamp)
        except (self._aiohttp.ClientError, OSError, EOFError) as error:
            raise self._sorted(url, error) from None

    async def fetch(self, state: FileState, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of a file, by one request."""
        try:
            async with await self._get(state.url, offset, size) as answer:
                head = self._head(state.url, answer)
                found = FileState(url=state.url, size=state.size if head.size is None else head.size, stamp=head.stamp)
                check_unchanged(state, found)
                if (head.start, head.end) != (offset, offset + size):
                    how = f"bytes {head.start} to {head.end} were sent for {offset} to {offset + size}"
                    raise TemporaryError(how)
                return bytes(await answer.content.readexactly(size))
        except (self._aiohttp.ClientError, OSError, EOFError) as error:
            raise self._sorted(state.url, error) from None

    async def glob(self, pattern: str) -> list[str]:
        """URLs that match, by the links of the server's page for the folder."""
        await self._open_session()
        try:
            return [str(url) for url in await self._fs._glob(pattern)]
        except (self._aiohttp.ClientError, OSError) as error:
            raise self._sorted(pattern, error) from None

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _client(self, **arguments: Any) -> Any:
        connector = self._aiohttp.TCPConnector(limit=2 * self._max_in_flight)
        return self._aiohttp.ClientSession(**{"connector": connector, **arguments})

    async def _open_session(self) -> Any:
        if self._session is None:
            self._session = await self._fs.set_session()
        return self._session

    async def _get(self, url: str, offset: int, size: int) -> Any:
        """The answer to a request for [offset, offset + size), its body unread."""
        session = await self._open_session()
        arguments = dict(self._fs.kwargs)
        # A compressed answer has other offsets, and no bound on what it unpacks to.
        ranges = {"Range": f"bytes={offset}-{offset + size - 1}", "Accept-Encoding": "identity"}
        arguments["headers"] = {**arguments.get("headers", {}), **ranges}
        arguments.setdefault("timeout", self._aiohttp.ClientTimeout(total=None))  # the fetcher has one
        return await session.get(self._fs.encode_url(url), **arguments)

    def _head(self, url: str, answer: Any) -> _Head:
        """The head of an answer, checked. The body stays unread where it raises: the connection is closed then."""
        try:
            return self._checked_head(url, answer)
        except BaseException:
            answer.close()
            raise

    def _checked_head(self, url: str, answer: Any) -> _Head:
        if scheme_of(str(answer.url)) not in self._schemes:
            raise unreadable(
                url,
                f"the server redirects to {shown(str(answer.url))}",
                remedy="Add its scheme to StorageOptions.schemes.",
            )
        headers, status = answer.headers, answer.status
        stamp = headers.get("ETag") or headers.get("Last-Modified") or ""
        length, parts = headers.get("Content-Length", ""), _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))
        if is_temporary_status(status):
            raise TemporaryError(f"{status} {answer.reason}", retry_after_s=_retry_after_s(headers))
        if status == 206 and parts and parts[1]:
            if headers.get("Content-Encoding", "identity") != "identity":
                raise unreadable(url, f"the answer is compressed ({headers['Content-Encoding']})")
            size = None if parts[3] == "*" else int(parts[3])
            return _Head(start=int(parts[1]), end=int(parts[2]) + 1, size=size, stamp=stamp)
        if (status == 416 and parts and parts[3] == "0") or (status == 200 and length == "0"):
            return _Head(start=0, end=0, size=0, stamp=stamp)
        if status == 416:
            raise changed(url, f"the server has no such bytes ({headers.get('Content-Range', 'no size given')})")
        if status in (200, 206):
            raise unreadable(
                url,
                "the server ignores ranges and would send the whole file",
                remedy="Use a server that answers range requests (nginx, an object store), or copy the files.",
            )
        raise unreadable(url, f"{status} {answer.reason}")

    def _sorted(self, url: str, error: BaseException) -> Exception:
        """A library's error as one that is, or is not, worth another try."""
        final: Sequence[type] = (
            self._aiohttp.InvalidURL,
            self._aiohttp.TooManyRedirects,
            self._aiohttp.ClientSSLError,
        )
        if isinstance(error, tuple(final)):
            return unreadable(url, told(error))
        return TemporaryError(told(error))


def _retry_after_s(headers: Any) -> float:
    """Seconds of a Retry-After header, bounded; 0 where there is none or it is a date."""
    text = headers.get("Retry-After", "")
    return min(float(text), MAX_RETRY_AFTER_S) if re.fullmatch(r"\d{1,9}", text) else 0.0
