"""From what a user writes to a list of files: braces, wildcards, `~` and `file:`; schemes are checked, nothing is run.

    "s3://b/{train,val}-*.tar" --braces--> patterns --wildcards--> URLs, in order, each once

Local files are named by paths, everything else by its URL. A file whose name happens to hold braces or brackets is
found as it stands. Passwords and signatures in URLs never reach a message.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import braceexpand

from dataloaders.errors import MissingFileError, SourceError
from dataloaders.printable import printable
from dataloaders.storage.base import SCHEMES

MAX_SHARDS = 1_000_000
MAX_LISTED = 20
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://[^?]*)?::[A-Za-z][A-Za-z0-9+.-]*://")  # as fsspec writes them

RemoteGlob = Callable[[str], Iterable[str]]


def scheme_of(url: str) -> str:
    """Scheme of a URL in lower case; "file" for a local path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else "file"


def is_local(url: str) -> bool:
    """Whether `url` is a path, or a `file:` URL."""
    return scheme_of(url) == "file"


def shown(url: str) -> str:
    """`url` for messages: without user, password and query, which may grant access, and fit to be shown."""
    url = printable(url)
    if is_local(url):
        return url
    address, query, _ = url.partition("?")
    address = re.sub(r"://[^/@]*@", "://...@", address)
    return f"{address}?..." if query else address


def list_urls(
    urls: str | Sequence[str],
    *,
    schemes: Sequence[str] = SCHEMES,
    remote_glob: RemoteGlob | None = None,
    noun: str = "shard",
) -> list[str]:
    """The files that `urls` name, in order; only wildcards look at what is there.

    Args:
        urls: one or several, each with optional braces (`shard-{000..015}.tar`), wildcards, `~`, or `file:`.
        schemes: that are allowed; "file" stands for paths.
        remote_glob: finds the URLs that match one with wildcards; None: remote wildcards are refused.
        noun: what messages call a file.

    Raises:
        SourceError: nothing matches, one is listed twice, a scheme is not allowed, or a path is no text.
    """
    given = [os.fspath(url) for url in ([urls] if isinstance(urls, str | os.PathLike) else urls)]
    found = [file for url in given for file in _expand(url, schemes, remote_glob, noun)]
    if not found:
        if not given:
            remedy = "Name tar files, with braces or wildcards if there are many." if noun == "shard" else "Name one."
            raise SourceError(f"no {noun} is named", remedy=remedy)
        named = ", ".join(repr(shown(url)) for url in given[:MAX_LISTED])
        raise SourceError(f"no {noun} matches {named}", remedy="Check the path and its wildcards.")
    if twice := repeated(found):
        raise SourceError(
            f"{noun}s listed twice: {', '.join(map(shown, twice[:MAX_LISTED]))}", remedy=f"List every {noun} once."
        )
    unspeakable = [file for file in found if file.encode("utf-8", "replace").decode() != file or "\0" in file]
    if unspeakable:  # an index and its reports are UTF-8, and name every file
        raise SourceError(
            f"paths of {noun}s that are not UTF-8 text: {', '.join(map(ascii, unspeakable[:MAX_LISTED]))}",
            remedy="Rename them, or name them by links.",
        )
    return found


