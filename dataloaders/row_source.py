"""What sources of rows share: everything between "row i as a mapping" and a `SampleSource`.

    i --row(i)--> mapping --RowParser--> record, media --> record(i), media_reader(i, j), media_bytes(i, j)

A sub-class says how many rows there are, what row i is, where it lies, and what its fingerprint is made of.

Price: a process keeps the last sample it parsed, with the media that its row holds, since a scan or a load asks for
them one after another; no more than that one.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import MediaError, Reason, RecordError, SourceError
from dataloaders.media_files import MediaFiles, as_schemes, check_root
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import ByteReader
from dataloaders.record import Record
from dataloaders.record_parser import RecordLimits
from dataloaders.row_media import InlineMedium, RowMedium
from dataloaders.rows import RowFields, RowParser, RowSample
from dataloaders.storage import FileState, Storage, absolute, is_local, repeated, shown

CHECKED_ROWS = 32  # that are looked at for the names of their fields when a source is opened


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """How rows are read.

    Attributes:
        fields: names of their fields.
        media_root: folder (or URL of one) that paths of media start from; None: see the source.
        media_schemes: of URLs in records that may be fetched; none by default.
        follow_links: whether links in the folder of media may lead out of it.
        limits: bounds on a record.
        media_limits: ceilings on media.
    """

    fields: RowFields = field(default_factory=RowFields)
    media_root: str | os.PathLike[str] | None = None
    media_schemes: tuple[str, ...] = ()
    follow_links: bool = False
    limits: RecordLimits = field(default_factory=RecordLimits)
    media_limits: ProbeLimits = field(default_factory=ProbeLimits)

    @classmethod
    def of(
        cls,
        fields: RowFields | None,
        media_root: str | os.PathLike[str] | None,
        media_schemes: Sequence[str],
        limits: RecordLimits | None,
        media_limits: ProbeLimits | None,
        *,
        follow_links: bool,
    ) -> "RowOptions":
        """What a caller of a source gave, with the usual values for what is None."""
        return cls(
            fields=fields or RowFields(),
            media_root=media_root,
            media_schemes=as_schemes(media_schemes),
            follow_links=follow_links,
            limits=limits or RecordLimits(),
            media_limits=media_limits or ProbeLimits(),
        )


class RowSource(ABC):
    """Base of the sources of rows (a `SampleSource`)."""

    def __init__(self, options: RowOptions, *, storage: Storage | None = None) -> None:
        self.options, self.storage = options, storage or Storage()
        self._root = None if options.media_root is None else os.path.expanduser(os.fspath(options.media_root))
        check_root(self._root)
        self._files = MediaFiles(
            storage=self.storage,
            schemes=options.media_schemes,
            follow_links=options.follow_links,
            limits=options.media_limits,
        )
        self._parser = RowParser(fields=options.fields, limits=options.limits, media_limits=options.media_limits)
        self._last: tuple[int, RowSample] | None = None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hex text that changes when rows, their order or their sizes change, and not with the folder."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def row(self, i: int) -> Mapping[str, Any]:
        """Row `i` as it is. Raises RecordError where it does not parse."""

    @abstractmethod
    def _where(self, i: int) -> tuple[str, str]:
        """(shard, key) of row `i`, without reading it."""

    @property
    def record_limits(self) -> RecordLimits:
        """Bounds on a record."""
        return self.options.limits

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """int64 [n]: number of the file or block that each sample is read from, for block shuffle; None: no such."""
        return None

    def record(self, i: int) -> Record:
        """Sample `i`, parsed.

        Raises:
            IndexError: there is no sample `i`.
            RecordError: it does not parse, or its media are missing, refused or do not match its placeholders.
            OSError, SourceError: storage failed, or has changed.
        """
        return self._sample(i).record

    def media_reader(self, i: int, j: int) -> ByteReader:
        """Ranges of medium `j` of sample `i`. Raises as `record`."""
        medium = self._medium(i, j)
        if isinstance(medium, InlineMedium):
            return medium
        return self._files.reader(self._media_root(i), medium.reference, f"{self.place(i)}, member {medium.name}")

    def media_bytes(self, i: int, j: int) -> bytes:
        """All bytes of medium `j` of sample `i`. Raises as `record`, and MediaError `too_large`."""
        medium = self._medium(i, j)
        place = f"{self.place(i)}, member {medium.name}"
        if not isinstance(medium, InlineMedium):
            return self._files.read(self._media_root(i), medium.reference, place)
        if medium.size > self.options.media_limits.max_bytes:
            raise MediaError(Reason.TOO_LARGE, f"{medium.size} encoded bytes exceed max_bytes", place=place)
        return medium.data

    def place(self, i: int) -> str:
        """`shard, key` of sample `i`; nothing is read."""
        shard, key = self.shard_and_key(i)
        return f"shard {shard}, key {key}"

    def shard_and_key(self, i: int) -> tuple[str, str]:
        """File or split of sample `i`, and its number or name there; nothing is read."""
        self._check_id(i)
        return self._where(i)

    def _media_root(self, i: int) -> str | None:
        """Where relative paths of media of sample `i` start."""
        return self._root

    def _sample(self, i: int) -> RowSample:
        self._check_id(i)
        last = self._last
        if last is not None and last[0] == i:
            return last[1]
        self._last = None  # two samples at once would double the memory of a worker
        shard, key = self._where(i)
        root = self._media_root(i)
        sample = self._parser.parse(
            self.row(i), lambda ref, place: self._files.size_of(root, ref, place), shard=shard, key=key
        )
        self._last = (i, sample)
        return sample

    def _medium(self, i: int, j: int) -> RowMedium:
        media = self._sample(i).media
        if not 0 <= j < len(media):
            raise IndexError(f"medium {j} is not one of the {len(media)} media of {self.place(i)}")
        return media[j]

    def _check_id(self, i: int) -> None:
        # Python would read -1 as the last one, and an end of iteration would go unseen.
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} is not one of the {len(self)} samples of this source")

    def _checked_rows(self) -> list[Mapping[str, Any]]:
        """A few rows from all over the source, those that parse."""
        rows = []
        for i in sampled_ids(len(self), CHECKED_ROWS):
            try:
                rows.append(self.row(i))
            except RecordError:
                continue
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


class FileRowSource(RowSource):
    """Base of the sources whose rows lie in files; paths of media start from the folder of the file, if not elsewhere.

    Rows that are read together are a group: sample i is in group g with `_ends[g - 1] <= i < _ends[g]` (int64, which
    the sub-class sets). A group is a file, unless the sub-class says otherwise.
    """

    _ends: NDArray[np.int64]

    def __init__(
        self, paths: str | Path | Sequence[str | Path], options: RowOptions, *, storage: Storage | None = None
    ) -> None:
        super().__init__(options, storage=storage)
        names = [absolute(name) for name in self.storage.list(as_paths(paths), noun="file")]
        self._states: list[FileState] = self.storage.states(names, noun="file")
        self._roots = [self._root or folder_of(name) for name in names]

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in order: absolute paths and URLs."""
        return tuple(state.url for state in self._states)

    @property
    def groups(self) -> NDArray[np.int64]:
        """int64 [n]: number of the group of each sample, counted over all files."""
        return np.repeat(np.arange(len(self._ends)), np.diff(self._ends, prepend=0)).astype(np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _group_of(self, i: int) -> int:
        return int(np.searchsorted(self._ends, i, side="right"))

    def _file_of(self, i: int) -> int:
        """Number of the file of sample `i`."""
        return self._group_of(i)

    def _media_root(self, i: int) -> str | None:
        return self._roots[self._file_of(i)]


def needed_columns(
    names: Sequence[str], fields: RowFields, extra: Sequence[str], *, place: str, noun: str
) -> tuple[str, ...]:
    """Those of the columns `names` that are read, in their order.

    Args:
        extra: columns that are read besides those of `fields`.
        noun: what messages call the data.

    Raises:
        SourceError: a column that was named is absent, one occurs twice, or none holds conversations or captions.
    """
    if lacking := [name for name in (*fields.named, *extra) if name not in names]:
        raise SourceError(
            f"there is no column {listed(map(repr, lacking))}; there are {listed(map(repr, names), 20)}",
            place=place,
            remedy=f"Give the names as the {noun} spells them: RowFields(images=..., conversation=...), columns=....",
        )
    wanted = {*fields.every, *extra}
    needed = tuple(name for name in names if name in wanted)
    if twice := repeated(needed):
        raise SourceError(f"the column {twice[0]!r} is there twice", place=place, remedy="Rename one of them.")
    if not any(name in names for name in (*fields.conversations, *fields.texts)):
        raise SourceError(
            f"no column holds conversations or captions; there are {listed(map(repr, names), 20)}",
            place=place,
            remedy="Name it with RowFields(conversation=...) or RowFields(text=...).",
        )
    return needed


def sampled_ids(num_samples: int, most: int) -> list[int]:
    """At most `most` ids, evenly spaced, first and last included."""
    return sorted({int(i) for i in np.linspace(0, num_samples - 1, min(most, num_samples))})


def as_paths(paths: str | Path | Sequence[str | Path]) -> str | list[str]:
    """What `Storage.list` takes."""
    return os.fspath(paths) if isinstance(paths, (str, os.PathLike)) else [os.fspath(path) for path in paths]


def folder_of(name: str) -> str:
    """Folder of a file, or URL of one."""
    if is_local(name):
        return os.path.dirname(os.path.abspath(name))
    return name.partition("?")[0].rpartition("/")[0]


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first of these names, for messages."""
    every = [shown(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
