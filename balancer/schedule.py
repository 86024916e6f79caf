"""Schedules as data: for every pipeline rank, the list of acts it runs, in order.

An act is (op, stage, micro-batch), written as torch.distributed.pipelining writes it: `2F0` is the forward of stage 2
on micro-batch 0. Sends and receives are not written: they follow from the lists. What 1F1B looks like for three
stages on three ranks and four micro-batches:

    rank 0   0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    rank 1   1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

Stages that share a rank run as one group: forward in stage order, backward in reverse. On a single rank both
schedules are F, then B, of one micro-batch after the other, because there nothing is gained by holding activations.
A (stage, micro-batch) without work, the encoder of a text-only micro-batch or any stage of an empty one, is *absent*:
its acts are removed and nobody waits for them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from balancer.errors import ScheduleError

Op = Literal["F", "B"]
_ACT_PATTERN = re.compile(r"^(\d+)([FB])(\d+)$")


@dataclass(frozen=True, slots=True)
class Act:
    """One unit of work: forward (F) or backward (B) of a stage on a micro-batch."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Act":
        """The act that `2F0` names."""
        match = _ACT_PATTERN.match(text.strip())
        if match is None:
            raise ScheduleError(f"{text.strip()!r} is not an act; acts are stage, F or B, micro-batch, such as 2F0")
        op: Op = "F" if match[2] == "F" else "B"
        return cls(op, int(match[1]), int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What every pipeline rank of one replica runs in one step.

    Attributes:
        name: generator that made it.
        num_ranks: pipeline ranks P.
        num_stages: stages S.
        num_microbatches: micro-batches M.
        ranks: acts of each rank in program order, [P][...].
        stage_rank: rank on which each stage lives, [S].

    Raises:
        ScheduleError: an act on a rank that does not hold its stage, twice, out of range, or a forward without its
            backward (or the reverse). Whether the order can run at all is the simulator's question.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Act, ...], ...]
    stage_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.num_ranks or len(self.stage_rank) != self.num_stages:
            raise ScheduleError(
                f"schedule {self.name}: {len(self.ranks)} programs for {self.num_ranks} ranks, "
                f"{len(self.stage_rank)} places for {self.num_stages} stages"
            )
        seen: set[Act] = set()
        for rank, acts in enumerate(self.ranks):
            for act in acts:
                self._check_act(rank, act, seen)
                seen.add(act)
        self._check_pairs(seen)

    def _check_act(self, rank: int, act: Act, seen: AbstractSet[Act]) -> None:
        if not (0 <= act.stage < self.num_stages and 0 <= act.microbatch < self.num_microbatches):
            raise ScheduleError(
                f"schedule {self.name}: {act} is outside {self.num_stages} stages x "
                f"{self.num_microbatches} micro-batches"
            )
        if self.stage_rank[act.stage] != rank:
            raise ScheduleError(
                f"schedule {self.name}: {act} is on rank {rank}, but stage {act.stage} lives on "
                f"rank {self.stage_rank[act.stage]}"
            )
        if act in seen:
            raise ScheduleError(f"schedule {self.name}: {act} occurs twice")

    def _check_pairs(self, acts: AbstractSet[Act]) -> None:
        forward = {(act.stage, act.microbatch) for act in acts if act.op == "F"}
        backward = {(act.stage, act.microbatch) for act in acts if act.op == "B"}
        # No backward at all is a forward-only schedule (evaluation).
        for stage, microbatch in sorted(forward ^ backward if backward else ()):
            has, lacks = ("F", "B") if (stage, microbatch) in forward else ("B", "F")
            raise ScheduleError(f"schedule {self.name}: {stage}{has}{microbatch} has no {stage}{lacks}{microbatch}")

    def without(self, absent: AbstractSet[tuple[int, int]]) -> "Schedule":
        """The schedule without the acts of absent (stage, micro-batch) pairs; the order of the others stays."""
        return self._filter(lambda act: (act.stage, act.microbatch) not in absent)

    def forward_only(self) -> "Schedule":
        """The forward acts alone: what an evaluation runs."""
        return self._filter(lambda act: act.op == "F")

    def _filter(self, keep: Callable[[Act], bool]) -> "Schedule":
        return replace(self, ranks=tuple(tuple(act for act in acts if keep(act)) for acts in self.ranks))

    def to_grid(self) -> str:
        """One line per rank, acts separated by commas: `0F0,0F1,0B0,0B1`."""
        return "\n".join(",".join(map(str, acts)) for acts in self.ranks)

    @classmethod
    def from_grid(
        cls, text: str, *, stage_ranks: Sequence[int], num_microbatches: int, name: str = "grid"
    ) -> "Schedule":
        """The schedule that `to_grid` printed (or a person wrote). Empty cells between commas are idle slots."""
        lines = text.split("\n")
        ranks = tuple(tuple(Act.parse(cell) for cell in line.split(",") if cell.strip()) for line in lines)
        return cls(
            name=name,
            num_ranks=len(ranks),
            num_stages=len(stage_ranks),
            num_microbatches=num_microbatches,
            ranks=ranks,
            stage_rank=tuple(stage_ranks),
        )


def _gpipe(rank: int, num_ranks: int, num_microbatches: int) -> Iterable[tuple[Op, int]]:
    """All forwards, then all backwards; peak activations M. Alone on its rank: one micro-batch after the other."""
    if num_ranks == 1:
        yield from _one_f_one_b(rank, num_ranks, num_microbatches)
        return
    for microbatch in range(num_microbatches):
        yield "F", microbatch
    for microbatch in range(num_microbatches):
        yield "B", microbatch


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> Iterable[tuple[Op, int]]:
    """P-1-rank forwards ahead, then one forward, one backward; peak activations min(P - rank, M)."""
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    for microbatch in range(ahead):
        yield "F", microbatch
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            yield "F", microbatch + ahead
        yield "B", microbatch


# Order of micro-batches on one rank: (rank, num_ranks, num_microbatches) -> (op, micro-batch) in program order.
GENERATORS: dict[str, Callable[[int, int, int], Iterable[tuple[Op, int]]]] = {"1f1b": _one_f_one_b, "gpipe": _gpipe}


def schedule_names() -> tuple[str, ...]:
    """Schedules that `build_schedule` knows, sorted."""
    return tuple(sorted(GENERATORS))


def build_schedule(name: str, *, stage_ranks: Sequence[int], num_microbatches: int) -> Schedule:
    """The schedule `name` for stages placed on `stage_ranks`.

    Args:
        name: `gpipe` or `1f1b`.
        stage_ranks: rank of every stage, not descending, without a gap: [0, 0] puts both stages on one rank,
            [0, 1, 2] makes a pipeline of three.
        num_microbatches: at least 1; any number, also fewer than ranks.

    Raises:
        ScheduleError: an unknown name, no micro-batch, or a placement these schedules cannot run.
    """
    if name not in GENERATORS:
        raise ScheduleError(f"schedule {name!r} is not available; available: {', '.join(schedule_names())}")
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches={num_microbatches}: a schedule has at least one micro-batch")
    num_ranks = _check_stage_ranks(stage_ranks)
    programs = []
    for rank in range(num_ranks):
        stages = [stage for stage, place in enumerate(stage_ranks) if place == rank]
        acts: list[Act] = []
        for op, microbatch in GENERATORS[name](rank, num_ranks, num_microbatches):
            acts.extend(Act(op, stage, microbatch) for stage in (stages if op == "F" else reversed(stages)))
        programs.append(tuple(acts))
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=len(stage_ranks),
        num_microbatches=num_microbatches,
        ranks=tuple(programs),
        stage_rank=tuple(stage_ranks),
    )


def _check_stage_ranks(stage_ranks: Sequence[int]) -> int:
    steps = [after - before for before, after in pairwise(stage_ranks)]
    if not stage_ranks or stage_ranks[0] != 0 or any(step not in (0, 1) for step in steps):
        raise ScheduleError(
            f"stage_ranks={list(stage_ranks)}: stages lie on ranks 0, 1, ... in order, several per rank where needed "
            "(stages that return to an earlier rank need an interleaved schedule, which is not available yet)"
        )
    return stage_ranks[-1] + 1
