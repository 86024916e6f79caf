"""Megatron-LM hybrid context parallelism (`BalancedCPScheduler`): a long sequence takes a group of ranks for itself.

    length <= L: 1 rank     <= 2 L: 2 ranks     <= 4 L: 4 ranks ...          work = length^2 / ranks
    wave: 8 ranks  [ giant on 0-3 ][ long on 4-5 ][ short short on 6 ][ short short short on 7 ]   then a barrier

Sequences, longest first, are cut into buckets of equal work, and go from the first bucket that can be served to the
lightest group of their size, or to ranks that are still free. When sizes shrink and all ranks are within 5 % the wave
ends; a last sequence that hurts is taken back, and ranks left without work join the smallest group. Ranks meet at the
end of each wave.

No placement on ranks x micro-batches reaches this where one sample is longer than a mean micro-batch, so it is
reported on its own terms: a bound on what splitting sequences buys, with an exchange that counts as free and a split
that is perfect in every stage. Price: attention needs a collective over the group in every layer; sequences are not
packed. Two faults of the original are not kept: it loops for ever on a sequence that needs more ranks than there are,
and prices a group that was widened by its first sequence alone.
"""

from dataclasses import dataclass, field
from math import ceil, log2

from tools.benchmarks.baseline_step import StepGrid

SLACK = 0.05
BUCKET_SLACK = 1.1


@dataclass(slots=True, kw_only=True)
class Group:
    """`degree` ranks that share each of `items` (rows of the grid), one after the other."""

    degree: int
    items: list[int] = field(default_factory=list)


Wave = list[Group]


def hybrid_context_parallel(grid: StepGrid) -> list[Wave]:
    """Waves of all samples; groups of a wave take at most all ranks. One rank holds a mean micro-batch of tokens."""
    scheduler = _Scheduler(grid.lengths, max(int(grid.sizes.sum()) // grid.num_cells, 1), grid.num_ranks)
    waiting = sorted(range(len(grid)), key=grid.lengths.__getitem__, reverse=True)
    waves = []
    while waiting:
        wave, waiting = scheduler.wave(waiting)
        waves.append(wave)
    return waves


class _Scheduler:
    def __init__(self, lengths: list[int], most_tokens: int, num_ranks: int) -> None:
        self._lengths = lengths
        self._most_tokens = most_tokens
        self._num_ranks = num_ranks

    def _needed(self, item: int) -> int:
        share = self._lengths[item] / self._most_tokens
        degree: int = max(1, 2 ** ceil(log2(share))) if share > 1 else 1
        return min(degree, self._num_ranks)

    def _buckets(self, waiting: list[int]) -> list[list[int]]:
        """As many as there are different group sizes, of about equal work."""
        work = [self._lengths[item] ** 2 / self._needed(item) for item in waiting]
        count = len({self._needed(item) for item in waiting})
        target = sum(work) / count
        buckets: list[list[int]] = []
        current: list[int] = []
        held = 0.0
        for place, (item, cost) in enumerate(zip(waiting, work, strict=True)):
            full = held + cost > target * BUCKET_SLACK
            if current and (full or len(waiting) - place <= count - len(buckets)):
                buckets.append(current)
                current, held = [], 0.0
            current.append(item)
            held += cost
        return [*buckets, current]

    def wave(self, waiting: list[int]) -> tuple[Wave, list[int]]:
        """One wave and what is left, longest first."""
        buckets = self._buckets(waiting)
        groups: Wave = []
        loads: list[float] = []
        first_needed = 0
        while buckets:
            bucket = next((bucket for bucket in buckets if bucket and self._serves(groups, bucket[0])), None)
            if bucket is None:
                break
            item = bucket.pop(0)
            needed = self._needed(item)
            first_needed = first_needed or needed
            self._give(groups, loads, item, needed)
            while buckets and not buckets[0]:
                buckets.pop(0)
            lowest = 0.0 if self._free(groups) else min(loads)
            if needed < first_needed and buckets and max(loads) - lowest <= SLACK * max(loads):
                break
        left = [item for bucket in buckets for item in bucket]
        left += self._trimmed(groups, loads)
        self._widen(groups)
        return groups, sorted(left, key=self._lengths.__getitem__, reverse=True)

    def _free(self, groups: Wave) -> int:
        return self._num_ranks - sum(group.degree for group in groups)

    def _serves(self, groups: Wave, item: int) -> bool:
        needed = self._needed(item)
        return self._free(groups) >= needed or any(group.degree == needed for group in groups)

    def _give(self, groups: Wave, loads: list[float], item: int, needed: int) -> None:
        """To the lightest group of that size, or to free ranks where all of these have work."""
        alike = [index for index, group in enumerate(groups) if group.degree == needed]
        if self._free(groups) >= needed or not alike:
            groups.append(Group(degree=needed))
            loads.append(0.0)
            chosen = len(groups) - 1
        else:
            chosen = min(alike, key=loads.__getitem__)
        groups[chosen].items.append(item)
        loads[chosen] += self._lengths[item] ** 2 / needed

    def _trimmed(self, groups: Wave, loads: list[float]) -> list[int]:
        """Take the last item of the fullest group back while that narrows the spread."""
        taken: list[int] = []
        while not self._free(groups):
            fullest = max(range(len(groups)), key=loads.__getitem__)
            spread = loads[fullest] - min(loads)
            group = groups[fullest]
            if spread <= SLACK * loads[fullest] or len(group.items) <= 1:
                break
            after = [*loads]
            after[fullest] -= self._lengths[group.items[-1]] ** 2 / group.degree
            if max(after) - min(after) >= spread:
                break
            taken.append(group.items.pop())
            loads[:] = after
        return taken

    def _widen(self, groups: Wave) -> None:
        """Ranks without work join the first of the smallest groups, which doubles; as far as they go."""
        while groups and (free := self._free(groups)):
            smallest = min(groups, key=lambda group: group.degree)
            if smallest.degree > free:
                break
            smallest.degree *= 2
