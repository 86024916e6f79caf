"""The cost index: what every sample and every medium costs, in two columnar tables that are memory-mapped.

    index.samples["llm_tokens"]   [num_samples]      one row per sample: tokens, labels, patches, bytes, confidence
    index.items["patches"]        [num_items]        one row per medium in CSR order: sample i has rows
                                                     item_offsets[i] to item_offsets[i + 1]
    index.bad                                        samples that cannot be used, with place and reason

Columns are NumPy arrays on the mapped file, without a copy: ranks and workers of a host share one page cache. An index
is only reused for the source, token rule and labelling it was made from; everything else is an error that says so.
The files are described in `dataloaders.index_format`.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataloaders import index_format as form
from dataloaders.adjustment import Adjustment
from dataloaders.errors import IndexFormatError
from dataloaders.index_format import (
    FORMAT_VERSION,
    ITEM_COLUMNS,
    SAMPLE_COLUMNS,
    BadSample,
    Column,
    Columns,
    Confidence,
    IndexKey,
    PartOf,
    ShardRows,
)

__all__ = [
    "FORMAT_VERSION",
    "ITEM_COLUMNS",
    "SAMPLE_COLUMNS",
    "BadSample",
    "Confidence",
    "CostIndex",
    "IndexKey",
    "foreign",
    "overwritable",
    "unwritable",
    "write_index",
]

_DERIVED = ("text_tokens",)


class CostIndex:
    """Costs of every sample of a source.

    Args:
        samples, items: columns of `SAMPLE_COLUMNS` (`text_tokens` may be left out) and `ITEM_COLUMNS`.
        names: table with the columns `shard` and `key`, one row per sample.
        videos: the columns of `VIDEO_COLUMNS` for the rows in `row` alone, if they are at hand.

    Attributes:
        key: what it was made from.
        samples: column name -> array [num_samples], read-only; see `SAMPLE_COLUMNS`.
        items: column name -> array [num_items], read-only; see `ITEM_COLUMNS`.
        bad: unusable samples, ascending; their rows have zero counts and no items.
        reasons: names for the `reason` column; row 0 is "" (usable).
        rules: the rules of `media` and `text` in words.
        shards: shards that were scanned, in order; empty for a source without shards.
        part: which part of a source it holds; None: all of it.
        fingerprint: hex digest of the content; equal for equal numbers, wherever the shards lie.
        folder: where it is mapped from; None: in memory.
    """

    def __init__(
        self,
        *,
        key: IndexKey,
        samples: Mapping[str, Column],
        items: Mapping[str, Column],
        names: pa.Table,
        bad: Sequence[BadSample] | pa.Table,
        reasons: Sequence[str],
        rules: Mapping[str, str] | None = None,
        shards: Sequence[ShardRows] | pa.Table = (),
        part: PartOf | None = None,
        videos: pa.Table | None = None,
        fingerprint: str = "",
        folder: Path | None = None,
    ) -> None:
        self.key, self.reasons, self.part, self.folder = key, tuple(reasons), part, folder
        self.rules = dict(rules or {})
        self._names, self._bad, self._shards, self._videos = names, bad, shards, videos
        self._fingerprint = fingerprint
        self.items: Mapping[str, Column] = Columns(ITEM_COLUMNS, items.__getitem__)
        self.samples: Mapping[str, Column] = Columns(
            SAMPLE_COLUMNS, lambda name: self._text_tokens() if name in _DERIVED else samples[name]
        )
        if folder is None:
            _ = self.item_offsets  # columns that do not fit are refused now; of a file, when it is first read

    def __len__(self) -> int:
        return len(self.samples["num_items"])

    def __repr__(self) -> str:
        part = "" if self.part is None else f"part {self.part}, "
        media = len(self.items["patches"])
        return f"CostIndex({len(self)} samples, {media} media, {part}{self.folder or 'in memory'})"

    @cached_property
    def item_offsets(self) -> NDArray[np.int64]:
        """int64 [num_samples + 1]: items of sample i are rows item_offsets[i] to item_offsets[i + 1]."""
        offsets = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.samples["num_items"], out=offsets[1:])
        if offsets[-1] != len(self.items["patches"]):
            raise IndexFormatError(
                f"the samples name {offsets[-1]} items, but there are {len(self.items['patches'])}",
                place=str(self.folder or "index"),
                remedy=form.AGAIN,
            )
        return form.read_only(offsets, np.int64)

    @cached_property
    def names(self) -> pa.Table:
        """Table with `shard` and `key` of every sample."""
        return self._names if self.folder is None else form.checked(self._names, self.folder)

    @cached_property
    def bad(self) -> list[BadSample]:
        """Unusable samples, ascending."""
        if isinstance(self._bad, pa.Table):
            return [BadSample(**row) for row in form.checked(self._bad, self.folder).to_pylist()]
        return list(self._bad)

    @cached_property
    def shards(self) -> tuple[ShardRows, ...]:
        """Shards that were scanned, in order."""
        if isinstance(self._shards, pa.Table):
            return tuple(ShardRows(**row) for row in form.checked(self._shards, self.folder).to_pylist())
        return tuple(self._shards)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of the content."""
        return self._fingerprint or self._digest()

    def keys(self, i: int) -> str:
        """Key of sample `i` in its shard."""
        return cast(str, self.names["key"][i].as_py())

    def shard(self, i: int) -> str:
        """Shard of sample `i`."""
        return cast(str, self.names["shard"][i].as_py())

    @cached_property
    def shard_numbers(self) -> NDArray[np.int32]:
        """int32 [num_samples]: number of the shard of every sample; equal for samples of one shard, in no order."""
        encoded = self.names["shard"].dictionary_encode().unify_dictionaries().combine_chunks()
        return form.read_only(encoded.indices.to_numpy(), np.int32)

    def item_rows(self, i: int) -> range:
        """Rows of the items of sample `i`."""
        return range(int(self.item_offsets[i]), int(self.item_offsets[i + 1]))

    def item_tokens(self, i: int) -> list[int]:
        """Positions of every medium of sample `i`, as `encode_record` takes them."""
        rows = self.item_rows(i)
        return [int(count) for count in self.items["llm_tokens"][rows.start : rows.stop]]

    def adjustment(self, i: int) -> Adjustment | None:
        """What is done to sample `i` beyond what the scan counted, see `dataloaders.adjusted_index`; None: nothing."""
        return None

    def source_of(self, row: int) -> tuple[int, float, float]:
        """(frames, frames per second, duration in s) of the file of item `row`; (1, 0, 0) for an image."""
        if self._videos is None:
            frames, fps, duration_s = (self.items[name][row].item() for name in form.VIDEO_COLUMNS)
            return frames, fps, duration_s
        # Not through `items`: the columns of all media would be spread out in every worker.
        rows, columns = self._video_columns
        at = int(np.searchsorted(rows, row))
        if at == len(rows) or rows[at] != row:
            return 1, 0.0, 0.0
        frames, fps, duration_s = (column[at].item() for column in columns)
        return frames, fps, duration_s

    @cached_property
    def _bad_ids(self) -> list[int]:
        return [bad.sample_id for bad in self.bad]

    @cached_property
    def _video_columns(self) -> tuple[Column, tuple[Column, ...]]:
        rows, *columns = (
            form.restore(self._videos, {}, dtype, name, 0)
            for name, dtype in (("row", np.int64), *((name, ITEM_COLUMNS[name]) for name in form.VIDEO_COLUMNS))
        )
        return rows, tuple(columns)

    def rows(self, start: int, stop: int, *, shards: Sequence[ShardRows] = ()) -> "CostIndex":
        """Samples [start, stop) as an index in memory, of the same key; `shards` are those that they make up."""
        first, last = int(self.item_offsets[start]), int(self.item_offsets[stop])
        bad = self.bad[bisect_left(self._bad_ids, start) : bisect_left(self._bad_ids, stop)]
        return CostIndex(
            key=self.key,
            samples=Columns(SAMPLE_COLUMNS, lambda name: self.samples[name][start:stop]),
            items=Columns(ITEM_COLUMNS, lambda name: self.items[name][first:last]),
            names=self.names.slice(start, stop - start),
            bad=[replace(entry, sample_id=entry.sample_id - start) for entry in bad],
            reasons=self.reasons,
            rules=self.rules,
            shards=shards,
        )

    @classmethod
    def open(cls, folder: str | Path, expect: IndexKey | None = None, *, map_small: bool = True) -> "CostIndex":
        """Map an index that `write_index` has written; hardly a column is read.

        Args:
            folder: `~` is the home folder.
            map_small: False: small files are read instead, for a process that opens thousands of indices and has room
                for 65,530 maps.

        Raises:
            IndexFormatError: not an index, another format version, damaged, or made from something else than `expect`.
        """
        folder = Path(os.path.expanduser(folder))
        meta = form.read_meta(folder)
        try:
            key = form.typed(IndexKey, meta["key"])
            if expect is not None and key != expect:
                raise foreign(folder, key.differences(expect, rules=meta["rules"]))
            form.check_sizes(folder, meta["file_bytes"])
            tables = {
                name: form.map_table(folder / name, form.SCHEMAS.get(name), map_small=map_small) for name in form.TABLES
            }
            reasons, rules = meta["reasons"], meta["rules"]
            if not all(isinstance(text, str) for text in (*reasons, *rules, *rules.values())):
                raise TypeError("reasons and rules are texts")
            if meta["samples"]["rows"] != tables[form.NAMES].num_rows:
                raise ValueError(f"{meta['samples']['rows']} samples, but {tables[form.NAMES].num_rows} names")
            index = cls(
                key=key,
                samples=_stored(tables[form.SAMPLES], meta["samples"], SAMPLE_COLUMNS, folder),
                items=_stored(tables[form.ITEMS], meta["items"], ITEM_COLUMNS, folder, tables[form.VIDEOS]),
                names=tables[form.NAMES],
                bad=tables[form.BAD],
                reasons=reasons,
                rules=rules,
                shards=tables[form.SHARDS],
                part=None if meta["part"] is None else form.typed(PartOf, meta["part"]),
                videos=tables[form.VIDEOS],
                fingerprint=str(meta["fingerprint"]),
                folder=folder.absolute(),
            )
            if not tables[form.ITEMS].num_columns:
                _ = index.item_offsets  # no column says how many items there are, so the samples must
            return index
        except (OSError, AttributeError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            if isinstance(error, IndexFormatError):
                raise
            raise IndexFormatError(f"damaged: {error!r}", place=str(folder), remedy=form.AGAIN) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the files themselves; only an index that was never written travels by value.
        if self.folder is not None:
            return (_reopen, (str(self.folder), self.fingerprint))
        state = {
            "key": self.key,
            "samples": dict(self.samples),
            "items": dict(self.items),
            "names": self.names,
            "bad": self.bad,
            "reasons": self.reasons,
            "rules": self.rules,
            "shards": self.shards,
            "part": self.part,
            "fingerprint": self.fingerprint,
        }
        return (_from_state, (state,))

    def _text_tokens(self) -> Column:
        """int32 [num_samples]: positions without those of media."""
        running = np.zeros(len(self.items["llm_tokens"]) + 1, dtype=np.int64)
        np.cumsum(self.items["llm_tokens"], out=running[1:])
        media: NDArray[np.int64] = running[self.item_offsets[1:]] - running[self.item_offsets[:-1]]
        return (self.samples["llm_tokens"] - media).astype(np.int32)

    def _digest(self) -> str:
        digest = hashlib.sha256(json.dumps([FORMAT_VERSION, asdict(self.key), self.reasons], sort_keys=True).encode())
        for table in (self.samples, self.items):
            for name, column in table.items():
                if name not in _DERIVED:
                    digest.update(f"{name}:{column.dtype.str}:{len(column)}".encode())
                    digest.update(np.ascontiguousarray(column).data)
        for bad in self.bad:
            digest.update(f"{bad.sample_id}:{bad.reason}".encode())
        return digest.hexdigest()


def write_index(folder: str | Path, index: CostIndex, *, scratch: Path | None = None) -> CostIndex:
    """Write `index` to `folder` and return it mapped from there. The folder appears whole or not at all.

    Args:
        scratch: folder of the same file system to write in before the move; None: beside `folder`. A process that is
            killed leaves its files there.

    Raises:
        IndexFormatError: the folder exists and is not an index: it is not overwritten; or nothing can be written there.
    """
    folder = overwritable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".new-", suffix=".tmp", dir=scratch or folder.parent))
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        (part / "new").mkdir()
        _write_files(part / "new", index)
        if folder.exists():
            folder.rename(part / "old")
        (part / "new").rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return CostIndex.open(folder, expect=index.key)


