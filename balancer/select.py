"""Which samples a step holds, before anything is known about policy or layout.

    index --eligible_ids--> ids --split_held_out--> train ids --shuffle(seed, epoch)--> order
    step k of an epoch = order[k * global_batch_size : (k + 1) * global_batch_size]

Everything is a pure function of (ids, seed, epoch, step); the order itself is never stored, so step 10^6 of 10^9
samples is known as fast as step 0. How an epoch is permuted is in `balancer.shuffle`. Held-out samples are drawn by raw
64-bit Philox words, keyed by sample id: the raw stream is the same in every NumPy version (`Generator.permutation`
promises no such thing), and removing a sample leaves the draw of the others as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.counts import IndexLike, Int64Array
from balancer.errors import OversizeError, PlanError
from balancer.permutation import check_key
from balancer.plan import Capacities
from balancer.shuffle import DEFAULT_BLOCK_SHARDS, EpochOrder, Shuffle

OversizePolicy = Literal["error", "drop"]
_LATER_POLICIES = ("shrink", "truncate_text")
# Kept apart from other streams by the Philox counter; 0 was the epoch order's.
_HELD_OUT_STREAM = 1
_UNUSABLE = 3


class BadSampleLike(Protocol):
    """A row that the scan found unusable."""

    @property
    def sample_id(self) -> int:
        """Row in the index."""

    @property
    def reason(self) -> Any:
        """Stable code of the cause."""


class SelectIndex(IndexLike, Protocol):
    """An index with the names of its samples and its unusable rows."""

    @property
    def bad(self) -> Sequence[Any]:
        """Unusable rows, each with `sample_id` and `reason` (`BadSampleLike`)."""

    def keys(self, i: int) -> object:
        """Name of sample i in its shard, for messages."""

    def shard(self, i: int) -> object:
        """Shard of sample i, for messages."""

    @property
    def shard_numbers(self) -> NDArray[Any]:
        """int [n]: number of the shard of every sample, for shuffling in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A sample that no step will hold, and why: `oversize: ...` or `unusable: <code>`."""

    sample_id: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Eligibility:
    """Outcome of the selection on the whole index.

    Attributes:
        ids: eligible rows, ascending, int64 [k].
        dropped: every other row with its reason, ascending: ids and dropped together are the index.
    """

    ids: Int64Array
    dropped: tuple[Dropped, ...]

    @property
    def num_oversize(self) -> int:
        """Samples left out because no micro-batch can hold them."""
        return sum(drop.reason.startswith("oversize") for drop in self.dropped)


def eligible_ids(index: SelectIndex, capacities: Capacities, oversize: str = "error") -> Eligibility:
    """Rows of the index that fit into a micro-batch of their own; unusable rows are listed, never silently gone.

    Args:
        oversize: `error` lists every sample that is too large; `drop` leaves it out and counts it.

    Raises:
        OversizeError: samples exceed a capacity under `error`; the text lists all of them.
        PlanError: an oversize policy that does not exist (yet).
    """
    _check_oversize_policy(oversize)
    reasons = {int(bad.sample_id): f"unusable: {bad.reason}" for bad in index.bad}
    usable = np.asarray(index.samples["confidence"]) != _UNUSABLE
    reasons |= {int(row): "unusable" for row in np.flatnonzero(~usable) if int(row) not in reasons}
    too_large = _oversize_reasons(index, capacities, exclude=reasons)
    if too_large and oversize == "error":
        lines = [
            f"  sample {row} (shard {index.shard(row)}, key {index.keys(row)}): {reason}"
            for row, reason in too_large.items()
        ]
        raise OversizeError(
            f"{len(too_large)} of {len(index)} samples exceed the capacity of a micro-batch:\n"
            + "\n".join(lines)
            + "\nRaise the capacity, or leave them out with the oversize policy 'drop'."
        )
    reasons |= {row: f"oversize: {reason}" for row, reason in too_large.items()}
    keep = np.ones(len(index), dtype=np.bool_)
    keep[list(reasons)] = False
    dropped = tuple(Dropped(sample_id=row, reason=reasons[row]) for row in sorted(reasons))
    return Eligibility(ids=np.flatnonzero(keep).astype(np.int64), dropped=dropped)


def _check_oversize_policy(oversize: str) -> None:
    if oversize in _LATER_POLICIES:
        raise PlanError(f"oversize policy {oversize!r} is not available yet; available: error, drop")
    if oversize not in ("error", "drop"):
        raise PlanError(f"oversize policy {oversize!r} does not exist; available: error, drop")


def _oversize_reasons(index: SelectIndex, capacities: Capacities, exclude: dict[int, str]) -> dict[int, str]:
    columns = {"tokens": "llm_tokens", "patches": "patches", "items": "num_items"}
    found: dict[int, list[str]] = {}
    for name, limit in capacities.limits():
        column: NDArray[Any] = np.asarray(index.samples[columns[name]])
        for row in np.flatnonzero(column > limit).tolist():
            if row not in exclude:
                found.setdefault(row, []).append(f"{int(column[row])} {name} > {limit}")
    return {row: ", ".join(found[row]) for row in sorted(found)}


def split_held_out(ids: ArrayLike, share: float, seed: int) -> tuple[Int64Array, Int64Array]:
    """(train ids, held-out ids), both in the order of `ids`; pure in (ids, share, seed), blind to the layout.

    At least one sample is held out when share > 0 and there are two or more, and at least one is left to train on.
    """
    rows = np.asarray(ids, dtype=np.int64)
    if not 0.0 <= share < 1.0:
        raise PlanError(f"held-out share {share} is outside [0, 1)")
    if share == 0.0 or len(rows) < 2:
        return rows, rows[:0]
    num_held_out = min(max(1, round(share * len(rows))), len(rows) - 1)
    ranking = np.argsort(_keys(rows, seed), kind="stable")
    held_out = np.zeros(len(rows), dtype=np.bool_)
    held_out[ranking[:num_held_out]] = True
    return rows[~held_out], rows[held_out]


def _keys(rows: Int64Array, seed: int) -> NDArray[np.uint64]:
    """One random word per row, a function of (seed, row) alone."""
    check_key(seed, 0)
    # The counter is 256 bits; its top word separates the streams.
    bits = np.random.Philox(counter=_HELD_OUT_STREAM << 192, key=seed)
    words: NDArray[np.uint64] = bits.random_raw(int(rows.max()) + 1)
    return words[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """Where a step lies: [cursor, stop) in the order of its epoch."""

    step: int
    epoch: int
    cursor: int
    stop: int


def steps_per_epoch(num_samples: int, global_batch_size: int, drop_last: bool = False) -> int:
    """Optimizer steps of one epoch; without `drop_last` the last one may hold fewer samples.

    Raises:
        PlanError: nothing to train on, or fewer samples than a batch under `drop_last`.
    """
    if global_batch_size < 1:
        raise PlanError(f"global_batch_size={global_batch_size}: a step holds at least one sample")
    if num_samples < 1:
        raise PlanError(
            "no samples to train on: the dataset is empty, or every sample was dropped as unusable or oversize; "
            "see the list of dropped samples"
        )
    steps = num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)
    if steps == 0:
        raise PlanError(
            f"{num_samples} samples do not fill one batch of {global_batch_size} and drop_last leaves none; "
            f"set global_batch_size to at most {num_samples} or keep the last batch"
        )
    return steps


def num_steps(num_samples: int, global_batch_size: int, epochs: int, drop_last: bool = False) -> int:
    """Optimizer steps of a run over `epochs`, known before step 1."""
    if epochs < 1:
        raise PlanError(f"epochs={epochs}: a run has at least one")
    return epochs * steps_per_epoch(num_samples, global_batch_size, drop_last)


def step_range(step: int, *, num_samples: int, global_batch_size: int, drop_last: bool = False) -> StepRange:
    """Where step `step` (from 0) lies; epochs follow each other without an end."""
    per_epoch = steps_per_epoch(num_samples, global_batch_size, drop_last)
    if step < 0:
        raise PlanError(f"step={step}: steps count from 0")
    epoch, index = divmod(step, per_epoch)
    cursor = index * global_batch_size
    return StepRange(step=step, epoch=epoch, cursor=cursor, stop=min(cursor + global_batch_size, num_samples))


class Selector(Protocol):
    """What decides the samples of every step: one set of samples (`StepSelector`) or a mixture of several."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every sample once; of a mixture, what it calls an epoch."""

    def step_ids(self, step: int) -> tuple[StepRange, Int64Array]:
        """Where step `step` (from 0) lies and its sample ids in selection order; pure, in any order of asking."""


