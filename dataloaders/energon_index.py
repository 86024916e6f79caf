"""Energon's database of sample parts (`.nv-meta/index.sqlite`), read as the foreign file that it is.

    data/.nv-meta/.info.json | .info.yaml   shard_counts: {"part_0/shard_000.tar": 100, ...}    tar_file_id = position
    data/.nv-meta/index.sqlite              samples(tar_file_id, sample_key, sample_index, ...)
                                            sample_parts(tar_file_id, sample_index, part_name, offset, size of content)

Read only and immutable, so no lock or journal is made beside it; plain tables alone (a view may compute for ever); a
ceiling on steps, rows and lengths; every value's type is checked. What the members name is checked against the shard by
`dataloaders.tar_index_files`. Local folders only: the database is not read over a network.
"""

import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from urllib.parse import quote

from dataloaders.storage import FileState, is_local
from dataloaders.tar_headers import BLOCK, TarMember
from dataloaders.tar_index_errors import NotBelieved

FOLDER, DATABASE, INFO = ".nv-meta", "index.sqlite", (".info.json", ".info.yaml")
MAX_LEVELS = 4  # folders above a shard that are looked through
MAX_INFO_BYTES = 64 * 1024**2
_MAX_TEXT_BYTES = 64 * 1024
_STEPS_PER_BLOCK, _LEAST_STEPS = 1000, 10_000_000
_YAML_SHARD = re.compile(r"  ([^\s'\"?:][^\s'\":]*): \d{1,18}")
_TABLES = ("samples", "sample_parts")
_KEYS = "SELECT sample_index, sample_key FROM samples WHERE tar_file_id = ? LIMIT ?"
_PARTS = (
    "SELECT sample_index, part_name, content_byte_offset, content_byte_size FROM sample_parts"
    " WHERE tar_file_id = ? ORDER BY sample_index, content_byte_offset LIMIT ?"
)


class EnergonIndex:
    """Members of local shards, as the databases above them say; a database is opened once and used by one thread."""

    def __init__(self) -> None:
        self._roots: dict[str, str | None] = {}  # folder -> dataset that it belongs to
        self._open: dict[str, tuple[sqlite3.Connection, Mapping[str, int]]] = {}

    def close(self) -> None:
        """Close all databases."""
        for connection, _ in self._open.values():
            connection.close()
        self._open.clear()

    def members(self, shard: FileState) -> list[TarMember] | None:
        """Members of a shard; None where no database speaks of it.

        Raises:
            NotBelieved: one does, but is older than the shard, or damaged.
        """
        root = self._root(os.path.dirname(shard.url)) if is_local(shard.url) else None
        if root is None:
            return None
        try:
            connection, numbers = self._opened(root)
            number = numbers.get(os.path.relpath(shard.url, root))
            if number is None:
                return None
            if os.stat(os.path.join(root, FOLDER, DATABASE)).st_mtime_ns < int(shard.stamp):
                raise NotBelieved(f"{DATABASE} is older than the shard")
            return list(_members(connection, number, shard.size))
        except (OSError, RecursionError, sqlite3.Error, KeyError, TypeError, ValueError) as error:
            raise NotBelieved(f"{DATABASE} or its .info cannot be read ({error})") from error

    def _root(self, folder: str) -> str | None:
        """The folder with a database, at or above `folder`."""
        if folder not in self._roots:
            above = Path(folder)
            near = [above, *above.parents][:MAX_LEVELS]
            found = (str(root) for root in near if (root / FOLDER / DATABASE).is_file())
            self._roots[folder] = next(found, None)
        return self._roots[folder]

    def _opened(self, root: str) -> tuple[sqlite3.Connection, Mapping[str, int]]:
        known = self._open.get(root)
        if known is None:
            numbers = _known_numbers(Path(root, FOLDER))
            connection = _connect(Path(root, FOLDER, DATABASE))
            known = self._open[root] = (connection, numbers)
        return known


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_TEXT_BYTES)
        connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        for pragma in ("trusted_schema = 0", "query_only = 1", "cell_size_check = 1", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
        rows = connection.execute("SELECT name, type, sql FROM sqlite_master").fetchmany(1000)
        plain = {n for n, kind, sql in rows if kind == "table" and not str(sql).upper().startswith("CREATE VIRTUAL")}
        if not plain.issuperset(_TABLES):
            raise ValueError("it has no tables of samples and their parts")
    except BaseException:
        connection.close()
        raise
    return connection


def _members(connection: sqlite3.Connection, number: int, size: int) -> Iterator[TarMember]:
    """Members of shard `number`, which has `size` bytes."""
    most = size // BLOCK + 1  # every member has a header
    steps = [most * _STEPS_PER_BLOCK + _LEAST_STEPS]

    def count() -> bool:
        steps[0] -= 10_000
        return steps[0] < 0

    connection.set_progress_handler(count, 10_000)
    keys: dict[int, str] = {}
    letters = names = size  # of keys, and of names, together: each has its place in a header of the shard
    for index, key in connection.execute(_KEYS, (number, most)):
        if type(index) is not int or type(key) is not str or index in keys:
            raise ValueError("a sample is no number with a key")
        letters -= len(key)
        if letters < 0:
            raise ValueError("its keys are longer than the shard")
        keys[index] = key
    for index, part, offset, length in connection.execute(_PARTS, (number, most)):
        if type(part) is not str or type(offset) is not int or type(length) is not int or index not in keys:
            raise ValueError("a part of a sample is no name with an offset and a size")
        if offset < 0 or length < 0:
            raise ValueError("a part of a sample lies in front of the shard")
        names -= len(keys[index]) + len(part)
        if names < 0:
            raise ValueError("its names are longer than the shard")
        yield TarMember(f"{keys[index]}.{part}", offset, length)


def _known_numbers(folder: Path) -> Mapping[str, int]:
    """Number of every shard, by its path in the dataset."""
    path = next((folder / name for name in INFO if (folder / name).is_file()), None)
    if path is None:
        raise ValueError("there is no .info.json or .info.yaml beside it")
    status = path.stat()
    if status.st_size > MAX_INFO_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_INFO_BYTES} bytes")
    return _read_numbers(path, status.st_mtime_ns)


@lru_cache(maxsize=4)  # a build opens each of thousands of shards by itself
def _read_numbers(path: Path, mtime_ns: int) -> Mapping[str, int]:
    text = path.read_text(encoding="utf-8")
    shards = json.loads(text)["shard_counts"] if path.suffix == ".json" else _yaml_shards(text)
    return {os.path.normpath(str(shard)): k for k, shard in enumerate(shards)}


def _yaml_shards(text: str) -> list[str]:
    """Names in the mapping `shard_counts`, as it is always written; a YAML parser would take minutes for a bad file."""
    lines = iter(text.splitlines())
    if not any(line == "shard_counts:" for line in lines):
        raise ValueError("it has no shard_counts")
    shards = [_YAML_SHARD.fullmatch(line) for line in takewhile(lambda line: line.startswith(" "), lines)]
    if not shards or None in shards:
        raise ValueError("its shard_counts are no names with numbers")
    return [match[1] for match in shards if match is not None]