def overwritable(folder: str | Path) -> Path:
    """The folder itself, `~` and links followed, in which an index may be written: absent, empty, or an index alone.

    Raises:
        IndexFormatError: it holds something else, or cannot be moved.
    """
    name = os.path.expanduser(os.fspath(folder))
    if name.encode("utf-8", "replace").decode() != name or "\0" in name:
        raise IndexFormatError("the path is not UTF-8 text", place=name, remedy="Choose another folder.")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", name) and not os.path.exists(name):  # Path makes one slash of two
        raise IndexFormatError(
            "an index is mapped into memory and cannot lie at a URL",
            place=name,
            remedy="Choose a folder of this machine; copy the index from there.",
        )
    real = Path(os.path.realpath(name))
    if not real.exists():
        return real
    if os.path.ismount(real):  # the index is moved into its place, and a mounted folder stays where it is
        raise IndexFormatError("a file system is mounted here", place=name, remedy="Name a folder inside it.")
    strangers = _strangers(real)
    if strangers:
        raise IndexFormatError(
            f"the folder holds something else and is not overwritten ({', '.join(strangers[:5])})",
            place=name,
            remedy="Choose another folder, or move these files elsewhere.",
        )
    return real


def unwritable(folder: Path, error: OSError) -> IndexFormatError:
    """The error for a place where no index can be written."""
    return IndexFormatError(
        f"nothing can be written here: {error}",
        place=str(folder),
        remedy="Choose another folder, or change the permissions.",
    )


