"""Schedules as data: for every pipeline rank, the acts it runs, in order.

An act is (op, stage, micro-batch), written as torch.distributed.pipelining writes it: `2F0` is the forward of stage 2
on micro-batch 0, `2B0` its backward, `2I0` and `2W0` the halves of a split backward (gradient of the input, of the
weights). Sends and receives are not written: they follow from the acts. 1F1B for three stages and four micro-batches:

    rank 0   0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3        op            F F F B F B B B   F F B ...   int8  [A]
    rank 1   1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3        stage         0 0 0 0 0 0 0 0   1 1 1 ...   int32 [A]
    rank 2   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3        microbatch    0 1 2 0 3 1 2 3   0 1 0 ...   int32 [A]
                                                    rank_offsets  0                 8       ... int64 [P + 1]

A (stage, micro-batch) without work, the encoder of a text-only micro-batch or any stage of an empty one, is *absent*:
its acts are removed and nobody waits for them. A stage that is *spread* lives on every rank; `place` says which rank
runs which of its micro-batches. A *frozen* stage at the head of the chain needs no gradient and has no backward.

Price: a schedule of A acts takes about 30 bytes an act; the view as `Act` objects (`ranks`, for executors) is built
when first asked for and costs ten times that.
"""

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from balancer.errors import ScheduleError
from balancer.schedules import GENERATORS, canonical_name, schedule_names
from balancer.schedules.checks import check
from balancer.schedules.limits import check_num_acts, check_ticks, whole_array, whole_index, whole_size
from balancer.schedules.program import BACKWARD, FORWARD, INPUT, OP_LETTERS, SPREAD, WEIGHT, Request, over_stages
from balancer.whole_numbers import shown

__all__ = ["GENERATORS", "Act", "Op", "Schedule", "build_schedule", "canonical_name", "schedule_names"]

Op = Literal["F", "B", "I", "W"]
# Nine digits are more than any limit, and few enough to convert.
_ACT_PATTERN = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_NUM_UNITS_AHEAD = 3
_IDLE = ","  # a rank without acts; a blank line could be the end of the text


