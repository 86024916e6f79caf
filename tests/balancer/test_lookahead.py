"""Look-ahead: blocks keep their samples, steps become even, and nothing else moves."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.errors import PlanError
from balancer.lookahead import LookaheadSelector, even_weights, none_empty
from balancer.select import TAILS, StepSelector, TailPolicy
from balancer.token_steps import TokenStepSelector

# Kernels are compiled once for all examples.
few = settings(max_examples=25, deadline=None)


def costs_of(ids: np.ndarray) -> np.ndarray:
    """Heavy-tailed and different in both stages, from the id alone."""
    encoder = np.where(ids % 7 == 0, 90_000, 10) * (1 + ids % 3)
    return np.stack([encoder, 1_000 + 37 * (ids % 50)], axis=1).astype(np.int64)


def by_count(n: int, batch: int, lookahead: int, tail: TailPolicy = "pad") -> tuple[StepSelector, LookaheadSelector]:
    plain = StepSelector(np.arange(n), seed=1, global_batch_size=batch, tail=tail)
    return plain, LookaheadSelector(plain, costs_of, lookahead_steps=lookahead, equal_count=True)


@few
@given(st.integers(8, 120), st.integers(1, 8), st.integers(1, 5), st.sampled_from(TAILS), st.integers(0, 2))
def test_every_block_keeps_its_samples_and_every_step_its_size(
    n: int, batch: int, lookahead: int, tail: TailPolicy, epoch: int
) -> None:
    plain, ahead = by_count(n, batch, lookahead, tail)
    assert ahead.steps_per_epoch == plain.steps_per_epoch
    step = epoch * plain.steps_per_epoch
    stop = step + plain.steps_per_epoch
    while step < stop:
        block = ahead.block(step)
        assert block.start == step
        assert len(block) <= lookahead
        before = [plain.step_ids(other)[1] for other in block]
        after = [ahead.step_ids(other)[1] for other in block]
        assert sorted(np.concatenate(after).tolist()) == sorted(np.concatenate(before).tolist())
        assert [len(ids) for ids in after] == [len(ids) for ids in before]
        assert [ahead.step_ids(other)[0] for other in block] == [plain.step_ids(other)[0] for other in block]
        step = block.stop
    assert step == stop, "no block crosses the end of an epoch"


def test_a_look_ahead_of_one_changes_nothing() -> None:
    plain, ahead = by_count(50, 8, 1)
    for step in range(14):
        assert ahead.step_ids(step)[1].tolist() == plain.step_ids(step)[1].tolist()


def test_steps_of_a_block_cost_the_same_in_every_stage() -> None:
    plain, ahead = by_count(512, 32, 8)

    def worst(selector: StepSelector | LookaheadSelector) -> np.ndarray:
        loads = np.stack([costs_of(selector.step_ids(step)[1]).sum(axis=0) for step in range(8)])
        return np.asarray(loads.max(axis=0) / loads.mean(axis=0))

    assert (worst(ahead) < 1.05).all()
    assert worst(plain)[0] > 1.2, "there was something to even"


def test_a_short_last_step_and_a_filled_one_stay_as_they_are() -> None:
    for tail in ("pad", "repeat"):
        plain, ahead = by_count(21, 4, 3, tail)  # type: ignore[arg-type]
        assert [ahead.block(step) for step in range(6)] == [*[range(3)] * 3, *[range(3, 5)] * 2, range(5, 6)]
        assert ahead.step_ids(5)[1].tolist() == plain.step_ids(5)[1].tolist()


def test_blocks_start_anew_in_every_epoch() -> None:
    _, ahead = by_count(20, 4, 3)
    assert [ahead.block(step) for step in (0, 3, 5, 8)] == [range(3), range(3, 5), range(5, 8), range(8, 10)]


def test_any_step_can_be_asked_for_alone() -> None:
    used, fresh = by_count(300, 8, 4)[1], by_count(300, 8, 4)[1]
    for step in range(30):
        used.step_ids(step)
    for step in (17, 2, 90):
        assert used.step_ids(step)[1].tolist() == fresh.step_ids(step)[1].tolist()


def test_a_step_asks_for_the_costs_of_its_block_once_and_of_no_other() -> None:
    asked: list[int] = []

    def counting(ids: np.ndarray) -> np.ndarray:
        asked.append(len(ids))
        return costs_of(ids)

    plain = StepSelector(np.arange(10_000), seed=1, global_batch_size=10)
    ahead = LookaheadSelector(plain, counting, lookahead_steps=5, equal_count=True)
    for step in range(500, 505):
        ahead.step_ids(step)
    assert asked == [50]


@few
@given(st.lists(st.integers(1, 60), min_size=6, max_size=80), st.integers(60, 200), st.integers(2, 4))
def test_steps_by_tokens_exchange_too_and_none_becomes_empty(tokens: list[int], budget: int, lookahead: int) -> None:
    plain = TokenStepSelector(np.arange(len(tokens)), np.array(tokens), seed=2, step_tokens=budget)

    def costs(ids: np.ndarray) -> np.ndarray:
        return np.asarray(tokens, dtype=np.int64)[ids][:, np.newaxis]

    ahead = LookaheadSelector(plain, costs, lookahead_steps=lookahead, equal_count=False)
    steps = [ahead.step_ids(step)[1].tolist() for step in range(plain.steps_per_epoch)]
    assert all(steps)
    assert sorted(chain.from_iterable(steps)) == list(range(len(tokens)))


@given(st.lists(st.tuples(st.integers(0, 2**50), st.integers(0, 900)), min_size=1, max_size=30))
def test_stages_weigh_alike_whatever_their_unit(costs: list[tuple[int, int]]) -> None:
    weights = even_weights(np.array(costs, dtype=np.int64))
    totals = weights.sum(axis=0)
    assert (weights >= 0).all()
    if any(sum(column) for column in zip(*costs, strict=True)):
        assert (totals <= 2**31).all()
        assert (totals >= 2**31 - 2**22).all()
    else:
        assert weights.tolist() == [[1]] * len(costs)


def test_an_empty_part_takes_an_item_of_the_fullest() -> None:
    assert none_empty(np.array([0, 0, 0, 2]), 3).tolist() == [0, 0, 1, 2]
    with pytest.raises(PlanError, match="2 samples for 3 steps"):
        none_empty(np.array([0, 1]), 3)


def test_a_look_ahead_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"lookahead_steps=0: 1 \(no look-ahead\) or more"):
        by_count(4, 2, 0)
