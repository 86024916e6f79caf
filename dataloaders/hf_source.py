"""Hugging Face data sets on this machine: a map-style `datasets.Dataset`, or the folder that `save_to_disk` wrote.

    dataset --with_format("arrow")--> one row of storage: bytes, paths, text --rows--> record

Media are never decoded: rows are read as Arrow storage, below the features that would decode them, whatever their
`decode` says. Nothing is fetched from the hub, no data set script runs, nothing is unpickled from the data. Formats and
transforms of the data set (`set_transform`) do not apply; for those there is `dataloaders.map_source`.

Price: one row costs about 200 us (Arrow slice and Python objects), and only the columns that are needed are read.
The package `datasets` is imported when such a source is opened.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataloaders.errors import DataError, SourceError
from dataloaders.probe.limits import ProbeLimits
from dataloaders.record_parser import RecordLimits
from dataloaders.row_source import RowOptions, RowSource, listed, needed_columns
from dataloaders.rows import RowFields, check_fields
from dataloaders.storage import Storage

if TYPE_CHECKING:
    from datasets import Dataset

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_MAX_STATE_BYTES = 64 * 1024**2


class HFDatasetSource(RowSource):
    """Rows of a Hugging Face data set (a `SampleSource`).

    Args:
        dataset: a `datasets.Dataset`, or a folder that `save_to_disk` wrote; it is opened again in every process.
        fields: names of the columns; None: the usual ones, see `dataloaders.rows`.
        columns: further columns, for `Record.extra`. No other column is read.
        media_root: folder that paths in media columns start from; None: paths are refused, bytes are not.
        fingerprint: of the data, if you know better; None: from sizes and state of a folder, or what `datasets` says.
        media_schemes, follow_links, limits, media_limits: as for `JsonlSource`.

    Raises:
        SourceError: no such folder, one of several splits, an iterable data set, or a column that is named is absent.
        DataError: the package `datasets` is not installed.
    """

    def __init__(
        self,
        dataset: "Dataset | str | os.PathLike[str]",
        *,
        fields: RowFields | None = None,
        columns: Sequence[str] = (),
        media_root: str | os.PathLike[str] | None = None,
        media_schemes: Sequence[str] = (),
        follow_links: bool = False,
        storage: Storage | None = None,
        limits: RecordLimits | None = None,
        media_limits: ProbeLimits | None = None,
        fingerprint: str | None = None,
    ) -> None:
        options = RowOptions.of(fields, media_root, media_schemes, limits, media_limits, follow_links=follow_links)
        super().__init__(options, storage=storage)
        self._folder = None if not isinstance(dataset, (str, os.PathLike)) else _saved_folder(dataset)
        # Before anything is opened: it looks at the names of files.
        self._found = "" if self._folder is None else _folder_fingerprint(self._folder)
        opened: Any = dataset if self._folder is None else _load(self._folder)
        _check_map_style(opened)
        self._name = self._folder or f"datasets.Dataset {getattr(opened, 'builder_name', None) or 'in memory'}"
        self._len = len(opened)
        if self._len == 0:
            raise SourceError("the data set has no rows", place=self._name, remedy="Name one with rows.")
        self._columns = needed_columns(
            list(opened.column_names), options.fields, tuple(columns), place=self._name, noun="data set"
        )
        self._content = fingerprint or self._found or str(opened._fingerprint)
        self._rows: Any = self._as_arrow(opened)
        check_fields(self._checked_rows(), options.fields, place=self._name)

    @property
    def fingerprint(self) -> str:
        """Over the number of rows, the columns, and the data set's fingerprint or the files of its folder."""
        parts = ("hf-source-1", self._len, self._columns, self.options.fields, self._content)
        return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    def __len__(self) -> int:
        return self._len

    def row(self, i: int) -> Mapping[str, Any]:
        """The needed columns of row `i` as they are stored."""
        self._check_id(i)
        if self._rows is None:
            self._rows = self._reopened()
        rows: list[dict[str, Any]] = self._rows[int(i)].to_pylist()
        return rows[0]

    def _reopened(self) -> Any:
        opened = _load(str(self._folder))
        if len(opened) != self._len or _folder_fingerprint(str(self._folder)) != self._found:
            raise SourceError(
                "the data set has changed since it was opened",
                place=self._name,
                remedy="Start again when it is complete.",
            )
        return self._as_arrow(opened)

    def _as_arrow(self, dataset: Any) -> Any:
        return dataset.with_format("arrow").select_columns(list(self._columns))

    def _where(self, i: int) -> tuple[str, str]:
        return self._name, f"row {i}"

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state if self._folder is None else {**state, "_rows": None}


def is_saved_dataset(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder looks like what `save_to_disk` writes."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (_STATE, _SPLITS))


def _saved_folder(folder: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.path.expanduser(os.fspath(folder)))
    if os.path.isfile(os.path.join(path, _STATE)):
        return path
    if os.path.isfile(os.path.join(path, _SPLITS)):
        splits = sorted(entry.name for entry in os.scandir(path) if os.path.isfile(os.path.join(entry.path, _STATE)))
        raise SourceError(
            f"the folder holds a data set of several splits: {listed(splits, 20)}",
            place=path,
            remedy=f"Name one of them: {os.path.join(path, splits[0] if splits else 'train')}.",
        )
    raise SourceError(
        "there is no saved Hugging Face data set",
        place=path,
        remedy="Data must be on this machine: dataset = datasets.load_dataset(name, split=...) fetches it, then pass "
        "`dataset` itself or the folder that dataset.save_to_disk(folder) writes.",
    )


def _load(folder: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "the package `datasets` is not installed",
            place=folder,
            remedy="pip install datasets, or write the data as Parquet or JSON lines.",
        ) from error
    try:
        return datasets.load_from_disk(folder)
    except (KeyError, TypeError, ValueError, OSError, RecursionError) as error:
        raise SourceError(
            f"the saved data set does not open: {type(error).__name__}: {str(error)[:300]}",
            place=folder,
            remedy="Save it again with a current version of `datasets`.",
        ) from error


def _check_map_style(dataset: Any) -> None:
    if hasattr(dataset, "keys") and hasattr(dataset, "values"):
        raise SourceError(
            f"this is a data set of several splits: {listed(map(str, dataset.keys()), 20)}",
            remedy='Pass one of them, such as dataset["train"].',
        )
    if not all(hasattr(dataset, name) for name in ("__len__", "__getitem__", "with_format", "column_names")):
        streams = type(dataset).__name__ == "IterableDataset"
        raise SourceError(
            f"a {type(dataset).__name__} is not a map-style Hugging Face data set",
            remedy="Load it without streaming=True, or read it from front to back with dataloaders.HFStream."
            if streams
            else "Use dataloaders.MapDatasetSource for other map-style data sets.",
        )


def _folder_fingerprint(folder: str) -> str:
    """Over the state that `save_to_disk` wrote, and name and size of every data file."""
    path = os.path.join(folder, _STATE)
    try:
        if os.path.getsize(path) > _MAX_STATE_BYTES:
            raise ValueError(f"more than {_MAX_STATE_BYTES} bytes")
        state = json.loads(Path(path).read_bytes())
        names = [str(file["filename"]) for file in state["_data_files"]]
        parts = [str(state.get("_fingerprint"))]
        for name in names:
            if os.path.basename(name) != name:
                raise ValueError(f"{name[:80]!r} is not the name of a file")
            parts.append(f"{name}\0{os.path.getsize(os.path.join(folder, name))}")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise SourceError(f"{_STATE} is damaged: {error}", place=folder, remedy="Save the data set again.") from error
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()
