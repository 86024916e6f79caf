"""The order of an epoch: a pure function of (ids, seed, epoch) that can be asked at any position.

    mode     position p of an epoch becomes                                              memory besides ids
    none     ids[p]                                                                      0
    full     ids[permutation(p)]                                                         0
    block    shards in permuted order, `block_shards` of them to a window:               [num_shards], one epoch
             p --cumulated window sizes--> (window, offset) --permutation of the window--> (shard, row) --> ids

`full` is the best shuffle and reads everywhere: right for local files. `block` lets a step touch only the shards of one
window (two where it crosses from one to the next; more only where whole windows are smaller than a step): neighbours
are read together and a shard is finished before the next ones are begun, which is what object stores and bounded caches
need. Its price: samples of shards that lie far apart never meet in a step, so it is only as good as the shards are
mixed and `block_shards` large.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.errors import PlanError
from balancer.permutation import KeyedPermutation, check_key

ShuffleMode = Literal["full", "block", "none"]
# True is `full` and False is `none`, as torch's loaders say it.
Shuffle = bool | ShuffleMode
DEFAULT_BLOCK_SHARDS = 16
# Streams of the keyed permutation: samples of a `full` epoch, order of shards, then one for each window.
_FULL_STREAM, _SHARD_STREAM, _FIRST_WINDOW_STREAM = 0, 1, 2
Int64Array = NDArray[np.int64]


def shuffle_mode(shuffle: Shuffle) -> ShuffleMode:
    """`shuffle` as one of the three names.

    Raises:
        PlanError: another name.
    """
    if isinstance(shuffle, bool):
        return "full" if shuffle else "none"
    if shuffle not in ("full", "block", "none"):
        raise PlanError(f"shuffle={shuffle!r} is not one of: full, block, none (or True, False)")
    return shuffle


def groups_of(groups: ArrayLike, samples: Sized) -> Int64Array:
    """`groups` as int64 [len(samples)].

    Raises:
        PlanError: they are of another number of samples.
    """
    numbers = np.asarray(groups, dtype=np.int64)
    if numbers.shape != (len(samples),):
        raise PlanError(f"groups are given for {numbers.shape} samples, and the index holds {len(samples)}")
    return numbers


def stretches_of(groups: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Stretches of equal numbers in `groups` (int64 [n]): where each begins, and its length; both int64 [k]."""
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)).astype(np.int64)
    return starts, np.diff(starts, append=len(groups)).astype(np.int64)


class EpochOrder:
    """`ids` in the order of any epoch.

    Args:
        ids: int64 [n], in storage order.
        seed: of all epochs.
        shuffle: see the module.
        groups: int64 [n], the shard of each of `ids`, or a part of one that is read at once (a row group of Parquet);
            needed by `block`, otherwise ignored.
        block_shards: shards (groups) to a window.

    Raises:
        PlanError: `block` without groups or with another number of them, a block of no shard, another mode.
    """

    def __init__(
        self,
        ids: ArrayLike,
        *,
        seed: int,
        shuffle: Shuffle = True,
        groups: ArrayLike | None = None,
        block_shards: int = DEFAULT_BLOCK_SHARDS,
    ) -> None:
        check_key(seed, 0)
        self._ids, self._seed, self._mode = np.asarray(ids, dtype=np.int64), seed, shuffle_mode(shuffle)
        self._shards: _Shards | None = None
        self._epoch: _BlockEpoch | None = None
        if self._mode == "block":
            self._shards = _shards(self._ids, groups, block_shards)

    def take(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Ids at `positions` (int64 [k], each in [0, n)) of the epoch's order, int64 [k]."""
        check_key(self._seed, epoch)
        if self._mode == "none" or not len(self._ids):
            return self._ids[positions]
        if self._shards is not None:
            if self._epoch is None or self._epoch.epoch != epoch:
                self._epoch = _BlockEpoch.of(self._shards, self._seed, epoch)
            return self._epoch.take(self._shards, positions)
        permutation = KeyedPermutation(len(self._ids), seed=self._seed, epoch=epoch, stream=_FULL_STREAM)
        return self._ids[permutation.take(positions)]


def epoch_order(ids: ArrayLike, seed: int, epoch: int, shuffle: Shuffle = True) -> Int64Array:
    """`ids` in the order of this epoch, int64 [n]."""
    rows = np.asarray(ids, dtype=np.int64)
    return EpochOrder(rows, seed=seed, shuffle=shuffle).take(epoch, np.arange(len(rows)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shards:
    """Ids ordered by shard: those of shard k are ids[starts[k] : starts[k] + sizes[k]]."""

    ids: Int64Array
    starts: Int64Array
    sizes: Int64Array
    block_shards: int


def _shards(ids: Int64Array, groups: ArrayLike | None, block_shards: int) -> _Shards:
    if block_shards < 1:
        raise PlanError(f"block_shards={block_shards}: a window holds at least one shard")
    numbers = None if groups is None else np.asarray(groups, dtype=np.int64)
    if numbers is None or numbers.shape != ids.shape:
        given = "none were given" if numbers is None else f"{numbers.shape} were given for {ids.shape} ids"
        raise PlanError(f"shuffle='block' needs the shard number of every id (groups=), but {given}")
    if (np.diff(numbers) < 0).any():  # an index follows its shards, so this is the exception
        by_shard = np.argsort(numbers, kind="stable")
        ids, numbers = ids[by_shard], numbers[by_shard]
    starts, sizes = stretches_of(numbers)
    return _Shards(ids=ids, starts=starts, sizes=sizes, block_shards=block_shards)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BlockEpoch:
    """One epoch's order of shards and where each of them, and each window, ends.

    Attributes:
        shards: int64 [num_shards], in the epoch's order.
        offsets: int64 [num_shards + 1]: shards[k] fills positions offsets[k] to offsets[k + 1] before the windows are
            mixed.
        windows: int64 [num_windows + 1]: the same for windows.
    """

    seed: int
    epoch: int
    shards: Int64Array
    offsets: Int64Array
    windows: Int64Array

    @classmethod
    def of(cls, shards: _Shards, seed: int, epoch: int) -> "_BlockEpoch":
        num_shards = len(shards.sizes)
        permutation = KeyedPermutation(num_shards, seed=seed, epoch=epoch, stream=_SHARD_STREAM)
        order = permutation.take(np.arange(num_shards))
        offsets = np.zeros(num_shards + 1, dtype=np.int64)
        np.cumsum(shards.sizes[order], out=offsets[1:])
        ends = np.append(np.arange(0, num_shards, shards.block_shards), num_shards)
        return cls(seed=seed, epoch=epoch, shards=order, offsets=offsets, windows=offsets[ends])

    def take(self, shards: _Shards, positions: Int64Array) -> Int64Array:
        window_of = np.searchsorted(self.windows, positions, side="right") - 1
        mixed = np.empty_like(positions)
        for window in np.unique(window_of).tolist():  # one or two for a step
            low, high = int(self.windows[window]), int(self.windows[window + 1])
            stream = _FIRST_WINDOW_STREAM + window
            permutation = KeyedPermutation(high - low, seed=self.seed, epoch=self.epoch, stream=stream)
            inside = window_of == window
            mixed[inside] = low + permutation.take(positions[inside] - low)
        slot = np.searchsorted(self.offsets, mixed, side="right") - 1
        rows: Int64Array = shards.starts[self.shards[slot]] + mixed - self.offsets[slot]
        return shards.ids[rows]
