"""Parquet files with media columns: read by row group, one group per random access, a few kept.

    footers --> rows of every group --> sample i = (group, row)
    group --columns that are needed, batch by batch, up to a bound--> Arrow table --row--> mapping --rows--> record

Media columns hold bytes, {"bytes", "path"} (as Hugging Face writes them) or lists of these; conversations are nested
columns or JSON. Files may be local or at URLs.

Price: a random access decodes a whole row group, so a full shuffle reads every group once per sample of it. Use block
shuffle, which deals in `groups`, and write small groups (100 to 1000 rows, 10 to 100 MB). `cache_bytes` of decoded
groups are kept in every process that reads, which should hold the groups of a block; the group at hand is kept whatever
its size. There is no `prefetch`: media come with their group, and a group is read whole and kept. The fingerprint is of
sizes and footers, which hold least and greatest values: rows of one group that change places may go unseen.
"""

import hashlib
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataloaders.errors import SourceError
from dataloaders.parquet_pages import bombs, decoded_bytes, logical_bytes
from dataloaders.printable import printable
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import storage_failed
from dataloaders.record_parser import RecordLimits
from dataloaders.row_source import FileRowSource, RowOptions, listed, needed_columns
from dataloaders.rows import RowFields, check_fields
from dataloaders.storage import FileState, Storage, StoredFile, shown

MIB = 1024**2
_BATCH_BYTES, _MAX_BATCH_ROWS, _MAX_BATCHES = 16 * MIB, 65_536, 4096
_MAX_FOOTER_BYTES = 256 * MIB
_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Footer:
    """What the footer of a file says: its digest, the rows of every group, and the columns to read."""

    digest: str
    rows: tuple[int, ...]
    columns: tuple[str, ...]


class _Group:
    """A decoded row group: `num_bytes` in `batches`."""

    def __init__(self, batches: Sequence[pa.RecordBatch], num_bytes: int) -> None:
        self._batches, self.num_bytes = batches, num_bytes
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, number: int) -> dict[str, Any]:
        """Row `number` of the group as Python objects."""
        b = int(np.searchsorted(self._ends, number, side="right"))
        rows: list[dict[str, Any]] = self._batches[b].slice(number - _start(self._ends, b), 1).to_pylist()
        return rows[0]


