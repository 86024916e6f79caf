"""The cost index: what every sample and every medium costs, in two columnar tables that are memory-mapped.

    folder/  samples.arrow   one row per sample: text_tokens, llm_tokens, patches, ..., shard, key
             items.arrow     one row per medium in CSR order: sample i has rows item_offsets[i] to item_offsets[i + 1]
             meta.json       format version, what the index was made from, digest of the content, unusable samples

Columns are NumPy arrays on the mapped file, without a copy: ranks and workers of a host share one page cache. An index
is only reused for the source, token rule and labelling it was made from; everything else is an error that says so.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from dataloaders.errors import IndexFormatError

FORMAT_VERSION = 1
Column = NDArray[Any]

SAMPLE_COLUMNS: Mapping[str, DTypeLike] = {
    "text_tokens": np.int32,
    "label_tokens": np.int32,
    "llm_tokens": np.int32,
    "visual_tokens": np.int32,
    "patches": np.int32,
    "num_items": np.int32,
    "bytes": np.int64,
    "confidence": np.int8,
    "reason": np.int16,
}
"""Columns of the sample table. `bytes`: encoded media; `confidence`: a `Confidence`; `reason`: row of `.reasons`."""

ITEM_COLUMNS: Mapping[str, DTypeLike] = {
    "kind": np.int8,
    "width_px": np.int32,
    "height_px": np.int32,
    "grid_t": np.int32,
    "grid_h": np.int32,
    "grid_w": np.int32,
    "resized_height_px": np.int32,
    "resized_width_px": np.int32,
    "frames": np.int32,
    "source_frames": np.int32,
    "fps": np.float64,
    "duration_s": np.float64,
    "visual_tokens": np.int32,
    "patches": np.int32,
    "tiles": np.int32,
    "full_count": np.int64,
    "full_total": np.int64,
    "full_total_sq": np.int64,
    "full_longest": np.int64,
    "window_count": np.int64,
    "window_total": np.int64,
    "window_total_sq": np.int64,
    "window_longest": np.int64,
}
"""Columns of the item table: source size and frames, planned grid and size, counts and segments (see `ItemCounts`)."""

_META, _SAMPLES, _ITEMS = "meta.json", "samples.arrow", "items.arrow"


class Confidence(IntEnum):
    """How the counts of a sample are known; a sample has the weakest of its media."""

    HEADER = 0
    COUNTED = 1
    ESTIMATED = 2
    UNUSABLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKey:
    """What an index was made from: rules, fingerprints and options. Equal keys, equal numbers.

    `rules` is the version of probing and parsing (`dataloaders.scan.RULES_VERSION`): a stricter parser must not meet
    rows that a laxer one wrote.
    """

    rules: int
    source: str
    estimator: str
    tokenizer: str
    train_on: str
    apply_orientation: bool
    limits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A sample that cannot be used: its row, where it lies, the stable reason and the full message."""

    sample_id: int
    place: str
    reason: str
    message: str


class CostIndex:
    """Costs of every sample of a source.

    Attributes:
        key: what it was made from.
        samples: column name -> array [num_samples], read-only; see `SAMPLE_COLUMNS`.
        items: column name -> array [num_items], read-only; see `ITEM_COLUMNS`.
        item_offsets: int64 [num_samples + 1].
        bad: unusable samples; their rows have zero counts and no items.
        reasons: names for the `reason` column; row 0 is "" (usable).
        fingerprint: hex digest of the content.
    """

    def __init__(
        self,
        *,
        key: IndexKey,
        samples: Mapping[str, Column],
        items: Mapping[str, Column],
        names: pa.Table,
        bad: Sequence[BadSample],
        reasons: Sequence[str],
        fingerprint: str = "",
        folder: Path | None = None,
    ) -> None:
        self.key, self.bad, self.reasons, self.folder = key, list(bad), tuple(reasons), folder
        self.samples = {name: _read_only(samples[name], dtype) for name, dtype in SAMPLE_COLUMNS.items()}
        self.items = {name: _read_only(items[name], dtype) for name, dtype in ITEM_COLUMNS.items()}
        self.names = names
        offsets = np.zeros(len(self.samples["num_items"]) + 1, dtype=np.int64)
        np.cumsum(self.samples["num_items"], out=offsets[1:])
        if offsets[-1] != len(self.items["kind"]):
            raise IndexFormatError(
                f"the samples name {offsets[-1]} items, but there are {len(self.items['kind'])}",
                place=str(folder or "index"),
                remedy="Delete the folder; it is built again.",
            )
        self.item_offsets = _read_only(offsets, np.int64)
        self.fingerprint = fingerprint or self._digest()

    def __len__(self) -> int:
        return len(self.samples["llm_tokens"])

    def keys(self, i: int) -> str:
        """Key of sample `i` in its shard."""
        return cast(str, self.names["key"][i].as_py())

    def shard(self, i: int) -> str:
        """Shard of sample `i`."""
        return cast(str, self.names["shard"][i].as_py())

    def item_rows(self, i: int) -> range:
        """Rows of the items of sample `i`."""
        return range(int(self.item_offsets[i]), int(self.item_offsets[i + 1]))

    def item_tokens(self, i: int) -> list[int]:
        """Visual tokens of every medium of sample `i`, as `encode_record` takes them."""
        rows = self.item_rows(i)
        return [int(count) for count in self.items["visual_tokens"][rows.start : rows.stop]]

    @classmethod
    def open(cls, folder: str | Path, expect: IndexKey | None = None) -> "CostIndex":
        """Map an index that `write_index` has written; no column is read.

        Raises:
            IndexFormatError: not an index, another format version, damaged, or made from something else than `expect`.
        """
        folder = Path(folder)
        meta = _read_meta(folder)
        try:
            key = IndexKey(**meta["key"])
            bad = [BadSample(**entry) for entry in meta["bad"]]
            sizes = {name: (folder / name).stat().st_size for name in (_SAMPLES, _ITEMS)}
            if expect is not None and key != expect:
                raise _foreign(folder, key, expect)
            if sizes != meta["file_bytes"]:
                raise IndexFormatError(
                    f"files of {sizes} bytes, but meta.json says {meta['file_bytes']}", place=str(folder), remedy=_AGAIN
                )
            samples, items = _map_table(folder / _SAMPLES), _map_table(folder / _ITEMS)
            return cls(
                key=key,
                samples={name: _column(samples, name) for name in SAMPLE_COLUMNS},
                items={name: _column(items, name) for name in ITEM_COLUMNS},
                names=samples.select(["shard", "key"]),
                bad=bad,
                reasons=meta["reasons"],
                fingerprint=str(meta["fingerprint"]),
                folder=folder.absolute(),
            )
        except (OSError, KeyError, TypeError, ValueError, pa.ArrowException) as error:
            if isinstance(error, IndexFormatError):
                raise
            raise IndexFormatError(f"damaged: {error!r}", place=str(folder), remedy=_AGAIN) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the files themselves; only an index that was never written travels by value.
        if self.folder is not None:
            return (_reopen, (str(self.folder), self.fingerprint))
        state = {
            "key": self.key,
            "samples": self.samples,
            "items": self.items,
            "names": self.names,
            "bad": self.bad,
            "reasons": self.reasons,
            "fingerprint": self.fingerprint,
        }
        return (_from_state, (state,))

    def _digest(self) -> str:
        digest = hashlib.sha256(json.dumps([FORMAT_VERSION, asdict(self.key), self.reasons], sort_keys=True).encode())
        for table in (self.samples, self.items):
            for name, column in table.items():
                digest.update(f"{name}:{column.dtype.str}:{len(column)}".encode())
                digest.update(np.ascontiguousarray(column).data)
        for bad in self.bad:
            digest.update(f"{bad.sample_id}:{bad.reason}".encode())
        return digest.hexdigest()


