"""What a mixture is asked for: a weight per part at every step, in samples or in tokens, with a past that stays fixed.

    weights = MixtureWeights(unit="llm_tokens", schedules={"captions": constant(1), "pages": constant(1)})
    later   = weights.changed(5000, MixtureWeights(unit="samples", schedules={"captions": constant(1), "pages": ...}))

`later` is `weights` before step 5,000 and the new ones from there on. So a resumed run draws, before the change, what
it has drawn, and every part goes on where it stands: nothing is lost or repeated (cases DR-02, DR-04).

Weights are relative to each other. In a unit of tokens a part's share of the *tokens* is its weight: it is drawn at the
rate weight / mean tokens of its samples (CE-11). All arithmetic is exact, so all hosts agree.
"""

import difflib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from typing import Any

from balancer.errors import PlanError
from dataloaders.errors import DataError
from dataloaders.mixture_spec import MixtureSpec
from dataloaders.weight_schedule import UNITS, WeightSchedule, WeightStep

# A part below this fraction of the largest weight would come up less than once in 10^12 samples: a slip.
MIN_RATIO = Fraction(1, 10**12)
MAX_PIECES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """Weights of the parts of a mixture.

    Attributes:
        unit: what weights are shares of: `samples`, `llm_tokens` or `visual_tokens`.
        schedules: name of a part -> its weight over the steps.
        max_epochs: name -> how often the part may be read; then it is drawn no more, and the others share its weight.
        before: the weights that held before step `since`; None: there were none.
        since: step from which these hold.

    Raises:
        PlanError: an unknown unit, no part, a step without a positive weight, a weight too small beside another, a
            limit for a part that is not there, or more than 1,024 pieces of constant weights.
    """

    unit: str
    schedules: Mapping[str, WeightSchedule]
    max_epochs: Mapping[str, int] = field(default_factory=dict)
    before: "MixtureWeights | None" = None
    since: int = 0

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise PlanError(f"weights in {self.unit!r}: the unit is one of {', '.join(UNITS)}")
        if not self.schedules:
            raise PlanError("a mixture without parts: give at least one a weight")
        if (self.before is None) != (self.since == 0) or (self.before is not None and self.since <= self.before.since):
            raise PlanError(f"weights since step {self.since}, after others; use `changed`")
        for name, limit in self.max_epochs.items():
            check_name(name, self.schedules, "max_epochs")
            if limit < 1:
                raise PlanError(f"max_epochs={limit} of part {name!r}: at least 1; weight 0 leaves a part out")
        self._check_pieces()

    def _check_pieces(self) -> None:
        for start, weights in self.pieces(list(self.schedules)):
            if not any(weights):
                raise PlanError(f"all weights are 0 from step {start} on: a step draws from at least one part")
            for name, weight in zip(self.schedules, weights, strict=True):
                if 0 < weight < max(weights) * MIN_RATIO:
                    raise PlanError(
                        f"the weight of part {name!r} at step {start} is {float(weight):.3g} beside "
                        f"{float(max(weights)):.3g}: it would never be drawn. Give it 0, or at least a 10^-12th"
                    )

    def pieces(self, names: Sequence[str]) -> list[tuple[int, tuple[Fraction, ...]]]:
        """(first step, weight of each of `names`) wherever a weight changes, from `since` on; 0 for unknown names."""
        own = {name: schedule.pieces() for name, schedule in self.schedules.items()}
        starts = sorted({self.since, *(start for pieces in own.values() for start, _ in pieces if start > self.since)})
        if len(starts) > MAX_PIECES:
            raise PlanError(
                f"the weights change {len(starts)} times; at most {MAX_PIECES}. Use fewer changes, or ramps of several "
                f"parts that begin and end together"
            )
        zero = [(0, Fraction(0))]
        return [(start, tuple(_at(own.get(name, zero), start) for name in names)) for start in starts]

    def changed(self, at_step: int, new: "MixtureWeights") -> "MixtureWeights":
        """These weights before `at_step`, `new` from there on; the steps of its schedules are those of the run.

        Weights that are equal change nothing. `at_step` is the next step of the run that goes on.

        Raises:
            PlanError: a step before the last change: the past stays as it was; or `new` has a past of its own.
        """
        if new.before is not None:
            raise PlanError("the new weights have a past of their own; give weights as they are read from a file")
        if at_step < self.since:
            raise PlanError(
                f"weights cannot change at step {at_step}: they last changed at step {self.since}, and the past "
                "is fixed"
            )
        if new.same_as(self):
            return self
        if at_step == self.since:
            return replace(new, before=self.before, since=self.since)
        return replace(new, before=self, since=at_step)

    def same_as(self, other: "MixtureWeights") -> bool:
        """Whether both ask for the same from now on, whatever held before."""
        return (self.unit, dict(self.schedules), dict(self.max_epochs)) == (
            other.unit,
            dict(other.schedules),
            dict(other.max_epochs),
        )

    def revisions(self) -> list["MixtureWeights"]:
        """All weights that ever held, oldest first."""
        return [*(self.before.revisions() if self.before else []), self]

    def to_state(self) -> list[dict[str, Any]]:
        """The weights and their past as plain values for JSON, oldest first."""
        return [
            {
                "since": weights.since,
                "unit": weights.unit,
                "schedules": {name: [asdict(c) for c in s.changes] for name, s in weights.schedules.items()},
                "max_epochs": dict(weights.max_epochs),
            }
            for weights in self.revisions()
        ]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> "MixtureWeights":
        """What `to_state` wrote.

        Raises:
            PlanError: something else.
        """
        weights: MixtureWeights | None = None
        try:
            for entry in state:
                schedules = {
                    str(name): WeightSchedule(tuple(WeightStep(**change) for change in changes))
                    for name, changes in entry["schedules"].items()
                }
                weights = cls(
                    unit=entry["unit"],
                    schedules=schedules,
                    max_epochs=dict(entry["max_epochs"]),
                    before=weights,
                    since=entry["since"],
                )
        except (AttributeError, DataError, KeyError, TypeError) as error:
            raise PlanError(f"the saved weights of the mixture are damaged: {error!r}") from error
        if weights is None:
            raise PlanError("the saved state holds no weights of a mixture")
        return weights


def weights_of(spec: MixtureSpec) -> MixtureWeights:
    """The weights of a mixture as it is written down.

    Raises:
        PlanError: see `MixtureWeights`.
    """
    return MixtureWeights(
        unit=spec.unit,
        schedules={part.name: part.schedule for part in spec.parts},
        max_epochs={part.name: part.max_epochs for part in spec.parts if part.max_epochs is not None},
    )


def check_name(name: str, names: Iterable[str], what: str) -> None:
    """Raise PlanError that names the closest part where `name` is none of `names`."""
    known = list(names)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(repr, known))}"
        raise PlanError(f"{what} names part {name!r}, which is not in the mixture{hint}")


def _at(pieces: Sequence[tuple[int, Fraction]], step: int) -> Fraction:
    return pieces[bisect_right(pieces, step, key=lambda piece: piece[0]) - 1][1]
