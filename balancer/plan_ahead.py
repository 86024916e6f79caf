"""What the next steps need, worked out by a thread while the current step trains.

    numbers 0, 1, 2, ... --thread: make(k)--> futures [ahead] --iterate, in order--> results

Planning is mostly compiled code that lets other threads run, so a training loop that computes hides it. The thread
starts with the first result that is asked for, which is after a DataLoader has forked its workers.

Price: at most `ahead` results in memory, and that many are made in vain when an iteration ends early. An error is
raised where its result is due.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AHEAD = 2
Result = TypeVar("Result")


def made_ahead(make: Callable[[int], Result], numbers: range, *, ahead: int = AHEAD) -> Generator[Result, None, None]:
    """`make(number)` for every number, in order, up to `ahead` of them before they are asked for."""
    waiting: deque[Future[Result]] = deque()
    following = iter(numbers)
    with ThreadPoolExecutor(1, "balancer-plan") as thread:
        try:
            for _ in numbers:
                while len(waiting) <= ahead and (number := next(following, None)) is not None:
                    waiting.append(thread.submit(make, number))
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
