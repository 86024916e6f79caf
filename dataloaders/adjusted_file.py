"""Adjusted samples of an index as one file: enough to see the same `AdjustedIndex` over the same base again.

adjusted.npz    ids [k]                             the adjusted samples, ascending
                keep_tokens, image_pixels, ... [k]  what was done to each; -1: nothing of the kind
                samples.rows, samples.NAME          their counts, and those of their media
                items.rows, items.NAME
"""

import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataloaders.adjusted_index import AdjustedIndex, AdjustedRows
from dataloaders.adjustment import Adjustment
from dataloaders.errors import DataError, IndexFormatError
from dataloaders.estimators.base import MediaLimits
from dataloaders.index import CostIndex

_LIMITS = ("image_pixels", "video_frames", "frame_pixels")
_TABLES = ("samples", "items")
_NONE = -1
Arrays = dict[str, NDArray[np.int64]]


def write_adjusted(path: Path, index: AdjustedIndex) -> None:
    """Write what is adjusted of an index, without its base."""
    ids = sorted(index.adjustments)
    done = [index.adjustments[i] for i in ids]
    arrays: Arrays = {"ids": _column(ids), "keep_tokens": _column([item.keep_tokens for item in done])}
    # A medium is limited by at least one of these, so that -1 everywhere means: no limits.
    for name in _LIMITS:
        arrays[name] = _column([None if item.limits is None else getattr(item.limits, name) for item in done])
    for table in _TABLES:
        changed = index.changed[table]
        arrays[f"{table}.rows"] = changed.rows
        arrays |= {f"{table}.{name}": values for name, values in changed.columns.items()}
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_adjusted(path: Path, base: CostIndex) -> AdjustedIndex:
    """The index that `write_adjusted` was given, over the same base.

    Raises:
        IndexFormatError: no such file, or one whose rows are not in `base`.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays: Arrays = {name: stored[name] for name in stored.files}
        if any(array.dtype != np.int64 or array.ndim != 1 for array in arrays.values()):
            raise TypeError("its columns are int64")
        tables = {
            table: _rows(arrays, table, len(base.items["kind"] if table == "items" else base)) for table in _TABLES
        }
        index = AdjustedIndex(base, _adjustments(arrays), sample_rows=tables["samples"], item_rows=tables["items"])
        _ = [column[:0] for table in (index.samples, index.items) for column in map(table.__getitem__, table)]
        return index
    except (AttributeError, KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile, DataError) as error:
        raise IndexFormatError(f"no adjusted samples of this index: {error!r}", place=str(path)) from error


def _column(values: list[int] | list[int | None]) -> NDArray[np.int64]:
    return np.array([_NONE if value is None else value for value in values], dtype=np.int64)


def _adjustments(arrays: Arrays) -> dict[int, Adjustment]:
    columns = [arrays[name].tolist() for name in ("ids", "keep_tokens", *_LIMITS)]
    found = {}
    for i, keep, *limits in zip(*columns, strict=True):
        given = {name: limit for name, limit in zip(_LIMITS, limits, strict=True) if limit != _NONE}
        found[i] = Adjustment(
            keep_tokens=None if keep == _NONE else keep, limits=MediaLimits(**given) if given else None
        )
    return found


def _rows(arrays: Arrays, table: str, num_rows: int) -> AdjustedRows:
    rows = arrays[f"{table}.rows"]
    if len(rows) and not (rows[0] >= 0 and rows[-1] < num_rows and (np.diff(rows) > 0).all()):
        raise ValueError(f"{table}.rows are not ascending rows of {num_rows}")
    prefix = f"{table}."
    columns = {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
    del columns["rows"]
    if any(len(values) != len(rows) for values in columns.values()):
        raise ValueError(f"{table} has columns of another length than its {len(rows)} rows")
    return AdjustedRows(rows=rows, columns=columns)