def _strangers(folder: Path) -> list[str]:
    """What is there besides an index; other programs have a meta.json too."""
    if not folder.is_dir():
        return [folder.name]
    names = sorted(os.listdir(folder))
    if form.META not in names:
        return names
    others = [name for name in names if name not in (form.META, *form.TABLES)]
    return others or ([] if len(names) > 1 else names)


def foreign(folder: Path | str, differences: Sequence[str], remedy: str = "Build the index again.") -> IndexFormatError:
    """The error for an index of another source, rule or option."""
    return IndexFormatError(f"made from something else: {'; '.join(differences)}", place=str(folder), remedy=remedy)


def _write_files(folder: Path, index: CostIndex) -> None:
    samples, implied_samples = form.compact(
        {name: index.samples[name] for name in SAMPLE_COLUMNS if name not in _DERIVED}
    )
    items, implied_items = form.compact(
        {name: index.items[name] for name in ITEM_COLUMNS if name not in form.VIDEO_COLUMNS}
    )
    rows = form.video_rows(index.items)
    videos = pa.table({"row": rows, **{name: index.items[name][rows] for name in form.VIDEO_COLUMNS}})
    form.write_table(folder / form.SAMPLES, samples)
    form.write_table(folder / form.ITEMS, items)
    form.write_table(folder / form.VIDEOS, videos)
    form.write_table(folder / form.NAMES, form.encode_names(index.names), one_batch=False)
    form.write_table(folder / form.BAD, form.records_table(index.bad, form.BAD_SCHEMA))
    form.write_table(folder / form.SHARDS, form.records_table(index.shards, form.SHARD_SCHEMA))
    meta = {
        "format_version": FORMAT_VERSION,
        "key": asdict(index.key),
        "fingerprint": index.fingerprint,
        "rules": index.rules,
        "part": None if index.part is None else asdict(index.part),
        "num_samples": len(index),
        "num_items": len(index.items["patches"]),
        "num_bad": len(index.bad),
        "samples": {"rows": len(index), "implied": implied_samples},
        "items": {"rows": len(index.items["patches"]), "implied": implied_items},
        "file_bytes": {name: (folder / name).stat().st_size for name in form.TABLES},
        "reasons": list(index.reasons),
    }
    (folder / form.META).write_text(json.dumps(meta), encoding="utf-8")


