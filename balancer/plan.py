"""The plan of one optimizer step: which sample runs where, what it should cost, how good that is.

    StepCounts [n]  --plan_step-->  StepPlan: sample -> (dp_rank, microbatch, slot)
                                              cells [R, M]: tokens, patches, samples      times [R, M, S] in ns

Every rank derives the same plan from the same inputs without communication; two digests say whether that held. They
are sha256 over named fields, integers as little-endian int64: `inputs_digest` over what went in, `digest` over what
came out. Equal inputs with unequal plans are a bug or another version; unequal inputs another index or config.

A cell (rank, micro-batch) may be empty when a step has fewer samples than cells; no act runs for it.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array, StepCounts
from balancer.errors import PlanError, PlanMismatchError

PLAN_FORMAT_VERSION = 1
Int32Array = NDArray[np.int32]

# Name -> dtype and axes; n samples, R DP ranks, M micro-batches, S stages.
ARRAY_FIELDS: Mapping[str, tuple[type[np.signedinteger[Any]], str]] = {
    "sample_ids": (np.int64, "n"),
    "dp_rank": (np.int32, "n"),
    "microbatch": (np.int32, "n"),
    "slot": (np.int32, "n"),
    "llm_tokens": (np.int64, "RM"),
    "patches": (np.int64, "RM"),
    "visual_tokens": (np.int64, "RM"),
    "label_tokens": (np.int64, "RM"),
    "num_samples": (np.int64, "RM"),
    "forward_ns": (np.int64, "RMS"),
    "backward_ns": (np.int64, "RMS"),
    "rank_makespan_ns": (np.int64, "R"),
}
# Derived ratios: reported, but not part of the digest, which covers integers and names only.
_RATIO_FIELDS = ("imbalance_before", "imbalance_after", "fill")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Hard limits of one (rank, micro-batch) cell; None: no limit.

    Attributes:
        tokens: LLM tokens.
        patches: vision-tower patches.
        items: media items.
    """

    tokens: int
    patches: int | None = None
    items: int | None = None

    def __post_init__(self) -> None:
        for name, limit in self.limits():
            if limit < 1:
                raise PlanError(f"capacity {name}={limit}: a capacity is at least 1; leave it out for no limit")

    def limits(self) -> tuple[tuple[str, int], ...]:
        """(name, limit) of every limit that is set: tokens, patches, items."""
        named = (("tokens", self.tokens), ("patches", self.patches), ("items", self.items))
        return tuple((name, limit) for name, limit in named if limit is not None)

    def sizes(self, counts: StepCounts) -> Int64Array:
        """Sizes of the samples in the units of `limits()`, int64 [n, d]."""
        columns = {"tokens": counts.llm_tokens, "patches": counts.patches, "items": counts.num_items}
        return np.stack([columns[name] for name, _ in self.limits()], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Placement of the samples of one step, its predicted times and a certificate of its quality.

    Attributes:
        format_version: of the serialised form.
        step: optimizer step, from 0.
        epoch, cursor: where in the epoch order the step starts.
        dp_size, num_microbatches, num_stages: R, M, S.
        policy: the policy asked for.
        policy_used: the policy whose placement was taken; differs where `note` says why.
        schedule: name of the pipeline schedule the times assume.
        sample_ids, dp_rank, microbatch, slot: [n] in the order of selection; `slot` is the place within the cell.
        llm_tokens, patches, visual_tokens, label_tokens, num_samples: int64 [R, M], sums over the samples of a cell.
        forward_ns, backward_ns: int64 [R, M, S], predicted.
        rank_makespan_ns: int64 [R], simulated time of every replica.
        makespan_ns: the largest of them, which is the step.
        lower_bound_ns: no placement of these samples takes less.
        makespan_before_ns: the same simulation for `sequential`.
        imbalance_before, imbalance_after: max / mean over DP ranks of predicted busy time.
        fill: tokens over token capacity of the cells that hold samples.
        inputs_digest, digest: see the module.
    """

    format_version: int = PLAN_FORMAT_VERSION
    step: int
    epoch: int
    cursor: int
    dp_size: int
    num_microbatches: int
    num_stages: int
    policy: str
    policy_used: str
    schedule: str
    note: str = ""
    sample_ids: Int64Array
    dp_rank: Int32Array
    microbatch: Int32Array
    slot: Int32Array
    llm_tokens: Int64Array
    patches: Int64Array
    visual_tokens: Int64Array
    label_tokens: Int64Array
    num_samples: Int64Array
    forward_ns: Int64Array
    backward_ns: Int64Array
    rank_makespan_ns: Int64Array
    makespan_ns: int
    lower_bound_ns: int
    makespan_before_ns: int
    imbalance_before: float
    imbalance_after: float
    fill: float
    inputs_digest: str
    digest: str = ""

    def __post_init__(self) -> None:
        lengths = {"n": len(self.sample_ids), "R": self.dp_size, "M": self.num_microbatches, "S": self.num_stages}
        for name, (dtype, axes) in ARRAY_FIELDS.items():
            array = np.array(getattr(self, name), dtype=dtype)
            shape = tuple(lengths[axis] for axis in axes)
            if array.shape != shape:
                raise PlanError(f"plan field {name} has shape {array.shape}; expected {shape}")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        if not self.digest:
            object.__setattr__(self, "digest", self._compute_digest())

    def _compute_digest(self) -> str:
        skipped = {*_RATIO_FIELDS, "inputs_digest", "digest", "note"}
        return digest_fields({field.name: getattr(self, field.name) for field in fields(self)}, skip=skipped)

    @property
    def gap(self) -> float:
        """makespan / lower bound - 1; NaN where nothing costs anything."""
        return self.makespan_ns / self.lower_bound_ns - 1.0 if self.lower_bound_ns else math.nan

    @property
    def num_label_tokens(self) -> int:
        """Label tokens of the whole step: the denominator of a token-mean loss."""
        return int(self.label_tokens.sum())

    def positions(self, dp_rank: int, microbatch: int) -> Int64Array:
        """Rows of `sample_ids` in the cell, in slot order, int64 [k]."""
        if not (0 <= dp_rank < self.dp_size and 0 <= microbatch < self.num_microbatches):
            raise PlanError(
                f"cell ({dp_rank}, {microbatch}) is outside a plan of {self.dp_size} ranks x "
                f"{self.num_microbatches} micro-batches"
            )
        rows = np.flatnonzero((self.dp_rank == dp_rank) & (self.microbatch == microbatch)).astype(np.int64)
        return rows[np.argsort(self.slot[rows], kind="stable")]

    def members(self, dp_rank: int, microbatch: int) -> Int64Array:
        """Sample ids of the cell, in slot order, int64 [k]."""
        return self.sample_ids[self.positions(dp_rank, microbatch)]

    def absent(self, dp_rank: int) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) pairs without work on this replica: encoders without patches, all of an empty cell."""
        pairs: set[tuple[int, int]] = set()
        for microbatch in range(self.num_microbatches):
            if self.num_samples[dp_rank, microbatch] == 0:
                pairs.update((stage, microbatch) for stage in range(self.num_stages))
            elif self.patches[dp_rank, microbatch] == 0:
                pairs.add((0, microbatch))
        return frozenset(pairs)

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives the same plan back."""
        content = {
            field.name: value.tolist() if isinstance(value := getattr(self, field.name), np.ndarray) else value
            for field in fields(self)
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "StepPlan":
        """The plan that `to_json` wrote.

        Raises:
            PlanError: no plan, another format version, or content that does not match its digest.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"not a step plan: {error}") from error
        if not isinstance(content, dict) or content.get("format_version") != PLAN_FORMAT_VERSION:
            found = content.get("format_version") if isinstance(content, dict) else type(content).__name__
            raise PlanError(f"step plan of format {found}; this version reads format {PLAN_FORMAT_VERSION}")
        names = {field.name for field in fields(cls)}
        if set(content) != names:
            raise PlanError(f"step plan with missing or unknown fields: {sorted(set(content) ^ names)}")
        for name, (_, axes) in ARRAY_FIELDS.items():
            if not content[name] and axes == "n":
                raise PlanError(f"step plan without samples: {name} is empty")
        plan = cls(**content)
        if plan.digest != plan._compute_digest():
            raise PlanError(f"step plan of step {plan.step} does not match its digest: the file was changed or damaged")
        return plan


