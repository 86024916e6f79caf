"""The table of members of a source: where every text and medium lies, as columns that can be memory-mapped.

    shards   url, stamp, fingerprint, report (texts)  size [S]  sample_end [S]: samples of shard k end at sample_end[k]
    samples  key (text)  others [N]: what is not read           member_end [N]: members of sample i end at member_end[i]
    members  offset [M]  size [M]  kind [M]                     suffix [M]: row of the suffixes that occur

A text column is one array of bytes and the end of every text in it, so a million keys are no Python objects. Kept in a
file, the table is mapped: workers of a host share one page cache, and a source that travels to one is a path and a
digest. Price: about 40 bytes a member beside the data, and one pass over the columns when a file is opened, because it
may be damaged: what lies outside its shard is refused before anything is read there.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dataloaders.errors import SourceError
from dataloaders.member_file import COLUMNS, DTYPES, TEXT, TEXTS, Column, before, map_columns, write_columns
from dataloaders.storage import FileState, shown
from dataloaders.tar_groups import SampleField, SampleMembers, TarReport, add_report

MAX_COMBINATIONS = 1000  # of suffixes that are not read; rarer ones are not named in errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """A shard as its header pass found it.

    Attributes:
        path, size, stamp: of the file, see `FileState`.
        fingerprint: hex digest over its base name, its size and its table of members.
        num_samples: samples in it; a source has the samples of its shards one after another.
    """

    path: str
    size: int
    stamp: str
    fingerprint: str
    num_samples: int

    @property
    def file(self) -> FileState:
        """What decides whether the shard is the one that was passed over."""
        return FileState(url=self.path, size=self.size, stamp=self.stamp)


class MemberTable:
    """Members of the samples of some shards, in order.

    Args:
        columns: those of `DTYPES`.
        path: the file that they are mapped from; None: in memory.
    """

    def __init__(self, columns: Mapping[str, Column], *, digest: str = "", path: Path | None = None) -> None:
        self._columns, self.path = columns, path
        self._sample_end, self._member_end = columns["sample_end"], columns["member_end"]
        self._offset, self._size = columns["offset"], columns["size"]
        self._kind, self._suffix = columns["kind"], columns["suffix"]
        self._digest = digest
        self._numbers: dict[FileState, int] | None = None

    def __len__(self) -> int:
        return len(self._member_end)

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self._sample_end)

    @cached_property
    def digest(self) -> str:
        """Hex digest over the states and fingerprints of the shards."""
        if self._digest:
            return self._digest
        parts = (self._columns[name] for name in ("url_bytes", "url_end", "shard_size", "stamp_bytes", "stamp_end"))
        digest = hashlib.sha256(self._columns["fingerprint_bytes"].tobytes())
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def url(self, k: int) -> str:
        """Address of shard `k`."""
        return self._text("url", k)

    def state(self, k: int) -> ShardState:
        """Shard `k`."""
        return ShardState(
            path=self._text("url", k),
            size=int(self._columns["shard_size"][k]),
            stamp=self._text("stamp", k),
            fingerprint=self._text("fingerprint", k),
            num_samples=len(self.samples_of(k)),
        )

    @property
    def files(self) -> Iterator[FileState]:
        """States of the shards, in order."""
        sizes = self._columns["shard_size"]
        return (
            FileState(url=self._text("url", k), size=int(sizes[k]), stamp=self._text("stamp", k))
            for k in range(self.num_shards)
        )

    @property
    def fingerprints(self) -> Iterator[str]:
        """Fingerprints of the shards, in order."""
        return (self._text("fingerprint", k) for k in range(self.num_shards))

    def find(self, file: FileState) -> int | None:
        """The shard with this state."""
        if self._numbers is None:
            self._numbers = {state: k for k, state in enumerate(self.files)}
        return self._numbers.get(file)

    def report(self) -> TarReport:
        """What the header passes found besides good samples, over all shards."""
        whole = TarReport()
        for k in range(self.num_shards):
            try:
                add_report(whole, self._text("report", k))
            except (AttributeError, RecursionError, TypeError, ValueError) as error:
                raise SourceError(
                    f"the report on {shown(self.url(k))} is damaged: {error!r}",
                    place=str(self.path or "table of members"),
                    remedy="Delete the file; it is made again.",
                ) from error
        return whole

    def report_of(self, k: int) -> str:
        """The report of shard `k` as it is stored."""
        return self._text("report", k)

    def samples_of(self, k: int) -> range:
        """Samples of shard `k`."""
        return range(before(self._sample_end, k), int(self._sample_end[k]))

    def shard_of(self, i: int) -> int:
        """Shard of sample `i`."""
        return int(np.searchsorted(self._sample_end, i, side="right"))

    def key(self, i: int) -> str:
        """Key of sample `i`."""
        return self._text("key", i)

    def others(self, i: int) -> tuple[str, ...]:
        """Suffixes of members of sample `i` that are neither text nor media, a few."""
        names = self._text("combinations", int(self._columns["others"][i]))
        return tuple(names.split("\0")) if names else ()

    def rows(self, i: int) -> range:
        """Member rows of sample `i`: texts, then media in the order of their numbers."""
        return range(before(self._member_end, i), int(self._member_end[i]))

    def kind(self, row: int) -> int:
        """`TEXT` or a `MediaKind`."""
        return int(self._kind[row])

    def suffix(self, row: int) -> str:
        """Suffix of a member."""
        return self._text("suffixes", int(self._suffix[row]))

    def offset(self, row: int) -> int:
        """First byte of a member in its shard."""
        return int(self._offset[row])

    def size(self, row: int) -> int:
        """Bytes of a member."""
        return int(self._size[row])

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker maps the file itself; only a table that was never written travels by value.
        if self.path is not None:
            return (_reopen, (str(self.path), self.digest))
        return (MemberTable, (dict(self._columns),))

    def _text(self, name: str, row: int) -> str:
        ends = self._columns[f"{name}_end"]
        raw = self._columns[f"{name}_bytes"][before(ends, row) : int(ends[row])]
        return raw.tobytes().decode("utf-8", "surrogateescape")

    def write(self, path: Path) -> "MemberTable":
        """Write the table to a file, whole or not at all, and return it mapped from there.

        Raises:
            OSError: nothing can be written there.
        """
        write_columns(path, self._columns, self.digest)
        return MemberTable.open(path, check=False)

    @classmethod
    def open(cls, path: Path, *, check: bool = True) -> "MemberTable":
        """The table in a file; see `map_columns`, also for what is raised."""
        columns, digest = map_columns(path, check=check)
        return cls(columns, digest=digest, path=path.absolute())


class TableBuilder:
    """Collects the members of shards, in order, and gives the table."""

    def __init__(self) -> None:
        self._numbers: dict[str, array[int]] = {
            name: array(_CODES[np.dtype(t).itemsize]) for name, t in COLUMNS.items()
        }
        self._bytes = {name: bytearray() for name in TEXTS}
        self._ends: dict[str, array[int]] = {name: array("q") for name in TEXTS}
        self._suffixes: dict[str, int] = {}
        self._combinations: dict[str, int] = {}
        self._combination("")

    def add(self, samples: Iterable[SampleMembers]) -> None:
        """Add samples of the shard that `end_shard` will name."""
        for sample in samples:
            self._add_text("key", sample.key)
            self._numbers["others"].append(self._combination("\0".join(sample.others)))
            entry: SampleField
            for entry in (*sample.texts, *sample.media):
                self._numbers["offset"].append(entry.offset)
                self._numbers["size"].append(entry.size)
                self._numbers["kind"].append(TEXT if entry.kind is None else int(entry.kind))
                self._numbers["suffix"].append(self._suffix(entry.suffix))
            self._numbers["member_end"].append(len(self._numbers["offset"]))

    def end_shard(self, state: FileState, fingerprint: str, report: str) -> None:
        """Make a shard of the samples since the last one; `report` is what `report_json` gives."""
        texts = {"url": state.url, "stamp": state.stamp, "fingerprint": fingerprint, "report": report}
        for name, text in texts.items():
            self._add_text(name, text)
        self._numbers["shard_size"].append(state.size)
        self._numbers["sample_end"].append(len(self._numbers["member_end"]))

    def add_shard_of(self, table: MemberTable, k: int) -> None:
        """Add shard `k` of another table."""
        samples = table.samples_of(k)
        start, stop = before(table._member_end, samples.start), before(table._member_end, samples.stop)
        others = table._columns["others"][samples.start : samples.stop]
        self._extend("others", _recoded(others, lambda code: self._combination(table._text("combinations", code))))
        self._add_texts("key", table, samples)
        self._extend("member_end", table._member_end[samples.start : samples.stop] - start + len(self._numbers["size"]))
        suffixes = table._suffix[start:stop]
        self._extend("suffix", _recoded(suffixes, lambda code: self._suffix(table._text("suffixes", code))))
        for name in ("offset", "size", "kind"):
            self._extend(name, table._columns[name][start:stop])
        state = table.state(k)
        self.end_shard(state.file, state.fingerprint, table.report_of(k))

    def table(self) -> MemberTable:
        """The table, in memory."""
        columns = {
            name: np.frombuffer(numbers.tobytes(), dtype=COLUMNS[name]) for name, numbers in self._numbers.items()
        }
        columns |= {f"{name}_bytes": np.frombuffer(bytes(text), dtype=np.uint8) for name, text in self._bytes.items()}
        columns |= {f"{name}_end": np.frombuffer(ends.tobytes(), dtype=np.int64) for name, ends in self._ends.items()}
        return MemberTable({name: columns[name] for name in DTYPES})

    def _suffix(self, suffix: str) -> int:
        code = self._suffixes.get(suffix)
        if code is None:
            code = self._suffixes[suffix] = len(self._suffixes)
            self._add_text("suffixes", suffix)
        return code

    def _combination(self, names: str) -> int:
        code = self._combinations.get(names)
        if code is None:
            if len(self._combinations) >= MAX_COMBINATIONS:
                return 0
            code = self._combinations[names] = len(self._combinations)
            self._add_text("combinations", names)
        return code

    def _add_text(self, name: str, text: str) -> None:
        self._bytes[name] += text.encode("utf-8", "surrogateescape")
        self._ends[name].append(len(self._bytes[name]))

    def _add_texts(self, name: str, table: MemberTable, rows: range) -> None:
        ends = table._columns[f"{name}_end"]
        start, stop = before(ends, rows.start), before(ends, rows.stop)
        moved = ends[rows.start : rows.stop] - start + len(self._bytes[name])
        self._ends[name].frombytes(np.ascontiguousarray(moved, dtype=np.int64).tobytes())
        self._bytes[name] += table._columns[f"{name}_bytes"][start:stop].tobytes()

    def _extend(self, name: str, values: Column) -> None:
        self._numbers[name].frombytes(np.ascontiguousarray(values, dtype=COLUMNS[name]).tobytes())


_CODES = {array(code).itemsize: code for code in ("b", "h", "i", "q")}


def _recoded(codes: Column, code_of: Callable[[int], int]) -> Column:
    """`codes` with every one replaced by another."""
    found, places = np.unique(codes, return_inverse=True)
    return np.array([code_of(int(code)) for code in found], dtype=np.int32)[places]


def selected(table: MemberTable, shards: Sequence[int]) -> MemberTable:
    """The table of some shards of a table, in memory."""
    builder = TableBuilder()
    for k in shards:
        builder.add_shard_of(table, k)
    return builder.table()


def _reopen(path: str, digest: str) -> MemberTable:
    table = MemberTable.open(Path(path), check=False)
    if table.digest != digest:
        raise SourceError(
            "the table of members was replaced while a run was using it", place=path, remedy="Start the run again."
        )
    return table
