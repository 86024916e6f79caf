"""A shuffled order without the order: a bijection of any length, keyed, the same everywhere, and evenly random."""

import math
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import PlanError
from balancer.permutation import MAX_LENGTH, KeyedPermutation

WORDS = st.integers(0, 2**64 - 1)


def order(n: int, *, seed: int = 0, epoch: int = 0, stream: int = 0) -> list[int]:
    return KeyedPermutation(n, seed=seed, epoch=epoch, stream=stream).take(np.arange(n)).tolist()


@given(st.integers(1, 3000), WORDS, WORDS, WORDS)
def test_every_position_holds_another_number_below_n(n: int, seed: int, epoch: int, stream: int) -> None:
    assert sorted(order(n, seed=seed, epoch=epoch, stream=stream)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, 65, 2**16 - 1, 2**16, 2**16 + 1])
def test_the_edges_of_the_word_are_bijections_too(n: int) -> None:
    assert sorted(order(n, seed=9)) == list(range(n))


@given(st.integers(1, MAX_LENGTH), WORDS, st.data())
def test_positions_of_a_huge_order_map_into_it_without_a_collision(n: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=40))
    held = KeyedPermutation(n, seed=seed, epoch=0).take(sorted(positions)).tolist()
    assert len(set(held)) == len(positions)
    assert all(0 <= number < n for number in held)


@given(st.integers(1, 5000), st.data())
def test_positions_can_be_asked_for_one_by_one_and_in_any_shape(n: int, data: st.DataObject) -> None:
    permutation = KeyedPermutation(n, seed=3, epoch=1)
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=4, max_size=4))
    together = permutation.take(positions)
    assert [int(permutation.take(position)) for position in positions] == together.tolist()
    assert permutation.take(np.reshape(positions, (2, 2))).tolist() == together.reshape(2, 2).tolist()
    assert permutation.take(np.zeros(0, dtype=np.int64)).shape == (0,)
    assert len(permutation) == n


def test_the_orders_are_the_ones_they_always_were() -> None:
    """A change here reorders every run: it belongs in the changelog under ITERATION ORDER."""
    assert order(10) == [6, 9, 1, 3, 7, 0, 5, 8, 4, 2]
    far = KeyedPermutation(2**62, seed=1, epoch=2, stream=3).take([0, 1, 2**62 - 1])
    assert far.tolist() == [4540888535016084308, 1215597791733306441, 3201549541215057599]


def test_seed_epoch_and_stream_each_give_another_order() -> None:
    orders = {
        tuple(order(100, seed=seed, epoch=epoch, stream=stream))
        for seed in range(4)
        for epoch in range(4)
        for stream in range(4)
    }
    assert len(orders) == 64


def test_swapped_keys_are_not_the_same_order() -> None:
    assert order(100, seed=1, epoch=2) != order(100, seed=2, epoch=1)
    assert order(100, epoch=1) != order(100, stream=1)


def test_it_is_a_few_integers_whatever_its_length() -> None:
    permutation = KeyedPermutation(2**62, seed=0, epoch=0)
    held = [getattr(permutation, name) for name in permutation.__slots__]
    assert not hasattr(permutation, "__dict__")
    assert sum(map(sys.getsizeof, held)) + sum(map(sys.getsizeof, permutation._keys)) < 1000


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_orders_of_few_samples_come_equally_often(n: int) -> None:
    trials, kinds = 1000, math.factorial(n)
    counts = Counter(tuple(order(n, seed=seed)) for seed in range(trials))
    expected = trials / kinds
    assert len(counts) == kinds
    assert _chi_square(np.array(list(counts.values())), expected) < _limit(kinds - 1)


@pytest.mark.parametrize("key", ["seed", "epoch", "stream"])
def test_over_keys_every_sample_comes_equally_often_at_every_position(key: str) -> None:
    n, trials = 40, 2000
    counts = np.zeros((n, n))
    for number in range(trials):
        counts[np.arange(n), order(n, **{key: number})] += 1
    assert _chi_square(counts, trials / n) < _limit((n - 1) ** 2)


def test_neighbours_do_not_stay_neighbours() -> None:
    n, trials = 50, 1000
    steps = np.zeros(n)
    for epoch in range(trials):
        np.add.at(steps, np.diff(order(n, seed=7, epoch=epoch)) % n, 1)
    assert steps[0] == 0
    assert _chi_square(steps[1:], steps.sum() / (n - 1)) < _limit(n - 2)


@pytest.mark.parametrize("n", [0, -1, MAX_LENGTH + 1])
def test_a_length_that_is_none_is_refused(n: int) -> None:
    with pytest.raises(PlanError, match=f"n={n}: a permutation has a length from 1 to 2"):
        KeyedPermutation(n, seed=0, epoch=0)


@pytest.mark.parametrize("key", [{"seed": -1}, {"seed": 2**64}, {"epoch": -1}, {"stream": 2**64}])
def test_keys_outside_64_bits_are_refused(key: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=r"all are integers in \[0, 2\^64\)"):
        KeyedPermutation(5, **{"seed": 0, "epoch": 0, **key})


@pytest.mark.parametrize("positions", [[0, 5], [-1]])
def test_positions_outside_are_refused(positions: list[int]) -> None:
    with pytest.raises(PlanError, match=r"not all in \[0, 5\)"):
        KeyedPermutation(5, seed=0, epoch=0).take(positions)


def _chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(freedom: int) -> float:
    """Five standard deviations above the mean: keys are fixed, so this passes or fails for ever."""
    return freedom + 5 * math.sqrt(2 * freedom)
