"""Measured acts beside what they ran on: the only input of a calibration.

    StepRecord.actions (rank, stage, op, micro-batch, ms)  \
                                                            join on (replica, micro-batch) -> Observations
    StepPlan + StepCounts (samples of every cell)          /

    cells      int64 [g, C]   counts of every micro-batch, columns in the order of `COLUMNS`
    acts       int64 [a]      cell, stage, duration_ns; op as text [a]

A log holds times, a plan holds placements, an index holds counts; sums over a cell are exact, so nothing more has to be
logged. An act of a cell that appears several times is a repetition: `medians` keeps the median of them, so a first run
that pays for memory, or one that the machine interrupted, moves nothing. Price: with two repetitions the median is
their mean.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.cost_terms import MAX_STAGES
from balancer.counts import Int64Array, StepCounts
from balancer.errors import CostModelError
from balancer.number_checks import is_whole
from balancer.plan import StepPlan
from balancer.records import StepRecord

Op = Literal["F", "B", "I", "W"]
OPS: tuple[Op, ...] = ("F", "B", "I", "W")

# Names are those of balancer.cost_terms; token_sq is the sum of squares over samples, not the square of the sum.
COLUMNS = ("samples", "items", "tokens", "labels", "visual", "patches", "full_sq", "window_sq", "token_sq")
WINDOWED = "causal_window"
_LARGEST_WINDOW = 2**31
_LONGEST_NS = 2**48
_SOURCES = {
    "items": "num_items",
    "tokens": "llm_tokens",
    "labels": "label_tokens",
    "visual": "visual_tokens",
    "patches": "patches",
    "full_sq": "full_total_sq",
    "window_sq": "window_total_sq",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observations:
    """Acts of any number of steps.

    Attributes:
        cells: int64 [g, C], counts of every micro-batch; `names` are its columns.
        cell, stage: int64 [a], row of `cells` and stage of every act.
        op: [a], one of F, B, I, W.
        duration_ns: int64 [a], above 0.
        causal_window: tokens that sliding-window attention sees; 0: no such column.

    Raises:
        CostModelError: columns that are no integers or do not fit together, counts below 0, an unknown op, a stage that
            no pipeline has, or a duration that is no possible one.
    """

    cells: Int64Array
    cell: Int64Array
    stage: Int64Array
    op: NDArray[np.str_]
    duration_ns: Int64Array
    causal_window: int = 0

    def __post_init__(self) -> None:
        for name in ("cells", "cell", "stage", "duration_ns"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        if not is_whole(self.causal_window, high=_LARGEST_WINDOW):
            raise CostModelError(f"causal_window={str(self.causal_window)[:40]}: a number of tokens, 0 for none")
        num_acts = len(self.cell)
        if self.cells.ndim != 2 or self.cells.shape[1] != len(self.names):
            raise CostModelError(f"cells have shape {self.cells.shape}; expected columns {', '.join(self.names)}")
        for name in ("stage", "op", "duration_ns"):
            if len(getattr(self, name)) != num_acts:
                raise CostModelError(f"{len(getattr(self, name))} values of {name} for {num_acts} acts")
        if self.cells.size and int(self.cells.min()) < 0:
            raise CostModelError(f"cells hold a count of {int(self.cells.min())}: counts are 0 or more")
        if num_acts and not 0 <= int(self.stage.min()) <= int(self.stage.max()) < MAX_STAGES:
            wrong = next(stage for stage in self.stage.tolist() if not 0 <= stage < MAX_STAGES)
            raise CostModelError(f"acts of stage {wrong}: a pipeline has stages 0 to {MAX_STAGES - 1} at most")
        if num_acts and not 0 <= int(self.cell.min()) <= int(self.cell.max()) < len(self.cells):
            raise CostModelError(f"acts of cell {int(self.cell.max())}; there are cells 0 to {len(self.cells) - 1}")
        unknown = sorted(set(self.op.tolist()) - set(OPS))
        if unknown:
            raise CostModelError(f"acts of op {unknown[0]!r}; known are {', '.join(OPS)}")
        if num_acts and int(self.duration_ns.min()) <= 0:
            row = int(self.duration_ns.argmin())
            raise CostModelError(
                f"act {self.stage[row]}{self.op[row]}{self.cell[row]} took {self.duration_ns[row]} ns: a measured act "
                f"takes some time; look at the clock that timed it"
            )
        if num_acts and int(self.duration_ns.max()) > _LONGEST_NS:
            row = int(self.duration_ns.argmax())
            raise CostModelError(
                f"act {self.stage[row]}{self.op[row]}{self.cell[row]} took {self.duration_ns[row]} ns, more than three "
                f"days; look at the clock that timed it"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of `cells`."""
        return (*COLUMNS, WINDOWED) if self.causal_window else COLUMNS

    def __len__(self) -> int:
        return len(self.cell)

    def column(self, name: str) -> Int64Array:
        """One column of the cells, int64 [g]."""
        column: Int64Array = self.cells[:, self.names.index(name)]
        return column

    def medians(self) -> "Observations":
        """One act per (cell, stage, op), with the median duration of its repetitions; ordered by op, stage, cell."""
        keys = np.stack([self._op_codes(), self.stage, self.cell])
        distinct, where = np.unique(keys, axis=1, return_inverse=True)
        order = np.argsort(where.ravel(), kind="stable")
        starts = np.searchsorted(where.ravel()[order], np.arange(distinct.shape[1]))
        parts = np.split(self.duration_ns[order], starts[1:]) if len(order) else []
        return Observations(
            cells=self.cells,
            cell=distinct[2],
            stage=distinct[1],
            op=np.array([OPS[code] for code in distinct[0].tolist()], dtype="U1"),
            duration_ns=np.array([round(float(np.median(part))) for part in parts], dtype=np.int64),
            causal_window=self.causal_window,
        )

    def between(self, start: int, stop: int) -> "Observations":
        """Cells `start` to `stop` (not included) and their acts."""
        mine = (self.cell >= start) & (self.cell < stop)
        return Observations(
            cells=self.cells[start:stop],
            cell=self.cell[mine] - start,
            stage=self.stage[mine],
            op=self.op[mine],
            duration_ns=self.duration_ns[mine],
            causal_window=self.causal_window,
        )

    def of(self, stage: int, op: Op) -> tuple[Int64Array, Int64Array]:
        """(cells int64 [b], durations int64 [b]) of the acts of one stage and op."""
        mine = (self.stage == stage) & (self.op == op)
        return self.cell[mine], self.duration_ns[mine]

    def _op_codes(self) -> Int64Array:
        codes = np.zeros(len(self), dtype=np.int64)
        for code, op in enumerate(OPS):
            codes[self.op == op] = code
        return codes

    @classmethod
    def of_step(
        cls, record: StepRecord, plan: StepPlan, counts: StepCounts, *, causal_window: int = 0
    ) -> "Observations":
        """The acts of one step of training.

        Args:
            record: of the step, with actions.
            plan: of the same step, as plans/step_N.json of the run holds it.
            counts: of its samples, in any order.

        Raises:
            CostModelError: record and plan are of different steps, or a sample of the plan has no counts.
        """
        if record.plan_digest and record.plan_digest != plan.digest:
            raise CostModelError(
                f"the record of step {record.step} belongs to plan {record.plan_digest[:12]}, not to {plan.digest[:12]}"
            )
        cells = plan_cells(plan, counts, causal_window=causal_window)
        acts = [action for action in record.actions if action.end_ms > action.start_ms]
        return cls(
            cells=cells,
            cell=np.array([a.dp_rank * plan.num_microbatches + a.microbatch for a in acts], dtype=np.int64),
            stage=np.array([a.stage for a in acts], dtype=np.int64),
            op=np.array([a.op for a in acts], dtype="U1"),
            duration_ns=np.array([max(1, round((a.end_ms - a.start_ms) * 1e6)) for a in acts], dtype=np.int64),
            causal_window=causal_window,
        )

    @classmethod
    def joined(cls, parts: Iterable["Observations"]) -> "Observations":
        """The acts of several steps; cells of different steps stay different.

        Raises:
            CostModelError: no part, or parts with different windows.
        """
        listed: Sequence[Observations] = list(parts)
        windows = {part.causal_window for part in listed}
        if len(windows) != 1:
            raise CostModelError(
                f"observations with windows {sorted(windows)} cannot be joined; they need one, the same"
            )
        offsets = np.cumsum([0, *(len(part.cells) for part in listed)])
        return cls(
            cells=np.concatenate([part.cells for part in listed]),
            cell=np.concatenate([part.cell + start for part, start in zip(listed, offsets[:-1], strict=True)]),
            stage=np.concatenate([part.stage for part in listed]),
            op=np.concatenate([part.op for part in listed]),
            duration_ns=np.concatenate([part.duration_ns for part in listed]),
            causal_window=windows.pop(),
        )


