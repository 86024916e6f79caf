"""One call for whatever lies on disk or at a URL: the right source by the names of the files.

    *.tar                     -> TarSource
    *.jsonl, *.ndjson, *.json -> JsonlSource
    *.parquet                 -> ParquetSource
    folder of save_to_disk    -> HFDatasetSource
    folder of one such kind   -> its files, in the order of their names

Nothing is guessed from content, and nothing is fetched by a name alone: names of the Hugging Face hub are an error that
says how to get the data.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dataloaders.errors import SourceError
from dataloaders.hf_source import HFDatasetSource, is_saved_dataset
from dataloaders.jsonl_source import JsonlSource
from dataloaders.parquet_source import ParquetSource
from dataloaders.probe.limits import ProbeLimits
from dataloaders.record_parser import RecordLimits
from dataloaders.row_source import as_paths, listed
from dataloaders.rows import RowFields
from dataloaders.source import SampleSource
from dataloaders.storage import Storage, is_local, shown
from dataloaders.tar_source import TarSource

Kind: TypeAlias = Literal["tar", "json", "parquet", "saved"]
_KINDS: Mapping[str, Kind] = {
    ".tar": "tar",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
}
# What may be said of each kind, besides `storage`, `members` and `limits`.
_OF_ROWS = frozenset({"fields", "media_root", "media_schemes", "follow_links", "media_limits"})
_OPTIONS: Mapping[Kind, frozenset[str]] = {
    "tar": frozenset(),
    "json": _OF_ROWS,
    "parquet": _OF_ROWS | {"columns", "max_group_bytes", "cache_bytes"},
    "saved": _OF_ROWS | {"columns"},
}
_NOUNS: Mapping[Kind, str] = {"tar": "tars", "json": "JSON", "parquet": "Parquet", "saved": "saved data sets"}
_NOT_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "state.json", "config.json"})
_REMEDIES = {
    ".gz": "Unpack it: samples are read by offset.",
    ".tgz": "Unpack it to .tar: samples are read by offset.",
    ".zst": "Unpack it: samples are read by offset.",
    ".bz2": "Unpack it: samples are read by offset.",
    ".xz": "Unpack it: samples are read by offset.",
    ".zip": "Unpack it, and name the JSON or Parquet file in it.",
    ".csv": "Write it as JSON lines or Parquet.",
    ".tsv": "Write it as JSON lines or Parquet.",
    ".arrow": "Name the folder that `save_to_disk` wrote, or write it as Parquet.",
    ".txt": "Name the files themselves; a list of files is not read.",
}
_KNOWN = "Sources are *.tar, *.jsonl, *.json, *.parquet, and folders that datasets' save_to_disk wrote."
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
MAX_FILES = 1_000_000


def open_source(
    spec: str | Path | Sequence[str | Path],
    *,
    fields: RowFields | None = None,
    media_root: str | os.PathLike[str] | None = None,
    media_schemes: Sequence[str] = (),
    follow_links: bool = False,
    columns: Sequence[str] = (),
    storage: Storage | None = None,
    members: Path | None = None,
    limits: RecordLimits | None = None,
    media_limits: ProbeLimits | None = None,
    max_group_bytes: int | None = None,
    cache_bytes: int | None = None,
) -> SampleSource:
    """The source of the samples that `spec` names.

    Args:
        spec: a path or URL or several of one kind, with braces and wildcards; or a folder.
        fields: names of fields, for all kinds but tars. media_root, media_schemes, follow_links, media_limits: for all
            kinds but tars, see `JsonlSource`.
        columns: further columns, for Parquet and saved data sets. max_group_bytes, cache_bytes: see `ParquetSource`.
        members: folder for the table of members of tars; other kinds have none.
        limits: bounds on a record.

    Raises:
        SourceError: it is none of the known kinds, several kinds at once, or names no data; or an option is for another
            kind.
    """
    storage = storage or Storage()
    kind, paths = named_data(spec, storage=storage)
    given: dict[str, Any] = {
        name: value
        for name, value in {
            "fields": fields,
            "media_root": media_root,
            "media_schemes": media_schemes,
            "follow_links": follow_links,
            "media_limits": media_limits,
            "columns": columns,
            "max_group_bytes": max_group_bytes,
            "cache_bytes": cache_bytes,
        }.items()
        if value is not None and value is not False and value != ()
    }
    _refuse_options(kind, given, paths)
    if kind == "tar":
        return TarSource(paths, limits=limits, storage=storage, members=members)
    if kind == "saved" and isinstance(paths, str):
        return HFDatasetSource(paths, storage=storage, limits=limits, **given)
    make = JsonlSource if kind == "json" else ParquetSource
    return make(paths, storage=storage, limits=limits, **given)


def _refuse_options(kind: Kind, given: Mapping[str, object], paths: str | Sequence[str]) -> None:
    if others := [name for name in given if name not in _OPTIONS[kind]]:
        remedy = "Leave them out: media are the members beside each .json." if kind == "tar" else "Leave them out."
        raise SourceError(
            f"options that are not for {_NOUNS[kind]}: {', '.join(others)}", place=_named(paths), remedy=remedy
        )


def named_data(
    spec: str | Path | Sequence[str | Path], *, storage: Storage | None = None
) -> tuple[Kind, str | list[str]]:
    """What `spec` names: (kind, paths that `Storage.list` takes, or the folder of a saved data set).

    Raises:
        SourceError: it is none of the known kinds, several kinds at once, or names no data.
    """
    paths = as_paths(spec)
    folder = os.path.expanduser(paths.removeprefix("file:")) if isinstance(paths, str) and is_local(paths) else None
    if folder is not None and os.path.isdir(folder):
        if is_saved_dataset(folder):
            return "saved", folder
        paths = _files_of(folder)
    _refuse_hub_names(paths)
    return _kind_of((storage or Storage()).list(paths, noun="file")), paths


def _files_of(folder: str) -> list[str]:
    """The files of data in a folder, by name; raises where there are none, or several kinds."""
    found: dict[Kind, list[str]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            kind = _KINDS.get(_extension(entry.name))
            if kind is not None and entry.name not in _NOT_DATA and not entry.name.startswith("."):
                found.setdefault(kind, []).append(entry.path)
    if len(found) != 1:
        several = ", ".join(f"{len(paths)} of {kind} ({os.path.basename(min(paths))})" for kind, paths in found.items())
        raise SourceError(
            f"the folder holds files of several kinds: {several}" if found else "the folder holds no file of data",
            place=folder,
            remedy="Name the files: a path with wildcards." if found else _KNOWN,
        )
    return sorted(found.popitem()[1])


def _kind_of(files: Sequence[str]) -> Kind:
    kinds: dict[Kind, str] = {}
    for file in files:
        extension = _extension(file)
        if extension not in _KINDS:
            raise SourceError(
                f"{shown(file)!r} is no known source",
                remedy=f"{_REMEDIES[extension]} {_KNOWN}" if extension in _REMEDIES else _KNOWN,
            )
        kinds.setdefault(_KINDS[extension], file)
    if len(kinds) > 1:
        raise SourceError(
            f"files of several kinds: {listed(kinds.values(), 5)}",
            remedy="Open each kind on its own, and mix the sources.",
        )
    return next(iter(kinds))


def _extension(name: str) -> str:
    """Last extension of a path or URL, in lower case."""
    path = name if is_local(name) else name.partition("?")[0]
    return os.path.splitext(path)[1].lower()


def _refuse_hub_names(paths: str | Sequence[str]) -> None:
    for path in [paths] if isinstance(paths, str) else paths:
        if _HUB_NAME.fullmatch(path) and _extension(path) not in {*_KINDS, *_REMEDIES} and not os.path.exists(path):
            raise SourceError(
                f"{path!r} is no file or folder here; if it is a name of the Hugging Face hub: data must be local",
                remedy="In Python: dataset = datasets.load_dataset(name, split=...), then HFDatasetSource(dataset); or "
                "dataset.save_to_disk(folder), and name that folder.",
            )


def _named(paths: str | Sequence[str]) -> str:
    return shown(paths) if isinstance(paths, str) else listed(paths)
