"""How the weight of one part of a mixture changes over the steps of a run: constant, or led from one value to the next.

    WeightStep(start=0, weight=1), WeightStep(start=1000, weight=3, over=400)

    weight  3                       ________
                                 _-'              from step 1,000 on, over 400 steps, to 3
            1  _______________.-'
               0             1000     1400   step

A ramp is cut into at most `RAMP_PHASES` pieces of constant weight (each the value in its middle), so that any step is
reached in constant time. Price: within a ramp the weight is off by at most 1/64 of the way.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from dataloaders.errors import DataError

UNITS = ("samples", "llm_tokens", "visual_tokens")
"""What weights can be shares of."""
RAMP_PHASES = 32
MAX_CHANGES = 1000
MAX_STEP = 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStep:
    """From step `start` on the weight is `weight`, reached linearly within `over` steps (0: at once).

    Raises:
        DataError: a weight that is negative or not finite, or steps outside [0, 2^48].
    """

    start: int = 0
    weight: float
    over: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise DataError(f"weight={self.weight}", remedy="A weight is a finite number of at least 0.")
        for name in ("start", "over"):
            steps = getattr(self, name)
            if not isinstance(steps, int) or not 0 <= steps <= MAX_STEP:
                raise DataError(f"{name}={steps}", remedy=f"It is a number of steps from 0 to {MAX_STEP}.")


@dataclass(frozen=True, slots=True)
class WeightSchedule:
    """The weight of a part at every step.

    Args:
        changes: the first one at step 0 and at once; each begins when the one before is complete.

    Raises:
        DataError: changes out of order, or overlapping.
    """

    changes: tuple[WeightStep, ...]

    def __post_init__(self) -> None:
        if not self.changes or len(self.changes) > MAX_CHANGES:
            raise DataError(f"a schedule of {len(self.changes)} weights", remedy=f"Give 1 to {MAX_CHANGES}.")
        first = self.changes[0]
        if first.start or first.over:
            raise DataError(
                f"the schedule begins at step {first.start + first.over}, not at step 0",
                remedy="Let its first entry have the weight at step 0, without a ramp.",
            )
        for before, after in zip(self.changes, self.changes[1:], strict=False):
            if after.start <= before.start or after.start < before.start + before.over:
                raise DataError(
                    f"the change at step {after.start} begins before the one at step {before.start} "
                    f"(over {before.over} steps) is complete",
                    remedy="Order the entries by step, and let a ramp end before the next change.",
                )

    @classmethod
    def constant(cls, weight: float) -> "WeightSchedule":
        """One weight at all steps."""
        return cls((WeightStep(weight=weight),))

    def pieces(self) -> list[tuple[int, Fraction]]:
        """(first step, weight) of every piece of constant weight, from step 0 on; exact numbers."""
        found: list[tuple[int, Fraction]] = []
        level = Fraction(0)
        for change in self.changes:
            target, count = Fraction(change.weight), min(change.over, RAMP_PHASES)
            for number in range(count):
                found.append(
                    (change.start + change.over * number // count, level + (target - level) * _middle(number, count))
                )
            found.append((change.start + change.over, target))
            level = target
        return found


def _middle(number: int, count: int) -> Fraction:
    return Fraction(2 * number + 1, 2 * count)
