"""The plan of one optimizer step: which sample runs where, what it should cost, how good that is.

    StepCounts [n]  --plan_step-->  StepPlan: sample -> (dp_rank, microbatch, slot)                    [n]
                                              media item -> (encoder_rank, unit), spread encoder only  [k]
                                              cells [R, M]: tokens, patches, samples      times [R, M, S] in ns
                                              bounds: no placement takes less, whatever it does

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

import numpy as np
from numpy.typing import NDArray

from balancer.cost_model import CostModel
from balancer.counts import Int64Array, StepCounts
from balancer.errors import PlanError, PlanMismatchError
from balancer.plan_fields import (
    ARRAY_FIELDS,
    BINDINGS,
    BOUNDS,
    RATIO_FIELDS,
    TEXT_FIELDS,
    WHOLE_FIELDS,
    array_field,
    decoded,
    dropped_field,
    ratio_field,
    text_field,
    whole_field,
)
from balancer.whole_numbers import shown, whole_number

__all__ = [
    "ARRAY_FIELDS",
    "BINDINGS",
    "BOUNDS",
    "MAX_CAPACITY",
    "PLAN_FORMAT_VERSION",
    "Capacities",
    "Int32Array",
    "StepPlan",
    "digest_fields",
    "require_same",
]

PLAN_FORMAT_VERSION = 2
Int32Array = NDArray[np.int32]

_HASHED_ALONE = 4096
# Largest capacity of a cell: of all micro-batches of a rank together (2**20, see `balancer.layout`) it stays within the
# 2**62 that packing counts in. 4 TiB of activations are beyond any device.
MAX_CAPACITY = 2**42


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Hard limits of one (rank, micro-batch) cell, whole numbers from 1 to `MAX_CAPACITY`; None: no limit.

    Attributes:
        tokens: LLM tokens.
        patches: vision-tower patches.
        items: media items.
        activation_bytes: modelled bytes of the activations that one micro-batch leaves on any one stage.

    Raises:
        PlanError: no whole number (also 4.0, true, text), outside the range, or no limit on tokens.
    """

    tokens: int
    patches: int | None = None
    items: int | None = None
    activation_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is None and field.name != "tokens":
                continue
            limit = whole_number(
                f"capacity {field.name}",
                given,
                error=PlanError,
                below="a capacity is at least 1; leave it out for no limit",
                above=f"a capacity is at most {MAX_CAPACITY} (2**42); plans count sums of them in 64 bits",
                at_least=1,
                at_most=MAX_CAPACITY,
            )
            object.__setattr__(self, field.name, limit)

    def limits(self) -> tuple[tuple[str, int], ...]:
        """(name, limit) of every limit that is set: tokens, patches, items, activation_bytes."""
        named = (
            ("tokens", self.tokens),
            ("patches", self.patches),
            ("items", self.items),
            ("activation_bytes", self.activation_bytes),
        )
        return tuple((name, limit) for name, limit in named if limit is not None)

    def table(
        self, counts: StepCounts, cost_model: CostModel | None = None
    ) -> tuple[tuple[tuple[str, int], ...], Int64Array]:
        """Limits as (name, limit) [d] and sizes of the samples in their units, int64 [n, d].

        Bytes have one column per stage that can be the one to bind; they are left out without a cost model.

        Raises:
            PlanError: a limit on bytes and a cost model that does not know any.
        """
        columns = {"tokens": counts.llm_tokens, "patches": counts.patches, "items": counts.num_items}
        limits = [(name, limit) for name, limit in self.limits() if name in columns]
        sizes = [columns[name] for name, _ in limits]
        if self.activation_bytes is not None and cost_model is not None:
            for stage, room, column in _binding_bytes(self.activation_bytes, cost_model, counts):
                limits.append((f"activation_bytes of stage {stage}", room))
                sizes.append(column)
        return tuple(limits), np.stack(sizes, axis=1)


