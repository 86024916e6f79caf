"""Steps of an equal share of tokens instead of an equal number of samples: how every epoch is cut into K steps.

    T tokens of all n ids, a budget of B tokens   ->   K = ceil(T / B) steps in every epoch, whatever its order
    order of the epoch --running sum of tokens c[p]--> step k begins at b[k] = the largest p with c[p] <= k * T / K

    tokens 4 9 2 5 6 1 3, B = 12: T = 30, K = 3, marks 10 and 20   ->   [4] [9 2 5] [6 1 3]      b = 0 1 4 7

K is the same in every epoch, so the number of steps is known before step 1, and the state of a run is its step number.

How even it is, exactly: a step holds one sample alone, or less than T / K tokens and those of its first sample on top.
T / K <= B, so a step exceeds the budget by less than its first sample. Every step holds at least one sample: where one
sample reaches over several marks, the steps behind it begin one sample later each.

Price: the tokens of all n samples are read once per epoch, in its order (about 0.1 us a sample), and K + 1 numbers of
that epoch are kept. Steps differ in their number of samples: a loss per sample (`sample_mean`) weighs them unequally.
"""

import numpy as np
from numpy.typing import ArrayLike

from balancer.counts import Int64Array
from balancer.errors import PlanError
from balancer.exact_sums import check_total
from balancer.select import StepRange, Tail, check_any_samples
from balancer.shuffle import DEFAULT_BLOCK_SHARDS, EpochOrder, Shuffle

_CHUNK = 2**20  # samples that are looked at at once
_EPOCHS_KEPT = 2  # the loader reads ahead over the end of an epoch


class TokenStepSelector:
    """Sample ids of any step of a run, by token budget (a `Selector`).

    Args:
        ids: eligible rows to train on, int64 [n].
        tokens: LLM tokens of each of them, int64 [n].
        seed: of the epoch order.
        step_tokens: B, the budget of a step over all ranks.
        shuffle, groups, block_shards: how an epoch is permuted, see `balancer.shuffle.EpochOrder`.

    Attributes:
        steps_per_epoch: K.
        tail: no epoch has one: all steps get the same share.

    Raises:
        PlanError: nothing to train on, a budget below 1, or so small that there are more steps than samples.
    """

    def __init__(
        self,
        ids: ArrayLike,
        tokens: ArrayLike,
        *,
        seed: int,
        step_tokens: int,
        shuffle: Shuffle = True,
        groups: ArrayLike | None = None,
        block_shards: int = DEFAULT_BLOCK_SHARDS,
    ) -> None:
        rows, self._tokens = np.asarray(ids, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
        if self._tokens.shape != rows.shape:
            raise PlanError(f"tokens are given for {self._tokens.shape} samples, and there are {len(rows)} ids")
        if len(rows) and int(self._tokens.min()) < 0:
            row = int(self._tokens.argmin())
            raise PlanError(f"tokens={int(self._tokens[row])} of sample {int(rows[row])} is negative")
        self._total = check_total("tokens", self._tokens, rows)
        self.steps_per_epoch = token_steps_per_epoch(len(rows), self._total, step_tokens)
        self.tail = Tail(policy="pad")
        self._ids = rows
        # Positions in `ids`, so that tokens are found without a column over the whole index.
        self._order = EpochOrder(
            np.arange(len(rows)), seed=seed, shuffle=shuffle, groups=groups, block_shards=block_shards
        )
        self._cuts: dict[int, Int64Array] = {}

    def step_ids(self, step: int) -> tuple[StepRange, Int64Array]:
        """Where step `step` lies and its sample ids in selection order."""
        if step < 0:
            raise PlanError(f"step={step}: steps count from 0")
        epoch, index = divmod(step, self.steps_per_epoch)
        cursor, stop = self.cuts(epoch)[index : index + 2].tolist()
        where = StepRange(step=step, epoch=epoch, cursor=cursor, stop=stop)
        return where, self._ids[self._order.take(epoch, np.arange(cursor, stop))]

    def is_whole(self, step: int) -> bool:
        """Every step is."""
        return True

    def tail_dropped(self, epoch: int) -> Int64Array:
        """Nothing is left out."""
        return self._ids[:0]

    def cuts(self, epoch: int) -> Int64Array:
        """int64 [K + 1]: step k of the epoch holds positions cuts[k] to cuts[k + 1] of its order."""
        if epoch not in self._cuts:
            while len(self._cuts) >= _EPOCHS_KEPT:
                self._cuts.pop(next(iter(self._cuts)))
            self._cuts[epoch] = self._cut(epoch)
        return self._cuts[epoch]

    def _cut(self, epoch: int) -> Int64Array:
        num_samples, num_steps = len(self._ids), self.steps_per_epoch
        marks = marks_of(self._total, num_steps)
        cuts = np.zeros(num_steps + 1, dtype=np.int64)
        before = 0
        for start in range(0, num_samples, _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, num_samples))
            sums = before + np.cumsum(self._tokens[self._order.take(epoch, positions)])
            # Marks below are in an earlier chunk, marks above in a later one: this chunk lies before them as a whole.
            first, last = np.searchsorted(marks, [before, int(sums[-1])]).tolist()
            cuts[first:last] += np.searchsorted(sums, marks[first:last], side="right")
            cuts[last:] += len(positions)
            before = int(sums[-1])
        return at_least_one_each(cuts, num_samples)


def token_steps_per_epoch(num_samples: int, num_tokens: int, step_tokens: int) -> int:
    """K = ceil(num_tokens / step_tokens), the steps of every epoch.

    Raises:
        PlanError: as `TokenStepSelector`.
    """
    if step_tokens < 1:
        raise PlanError(f"step_tokens={step_tokens}: a step holds at least one token")
    check_any_samples(num_samples)
    steps = max(1, -(-num_tokens // step_tokens))
    if steps > num_samples:
        raise PlanError(
            f"step_tokens={step_tokens} cuts {num_tokens} tokens into {steps} steps, but there are {num_samples} "
            f"samples and every step holds at least one: raise step_tokens to {-(-num_tokens // num_samples)} or more"
        )
    return steps


def marks_of(num_tokens: int, num_steps: int) -> Int64Array:
    """floor(k * num_tokens / num_steps) for k = 0 ... num_steps, without leaving 64 bits: int64 [num_steps + 1]."""
    share, rest = divmod(num_tokens, num_steps)
    k = np.arange(num_steps + 1, dtype=np.int64)
    return k * share + k * rest // num_steps


def at_least_one_each(cuts: Int64Array, num_samples: int) -> Int64Array:
    """The nearest later (at the end: earlier) cuts [K + 1] that leave no step empty."""
    k = np.arange(len(cuts), dtype=np.int64)
    later = np.maximum.accumulate(np.where(k == 0, 0, cuts) - k) + k
    return np.minimum(later, num_samples - (len(cuts) - 1 - k))
