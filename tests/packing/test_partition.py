"""`partition`: conservation, quality against the exact optimum, equal counts, hard capacities, feasibility."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import InfeasiblePartitionError, ItemTooLargeError, PackingError, makespan_lower_bound, pack, partition
from packing.registry import PARTITIONERS

# The exact search takes a few items only; tests/packing/test_exact.py holds it against the oracle.
ALGORITHMS = sorted({*PARTITIONERS, "auto"} - {"exact"})
quick = settings(max_examples=60, deadline=None)
weights_1d = st.lists(st.integers(0, 50), max_size=30)
weights_2d = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(list), max_size=30)


@st.composite
def limited(draw: st.DrawFn, max_items: int) -> tuple[list[int], list[list[int]], list[int], int]:
    """(weights, sizes, capacity, num_parts), sometimes infeasible."""
    capacity = draw(st.lists(st.integers(1, 12), min_size=1, max_size=2))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    sizes = draw(st.lists(row, min_size=1, max_size=max_items))
    weights = draw(st.lists(st.integers(0, 20), min_size=len(sizes), max_size=len(sizes)))
    return weights, sizes, capacity, draw(st.integers(1, 4))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@quick
@given(weights=weights_1d | weights_2d, num_parts=st.integers(1, 9), equal_count=st.booleans())
def test_loads_are_the_sums_of_the_assigned_weights(
    algorithm: str, weights: list[object], num_parts: int, equal_count: bool
) -> None:
    result = partition(weights, num_parts, algorithm=algorithm, equal_count=equal_count)
    table = np.asarray(weights, np.int64).reshape(len(weights), -1 if weights else 1)
    assert result.part_of.shape == (len(weights),)
    assert result.load.shape == (num_parts, table.shape[1])
    for part in range(num_parts):
        assert (result.load[part] == table[result.part_of == part].sum(axis=0)).all()
    assert result.load.sum() == table.sum()
    assert result.makespan == result.load.max()
    assert result.lower_bound <= result.makespan


@quick
@given(weights=st.lists(st.integers(0, 30), min_size=1, max_size=8), num_parts=st.integers(1, 4))
@example(weights=[7, 6, 5, 4, 3], num_parts=2)
def test_lpt_stays_within_its_proven_factor_and_refinement_never_makes_it_worse(
    exact_makespan: Callable[..., int], weights: list[int], num_parts: int
) -> None:
    best = exact_makespan([[weight] for weight in weights], num_parts)
    plain = partition(weights, num_parts, algorithm="lpt").makespan
    refined = partition(weights, num_parts).makespan
    assert best <= refined <= plain
    assert 3 * num_parts * plain <= (4 * num_parts - 1) * best


@quick
@given(weights=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=7))
def test_two_stages_are_never_better_than_the_optimum_and_close_to_it(
    exact_makespan: Callable[..., int], weights: list[tuple[int, int]]
) -> None:
    best = exact_makespan(weights, 2)
    found = partition(weights, 2)
    assert found.lower_bound <= best <= found.makespan <= 1.5 * best


def test_refinement_finds_the_swap_that_lpt_misses() -> None:
    assert partition([7, 6, 5, 4, 3], 2, algorithm="lpt").makespan == 14
    assert partition([7, 6, 5, 4, 3], 2).makespan == 13
    assert partition([7, 6, 5, 4, 3], 2).gap == 0


def test_many_items_are_balanced_to_the_bound() -> None:
    random = np.random.Generator(np.random.Philox(3))
    weights = random.lognormal(8, 1, (2048, 2)).astype(np.int64)
    assert partition(weights[:, 0], 16).gap < 1e-4
    assert partition(weights, 16).gap < 2e-3
    assert partition(weights[:, 0], 16, equal_count=True).gap < 1e-2


def test_encoder_and_llm_cost_are_balanced_with_one_assignment_bl_07() -> None:
    heavy, thumbnail = [8192, 4096], [64, 4096]
    result = partition([heavy, thumbnail] * 8, 2)
    assert (result.load.max(axis=0) / result.load.mean(axis=0)).max() < 1.1


@quick
@given(weights=st.lists(st.integers(0, 20), min_size=1, max_size=8), num_parts=st.integers(1, 4))
def test_equal_counts_are_never_better_than_their_optimum(
    exact_makespan: Callable[..., int], weights: list[int], num_parts: int
) -> None:
    best = exact_makespan([[weight] for weight in weights], num_parts, equal_count=True)
    result = partition(weights, num_parts, equal_count=True)
    assert result.lower_bound <= best <= result.makespan <= 1.5 * best


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("equal_count", [False, True])
@quick
@given(case=limited(max_items=7))
def test_capacity_holds_in_every_part_or_the_error_says_whether_it_is_proven(
    exact_makespan: Callable[..., int | None],
    algorithm: str,
    equal_count: bool,
    case: tuple[list[int], list[list[int]], list[int], int],
) -> None:
    weights, sizes, capacity, num_parts = case
    best = exact_makespan(
        [[weight] for weight in weights], num_parts, equal_count=equal_count, sizes=sizes, capacity=capacity
    )
    try:
        result = partition(
            weights, num_parts, algorithm=algorithm, equal_count=equal_count, sizes=sizes, capacity=capacity
        )
    except InfeasiblePartitionError as error:
        failure = error
    else:
        failure = None
    if failure is not None:
        assert best is None or not failure.proven
        assert equal_count or pack(sizes, capacity=capacity).num_bins > num_parts
        return
    used = np.zeros((num_parts, len(capacity)), np.int64)
    np.add.at(used, result.part_of, np.array(sizes))
    assert (used <= capacity).all()
    assert best is not None
    assert best <= result.makespan
    if equal_count:
        counts = np.bincount(result.part_of, minlength=num_parts)
        assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_packing_that_exists_is_found_where_lpt_runs_into_the_capacity(algorithm: str) -> None:
    # LPT by weight spreads the light, large items first and leaves no part with room for the last one.
    weights, sizes = [9, 8, 1, 1, 1], [3, 3, 6, 4, 4]
    result = partition(weights, 2, algorithm=algorithm, sizes=sizes, capacity=10)
    assert [sum(size for size, part in zip(sizes, result.part_of, strict=True) if part == p) for p in (0, 1)] == [
        10,
        10,
    ]


def test_proven_and_unproven_failures_are_told_apart() -> None:
    with pytest.raises(InfeasiblePartitionError, match="proven impossible: any assignment needs at least 3") as caught:
        partition([1, 1, 1], 2, sizes=[6, 6, 6], capacity=10)
    assert caught.value.proven
    sizes = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6]  # 100 + 80: best-fit-decreasing on capacity 60 needs a fourth bin
    with pytest.raises(InfeasiblePartitionError, match="not proven impossible") as caught:
        partition(sizes, 3, sizes=sizes, capacity=60)
    assert not caught.value.proven
    assert caught.value.num_bins_found == 4
    assert "use more parts or a larger capacity" in str(caught.value)


def test_an_item_above_the_capacity_is_named() -> None:
    with pytest.raises(ItemTooLargeError, match="item 1 has size 12 in column 0"):
        partition([1, 1], 2, sizes=[3, 12], capacity=10)


def test_no_items_leave_every_load_at_zero() -> None:
    result = partition([], 3)
    assert result.load.tolist() == [[0], [0], [0]]
    assert (result.makespan, result.lower_bound, result.gap) == (0, 0, 0)
    assert partition(np.zeros((0, 2), np.int64), 3, equal_count=True).load.shape == (3, 2)
    assert partition([], 2, sizes=[], capacity=4).part_of.shape == (0,)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fewer_items_than_parts_is_legal(algorithm: str) -> None:
    result = partition([5, 3], 4, algorithm=algorithm)
    assert sorted(result.load[:, 0].tolist()) == [0, 0, 3, 5]
    assert result.gap == 0


def test_weights_near_the_integer_limit_do_not_wrap() -> None:
    result = partition([2**60, 2**60, 2**60, 2**60], 3)
    assert result.makespan == 2**61
    assert result.gap == 0


def test_results_are_read_only_and_repeat_exactly() -> None:
    weights = np.random.Generator(np.random.Philox(4)).integers(0, 10_000, (500, 2))
    first, second = partition(weights, 7), partition(weights, 7)
    assert first.part_of.tolist() == second.part_of.tolist()
    assert first.algorithm == "auto"
    assert first.lower_bound == makespan_lower_bound(weights, 7)
    for array in (first.part_of, first.load):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@quick
@given(weights=weights_1d, num_parts=st.integers(1, 9), seed=st.integers(0, 5))
def test_lpt_gives_the_same_loads_in_whatever_order_items_come(weights: list[int], num_parts: int, seed: int) -> None:
    shuffled = np.random.Generator(np.random.Philox(seed)).permutation(np.array(weights, np.int64))
    first, second = (partition(values, num_parts, algorithm="lpt") for values in (weights, shuffled))
    assert sorted(first.load[:, 0].tolist()) == sorted(second.load[:, 0].tolist())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@quick
@given(weights=weights_1d | weights_2d, num_parts=st.integers(1, 9), equal_count=st.booleans())
def test_the_bound_holds_for_sums_of_stages_too(
    algorithm: str, weights: list[object], num_parts: int, equal_count: bool
) -> None:
    result = partition(weights, num_parts, algorithm=algorithm, equal_count=equal_count, stage_norm="sum")
    assert result.makespan == result.load.sum(axis=1).max()
    assert result.lower_bound <= result.makespan


@quick
@given(weights=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12))
def test_auto_finds_the_optimum_of_a_few_items(
    exact_makespan: Callable[..., int], weights: list[tuple[int, int]]
) -> None:
    few = weights[:8]
    assert partition(few, 3, target_gap=0).makespan == exact_makespan(few, 3)


def test_a_target_gap_stops_the_search_early_and_is_kept() -> None:
    random = np.random.Generator(np.random.Philox(6))
    weights = random.lognormal(8, 1, (4096, 2)).astype(np.int64)
    gaps = [partition(weights, 32, target_gap=gap).gap for gap in (0.02, 1e-3, 1e-4)]
    assert gaps[0] >= gaps[1] >= gaps[2]
    assert gaps[1] <= 1e-3
    assert gaps[2] <= 1e-4
    with pytest.raises(PackingError, match="target_gap is -1"):
        partition([1, 2], 2, target_gap=-1)


def test_two_stages_on_many_parts_and_heavy_tails() -> None:
    random = np.random.Generator(np.random.Philox(7))
    tokens = np.minimum(random.pareto(1.3, 4096) * 400 + 50, 20_000).astype(np.int64)
    weights = np.stack([tokens * 9, tokens * 4 + tokens * tokens // 4000], axis=1)
    assert partition(weights, 32).gap < 6e-3
    assert partition(weights, 256).gap < 6e-3
    assert partition(weights[:, 0], 256, equal_count=True).gap < 1e-2


def test_a_stage_without_any_cost_changes_nothing() -> None:
    weights = np.random.Generator(np.random.Philox(8)).integers(0, 1000, 300)
    alone = partition(weights, 7)
    beside = partition(np.stack([np.zeros_like(weights), weights], axis=1), 7)
    assert beside.part_of.tolist() == alone.part_of.tolist()
    assert beside.load.tolist() == [[0, load] for load in alone.load[:, 0].tolist()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("equal_count", [False, True])
def test_all_equal_weights_are_spread_by_count(algorithm: str, equal_count: bool) -> None:
    for num_items, num_parts in ((96, 8), (97, 8), (7, 7), (5, 9), (200, 130)):
        result = partition([2**40] * num_items, num_parts, algorithm=algorithm, equal_count=equal_count)
        assert result.gap == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_one_giant_is_the_makespan(algorithm: str) -> None:
    assert partition([2**61, *[3] * 60], 4, algorithm=algorithm).makespan == 2**61


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tight_capacities_hold_on_many_items(algorithm: str) -> None:
    random = np.random.Generator(np.random.Philox(9))
    sizes = random.integers(1, 500, (600, 2))
    weights = random.integers(1, 10_000, (600, 2))
    capacity = (sizes.sum(axis=0) * 51 // 50 // 20).tolist()
    result = partition(weights, 20, algorithm=algorithm, sizes=sizes, capacity=capacity)
    used = np.zeros((20, 2), np.int64)
    np.add.at(used, result.part_of, sizes)
    assert (used <= capacity).all()
    assert result.lower_bound <= result.makespan


def test_work_grows_no_faster_than_the_items_on_very_many_parts() -> None:
    # Half as many parts as items: half a minute when a step or an item looks at every part.
    half = 100_000
    weights = np.stack([np.arange(2 * half), 2 * half - np.arange(2 * half)], axis=1)
    assert partition(weights, half).gap < 0.01
    random = np.random.Generator(np.random.Philox(10))
    sizes = random.integers(1, 1000, 2 * half)
    capacity = max(int(sizes.sum()) * 21 // 20 // half, 999)
    result = partition(weights[:, 0], half, sizes=sizes, capacity=capacity)
    assert np.bincount(result.part_of, weights=sizes).max() <= capacity


@pytest.mark.parametrize("algorithm", ["even_mix", "lpt"])
def test_work_is_bounded_where_nearly_all_parts_are_full(algorithm: str) -> None:
    # The heaviest items fill all parts but the last ones, and every later item has to look for those.
    half = 100_000
    sizes = np.r_[np.full(half - 1, 100), np.full(100, 1)]
    weights = np.r_[np.full(half - 1, 2), np.full(100, 1)]
    result = partition(weights, half, algorithm=algorithm, sizes=sizes, capacity=100)
    assert np.bincount(result.part_of, weights=sizes).max() <= 100


def test_an_impossible_partition_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("packing.parts.find", lambda *_: search)
    monkeypatch.setattr("packing.parts.within_capacity", search)
    num_items, half = 4000, 2000
    sizes = np.r_[np.full(half - 1, num_items), np.full(half + 1, 1)]
    with pytest.raises(InfeasiblePartitionError, match="in any assignment some part exceeds a capacity") as caught:
        partition(np.ones(num_items, int), half, sizes=sizes, capacity=num_items, equal_count=True)
    assert caught.value.proven
    with pytest.raises(InfeasiblePartitionError, match="needs at least 3 parts"):
        partition([1, 1, 1], 2, sizes=[6, 6, 6], capacity=10)


def test_counts_that_nothing_could_fill_and_flags_that_are_none_are_refused() -> None:
    for count in (2**24 + 1, 10**12, 10**30):
        with pytest.raises(PackingError, match=f"num_parts is {count}"):
            partition([1, 2], count)
    for flag in ("no", 1, None):
        with pytest.raises(PackingError, match="equal_count is"):
            partition([1, 2], 2, equal_count=flag)  # type: ignore[arg-type]
    assert partition([1, 2], 2, equal_count=np.True_).gap == 0  # type: ignore[arg-type]