def _binding_bytes(limit: int, cost_model: CostModel, counts: StepCounts) -> list[tuple[int, int, Int64Array]]:
    """(stage, bytes left for samples, bytes of the samples int64 [n]) of stages that can be the first to fill up.

    Raises:
        PlanError: a cost model without bytes, or a limit below what a micro-batch takes without any sample.
    """
    table, constant = cost_model.activation_bytes(counts), cost_model.activation_constant_bytes()
    if not table.shape[1]:
        raise PlanError(
            "a capacity of activation_bytes needs a cost model with memory terms; leave it out, or build the model "
            "with CostModel.from_config"
        )
    if int(constant.max()) >= limit:
        raise PlanError(
            f"capacity activation_bytes={limit}: stage {int(constant.argmax())} takes {int(constant.max())} bytes "
            "for a micro-batch without any sample"
        )
    kept: list[tuple[int, int, Int64Array]] = []
    for stage in np.argsort(-table.sum(axis=0), kind="stable").tolist():
        column, room = np.ascontiguousarray(table[:, stage]), limit - int(constant[stage])
        # A stage that is nowhere above another one and has as much room never fills up first.
        if not any(room >= other_room and bool((column <= other).all()) for _, other_room, other in kept):
            kept.append((stage, room, column))
    return kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Placement of the samples of one step, its predicted times and a certificate of its quality.

    Attributes:
        format_version: of the serialised form.
        step: optimizer step, from 0.
        epoch, cursor: where in the epoch order the step starts.
        dp_size, num_microbatches, num_stages, num_pipeline_ranks: R, M, S, P.
        policy: the policy asked for.
        policy_used: the policy whose placement was taken; differs where `note` says why.
        schedule: name of the pipeline schedule the times assume.
        meet: where replicas wait for one another: `step`, `microbatch` or `unit`.
        binding: what stands between this plan and an even one: `data` (the placement or sizes of samples), `stage
            split`, `largest sample`, `capacity`, or `none` (within 2 % of the bound). `note` says more.
        stage_domains: domain of every stage, names joined by commas.
        routed: whether media items are exchanged inside units.
        sample_ids, dp_rank, microbatch, slot: [n] in the order of selection; `slot` is the place within the cell.
        cp_first_rank, cp_degree: int32 [n], the DP ranks first .. first + degree - 1 share the sample; `dp_rank` and 1
            where it is not split.
        item_row, encoder_rank, unit: int32 [k], with a spread encoder: row of the item's sample, pipeline rank inside
            the replica that encodes it, and unit; in the order of the item table. Empty where the encoder is a stage.
        stage_ranks: int32 [S], pipeline rank of every stage; -1 where it is spread.
        llm_tokens, patches, visual_tokens, label_tokens, num_samples: int64 [R, M], sums over the samples of a cell.
        encoder_patches: int64 [R, M], patches of the encoder act that is entry m; `patches` where nothing is routed.
        forward_ns, backward_ns, weight_ns: int64 [R, M, S], predicted; `weight_ns` is the part of the backward that
            schedules with split backwards may delay. With a spread encoder entry [:, m, 0] is the encoder act on rank
            m % P in the unit of m.
        rank_makespan_ns: int64 [R], simulated time of every replica by itself.
        stage_work_ns: int64 [P], work of every pipeline rank, summed over replicas.
        makespan_ns: simulated time of the step: the largest of them, and more where replicas meet inside the step.
        work_bound_ns, longest_bound_ns, granularity_bound_ns, pipeline_bound_ns: see `balancer.bounds`.
        lower_bound_ns: the largest of them; no placement of these samples takes less.
        makespan_before_ns: the same simulation for `sequential`.
        imbalance_before, imbalance_after: max / mean over DP ranks of predicted busy time.
        label_imbalance_before, label_imbalance_after: the same of label tokens.
        fill: tokens over token capacity of the cells that hold samples.
        dropped: (sample id, reason) of samples that were selected for the step and are not in it.
        inputs_digest, digest: see the module.
    """

    format_version: int = PLAN_FORMAT_VERSION
    step: int
    epoch: int
    cursor: int
    dp_size: int
    num_microbatches: int
    num_stages: int
    num_pipeline_ranks: int
    policy: str
    policy_used: str
    schedule: str
    meet: str = "step"
    binding: str = "data"
    note: str = ""
    stage_domains: str
    routed: bool = False
    sample_ids: Int64Array
    dp_rank: Int32Array
    microbatch: Int32Array
    slot: Int32Array
    cp_first_rank: Int32Array
    cp_degree: Int32Array
    item_row: Int32Array
    encoder_rank: Int32Array
    unit: Int32Array
    stage_ranks: Int32Array
    llm_tokens: Int64Array
    patches: Int64Array
    encoder_patches: Int64Array
    visual_tokens: Int64Array
    label_tokens: Int64Array
    num_samples: Int64Array
    forward_ns: Int64Array
    backward_ns: Int64Array
    weight_ns: Int64Array
    rank_makespan_ns: Int64Array
    stage_work_ns: Int64Array
    makespan_ns: int
    work_bound_ns: int
    longest_bound_ns: int
    granularity_bound_ns: int
    pipeline_bound_ns: int
    lower_bound_ns: int
    makespan_before_ns: int
    imbalance_before: float
    imbalance_after: float
    label_imbalance_before: float
    label_imbalance_after: float
    fill: float
    dropped: tuple[tuple[int, str], ...] = ()
    inputs_digest: str
    digest: str = ""

    def __post_init__(self) -> None:
        for name, (least, most) in WHOLE_FIELDS.items():
            self._set(name, whole_field(name, getattr(self, name), least, most))
        for name in TEXT_FIELDS:
            text_field(name, getattr(self, name))
        for name in RATIO_FIELDS:
            self._set(name, ratio_field(name, getattr(self, name)))
        if not isinstance(self.routed, bool | np.bool_):
            raise PlanError(f"routed={shown(self.routed)} is neither true nor false")
        self._set("routed", bool(self.routed))
        for name, (dtype, _) in ARRAY_FIELDS.items():
            self._set(name, array_field(name, getattr(self, name), dtype))
        lengths = {
            "n": self.sample_ids.size,
            "k": self.item_row.size,
            "R": self.dp_size,
            "P": self.num_pipeline_ranks,
            "M": self.num_microbatches,
            "S": self.num_stages,
        }
        for name, (_, axes) in ARRAY_FIELDS.items():
            shape, expected = getattr(self, name).shape, tuple([lengths[axis] for axis in axes])
            if shape != expected:
                raise PlanError(f"plan field {name} has shape {shape}; expected {expected}")
        self._set("dropped", dropped_field(self.dropped))
        if self.lower_bound_ns != max(getattr(self, name) for name in BOUNDS):
            raise PlanError(f"lower_bound_ns={self.lower_bound_ns} is not the largest of the plan's bounds")
        if self.binding not in BINDINGS:
            raise PlanError(f"binding={self.binding!r} does not exist; available: {', '.join(BINDINGS)}")
        if not self.digest:
            self._set("digest", self._compute_digest())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _compute_digest(self) -> str:
        skipped = {*RATIO_FIELDS, "inputs_digest", "digest", "note"}
        named = {name: getattr(self, name) for name in self.__slots__}
        reasons = "\n".join(f"{sample} {reason}" for sample, reason in self.dropped)
        return digest_fields(named | {"dropped": reasons}, skip=skipped)

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

    @property
    def has_encoder(self) -> bool:
        """Whether stage 0 is the encoder, which runs only where there are patches."""
        return self.stage_domains.startswith("encoder")

    def absent(self, dp_rank: int) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) pairs without work on this replica: encoders without patches, all of an empty cell."""
        pairs: set[tuple[int, int]] = set()
        for microbatch in range(self.num_microbatches):
            if self.num_samples[dp_rank, microbatch] == 0:
                pairs.update((stage, microbatch) for stage in range(int(self.has_encoder), self.num_stages))
            if self.has_encoder and self.encoder_patches[dp_rank, microbatch] == 0:
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
        """The plan that `to_json` wrote; nothing is converted or filled in, and its digest has to be there.

        Raises:
            PlanError: no plan, another format version, fields of another type or range, or content that does not
                match its digest.
        """
        content = decoded(text, version=PLAN_FORMAT_VERSION, names=frozenset(field.name for field in fields(cls)))
        try:
            plan = cls(**content)
        except RecursionError as error:  # lists in lists where a number belongs, too deep to show
            raise PlanError(f"not a step plan: {error}") from error
        if plan.digest != plan._compute_digest():
            raise PlanError(f"step plan of step {plan.step} does not match its digest: the file was changed or damaged")
        return plan


