"""Which samples a step holds, before anything is known about policy or layout.

    index --eligible_ids--> ids --split_held_out--> train ids --shuffle(seed, epoch)--> order
    step k of an epoch = order[k * global_batch_size : (k + 1) * global_batch_size]        G samples

    n = 10, G = 4   tail "pad"     4 4 2      the last step is short; cells without samples stay empty
                    tail "drop"    4 4        2 samples of each epoch are left out, other ones every time, counted
                    tail "repeat"  4 4 2+2    filled with the first samples of the same epoch's order, counted

Everything is a pure function of (ids, seed, epoch, step); the order itself is never stored, so step 10^6 of 10^9
samples is known as fast as step 0. How an epoch is permuted is in `balancer.shuffle`. Held-out samples are drawn by raw
64-bit Philox words, keyed by sample id: the raw stream is the same in every NumPy version (`Generator.permutation`
promises no such thing), and removing a sample leaves the draw of the others as it was.

Steps of equal tokens instead of equal counts are in `balancer.token_steps`, exchange of samples between neighbouring
steps in `balancer.lookahead`, what becomes of samples that are too large in `balancer.oversize`.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.cost_model import CostModel
from balancer.counts import IndexLike, Int64Array, StepCounts
from balancer.errors import OversizeError, PlanError
from balancer.permutation import check_key
from balancer.plan import Capacities
from balancer.shuffle import DEFAULT_BLOCK_SHARDS, EpochOrder, Shuffle

TailPolicy = Literal["pad", "drop", "repeat"]
TAILS: tuple[TailPolicy, ...] = ("pad", "drop", "repeat")
OversizeRest = Literal["error", "drop"]
# Kept apart from other streams by the Philox counter; 0 was the epoch order's.
_HELD_OUT_STREAM = 1
_UNUSABLE = 3
_CHUNK = 2**16  # samples whose bytes are modelled at once


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
    """A sample that no step will hold, and why: `oversize: ...`, `unusable: <code>`, or of one epoch `tail: ...`."""

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


def eligible_ids(
    index: SelectIndex,
    capacities: Capacities,
    oversize: str = "error",
    *,
    why: Mapping[int, str] | None = None,
    cost_model: CostModel | None = None,
) -> Eligibility:
    """Rows of the index that fit into a micro-batch of their own; unusable rows are listed, never silently gone.

    Args:
        oversize: `error` lists every sample that is too large; `drop` leaves it out and counts it. The policies that
            change samples so that they fit (`shrink`, `truncate_text`) come before: `balancer.oversize.fit_oversize`.
        why: sample -> why it could not be made to fit, where that was tried; instead of the numbers alone.
        cost_model: for a limit on modelled bytes.

    Raises:
        OversizeError: samples exceed a capacity under `error`; the text lists all of them.
        PlanError: an oversize policy that does not exist.
    """
    if oversize not in ("error", "drop"):
        raise PlanError(
            f"oversize policy {oversize!r} does not exist here; available: error, drop (shrink and truncate_text "
            f"change samples and are applied before, by balancer.oversize.fit_oversize)"
        )
    reasons = {int(bad.sample_id): f"unusable: {bad.reason}" for bad in index.bad}
    usable = np.asarray(index.samples["confidence"]) != _UNUSABLE
    reasons |= {int(row): "unusable" for row in np.flatnonzero(~usable) if int(row) not in reasons}
    too_large = oversize_reasons(index, capacities, exclude=reasons, cost_model=cost_model)
    too_large |= {row: reason for row, reason in (why or {}).items() if row in too_large}
    if too_large and oversize == "error":
        lines = [
            f"  sample {row} (shard {index.shard(row)}, key {index.keys(row)}): {reason}"
            for row, reason in too_large.items()
        ]
        raise OversizeError(
            f"{len(too_large)} of {len(index)} samples exceed the capacity of a micro-batch:\n"
            + "\n".join(lines)
            + "\nRaise the capacity, leave them out with the oversize policy 'drop', or make them fit with 'shrink' or "
            "'truncate_text' (balancer-train)."
        )
    reasons |= {row: f"oversize: {reason}" for row, reason in too_large.items()}
    keep = np.ones(len(index), dtype=np.bool_)
    keep[list(reasons)] = False
    dropped = tuple(Dropped(sample_id=row, reason=reasons[row]) for row in sorted(reasons))
    return Eligibility(ids=np.flatnonzero(keep).astype(np.int64), dropped=dropped)


def oversize_reasons(
    index: SelectIndex,
    capacities: Capacities,
    exclude: Container[int] = (),
    *,
    cost_model: CostModel | None = None,
) -> dict[int, str]:
    """Sample -> which capacities it exceeds on its own, ascending; those in `exclude` are passed over.

    Args:
        cost_model: for a limit on modelled bytes; without one that limit is looked at step by step only.
    """
    columns = {"tokens": "llm_tokens", "patches": "patches", "items": "num_items"}
    found: dict[int, list[str]] = {}
    for name, limit in capacities.limits():
        if name not in columns:
            continue
        column: NDArray[Any] = np.asarray(index.samples[columns[name]])
        for row in np.flatnonzero(column > limit).tolist():
            if row not in exclude:
                found.setdefault(row, []).append(f"{int(column[row])} {name} > {limit}")
    if capacities.activation_bytes is not None and cost_model is not None:
        for row, reason in _too_many_bytes(index, capacities, cost_model):
            if row not in exclude:
                found.setdefault(row, []).append(reason)
    return {row: ", ".join(found[row]) for row in sorted(found)}


def _too_many_bytes(index: SelectIndex, capacities: Capacities, cost_model: CostModel) -> Iterator[tuple[int, str]]:
    """(sample, reason) of samples whose modelled bytes exceed the limit on some stage."""
    for start in range(0, len(index), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(index)))
        limits, sizes = capacities.table(StepCounts.from_index(index, rows), cost_model)
        for column, (name, limit) in enumerate(limits):
            if name.startswith("activation_bytes"):
                for row in np.flatnonzero(sizes[:, column] > limit).tolist():
                    yield start + row, f"{int(sizes[row, column])} {name} > {limit}"


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


def check_tail(tail: str) -> TailPolicy:
    """`tail` as one of its names.

    Raises:
        PlanError: another name.
    """
    if tail not in TAILS:
        raise PlanError(f"tail={tail!r} is not one of: {', '.join(TAILS)}")
    return tail


def steps_per_epoch(num_samples: int, global_batch_size: int, tail: TailPolicy = "pad") -> int:
    """Optimizer steps of one epoch; under `pad` the last one may hold fewer samples, `drop` has none such.

    Raises:
        PlanError: nothing to train on, or fewer samples than a batch under `drop`.
    """
    check_tail(tail)
    if global_batch_size < 1:
        raise PlanError(f"global_batch_size={global_batch_size}: a step holds at least one sample")
    check_any_samples(num_samples)
    steps = num_samples // global_batch_size if tail == "drop" else -(-num_samples // global_batch_size)
    if steps == 0:
        raise PlanError(
            f"{num_samples} samples do not fill one batch of {global_batch_size} and tail='drop' leaves none; "
            f"set global_batch_size to at most {num_samples} or choose tail='pad'"
        )
    return steps


def check_any_samples(num_samples: int) -> None:
    """Raise PlanError where there is nothing to train on."""
    if num_samples < 1:
        raise PlanError(
            "no samples to train on: the dataset is empty, or every sample was dropped as unusable or oversize; "
            "see the list of dropped samples"
        )


def num_steps(num_samples: int, global_batch_size: int, epochs: int, tail: TailPolicy = "pad") -> int:
    """Optimizer steps of a run over `epochs`, known before step 1."""
    if epochs < 1:
        raise PlanError(f"epochs={epochs}: a run has at least one")
    return epochs * steps_per_epoch(num_samples, global_batch_size, tail)


def step_range(step: int, *, num_samples: int, global_batch_size: int, tail: TailPolicy = "pad") -> StepRange:
    """Where step `step` (from 0) lies; epochs follow each other without an end."""
    per_epoch = steps_per_epoch(num_samples, global_batch_size, tail)
    if step < 0:
        raise PlanError(f"step={step}: steps count from 0")
    epoch, index = divmod(step, per_epoch)
    cursor = index * global_batch_size
    return StepRange(step=step, epoch=epoch, cursor=cursor, stop=min(cursor + global_batch_size, num_samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What the end of every epoch looks like: counts that are shown before step 1 and in the summary.

    Attributes:
        policy: see the module.
        num_short: samples of the last step before anything is done about it; 0: it is a whole one.
        num_dropped, num_repeated: samples that an epoch leaves out, or holds a second time.
    """

    policy: TailPolicy
    num_short: int = 0
    num_dropped: int = 0
    num_repeated: int = 0

    @classmethod
    def of(cls, num_samples: int, global_batch_size: int, policy: TailPolicy) -> "Tail":
        """The tail of epochs of `num_samples`."""
        whole, rest = divmod(num_samples, global_batch_size)
        # A sample at most once per step: an epoch of less than one batch has nothing to repeat.
        repeated = global_batch_size - rest if policy == "repeat" and rest and whole else 0
        return cls(
            policy=policy,
            num_short=rest,
            num_dropped=rest if policy == "drop" else 0,
            num_repeated=repeated,
        )

    def text(self) -> str:
        """In words; "" where every step is whole."""
        if not self.num_short:
            return ""
        if self.num_dropped:
            return f"{self.num_dropped} samples are left out of every epoch (tail=drop), other ones each time"
        if self.num_repeated:
            return f"{self.num_repeated} samples of every epoch come twice, to fill its last step (tail=repeat)"
        return f"the last step of every epoch holds {self.num_short} samples (tail={self.policy})"