_AGAIN = "Delete the folder; it is built again."


def write_index(folder: str | Path, index: CostIndex) -> CostIndex:
    """Write `index` to `folder` and return it mapped from there. The folder appears whole or not at all.

    Raises:
        IndexFormatError: the folder exists and is not an index: it is not overwritten.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and ((folder / _META).is_file() or not any(folder.iterdir()))):
        raise IndexFormatError(
            "the folder holds something else and is not overwritten", place=str(folder), remedy="Choose another folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".tmp", dir=folder.parent))
    try:
        (part / "new").mkdir()
        _write_files(part / "new", index)
        if folder.exists():
            folder.rename(part / "old")
        (part / "new").rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return CostIndex.open(folder, expect=index.key)


def _write_files(folder: Path, index: CostIndex) -> None:
    samples = pa.table({**index.samples, "shard": index.names["shard"], "key": index.names["key"]})
    for name, table in ((_SAMPLES, samples), (_ITEMS, pa.table(index.items))):
        # One batch, so that a column is one piece of memory.
        batches = table.combine_chunks().to_batches()
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    meta = {
        "format_version": FORMAT_VERSION,
        "key": asdict(index.key),
        "fingerprint": index.fingerprint,
        "num_samples": len(index),
        "num_items": len(index.items["kind"]),
        "file_bytes": {name: (folder / name).stat().st_size for name in (_SAMPLES, _ITEMS)},
        "reasons": list(index.reasons),
        "bad": [asdict(bad) for bad in index.bad],
    }
    (folder / _META).write_text(json.dumps(meta), encoding="utf-8")


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        version = meta["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexFormatError(
            f"not a cost index: {error!r}", place=str(folder), remedy="Name a folder that build_index has written."
        ) from error
    if version != FORMAT_VERSION:
        raise IndexFormatError(
            f"format version {version}, but this release reads {FORMAT_VERSION}", place=str(folder), remedy=_AGAIN
        )
    return cast("dict[str, Any]", meta)


def _foreign(folder: Path, found: IndexKey, expect: IndexKey) -> IndexFormatError:
    differing = [
        f"{name} is {value}, expected {getattr(expect, name)}"
        for name, value in asdict(found).items()
        if value != getattr(expect, name)
    ]
    return IndexFormatError(
        f"made from something else: {'; '.join(differing)}", place=str(folder), remedy="Build the index again."
    )


def _map_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path), "r") as mapped:
        return pa.ipc.open_file(mapped).read_all()


def _column(table: pa.Table, name: str) -> Column:
    chunks = table[name].chunks
    if not chunks:
        return np.zeros(0, dtype=table.schema.field(name).type.to_pandas_dtype())
    if len(chunks) > 1:
        raise ValueError(f"column {name} is in {len(chunks)} pieces")
    return cast(Column, chunks[0].to_numpy(zero_copy_only=True))


def _read_only(column: Column, dtype: DTypeLike) -> Column:
    if column.dtype != np.dtype(dtype):
        raise ValueError(f"a column of {column.dtype} where {np.dtype(dtype)} is expected")
    view = column.view()
    view.flags.writeable = False
    return view


def _reopen(folder: str, fingerprint: str) -> CostIndex:
    index = CostIndex.open(folder)
    if index.fingerprint != fingerprint:
        raise IndexFormatError(
            "the index was replaced while a run was using it", place=folder, remedy="Start the run again."
        )
    return index


def _from_state(state: dict[str, Any]) -> CostIndex:
    return CostIndex(**state)
