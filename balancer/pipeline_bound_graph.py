"""Which acts of a pipeline come after which, whatever micro-batches turn out empty or without media.

    schedule [A acts]  --constraint_graph-->  PathGraph: nodes that count times of acts, edges, in topological order
    times [C, M]       --longest_path------>  counts int64 [C, M] of the longest path, which no step is shorter than

With all acts present the edges of the simulator would do. An empty micro-batch takes its edges with it, so a path needs
statements that hold for any choice of micro-batches. For the forwards (or the backwards) X(0), X(1), .. of a chunk,
which run in this order, those are, with "present" for micro-batches that have samples:

    until  E[X, m]  the last present X up to m has ended              E[X, m] >= E[X, m-1] + x(m)
    from   S[X, m]  the first present X from m on has started;        S[X, m] >= S[X, m-1] + x(m-1)
                    nodes hold this and x(m) itself

1. Data. If Y waits for X in every micro-batch, E[Y, m] >= E[X, m] + y(m) (the last present one up to m is the same)
   and S[Y, m] >= S[X, m] + x(m). On a last chunk that runs F0 B0 F1 B1 .. both hold for F(m) after B(m-1) too: what
   lies between them is of the empty micro-batch itself. There E[F, m] may stand for E[B, m-1], and S[B, m] for
   S[F, m+1], which rules 2 and 3 heed (`settled`, `started`).
2. Runs. All acts of a rank between X(m) and Y(k) in its program lie between E[X, m] and S[Y, k], present or not.
3. From `from` back to `until`. S[X, 0] is the first act of X there is, E[Y, M-1] the last of Y. If X precedes Y in
   every micro-batch, what a rank runs between X(0) and Y(M-1) lies between them, but for acts before the first present
   X or after the last present Y. Such acts belong to empty micro-batches if all X(m) up to their own micro-batch come
   before them, and all Y(m) from it on after them (for an encoder's act: its unit); others are not counted. Runs that
   begin with S[X, 0] only, or end with E[Y, M-1] only, need one half of this.
4. Encoder chunks alone are also absent where there are no media. Forwards of one rank run in order, so their sum up to
   m is before F(m) of the first LLM chunk, in `until` and `from`; mirrored, F(m) is B(m) and the sum from m on. Where
   items may be routed inside units, F waits for all of the unit and the sum up to m counts for `from` only (the unit's
   only sample may come after m); sums from m on follow E[B, m], and S[B, first micro-batch of the unit].

A spread generator's acts run on all ranks side by side, in no order that holds for empty micro-batches; they are not
counted, which leaves a bound.

A micro-batch range that has no present act leaves a time undefined; then all that a path counts before (`until`) or
after (`from`) is zero, and the rest of the path holds by itself. Counts are linear in times, so mixtures of paths are
bounds too.

Price: a path goes from `until` to `from` as often as rule 3 lets it back, so some paths that hold for full
micro-batches are missing. By linear programs on the benchmark's steps that costs nothing with an encoder on a stage,
0.5 to 1.5 % of the bound on nested with one unit, 4 to 9 % with four.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array
from balancer.schedule import Schedule
from balancer.schedules.program import BACKWARD, FORWARD, INPUT, SPREAD, WEIGHT
from packing._jit import jit

Float64Array = NDArray[np.float64]
_Stream = tuple[bool, int]  # is forward, chunk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PathGraph:
    """Nodes in topological order; every path is a bound.

    Attributes:
        offsets, sources: node v comes after sources[offsets[v] : offsets[v + 1]]; int64 [V + 1], [E].
        count_offsets, components: node v counts components[count_offsets[v] : count_offsets[v + 1]], [V + 1], [Q].
        microbatch: of every node, [V].
        shape: components C = 3 S (forward, backward on the way back, rest of the backward, per stage), M.
    """

    offsets: Int64Array
    sources: Int64Array
    count_offsets: Int64Array
    components: Int64Array
    microbatch: Int64Array
    shape: tuple[int, int]

    def longest_path(self, times: Float64Array) -> Int64Array:
        """How often the longest path counts each of the times [C, M], int64 [C, M]."""
        return _longest(
            self.offsets,
            self.sources,
            self.count_offsets,
            self.components,
            self.microbatch,
            np.ascontiguousarray(times, dtype=np.float64),
        )


def constraint_graph(schedule: Schedule, stage_ranks: tuple[int, ...], has_encoder: bool) -> PathGraph:
    """The graph of a full schedule; see the module."""
    builder = _Builder(schedule, stage_ranks, has_encoder)
    builder.build()
    return builder.finished()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Act:
    """Acts of one chunk that a rank runs in a row: chunk, op, micro-batch, and the micro-batches it may belong to."""

    op: int
    chunk: int
    microbatch: int
    components: tuple[int, ...]
    lowest: int
    highest: int

    @property
    def stream(self) -> _Stream:
        """What runs in the order of micro-batches."""
        return self.op == FORWARD, self.chunk


@dataclass(slots=True)
class _Builder:
    schedule: Schedule
    stage_ranks: tuple[int, ...]
    has_encoder: bool
    counted: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    # Forwards of an alternating last chunk -> its backwards: E of the one may be the end of the other before it.
    settled: dict[_Stream, _Stream] = field(default_factory=dict)
    # And back: S of the backwards may be the start of the forwards after it.
    started: dict[_Stream, _Stream] = field(default_factory=dict)

    def build(self) -> None:
        """All nodes and edges."""
        chunk_of, chunk_ranks = self._chunks()
        alone = self.has_encoder and chunk_of.count(0) == 1
        programs = self._programs(chunk_of, alone)
        acts = {
            (act.stream, act.microbatch): act
            for program in programs
            for act in program
            if self._is_llm(act, alone) and act.op != WEIGHT
        }
        streams = {stream for stream, _ in acts}
        until = {key: self._node(act) for key, act in acts.items()}
        since = {key: self._node(act) for key, act in acts.items()}
        first, last = int(alone), len(chunk_ranks) - 1
        if chunk_ranks[last] == SPREAD:
            last -= 1
        for layer in (until, since):
            self._data(layer, streams, first, last)
        if last == len(chunk_ranks) - 1:  # otherwise a generator's acts lie between F0 and B0
            self._alternating(programs[chunk_ranks[last]], (until, since), alone)
        for program in programs:
            self._runs(program, until, since, alone)
            if alone:
                self._encoders(program, until, since, spread=chunk_ranks[0] == SPREAD)

    def finished(self) -> PathGraph:
        """Nodes sorted such that edges go forward."""
        num = len(self.counted)
        after: list[list[int]] = [[] for _ in range(num)]
        missing = [0] * num
        for source, target in self.edges:
            after[source].append(target)
            missing[target] += 1
        order = [node for node in range(num) if missing[node] == 0]
        for node in order:
            for target in after[node]:
                missing[target] -= 1
                if missing[target] == 0:
                    order.append(target)
        place = {node: index for index, node in enumerate(order)}
        sources: list[list[int]] = [[] for _ in range(num)]
        for source, target in self.edges:
            sources[place[target]].append(place[source])
        counted = [self.counted[node] for node in order]
        return PathGraph(
            offsets=np.cumsum([0, *(len(found) for found in sources)]),
            sources=np.array([source for found in sources for source in found], dtype=np.int64),
            count_offsets=np.cumsum([0, *(len(components) for components, _ in counted)]),
            components=np.array([entry for components, _ in counted for entry in components], dtype=np.int64),
            microbatch=np.array([microbatch for _, microbatch in counted], dtype=np.int64),
            shape=(3 * len(self.stage_ranks), self.schedule.num_microbatches),
        )

    def _chunks(self) -> tuple[list[int], list[int]]:
        """Chunk of every stage, and rank of every chunk."""
        chunk_of, ranks = list[int](), list[int]()
        for rank in self.stage_ranks:
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
            chunk_of.append(len(ranks) - 1)
        return chunk_of, ranks

    @staticmethod
    def _is_llm(act: _Act, alone: bool) -> bool:
        return not (alone and act.chunk == 0)

    def _programs(self, chunk_of: list[int], alone: bool) -> list[list[_Act]]:
        """Acts of every rank, those of a chunk's stages joined, without those of a spread generator."""
        schedule, num_stages = self.schedule, len(self.stage_ranks)
        unit = max(1, schedule.unit_size) if alone and self.stage_ranks[0] == SPREAD else 1
        programs = []
        for start, stop in zip(schedule.rank_offsets[:-1].tolist(), schedule.rank_offsets[1:].tolist(), strict=True):
            program: list[_Act] = []
            for index in range(start, stop):
                op, stage = int(schedule.op[index]), int(schedule.stage[index])
                microbatch, chunk = int(schedule.microbatch[index]), chunk_of[stage]
                if chunk > 0 and self.stage_ranks[stage] == SPREAD:
                    continue
                components = {
                    FORWARD: (stage,),
                    BACKWARD: (num_stages + stage, 2 * num_stages + stage),
                    INPUT: (num_stages + stage,),
                    WEIGHT: (2 * num_stages + stage,),
                }[op]
                before = program[-1] if program else None
                if before and (before.op, before.chunk, before.microbatch) == (op, chunk, microbatch):
                    components = before.components + components
                    program.pop()
                lowest = highest = microbatch
                if alone and chunk == 0 and unit > 1:
                    lowest = microbatch // unit * unit
                    highest = min(lowest + unit, schedule.num_microbatches) - 1
                program.append(
                    _Act(
                        op=op, chunk=chunk, microbatch=microbatch, components=components, lowest=lowest, highest=highest
                    )
                )
            programs.append(program)
        return programs

    def _node(self, act: _Act) -> int:
        self.counted.append((act.components, act.microbatch))
        return len(self.counted) - 1

    def _data(self, layer: dict[tuple[_Stream, int], int], streams: set[_Stream], first: int, last: int) -> None:
        """Rule 1 without the last chunk's own order, and the order of each stream."""
        for is_forward, chunk in streams:
            for m in range(self.schedule.num_microbatches):
                here = layer[(is_forward, chunk), m]
                if m > 0:
                    self.edges.append((layer[(is_forward, chunk), m - 1], here))
                if is_forward and chunk > first:
                    self.edges.append((layer[(True, chunk - 1), m], here))
                if not is_forward:
                    self.edges.append((layer[(True, chunk) if chunk == last else (False, chunk + 1), m], here))

    def _alternating(
        self, program: list[_Act], layers: tuple[dict[tuple[_Stream, int], int], ...], alone: bool
    ) -> None:
        """Rule 1 on the rank of the last chunk, where it runs F0 B0 F1 B1 .."""
        own = [act for act in program if self._is_llm(act, alone) and act.op != WEIGHT]
        if [act.microbatch for act in own] != [m for m in range(self.schedule.num_microbatches) for _ in range(2)]:
            return
        self.settled[own[0].stream] = own[1].stream
        self.started[own[1].stream] = own[0].stream
        for layer in layers:
            self.edges.extend(
                (layer[left.stream, left.microbatch], layer[right.stream, right.microbatch])
                for left, right in pairwise(own)
            )

    def _runs(
        self,
        program: list[_Act],
        until: dict[tuple[_Stream, int], int],
        since: dict[tuple[_Stream, int], int],
        alone: bool,
    ) -> None:
        """Rules 2 and 3 on one rank."""
        end = self.schedule.num_microbatches - 1
        place = {
            (act.stream, act.microbatch): index
            for index, act in enumerate(program)
            if self._is_llm(act, alone) and act.op != WEIGHT
        }
        streams = sorted({stream for stream, _ in place})
        for entry in (None, *streams):
            for leave in (None, *streams):
                start = 0 if entry is None else place[entry, 0] + 1
                stop = len(program) if leave is None else place[leave, end]
                if start <= stop and (entry is None or leave is None or self._precedes(place, entry, leave)):
                    self._run(program[start:stop], start, place, (entry, leave), (until, since))

    def _precedes(self, place: dict[tuple[_Stream, int], int], left: _Stream, right: _Stream) -> bool:
        """Whether a rank runs `left` before `right` in every micro-batch."""
        return all(place[left, m] <= place[right, m] for m in range(self.schedule.num_microbatches))

    def _leads_to(self, place: dict[tuple[_Stream, int], int], entry: _Stream | None, target: _Stream) -> bool:
        """Whether the first present act of `entry` is before every present act of `target` that is not before it."""
        return entry is None or self._precedes(place, entry, self.started.get(target, target))

    def _run(
        self,
        acts: list[_Act],
        start: int,
        place: dict[tuple[_Stream, int], int],
        ends: tuple[_Stream | None, _Stream | None],
        layers: tuple[dict[tuple[_Stream, int], int], dict[tuple[_Stream, int], int]],
    ) -> None:
        """One run of a rank, from anywhere or from the first act of a stream, to anywhere or the last of a stream."""
        entry, leave = ends
        until, since = layers
        before = None if entry is None else since[entry, 0]
        for offset, act in enumerate(acts):
            index = start + offset
            counts = (entry is None or place[entry, act.highest] <= index) and (
                leave is None or place[leave, act.lowest] >= index
            )
            self.counted.append((act.components if counts else (), act.microbatch))
            here = len(self.counted) - 1
            if before is not None:
                self.edges.append((before, here))
            key = act.stream, act.microbatch
            is_placed = place.get(key) == index
            if leave is None and is_placed and before is not None and self._leads_to(place, entry, act.stream):
                self.edges.append((before, since[key]))
            if entry is None and index > 0:
                ahead = acts[offset - 1] if offset else None
                if (
                    ahead is not None
                    and place.get((ahead.stream, ahead.microbatch)) == index - 1
                    and (leave is None or self._precedes(place, self.settled.get(ahead.stream, ahead.stream), leave))
                ):
                    self.edges.append((until[ahead.stream, ahead.microbatch], here))
                    if leave is None and is_placed:
                        self.edges.append((until[ahead.stream, ahead.microbatch], since[key]))
            before = here
        if leave is not None and before is not None:
            self.edges.append((before, until[leave, self.schedule.num_microbatches - 1]))

    def _encoders(
        self,
        program: list[_Act],
        until: dict[tuple[_Stream, int], int],
        since: dict[tuple[_Stream, int], int],
        *,
        spread: bool,
    ) -> None:
        """Rule 4 on one rank."""
        for is_forward in (True, False):
            before = None
            for act in program:
                if act.stream != (is_forward, 0) or act.op == WEIGHT:
                    continue
                here = self._node(act)
                if before is not None:
                    self.edges.append((before, here))
                before, m, key = here, act.microbatch, (is_forward, 1)
                if is_forward:
                    self.edges.append((here, since[key, m]))
                    if not spread:
                        self.edges.append((here, until[key, m]))
                else:
                    self.edges.append((until[key, m], here))
                    self.edges.append((since[key, act.lowest], here))


@jit
def _longest(  # noqa: PLR0917  kernels take flat arguments
    offsets: Int64Array,
    sources: Int64Array,
    count_offsets: Int64Array,
    components: Int64Array,
    microbatch: Int64Array,
    times: Float64Array,
) -> Int64Array:
    num_nodes = len(microbatch)
    length, before = np.zeros(num_nodes), np.full(num_nodes, -1, np.int64)
    last = 0
    for node in range(num_nodes):
        for edge in range(offsets[node], offsets[node + 1]):
            if length[sources[edge]] > length[node] or before[node] < 0:
                length[node], before[node] = length[sources[edge]], sources[edge]
        for entry in range(count_offsets[node], count_offsets[node + 1]):
            length[node] += times[components[entry], microbatch[node]]
        if length[node] > length[last]:
            last = node
    counts = np.zeros(times.shape, np.int64)
    while last >= 0:
        for entry in range(count_offsets[last], count_offsets[last + 1]):
            counts[components[entry], microbatch[last]] += 1
        last = before[last]
    return counts
