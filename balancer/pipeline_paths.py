"""Paths through the acts of a pipeline, each a lower bound on its makespan for any placement.

    rank 0   F0 F1 F2 F3 B0 F4 B1 F5 ..
    rank 1   .. F0 F1 F2 .. B0 F3 B1 ..        a path: F0 F1 F2 of rank 0, F2 of rank 1 and 2, stay on rank 2 until B3,
    rank 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3     back to rank 0, there B3 F6, and so on

A path is a table of how often it counts each component (forward, backward, rest of the backward; per stage) of every
micro-batch. Its length is linear in the sizes of micro-batches, so lengths of mixtures are too: that is what
balancer/pipeline_bound.py needs.

Why a path bounds the makespan. Chunks are runs of stages on one rank; `first` and `last` are the first and last
chunk that every micro-batch runs, an encoder chunk before them runs only with patches. Forwards of a chunk run in the
order of micro-batches, backwards too, and F of a micro-batch before its B.
    L(m)   F_enc(0), F_first(0..m), F_between(m) end before F_last(m): the encoder of micro-batch 0 comes before its
           own F_first, those run in order, and m goes on. If m is empty take the next one that is not, m+: the sum only
           grows, and F and B of the last chunk from m+ on are those from m on.
    E(m)   F_enc(0..m) ends before F_last(m): take m-, the last one up to m with patches. It goes on to F_last(m-),
           which is not after F_last(m).
    Both mirrored for the way back. Between them F_last and B_last of m..m', all on one rank. If all of m..m' is
    empty, F_first(0..m) and B_first(m'..M-1) are on one rank in this order; encoders likewise.
    Turns  From the last chunk after B_last(m) back to chunk q, on with its program from B_q(m) to F_q(k), forward
           again to F_last(k). If m is empty take the one before it, if k is empty the one after: the acts between
           only grow. If nothing is left on the last chunk between two turns, what ran on q belongs to micro-batches
           up to m-, whose B comes before the next turn on every chunk, or the two parts follow in one program.
    Rank p F of the stages before its first one for micro-batch 0, all its work, B of those stages for M-1.
A schedule that splits backwards counts input gradients on the way back, and all of B where nothing follows. The tests
hold every path against simulations with empty and text-only micro-batches.

Price: paths change ranks only to or from the last chunk, and pools are made for stages of equal times: uneven stages
are bounded less tightly. Making a pool takes 10 to 200 ms, once per shape of pipeline and process.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array
from balancer.schedule import Schedule, build_schedule
from balancer.schedules.program import FORWARD, WEIGHT
from packing._jit import jit

Float64Array = NDArray[np.float64]
# (is forward, micro-batch) of the acts of a stage, in the order in which its rank runs them.
Program = list[tuple[bool, int]]

_ENDS = 6
"""Micro-batches at either end at which paths without turns leave the first chunk or come back to it."""
_CLOCK = np.array([1.0, 2.0, 0.0])
"""Times of the components with which a pool is made."""
_NUM_TURNING = 40
_ROUNDS = 100
_WORTHWHILE = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """The chain of stages in five parts; every part is a list of stages, empty where there is none."""

    encoder: list[int]
    first: list[int]
    between: list[int]
    last: list[int]


@lru_cache(maxsize=16)
def path_pool(schedule: str, stage_ranks: tuple[int, ...], has_encoder: bool, num_microbatches: int) -> Int64Array:
    """Paths to be mixed: how often path k counts component c of micro-batch j, int64 [K, C, M].

    Components are forward, backward on the way back and rest of the backward of every stage, C = 3 S. All short paths,
    and the longest ones with turns for those sizes of micro-batches that are best against the paths found so far
    (stages of equal times). Read-only, since it is kept.
    """
    paths = _Paths(stage_ranks, has_encoder, num_microbatches)
    pool = list(paths.all())
    chunks = paths.chunks_before_last()
    if chunks and num_microbatches > 1:
        built = build_schedule(schedule, stage_ranks=stage_ranks, num_microbatches=num_microbatches)
        programs = [_program(built, chunk[0]) for chunk in chunks]
        cost = np.repeat(_CLOCK, len(stage_ranks)) * np.tile(np.array(stage_ranks) >= 0, 3)
        for _ in range(_NUM_TURNING):
            payoff = np.einsum("kcm,c->km", np.stack(pool), cost)[np.newaxis] / float(num_microbatches)
            value, sizes = _value(payoff)
            longest = paths.longest(programs, np.outer(cost, sizes))
            if float((longest * np.outer(cost, sizes)).sum()) <= (1.0 + _WORTHWHILE) * value:
                break
            pool.append(longest)
    stacked = np.stack(pool).astype(np.int64)
    stacked.flags.writeable = False
    return stacked


def _value(payoff: Float64Array) -> tuple[float, Float64Array]:
    """(longest path, sizes [M]) of the sizes that are best against the paths."""
    _, columns = solve_game(np.ascontiguousarray(payoff), _ROUNDS)
    sizes = columns[0]
    return float((payoff[0] * sizes).sum(axis=1).max()) * payoff.shape[2], sizes


def _program(schedule: Schedule, stage: int) -> Program:
    """The program of a stage, without weight gradients."""
    mine = np.flatnonzero((schedule.stage == stage) & (schedule.op != WEIGHT))
    return [(int(schedule.op[act]) == FORWARD, int(schedule.microbatch[act])) for act in mine]


@dataclass(slots=True, kw_only=True)
class _Track:
    """A chunk while its program runs: where it is, and the longest path to there.

    Attributes:
        stages: of the chunk.
        before, after: stages between the encoder and it, and between it and the last chunk.
        program: acts that are still to run.
        path: int64 [3 S, M].
    """

    stages: list[int]
    before: list[int]
    after: list[int]
    program: Iterator[tuple[bool, int]]
    path: Int64Array


class _Paths:
    """Paths as counts int64 [3 S, M] of components: forward, backward on the way, rest of the backward per stage."""

    def __init__(self, stage_ranks: tuple[int, ...], has_encoder: bool, num_microbatches: int) -> None:
        self._ranks = stage_ranks
        self._num_stages, self._num_microbatches = len(stage_ranks), num_microbatches
        self._chain = _chain(stage_ranks, has_encoder)
        ends = range(num_microbatches)
        self._turns = sorted({*ends[:_ENDS], *ends[-_ENDS:]})

    def chunks_before_last(self) -> list[list[int]]:
        """Stages of each chunk between encoder and last chunk; none where a rank has several chunks."""
        stages = self._chain.first + self._chain.between
        chunks = [list(group) for _, group in groupby(stages, key=lambda stage: self._ranks[stage])]
        ranks = [self._ranks[chunk[0]] for chunk in chunks] + [self._ranks[self._chain.last[0]]]
        return chunks if len(set(ranks)) == len(ranks) else []

    def longest(self, programs: list[Program], times: Float64Array) -> Int64Array:
        """The longest path with turns for times float64 [3 S, M] and the programs of `chunks_before_last`."""
        tracks = self._tracks(programs)
        stay, left = self._nothing(), list[Int64Array]()  # on the last chunk; and where it is left after each m
        for m in range(self._num_microbatches):
            ways = [stay, *self._out(m)]
            for track in tracks:
                self._advance(track, left, times, until=m)
                way = track.path.copy()
                self._forward(way, track.after, slice(m, m + 1))
                ways.append(way)
            stay = self._longer(ways, times).copy()
            self._forward(stay, self._chain.last, slice(m, m + 1))
            self._backward(stay, self._chain.last, slice(m, m + 1))
            left.append(stay.copy())
        ends = [path + back for m, path in enumerate(left) for back in self._back(m)]
        final = slice(self._num_microbatches - 1, None)
        for track in tracks:
            self._advance(track, left, times, until=None)
            self._backward(track.path, track.before, final)
            self._backward(track.path, self._chain.encoder, final, whole=True)
            ends.append(track.path)
        return self._longer(ends, times)

    def _tracks(self, programs: list[Program]) -> list["_Track"]:
        tracks: list[_Track] = []
        before: list[int] = []
        stages = self._chain.first + self._chain.between
        for chunk, program in zip(self.chunks_before_last(), programs, strict=True):
            path = self._nothing()
            self._forward(path, self._chain.encoder + before, slice(0, 1))
            after = [stage for stage in stages if stage > chunk[-1]]
            tracks.append(_Track(stages=chunk, before=before, after=after, program=iter(program), path=path))
            before = before + chunk
        return tracks

    def _advance(self, track: "_Track", left: list[Int64Array], times: Float64Array, *, until: int | None) -> None:
        """Run the program of a chunk up to and with the forward of micro-batch `until`, or to its end."""
        for is_forward, m in track.program:
            here = slice(m, m + 1)
            if is_forward:
                self._forward(track.path, track.stages, here)
                if m == until:
                    return
                continue
            entry = left[m].copy()
            self._backward(entry, track.after, here)
            track.path = self._longer([track.path, entry], times)
            nothing_follows = not track.before and not self._chain.encoder
            self._backward(track.path, track.stages, here, whole=nothing_follows)

    @staticmethod
    def _longer(paths: list[Int64Array], times: Float64Array) -> Int64Array:
        lengths = [float((path * times).sum()) for path in paths]
        return paths[lengths.index(max(lengths))]

    def all(self) -> Iterator[Int64Array]:
        """Every path without turns."""
        for rank in range(max(self._ranks) + 1):
            yield from self._rank(rank)
        ways_out = {m: list(self._out(m)) for m in self._turns}
        ways_back = {m: list(self._back(m)) for m in self._turns}
        for start in self._turns:
            for stop in self._turns:
                if start <= stop:
                    middle = self._stay(start, stop)
                    yield from (out + middle + back for out in ways_out[start] for back in ways_back[stop])

    def _nothing(self) -> Int64Array:
        return np.zeros((3 * self._num_stages, self._num_microbatches), dtype=np.int64)

    def _forward(self, path: Int64Array, stages: list[int], microbatches: slice) -> None:
        path[stages, microbatches] += 1

    def _backward(self, path: Int64Array, stages: list[int], microbatches: slice, *, whole: bool = False) -> None:
        path[[self._num_stages + stage for stage in stages], microbatches] += 1
        if whole:
            path[[2 * self._num_stages + stage for stage in stages], microbatches] += 1

    def _rank(self, rank: int) -> Iterator[Int64Array]:
        """All work of a rank, what must come before it, and after."""
        own = [stage for stage, place in enumerate(self._ranks) if place == rank]
        if not own:
            return
        before = [stage for stage in range(own[0]) if self._ranks[stage] >= 0]
        everything = slice(None)
        for whole in (True, False):
            path = self._nothing()
            self._forward(path, before, slice(0, 1))
            self._forward(path, own, everything)
            self._backward(path, own, everything, whole=whole)
            if not whole or not before:
                self._backward(path, before, slice(self._num_microbatches - 1, None))
            yield path

    def _stay(self, start: int, stop: int) -> Int64Array:
        path = self._nothing()
        self._forward(path, self._chain.last, slice(start, stop + 1))
        self._backward(path, self._chain.last, slice(start, stop + 1))
        return path

    def _out(self, m: int) -> Iterator[Int64Array]:
        """Ways to F_last(m): by the first chunk, and by the encoder."""
        chain, path = self._chain, self._nothing()
        if chain.first or m == 0:
            self._forward(path, chain.encoder, slice(0, 1))
            self._forward(path, chain.first, slice(0, m + 1))
            self._forward(path, chain.between, slice(m, m + 1))
            yield path
        if chain.encoder and m > 0:
            path = self._nothing()
            self._forward(path, chain.encoder, slice(0, m + 1))
            yield path

    def _back(self, m: int) -> Iterator[Int64Array]:
        """Ways from B_last(m) to the end."""
        chain, path, end = self._chain, self._nothing(), self._num_microbatches - 1
        if chain.first or m == end:
            self._backward(path, chain.between, slice(m, m + 1))
            self._backward(path, chain.first, slice(m, None), whole=not chain.encoder)
            self._backward(path, chain.encoder, slice(end, None), whole=True)
            yield path
        if chain.encoder and m < end:
            path = self._nothing()
            self._backward(path, chain.encoder, slice(m, None), whole=True)
            yield path


def _chain(stage_ranks: tuple[int, ...], has_encoder: bool) -> _Chain:
    stages = [stage for stage, rank in enumerate(stage_ranks) if rank >= 0]
    chunks = [list(group) for _, group in groupby(stages, key=lambda stage: stage_ranks[stage])]
    # A chunk of the encoder alone is absent in micro-batches without patches.
    alone = has_encoder and chunks[0] == [0]
    encoder = chunks.pop(0) if alone else []
    last = chunks.pop()
    first = chunks.pop(0) if chunks else []
    return _Chain(encoder=encoder, first=first, between=[stage for chunk in chunks for stage in chunk], last=last)


@jit
def solve_game(payoff: Float64Array, num_iterations: int) -> tuple[Float64Array, Float64Array]:
    """Weights of rows [K] and of columns [J, M] in a game payoff [J, K, M]: the row player wants the sum over all J
    large, each of which chooses columns to make it small. Regret matching, later rounds count more; sums in a fixed
    order."""
    num_kinds, num_rows, num_columns = payoff.shape
    row_regret, column_regret = np.zeros(num_rows), np.zeros((num_kinds, num_columns))
    average, columns = np.zeros(num_rows), np.zeros((num_kinds, num_columns))
    row, column = np.full(num_rows, 1.0 / num_rows), np.full((num_kinds, num_columns), 1.0 / num_columns)
    gain, loss = np.zeros(num_rows), np.zeros((num_kinds, num_columns))
    for iteration in range(num_iterations):
        loss[:] = 0.0
        for kind in range(num_kinds):
            for k in range(num_rows):
                if row[k] > 0.0:
                    for m in range(num_columns):
                        loss[kind, m] += row[k] * payoff[kind, k, m]
            value = 0.0
            for m in range(num_columns):
                value += column[kind, m] * loss[kind, m]
            total = 0.0
            for m in range(num_columns):
                column_regret[kind, m] = max(column_regret[kind, m] + value - loss[kind, m], 0.0)
                total += column_regret[kind, m]
            for m in range(num_columns):
                column[kind, m] = column_regret[kind, m] / total if total > 0.0 else 1.0 / num_columns
                columns[kind, m] += (iteration + 1) * column[kind, m]
        gain[:] = 0.0
        for kind in range(num_kinds):
            for k in range(num_rows):
                for m in range(num_columns):
                    gain[k] += column[kind, m] * payoff[kind, k, m]
        value = 0.0
        for k in range(num_rows):
            value += row[k] * gain[k]
        total = 0.0
        for k in range(num_rows):
            row_regret[k] = max(row_regret[k] + gain[k] - value, 0.0)
            total += row_regret[k]
        for k in range(num_rows):
            row[k] = row_regret[k] / total if total > 0.0 else 1.0 / num_rows
            average[k] += (iteration + 1) * row[k]
    rounds = num_iterations * (num_iterations + 1) / 2
    return average / rounds, columns / rounds