def digest_fields(named: Mapping[str, object], *, skip: set[str] | frozenset[str] = frozenset()) -> str:
    """sha256 hex over names and values; integers and integer arrays as little-endian int64 with their shape."""
    digest = hashlib.sha256()
    for name, value in named.items():
        if name in skip:
            continue
        digest.update(f"{name}:".encode())
        if isinstance(value, str):
            content = value.encode()
            shape: tuple[int, ...] = (len(content),)
        elif isinstance(value, (int, np.integer, np.ndarray)):
            array = np.asarray(value).astype("<i8")
            shape, content = array.shape, array.tobytes()
        else:
            raise PlanError(f"{name}={value!r} cannot be digested: digests cover integers and names only")
        digest.update(f"{shape}:".encode())
        digest.update(content)
    return digest.hexdigest()


def verify(plan: StepPlan, counts: StepCounts, capacities: Capacities) -> None:
    """Check conservation and hard capacities of a plan against the counts it was made from.

    Raises:
        PlanError: a sample lost, doubled or foreign; sums that do not follow from the samples; a capacity exceeded.
    """
    missing = np.setdiff1d(counts.sample_ids, plan.sample_ids).tolist()
    foreign = np.setdiff1d(plan.sample_ids, counts.sample_ids).tolist()
    if missing or foreign or len(plan.sample_ids) != len(counts):
        raise PlanError(
            f"plan of step {plan.step} holds {len(plan.sample_ids)} samples for {len(counts)} selected: "
            f"missing {missing}, foreign {foreign}"
        )
    if not np.array_equal(plan.sample_ids, counts.sample_ids):
        raise PlanError(f"plan of step {plan.step} lists its samples in another order than they were selected")
    _verify_slots(plan)
    cell = plan.dp_rank.astype(np.int64) * plan.num_microbatches + plan.microbatch
    shape = (plan.dp_size, plan.num_microbatches)
    for name in ("llm_tokens", "patches", "visual_tokens", "label_tokens"):
        sums = _cell_sums(cell, getattr(counts, name), shape)
        if not np.array_equal(sums, getattr(plan, name)):
            raise PlanError(f"plan of step {plan.step}: {name} per cell do not add up from its samples")
    for (name, limit), column in zip(capacities.limits(), capacities.sizes(counts).T, strict=True):
        loads = _cell_sums(cell, column, shape)
        if int(loads.max()) > limit:
            rank, microbatch = (int(index) for index in np.unravel_index(int(loads.argmax()), shape))
            raise PlanError(
                f"plan of step {plan.step}: rank {rank}, micro-batch {microbatch} holds {int(loads.max())} {name}, "
                f"the capacity is {limit}"
            )


