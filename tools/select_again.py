"""The samples of a run's steps, selected again: by count or by tokens, with or without look-ahead.

    (ids, seed, epoch, cursor) --> plain selection of a step
      no look-ahead                     each step holds its plain selection
      look-ahead, its cost at hand      each step holds what the exchange inside its block gives it
      look-ahead, its cost not at hand  each block of steps holds the plain selections of its steps, together

The last line proves less: which step of its block a sample belongs to stays open.
"""

from typing import cast

import numpy as np
from numpy.typing import ArrayLike

from balancer.cost_model import CostModel
from balancer.errors import LedgerError
from balancer.ledger_groups import groups_of_ids
from balancer.ledger_lines import RunLine
from balancer.lookahead import LookaheadSelector, index_costs
from balancer.select import StepRange, StepSelector, check_tail
from balancer.shuffle import Shuffle
from balancer.token_steps import TokenStepSelector
from dataloaders.index import CostIndex
from tools.found import Found, Int64Array, compare_selection


class SelectAgain:
    """Compares the steps of a run, in order, with what is selected.

    Args:
        run: of the ledger.
        ids: that it trains on, int64 [n]. index: None: it is not at hand.
        cost: what look-ahead evens; None: it is not at hand, or there is no look-ahead.
        found: takes what is wrong.

    Attributes:
        num_steps: steps whose own selection was computed again; num_in_blocks: steps of which only the block was.

    Raises:
        LedgerError, PlanError: what the run is cannot be, or `takes_index` and there is none.
    """

    def __init__(
        self, run: RunLine, ids: Int64Array, *, index: CostIndex | None, cost: CostModel | None, found: Found
    ) -> None:
        self.num_steps = self.num_in_blocks = 0
        self._found = found
        self._plain = _plain_selector(run, ids, index)
        self._ahead: LookaheadSelector | None = None
        self._is_exact = index is not None and cost is not None
        if run.lookahead_steps != 1:
            by_tokens = run.step_tokens > 0
            costs_of = _no_costs if index is None or cost is None else index_costs(index, cost, with_tokens=by_tokens)
            self._ahead = LookaheadSelector(
                self._plain, costs_of, lookahead_steps=run.lookahead_steps, equal_count=not by_tokens
            )
        self._block, self._consumed = range(0), list[Int64Array]()

    def place(self, step: int) -> StepRange:
        """Where step `step` (from 0) lies."""
        return self._plain.step_ids(step)[0]

    def compare(self, step: int, consumed: Int64Array) -> None:
        """Compare a step (from 0) with what is selected, or remember it until its block is complete."""
        if self._ahead is None or self._is_exact:
            selector = self._plain if self._ahead is None else self._ahead
            self.num_steps += 1
            compare_selection(f"step {step + 1}", selector.step_ids(step)[1], consumed, self._found)
            return
        block = self._ahead.block(step)
        if block != self._block:
            self.end()
            self._block = block
        self._consumed.append(consumed)

    def end(self) -> None:
        """Compare the block that was begun last; an unfinished one holds some of its samples."""
        steps, consumed = self._block, self._consumed
        self._block, self._consumed = range(0), []
        if not consumed:
            return
        self.num_in_blocks += len(consumed)
        ids, selected = np.concatenate(consumed), np.concatenate([self._plain.step_ids(step)[1] for step in steps])
        if len(consumed) < len(steps):
            selected = selected[np.isin(selected, ids)]
        compare_selection(f"steps {steps.start + 1} to {steps.stop}", selected, ids, self._found)


def takes_index(run: RunLine) -> bool:
    """Whether the ids alone do not say which samples a step holds: tokens and shards of samples are in the index."""
    return bool(run.step_tokens) or (run.shuffle == "block" and not run.group_runs)


def _plain_selector(run: RunLine, ids: Int64Array, index: CostIndex | None) -> StepSelector | TokenStepSelector:
    groups: ArrayLike | None = None
    if run.group_runs:
        groups = groups_of_ids(run.group_runs, ids, num_samples=run.num_samples)
    elif run.shuffle == "block" and index is not None:
        groups = index.shard_numbers[ids]
    shuffle = cast("Shuffle", run.shuffle)
    if not run.step_tokens:
        return StepSelector(
            ids,
            seed=run.seed,
            global_batch_size=run.global_batch_size,
            tail=check_tail(run.tail),
            shuffle=shuffle,
            groups=groups,
            block_shards=run.block_shards,
        )
    if index is None:
        raise LedgerError("steps by tokens take the index, which knows them")
    return TokenStepSelector(
        ids,
        index.samples["llm_tokens"][ids],
        seed=run.seed,
        step_tokens=run.step_tokens,
        shuffle=shuffle,
        groups=groups,
        block_shards=run.block_shards,
    )


def _no_costs(ids: Int64Array) -> Int64Array:
    """Never asked: blocks of steps are known without any."""
    raise LedgerError(f"no cost of {len(ids)} samples is known")
