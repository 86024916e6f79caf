"""Packing under several capacities: hard limits, quality, what cannot bind, emptying, agreement with one dimension."""

import operator
import os
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import pack
from packing.bin_bounds import packing_bound
from packing.binding import binding_columns
from packing.inputs import IntArray, PartArray
from packing.packers.best_fit import best_fit_decreasing
from packing.packers.emptying import empty_bins
from packing.packers.next_fit import next_fit
from packing.packers.vector_fill import Rule, fill_bins
from packing.packers.vector_fit import RULES, best_fit_vector
from packing.packers.vector_portfolio import vector_portfolio
from packing.packers.vector_table import lay_out
from packing.problem import PackProblem
from packing.registry import PACKERS
from packing.sorted_blocks import empty_list, find_first, insert_before, take_out
from tools.benchmarks.workloads import Workload, workload

quick = settings(max_examples=60, deadline=None)
EVERY_RULE = [*RULES, *(Rule(beta=rule.beta, spread=rule.spread, switch=rule.switch, trials=4) for rule in RULES)]


def table(rows: object, num_columns: int) -> IntArray:
    return np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, num_columns))


def problem(sizes: IntArray, capacity: IntArray, enough: int | None = None) -> PackProblem:
    bound = packing_bound(sizes, capacity)
    return PackProblem(sizes=sizes, capacity=capacity, lower_bound=bound, enough=bound if enough is None else enough)


def load_of(sizes: IntArray, bin_of: PartArray, num_bins: int) -> IntArray:
    load = np.zeros((num_bins, sizes.shape[1]), np.int64)
    np.add.at(load, bin_of, sizes)
    return load


def check(sizes: IntArray, capacity: IntArray, packing: tuple[PartArray, int]) -> int:
    """Every item in a bin, no bin empty, no capacity exceeded; the number of bins."""
    bin_of, num_bins = packing
    assert bin_of.shape == (len(sizes),)
    assert bin_of.dtype == np.int32
    assert set(bin_of.tolist()) == set(range(num_bins))
    assert (load_of(sizes, bin_of, num_bins) <= capacity).all()
    return num_bins


