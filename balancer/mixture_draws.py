"""How many samples of each part a mixture has drawn before any step, counted exactly without drawing them.

    steps     0 ........ 1000 .. 1012 .. 1025 ....... 1400 .............    (a ramp is up to 32 phases)
    phases   [ bounds 0 ][ 1  ][ 2  ] ...            [ last, without an end ]
    draws of part k before step s  =  what came before the phase  +  its slots in [phase.start * B, s * B)

Weights are constant in a phase. Slots are numbered through the whole run, B = `global_batch_size` per step, and given
to parts by `balancer.rotation`. So every step has exactly B samples, and a part's count is a few hundred integer
operations at step 0 and at step 10^9.

A part with `max_epochs` stops before the first step that would read it once more. Price: fewer samples than it has in
one step stay unread in its last epoch. When no part is left, the run ends.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array
from balancer.errors import PlanError
from balancer.mixture_weights import MixtureWeights
from balancer.rotation import bounds_of, count_below, most_in_window, points
from dataloaders.weight_schedule import MAX_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSize:
    """A part as far as counting goes: samples that can be drawn, and their tokens."""

    name: str
    samples: int
    llm_tokens: int
    visual_tokens: int

    def rate(self, weight: Fraction, unit: str) -> Fraction:
        """Samples to draw, relative to other parts, for a weight in `unit`.

        Raises:
            PlanError: a positive weight, and nothing to draw or no tokens to weigh.
        """
        if not weight:
            return weight
        if not self.samples:
            raise PlanError(
                f"part {self.name!r} has a weight, but no sample that can be drawn: it is empty, or all of it was "
                f"dropped; give it weight 0 or leave it out"
            )
        total = {"samples": self.samples, "llm_tokens": self.llm_tokens, "visual_tokens": self.visual_tokens}[unit]
        if not total:
            raise PlanError(
                f"part {self.name!r} has no {unit.replace('_', ' ')}, so no number of its samples makes up a share of "
                f"them: give it weight 0, or weights in samples or llm_tokens"
            )
        return weight * self.samples / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps from `start` on with the same shares.

    Attributes:
        bounds: points of part k are [bounds[k], bounds[k + 1]); [K + 1].
        base: draws of each part before the phase, less its slots before it; [K].
        weights: as asked for, in the unit of that time, 0 for parts that have stopped; [K].
    """

    start: int
    bounds: tuple[int, ...]
    base: tuple[int, ...]
    weights: tuple[Fraction, ...]

    def draws_of(self, part: int, slot: int) -> int:
        """Draws of a part before `slot` of this phase."""
        low, high = self.bounds[part : part + 2]
        return self.base[part] + count_below(high, slot) - count_below(low, slot)

    def draws(self, slot: int) -> list[int]:
        """Draws of every part before `slot`."""
        below = [count_below(bound, slot) for bound in self.bounds]
        return [base + high - low for base, low, high in zip(self.base, below, below[1:], strict=False)]

    def parts(self, slot: int, count: int) -> Int64Array:
        """Which part each of the slots [slot, slot + count) belongs to, int64 [count]."""
        drawn = [k for k in range(len(self.base)) if self.bounds[k] < self.bounds[k + 1]]
        lows = np.array([self.bounds[k] for k in drawn], dtype=np.uint64)
        owner = np.searchsorted(lows, points(slot, count), side="right") - 1
        return np.array(drawn, dtype=np.int64)[owner]