def _stored(
    table: pa.Table, meta: Mapping[str, Any], dtypes: Mapping[str, Any], folder: Path, videos: pa.Table | None = None
) -> Columns:
    """Columns of a mapped table; what only videos have is spread over all rows when it is asked for."""
    length, implied = int(meta["rows"]), meta["implied"]

    def make(name: str) -> Column:
        try:
            if videos is None or name not in form.VIDEO_COLUMNS:
                return form.restore(table, implied, dtypes[name], name, length)
            column = np.full(length, form.VIDEO_COLUMNS[name], dtype=dtypes[name])
            column[form.restore(videos, {}, np.int64, "row", 0)] = form.restore(videos, {}, dtypes[name], name, 0)
            return column
        except (IndexError, KeyError, OverflowError, ValueError) as error:
            raise IndexFormatError(f"damaged: {error!r}", place=str(folder), remedy=form.AGAIN) from error

    # Columns that are missing or of another type are found now, not in the middle of a run.
    for name in dtypes:
        where = implied.get(name, name)
        if name in _DERIVED or isinstance(where, int):
            continue
        owner = videos if videos is not None and name in form.VIDEO_COLUMNS else table
        found = owner.schema.field(where).type.to_pandas_dtype()
        if np.dtype(found) != np.dtype(dtypes[name]) or (owner is table and owner.num_rows != length):
            raise ValueError(f"column {name} is {owner.num_rows} rows of {np.dtype(found)}")
    return Columns(dtypes, make)


def _reopen(folder: str, fingerprint: str) -> CostIndex:
    index = CostIndex.open(folder)
    if index.fingerprint != fingerprint:
        raise IndexFormatError(
            "the index was replaced while a run was using it", place=folder, remedy="Start the run again."
        )
    return index


def _from_state(state: dict[str, Any]) -> CostIndex:
    return CostIndex(**state)