def _verify_slots(plan: StepPlan) -> None:
    for rank in range(plan.dp_size):
        for microbatch in range(plan.num_microbatches):
            slots = plan.slot[plan.positions(rank, microbatch)]
            if not np.array_equal(slots, np.arange(len(slots))) or len(slots) != plan.num_samples[rank, microbatch]:
                raise PlanError(
                    f"plan of step {plan.step}: slots {slots.tolist()} of rank {rank}, micro-batch {microbatch} "
                    f"are not 0 to {int(plan.num_samples[rank, microbatch]) - 1}"
                )
    inside = (plan.dp_rank >= 0) & (plan.dp_rank < plan.dp_size)
    inside &= (plan.microbatch >= 0) & (plan.microbatch < plan.num_microbatches)
    if not inside.all():
        raise PlanError(f"plan of step {plan.step}: samples {plan.sample_ids[~inside].tolist()} are in no cell")


def _cell_sums(cell: Int64Array, column: Int64Array, shape: tuple[int, int]) -> Int64Array:
    sums = np.zeros(shape[0] * shape[1], dtype=np.int64)
    np.add.at(sums, cell, column)
    return sums.reshape(shape)


def require_same(digests: Sequence[tuple[str, str]]) -> None:
    """Check (inputs_digest, digest) gathered from all ranks, in rank order, before the first forward.

    Raises:
        PlanMismatchError: on every rank alike; says which ranks differ and whether inputs or plans do.
    """
    for index, what, remedy in (
        (0, "planned from other inputs", "give every rank the same index, configuration, seed and step"),
        (1, "made another plan of the same inputs", "install the same version on every host"),
    ):
        values = [pair[index] for pair in digests]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            raise PlanMismatchError(
                f"ranks {others} {what} than rank 0 ({values[others[0]][:12]} instead of {values[0][:12]}); {remedy}"
            )
