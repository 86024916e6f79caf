"""What every algorithm of the registry guarantees, whichever it is.

A test with an argument `packer`, `partitioner` or `grid_placer` runs for each of its kind (conftest.py). Inputs stay
within what an algorithm takes (`most_items`). The optimum comes from the exact algorithms, which test_exact.py holds
against two oracles of their own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import (
    InfeasiblePartitionError,
    ItemTooLargeError,
    PackingError,
    bin_lower_bound,
    makespan_lower_bound,
    pack,
    partition,
    registry,
)
from packing.inputs import IntArray
from packing.packers.exact import exact as exact_packing
from packing.partitioners.exact import exact as exact_partition
from packing.problem import GridProblem, PackProblem, PartitionProblem
from packing.registry import PACKERS, PARTITIONERS

GRID_PLACERS = getattr(registry, "GRID_PLACERS", {})
quick = settings(max_examples=40, deadline=None)
MostItems = Callable[[Callable[..., Any], str], int]
Check = Callable[..., None]

# Largest number of bins for a given optimum, one dimension; Dósa and Sgall's bounds for first fit (2013) and the
# decreasing rules.
MOST_BINS: dict[str, Callable[[int], int]] = {
    "best_fit_decreasing": lambda best: (11 * best + 6) // 9,
    "exact": lambda best: best,
    "first_fit": lambda best: 17 * best // 10,
    "first_fit_decreasing": lambda best: (11 * best + 6) // 9,
    "next_fit": lambda best: max(2 * best - 1, best),
}


def graham(num_parts: int) -> Fraction:
    return Fraction(4, 3) - Fraction(1, 3 * num_parts)


# Largest makespan over the optimum by number of parts: one stage, free counts, no capacity. LPT: Graham 1969;
# multifit: Yue 1990; Karmarkar-Karp: Michiels, Korst, Aarts and van Leeuwen 2007. Refinement starts from LPT.
MOST_MAKESPAN: dict[str, Callable[[int], Fraction]] = {
    "auto": graham,
    "exact": lambda _: Fraction(1),
    "karmarkar_karp": graham,
    "lpt": graham,
    "lpt_refined": graham,
    "multifit": lambda _: Fraction(13, 11),
}
ONLINE = {"first_fit", "next_fit"}  # place items in input order, without a look at later ones


def best_bins(sizes: Any, capacity: list[int]) -> int:
    table = np.array(sizes, np.int64).reshape(-1, len(capacity))
    return exact_packing(PackProblem(sizes=table, capacity=np.array(capacity, np.int64), lower_bound=0, enough=0))[1]


def best_makespan(
    weights: Any, num_parts: int, *, equal_count: bool = False, sizes: Any = (), capacity: Any = ()
) -> int | None:
    table = np.array(weights, np.int64).reshape(len(weights), -1 if len(weights) else 1)
    limits = np.array(capacity, np.int64)
    part_of = exact_partition(
        PartitionProblem(
            weights=table,
            num_parts=num_parts,
            sizes=np.array(sizes, np.int64).reshape(len(weights), len(limits)),
            capacity=limits,
            equal_count=equal_count,
            lower_bound=0,
            enough=0,
        )
    )
    return None if part_of is None else int(part_loads(part_of, table, num_parts).max(initial=0))


def part_loads(part_of: Any, values: IntArray, num_parts: int) -> IntArray:
    load = np.zeros((num_parts, values.shape[1]), np.int64)
    np.add.at(load, part_of, values)
    return load


@st.composite
def packings(draw: st.DrawFn, max_items: int, max_columns: int = 3) -> tuple[list[list[int]], list[int]]:
    """(sizes [n][d], capacity [d]); values from few, so that items are often equal, or from many."""
    capacity = draw(st.lists(st.sampled_from([1, 2, 5, 13, 40, 1000]), min_size=1, max_size=max_columns))
    row = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
    return draw(st.lists(row, max_size=min(max_items, 40))), capacity


@st.composite
def partitions(draw: st.DrawFn, max_items: int, *, with_capacity: bool = True) -> dict[str, Any]:
    """Arguments of `partition`; with a capacity, sometimes infeasible."""
    most = draw(st.sampled_from([1, 6, 50, 10_000]))
    row = st.lists(st.integers(0, most), min_size=(stages := draw(st.integers(1, 3))), max_size=stages)
    weights = draw(st.lists(row, min_size=1, max_size=min(max_items, 40)))
    case: dict[str, Any] = {
        "weights": weights,
        "num_parts": draw(st.integers(1, 9)),
        "equal_count": draw(st.booleans()),
    }
    if with_capacity and draw(st.booleans()):
        case["capacity"] = draw(st.lists(st.integers(1, 30), min_size=1, max_size=2))
        size = st.tuples(*(st.integers(0, limit) for limit in case["capacity"])).map(list)
        case["sizes"] = draw(st.lists(size, min_size=len(weights), max_size=len(weights)))
    return case


@quick
@given(data=st.data(), most=st.none() | st.integers(1, 5))
def test_every_item_is_packed_once_and_no_limit_is_exceeded(
    packer: str, most_items: MostItems, check_packing: Check, data: st.DataObject, most: int | None
) -> None:
    sizes, capacity = data.draw(packings(most_items(pack, packer)))
    table = np.array(sizes, np.int64).reshape(-1, len(capacity))
    result = pack(table, capacity=capacity, algorithm=packer, max_items_per_bin=most)
    check_packing(result, table, capacity)
    assert most is None or np.diff(result.offsets).max(initial=0) <= most
    assert result.algorithm == packer


@quick
@given(data=st.data(), multiple=st.integers(1, 9))
def test_a_multiple_of_bins_is_reached_by_splitting_without_empty_bins_bl_04(
    packer: str, most_items: MostItems, check_packing: Check, data: st.DataObject, multiple: int
) -> None:
    sizes, capacity = data.draw(packings(most_items(pack, packer)))
    most = data.draw(st.none() | st.integers(1, 5))
    table = np.array(sizes, np.int64).reshape(-1, len(capacity))
    result = pack(table, capacity=capacity, algorithm=packer, num_bins_multiple=multiple, max_items_per_bin=most)
    plain = pack(table, capacity=capacity, algorithm=packer, max_items_per_bin=most)
    assert result.num_bins == -(-plain.num_bins // multiple) * multiple
    assert result.lower_bound % multiple == 0
    filled = (np.diff(result.offsets) > 0).sum()
    assert filled == min(result.num_bins, len(sizes))
    assert most is None or np.diff(result.offsets).max(initial=0) <= most
    if filled == result.num_bins:
        check_packing(result, table, capacity)


@quick
@given(case=packings(12, max_columns=1))
@example(case=([[44], [24], [24], [22], [21], [17], [8], [8], [6], [6]], [60]))
def test_the_number_of_bins_lies_between_the_optimum_and_the_proven_factor(
    packer: str, case: tuple[list[list[int]], list[int]]
) -> None:
    sizes, capacity = case
    best = best_bins(sizes, capacity)
    result = pack(sizes or [], capacity=capacity, algorithm=packer)
    assert result.lower_bound <= best <= result.num_bins
    # Whatever the rule, two bins that together fit into one are not both left; the average is above half.
    assert result.num_bins <= MOST_BINS.get(packer, lambda best: max(2 * best - 1, best))(best)


@quick
@given(case=packings(12))
def test_no_packing_in_several_dimensions_beats_the_optimum_and_the_bound_is_below_both(
    packer: str, case: tuple[list[list[int]], list[int]]
) -> None:
    sizes, capacity = case
    table = np.array(sizes, np.int64).reshape(-1, len(capacity))
    result = pack(table, capacity=capacity, algorithm=packer)
    best = best_bins(sizes, capacity)
    assert result.lower_bound <= best <= result.num_bins
    # Sums of neighbouring bins exceed a capacity somewhere, so there are at most 2 d OPT bins.
    assert result.num_bins <= max(2 * len(capacity) * best, 1)


@quick
@given(data=st.data())
def test_sizes_in_a_coarse_and_in_a_fine_unit_give_the_same_bins(
    packer: str, most_items: MostItems, data: st.DataObject
) -> None:
    """The fine unit is too large for a table over the capacity: one dimension through the vector route."""
    sizes, capacity = data.draw(packings(most_items(pack, packer), max_columns=1))
    table = np.array(sizes, np.int64).reshape(-1, 1)
    coarse = pack(table, capacity=capacity, algorithm=packer)
    fine = pack(table << 40, capacity=capacity[0] << 40, algorithm=packer)
    assert coarse.bin_of.tolist() == fine.bin_of.tolist()
    assert coarse.lower_bound == fine.lower_bound


@quick
@given(data=st.data())
def test_a_dimension_without_demand_changes_nothing(packer: str, most_items: MostItems, data: st.DataObject) -> None:
    sizes, capacity = data.draw(packings(most_items(pack, packer), max_columns=1))
    table = np.array(sizes, np.int64).reshape(-1, 1)
    alone = pack(table, capacity=capacity, algorithm=packer)
    beside = pack(np.concatenate([table, 0 * table], axis=1), capacity=[*capacity, 7], algorithm=packer)
    assert alone.num_bins == beside.num_bins


@quick
@given(data=st.data())
def test_the_order_of_the_input_decides_nothing_or_later_items_do_not_move_earlier_ones(
    packer: str, most_items: MostItems, data: st.DataObject
) -> None:
    sizes, capacity = data.draw(packings(most_items(pack, packer), max_columns=1))
    table = np.array(sizes, np.int64).reshape(-1, 1)
    result = pack(table, capacity=capacity, algorithm=packer)
    if packer in ONLINE:
        half = pack(table[: len(table) // 2], capacity=capacity, algorithm=packer)
        assert half.bin_of.tolist() == result.bin_of[: len(table) // 2].tolist()
    else:
        shuffled = table[data.draw(st.permutations(range(len(table))))]
        other = pack(shuffled, capacity=capacity, algorithm=packer)
        assert sorted(result.load[:, 0]) == sorted(other.load[:, 0])


def test_an_oversize_item_is_an_error_with_its_values_and_nothing_is_dropped(packer: str) -> None:
    with pytest.raises(ItemTooLargeError, match="item 1 has size 12 in column 1, above the capacity of 10") as caught:
        pack([[5, 1], [12, 12], [3, 99]], capacity=[20, 10], algorithm=packer)
    assert (caught.value.index, caught.value.size, caught.value.capacity, caught.value.column) == (1, 12, 10, 1)


INPUT_KINDS: dict[str, Callable[[IntArray], Any]] = {
    "list": lambda table: table.tolist(),
    "tuple": lambda table: tuple(map(tuple, table.tolist())),
    "int8": lambda table: table.astype(np.int8),
    "int32": lambda table: table.astype(np.int32),
    "uint8": lambda table: table.astype(np.uint8),
    "uint64": lambda table: table.astype(np.uint64),
    "big-endian": lambda table: table.astype(">i4"),
    "object": lambda table: table.astype(object),
    "fortran": np.asfortranarray,
    "every other row": lambda table: np.repeat(table, 2, axis=0)[::2],
    "every other column": lambda table: np.repeat(table, 2, axis=1)[:, ::2],
    "backwards": lambda table: table[::-1].copy()[::-1],
    "broadcast": lambda table: np.broadcast_to(table, (3, *table.shape))[1],
    "read-only": lambda table: np.frombuffer(table.tobytes(), np.int64).reshape(table.shape),
}
SAMPLE = np.array([[6, 1], [5, 2], [4, 4], [3, 1], [3, 1], [2, 0], [1, 3], [1, 1], [0, 0]], np.int64)


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_a_packing_does_not_depend_on_how_numbers_are_stored(packer: str, kind: str) -> None:
    given_as = INPUT_KINDS[kind](SAMPLE)
    expected = pack(SAMPLE, capacity=[8, 5], algorithm=packer, max_items_per_bin=3)
    result = pack(given_as, capacity=np.array([8, 5], np.int16), algorithm=packer, max_items_per_bin=np.int8(3))
    assert result.bin_of.tolist() == expected.bin_of.tolist()
    assert np.asarray(given_as).tolist() == SAMPLE.tolist()


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_a_partition_does_not_depend_on_how_numbers_are_stored(partitioner: str, kind: str) -> None:
    given_as = INPUT_KINDS[kind](SAMPLE)
    expected = partition(SAMPLE, 3, algorithm=partitioner, sizes=SAMPLE[:, :1], capacity=12)
    result = partition(given_as, np.int64(3), algorithm=partitioner, sizes=given_as_sizes(given_as), capacity=[12])
    assert result.part_of.tolist() == expected.part_of.tolist()
    assert np.asarray(given_as).tolist() == SAMPLE.tolist()


def given_as_sizes(table: Any) -> Any:
    """The first column, a view where the table is an array."""
    return table[:, 0] if isinstance(table, np.ndarray) else [row[0] for row in table]


@quick
@given(data=st.data())
def test_every_item_is_in_one_part_and_counts_and_capacities_hold_or_the_error_tells_the_truth(
    partitioner: str, most_items: MostItems, check_partition: Check, data: st.DataObject
) -> None:
    case = data.draw(partitions(most_items(partition, partitioner)))
    try:
        check_partition(partition(**case, algorithm=partitioner), **case)
    except InfeasiblePartitionError as error:
        failure = error
    else:
        return
    assert failure.num_parts == case["num_parts"]
    assert failure.proven or failure.num_bins_bound <= failure.num_parts
    if failure.proven and len(case["weights"]) <= 12:
        assert best_makespan(**case) is None
    # Documented: one is found when best-fit-decreasing packs the sizes and counts are free.
    assert case["equal_count"] or pack(case["sizes"], capacity=case["capacity"]).num_bins > case["num_parts"]


@quick
@given(case=partitions(12))
def test_no_partition_beats_the_optimum_and_the_bound_is_below_both(partitioner: str, case: dict[str, Any]) -> None:
    try:
        result = partition(**case, algorithm=partitioner)
    except InfeasiblePartitionError:
        return
    best = best_makespan(**case)
    assert best is not None
    assert result.lower_bound <= best <= result.makespan


@quick
@given(weights=st.lists(st.integers(0, 60), min_size=1, max_size=12), num_parts=st.integers(1, 5))
@example(weights=[7, 6, 5, 4, 3], num_parts=2)
@example(weights=[5, 5, 4, 4, 3, 3, 3], num_parts=3)  # Graham's worst case for LPT
def test_the_makespan_stays_within_the_proven_factor(partitioner: str, weights: list[int], num_parts: int) -> None:
    best = best_makespan([[weight] for weight in weights], num_parts)
    assert best is not None
    # Any assignment in which the highest part cannot give its last item away is below 2 - 1/k (Graham 1966).
    factor = MOST_MAKESPAN.get(partitioner, lambda num_parts: 2 - Fraction(1, num_parts))(num_parts)
    assert partition(weights, num_parts, algorithm=partitioner).makespan <= factor * best


@quick
@given(data=st.data())
def test_no_part_is_empty_when_items_suffice(partitioner: str, most_items: MostItems, data: st.DataObject) -> None:
    case = data.draw(partitions(most_items(partition, partitioner), with_capacity=False))
    counts = np.bincount(partition(**case, algorithm=partitioner).part_of, minlength=case["num_parts"])
    assert (counts > 0).sum() == min(len(case["weights"]), case["num_parts"])


@quick
@given(data=st.data())
def test_weights_in_another_unit_give_the_same_partition(
    partitioner: str, most_items: MostItems, data: st.DataObject
) -> None:
    case = data.draw(partitions(most_items(partition, partitioner), with_capacity=False))
    fine = np.array(case["weights"], np.int64) << 30
    coarse = partition(**case, algorithm=partitioner, target_gap=0)
    result = partition(**{**case, "weights": fine}, algorithm=partitioner, target_gap=0)
    assert abs(result.makespan - (coarse.makespan << 30)) <= (coarse.makespan << 30) // 50


@quick
@given(case=packings(12), data=st.data())
def test_the_bin_bound_is_below_the_optimum_and_grows_with_items_and_shrinks_with_room(
    case: tuple[list[list[int]], list[int]], data: st.DataObject
) -> None:
    sizes, capacity = case
    table = np.array(sizes, np.int64).reshape(-1, len(capacity))
    bound = bin_lower_bound(table, capacity=capacity)
    assert bound <= best_bins(sizes, capacity)
    more = np.array([[data.draw(st.integers(0, limit)) for limit in capacity]], np.int64)
    assert bound <= bin_lower_bound(np.concatenate([table, more]), capacity=capacity)
    roomier = [limit + data.draw(st.integers(0, 20)) for limit in capacity]
    assert bin_lower_bound(table, capacity=roomier) <= bound
    for most in (1, 2, 5):
        assert bound <= bin_lower_bound(table, capacity=capacity, max_items_per_bin=most)


@quick
@given(case=partitions(12, with_capacity=False), more=st.integers(0, 60))
def test_the_makespan_bound_is_below_the_optimum_and_grows_with_items_and_shrinks_with_parts(
    case: dict[str, Any], more: int
) -> None:
    bound = makespan_lower_bound(**case)
    best = best_makespan(**case)
    assert best is not None
    assert bound <= best
    free = makespan_lower_bound(case["weights"], case["num_parts"])
    assert free <= bound
    assert free <= makespan_lower_bound([*case["weights"], [more] * len(case["weights"][0])], case["num_parts"])
    assert free >= makespan_lower_bound(case["weights"], case["num_parts"] + 1)


def test_the_default_of_pack_is_within_one_percent_of_the_optimum_on_average() -> None:
    for num_columns in (1, 2):
        found = best = 0
        for seed in range(150):
            random = np.random.Generator(np.random.Philox(1000 * num_columns + seed))
            sizes = random.integers(1, 1 + [30, 60, 100][seed % 3], (4 + seed % 9, num_columns))
            found += pack(sizes, capacity=[100] * num_columns).num_bins
            best += best_bins(sizes, [100] * num_columns)
        assert best <= found <= 1.01 * best, (num_columns, found, best)


def test_auto_partition_is_within_one_percent_of_the_optimum_on_average_and_never_behind_another() -> None:
    ratios = []
    for seed in range(120):
        random = np.random.Generator(np.random.Philox(seed))
        weights = random.lognormal(7, 1, (5 + seed % 8, 1 + seed % 3)).astype(np.int64)
        case: dict[str, Any] = {"weights": weights, "num_parts": 2 + seed % 4, "equal_count": seed % 2 == 0}
        best = best_makespan(**case)
        assert best is not None
        found = partition(**case, target_gap=0)
        ratios.append(found.makespan / best)
        assert found.makespan <= min(partition(**case, algorithm=name).makespan for name in PARTITIONERS)
    assert 1 <= np.mean(ratios) <= 1.01


REPEAT = """
import json, sys
import numpy as np
from packing import pack, partition
from packing.registry import PACKERS, PARTITIONERS

