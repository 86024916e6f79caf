"""Look-ahead: neighbouring steps exchange samples so that each of them costs the same.

    steps of an epoch     0  1  2  3 | 4  5  6  7 | 8  9        L = 4: aligned blocks, the last one shorter
    a block of L steps    ids [L * G] --cost of each [S]--> partition into L parts of G samples --> steps of the block

A balanced placement cannot help where a whole step is heavier than the next one (a step of videos after a step of
captions): all ranks are busy then, only longer. Even steps need fewer micro-batches, less memory in the worst step, and
make time per step predictable.

Which samples a step holds stays a pure function of (index, config, seed, epoch, block): costs come from the index by a
cost model that must not depend on the layout, so that a run may go on with other ranks. A block holds the samples that
it holds without look-ahead; a sample moves by at most L - 1 steps; nothing crosses the end of an epoch; L = 1 changes
nothing. The last step of an epoch stays as it is where it is short or filled up with repeated samples.

Price: ITERATION ORDER. Steps are no longer independent draws: a heavy sample comes together with light ones. Asking for
a step costs the selection and costs of its whole block, O(L * G), once per block. Steps by tokens keep no hard bound:
their tokens are evened like a cost.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import IndexLike, Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.select import Selector, StepRange
from packing import partition

# sample ids [n] -> cost of each in each of S stages, int64 [n, S]
CostsOf = Callable[[Int64Array], Int64Array]
_BITS = 31  # of a column that is scaled: sums of 2^31 columns' totals stay far within 64 bits


class BlockSelector(Selector, Protocol):
    """A selector whose steps may exchange samples: each sample at most once per epoch, but for steps not whole."""

    def is_whole(self, step: int) -> bool:
        """Whether a step takes part: it has the size that was asked for and repeats nothing."""


class LookaheadSelector:
    """The steps of another selector with samples exchanged inside aligned blocks of `lookahead_steps` (a `Selector`).

    Args:
        inner: selects the samples of every block.
        costs_of: cost per stage of samples, from the index alone; blind to the layout.
        lookahead_steps: L.
        equal_count: every step keeps its number of samples (steps by sample count).

    Raises:
        PlanError: `lookahead_steps` below 1.
    """

    def __init__(self, inner: BlockSelector, costs_of: CostsOf, *, lookahead_steps: int, equal_count: bool) -> None:
        if lookahead_steps < 1:
            raise PlanError(f"lookahead_steps={lookahead_steps}: 1 (no look-ahead) or more")
        self._inner, self._costs_of, self._lookahead_steps = inner, costs_of, lookahead_steps
        self._equal_count = equal_count
        self._blocks: dict[int, list[Int64Array]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """As without look-ahead."""
        return self._inner.steps_per_epoch

    def step_ids(self, step: int) -> tuple[StepRange, Int64Array]:
        """Where the step lies without look-ahead, and its sample ids: those of its block that fell to it."""
        where, ids = self._inner.step_ids(step)
        block = self.block(step)
        if len(block) < 2:
            return where, ids
        first = block.start
        if first not in self._blocks:
            while len(self._blocks) >= 2:  # the loader is in the next block while the trainer is in this one
                self._blocks.pop(next(iter(self._blocks)))
            steps = [self._inner.step_ids(other)[1] for other in block]
            self._blocks[first] = self._exchanged(steps)
        return where, self._blocks[first][step - first]

    def block(self, step: int) -> range:
        """The steps that exchange samples with `step`, itself included."""
        per_epoch = self.steps_per_epoch
        epoch_start = step - step % per_epoch
        start = step - (step - epoch_start) % self._lookahead_steps
        stop = min(start + self._lookahead_steps, epoch_start + per_epoch)
        if not self._inner.is_whole(stop - 1):  # only the last step of an epoch may not be
            stop -= 1
        return range(start, stop) if step < stop else range(step, step + 1)

    def _exchanged(self, steps: list[Int64Array]) -> list[Int64Array]:
        """The samples of a block, dealt to its steps anew; each step in the order of selection."""
        ids = np.concatenate(steps)
        weights = even_weights(self._costs_of(ids))
        part_of = partition(weights, len(steps), equal_count=self._equal_count).part_of.astype(np.int64)
        part_of = none_empty(part_of, len(steps))
        # Parts have no order of their own: the one with the earliest sample is the first step.
        firsts = [int(np.flatnonzero(part_of == part)[0]) for part in range(len(steps))]
        dealt = [ids[part_of == part] for part in np.argsort(firsts)]
        for own in dealt:
            own.flags.writeable = False
        return dealt


def index_costs(index: IndexLike, model: CostModel, *, with_tokens: bool) -> CostsOf:
    """Forward and backward time per stage, and tokens where steps are cut by tokens: int64 [n, S] or [n, S + 1]."""

    def costs_of(ids: Int64Array) -> Int64Array:
        counts = StepCounts.from_index(index, ids)
        costs = model.forward_ns(counts) + model.backward_ns(counts)
        return np.concatenate([costs, counts.llm_tokens[:, np.newaxis]], axis=1) if with_tokens else costs

    return costs_of


def even_weights(costs: Int64Array) -> Int64Array:
    """Costs [n, S] with every stage scaled to the same total, so that each of them is evened: int64 [n, <= S].

    Which stage binds is up to the layout, which selection must not know. Stages that cost nothing are left out.
    """
    columns = [_scaled(column) for column in costs.T if int(column.sum())]
    return np.stack(columns, axis=1) if columns else np.ones((len(costs), 1), dtype=np.int64)


def _scaled(column: Int64Array) -> Int64Array:
    """The column times 2^31 / its total, in integers."""
    total = int(column.sum())
    shift = max(0, total.bit_length() - _BITS)
    return np.asarray((column >> shift) * 2**_BITS // (total >> shift), dtype=np.int64)


def none_empty(part_of: Int64Array, num_parts: int) -> Int64Array:
    """`part_of` [n] with at least one item in every part: an empty part takes the last item of the fullest one.

    Raises:
        PlanError: fewer items than parts.
    """
    if len(part_of) < num_parts:
        raise PlanError(f"{len(part_of)} samples for {num_parts} steps: a step holds at least one")
    counts, moved = np.bincount(part_of, minlength=num_parts), part_of.copy()
    for part in np.flatnonzero(counts == 0).tolist():
        fullest = int(counts.argmax())
        moved[np.flatnonzero(moved == fullest)[-1]] = part
        counts[fullest] -= 1
        counts[part] += 1
    return moved
