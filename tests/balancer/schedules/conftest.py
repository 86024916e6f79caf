"""A run of a schedule that shares nothing with the simulator: who waits for whom, written out once more."""

from collections.abc import Callable

import pytest

from balancer.schedule import Act, Schedule

Blocked = Callable[[Schedule], list[Act]]


def inputs(act: Act, present: set[Act], num_stages: int) -> list[Act]:
    """Acts whose results `act` needs; an absent stage passes the wait on."""
    if act.op == "W":
        return [Act("I", act.stage, act.microbatch)]
    if act.op == "F":
        before = (Act("F", stage, act.microbatch) for stage in reversed(range(act.stage)))
        return [found for found in before if found in present][:1]
    behind = (Act(op, stage, act.microbatch) for stage in range(act.stage + 1, num_stages) for op in ("B", "I"))
    return [Act("F", act.stage, act.microbatch), *[found for found in behind if found in present][:1]]


@pytest.fixture(scope="session")
def blocked() -> Blocked:
    """`blocked(schedule)`: the acts at which ranks hang; empty when all of it runs."""

    def run(schedule: Schedule) -> list[Act]:
        present = {act for program in schedule.ranks for act in program}
        done: set[Act] = set()
        left = [list(reversed(program)) for program in schedule.ranks]
        moved = True
        while moved:
            moved = False
            for program in left:
                while program and all(act in done for act in inputs(program[-1], present, schedule.num_stages)):
                    done.add(program.pop())
                    moved = True
        return [program[-1] for program in left if program]

    return run
