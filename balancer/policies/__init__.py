"""Placement policies by name; one algorithm per module behind `place(problem) -> Placement`.

sequential      the order of selection: what runs without a balancer
length_grouped  sorted by LLM tokens: the baseline of padded training
lpt             balanced by predicted time per stage: longest samples first
joint           assignment, order and encoder places together, by simulating candidates; the default

`lpt` and `joint` are kept only where they simulate no slower than `sequential`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from balancer.errors import PlanError
from balancer.policies import joint, length_grouped, lpt, sequential
from balancer.policies.base import CellTimes, Place, Placement, PlacementProblem

__all__ = [
    "POLICIES",
    "CellTimes",
    "Place",
    "Placement",
    "PlacementProblem",
    "Policy",
    "get_policy",
    "policy_names",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A placement function and whether `sequential` replaces it in steps where it would be faster."""

    name: str
    place: Place
    never_worse: bool = False


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(name="sequential", place=sequential.place),
            Policy(name="length_grouped", place=length_grouped.place),
            Policy(name="lpt", place=lpt.place, never_worse=True),
            Policy(name="joint", place=joint.place, never_worse=True),
        )
    }
)


def policy_names() -> tuple[str, ...]:
    """Registered policies, sorted."""
    return tuple(sorted(POLICIES))


def get_policy(name: str) -> Policy:
    """The policy `name`.

    Raises:
        PlanError: there is none; the text lists those there are.
    """
    if name not in POLICIES:
        raise PlanError(f"policy {name!r} does not exist; available: {', '.join(policy_names())}")
    return POLICIES[name]
