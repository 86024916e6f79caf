"""In which order the samples of a part are drawn: each epoch its own permutation, no sample twice in a step.

    draws of the part   0 ... n-1 | n ... 2n-1 | 2n ...        epoch e = `EpochOrder`, keyed by seed, name, e
    steps             ..[      ][      ][      ]..             the step across the border holds t last, h first samples

A sample among the t last ones of an epoch may be among the h first ones of the next, and a step holds a sample once.
Such samples change places with the next ones after the h first that are free. At most t + h places of the new epoch
change, so it stays a permutation; and its end stays as it was (a step draws at most half of the part), so one look at
the epoch before is enough, and epoch 10^6 is as near as epoch 1.

Price: a part of which one step may draw more than half keeps one order in all its epochs (`keeps_order`): any
n draws in a row are then different without further ado.
"""

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from balancer.counts import Int64Array
from balancer.shuffle import DEFAULT_BLOCK_SHARDS, EpochOrder, Shuffle

_BORDERS_KEPT = 64


class PartOrder:
    """The draws of one part, by number.

    Args:
        ids: int64 [n], its samples; n >= 1 where anything is drawn.
        name, seed: key of its permutations; other parts do not matter.
        keeps_order: one order for all epochs.
        boundary: draw number -> (draws of this part in the same step before it, from it on).
        shuffle, groups, block_shards: see `balancer.shuffle.EpochOrder`.
    """

    def __init__(
        self,
        ids: Int64Array,
        *,
        name: str,
        seed: int,
        keeps_order: bool,
        boundary: Callable[[int], tuple[int, int]],
        shuffle: Shuffle = True,
        groups: ArrayLike | None = None,
        block_shards: int = DEFAULT_BLOCK_SHARDS,
    ) -> None:
        self._num_samples, self.keeps_order, self._boundary = len(ids), keeps_order, boundary
        key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
        self._order = EpochOrder(ids, seed=key, shuffle=shuffle, groups=groups, block_shards=block_shards)
        self._borders: dict[int, tuple[int, int]] = {}

    def take(self, first: int, count: int) -> Int64Array:
        """Sample ids of the draws [first, first + count), int64 [count]."""
        n = self._num_samples
        if self.keeps_order:
            return self._order.take(0, (first % n + np.arange(count)) % n)
        pieces = [np.zeros(0, dtype=np.int64)]
        while count > 0:
            epoch, start = divmod(first, n)
            stop = min(start + count, n)
            pieces.append(self._of_epoch(epoch, start, stop))
            first, count = first + stop - start, count - (stop - start)
        return np.concatenate(pieces)

    def _of_epoch(self, epoch: int, start: int, stop: int) -> Int64Array:
        """Ids at the places [start, stop) of an epoch."""
        ids = self._order.take(epoch, np.arange(start, stop))
        last, first = self._border(epoch)
        if not (last and first) or start >= last + first:
            return ids
        n = self._num_samples
        head = self._order.take(epoch, np.arange(last + first))
        taken = np.isin(head, self._of_epoch(epoch - 1, n - last, n))
        twice = np.flatnonzero(taken[:first])
        free = first + np.flatnonzero(~taken[first:])[: len(twice)]  # of `last` places, len(twice) at least are free
        head[twice], head[free] = head[free], head[twice]
        touched = min(stop, len(head))
        ids[: touched - start] = head[start:touched]
        return ids

    def _border(self, epoch: int) -> tuple[int, int]:
        """(last draws of the epoch before, first draws of this one) in the step that holds both; (0, 0): none does."""
        if not epoch:
            return 0, 0
        if epoch not in self._borders:
            while len(self._borders) >= _BORDERS_KEPT:
                self._borders.pop(next(iter(self._borders)))
            self._borders[epoch] = self._boundary(epoch * self._num_samples)
        return self._borders[epoch]