def report():
    values = (np.arange(1, 23, dtype=np.int64) * 7919) % 97
    pairs = np.stack([values, values[::-1] % 11], axis=1)
    packed = {
        name: [
            pack(values, capacity=128, algorithm=name).bin_of.tolist(),
            pack(values << 40, capacity=128 << 40, algorithm=name, num_bins_multiple=4).bin_of.tolist(),
            pack(pairs, capacity=[300, 25], algorithm=name, max_items_per_bin=6).bin_of.tolist(),
        ]
        for name in sorted(PACKERS)
    }
    parted = {
        name: [
            partition(values, 5, algorithm=name).part_of.tolist(),
            partition(pairs, 3, algorithm=name).part_of.tolist(),
            partition(pairs, 4, algorithm=name, sizes=values, capacity=300).part_of.tolist(),
            partition(values << 50, 4, algorithm=name, equal_count=True).part_of.tolist(),
        ]
        for name in [*sorted(PARTITIONERS), "auto"]
    }
    return [packed, parted]
"""


def test_every_algorithm_repeats_exactly_also_without_the_compiler_and_in_another_process() -> None:
    scope: dict[str, Any] = {}
    exec(REPEAT, scope)
    here = scope["report"]()
    assert scope["report"]() == here
    assert sorted(here[0]) == sorted(PACKERS)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPEAT + "\nprint(json.dumps(report()))"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here


def grid_value(cell_of: IntArray, problem: GridProblem) -> int:
    load = part_loads(cell_of, problem.weights, problem.num_ranks * problem.num_slots)
    load = load.reshape(problem.num_ranks, problem.num_slots, -1)
    if problem.objective == "per_rank":
        return int(load.sum(axis=1).max())
    return int(load.max(axis=(0, 2)).sum())


def grid_problem(case: dict[str, Any], num_ranks: int, num_slots: int, objective: Any) -> GridProblem:
    table = np.array(case["weights"], np.int64)
    bound = max(int(table.max()), *(-(-int(total) // num_ranks) for total in table.sum(axis=0)))
    limits = np.array(case.get("capacity", ()), np.int64)
    return GridProblem(
        weights=table,
        num_ranks=num_ranks,
        num_slots=num_slots,
        sizes=np.array(case.get("sizes", ()), np.int64).reshape(len(table), len(limits)),
        capacity=limits,
        objective=objective,
        lower_bound=bound,
        enough=bound,
    )


@pytest.mark.parametrize("objective", ["per_rank", "per_slot"])
@quick
@given(data=st.data())
def test_every_item_is_in_one_cell_and_no_cell_exceeds_a_capacity(
    grid_placer: str, objective: str, data: st.DataObject
) -> None:
    case = data.draw(partitions(40))
    num_ranks, num_slots = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    problem = grid_problem(case, num_ranks, num_slots, objective)
    cell_of = GRID_PLACERS[grid_placer](problem)
    if cell_of is None:
        assert problem.capacity.size
        return
    assert cell_of.dtype == np.int32
    assert cell_of.shape == (problem.num_items,)
    assert 0 <= cell_of.min() <= cell_of.max() < num_ranks * num_slots
    assert (part_loads(cell_of, problem.sizes, num_ranks * num_slots) <= problem.capacity).all()
    value = grid_value(cell_of, problem)
    assert problem.lower_bound <= value
    if objective == "per_rank" and problem.num_items <= 12 and not problem.capacity.size:
        best = best_makespan(case["weights"], num_ranks)
        assert best is not None
        assert best <= value <= 2 * best
    again = GRID_PLACERS[grid_placer](problem)
    assert again is not None
    assert again.tolist() == cell_of.tolist()


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(PackingError, match="unknown algorithm 'fast'") as caught:
        pack([1], capacity=2, algorithm="fast")
    assert all(name in str(caught.value) for name in PACKERS)
    with pytest.raises(PackingError, match="unknown algorithm 'fast'") as caught:
        partition([1], 2, algorithm="fast")
    assert all(name in str(caught.value) for name in PARTITIONERS)
