"""The files of a cost index: which columns there are, and how a column becomes bytes and comes back.

    meta.json      format version, key, rules in words, reasons, columns that are not stored
    samples.arrow  one row per sample        items.arrow  one row per medium, in the order of the samples
    videos.arrow   row in the item table, source frames, rate, duration: of videos alone
    names.arrow    shard (dictionary) and key of every sample
    bad.arrow      unusable samples          shards.arrow  what the shards were when they were scanned

A column with one value throughout is that value in meta.json; a column equal to an earlier one is its name. So a data
set of images, or a model without windows, pays for no column of zeros. Every column has a fixed width; a number that
does not fit raises when it is written and never wraps.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from dataloaders.errors import IndexFormatError

FORMAT_VERSION = 3
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
    "clamped": np.int8,
}
"""Columns of the sample table.

`llm_tokens`: positions, those of media included; `text_tokens`: those that are no medium's (derived, not stored);
`visual_tokens`: visual embeddings; `bytes`: encoded media; `confidence`: a `Confidence`; `reason`: row of `.reasons`;
`clamped`: 1 where a medium is.
"""

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
    "llm_tokens": np.int32,
    "patches": np.int32,
    "tiles": np.int32,
    "full_count": np.int32,
    "full_total": np.int32,
    "full_total_sq": np.int64,
    "full_longest": np.int32,
    "window_count": np.int32,
    "window_total": np.int32,
    "window_total_sq": np.int64,
    "window_longest": np.int32,
    "clamped": np.int8,
}
"""Columns of the item table: source size and frames, planned grid and size, counts and segments (see `ItemCounts`).

`llm_tokens`: positions that the placeholder becomes; `visual_tokens`: embeddings among them. `clamped`: 1 where source
size or frames are not the file's but the nearest ones that the processor takes.
"""

VIDEO_COLUMNS: Mapping[str, float] = {"source_frames": 1, "fps": 0.0, "duration_s": 0.0}
"""Columns stored for videos alone, with what every image has. Rates stay float64: frames are sampled by them."""

META, SAMPLES, ITEMS, VIDEOS, NAMES, BAD, SHARDS = (
    "meta.json",
    "samples.arrow",
    "items.arrow",
    "videos.arrow",
    "names.arrow",
    "bad.arrow",
    "shards.arrow",
)
TABLES = (SAMPLES, ITEMS, VIDEOS, NAMES, BAD, SHARDS)
AGAIN = "Delete the folder; it is built again."
SMALL_BYTES = 256 * 1024
MAX_META_BYTES = 64 * 1024**2
_Record = TypeVar("_Record")

BAD_SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("place", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("unfit", pa.bool_()),
    ]
)
SHARD_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("stamp", pa.string()),
        ("fingerprint", pa.string()),
        ("num_samples", pa.int64()),
        ("report", pa.string()),
    ]
)
NAME_SCHEMA = pa.schema([("shard", pa.dictionary(pa.int32(), pa.string())), ("key", pa.string())])


VIDEO_SCHEMA = pa.schema(
    [("row", pa.int64()), *((name, pa.from_numpy_dtype(ITEM_COLUMNS[name])) for name in VIDEO_COLUMNS)]
)
SCHEMAS = {VIDEOS: VIDEO_SCHEMA, NAMES: NAME_SCHEMA, BAD: BAD_SCHEMA, SHARDS: SHARD_SCHEMA}


class Confidence(IntEnum):
    """How the counts of a sample are known; a sample has the weakest of its media and its text."""

    HEADER = 0
    COUNTED = 1
    ESTIMATED = 2
    UNUSABLE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKey:
    """What an index was made from: rules, fingerprints and options. Equal keys, equal numbers.

    `rules` is the version of probing and parsing (`dataloaders.scan.RULES_VERSION`): a stricter parser must not meet
    rows that a laxer one wrote. `tokenizer` is the fingerprint of the text rule, `unfit` the policy for media that the
    processor would fail on.
    """

    rules: int
    source: str
    estimator: str
    tokenizer: str
    train_on: str
    apply_orientation: bool
    limits: str
    unfit: str = "skip"

    def differences(
        self,
        expected: "IndexKey",
        *,
        but: Sequence[str] = (),
        rules: Mapping[str, str] | None = None,
        expected_rules: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Fields (other than `but`) that differ, as `name is x, expected y`.

        Args:
            rules, expected_rules: of both indices, in words (`CostIndex.rules`), for fields that are fingerprints.
        """
        return [
            f"{name} is {value}, expected {getattr(expected, name)}"
            + _in_words(_WORDS.get(name, ""), rules or {}, expected_rules or {})
            for name, value in asdict(self).items()
            if name not in but and value != getattr(expected, name)
        ]


