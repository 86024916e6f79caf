"""What the next steps need, worked out by a thread while the current step trains.

    numbers 0, 1, 2, ... --thread: make(k)--> futures [ahead] --iterate, in order--> results

Planning is mostly compiled code that lets other threads run, so a training loop that computes hides it. The thread
starts with the first result that is asked for, which is after a DataLoader has forked its workers.

An iteration that is let go needs no closing: the executor's thread ends by itself. Nothing here may wait for it when
garbage is collected, as that can happen anywhere, also inside the locks that a starting thread holds.

Price: at most `ahead` results in memory, and that many are made in vain when an iteration ends early. An error is
raised where its result is due.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

AHEAD = 2
Result = TypeVar("Result")


class MadeAhead(Iterator[Result], Generic[Result]):
    """`make(number)` for every number, in order, up to `ahead` of them before they are asked for."""

    def __init__(self, make: Callable[[int], Result], numbers: range, *, ahead: int = AHEAD) -> None:
        self._make, self._numbers, self._ahead = make, iter(numbers), ahead
        self._waiting: deque[Future[Result]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    def __next__(self) -> Result:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "balancer-plan")
        while len(self._waiting) <= self._ahead and (number := next(self._numbers, None)) is not None:
            self._waiting.append(self._thread.submit(self._make, number))
        if not self._waiting:
            self.close()
            raise StopIteration
        return self._waiting.popleft().result()

    def close(self) -> None:
        """Make nothing more; what is being made is not waited for."""
        self._numbers = iter(range(0))
        while self._waiting:
            self._waiting.popleft().cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False)