def digest_fields(named: Mapping[str, object], *, skip: set[str] | frozenset[str] = frozenset()) -> str:
    """sha256 hex over names and values; integers and integer arrays as little-endian int64 with their shape.

    Integers from 2**63 to 2**64 - 1, which seeds may be, are marked as unsigned.

    Raises:
        PlanError: values of another kind, integers beyond 64 bits, text with a lone surrogate.
    """
    digest = hashlib.sha256()
    waiting: list[bytes] = []
    for name, value in named.items():
        if name in skip:
            continue
        if isinstance(value, str):
            content: bytes | memoryview = text_field(name, value).encode()
            shape: tuple[int, ...] | str = (len(content),)
        elif isinstance(value, (int, np.integer)):
            shape, content = _word(name, int(value))
        elif isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value, dtype="<i8")
            shape, content = value.shape, array.data if array.nbytes > _HASHED_ALONE else array.tobytes()
        else:
            raise PlanError(f"{name}={value!r} cannot be digested: digests cover integers and names only")
        waiting.append(f"{name}:{shape}:".encode())
        if isinstance(content, bytes):
            waiting.append(content)
        else:
            # Large arrays are hashed where they lie; everything small goes in one piece.
            digest.update(b"".join(waiting))
            digest.update(content)
            waiting.clear()
    digest.update(b"".join(waiting))
    return digest.hexdigest()


def _word(name: str, value: int) -> tuple[tuple[int, ...] | str, bytes]:
    """(shape or mark, eight bytes) of an integer."""
    if -(2**63) <= value < 2**63:
        return (), value.to_bytes(8, "little", signed=True)
    if 2**63 <= value < 2**64:
        return "unsigned", value.to_bytes(8, "little")
    raise PlanError(f"{name}={shown(value)} is beyond 64 bits")


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