_WORDS = {"estimator": "media", "tokenizer": "text"}  # field of the key -> rule in words


def _in_words(what: str, rules: Mapping[str, str], expected_rules: Mapping[str, str]) -> str:
    """The difference of two fingerprints for people; "" where no words are known."""
    found, expected = rules.get(what, ""), expected_rules.get(what, "")
    if not found:
        return ""
    if found == expected:
        return f" ({what} counted by {found!r} with other options)"
    return f" ({what} counted by {found!r}" + (f", not by {expected!r})" if expected else ")")


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A sample that cannot be used: its row, where it lies, the stable reason and the full message.

    `unfit`: its media are sound, but the model's processor would fail on one.
    """

    sample_id: int
    place: str
    reason: str
    message: str
    unfit: bool = False


def unusable_text(bad: Sequence[BadSample], num_samples: int, *, most: int) -> str:
    """How many of `num_samples` cannot be used, and the first `most` of them with place and reason, a line each."""
    # Most messages name their place themselves.
    places = ("" if one.place in one.message else f"{one.place}: " for one in bad)
    listed = [f"  {place}{one.message}" for place, one in zip(places, bad[:most], strict=False)]
    more = [f"  and {len(bad) - most} more"] if len(bad) > most else []
    return "\n".join([f"{len(bad)} of {num_samples} samples cannot be used:", *listed, *more])


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRows:
    """A shard that was scanned, and what it was then: it is scanned again when path, size or stamp differ.

    Attributes:
        path: absolute, or a URL.
        size, stamp: of the file, see `FileState`. An edit that keeps size and modification time is not seen.
        fingerprint: of its name, size and table of members.
        num_samples: rows of the sample table, behind those of the shards before it.
        report: JSON of what the header pass found besides samples; empty: nothing.
    """

    path: str
    size: int
    stamp: str
    fingerprint: str
    num_samples: int
    report: str = ""

    @property
    def state(self) -> tuple[str, int, str]:
        """What decides whether it is scanned again."""
        return self.path, self.size, self.stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOf:
    """Which part of a source an index holds: shards k with k mod `count` = `number`, of `num_shards` named so.

    `shards` is a digest of the base names of all shards in order, so that parts of other lists are told apart.
    """

    number: int
    count: int
    num_shards: int
    shards: str

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.count or self.num_shards < 0:
            raise ValueError(f"part {self.number}/{self.count} of {self.num_shards} shards")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


class Columns(Mapping[str, Column]):
    """Columns by name, each made when it is first asked for; read-only arrays of fixed types."""

    def __init__(self, dtypes: Mapping[str, DTypeLike], make: Callable[[str], Column]) -> None:
        self._dtypes, self._make = dtypes, make
        self._made: dict[str, Column] = {}

    def __getitem__(self, name: str) -> Column:
        column = self._made.get(name)
        if column is None:
            if name not in self._dtypes:
                raise KeyError(f"no column {name!r}; there are {', '.join(self._dtypes)}")
            dtype = np.dtype(self._dtypes[name])
            column = self._made[name] = read_only(self._make(name), dtype)
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)

    def __contains__(self, name: object) -> bool:
        return name in self._dtypes


def read_only(column: Column, dtype: DTypeLike) -> Column:
    """A read-only view. Raises ValueError when the type is another one."""
    if column.dtype != np.dtype(dtype):
        raise ValueError(f"a column of {column.dtype} where {np.dtype(dtype)} is expected")
    view = column.view()
    view.flags.writeable = False
    return view


def compact(columns: Mapping[str, Column]) -> tuple[pa.Table, dict[str, int | str]]:
    """(table of the columns that must be stored, the others: name -> its one value, or the name of its equal)."""
    stored: dict[str, Column] = {}
    implied: dict[str, int | str] = {}
    for name, column in columns.items():
        if len(column) and column.dtype.kind == "i" and bool((column == column[0]).all()):
            implied[name] = int(column[0])
            continue
        twin = next((other for other, known in stored.items() if _equal(known, column)), None)
        if twin is None:
            stored[name] = column
        else:
            implied[name] = twin
    return pa.table({name: pa.array(column) for name, column in stored.items()}), implied


def _equal(one: Column, other: Column) -> bool:
    return one.dtype == other.dtype and bool(one[:1] == other[:1]) and np.array_equal(one, other) if len(one) else False


def restore(table: pa.Table, implied: Mapping[str, int | str], dtype: DTypeLike, name: str, length: int) -> Column:
    """Column `name` again: a view of the mapped file, or its one value seen `length` times."""
    where = implied.get(name, name)
    if isinstance(where, int):
        return np.broadcast_to(np.array(where, dtype=dtype), (length,))
    chunks = table[where].chunks
    if not chunks:
        return np.zeros(0, dtype=dtype)
    if len(chunks) > 1:
        raise ValueError(f"column {where} is in {len(chunks)} pieces")
    return cast(Column, chunks[0].to_numpy(zero_copy_only=True))


def video_rows(items: Mapping[str, Column]) -> NDArray[np.int64]:
    """Rows of the item table whose source is not that of an image."""
    other = np.zeros(len(items["source_frames"]), dtype=np.bool_)
    for name, image in VIDEO_COLUMNS.items():
        other |= items[name] != image
    return np.flatnonzero(other).astype(np.int64)


def encode_names(names: pa.Table) -> pa.Table:
    """`names` with the shards as a dictionary in the order of their first appearance."""
    shard = names["shard"].cast(pa.string()).dictionary_encode()
    return pa.table([shard, names["key"].cast(pa.string())], schema=NAME_SCHEMA)


def records_table(records: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Dataclass instances as a table."""
    return pa.table(
        {field.name: pa.array([getattr(record, field.name) for record in records], field.type) for field in schema},
        schema=schema,
    )