class Selector(Protocol):
    """What decides the samples of every step: one set of samples (`StepSelector`) or a mixture of several."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps that visit every sample once; of a mixture, what it calls an epoch."""

    def step_ids(self, step: int) -> tuple[StepRange, Int64Array]:
        """Where step `step` (from 0) lies and its sample ids in selection order; pure, in any order of asking."""


class StepSelector:
    """Sample ids of any step of a run, by sample count.

    Args:
        ids: eligible rows to train on.
        seed: of the epoch order.
        global_batch_size: samples per step.
        tail: what becomes of the samples at the end of an epoch that do not fill a step, see the module.
        shuffle, groups, block_shards: how an epoch is permuted, see `balancer.shuffle.EpochOrder`.

    Attributes:
        steps_per_epoch: steps of every epoch.
        tail: what the end of every epoch looks like.

    Raises:
        PlanError: nothing to train on, or options that do not fit together.
    """

    def __init__(
        self,
        ids: ArrayLike,
        *,
        seed: int,
        global_batch_size: int,
        tail: TailPolicy = "pad",
        shuffle: Shuffle = True,
        groups: ArrayLike | None = None,
        block_shards: int = DEFAULT_BLOCK_SHARDS,
    ) -> None:
        rows = np.asarray(ids, dtype=np.int64)
        self._num_samples, self._global_batch_size = len(rows), global_batch_size
        self.steps_per_epoch = steps_per_epoch(len(rows), global_batch_size, tail)
        self.tail = Tail.of(len(rows), global_batch_size, tail)
        self._order = EpochOrder(rows, seed=seed, shuffle=shuffle, groups=groups, block_shards=block_shards)

    def step_ids(self, step: int) -> tuple[StepRange, Int64Array]:
        """Where step `step` lies and its sample ids in selection order, int64 [<= global_batch_size].

        A last step that is filled up (`repeat`) holds what its range says, then the first samples of the epoch.
        """
        where = step_range(
            step,
            num_samples=self._num_samples,
            global_batch_size=self._global_batch_size,
            tail=self.tail.policy,
        )
        positions = np.arange(where.cursor, where.stop)
        if self.tail.num_repeated and where.stop - where.cursor < self._global_batch_size:
            positions = np.concatenate([positions, np.arange(self.tail.num_repeated)])
        return where, self._order.take(where.epoch, positions)

    def is_whole(self, step: int) -> bool:
        """Whether the samples of a step are as many as asked for, none of them a repeated one."""
        index = step % self.steps_per_epoch
        return (index + 1) * self._global_batch_size <= self._num_samples

    def tail_dropped(self, epoch: int) -> Int64Array:
        """int64 [num_dropped]: the samples that epoch `epoch` leaves out."""
        return self._order.take(epoch, np.arange(self._num_samples - self.tail.num_dropped, self._num_samples))


def step_ids(
    ids: ArrayLike,
    step: int,
    *,
    seed: int,
    global_batch_size: int,
    tail: TailPolicy = "pad",
    shuffle: Shuffle = True,
) -> tuple[StepRange, Int64Array]:
    """One step alone; `StepSelector` is the form for loops."""
    selector = StepSelector(ids, seed=seed, global_batch_size=global_batch_size, tail=tail, shuffle=shuffle)
    return selector.step_ids(step)