class ParquetSource(FileRowSource):
    """Rows of Parquet files (a `SampleSource`).

    Args:
        paths: files, see `Storage.list`: braces, wildcards, URLs.
        fields: names of the columns; None: the usual ones, see `dataloaders.rows`.
        columns: further columns, for `Record.extra`. No other column is read.
        media_root: folder or URL that paths in media columns start from; None: the folder of the file.
        max_group_bytes: decoded size of the needed columns of one row group, above which it is refused.
        cache_bytes: of decoded row groups that a process keeps.
        media_schemes, follow_links, limits, media_limits: as for `JsonlSource`.

    Raises:
        SourceError: files are missing, empty or no Parquet; a row group is too large; a column that is named is absent.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        fields: RowFields | None = None,
        columns: Sequence[str] = (),
        media_root: str | os.PathLike[str] | None = None,
        media_schemes: Sequence[str] = (),
        follow_links: bool = False,
        storage: Storage | None = None,
        limits: RecordLimits | None = None,
        media_limits: ProbeLimits | None = None,
        max_group_bytes: int = 1024 * MIB,
        cache_bytes: int = 256 * MIB,
    ) -> None:
        options = RowOptions.of(fields, media_root, media_schemes, limits, media_limits, follow_links=follow_links)
        super().__init__(paths, options, storage=storage)
        self._extra, self._max_group_bytes, self._cache_bytes = tuple(columns), max_group_bytes, cache_bytes
        self._kept: OrderedDict[int, _Group] = OrderedDict()
        self._open: dict[int, pq.ParquetFile] = {}
        self._pid, self._lock = os.getpid(), threading.Lock()
        footers = [self._footer(state) for state in self._states]
        self._columns = [footer.columns for footer in footers]
        # Group g is row group g - first[file] of its file.
        counts = [len(footer.rows) for footer in footers]
        self._file_of_group = np.repeat(np.arange(len(footers)), counts)
        self._first_group = np.cumsum([0, *counts[:-1]])
        self._ends = np.cumsum([count for footer in footers for count in footer.rows], dtype=np.int64)
        if len(self) == 0:
            raise SourceError("the files hold no row", place=listed(self.files), remedy="Name files with rows.")
        digest = hashlib.sha256(f"parquet-source-1\n{options.fields}\n{self._extra}".encode())
        for state, footer in zip(self._states, footers, strict=True):
            line = f"\n{os.path.basename(state.url)}\0{state.size}\0{footer.digest}"
            digest.update(line.encode("utf-8", "surrogatepass"))
        self._fingerprint = digest.hexdigest()
        media = {name for of_kind in options.fields.media.values() for name in of_kind}
        if not media & {name for columns in self._columns for name in columns}:  # then a group is but texts
            check_fields([self.row(0)], options.fields, place=listed(self.files))

    @property
    def fingerprint(self) -> str:
        """Over names, sizes and footers of the files, in order, and the columns; not over folders."""
        return self._fingerprint

    def row(self, i: int) -> Mapping[str, Any]:
        """The needed columns of row `i`.

        Raises:
            SourceError: its group does not decode, or decodes to more than `max_group_bytes`.
        """
        self._check_id(i)
        group = self._group_of(i)
        return self._group(group).row(i - _start(self._ends, group))

    def _where(self, i: int) -> tuple[str, str]:
        file = self._file_of(i)
        first = _start(self._ends, int(self._first_group[file]))
        return printable(shown(self._states[file].url)), f"row {i - first}"

    def _file_of(self, i: int) -> int:
        return int(self._file_of_group[self._group_of(i)])

    def _footer(self, state: FileState) -> _Footer:
        """Read the footer of a file, and check what it says before any group is read."""
        place = shown(state.url)
        stored = self.storage.open(state.url, state)
        raw = _raw_footer(stored, place)
        with _arrow_errors(place):
            file = pq.ParquetFile(_FileView(stored))
            names = [str(name) for name in file.schema_arrow.names]
        columns = needed_columns(names, self.options.fields, self._extra, place=place, noun="file")
        rows = []
        for g in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(g)
            self._check_bytes(_decoded_bytes(group, columns), g, place)
            rows.append(group.num_rows)
        return _Footer(digest=hashlib.sha256(raw).hexdigest(), rows=tuple(rows), columns=columns)

    def _group(self, group: int) -> _Group:
        """The needed columns of a group, from those that are kept or decoded now."""
        if self._pid != os.getpid():  # a child of a fork opens its own
            self._kept, self._open, self._lock, self._pid = OrderedDict(), {}, threading.Lock(), os.getpid()
        with self._lock:
            found = self._kept.pop(group, None) or self._decode(group)
            size = found.num_bytes + sum(kept.num_bytes for kept in self._kept.values())
            while self._kept and size > self._cache_bytes:
                size -= self._kept.popitem(last=False)[1].num_bytes
            self._kept[group] = found
        return found

    def _decode(self, group: int) -> _Group:
        number = int(self._file_of_group[group])
        state, columns = self._states[number], list(self._columns[number])
        within, place = group - int(self._first_group[number]), shown(state.url)
        batches, total = [], 0
        with _arrow_errors(f"{place}, row group {within}"):
            file = self._open.get(number)
            if file is None:
                file = pq.ParquetFile(_FileView(self.storage.open(state.url, state)))
                self._open = {number: file}  # one footer at a time: wide ones take megabytes
            # No threads: workers are forked. Batches, because a footer may understate what its pages become.
            self._check_lists(state, file, within, columns)
            rows = _rows_per_batch(file.metadata.row_group(within), columns, self._max_group_bytes)
            for batch in file.iter_batches(rows, row_groups=[within], columns=columns, use_threads=False):
                total += batch.nbytes
                self._check_bytes(total, within, place)
                batches.append(batch)
        decoded = _Group(batches, total)
        expected = int(self._ends[group]) - _start(self._ends, group)
        if decoded.num_rows != expected:
            raise SourceError(
                f"row group {within} holds {decoded.num_rows} rows and its footer says {expected}",
                place=place,
                remedy="Write the file again.",
            )
        return decoded

    def _check_lists(self, state: FileState, file: pq.ParquetFile, group: int, columns: Sequence[str]) -> None:
        """Raise SourceError where lists of a row group would decode to too much; see `dataloaders.parquet_pages`."""
        stored = self.storage.open(state.url, state)
        suspects = bombs(stored, file.schema, _chunks(file.metadata.row_group(group), columns), self._max_group_bytes)
        for chunk in suspects:
            path = chunk.path_in_schema
            indexed = pq.ParquetFile(_FileView(stored), read_dictionary=[path])
            total = 0
            for batch in indexed.iter_batches(_MAX_BATCH_ROWS, row_groups=[group], columns=[path], use_threads=False):
                total += sum(map(logical_bytes, batch.columns))
                self._check_bytes(total, group, shown(state.url))

    def _check_bytes(self, size: int, group: int, place: str) -> None:
        if size > self._max_group_bytes:
            raise SourceError(
                f"row group {group} decodes to {size} bytes or more, above max_group_bytes={self._max_group_bytes}",
                place=place,
                remedy="Write the file with smaller row groups (pyarrow.parquet.write_table(..., row_group_size=256)), "
                "or raise max_group_bytes.",
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": OrderedDict(), "_open": {}, "_lock": None, "_pid": 0}


def _start(ends: NDArray[np.int64], number: int) -> int:
    """Where part `number` begins, of parts that end at `ends`."""
    return int(ends[number - 1]) if number else 0


class _FileView(io.RawIOBase):
    """A stored file as pyarrow reads it."""

    def __init__(self, file: StoredFile) -> None:
        super().__init__()
        self._file, self._offset = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._file.size}[whence]
        self._offset = max(base + offset, 0)
        return self._offset

    def tell(self) -> int:
        return self._offset

    def read(self, size: int = -1) -> bytes:
        left = max(self._file.size - self._offset, 0)
        data = self._file.read(self._offset, left if size is None or size < 0 else min(size, left))
        self._offset += len(data)
        return data


@contextmanager
def _arrow_errors(place: str) -> Iterator[None]:
    """Make of pyarrow's errors SourceErrors that name the file; failures of storage stay what they are."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, pa.ArrowMemoryError) or storage_failed(error):
            raise
        raise SourceError(
            f"the file does not decode: {str(error)[:300]}", place=place, remedy="Copy or write it again."
        ) from error


