"""What every schedule must satisfy, whatever made it; all acts at once, because there may be 131,072 of them."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balancer.errors import ScheduleError
from balancer.schedules.limits import check_num_acts, whole_size
from balancer.schedules.program import BACKWARD, FORWARD, INPUT, OP_LETTERS, WEIGHT
from balancer.whole_numbers import shown

if TYPE_CHECKING:
    from balancer.schedule import Schedule


def check(schedule: "Schedule") -> None:
    """Acts that could mean something: on the rank of their stage, once, complete.

    Raises:
        ScheduleError: the first that is not.
    """
    s = schedule
    _check_shapes(s)
    inside = (s.stage >= 0) & (s.stage < s.num_stages) & (s.microbatch >= 0) & (s.microbatch < s.num_microbatches)
    for act in np.flatnonzero(~inside)[:1]:
        raise ScheduleError(
            f"schedule {s.name}: {_text(s, act)} is outside {s.num_stages} stages x {s.num_microbatches} micro-batches"
        )
    home = s.place[s.stage, s.microbatch]
    for act in np.flatnonzero(home != s.act_rank)[:1]:
        raise ScheduleError(
            f"schedule {s.name}: {_text(s, act)} is on rank {s.act_rank[act]}, but stage {s.stage[act]} lives on "
            f"rank {home[act]}"
        )
    count = np.bincount(
        (s.op.astype(np.int64) * s.num_stages + s.stage) * s.num_microbatches + s.microbatch,
        minlength=len(OP_LETTERS) * s.num_stages * s.num_microbatches,
    ).reshape(len(OP_LETTERS), s.num_stages, s.num_microbatches)
    if count.max(initial=0) > 1:
        op, stage, microbatch = (int(axis[0]) for axis in np.nonzero(count > 1))
        raise ScheduleError(f"schedule {s.name}: {stage}{OP_LETTERS[op]}{microbatch} occurs twice")
    _check_pairs(s, count > 0)


def _check_shapes(schedule: "Schedule") -> None:
    s = schedule
    for field, kind in (("num_ranks", "ranks"), ("num_stages", "stages"), ("num_microbatches", "micro-batches")):
        whole_size(f"schedule {shown(s.name)}: {field}", getattr(s, field), kind, below="there is at least one")
    check_num_acts(s.name, s.num_stages, s.num_microbatches)
    shape = (s.num_stages, s.num_microbatches)
    if len(s.rank_offsets) != s.num_ranks + 1 or s.place.shape != shape:
        raise ScheduleError(
            f"schedule {s.name}: {len(s.rank_offsets) - 1} programs for {s.num_ranks} ranks, places of shape "
            f"{list(s.place.shape)} for {list(shape)} stages and micro-batches"
        )
    if not len(s.op) == len(s.stage) == len(s.microbatch) == s.rank_offsets[-1] or (np.diff(s.rank_offsets) < 0).any():
        raise ScheduleError(
            f"schedule {s.name}: {len(s.op)} ops, {len(s.stage)} stages and {len(s.microbatch)} micro-batches for "
            f"rank_offsets {s.rank_offsets.tolist()}"
        )
    if ((s.op < 0) | (s.op > WEIGHT)).any():
        raise ScheduleError(f"schedule {s.name}: an op is a code of {OP_LETTERS}, 0 to {WEIGHT}")


def _check_pairs(schedule: "Schedule", runs: NDArray[np.bool_]) -> None:
    """Every forward has its backward, whole or in two halves, unless its stage is frozen; runs: bool [op, S, M]."""
    frozen = list(schedule.frozen_stages)
    if frozen != list(range(len(frozen))) or len(frozen) > schedule.num_stages:
        raise ScheduleError(
            f"schedule {schedule.name}: frozen_stages={frozen}; only stages at the head of the chain need no "
            "backward: behind a stage that trains, a frozen one still passes the gradient on"
        )
    backward = runs[BACKWARD] | runs[INPUT]
    _refuse_first(schedule, runs[BACKWARD] & (runs[INPUT] | runs[WEIGHT]), "{0}B{1} comes whole and in halves (I, W)")
    _refuse_first(schedule, runs[INPUT] & ~runs[WEIGHT], "{0}I{1} has no {0}W{1}")
    _refuse_first(schedule, runs[WEIGHT] & ~runs[INPUT], "{0}W{1} has no {0}I{1}")
    _refuse_first(schedule, backward & ~runs[FORWARD], "{0}B{1} has no {0}F{1}")
    if backward.any():  # no backward at all is a forward-only schedule (evaluation)
        trained = np.ones(backward.shape, dtype=np.bool_)
        trained[frozen] = False
        _refuse_first(schedule, runs[FORWARD] & ~backward & trained, "{0}F{1} has no {0}B{1}")
        _refuse_first(schedule, backward & ~trained, "{0}B{1} belongs to a frozen stage")


def _refuse_first(schedule: "Schedule", wrong: NDArray[np.bool_], text: str) -> None:
    if wrong.any():
        stage, microbatch = (int(axis[0]) for axis in np.nonzero(wrong))
        raise ScheduleError(f"schedule {schedule.name}: {text.format(stage, microbatch)}")


def _text(schedule: "Schedule", act: int) -> str:
    return f"{schedule.stage[act]}{OP_LETTERS[schedule.op[act]]}{schedule.microbatch[act]}"
