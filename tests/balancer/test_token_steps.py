"""Steps by token budget: the same number in every epoch, an equal share each, every sample once."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import PlanError
from balancer.select import StepRange
from balancer.shuffle import epoch_order
from balancer.token_steps import TokenStepSelector, at_least_one_each, marks_of, token_steps_per_epoch

TOKENS = st.lists(st.one_of(st.integers(1, 30), st.sampled_from([1, 1, 500])), min_size=1, max_size=60)


def selector_of(tokens: list[int], budget: int, *, seed: int = 0, shuffle: bool = True) -> TokenStepSelector:
    ids = np.arange(len(tokens)) * 3  # ids are not positions
    return TokenStepSelector(ids, np.array(tokens), seed=seed, step_tokens=budget, shuffle=shuffle)


def test_the_example_of_the_module() -> None:
    selector = selector_of([4, 9, 2, 5, 6, 1, 3], 12, shuffle=False)
    assert selector.steps_per_epoch == 3
    assert selector.cuts(0).tolist() == [0, 1, 4, 7]
    assert [selector.step_ids(step)[1].tolist() for step in range(3)] == [[0], [3, 6, 9], [12, 15, 18]]
    assert selector.step_ids(4)[0] == StepRange(step=4, epoch=1, cursor=1, stop=4)


@given(TOKENS, st.integers(1, 200), st.integers(0, 3))
def test_an_epoch_is_partitioned_into_a_fixed_number_of_steps_none_of_them_empty(
    tokens: list[int], budget: int, epoch: int
) -> None:
    if -(-sum(tokens) // budget) > len(tokens):
        with pytest.raises(PlanError, match="raise step_tokens to"):
            selector_of(tokens, budget)
        return
    selector = selector_of(tokens, budget)
    first = epoch * selector.steps_per_epoch
    steps = [selector.step_ids(first + k)[1].tolist() for k in range(selector.steps_per_epoch)]
    assert len(steps) == max(1, -(-sum(tokens) // budget))
    assert all(steps)
    assert [*chain.from_iterable(steps)] == epoch_order(np.arange(len(tokens)) * 3, 0, epoch).tolist()


@given(TOKENS, st.integers(1, 200), st.integers(0, 3))
def test_a_step_holds_one_sample_or_less_than_its_share_and_its_first_sample(
    tokens: list[int], budget: int, epoch: int
) -> None:
    if -(-sum(tokens) // budget) > len(tokens):
        return
    selector, total = selector_of(tokens, budget), sum(tokens)
    num_steps = selector.steps_per_epoch
    for k in range(num_steps):
        sizes = [tokens[i // 3] for i in selector.step_ids(epoch * num_steps + k)[1].tolist()]
        assert len(sizes) == 1 or sum(sizes) * num_steps < total + sizes[0] * num_steps
        assert len(sizes) == 1 or sum(sizes) < budget + sizes[0]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(10, 40))
def test_cutting_in_chunks_gives_what_cutting_at_once_gives(tokens: list[int], budget: int) -> None:
    whole = selector_of(tokens, budget).cuts(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("balancer.token_steps._CHUNK", 3)
        assert selector_of(tokens, budget).cuts(2).tolist() == whole.tolist()


@given(st.integers(0, 10**15), st.integers(1, 400))
def test_marks_are_exact_without_leaving_64_bits(total: int, num_steps: int) -> None:
    assert marks_of(total, num_steps).tolist() == [k * total // num_steps for k in range(num_steps + 1)]


@given(st.integers(1, 30), st.data())
def test_cuts_that_coincide_are_moved_apart_and_others_are_left(num_steps: int, data: st.DataObject) -> None:
    n = num_steps + data.draw(st.integers(0, 20))
    inner = sorted(data.draw(st.lists(st.integers(0, n), min_size=num_steps - 1, max_size=num_steps - 1)))
    cuts = np.array([0, *inner, n], dtype=np.int64)
    moved = at_least_one_each(cuts, n)
    assert (moved[0], moved[-1]) == (0, n)
    assert (np.diff(moved) >= 1).all()
    if (np.diff(cuts) >= 1).all():
        assert moved.tolist() == cuts.tolist()


def test_any_step_can_be_asked_for_alone() -> None:
    """A resume starts in the middle; what was asked before must not matter."""
    tokens = (np.arange(50) % 7 + 1).tolist()
    used, fresh = selector_of(tokens, 20), selector_of(tokens, 20)
    for step in (0, 35, 11):
        used.step_ids(step)
    for step in (3, 29, 101):
        assert used.step_ids(step)[0] == fresh.step_ids(step)[0]
        assert used.step_ids(step)[1].tolist() == fresh.step_ids(step)[1].tolist()


def test_an_epoch_is_read_once_however_often_its_steps_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    selector, cut, asked = selector_of([5] * 30, 20), TokenStepSelector._cut, []
    monkeypatch.setattr(TokenStepSelector, "_cut", lambda self, epoch: (asked.append(epoch), cut(self, epoch))[1])
    for _ in range(2):
        for step in range(2 * selector.steps_per_epoch):
            selector.step_ids(step)
    assert asked == [0, 1]


def test_impossible_budgets_are_refused_with_what_would_do() -> None:
    with pytest.raises(PlanError, match="step_tokens=0: a step holds at least one token"):
        token_steps_per_epoch(3, 30, 0)
    with pytest.raises(PlanError, match="no samples to train on"):
        token_steps_per_epoch(0, 0, 5)
    with pytest.raises(PlanError, match=r"into 30 steps, but there are 3 samples .* raise step_tokens to 10 or more"):
        token_steps_per_epoch(3, 30, 1)
    assert token_steps_per_epoch(3, 30, 10) == 3
    with pytest.raises(PlanError, match="step=-1"):
        selector_of([3], 3).step_ids(-1)
    with pytest.raises(PlanError, match=r"tokens are given for \(2,\) samples, and there are 1 ids"):
        TokenStepSelector([1], [1, 2], seed=0, step_tokens=3)
