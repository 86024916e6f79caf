"""Media files that records name: inside one folder, regular files only, or URLs of schemes that the caller allowed.

    "img/1.jpg"              --> <root>/img/1.jpg
    "/data/img/1.jpg"        --> itself, if it lies inside the root
    "file:///data/img/1.jpg" --> likewise
    "https://host/1.jpg"     --> fetched only if `schemes` has "https"

A record is data from strangers. `..` is refused, and so are absolute paths and links that leave the root (links may
with `follow_links`), NUL bytes, devices and pipes (opening a named pipe would wait for a writer for ever). Nothing is
ever run, written or created. A file that is not there is `missing_media`; a root that is gone is failing storage, an
`OSError`.

Price: about 50 us per medium to follow links and `stat`; at a URL, one request for its size in every scan or load,
which `prefetch` sends ahead, and the one for its bytes behind it.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from dataloaders.errors import MediaError, MissingFileError, Reason, RecordError, SourceError
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import ByteReader
from dataloaders.storage import Storage, StoredFile, is_local, scheme_of, shown

# A file of this name cannot be had, whatever the state of storage. Others (EIO, ESTALE) are failures of storage.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG})
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFiles:
    """How references are followed.

    Attributes:
        schemes: of URLs in records that may be fetched, such as ("https",). Whoever writes the records then decides
            which hosts this machine asks: allow none for data you do not know.
        follow_links: whether links inside the root may lead out of it.
        limits: ceilings; a medium above `max_bytes` is not read.
    """

    storage: Storage = field(default_factory=Storage)
    schemes: tuple[str, ...] = ()
    follow_links: bool = False
    limits: ProbeLimits = field(default_factory=ProbeLimits)

    def size_of(self, root: str | None, reference: str, place: str) -> int:
        """Encoded size in bytes of what `reference` names.

        Args:
            root: folder or URL of a folder that relative references start from; None: there is none.

        Raises:
            RecordError: `missing_media`, or `bad_record` for a reference that is refused.
            OSError, SourceError: storage failed.
        """
        where = self._resolve(root, reference, place)
        if is_local(where):
            return self._stat(where, root, place).st_size
        return self._open_url(where, place).size

    def reader(self, root: str | None, reference: str, place: str) -> ByteReader:
        """Ranges of the medium. Raises as `size_of`."""
        where = self._resolve(root, reference, place)
        if is_local(where):
            self._stat(where, root, place)
            return LocalMedium(self._open_path(where, root, place))
        return RemoteMedium(self._open_url(where, place))

    def read(self, root: str | None, reference: str, place: str) -> bytes:
        """All bytes of the medium. Raises as `size_of`, and MediaError `too_large` before anything is read."""
        reader = self.reader(root, reference, place)
        if reader.size > self.limits.max_bytes:
            raise MediaError(
                Reason.TOO_LARGE,
                f"{reader.size} encoded bytes exceed max_bytes={self.limits.max_bytes}",
                place=place,
                remedy="Raise ProbeLimits.max_bytes if the file is meant.",
            )
        data = reader.read(0, reader.size)
        if len(data) < reader.size:
            raise RecordError(
                Reason.TRUNCATED, f"the file ends {reader.size - len(data)} bytes early", place=place, remedy=_AGAIN
            )
        return data

    def may_be_remote(self, root: str | None) -> bool:
        """Whether any medium can lie at a URL."""
        return bool(self.schemes) or (root is not None and not is_local(root))

    def prefetch(self, root: str | None, references: Iterable[str]) -> None:
        """Begin fetching those of `references` that are URLs; what is refused says so when it is read."""
        urls = []
        for reference in references:
            try:
                url = self._resolve(root, reference, "")
            except RecordError:
                continue
            if not is_local(url):
                urls.append(url)
        self.storage.prefetch_files(urls, max_bytes=self.limits.max_bytes)

    def _resolve(self, root: str | None, reference: str, place: str) -> str:
        """A path without links, or a URL."""
        if "\0" in reference:
            raise _refused(f"{reference[:80]!r} holds a NUL byte", place, "Repair the record.")
        if not is_local(reference):
            return self._allowed(reference, place)
        path = reference.removeprefix("file://").removeprefix("file:")
        if ".." in path.replace("\\", "/").split("/"):
            raise _refused(
                f"{path[:80]!r} holds `..`", place, "Write paths from `media_root` on, and choose that accordingly."
            )
        if root is None:
            raise _refused(
                f"{path[:80]!r} is a path, but no folder of media is given", place, "Give the folder as `media_root`."
            )
        if not is_local(root):
            # A server or a client may decode escapes: `%2e%2e` must not lead out where `..` does not.
            if path.startswith("/") or set("?#") & set(path) or ".." in re.split(r"[/\\]", unquote(unquote(path))):
                raise _refused(
                    f"{path[:80]!r} is no path inside {shown(root)}",
                    place,
                    "Write it from the root on, without `..`, `?` and `#`, escaped or not.",
                )
            return f"{root.rstrip('/')}/{path}"
        return self._inside(root, path, place)

    def _allowed(self, url: str, place: str) -> str:
        scheme = scheme_of(url)
        if scheme not in self.schemes:
            raise _refused(
                f"{shown(url)[:120]!r} is a URL, and fetching {scheme}: is not allowed",
                place,
                f'Fetch the media beforehand, or allow it with media_schemes=("{scheme}",) if you trust the records.',
            )
        return url

    def _inside(self, root: str, path: str, place: str) -> str:
        written = os.path.abspath(os.path.join(root, path))
        try:
            real = os.path.realpath(written)
        except (OSError, ValueError) as error:  # a lone surrogate is no name of a file
            raise _missing(f"{path[:80]!r} cannot be a path: {error}", place) from None
        as_written = _is_inside(written, os.path.abspath(root))
        if _is_inside(real, os.path.realpath(root)) or (self.follow_links and as_written):
            return real
        remedy = "It is a link: allow those with follow_links=True." if as_written else "Give the folder of all media."
        raise _refused(f"{path[:80]!r} leads to {real!r}, outside of media_root={root!r}", place, remedy)

    def _stat(self, path: str, root: str | None, place: str) -> os.stat_result:
        try:
            found = os.stat(path)
        except OSError as error:
            raise self._absent(error, root, place) from None
        _check_regular(found, path, place)
        return found

    def _open_path(self, path: str, root: str | None, place: str) -> int:
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError as error:
            raise self._absent(error, root, place) from None
        try:
            _check_regular(os.fstat(descriptor), path, place)
        except RecordError:
            os.close(descriptor)
            raise
        return descriptor

    def _absent(self, error: OSError, root: str | None, place: str) -> OSError | RecordError:
        if error.errno not in _ABSENT or (root is not None and not os.path.isdir(root)):
            return error
        return _missing(f"there is no file that can be read ({error.strerror}: {str(error.filename)[:200]!r})", place)

    def _open_url(self, url: str, place: str) -> StoredFile:
        try:
            return self.storage.open(url)
        except MissingFileError as error:  # alone: a server that is down is no reason to call all of its samples bad
            raise _missing(f"there is no file at {shown(url)}", place) from error


class LocalMedium:
    """Byte ranges of an open file (a `ByteReader`), which is closed with its last reference."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the end."""
        start = min(max(offset, 0), self.size)
        want = min(max(size, 0), self.size - start)
        chunks: list[bytes] = []
        while want > 0 and (chunk := os.pread(self._descriptor, want, start)):
            chunks.append(chunk)
            start, want = start + len(chunk), want - len(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def __del__(self) -> None:
        os.close(self._descriptor)


class RemoteMedium:
    """Byte ranges of a stored file (a `ByteReader`)."""

    def __init__(self, file: StoredFile) -> None:
        self._file, self.size = file, file.size

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the end."""
        start = min(max(offset, 0), self.size)
        want = min(max(size, 0), self.size - start)
        return self._file.read(start, want) if want else b""


def as_schemes(schemes: Sequence[str]) -> tuple[str, ...]:
    """Schemes in lower case; a mere string is refused, for its letters are none."""
    if isinstance(schemes, str):
        raise SourceError(f"media_schemes={schemes!r} is a string", remedy=f'Write ("{schemes}",).')
    return tuple(scheme.lower() for scheme in schemes)


def check_root(root: str | None) -> None:
    """Raise SourceError for a folder of media that is not there."""
    if root is not None and is_local(root) and not os.path.isdir(root):
        raise SourceError(f"media_root={root!r} is no folder", remedy="Give the folder that paths in records start at.")


def _check_regular(found: os.stat_result, path: str, place: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, pipe or socket"
        raise _refused(f"{path[:200]!r} is {kind}, not a regular file", place, "Name a file.")


def _is_inside(path: str, root: str) -> bool:
    return path.startswith(root if root.endswith("/") else f"{root}/")


def _refused(cause: str, place: str, remedy: str) -> RecordError:
    return RecordError(Reason.BAD_RECORD, cause, place=place, remedy=remedy)


def _missing(cause: str, place: str) -> RecordError:
    return RecordError(Reason.MISSING_MEDIA, cause, place=place, remedy=_AGAIN)


_AGAIN = "Check `media_root`, or bring the file back."
