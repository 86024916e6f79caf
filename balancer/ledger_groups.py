"""What block shuffle deals in, as a ledger keeps it, so that a selection can be computed again without the data.

    groups, int64 [num_samples]   0 0 0 0 1 1 1 2 2 2 2 2  --group_runs-->  ((0, 4), (1, 3), (2, 5))  --groups_of_ids-->
                                                                                               groups of any sample ids

An index knows the files of its samples, but not the row groups of a Parquet file: where a source reads by anything else
than files, the first line of a ledger holds the runs. Price: about 12 bytes per group in that line, whatever the number
of samples; nothing where the groups are the shards of the index.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from balancer.errors import LedgerError
from balancer.shuffle import Int64Array, stretches_of

Runs = tuple[tuple[int, int], ...]


def recorded_groups(groups: ArrayLike | None, shards: ArrayLike) -> Runs:
    """The runs that a ledger needs: none where `groups` are the shards of the index, or None.

    Args:
        groups: int64 [n], see `dataloaders.source.groups`. shards: int [n], of the index.
    """
    if groups is None or np.array_equal(np.asarray(groups), np.asarray(shards)):
        return ()
    return group_runs(groups)


def group_runs(groups: ArrayLike) -> Runs:
    """(number, length) of every stretch of equal numbers in `groups` (int64 [n])."""
    numbers = np.asarray(groups, dtype=np.int64)
    starts, lengths = stretches_of(numbers)
    return tuple(zip(numbers[starts].tolist(), lengths.tolist(), strict=True))


def runs_digest(runs: Sequence[tuple[int, int]]) -> str:
    """Hex digest of runs; "" for none."""
    return hashlib.sha256(np.asarray(runs, dtype="<i8").tobytes()).hexdigest() if runs else ""


def groups_of_ids(runs: Runs, ids: ArrayLike, *, num_samples: int) -> Int64Array:
    """int64 [k]: the groups of sample `ids` (int64 [k]).

    Raises:
        LedgerError: the runs are not of `num_samples` samples, or an id is not one of these.
    """
    lengths = [length for _, length in runs]
    if sum(lengths) != num_samples or not all(lengths):
        raise LedgerError(f"the groups of block shuffle are of {sum(lengths)} samples, the run is of {num_samples}")
    # Ends instead of one number per sample: the runs of a ledger may claim any length.
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    numbers = np.asarray([number for number, _ in runs], dtype=np.int64)
    rows = np.asarray(ids, dtype=np.int64)
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_samples:
        raise LedgerError(f"ids from {rows.min()} to {rows.max()} are not among the {num_samples} samples of the run")
    return numbers[np.searchsorted(ends, rows, side="right")]