def _raw_footer(file: StoredFile, place: str) -> bytes:
    """The serialised footer, which changes with every value that has statistics."""
    tail = file.read(file.size - 8, 8) if file.size >= 12 else b""
    size = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or size > file.size - 12:
        raise SourceError(
            "the file is encrypted Parquet" if tail[4:] == b"PARE" else "the file is no Parquet, or is cut off",
            place=place,
            remedy="Copy or write it again.",
        )
    if size > _MAX_FOOTER_BYTES:
        raise SourceError(
            f"the footer has {size} bytes, above {_MAX_FOOTER_BYTES}", place=place, remedy="Write fewer row groups."
        )
    return file.read(file.size - 8 - size, size)


def _chunks(group: Any, columns: Sequence[str]) -> list[Any]:
    """What the footer says of the parts of these columns in a row group."""
    chunks = [group.column(c) for c in range(group.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]


def _decoded_bytes(group: Any, columns: Sequence[str]) -> int:
    """Bytes of these columns after decompression, as the footer says."""
    return sum(map(decoded_bytes, _chunks(group, columns)))


def _rows_per_batch(group: Any, columns: Sequence[str], max_bytes: int) -> int:
    """Rows to decode at once: about `_BATCH_BYTES`, and fewer where one value may stand for many.

    A value of a dictionary, or one that is stored as a difference, may be as large as all of its column and occur in
    every row; a batch then stays below `max_bytes`, but for groups of so many rows that batches would be too many.
    """
    chunks = _chunks(group, columns)
    rows = group.num_rows * _BATCH_BYTES // max(_decoded_bytes(group, columns), 1)
    repeated = [c for c in chunks if any("DICTIONARY" in name or "DELTA" in name for name in map(str, c.encodings))]
    largest = max((int(chunk.total_uncompressed_size) for chunk in repeated), default=1)
    rows = min(rows, max_bytes // max(largest, 1), _MAX_BATCH_ROWS)
    return int(max(rows, group.num_rows // _MAX_BATCHES, 1))
