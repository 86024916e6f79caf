"""WLB-LLM (arXiv 2503.17924): long documents wait in queues until there is one for every micro-batch.

    step t: documents --longer than a threshold--> queue of its level      (level i: thresholds[i] <= length)
            a queue with as many documents as micro-batches gives them to this step
            all others, longest first: micro-batch of least work if it fits, else the emptiest, else to step t + 1

Documents of one level are alike, so a step with outliers has one in every micro-batch and the others have none.
Property: both kinds of step are even. Price: samples change their step, so a step is no longer the step that was
selected (the loss curve is another one), and the last queues are never full. Work is attention and the linear part, of
the LLM alone; encoders, and where a micro-batch runs, are not looked at: the micro-batches are dealt to ranks in turn.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tools.benchmarks.baseline_step import NOWHERE, Placed, StepGrid

THRESHOLD_SHARES = (0.25, 0.5, 0.75)
"""Levels of the queues, in parts of the capacity. The paper tunes their number and place on its data."""


class OutlierDelay:
    """The queues of one run; steps are given one after the other.

    Samples are named by (step, row), so that whoever asks can tell which ones run when.

    Args:
        capacity: tokens of a micro-batch. num_cells: micro-batches of all ranks.
        threshold_shares: where levels begin, in parts of the capacity; none: nothing is delayed.
    """

    def __init__(self, capacity: int, num_cells: int, threshold_shares: Sequence[float] = THRESHOLD_SHARES) -> None:
        self._capacity = capacity
        self._num_cells = num_cells
        self._thresholds = [int(share * capacity) for share in threshold_shares]
        self._queues: list[list[tuple[int, int]]] = [[] for _ in self._thresholds]
        self._left: list[tuple[int, int]] = []
        self._lengths: list[list[int]] = []
        self._work: list[list[int]] = []

    @property
    def waiting(self) -> list[tuple[int, int]]:
        """Samples that have not run yet."""
        return [*self._left, *(name for queue in self._queues for name in queue)]

    def step(self, lengths: Sequence[int], work: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Samples of every micro-batch after those of one more step came in.

        Raises:
            ValueError: a sample that no micro-batch has room for: it would wait for ever.
        """
        if max(lengths, default=0) > self._capacity:
            raise ValueError(f"a sample of {max(lengths)} tokens fits into no micro-batch of {self._capacity}")
        now = len(self._lengths)
        self._lengths.append(list(lengths))
        self._work.append(list(work))
        ready = self._left
        for row, length in enumerate(lengths):
            levels = [level for level, threshold in enumerate(self._thresholds) if length >= threshold]
            (self._queues[levels[-1]] if levels else ready).append((now, row))
        for queue in self._queues:
            if len(queue) >= self._num_cells:
                ready += queue[: self._num_cells]
                del queue[: self._num_cells]
        return self._packed(ready)

    def flush(self) -> Iterator[list[list[tuple[int, int]]]]:
        """Steps of what waits at the end, as many as it takes."""
        for queue in self._queues:
            self._left += queue
            queue.clear()
        while self._left:
            yield self._packed(self._left)

    def _packed(self, ready: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Longest first; what fits nowhere is left for the next step."""
        cells: list[list[tuple[int, int]]] = [[] for _ in range(self._num_cells)]
        held, work = np.zeros(self._num_cells, np.int64), np.zeros(self._num_cells, np.int64)
        self._left = []
        for step, row in sorted(ready, key=lambda name: self._lengths[name[0]][name[1]], reverse=True):
            length = self._lengths[step][row]
            for cell in (int(work.argmin()), int(held.argmin())):
                if held[cell] + length <= self._capacity:
                    cells[cell].append((step, row))
                    held[cell] += length
                    work[cell] += self._work[step][row]
                    break
            else:
                self._left.append((step, row))
        return cells


def variable_length_packing(grid: StepGrid) -> Placed:
    """WLB-LLM's packing alone, without the delay: what does not fit is left for another step, and counts as lost."""
    packer = OutlierDelay(grid.capacity, grid.num_cells, threshold_shares=())
    cells = np.full((len(grid), 2), NOWHERE, np.int64)
    for cell, names in enumerate(packer.step(grid.lengths, grid.costs[:, -1].tolist())):
        cells[[row for _, row in names]] = cell % grid.num_ranks, cell // grid.num_ranks
    return Placed(cells=cells)