class DrawTable:
    """Counts of draws at any step, a pure function of (sizes, weights, global batch size).

    Attributes:
        phases: in order, the first at step 0; the last one has no end.
        num_steps: steps after which no part is left; None: the run has no end of its own.
        peaks: int64 [revisions, K], the most draws of a part in any step, of each revision of the weights as if it held
            for ever: a later change does not alter what was derived from it.

    Raises:
        PlanError: a step without a sample, weights for a part without samples or tokens, or a change of weights behind
            the end of the run.
    """

    def __init__(self, sizes: Sequence[PartSize], weights: MixtureWeights, global_batch_size: int) -> None:
        if global_batch_size < 1:
            raise PlanError(f"global_batch_size={global_batch_size}: a step holds at least one sample")
        self._sizes, self._batch = sizes, global_batch_size
        self.phases: list[Phase] = []
        self.num_steps: int | None = None
        peaks = []
        for revision in weights.revisions():
            if self.num_steps is not None and self.num_steps < revision.since:
                raise PlanError(
                    f"the weights change at step {revision.since}, but the run ends at step {self.num_steps}"
                )
            self.phases = [phase for phase in self.phases if phase.start < revision.since]
            before = self._draws(revision.since) if self.phases else [0] * len(sizes)
            phases, self.num_steps = self._phases_of(revision, before)
            self.phases += phases
            peaks.append(self._peaks(phases))
        if self.num_steps == 0:
            raise PlanError(
                f"a step of {global_batch_size} samples reads every part with a weight more than `max_epochs` times: "
                f"lower the global batch size, or raise the limits"
            )
        self.peaks: NDArray[np.int64] = np.array(peaks, dtype=np.int64).reshape(len(peaks), len(sizes))

    def phase_at(self, step: int) -> Phase:
        """The phase that holds `step`."""
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.start) - 1]

    def draws_before(self, step: int) -> list[int]:
        """Samples drawn from each part in the steps [0, step)."""
        return self._draws(step if self.num_steps is None else min(step, self.num_steps))

    def boundary(self, part: int, draw: int) -> tuple[int, int]:
        """(draws of the part in the step that holds its draw number `draw` before it, from it on)."""
        high = 1
        while self._draws_of(part, high) <= draw:
            high *= 2
            if high > 2 * MAX_STEP:
                raise PlanError(f"part {self._sizes[part].name!r} is never drawn {draw} times")
        step = bisect_right(range(high + 1), draw, key=lambda step: self._draws_of(part, step)) - 1
        return draw - self._draws_of(part, step), self._draws_of(part, step + 1) - draw

    def _draws(self, step: int) -> list[int]:
        # The step at which a phase begins is counted by the one before it, and by itself, alike.
        return self.phase_at(step).draws(step * self._batch) if self.phases else [0] * len(self._sizes)

    def _draws_of(self, part: int, step: int) -> int:
        last = step if self.num_steps is None else min(step, self.num_steps)
        return self.phase_at(last).draws_of(part, last * self._batch)

    def _phases_of(self, revision: MixtureWeights, before: list[int]) -> tuple[list[Phase], int | None]:
        """(phases of a revision that begins with these draws, the step at which no part is left)."""
        pieces = revision.pieces([size.name for size in self._sizes])
        limits = {
            k: revision.max_epochs[size.name] * size.samples
            for k, size in enumerate(self._sizes)
            if size.name in revision.max_epochs
        }
        phases: list[Phase] = []
        stopped: set[int] = set()
        for number, (start, asked) in enumerate(pieces):
            stop = pieces[number + 1][0] if number + 1 < len(pieces) else None
            step: int | None = start
            while step is not None:
                weights = tuple(Fraction(0) if k in stopped else weight for k, weight in enumerate(asked))
                if not any(weights):
                    return phases, step
                phase = self._phase(step, weights, revision.unit, before)
                full = {k: self._full_at(phase, k, limit) for k, limit in limits.items() if weights[k]}
                end = min([at for at in (*full.values(), stop) if at is not None], default=None)
                if end is None or end > step:
                    phases.append(phase)
                if end is not None:
                    before = phase.draws(end * self._batch)
                    stopped |= {k for k, at in full.items() if at == end}
                step = end if end is not None and end != stop else None
        return phases, None

    def _phase(self, start: int, weights: tuple[Fraction, ...], unit: str, before: Sequence[int]) -> Phase:
        rates = [size.rate(weight, unit) for size, weight in zip(self._sizes, weights, strict=True)]
        empty = Phase(start=start, bounds=bounds_of(rates), base=(0,) * len(rates), weights=weights)
        slots = empty.draws(start * self._batch)
        base = tuple(drawn - own for drawn, own in zip(before, slots, strict=True))
        return Phase(start=start, bounds=empty.bounds, base=base, weights=weights)

    def _full_at(self, phase: Phase, part: int, limit: int) -> int | None:
        """The first step that would draw more than `limit` of a part in all if the phase had no end; None: never."""

        def over(step: int) -> bool:
            return phase.draws_of(part, (step + 1) * self._batch) > limit

        span = 1
        while not over(phase.start + span):
            span *= 2
            if span > MAX_STEP:
                return None
        return phase.start + bisect_left(range(span + 1), True, key=lambda after: over(phase.start + after))

    def _peaks(self, phases: Sequence[Phase]) -> list[int]:
        widths = [{phase.bounds[k + 1] - phase.bounds[k] for phase in phases} or {0} for k in range(len(self._sizes))]
        # More points fit into a wider arc.
        return [most_in_window(max(own), self._batch) for own in widths]
