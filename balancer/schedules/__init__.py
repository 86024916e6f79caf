"""Generators of schedules, one a file, behind one signature: `Request` -> the `Program` of every rank.

gpipe, 1f1b        one chunk a rank
zb-h1              the same, with the backward in two halves, the second of which fills the bubble
interleaved1f1b    several chunks a rank
phased, nested     an encoder (and a generator) spread over all ranks around the LLM's 1F1B
"""

from collections.abc import Callable

from balancer.errors import ScheduleError
from balancer.schedules import gpipe, interleaved, nested, one_f_one_b, phased, zb_h1
from balancer.schedules.program import Program, Request
from balancer.whole_numbers import shown

GENERATORS: dict[str, Callable[[Request], list[Program]]] = {
    "1f1b": one_f_one_b.programs,
    "gpipe": gpipe.programs,
    "interleaved1f1b": interleaved.programs,
    "nested": nested.programs,
    "phased": phased.programs,
    "zb-h1": zb_h1.programs,
}


def schedule_names() -> tuple[str, ...]:
    """Schedules that can be built, sorted."""
    return tuple(sorted(GENERATORS))


def canonical_name(name: str) -> str:
    """The registered name that `name` spells: upper or lower case, with or without dashes, also torch's spelling.

    Raises:
        ScheduleError: there is no such schedule.
    """
    if not isinstance(name, str):
        raise ScheduleError(f"schedule {shown(name)} is no name; available: {', '.join(schedule_names())}")
    plain = _plain(name).removeprefix("schedule")
    for known in GENERATORS:
        if _plain(known) == plain:
            return known
    raise ScheduleError(f"schedule {shown(name)} is not available; available: {', '.join(schedule_names())}")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")
