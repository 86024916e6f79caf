"""Lower bounds on the makespan: never above the optimum, monotone, and as strong as they claim."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import PackingError, SizeOverflowError, makespan_lower_bound, partition

quick = settings(max_examples=100, deadline=None)
rows = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=7)


@quick
@given(weights=rows, num_parts=st.integers(1, 4), equal_count=st.booleans(), unit=st.sampled_from([1, 6]))
@example(weights=[(5, 0), (5, 0), (5, 0)], num_parts=2, equal_count=False, unit=1)
@example(weights=[(9, 0), (1, 0), (1, 0), (1, 0)], num_parts=2, equal_count=True, unit=1)
@example(weights=[(9, 0), (8, 0), (1, 0), (2, 0), (2, 0)], num_parts=2, equal_count=True, unit=1)
def test_the_bound_is_never_above_the_optimum(
    exact_makespan: Callable[..., int], weights: list[tuple[int, int]], num_parts: int, equal_count: bool, unit: int
) -> None:
    table = [(unit * first, unit * second) for first, second in weights]
    bound = makespan_lower_bound(table, num_parts, equal_count=equal_count)
    assert bound <= exact_makespan(table, num_parts, equal_count=equal_count)
    for stage in (0, 1):
        column = [row[stage] for row in table]
        assert bound >= max(*column, -(-sum(column) // num_parts))


@quick
@given(weights=rows, num_parts=st.integers(1, 4), equal_count=st.booleans())
def test_the_bound_on_sums_is_that_of_one_stage(
    weights: list[tuple[int, int]], num_parts: int, equal_count: bool
) -> None:
    sums = [first + second for first, second in weights]
    bound = makespan_lower_bound(weights, num_parts, equal_count=equal_count, stage_norm="sum")
    assert bound == makespan_lower_bound(sums, num_parts, equal_count=equal_count)
    assert bound == partition(weights, num_parts, equal_count=equal_count, stage_norm="sum").lower_bound


def naive_pigeonhole(weights: list[int], num_parts: int) -> int:
    descending = sorted(weights, reverse=True)
    best = 0
    for fold in range(1, (len(weights) - 1) // num_parts + 1):
        best = max(best, sum(descending[fold * num_parts - fold : fold * num_parts + 1]))
    return best


@quick
@given(weights=st.lists(st.integers(0, 40), min_size=1, max_size=30), num_parts=st.integers(1, 6))
def test_the_bound_holds_the_pigeonhole_at_every_fold(weights: list[int], num_parts: int) -> None:
    unit = max(int(np.gcd.reduce(weights)), 1)
    average = -(-sum(weights) // (num_parts * unit)) * unit
    assert makespan_lower_bound(weights, num_parts) >= max(*weights, average, naive_pigeonhole(weights, num_parts))


def test_the_bound_knows_the_pigeonhole_the_unit_and_the_companions() -> None:
    assert makespan_lower_bound([5, 5, 5], 2) == 10
    assert makespan_lower_bound([100, 201, 301, 100, 202], 2) == 500  # nine units of 100, five of them in one part
    assert makespan_lower_bound([4, 4, 4, 4, 4], 2) == 12
    assert makespan_lower_bound([6, 4, 4], 2) == 8
    assert makespan_lower_bound([9, 1, 1, 1], 2) == 9
    assert makespan_lower_bound([9, 1, 1, 1], 2, equal_count=True) == 10
    # Both 20s in one part are 42 with a third item; apart, the four lightest beside them are 2 + 2 + 5 + 5.
    assert makespan_lower_bound([20, 20, 2, 2, 5, 5, 5, 5, 5], 3, equal_count=True) == 27
    assert makespan_lower_bound([], 4) == 0


@pytest.mark.parametrize("equal_count", [False, True])
def test_more_parts_never_raise_the_bound_and_more_weight_never_lowers_it(equal_count: bool) -> None:
    weights = np.random.Generator(np.random.Philox(5)).integers(0, 1000, 60)
    for num_parts in (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30):
        bound = makespan_lower_bound(weights, num_parts, equal_count=equal_count)
        heavier = weights.copy()
        heavier[7] += 500
        assert makespan_lower_bound(heavier, num_parts, equal_count=equal_count) >= bound - 1  # the unit may change
        assert bound >= makespan_lower_bound(weights, 2 * num_parts, equal_count=equal_count)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 1000])
def test_the_bound_survives_weights_near_the_integer_limit_and_more_parts_than_items(num_parts: int) -> None:
    for equal_count in (False, True):
        assert makespan_lower_bound([2**62], num_parts, equal_count=equal_count) == 2**62
        bound = makespan_lower_bound([2**61, 2**61], num_parts, equal_count=equal_count)
        assert bound == (2**62 if num_parts == 1 else 2**61)
    with pytest.raises(SizeOverflowError):
        makespan_lower_bound([2**62, 1], 2)


def test_an_unknown_norm_is_refused_by_name() -> None:
    with pytest.raises(PackingError, match="unknown stage_norm 'mean'; available: max, sum"):
        makespan_lower_bound([1], 1, stage_norm="mean")  # type: ignore[arg-type]
