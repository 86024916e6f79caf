"""What a dataset says of itself about the costs of its samples, without loading one.

    .cost_index                     an index                       as it is (`SampleDataset`)
    .cost(i), or .cost an array     numbers                        called once for each index
    .dataset, .indices              torch's Subset                 the rows of what is inside
    .datasets, .cumulative_sizes    torch's ConcatDataset          what its parts say, joined
    .data, .column_names            a Hugging Face Dataset         a column of lengths, or the offsets of input_ids

The first that fits is taken. Neither torch nor `datasets` is imported: what counts is what a dataset has. Price: labels
of a Hugging Face dataset are only counted where that reads less than `MAX_LABELS` values; lengths are read from Arrow's
offsets, so that no token is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from balancer.cost_table import joined, table_of, taken
from balancer.counts import Int64Array
from balancer.errors import BalancerError, MissingCostError
from balancer.select import SelectIndex

LENGTH_COLUMNS = ("length", "lengths", "num_tokens")
MAX_LABELS = 2**26  # values, half a GiB: read in a fraction of a second
_IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetCounts:
    """Counts of every sample of a dataset.

    Attributes:
        index: one row per sample.
        labels_known: whether its `label_tokens` are counted; otherwise they are 0.
    """

    index: SelectIndex
    labels_known: bool


Known: TypeAlias = DatasetCounts | NDArray[Any]


def known_costs(dataset: Any) -> Known | None:
    """Counts, or numbers [n] or [n, 2] in a unit of the dataset's own; None where it says nothing.

    Raises:
        BalancerError: an index or a column of another length, lengths that are missing, indices out of range, or a
            `cost` that fails.
        MissingCostError: only some parts of a ConcatDataset are known.
    """
    if (index := getattr(dataset, "cost_index", None)) is not None:
        return _own_index(dataset, index)
    if (cost := getattr(dataset, "cost", None)) is not None:
        return costs_of_each(cost, range(len(dataset))) if callable(cost) else costs_as_array(cost, len(dataset))
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices") and len(dataset.indices) == len(dataset):
        return _of_subset(dataset)
    if hasattr(dataset, "datasets") and hasattr(dataset, "cumulative_sizes") and len(dataset.datasets):
        return _of_parts(list(dataset.datasets))
    if hasattr(dataset, "column_names") and hasattr(getattr(dataset, "data", None), "column"):
        return _of_columns(dataset)
    return None


def costs_of_each(cost: Callable[[int], Any], rows: Iterable[int]) -> NDArray[Any]:
    """`cost(i)` of every row, [k] or [k, 2].

    Raises:
        BalancerError: it fails, or gives no number or pair; names the sample.
    """
    values: list[NDArray[Any]] = []
    for i in rows:
        try:
            value = np.asarray(cost(i))
        except Exception as error:  # a rank that went on without would plan other steps
            raise BalancerError(f"cost({i}) failed: {type(error).__name__}: {error}") from error
        if value.dtype.kind not in "iuf" or (values and value.shape != values[0].shape):
            raise BalancerError(f"cost({i}) gives {value.tolist()!r}; expected a number, or (encoder, LLM), for each")
        values.append(value)
    return np.array(values)


def costs_as_array(cost: Any, num_samples: int) -> NDArray[Any]:
    """Costs of every sample as an array whose first axis is the samples.

    Raises:
        BalancerError: no array, or one of another length.
    """
    try:
        given = np.asarray(cost)
    except ValueError as error:
        raise BalancerError(f"cost is no array of numbers: {error}; give [n], or [n, 2] for (encoder, LLM)") from None
    if given.ndim and len(given) != num_samples:
        raise BalancerError(f"cost has {len(given)} entries for {num_samples} samples")
    return given


def is_index(value: Any) -> bool:
    """Whether this is an index that selection can read."""
    return all(hasattr(value, name) for name in ("samples", "items", "item_offsets", "bad", "shard_numbers"))


def _own_index(dataset: Any, index: Any) -> DatasetCounts:
    if not is_index(index):
        raise BalancerError(
            f"{type(dataset).__name__}.cost_index is a {type(index).__name__}, no index; pass cost= or cost_index="
        )
    if len(index) != len(dataset):
        raise BalancerError(f"cost_index has {len(index)} rows for {len(dataset)} samples")
    return DatasetCounts(index=index, labels_known=True)


def _of_subset(subset: Any) -> Known | None:
    inner, num_inner = subset.dataset, len(subset.dataset)
    given = np.asarray(subset.indices, dtype=np.int64).reshape(-1)
    if len(outside := given[(given < -num_inner) | (given >= num_inner)]):
        raise BalancerError(f"a Subset names index {int(outside[0])} of a dataset of {num_inner} samples")
    rows = np.where(given < 0, given + num_inner, given)
    if getattr(inner, "cost_index", None) is None and callable(cost := getattr(inner, "cost", None)):
        return costs_of_each(cost, rows.tolist())  # not of those that are left out
    known = known_costs(inner)
    if isinstance(known, DatasetCounts):
        return DatasetCounts(index=taken(known.index, rows), labels_known=known.labels_known)
    return None if known is None else known[rows]


def _of_parts(parts: list[Any]) -> Known | None:
    known = [known_costs(part) for part in parts]
    if all(found is None for found in known):
        return None
    counts = [found for found in known if isinstance(found, DatasetCounts)]
    if len(counts) == len(parts):
        return DatasetCounts(
            index=joined([found.index for found in counts]), labels_known=all(found.labels_known for found in counts)
        )
    numbers = [found for found in known if isinstance(found, np.ndarray)]
    if len(numbers) == len(parts) and len({found.shape[1:] for found in numbers}) == 1:
        return np.concatenate(numbers)
    said = {DatasetCounts: "counts of tokens", type(None): "nothing", np.ndarray: "numbers in a unit of its own"}
    listed = ", ".join(f"part {number} ({type(parts[number]).__name__}): {said[type(found)]}"
                       for number, found in enumerate(known[:8]))  # fmt: skip
    raise MissingCostError(
        f"the parts of this dataset do not say alike what their samples cost: {listed}. Add cost=lengths (one number "
        f"per sample of all parts, in one unit)"
    )


def _of_columns(dataset: Any) -> DatasetCounts | None:
    """Lengths of a Hugging Face dataset, which may be a view of some rows of its table."""
    names = list(dataset.column_names)
    rows = _rows_of_view(dataset)
    found = next((name for name in (*LENGTH_COLUMNS, "input_ids") if name in names), None)
    if found is None:
        return None
    column = dataset.data.column(found)
    lengths = _lengths(column) if found == "input_ids" else _numbers(column, found)
    if lengths is None:
        return None
    columns = {"llm_tokens": _in_view(lengths, rows, found, len(dataset))}
    if "labels" in names and (labels := _label_counts(dataset.data.column("labels"))) is not None:
        columns["label_tokens"] = np.minimum(_in_view(labels, rows, "labels", len(dataset)), columns["llm_tokens"])
    return DatasetCounts(index=table_of(columns, len(dataset)), labels_known="label_tokens" in columns)


def _rows_of_view(dataset: Any) -> Int64Array | None:
    """Rows of the table that the samples are, int64 [n], after select or shuffle; None: all, in order."""
    view = getattr(dataset, "_indices", None)
    return None if view is None else np.asarray(view.column(0).to_numpy(), dtype=np.int64)


def _in_view(values: NDArray[Any], rows: Int64Array | None, name: str, num_samples: int) -> Int64Array:
    """Values [table rows], NaN where there is none, as int64 [n] of the samples."""
    own = values if rows is None else values[rows]
    if len(own) != num_samples:
        raise BalancerError(f"column {name!r} has {len(own)} entries for {num_samples} samples; pass cost=lengths")
    wrong = ~(np.isfinite(own) & (own >= 0) & (own == np.rint(own)))
    if wrong.any():
        row = int(wrong.argmax())
        raise BalancerError(f"column {name!r} has no length for sample {row} ({own[row]}); pass cost=lengths")
    return own.astype(np.int64)


def _numbers(column: Any, name: str) -> NDArray[np.float64]:
    """A column of numbers, [table rows], NaN for null."""
    values = column.to_numpy()
    if values.dtype.kind not in "iuf":
        raise BalancerError(f"column {name!r} holds {column.type}, no lengths; rename it, or pass cost=lengths")
    return np.asarray(values, dtype=np.float64)


def _lengths(column: Any) -> NDArray[np.float64] | None:
    """Lengths of lists from their offsets, [table rows], NaN for null; None: no lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not _is_list(column.type):
        return None
    lengths = pc.list_value_length(column)
    return np.asarray(lengths.cast(pa.float64()).to_numpy(), dtype=np.float64)


def _label_counts(column: Any) -> NDArray[np.float64] | None:
    """Labels of every list but its first, which nothing predicts; None where that is unknown or dear to count."""
    import pyarrow as pa

    if not _is_list(column.type) or not pa.types.is_integer(column.type.value_type):
        return None
    lengths = _lengths(column)
    if lengths is None or np.isnan(lengths).any() or lengths.sum() > MAX_LABELS:
        return None
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths.astype(np.int64), out=starts[1:])
    values = (chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks)
    learned = np.concatenate([np.zeros(0, dtype=np.bool_), *(chunk != _IGNORED_LABEL for chunk in values)])
    counts, some = np.zeros(len(lengths)), np.flatnonzero(lengths)
    if len(some):
        learned[starts[some]] = False
        counts[some] = np.add.reduceat(learned, starts[some], dtype=np.int64)
    return counts


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