def repeated(names: Iterable[str]) -> list[str]:
    """Those that occur more than once, sorted."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def missing_files(missing: Sequence[str], num_files: int, *, noun: str = "shard") -> MissingFileError:
    """The error that lists `missing` of `num_files` files."""
    more = f" and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
    folder = next((file for file in missing if is_local(file) and os.path.isdir(file)), None)
    listed = ", ".join(map(shown, missing[:MAX_LISTED]))
    return MissingFileError(
        f"{len(missing)} of {num_files} {noun}s are missing or no files: {listed}{more}",
        remedy=f"For a folder write {folder}/*.tar."
        if folder
        else "Check the path, the braces and the working folder."
        if all(map(is_local, missing))
        else "Check the address and the braces.",
    )


def check_scheme(url: str, schemes: Sequence[str] = SCHEMES) -> None:
    """Raise SourceError unless `url` is of an allowed scheme; `pipe:` and chained URLs are none."""
    if url[:5].lower() == "pipe:":
        raise SourceError(
            f"{url!r} is a command, not a file, and commands are not run",
            remedy="Copy what it prints to files. Tars can be read as a stream with "
            "TarStream(..., allow_pipe=True), if you wrote the command yourself.",
        )
    if _CHAIN.match(url) and not os.path.exists(url):
        raise SourceError(
            f"{shown(url)!r} is a chain of URLs, and chains are not followed",
            remedy="Name the last file itself, and unpack archives; what is fetched is kept with "
            "StorageOptions(cache_dir=...).",
        )
    scheme = scheme_of(url)
    if scheme in schemes:
        return
    if tuple(schemes) == ("file",):
        raise SourceError(f"{shown(url)!r} is not a local file", remedy="Copy the shards to local disk.")
    raise SourceError(
        f"the scheme {scheme!r} is not one of {', '.join(schemes)}",
        place=shown(url),
        remedy=f"If the address is meant, allow it: StorageOptions(schemes=(*SCHEMES, {scheme!r})).",
    )


def absolute(url: str) -> str:
    """The name of a file for every process, whatever its working folder: an absolute path, or a URL."""
    return os.path.abspath(local_path(url)) if is_local(url) else url


def local_path(url: str) -> str:
    """Path of a local `url`: `~` and `file:` are resolved.

    Raises:
        SourceError: a `file:` URL names a host.
    """
    if url[:7].lower() == "file://":
        path = url[7:]
        if path and not path.startswith(("/", "~")):
            raise SourceError(
                f"{url!r} names the host {path.split('/')[0]!r}", remedy="Write file:///path, or the path."
            )
        return os.path.expanduser(path)
    return os.path.expanduser(url.removeprefix("file:"))


def _expand(url: str, schemes: Sequence[str], remote_glob: RemoteGlob | None, noun: str) -> Iterator[str]:
    check_scheme(url, schemes)
    local = is_local(url)
    path = local_path(url) if local else url
    if local and os.path.exists(path):  # a file whose name happens to hold braces or brackets
        yield path
        return
    for name in _braces(path, noun):
        check_scheme(name, schemes)  # braces may hold schemes, too
        local = is_local(name)
        if local and glob.has_magic(name) and not os.path.exists(name):
            yield from map(_as_path, sorted(glob.glob(name)))
        elif not local and _has_remote_magic(name):
            if remote_glob is None:
                raise SourceError(f"{shown(name)!r} has wildcards", remedy="Name remote files by braces.")
            yield from sorted(remote_glob(name))
        else:
            yield name


def _as_path(found: str) -> str:
    """A path that was found in the working folder, so that nobody takes its first letters for more than a name."""
    return os.path.join(".", found) if re.match(r"~|[A-Za-z]+:", found) else found


def _braces(url: str, noun: str) -> list[str]:
    """`url` with its braces expanded."""
    if "{" not in url and "}" not in url:
        return [url]
    try:
        expanded = [] if _too_many(url) else list(islice(braceexpand.braceexpand(url), MAX_SHARDS + 1))
    except ValueError:
        raise SourceError(f"unbalanced braces in {shown(url)!r}", remedy="Close them.") from None
    if not expanded or len(expanded) > MAX_SHARDS:
        raise SourceError(f"{shown(url)!r} names more than {MAX_SHARDS} {noun}s", remedy="Check the braces.")
    return expanded


def _has_remote_magic(url: str) -> bool:
    """Whether a URL has wildcards; in `https://host/a?key=value` the question mark is none."""
    if scheme_of(url) in ("http", "https"):
        return any(char in url.partition("?")[0].partition("://")[2].partition("/")[2] for char in "*[")
    return glob.has_magic(url)


def _too_many(path: str) -> bool:
    """Whether a numeric range alone names too many files; braceexpand would build all of it before the first name."""
    ranges = re.findall(r"\{(-?\d+)\.\.(-?\d+)", path)
    return any(len(end) > 18 or abs(int(end) - int(start)) >= MAX_SHARDS for start, end in ranges)