def write_table(path: Path, table: pa.Table, *, one_batch: bool = True) -> None:
    """Write an Arrow IPC file; with `one_batch` a column is one piece of memory."""
    batches = table.combine_chunks().to_batches() if one_batch else table.unify_dictionaries().to_batches()
    try:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error  # Arrow does not say which file


def map_table(path: Path, schema: pa.Schema | None = None, *, map_small: bool = True) -> pa.Table:
    """The table in a file, mapped; its layout is checked, its rows are not read.

    Args:
        map_small: False: files up to `SMALL_BYTES` are read instead.
    """
    read = not map_small and path.stat().st_size <= SMALL_BYTES
    # Both ways a buffer is a part of what there is, so nothing of a size that a damaged file claims is allocated.
    with pa.BufferReader(path.read_bytes()) if read else pa.memory_map(str(path), "r") as source:
        table = pa.ipc.open_file(source).read_all()
    table.validate()
    if schema is not None and not table.schema.equals(schema):
        raise ValueError(f"{path.name} has the columns {table.schema.names}")
    return table


def checked(table: pa.Table, folder: Path | None) -> pa.Table:
    """The table, if its texts are whole: they lie where offsets in the file say, and damage may have changed those."""
    try:
        table.validate(full=True)
    except pa.ArrowException as error:
        raise IndexFormatError(f"damaged: {error!r}", place=str(folder), remedy=AGAIN) from error
    if any(column.null_count for column in table.columns):
        raise IndexFormatError("damaged: values are missing", place=str(folder), remedy=AGAIN)
    return table


def typed(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """A dataclass instance of JSON values. Raises TypeError where a field is missing, unknown, or of another type."""
    made = kind(**values)
    for field in fields(cast(Any, kind)):
        if type(getattr(made, field.name)) is not field.type:
            raise TypeError(f"{kind.__name__}.{field.name} is {getattr(made, field.name)!r}")
    return made


def _no_index(folder: Path, error: Exception) -> str:
    if not folder.is_dir():
        return "a file, not a folder" if folder.exists() else "no such folder"
    return f"no {META} in it" if isinstance(error, FileNotFoundError) else f"{META}: {error!r}"


def check_sizes(folder: Path, expected: Mapping[str, int]) -> None:
    """Raise IndexFormatError that names the files which are not there or have another size than meta.json says."""
    sizes = {name: (folder / name).stat().st_size for name in TABLES if (folder / name).exists()}
    wrong = [
        f"{name} has {sizes[name]} bytes, but {META} says {expected[name]}" if name in sizes else f"{name} is missing"
        for name in TABLES
        if sizes.get(name) != expected[name]
    ]
    if wrong:
        raise IndexFormatError(f"damaged: {'; '.join(wrong)}", place=str(folder), remedy=AGAIN)


def read_meta(folder: Path) -> dict[str, Any]:
    """The content of meta.json.

    Raises:
        IndexFormatError: not an index, or one of another format version.
    """
    try:
        size = (folder / META).stat().st_size
        if size > MAX_META_BYTES:
            raise ValueError(f"{META} has {size} bytes, above {MAX_META_BYTES}")
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        version = meta["format_version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IndexFormatError(
            f"not a cost index: {_no_index(folder, error)}",
            place=str(folder),
            remedy="Name a folder that balancer-analyze index or build_index has written.",
        ) from error
    if version != FORMAT_VERSION:
        raise IndexFormatError(
            f"format version {version}, but this release reads {FORMAT_VERSION}", place=str(folder), remedy=AGAIN
        )
    return cast("dict[str, Any]", meta)