def _integers(name: str, values: ArrayLike) -> Int64Array:
    """`values` as int64; nothing is rounded, so that NaN and halves do not pass for measurements."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise CostModelError(f"{name} holds {array.dtype}: integers are needed")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise CostModelError(f"{name} holds {int(array.max())}, beyond int64")
    if array.ndim != (2 if name == "cells" else 1):
        raise CostModelError(f"{name} has shape {array.shape}; expected {'[g, C]' if name == 'cells' else '[a]'}")
    return array.astype(np.int64, copy=False)


def plan_cells(plan: StepPlan, counts: StepCounts, *, causal_window: int = 0) -> Int64Array:
    """Counts of every cell of a plan, int64 [R * M, C], replica after replica; `counts` may be in any order.

    Raises:
        CostModelError: a sample of the plan has no counts.
    """
    cell_of_sample = np.full(len(counts), -1, dtype=np.int64)
    rank, microbatch = np.asarray(plan.dp_rank, dtype=np.int64), np.asarray(plan.microbatch, dtype=np.int64)
    cell_of_sample[_rows_of(counts, plan.sample_ids)] = rank * plan.num_microbatches + microbatch
    num_cells = plan.num_samples.size
    return cell_counts(counts, cell_of_sample, num_cells=num_cells, causal_window=causal_window)


def cell_counts(counts: StepCounts, cell_of_sample: ArrayLike, *, num_cells: int, causal_window: int = 0) -> Int64Array:
    """Counts of every cell, int64 [g, C], exact sums over its samples; samples of cell -1 are in none."""
    where = np.asarray(cell_of_sample, dtype=np.int64)
    tokens = counts.llm_tokens
    columns = {name: getattr(counts, source) for name, source in _SOURCES.items()}
    columns |= {"samples": np.ones(len(counts), dtype=np.int64), "token_sq": tokens * tokens}
    names: tuple[str, ...] = COLUMNS
    if causal_window:
        outside = np.maximum(tokens - causal_window, 0)
        columns[WINDOWED], names = tokens * tokens - outside * outside, (*COLUMNS, WINDOWED)
    cells = np.zeros((num_cells, len(names)), dtype=np.int64)
    inside = where >= 0
    for index, name in enumerate(names):
        np.add.at(cells[:, index], where[inside], columns[name][inside])
    return cells


def _rows_of(counts: StepCounts, sample_ids: Int64Array) -> Int64Array:
    order = np.argsort(counts.sample_ids, kind="stable")
    place = np.minimum(np.searchsorted(counts.sample_ids[order], sample_ids), max(0, len(order) - 1))
    found = len(order) > 0 and counts.sample_ids[order[place]] == sample_ids
    if not np.all(found):
        raise CostModelError(
            f"{int(np.sum(~np.asarray(found)))} samples of the plan have no counts; "
            f"gather them with StepCounts.from_index(index, plan.sample_ids)"
        )
    return order[place]