@st.composite
def cases(draw: st.DrawFn, max_items: int = 40, largest: int = 2**58) -> tuple[IntArray, IntArray]:
    """2 to 4 dimensions; capacities and sizes from tiny to near the limit of the integers."""
    limits = st.one_of(st.integers(1, 12), st.integers(1, 5000), st.integers(1, largest))
    capacity = draw(st.lists(limits, min_size=2, max_size=4))
    row = st.tuples(
        *(st.one_of(st.integers(0, limit), st.sampled_from([0, 1, limit // 2, limit])) for limit in capacity)
    )
    return table(draw(st.lists(row, max_size=max_items)), len(capacity)), np.array(capacity, np.int64)


@pytest.mark.parametrize("rule", EVERY_RULE, ids=str)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_every_rule_packs_every_item_within_all_capacities(rule: Rule, case: tuple[IntArray, IntArray]) -> None:
    sizes, capacity = case
    if len(sizes):
        check(sizes, capacity, fill_bins(sizes, capacity, lay_out(sizes, capacity), rule))


@quick
@given(case=cases())
@example(case=(table([[0, 0]] * 5, 2), np.array([1, 1])))
@example(case=(table([], 2), np.array([3, 4])))
@example(case=(table([[7, 3]], 2), np.array([7, 3])))
@example(case=(table([[7, 3]] * 9, 2), np.array([7, 3])))
def test_the_portfolio_is_legal_and_never_worse_than_best_fit(case: tuple[IntArray, IntArray]) -> None:
    sizes, capacity = case
    before = sizes.copy()
    num_bins = check(sizes, capacity, vector_portfolio(problem(sizes, capacity)))
    assert problem(sizes, capacity).lower_bound <= num_bins
    assert num_bins <= check(sizes, capacity, best_fit_vector(sizes, capacity))
    assert (sizes == before).all()


def test_the_example_of_the_docstring() -> None:
    sizes, capacity = table([[90, 1], [60, 1], [30, 1], [10, 1], [5, 1], [5, 1]], 2), np.array([100, 3])
    bin_of, num_bins = fill_bins(sizes, capacity, lay_out(sizes, capacity), RULES[0])
    assert (bin_of.tolist(), num_bins) == ([0, 1, 1, 1, 0, 0], 2)


def test_small_problems_are_solved_almost_always_to_the_optimum(exact_bins: Callable[..., int]) -> None:
    random = np.random.Generator(np.random.Philox(7))
    found = best = 0
    for _ in range(150):
        num_columns = int(random.integers(2, 4))
        capacity = random.integers(3, 30, num_columns)
        sizes = random.integers(0, capacity // 2 + 2, (9, num_columns)).clip(0, capacity)
        best += exact_bins(sizes.tolist(), capacity.tolist())
        found += check(sizes, capacity, vector_portfolio(problem(sizes, capacity)))
    assert best <= found <= 1.01 * best


@quick
@given(
    sizes=st.lists(st.integers(0, 60), max_size=50),
    capacity=st.integers(60, 90),
    scale=st.sampled_from([1, 10**6, 2**52]),
)
def test_a_capacity_too_large_for_a_table_gives_the_same_bins(sizes: list[int], capacity: int, scale: int) -> None:
    expected, num_bins = best_fit_decreasing(problem(table(sizes, 1), np.array([capacity])))
    wide, num_wide = best_fit_vector(table(sizes, 1) * scale, np.array([capacity * scale]))
    assert num_wide == num_bins
    assert wide.tolist() == expected.tolist()


def naive_best_fit(sizes: IntArray, capacity: int) -> list[int]:
    """The rule item by item: the fullest bin that fits, of equals the one touched last."""
    free: list[int] = []
    touched: list[int] = []
    bin_of = [0] * len(sizes)
    for turn, item in enumerate(np.argsort(-sizes, kind="stable").tolist()):
        fitting = [index for index, room in enumerate(free) if room >= sizes[item]]
        if not fitting:
            free.append(capacity)
            touched.append(0)
            fitting = [len(free) - 1]
        chosen = min(fitting, key=lambda index: (free[index], -touched[index]))
        free[chosen] -= int(sizes[item])
        touched[chosen] = turn
        bin_of[item] = chosen
    return bin_of


def test_free_space_that_differs_in_the_last_bits_only_is_told_apart() -> None:
    random = np.random.Generator(np.random.Philox(3))
    near = 2**50 + random.integers(0, 1000, 200)  # what stays free is 1,000 to 2,000 of 2**50
    sizes, capacity = np.concatenate([near, random.integers(1, 700, 300)]), 2**50 + 2000
    bin_of, num_bins = best_fit_vector(table(sizes, 1), np.array([capacity]))
    assert num_bins == 200
    assert bin_of.tolist() == naive_best_fit(sizes, capacity)


@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_open_bins_are_filled_by_the_rule(seed: int) -> None:
    random = np.random.Generator(np.random.Philox(seed))
    spread = int(random.choice([3, 2**10, 2**40]))  # few or many distinct free spaces; enough bins for several blocks
    large = 2**60 + random.integers(-spread, spread, 1800)
    sizes, capacity = np.concatenate([large, random.integers(1, spread, 1000)]), 2**61 - 7
    assert best_fit_vector(table(sizes, 1), np.array([capacity]))[0].tolist() == naive_best_fit(sizes, capacity)


@quick
@given(keys=st.lists(st.integers(0, 3000), min_size=600, max_size=3000), taken=st.integers(0, 2**32))
def test_a_sorted_list_in_blocks_finds_inserts_and_takes_out(keys: list[int], taken: int) -> None:
    blocks, spine, count = empty_list(len(keys) + 1)
    num_blocks = drive(blocks, spine, count, np.array(keys), taken)
    expected: list[tuple[int, int]] = [(2**62, -1)]
    for value, key in enumerate(keys):
        expected.insert(bisect_left(expected, key, key=operator.itemgetter(0)), (key, value))
        taken = taken * 69069 % 2**32
        found = bisect_left(expected, taken % 3000, key=operator.itemgetter(0))
        if taken % 7 < 3 and found < len(expected) - 1:
            del expected[found]
    used = [blocks[block, : count[block]] for block in spine[:num_blocks]]
    assert all(len(block) for block in used)
    assert np.concatenate(used).tolist() == [list(pair) for pair in expected]
    assert sorted(spine.tolist()) == list(range(len(spine)))


@numba.njit
def drive(blocks: IntArray, spine: IntArray, count: IntArray, keys: IntArray, taken: int) -> int:
    num_blocks = insert_before(blocks, spine, count, 0, 2**62, -1)
    for value in range(keys.shape[0]):
        num_blocks = insert_before(blocks, spine, count, num_blocks, keys[value], value)
        taken = taken * 69069 % 2**32
        position, place = find_first(blocks, spine, count, num_blocks, taken % 3000)
        if taken % 7 < 3 and blocks[spine[position], place, 1] >= 0:
            num_blocks = take_out(blocks, spine, count, num_blocks, position, place)
    return num_blocks


def test_columns_that_cannot_bind_are_left_out() -> None:
    tokens = np.arange(1, 101)
    patches = 4 * (tokens - 1)
    images = np.ones(100, np.int64)
    sizes = np.stack([tokens, patches, images], axis=1)
    assert binding_columns(sizes, np.array([200, 800, 500])) == [0]  # 4 patches a token and room for 4; all images fit
    assert binding_columns(sizes, np.array([200, 790, 500])) == [0, 1]
    assert binding_columns(sizes, np.array([200, 800, 3])) == [0, 2]
    assert binding_columns(sizes, np.array([10**6, 10**6, 10**6])) == [0]
    assert binding_columns(np.stack([tokens, tokens], axis=1), np.array([200, 200])) == [1]
    huge = np.array([[2**60, 1], [2**60, 1]])
    assert binding_columns(huge, np.array([2**60, 1])) == [1]


def test_a_column_that_cannot_bind_changes_nothing() -> None:
    random = np.random.Generator(np.random.Philox(5))
    tokens = random.lognormal(6, 1, 3000).astype(np.int64).clip(1, 4096)
    for algorithm in sorted(set(PACKERS) - {"exact"}):
        alone = pack(tokens, capacity=4096, algorithm=algorithm)
        both = pack(np.stack([tokens, 3 * tokens], axis=1), capacity=[4096, 4 * 4096], algorithm=algorithm)
        assert (alone.bin_of == both.bin_of).all()


def perfect(num_bins: int, seed: int) -> tuple[IntArray, IntArray]:
    """Items cut from bins that are full in both dimensions, 3 to 6 a bin."""
    random = np.random.Generator(np.random.Philox(seed))
    capacity = np.array([4096, 1000])
    rows: list[IntArray] = []
    for _ in range(num_bins):
        count = int(random.integers(3, 7))
        columns = [
            np.diff(np.sort(random.integers(0, limit + 1, count - 1)), prepend=0, append=limit) for limit in capacity
        ]
        rows.append(np.stack(columns, axis=1))
    sizes = np.concatenate(rows)
    return np.ascontiguousarray(sizes[random.permutation(len(sizes))]), capacity


def test_bins_that_can_all_be_full_in_both_dimensions_are_nearly_found_again() -> None:
    sizes, capacity = perfect(1500, seed=1)
    assert check(sizes, capacity, vector_portfolio(problem(sizes, capacity))) <= 1.035 * 1500


def samples(n: int, seed: int) -> tuple[IntArray, IntArray]:
    """(tokens, images) of a mixture: text, and one to six images of 64 to 1,280 tokens."""
    random = np.random.Generator(np.random.Philox(seed))
    images = random.choice(7, n, p=(0.1, 0.5, 0.16, 0.1, 0.07, 0.04, 0.03))
    tokens = random.lognormal(5.3, 1, n).astype(np.int64) + images * random.integers(64, 1281, n)
    return tokens.clip(1, 4096), images


def test_one_dominating_dimension_is_filled_to_the_bound() -> None:
    tokens, images = samples(20_000, seed=2)
    sizes, capacity = np.stack([tokens, images], axis=1), np.array([4096, 9])
    assert check(sizes, capacity, vector_portfolio(problem(sizes, capacity))) <= 1.002 * packing_bound(sizes, capacity)


def test_a_limit_on_the_number_of_items_does_not_leave_small_items_to_the_end() -> None:
    tokens, _ = samples(20_000, seed=3)
    sizes, capacity = np.stack([tokens, np.ones_like(tokens)], axis=1), np.array([4096, 5])
    bound = packing_bound(sizes, capacity)
    # Largest first, as many packers do it, ends with bins of five small items.
    size_alone = Rule(beta=8, spread=4, switch=0, trials=1)
    by_size = check(sizes, capacity, fill_bins(sizes, capacity, lay_out(sizes, capacity), size_alone))
    found = check(sizes, capacity, vector_portfolio(problem(sizes, capacity)))
    assert found <= 1.03 * bound
    assert found < 0.96 * by_size


def test_few_distinct_sizes_are_combined_so_that_bins_are_full() -> None:
    random = np.random.Generator(np.random.Philox(4))
    tiles = random.choice([1, 3, 4, 5], 20_000, p=(0.1, 0.2, 0.3, 0.4))
    sizes = np.stack([tiles, tiles * 256 + random.integers(20, 400, 20_000)], axis=1)
    capacity = np.array([16, 8192])
    assert check(sizes, capacity, vector_portfolio(problem(sizes, capacity))) <= 1.01 * packing_bound(sizes, capacity)


def test_three_capacities_are_respected_where_the_third_binds_least() -> None:
    tokens, images = samples(6000, seed=6)
    sizes = np.stack([tokens, images, np.ones_like(tokens)], axis=1)
    capacity = np.array([4096, 7, 6])
    assert check(sizes, capacity, vector_portfolio(problem(sizes, capacity))) <= 1.05 * packing_bound(sizes, capacity)


def test_the_portfolio_stops_when_it_has_enough() -> None:
    sizes, capacity = perfect(40, seed=2)
    first = best_fit_vector(sizes, capacity)
    stopped = vector_portfolio(problem(sizes, capacity, enough=first[1]))
    assert stopped[1] == first[1]
    assert (stopped[0] == first[0]).all()


@quick
@given(case=cases())
def test_emptying_never_adds_a_bin_and_keeps_every_capacity(case: tuple[IntArray, IntArray]) -> None:
    sizes, capacity = case
    start, num_bins = next_fit(problem(sizes, capacity))
    before = start.copy()
    assert check(sizes, capacity, empty_bins(sizes, capacity, start, num_bins, 0)) <= num_bins
    assert (start == before).all()


def test_emptying_spreads_the_items_of_a_bin_over_others() -> None:
    sizes, capacity = table([6, 3, 5, 4, 1, 1], 1), np.array([10])
    start = np.array([0, 0, 1, 1, 2, 2], np.int32)
    bin_of, num_bins = empty_bins(sizes, capacity, start, 3, 0)
    assert num_bins == 2
    assert load_of(sizes, bin_of, 2)[:, 0].tolist() == [10, 10]
    assert empty_bins(sizes, capacity, start, 3, 3)[1] == 3


def test_emptying_moves_a_smaller_item_out_of_the_way() -> None:
    # 4 fits nowhere; 3 leaves [6 3] for [8], then it does.
    sizes, capacity = table([4, 6, 3, 7], 1), np.array([10])
    bin_of, num_bins = empty_bins(sizes, capacity, np.array([0, 1, 1, 2], np.int32), 3, 0)
    assert num_bins == 2
    assert bin_of[0] == bin_of[1]
    assert bin_of[2] == bin_of[3]


def test_a_bin_whose_items_do_not_all_fit_elsewhere_stays_whole() -> None:
    sizes, capacity = table([5, 2, 9, 8], 1), np.array([10])
    start = np.array([0, 0, 1, 2], np.int32)
    bin_of, num_bins = empty_bins(sizes, capacity, start, 3, 0)
    assert num_bins == 3
    assert bin_of.tolist() == start.tolist()


SCRIPT = """
import numpy as np, zlib
from packing.packers.vector_portfolio import vector_portfolio
from packing.packers.vector_table import lay_out
from packing.problem import PackProblem
random = np.random.Generator(np.random.Philox(9))
for capacity in ([500, 6], [500, 900, 8], [2**45, 2**44]):
    limits = np.array(capacity)
    sizes = (random.random((120, len(capacity))) ** 2 * limits / 2).astype(np.int64)
    problem = PackProblem(sizes=sizes, capacity=limits, lower_bound=0, enough=0)
    bin_of, num_bins = vector_portfolio(problem)
    print(num_bins, zlib.crc32(bin_of.tobytes()))
"""


def test_results_are_the_same_without_the_compiler() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ("0", "1")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 3


def test_auto_takes_first_fit_where_it_wins_on_a_sample(shared_dir: Path) -> None:
    samples = clipped_columns(workload("real_image_captions", 20_000, 0, data=shared_dir / "data"))
    found = {
        algorithm: pack(samples, capacity=[32_768, 126_326], algorithm=algorithm).num_bins
        for algorithm in ("auto", "best_fit_decreasing", "first_fit")
    }
    assert found["first_fit"] < found["best_fit_decreasing"]
    assert found["auto"] <= found["first_fit"]


def clipped_columns(samples: Workload) -> IntArray:
    return np.stack([samples.tokens.clip(max=32_768), samples.patches.clip(max=126_326)], axis=1)


def test_a_capacity_that_rarely_binds_costs_nothing_against_the_scarcest_alone(shared_dir: Path) -> None:
    samples = workload("real_internvl", 20_000, 0, data=shared_dir / "data")
    sizes = np.stack([samples.tokens.clip(max=4096), samples.images], axis=1)
    assert pack(sizes, capacity=[4096, 15]).gap > 0.02
    assert pack(sizes, capacity=[4096, 15], algorithm="auto").gap < 0.003