@dataclass(frozen=True, slots=True)
class Act:
    """One unit of work: forward (F), backward (B) or half of one (I, W) of a stage on a micro-batch."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Act":
        """The act that `2F0` names."""
        match = _ACT_PATTERN.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None:
            raise ScheduleError(
                f"{shown(text.strip() if isinstance(text, str) else text)} is not an act; acts are stage, F, B, I or "
                "W, micro-batch, such as 2F0, with numbers of at most nine digits"
            )
        return cls(cast(Op, match[2]), int(match[1]), int(match[3]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """What every pipeline rank of one replica runs in one step. Arrays are read-only; two schedules are never equal.

    Attributes:
        name: generator that made it.
        num_ranks: pipeline ranks P.
        num_stages: stages S.
        num_microbatches: micro-batches M.
        op: what every act does, index into "FBIW", int8 [A]; acts of rank 0 first, each rank in program order.
        stage, microbatch: what it does it to, int32 [A].
        rank_offsets: acts of rank r are rank_offsets[r] : rank_offsets[r + 1], int64 [P + 1].
        place: rank of every (stage, micro-batch), int32 [S, M]; -1 where a loaded grid does not say.
        unit_size: micro-batches of one unit where a stage is spread over the ranks, else 0.
        frozen_stages: stages at the head of the chain that have no backward.

    Raises:
        ScheduleError: an act on a rank that does not hold its stage, twice, out of range, or a forward without its
            backward (or the reverse). Whether the order can run at all is the simulator's question.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    op: NDArray[np.int8]
    stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    rank_offsets: NDArray[np.int64]
    place: NDArray[np.int32]
    unit_size: int = 0
    frozen_stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        kinds: list[tuple[str, type[Any]]] = [
            ("op", np.int8),
            ("stage", np.int32),
            ("microbatch", np.int32),
            ("rank_offsets", np.int64),
            ("place", np.int32),
        ]
        for name, kind in kinds:
            array = whole_array(f"schedule {shown(self.name)}: {name}", getattr(self, name), kind).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        check(self)

    @cached_property
    def act_rank(self) -> NDArray[np.int32]:
        """Rank of every act, int32 [A], read-only."""
        rank = np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.rank_offsets))
        rank.setflags(write=False)
        return rank

    @cached_property
    def ranks(self) -> tuple[tuple[Act, ...], ...]:
        """Acts of each rank in program order, [P][...]: what an executor walks through."""
        letters = [cast(Op, letter) for letter in OP_LETTERS]
        triples = zip(self.op.tolist(), self.stage.tolist(), self.microbatch.tolist(), strict=True)
        acts = [Act(letters[op], stage, microbatch) for op, stage, microbatch in triples]
        return tuple(tuple(acts[first:last]) for first, last in pairwise(self.rank_offsets.tolist()))

    @cached_property
    def stage_rank(self) -> tuple[int, ...]:
        """Rank on which each stage lives, [S].

        Raises:
            ScheduleError: a stage is spread over the ranks; ask `rank_of` per micro-batch.
        """
        for stage, places in enumerate(self.place):
            if (places != places[0]).any():
                raise ScheduleError(
                    f"schedule {self.name}: stage {stage} is spread over the ranks; ask rank_of(stage, microbatch)"
                )
        return tuple(self.place[:, 0].tolist())

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Rank that runs a stage on a micro-batch."""
        return int(self.place[stage, microbatch])

    @property
    def has_backward(self) -> bool:
        """False for a forward-only schedule (evaluation)."""
        return bool((self.op != FORWARD).any())

    def without(self, absent: AbstractSet[tuple[int, int]]) -> "Schedule":
        """The schedule without the acts of absent (stage, micro-batch) pairs; the order of the others stays."""
        gone = np.zeros((self.num_stages, self.num_microbatches), dtype=np.bool_)
        for stage, microbatch in absent:
            if 0 <= stage < self.num_stages and 0 <= microbatch < self.num_microbatches:
                gone[stage, microbatch] = True
        return self._keep(~gone[self.stage, self.microbatch])

    def forward_only(self) -> "Schedule":
        """The forward acts alone: what an evaluation runs."""
        return self._keep(self.op == FORWARD)

    def split_backward(self) -> "Schedule":
        """Every backward as its two halves, one right after the other."""
        times = np.where(self.op == BACKWARD, 2, 1)
        act = np.repeat(np.arange(len(self.op)), times)
        op = self.op[act].copy()
        second = np.zeros(len(act), dtype=np.bool_)
        second[1:] = act[1:] == act[:-1]
        op[op == BACKWARD] = INPUT
        op[second] = WEIGHT
        sizes = np.bincount(self.act_rank[act], minlength=self.num_ranks)
        return replace(
            self, op=op, stage=self.stage[act], microbatch=self.microbatch[act], rank_offsets=_offsets(sizes)
        )

    def _keep(self, keep: NDArray[np.bool_]) -> "Schedule":
        sizes = np.bincount(self.act_rank[keep], minlength=self.num_ranks)
        return replace(
            self,
            op=self.op[keep],
            stage=self.stage[keep],
            microbatch=self.microbatch[keep],
            rank_offsets=_offsets(sizes),
        )

    def to_grid(self) -> str:
        """One line per rank, acts separated by commas: `0F0,0F1,0B0,0B1`; a rank without acts is `,`."""
        return "\n".join(",".join(map(str, acts)) or _IDLE for acts in self.ranks)

    @classmethod
    def from_grid(
        cls,
        text: str,
        *,
        stage_ranks: Sequence[int] | None = None,
        num_microbatches: int | None = None,
        name: str = "grid",
        frozen_stages: Iterable[int] = (),
    ) -> "Schedule":
        """The schedule that `to_grid` printed (or a person wrote). Empty cells between commas are idle slots.

        Args:
            text: one line per rank, ended as any system ends lines; blank lines at the end are no ranks.
            stage_ranks: rank of every stage [S], -1 where it is spread; default: where the lines have their acts, a
                stage on several lines being spread. Give it where acts cannot tell: a spread encoder with a single
                micro-batch or rank, or with all its acts absent, looks like a stage of one rank.
            num_microbatches: M; default: one more than the largest that occurs.
            name: of the schedule.
            frozen_stages: stages without a backward.

        Raises:
            ScheduleError: text that is no grid, or what `from_acts` raises.
        """
        if not isinstance(text, str):
            raise ScheduleError(f"a grid is text, one line per rank; got {shown(text)}")
        lines = text.replace("\r\n", "\n").split("\n")
        while lines and not lines[-1].strip():
            lines.pop()
        programs = [[Act.parse(cell) for cell in line.split(",") if cell.strip()] for line in lines]
        return cls.from_acts(
            programs,
            stage_ranks=stage_ranks,
            num_microbatches=num_microbatches,
            name=name,
            frozen_stages=frozen_stages,
        )

    @classmethod
    def from_acts(
        cls,
        programs: Sequence[Sequence[Act]],
        *,
        stage_ranks: Sequence[int] | None = None,
        num_microbatches: int | None = None,
        name: str = "grid",
        frozen_stages: Iterable[int] = (),
    ) -> "Schedule":
        """The schedule of these acts, one sequence per rank; arguments as in `from_grid`.

        Raises:
            ScheduleError: no rank, stage or micro-batch; one that no layout has; or what `Schedule` refuses.
        """
        whole_size("ranks of the grid", len(programs), "ranks", below="a schedule has at least one, with acts")
        acts = [act for program in programs for act in program]
        stage = whole_array(
            "stages of the acts", [whole_index(f"{act}: stage", act.stage, "stages") for act in acts], np.int32
        )
        microbatch = whole_array(
            "micro-batches of the acts",
            [whole_index(f"{act}: micro-batch", act.microbatch, "micro-batches") for act in acts],
            np.int32,
        )
        sizes = np.array([len(program) for program in programs])
        num_stages = len(stage_ranks) if stage_ranks is not None else int(stage.max(initial=-1)) + 1
        whole_size("num_stages", num_stages, "stages", below="give stage_ranks, one rank per stage, or acts")
        if num_microbatches is None:
            num_microbatches = int(microbatch.max(initial=-1)) + 1
        num_microbatches = whole_size(
            "num_microbatches", num_microbatches, "micro-batches", below="a schedule has at least one micro-batch"
        )
        check_num_acts(name, num_stages, num_microbatches)
        if stage_ranks is not None:
            stage_ranks = [whole_index("stage_ranks: rank", place, "ranks", at_least=SPREAD) for place in stage_ranks]
        rank = np.repeat(np.arange(len(programs), dtype=np.int32), sizes)
        if stage_ranks is None:
            stage_ranks = [_home(rank[stage == index]) for index in range(num_stages)]
        place = _place(stage_ranks, len(programs), num_microbatches)
        inside = (stage >= 0) & (stage < num_stages) & (microbatch >= 0) & (microbatch < num_microbatches)
        # A spread stage runs where its acts are written; the reverse order lets the first line win.
        seen = np.flatnonzero(inside & (np.asarray(stage_ranks, dtype=np.int32)[stage * inside] == SPREAD))[::-1]
        place[stage[seen], microbatch[seen]] = rank[seen]
        return cls(
            name=name,
            num_ranks=len(programs),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            op=np.array([_code(act) for act in acts], dtype=np.int8),
            stage=stage,
            microbatch=microbatch,
            rank_offsets=_offsets(sizes),
            place=place,
            unit_size=len(programs) if SPREAD in stage_ranks else 0,
            frozen_stages=_frozen(frozen_stages),
        )


class Placed(Protocol):
    """What a schedule needs to know of a layout."""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks of one replica."""
        ...

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Rank of every stage, -1 where it is spread."""
        ...


def build_schedule(
    name: str,
    *,
    num_microbatches: int,
    stage_ranks: Sequence[int] | None = None,
    parallel: Placed | None = None,
    num_stages: int | None = None,
    num_ranks: int | None = None,
    unit_size: int | None = None,
    num_units_ahead: int = _NUM_UNITS_AHEAD,
    clock: tuple[Sequence[int], Sequence[int]] | None = None,
    frozen_stages: Iterable[int] = (),
) -> Schedule:
    """The schedule `name`; the same arguments give the same object (a small cache).

    Args:
        name: see `schedule_names`; case and dashes do not matter.
        num_microbatches: M, at least 1; any number, also fewer than ranks.
        stage_ranks: rank of every stage: [0, 0] puts both stages on one rank, [0, 1, 2] makes a pipeline of three,
            [0, 1, 0, 1] has two chunks a rank (interleaved1f1b), [-1, 0, 1] an encoder spread over both ranks
            (phased, nested); the last stage may be a spread generator.
        parallel: a layout with `stage_ranks` and `num_ranks`, in their place.
        num_stages, num_ranks: in their place too: stages in equal blocks on the ranks, or dealt round where the
            schedule takes several chunks a rank; the first is a spread encoder for phased and nested.
        unit_size: micro-batches of a unit of spread stages: P, and nothing else today.
        num_units_ahead: units that a nested encoder runs ahead; 3 is enough, fewer may deadlock (the simulator
            tells), more cost memory and help only where units are uneven.
        clock: (forward, backward) durations of every stage in whole ticks, for the instants at which nested and
            phased place their units (an LLM chunk takes at least one); default 1 and 2.
        frozen_stages: stages at the head of the chain that need no backward.

    Raises:
        ScheduleError: an unknown name, no micro-batch, or a placement this schedule cannot run.
    """
    name = canonical_name(name)
    num_microbatches = whole_size(
        "num_microbatches", num_microbatches, "micro-batches", below="a schedule has at least one micro-batch"
    )
    num_units_ahead = whole_size(
        "num_units_ahead", num_units_ahead, "micro-batches", below="a nested encoder is at least one unit ahead"
    )
    if parallel is not None:
        stage_ranks, num_ranks = parallel.stage_ranks, parallel.num_ranks
    if stage_ranks is None:
        stage_ranks = _dealt(name, num_stages, num_ranks)
    whole_size("stages of stage_ranks", len(stage_ranks), "stages", below="stages lie on ranks 0, 1, ... in order")
    stage_ranks = tuple(whole_index("stage_ranks: rank", rank, "ranks", at_least=SPREAD) for rank in stage_ranks)
    check_num_acts(name, len(stage_ranks), num_microbatches)
    if num_stages is not None and num_stages != len(stage_ranks):
        raise ScheduleError(f"num_stages={num_stages}, but stage_ranks={list(stage_ranks)} has {len(stage_ranks)}")
    ranks = _check_ranks(stage_ranks, num_ranks)
    spread = SPREAD in stage_ranks
    if unit_size is not None and unit_size not in ((ranks,) if spread else (0, ranks)):
        raise ScheduleError(f"unit_size={unit_size}: a unit is one micro-batch per pipeline rank, {ranks} here")
    forward, backward = clock if clock is not None else ([1] * len(stage_ranks), [2] * len(stage_ranks))
    request = Request(
        name=name,
        num_ranks=ranks,
        num_microbatches=num_microbatches,
        stage_ranks=stage_ranks,
        num_units_ahead=num_units_ahead,
        forward_ticks=check_ticks("forward", forward, len(stage_ranks), num_microbatches),
        backward_ticks=check_ticks("backward", backward, len(stage_ranks), num_microbatches),
    )
    return _build(request, tuple(sorted(set(_frozen(frozen_stages)))))


@lru_cache(maxsize=64)
def _build(request: Request, frozen_stages: tuple[int, ...]) -> Schedule:
    op, stage, microbatch, rank = over_stages(GENERATORS[request.name](request), request.chunks)
    if frozen_stages:
        kept = (op == FORWARD) | ~np.isin(stage, frozen_stages)
        op, stage, microbatch, rank = op[kept], stage[kept], microbatch[kept], rank[kept]
    return Schedule(
        name=request.name,
        num_ranks=request.num_ranks,
        num_stages=len(request.stage_ranks),
        num_microbatches=request.num_microbatches,
        op=op,
        stage=stage,
        microbatch=microbatch,
        rank_offsets=_offsets(np.bincount(rank, minlength=request.num_ranks)),
        place=_place(request.stage_ranks, request.num_ranks, request.num_microbatches),
        unit_size=request.num_ranks if SPREAD in request.stage_ranks else 0,
        frozen_stages=frozen_stages,
    )


def _dealt(name: str, num_stages: int | None, num_ranks: int | None) -> tuple[int, ...]:
    """Ranks of `num_stages` stages where the caller names only numbers."""
    missing = "give stage_ranks, parallel, or num_ranks (and num_stages where a rank has several)"
    if num_ranks is None:
        raise ScheduleError(missing)
    num_ranks = whole_size("num_ranks", num_ranks, "ranks", below=missing)
    if num_stages is not None:
        num_stages = whole_size("num_stages", num_stages, "stages", below="a schedule has at least one stage")
    head = (SPREAD,) if name in ("nested", "phased") else ()
    num_chained = num_ranks if num_stages is None else num_stages - len(head)
    if num_chained < num_ranks:
        raise ScheduleError(f"num_stages={num_stages}: {num_ranks} ranks need {num_ranks + len(head)} stages or more")
    if name in ("1f1b", "gpipe", "zb-h1"):
        return tuple(stage * num_ranks // num_chained for stage in range(num_chained))
    return head + tuple(stage % num_ranks for stage in range(num_chained))


def _check_ranks(stage_ranks: tuple[int, ...], num_ranks: int | None) -> int:
    found = max(stage_ranks, default=-1) + 1
    if found < 1 or min(stage_ranks) < SPREAD or (num_ranks is not None and num_ranks != found):
        raise ScheduleError(
            f"stage_ranks={list(stage_ranks)}, num_ranks={num_ranks}: stages lie on ranks 0, 1, ... in order, every "
            "rank has one; -1 is a stage spread over all of them"
        )
    return found


def _frozen(stages: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(whole_index("frozen_stages: stage", stage, "stages") for stage in stages))


def _code(act: Act) -> int:
    """Code of an act's op; acts that people make may have any."""
    if act.op not in tuple(OP_LETTERS):
        raise ScheduleError(f"{shown(act.op)} is no op; ops are {', '.join(OP_LETTERS)}")
    return OP_LETTERS.index(act.op)


def _offsets(sizes: Sequence[int] | NDArray[np.int64] | NDArray[np.int32]) -> NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _home(ranks: NDArray[np.int32]) -> int:
    """Where the acts of one stage are: their rank, or spread over several. A stage without acts counts as spread."""
    return int(ranks[0]) if len(ranks) and (ranks == ranks[0]).all() else SPREAD


def _place(stage_ranks: Sequence[int], num_ranks: int, num_microbatches: int) -> NDArray[np.int32]:
    """Rank of every (stage, micro-batch), int32 [S, M]; micro-batch m of a spread stage on rank m % P."""
    stages = np.asarray(stage_ranks, dtype=np.int32)[:, None]
    spread = np.arange(num_microbatches, dtype=np.int32)[None, :] % num_ranks
    return np.where(stages == SPREAD, spread, np.broadcast_to(stages, (len(stage_ranks), num_microbatches)))
