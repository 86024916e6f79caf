"""Plans of data that cannot be indexed: a window of every lane, planned when its headers are known.

    lanes x quota --each rank reads its lanes--> rows [k, C] --gathered--> table [n, C] --plan_window--> its steps
                                                                              |
    state = (epoch, window, lane cursors, step in window)                     +--> who sends what to whom [R, R]

Pure, without torch: table and options decide everything, so every rank makes the same plan, and a recorded table gives
it again. Which samples a step holds does not depend on the number of ranks: every lane gives its quota, rows are in the
order of (number in the lane's quota, lane), and permuted by (seed, epoch, window). Placement is `plan_step`'s.

Price: shuffling is as wide as a window. The steps of a window share its samples evenly (to one), so a step may hold
fewer than `global_batch_size`: ceil(n / size) steps of n usable samples. Nothing is carried to the next window.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import COUNT_COLUMNS, Int64Array, StepCounts
from balancer.errors import OversizeError, PlanError
from balancer.layout import Layout, ParallelSpec
from balancer.plan import Capacities, StepPlan, digest_fields
from balancer.planner import DEFAULT_POLICY, plan_step
from dataloaders.errors import DataError
from dataloaders.stream_source import stream_sample_id

ROW_COLUMNS = ("lane", "position", "usable", "payload_bytes", *COUNT_COLUMNS)
"""Columns of a row, int64. `position`: in the lane; `usable`: 0 or 1; `payload_bytes`: what is sent if it moves."""

DRY = -1  # cursor of a lane that has ended in this epoch
MAX_LISTED = 20
_WINDOW_STREAM = 1 << 32  # of random words, apart from those of `balancer.select` and `balancer.shuffle`
_COLUMN = {name: number for number, name in enumerate(ROW_COLUMNS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOptions:
    """What decides the steps of a window besides its samples; the same on every rank.

    Attributes:
        global_batch_size: samples of a step over all ranks, at most.
        samples_per_lane, bytes_per_lane: quota of every lane in a window. A lane stops at the first sample with which
            it reaches either, so it gives at least one sample and may exceed the bytes by one.
        capacities, cost_model, schedule, policy, num_microbatches, min_num_microbatches: see `plan_step`.
        seed, shuffle: of the order inside a window.
        oversize: `error` or `drop`, for samples above the capacities. bad_records: `error` or `skip`.
    """

    global_batch_size: int
    capacities: Capacities
    cost_model: CostModel
    samples_per_lane: int = 64
    bytes_per_lane: int = 64 * 1024**2
    schedule: str = "1f1b"
    policy: str = DEFAULT_POLICY
    num_microbatches: int | None = None
    min_num_microbatches: int = 1
    seed: int = 0
    shuffle: bool = True
    oversize: Literal["error", "drop"] = "error"
    bad_records: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        for name in ("global_batch_size", "samples_per_lane", "bytes_per_lane"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: at least 1")
        if self.oversize not in ("error", "drop") or self.bad_records not in ("error", "skip"):
            raise PlanError(
                f"oversize={self.oversize!r}, bad_records={self.bad_records!r}: choose error or drop, and error or skip"
            )

    def selection_fingerprint(self, source: str, costs: str) -> str:
        """Digest of all that decides which samples a step holds, blind to layout and policy.

        Args:
            source: fingerprint of the stream. costs: of what counts and limits are made from.
        """
        # Not the policies for samples that are left out: a run that stopped at one goes on when it may be skipped.
        names = ("global_batch_size", "samples_per_lane", "bytes_per_lane", "seed")
        limits = {f"capacity_{name}": limit for name, limit in self.capacities.limits()}
        chosen = {name: getattr(self, name) for name in names} | {"shuffle": int(self.shuffle)} | limits
        return digest_fields({"source": source, "costs": costs, **chosen})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where a run stands: the same on all ranks, for any number of them.

    Attributes:
        fingerprint: `WindowOptions.selection_fingerprint` of the run.
        epoch, window: passes over the stream, and windows since the start of the run.
        first_step: optimizer steps before this window.
        step_in_window: steps of this window that are done.
        cursors: of every lane, at the start of this window; `DRY` where it has ended.
        window_digest: of the window that is being worked on, "" at its start: what is read again must be the same.
    """

    fingerprint: str
    cursors: tuple[int, ...]
    epoch: int = 0
    window: int = 0
    first_step: int = 0
    step_in_window: int = 0
    window_digest: str = ""

    def __post_init__(self) -> None:
        numbers = (self.epoch, self.window, self.first_step, self.step_in_window)
        if min(numbers) < 0 or not self.cursors or min(self.cursors) < DRY:
            raise PlanError(f"a stream cannot be at {self}")

    @property
    def step(self) -> int:
        """The optimizer step that comes next."""
        return self.first_step + self.step_in_window

    def within(self, steps_done: int, window_digest: str) -> "StreamState":
        """The state after `steps_done` steps of this window, not all."""
        return replace(self, step_in_window=steps_done, window_digest=window_digest)

    def after_window(self, num_steps: int, cursors: Sequence[int]) -> "StreamState":
        """The state behind this window; where every lane is dry, the start of the next epoch."""
        ended = all(cursor == DRY for cursor in cursors)
        return replace(
            self,
            cursors=tuple(0 for _ in cursors) if ended else tuple(int(cursor) for cursor in cursors),
            epoch=self.epoch + ended,
            window=self.window + 1,
            first_step=self.first_step + num_steps,
            step_in_window=0,
            window_digest="",
        )

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "StreamState":
        """The state that `to_json` wrote. Raises PlanError for anything else."""
        try:
            content = json.loads(text)
        except ValueError as error:
            raise PlanError(f"not the state of a stream: {error}") from error
        kinds = {field.name: str if field.type in (str, "str") else int for field in fields(cls)} | {"cursors": list}
        if not isinstance(content, dict) or {name: type(value) for name, value in content.items()} != kinds:
            raise PlanError("not the state of a stream: other fields than this version writes")
        if any(type(cursor) is not int for cursor in content["cursors"]):
            raise PlanError("not the state of a stream: a cursor is no integer")
        return cls(**{**content, "cursors": tuple(content["cursors"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamDropped:
    """A sample of a window that no step holds: `unusable: <code>` or `oversize: ...`, with the words of the error."""

    sample_id: int
    place: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowPlan:
    """The steps of a window, and where their samples are read and run.

    Attributes:
        start: state at the start of the window.
        table: int64 [n, C], columns `ROW_COLUMNS`, in the order before permuting; usable and other rows.
        sample_ids: int64 [n].
        steps: their plans; `sample_ids` of a plan are those of the stream.
        step_rows: rows of the table that a step holds, in selection order.
        reader, runner: int64 [n], rank that reads a row, and the one that runs it (-1: no step holds it).
        window_digest: of table and start, for any number of ranks. digest: of the plans.
    """

    start: StreamState
    table: Int64Array
    sample_ids: Int64Array
    steps: tuple[StepPlan, ...]
    step_rows: tuple[Int64Array, ...]
    reader: Int64Array
    runner: Int64Array
    world_size: int
    window_digest: str
    digest: str

    def column(self, name: str) -> Int64Array:
        """Column `name` of the table, int64 [n]."""
        column: Int64Array = self.table[:, _COLUMN[name]]
        return column

    def route(self, source: int, destination: int, *, from_step: int = 0) -> Int64Array:
        """Rows that rank `source` reads and `destination` runs from a step of the window on, in the order sent."""
        rows = [*self.step_rows[from_step:], np.zeros(0, dtype=np.int64)]
        order = np.concatenate(rows)
        chosen: Int64Array = order[(self.reader[order] == source) & (self.runner[order] == destination)]
        return chosen

    def bytes_between(self, *, from_step: int = 0) -> Int64Array:
        """int64 [R, R]: bytes that rank r reads and rank c runs; what stays on a rank is on the diagonal."""
        moved = np.zeros((self.world_size, self.world_size), dtype=np.int64)
        for rows in self.step_rows[from_step:]:
            np.add.at(moved, (self.reader[rows], self.runner[rows]), self.column("payload_bytes")[rows])
        return moved

    def label_tokens(self, step: int) -> list[int]:
        """Label tokens of every sample of a step of the window, for the planned loss weight."""
        return [int(count) for count in self.column("label_tokens")[self.step_rows[step]]]


def window_table(rows: Sequence[Int64Array], *, lanes: int) -> tuple[Int64Array, Int64Array]:
    """(table [n, C], sample ids [n]) of the rows that were read, in an order that no rank decides.

    Raises:
        PlanError: a lane or position twice.
    """
    table = np.concatenate([*rows, np.zeros((0, len(ROW_COLUMNS)), dtype=np.int64)]).astype(np.int64)
    lane, position = table[:, _COLUMN["lane"]], table[:, _COLUMN["position"]]
    by_lane = np.lexsort((position, lane))
    table, lane, position = table[by_lane], lane[by_lane], position[by_lane]
    twice = (lane[1:] == lane[:-1]) & (position[1:] == position[:-1])
    if twice.any() or (len(lane) and not 0 <= int(lane.min()) <= int(lane.max()) < lanes):
        raise PlanError(f"the rows of a window name a position twice, or a lane outside 0 to {lanes - 1}")
    number = np.arange(len(table)) - np.searchsorted(lane, lane, side="left")
    table = table[np.lexsort((lane, number))]
    ids = [stream_sample_id(int(row[0]), int(row[1]), lanes=lanes) for row in table]
    return table, np.array(ids, dtype=np.int64)


def window_order(num_rows: int, options: WindowOptions, state: StreamState) -> Int64Array:
    """int64 [n]: numbers of the usable rows in the order in which steps take them."""
    order = np.arange(num_rows, dtype=np.int64)
    if not options.shuffle or not num_rows:
        return order
    bits = np.random.Philox(counter=_WINDOW_STREAM << 192 | state.window << 64, key=options.seed | state.epoch << 64)
    words = bits.random_raw(num_rows)
    return np.argsort(words, kind="stable").astype(np.int64)


def plan_window(
    rows: Sequence[Int64Array], state: StreamState, options: WindowOptions, layout: Layout, *, lanes: int
) -> WindowPlan:
    """Plan a window of `rows` (one int64 [k, C] for each rank, or any other division of them).

    Raises:
        PlanError: a step that cannot be planned, or data that have changed since the state was saved.
    """
    table, ids = window_table(rows, lanes=lanes)
    digest = digest_fields(
        {
            "fingerprint": state.fingerprint,
            "epoch": state.epoch,
            "window": state.window,
            "cursors": np.array(state.cursors),
            "table": table,
        }
    )
    if state.window_digest and state.window_digest != digest:
        raise PlanError(
            f"window {state.window} is not what it was when the state was saved (digest {digest[:12]} instead of "
            f"{state.window_digest[:12]}): the data, or how they are counted, have changed. Restore them, or start anew"
        )
    usable = np.flatnonzero(table[:, _COLUMN["usable"]])
    order = usable[window_order(len(usable), options, state)]
    num_steps = -(-len(order) // options.global_batch_size)
    step_rows = tuple(np.array_split(order, num_steps)) if num_steps else ()
    runner = np.full(len(table), -1, dtype=np.int64)
    steps = []
    for number, chosen in enumerate(step_rows):
        counts = StepCounts(sample_ids=ids[chosen], **{name: table[chosen, _COLUMN[name]] for name in COUNT_COLUMNS})
        plan = _plan_one(counts, number, state, options, layout)
        runner[chosen] = plan.dp_rank
        steps.append(plan)
    return WindowPlan(
        start=replace(state, step_in_window=0, window_digest=""),
        table=table,
        sample_ids=ids,
        steps=tuple(steps),
        step_rows=step_rows,
        reader=table[:, _COLUMN["lane"]] % layout.dp_size,
        runner=runner,
        world_size=layout.dp_size,
        window_digest=digest,
        digest=digest_fields({"window": digest, **{f"step{k}": plan.digest for k, plan in enumerate(steps)}}),
    )


def _plan_one(counts: StepCounts, number: int, state: StreamState, options: WindowOptions, layout: Layout) -> StepPlan:
    return plan_step(
        counts,
        parallel=ParallelSpec.of(
            layout,
            num_microbatches=options.num_microbatches,
            min_num_microbatches=options.min_num_microbatches,
        ),
        cost_model=options.cost_model,
        capacities=options.capacities,
        schedule=options.schedule,
        policy=options.policy,
        seed=options.seed,
        step=state.first_step + number,
        epoch=state.epoch,
        cursor=number,
    )


def check_dropped(dropped: Sequence[StreamDropped], options: WindowOptions) -> None:
    """Raise for samples that the options do not allow to leave out, listing them.

    Raises:
        OversizeError: samples above the capacities under oversize=error.
        DataError: unusable ones under bad_records=error.
    """
    oversize = [drop for drop in dropped if drop.reason.startswith("oversize")]
    if oversize and options.oversize == "error":
        raise OversizeError(
            f"{len(oversize)} samples of the window exceed the capacity of a micro-batch:\n{_listed(oversize)}\n"
            "Raise the capacity, or leave them out with the oversize policy 'drop'."
        )
    bad = [drop for drop in dropped if not drop.reason.startswith("oversize")]
    if bad and options.bad_records == "error":
        raise DataError(
            f"{len(bad)} samples of the window cannot be used:\n{_listed(bad)}",
            remedy="Repair them, or leave them out with bad_records='skip' (they are counted and listed).",
        )


def _listed(dropped: Sequence[StreamDropped]) -> str:
    lines = [f"  {drop.place}: {drop.message or drop.reason}" for drop in dropped[:MAX_LISTED]]
    more = [f"  and {len(dropped) - MAX_LISTED} more"] if len(dropped) > MAX_LISTED else []
    return "\n".join([*lines, *more])