class StepSelector:
    """Sample ids of any step of a run.

    Args:
        ids: eligible rows to train on.
        seed: of the epoch order.
        global_batch_size: samples per step.
        drop_last: leave out the short step at the end of an epoch.
        shuffle, groups, block_shards: how an epoch is permuted, see `balancer.shuffle.EpochOrder`.

    Raises:
        PlanError: nothing to train on, or options that do not fit together.
    """

    def __init__(
        self,
        ids: ArrayLike,
        *,
        seed: int,
        global_batch_size: int,
        drop_last: bool = False,
        shuffle: Shuffle = True,
        groups: ArrayLike | None = None,
        block_shards: int = DEFAULT_BLOCK_SHARDS,
    ) -> None:
        rows = np.asarray(ids, dtype=np.int64)
        self._num_samples, self._global_batch_size, self._drop_last = len(rows), global_batch_size, drop_last
        self.steps_per_epoch = steps_per_epoch(len(rows), global_batch_size, drop_last)
        self._order = EpochOrder(rows, seed=seed, shuffle=shuffle, groups=groups, block_shards=block_shards)

    def step_ids(self, step: int) -> tuple[StepRange, Int64Array]:
        """Where step `step` lies and its sample ids in selection order, int64 [<= global_batch_size]."""
        where = step_range(
            step,
            num_samples=self._num_samples,
            global_batch_size=self._global_batch_size,
            drop_last=self._drop_last,
        )
        return where, self._order.take(where.epoch, np.arange(where.cursor, where.stop))


def step_ids(
    ids: ArrayLike, step: int, *, seed: int, global_batch_size: int, drop_last: bool = False, shuffle: Shuffle = True
) -> tuple[StepRange, Int64Array]:
    """One step alone; `StepSelector` is the form for loops."""
    selector = StepSelector(ids, seed=seed, global_batch_size=global_batch_size, drop_last=drop_last, shuffle=shuffle)
    return selector.step_ids(step)
