"""Any map-style data set (`len`, `dataset[i]`), such as those written for torch, whose items are or become mappings.

    i --dataset[i]--> item --to_row--> mapping (fields as in dataloaders.rows) --rows--> record

torch is not imported: it takes the two methods, not the class. Items must be the same every time they are asked for, or
an index of them is worth nothing; random augmentation belongs behind decoding. That is checked on one item.

Price: whatever `dataset[i]` does, twice per sample (scan, load). PIL images are encoded without loss once per load, see
`dataloaders.row_media`; paths or bytes are cheaper.
"""

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from PIL import Image

from dataloaders.errors import DataError, Reason, RecordError, SourceError
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import storage_failed
from dataloaders.record_parser import RecordLimits
from dataloaders.row_source import RowOptions, RowSource, sampled_ids
from dataloaders.rows import RowFields, check_fields
from dataloaders.storage import Storage

_FINGERPRINT_ROWS = 16
_MAX_DEPTH = 32


class MapDataset(Protocol):
    """What a map-style data set offers."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


ToRow = Callable[[Any], Mapping[str, Any]]


class MapDatasetSource(RowSource):
    """Items of a map-style data set (a `SampleSource`).

    Args:
        dataset: anything with `len` and `dataset[i]`; it must be picklable for loader workers that are spawned.
        to_row: makes a mapping of an item; a function of a module, so that it can be pickled. None: items are mappings.
        fingerprint: text that changes when the data do, such as a version; None: from a few items, see `notes`.
        fields, media_root, media_schemes, follow_links, limits, media_limits: as for `JsonlSource`; without
            `media_root` paths are refused.

    Attributes:
        notes: what a user should know about this source.

    Raises:
        SourceError: an iterable or empty data set, items that are no mappings or differ each time, a `to_row` that
            cannot be pickled, or a field that is named occurs in none of a few items.
    """

    def __init__(
        self,
        dataset: MapDataset,
        *,
        to_row: ToRow | None = None,
        fingerprint: str | None = None,
        fields: RowFields | None = None,
        media_root: str | os.PathLike[str] | None = None,
        media_schemes: Sequence[str] = (),
        follow_links: bool = False,
        storage: Storage | None = None,
        limits: RecordLimits | None = None,
        media_limits: ProbeLimits | None = None,
    ) -> None:
        options = RowOptions.of(fields, media_root, media_schemes, limits, media_limits, follow_links=follow_links)
        super().__init__(options, storage=storage)
        self.dataset, self.to_row = dataset, to_row
        self._name = type(dataset).__name__
        _check_map_style(dataset)
        _check_picklable(to_row)
        if len(dataset) == 0:
            raise SourceError("the data set has no items", place=self._name, remedy="Give one with items.")
        self.notes: tuple[str, ...] = ()
        rows = self._checked_rows()
        check_fields(rows, options.fields, place=self._name)
        self._check_repeatable()
        self._fingerprint = self._own_fingerprint(fingerprint)

    @property
    def fingerprint(self) -> str:
        """Over the length, the names of fields, and what was given or a few items."""
        return self._fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, i: int) -> Mapping[str, Any]:
        """Item `i` as a mapping.

        Raises:
            RecordError: `dataset[i]` or `to_row` fails, or gives no mapping.
            OSError: storage failed.
        """
        self._check_id(i)
        place = f"shard {self._name}, key item {i}"
        try:
            item = self.dataset[int(i)]
            row: Any = item if self.to_row is None else self.to_row(item)
        except (DataError, MemoryError):
            raise
        except FileNotFoundError as error:
            raise RecordError(Reason.MISSING_MEDIA, str(error), place=place, remedy="Bring the file back.") from error
        except Exception as error:
            if storage_failed(error):
                raise
            raise RecordError(
                Reason.BAD_RECORD,
                f"the data set raised {type(error).__name__}: {str(error)[:300]}",
                place=place,
                remedy="Repair the item, or the data set's __getitem__.",
            ) from error
        if not isinstance(row, Mapping):
            raise RecordError(
                Reason.BAD_RECORD,
                f"the item is a {type(row).__name__}, not a mapping",
                place=place,
                remedy='Give `to_row`, which makes of it {"messages": [...], "images": [...]}.',
            )
        return row

    def _where(self, i: int) -> tuple[str, str]:
        return self._name, f"item {i}"

    def _check_repeatable(self) -> None:
        """Raise SourceError where the first item that parses is another one when asked for again."""
        for i in sampled_ids(len(self), 4):
            try:
                first, again = _digest(self.row(i)), _digest(self.row(i))
            except RecordError:
                continue
            if first != again:
                raise SourceError(
                    f"item {i} differs each time it is asked for",
                    place=self._name,
                    remedy="Leave random augmentation out of the data set: an index tells what every item costs.",
                )
            return

    def _own_fingerprint(self, given: str | None) -> str:
        digest = hashlib.sha256(f"map-source-1\n{len(self)}\n{self.options.fields}\n{given}".encode())
        if given is None:
            ids = sampled_ids(len(self), _FINGERPRINT_ROWS)
            self.notes += (
                f"the fingerprint of {self._name} is of its length and {len(ids)} of its items; a change elsewhere "
                "goes unseen unless you give `fingerprint`",
            )
            for i in ids:
                try:
                    digest.update(_digest(self.row(i)))
                except RecordError as error:
                    digest.update(str(error.reason).encode())
        return digest.hexdigest()


def _check_map_style(dataset: object) -> None:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise SourceError(
            f"a {type(dataset).__name__} has no len() and [i]",
            remedy="Give a map-style data set, or write tars, Parquet or JSONL: random access is needed.",
        )


def _check_picklable(to_row: ToRow | None) -> None:
    try:
        pickle.dumps(to_row)
    except Exception as error:
        raise SourceError(
            f"`to_row` cannot be pickled: {error}",
            place="MapDatasetSource",
            remedy="Define it at the top level of a module: loader workers need it.",
        ) from error


def _digest(value: object, depth: int = 0) -> bytes:
    """Digest of an item: of the content of what it is made of, never of an address in memory."""
    digest = hashlib.sha256(type(value).__name__.encode())
    if depth > _MAX_DEPTH:
        return digest.digest()
    if isinstance(value, Mapping):
        for name, part in value.items():
            digest.update(_digest(name, depth + 1) + _digest(part, depth + 1))
    elif isinstance(value, (list, tuple)):
        for part in value:
            digest.update(_digest(part, depth + 1))
    elif isinstance(value, Image.Image):
        digest.update(f"{value.mode}{value.size}".encode() + value.tobytes())
    elif isinstance(value, (bytes, bytearray, memoryview)):
        digest.update(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, (str, int, float, bool)) or value is None:
        digest.update(repr(value).encode("utf-8", "backslashreplace"))
    return digest.digest()
