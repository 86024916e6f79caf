"""`partition_grid`: conservation, capacities, filled cells, bounds and quality against the exact optimum."""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import CapacityError, InfeasiblePartitionError, ItemTooLargeError, NegativeSizeError, PackingError, pack
from packing.grid import GRID_PLACERS, partition_grid
from packing.results import GridResult

ALGORITHMS = sorted(GRID_PLACERS)
OBJECTIVES = ["per_rank", "per_slot"]
quick = settings(max_examples=60, deadline=None)
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_objective = pytest.mark.parametrize("objective", OBJECTIVES)


@st.composite
def grids(draw: st.DrawFn, max_items: int, max_side: int = 4) -> dict[str, Any]:
    """Arguments of `partition_grid`, sometimes infeasible."""
    num_stages = draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 30), min_size=num_stages, max_size=num_stages)
    weights = draw(st.lists(row, min_size=1, max_size=max_items))
    arguments: dict[str, Any] = {
        "weights": weights,
        "num_ranks": draw(st.integers(1, max_side)),
        "num_slots": draw(st.integers(1, max_side)),
    }
    capacity = draw(st.lists(st.integers(1, 12), max_size=2))
    if capacity:
        size = st.tuples(*(st.integers(0, limit) for limit in capacity)).map(list)
        arguments["capacity"] = capacity
        arguments["sizes"] = draw(st.lists(size, min_size=len(weights), max_size=len(weights)))
    return arguments


def check(result: GridResult, arguments: dict[str, Any]) -> None:
    """What holds for every result: loads, capacities, objective, bound, filled cells."""
    table = np.asarray(arguments["weights"]).reshape(len(arguments["weights"]), -1)
    ranks, slots = arguments["num_ranks"], arguments["num_slots"]
    assert result.load.shape == (ranks, slots, table.shape[1])
    load = np.zeros_like(result.load)
    np.add.at(load, (result.rank_of, result.slot_of), table)
    assert (load == result.load).all()
    if arguments.get("capacity"):
        used = np.zeros((ranks, slots, len(arguments["capacity"])), np.int64)
        np.add.at(used, (result.rank_of, result.slot_of), np.asarray(arguments["sizes"]))
        assert (used <= arguments["capacity"]).all()
    assert result.makespan == objective_of(load, result.objective)
    assert result.lower_bound <= result.makespan
    counts = np.bincount(result.cell_of, minlength=ranks * slots)
    assert counts.min() > 0 or len(table) < ranks * slots


def outcome(**arguments: Any) -> GridResult | InfeasiblePartitionError:
    try:
        return partition_grid(**arguments)
    except InfeasiblePartitionError as error:
        return error


def objective_of(load: np.ndarray[Any, Any], objective: str) -> int:
    """load [R, M, S], by the words of the docstring."""
    if objective == "per_rank":
        return max(int(total) for rank in load for total in rank.sum(axis=0))
    return sum(int(load[:, slot].max()) for slot in range(load.shape[1]))


def optimum(arguments: dict[str, Any], objective: str) -> int | None:
    """Exhaustive search over all cells of all items."""
    table = np.asarray(arguments["weights"]).reshape(len(arguments["weights"]), -1)
    ranks, slots = arguments["num_ranks"], arguments["num_slots"]
    best: int | None = None
    for cells in itertools.product(range(ranks * slots), repeat=len(table)):
        load = _sums(table, cells, ranks * slots)
        if arguments.get("capacity"):
            used = _sums(np.asarray(arguments["sizes"]), cells, ranks * slots)
            if (used > arguments["capacity"]).any():
                continue
        value = objective_of(load.reshape(ranks, slots, -1), objective)
        best = value if best is None else min(best, value)
    return best


def _sums(rows: np.ndarray[Any, Any], cells: Sequence[int], num_cells: int) -> np.ndarray[Any, Any]:
    sums = np.zeros((num_cells, rows.shape[1]), np.int64)
    for row, cell in zip(rows, cells, strict=True):
        sums[cell] += row
    return sums


@every_algorithm
@every_objective
@quick
@given(arguments=grids(40))
def test_items_are_conserved_capacities_hold_and_no_cell_is_empty_without_need(
    algorithm: str, objective: str, arguments: dict[str, Any]
) -> None:
    result = outcome(**arguments, objective=objective, algorithm=algorithm)
    if isinstance(result, InfeasiblePartitionError):
        bins = pack(arguments["sizes"], capacity=arguments["capacity"]).num_bins
        assert bins > arguments["num_ranks"] * arguments["num_slots"] == result.num_parts
        assert result.num_bins_found == bins
        assert result.proven == (result.num_bins_bound > result.num_parts)
        return
    check(result, arguments)
    again = partition_grid(**arguments, objective=objective, algorithm=algorithm)
    assert (again.cell_of == result.cell_of).all()


@every_objective
@settings(max_examples=40, deadline=None)
@given(arguments=grids(5, max_side=2))
@example(
    arguments={
        "weights": [[9], [3], [3], [3], [3], [3]],
        "num_ranks": 2,
        "num_slots": 2,
        "capacity": [4],
        "sizes": [[4], [1], [1], [1], [1], [1]],
    }
)
@example(
    arguments={
        "weights": [[8], [8], [7], [1], [1]],
        "num_ranks": 2,
        "num_slots": 2,
        "capacity": [3],
        "sizes": [[3], [2], [2], [1], [1]],
    }
)
def test_the_bound_is_never_above_the_optimum(objective: str, arguments: dict[str, Any]) -> None:
    best = optimum(arguments, objective)
    result = outcome(**arguments, objective=objective)
    if isinstance(result, InfeasiblePartitionError):
        assert not result.proven or best is None
        return
    assert best is not None
    assert result.lower_bound <= best <= result.makespan


def test_the_bound_per_slot_knows_that_large_items_need_cells_of_their_own() -> None:
    giants = {"weights": [9, 8, 7, 6], "num_ranks": 2, "num_slots": 2, "capacity": 4, "sizes": [3, 3, 3, 3]}
    assert optimum({**giants, "capacity": [4], "sizes": [[3]] * 4}, "per_slot") == 16
    result = partition_grid(**giants, objective="per_slot")  # type: ignore[arg-type]
    assert result.makespan == result.lower_bound == 9 + 7
    free = partition_grid(giants["weights"], 2, 2, objective="per_slot")  # type: ignore[arg-type]
    assert free.lower_bound == 15


def test_the_bound_per_slot_knows_what_fits_beside_a_giant() -> None:
    """Nothing fits beside the giant of 100, and the other rank has room for 60 in that slot: 120 are left for two."""
    arguments: dict[str, Any] = {
        "weights": [100, *[30] * 6],
        "num_ranks": 2,
        "num_slots": 2,
        "capacity": [4],
        "sizes": [[4], *[[2]] * 6],
    }
    result = partition_grid(**arguments, objective="per_slot")
    assert result.makespan == result.lower_bound == 100 + 60
    # Without capacity: 100, 30, ... are ten nearly whole units of 30, five of them on one rank.
    assert partition_grid(arguments["weights"], 2, 2, objective="per_slot").lower_bound == 150


@every_objective
@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.integers(1, 40), min_size=4, max_size=6),
    shape=st.sampled_from([(2, 2), (3, 1), (1, 3), (2, 1)]),
)
def test_small_grids_are_close_to_the_optimum(objective: str, weights: list[int], shape: tuple[int, int]) -> None:
    arguments = {"weights": weights, "num_ranks": shape[0], "num_slots": shape[1]}
    best = optimum(arguments, objective)
    assert best is not None
    found = partition_grid(weights, *shape, objective=objective)  # type: ignore[arg-type]
    # No cell may stay empty, which the optimum does not respect: 9 1 1 1 on 2 x 2 costs 10, not 9.
    assert best <= found.makespan <= best + max(sorted(weights)[: shape[0] * shape[1]], default=0)


def heavy_tail(num_items: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Sizes with a heavy tail, cut at 32,768."""
    generator = np.random.default_rng(seed)
    sizes = generator.lognormal(6.0, 1.0, num_items)
    tail = generator.random(num_items) < 0.03
    return np.clip(np.where(tail, sizes * 20, sizes), 8, 32768).astype(np.int64)


@every_objective
def test_a_heavy_tail_lands_within_half_a_percent_of_the_bound(objective: str) -> None:
    sizes = heavy_tail(8192)
    capacity = max(int(sizes.max()), int(sizes.sum()) * 11 // (10 * 1024))
    weights = 100 * sizes + sizes * sizes // 1000
    result = partition_grid(weights, 64, 16, capacity=capacity, sizes=sizes, objective=objective)  # type: ignore[arg-type]
    assert result.gap <= (0.001 if objective == "per_rank" else 0.005)
    assert np.bincount(result.cell_of, minlength=1024).min() > 0


@every_objective
def test_two_stages_are_both_balanced(objective: str) -> None:
    generator = np.random.default_rng(1)
    weights = generator.lognormal(8.0, 0.7, (2048, 2)).astype(np.int64)
    weights[:, 0] = weights[:, 0] * weights[:, 1].sum() // weights[:, 0].sum()
    result = partition_grid(weights, 16, 8, objective=objective)  # type: ignore[arg-type]
    assert result.gap <= (0.002 if objective == "per_rank" else 0.03)


def test_a_giant_meets_giants_in_its_slot() -> None:
    weights = [1000, 990, 980, 970, *[10] * 400]
    result = partition_grid(weights, 4, 4, objective="per_slot")
    assert (result.slot_of[:4] == 0).all()
    assert sorted(result.rank_of[:4]) == [0, 1, 2, 3]
    assert result.sync_ratio <= 1.01


def test_auto_is_never_worse_than_its_parts_where_items_are_few() -> None:
    for seed in range(20):
        generator = np.random.default_rng(seed)
        weights = generator.pareto(1.5, (60, 2)) * 100
        arguments: dict[str, Any] = {"weights": weights.astype(np.int64), "num_ranks": 4, "num_slots": 3}
        for objective in OBJECTIVES:
            parts = [
                partition_grid(**arguments, objective=objective, algorithm=algorithm, target_gap=0).makespan
                for algorithm in ("ranks_first", "level_fill")
            ]
            assert partition_grid(**arguments, objective=objective, target_gap=0).makespan == min(parts)


@every_algorithm
@every_objective
def test_a_tight_capacity_is_met_whenever_best_fit_meets_it(algorithm: str, objective: str) -> None:
    """Bins of 60 + 40 and 70 + 30: no room to spare, so placing by weight fails."""
    sizes = np.array([60, 40, 70, 30] * 12, np.int64)
    sizes = sizes[np.random.default_rng(3).permutation(len(sizes))]
    arguments: dict[str, Any] = {
        "weights": sizes % 7 + 1,
        "num_ranks": 6,
        "num_slots": 4,
        "capacity": [100],
        "sizes": sizes[:, None],
    }
    assert pack(sizes, capacity=100).num_bins == 24
    check(partition_grid(**arguments, algorithm=algorithm, objective=objective), arguments)


@every_algorithm
@every_objective
def test_a_roomy_packing_is_spread_until_no_cell_is_empty(algorithm: str, objective: str) -> None:
    """Weights run against sizes, so placing by weight leaves no room for the last large item; best-fit does."""
    sizes = np.array([1] * 30 + [10, 10], np.int64)
    arguments: dict[str, Any] = {
        "weights": 100 - sizes,
        "num_ranks": 3,
        "num_slots": 2,
        "capacity": [10],
        "sizes": sizes[:, None],
    }
    check(partition_grid(**arguments, algorithm=algorithm, objective=objective), arguments)


@every_algorithm
@every_objective
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 1), (3, 5)])
@pytest.mark.parametrize(
    "weights",
    [
        [],
        [5],
        [0],
        [0] * 20,
        [1] * 20,
        [7] * 15,
        [0, 0, 3],
        [2**62],
        [2**62 - 40, *[2] * 20],
        [2**57] * 32,
        [[0, 5], [5, 0], [0, 0]],
    ],
    ids=str,
)
def test_edges(algorithm: str, objective: str, shape: tuple[int, int], weights: list[Any]) -> None:
    arguments: dict[str, Any] = {"weights": weights, "num_ranks": shape[0], "num_slots": shape[1]}
    result = partition_grid(**arguments, algorithm=algorithm, objective=objective)
    if weights:
        check(result, arguments)
    else:
        assert result.makespan == result.lower_bound == result.gap == 0
        assert result.rank_ratio == result.sync_ratio == 1.0
    if all(weight == 7 for weight in weights) and shape == (3, 5) and weights:
        assert (result.load == 7).all()


@every_algorithm
@every_objective
def test_sizes_at_the_limit_of_exact_arithmetic(algorithm: str, objective: str) -> None:
    arguments: dict[str, Any] = {
        "weights": [2**58] * 8,
        "num_ranks": 2,
        "num_slots": 2,
        "capacity": [2**59, 2**62],
        "sizes": [[2**58, 2**58]] * 8,
    }
    result = partition_grid(**arguments, algorithm=algorithm, objective=objective)
    check(result, arguments)
    assert result.gap == 0


def test_every_item_at_capacity_takes_a_cell_of_its_own() -> None:
    result = partition_grid(list(range(1, 13)), 3, 4, capacity=5, sizes=[5] * 12, objective="per_slot")
    assert sorted(result.cell_of) == list(range(12))
    assert result.makespan == result.lower_bound == 12 + 9 + 6 + 3


def test_ratios_are_those_of_the_busiest_stage() -> None:
    result = partition_grid([[4, 1], [4, 1], [2, 1], [2, 1]], 2, 2, objective="per_slot")
    assert result.load.sum(axis=1).tolist() == [[6, 2], [6, 2]]
    assert result.rank_ratio == 1.0
    assert result.sync_ratio == 1.0
    lopsided = partition_grid([[4, 0], [0, 2]], 2, 1)
    assert lopsided.rank_ratio == lopsided.sync_ratio == 2.0


@every_objective
def test_slots_come_in_descending_order(objective: str) -> None:
    result = partition_grid(heavy_tail(500), 4, 5, objective=objective)  # type: ignore[arg-type]
    peaks = result.load.max(axis=2)
    if objective == "per_rank":
        assert (np.diff(peaks, axis=1) <= 0).all()
    else:
        assert (peaks[:, :-1].min(axis=0) >= peaks[:, 1:].max(axis=0)).all()


def test_a_larger_target_gap_stops_earlier_and_says_how_far_it_is() -> None:
    weights = heavy_tail(600)
    loose = partition_grid(weights, 8, 4, target_gap=0.05)
    tight = partition_grid(weights, 8, 4, target_gap=0)
    assert tight.makespan <= loose.makespan <= 1.05 * loose.lower_bound


def test_stages_without_cost_change_nothing_but_the_shape_of_the_load() -> None:
    weights = heavy_tail(300)
    plain = partition_grid(weights, 4, 4)
    padded = partition_grid(np.stack([weights * 0, weights], axis=1), 4, 4)
    assert (plain.cell_of == padded.cell_of).all()
    assert padded.load.shape == (4, 4, 2)
    assert (padded.load[:, :, :1] == 0).all()


def test_arrays_of_the_result_are_read_only() -> None:
    result = partition_grid([3, 2, 1], 2, 1)
    for array in (result.rank_of, result.slot_of, result.load):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert result.rank_of.dtype == result.slot_of.dtype == result.cell_of.dtype == np.int32


def test_malformed_input_is_refused_with_its_values() -> None:
    with pytest.raises(PackingError, match="unknown objective 'per_step'"):
        partition_grid([1], 1, 1, objective="per_step")  # type: ignore[arg-type]
    with pytest.raises(PackingError, match=r"unknown algorithm 'best'.*level_fill"):
        partition_grid([1], 1, 1, algorithm="best")
    with pytest.raises(PackingError, match="num_slots is 0"):
        partition_grid([1], 1, 0)
    with pytest.raises(PackingError, match="num_ranks is True"):
        partition_grid([1], True, 1)
    with pytest.raises(PackingError, match="target_gap is -1"):
        partition_grid([1], 1, 1, target_gap=-1)
    with pytest.raises(NegativeSizeError, match=r"weights\[1\] is -4"):
        partition_grid([1, -4], 1, 1)
    with pytest.raises(CapacityError, match="belong together"):
        partition_grid([1], 1, 1, capacity=4)
    with pytest.raises(ItemTooLargeError, match="item 1 has size 5"):
        partition_grid([1, 1], 2, 2, capacity=4, sizes=[1, 5])


def test_an_infeasible_grid_is_proven_so_by_the_bound() -> None:
    with pytest.raises(InfeasiblePartitionError, match="proven impossible") as caught:
        partition_grid([1] * 7, 2, 3, capacity=1, sizes=[1] * 7)
    assert caught.value.num_parts == 6
    assert caught.value.proven
    assert str(caught.value) == (
        "no assignment to 6 cells (2 ranks x 3 slots) within the capacities was found "
        "(proven impossible: any assignment needs at least 7 cells); use more slots or a larger capacity"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.unit, again.grid) == (str(caught.value), "cells", (2, 3))


@every_algorithm
@every_objective
@quick
@given(arguments=grids(max_items=6))
def test_slots_beyond_the_number_of_items_are_empty_and_change_nothing(
    algorithm: str, objective: str, arguments: dict[str, Any]
) -> None:
    results = []
    for num_slots in (len(arguments["weights"]) + 1, 1000):
        more = arguments | {"num_slots": num_slots}
        results.append(partition_grid(**more, algorithm=algorithm, objective=objective))
        check(results[-1], more)
    few, many = results
    assert (few.rank_of == many.rank_of).all()
    assert (few.slot_of == many.slot_of).all()
    assert (few.makespan, few.lower_bound) == (many.makespan, many.lower_bound)
    assert many.slot_of.max() <= len(arguments["weights"])
    assert (many.load[:, few.load.shape[1] :] == 0).all()


@every_objective
def test_very_many_slots_cost_no_more_than_their_loads(objective: str) -> None:
    result = partition_grid(np.arange(300) % 97, 1, 10_000_000, objective=objective)  # type: ignore[arg-type]
    assert result.load.shape == (1, 10_000_000, 1)
    assert result.makespan == result.lower_bound == result.load.sum()


def test_more_cells_than_anything_could_fill_are_refused_before_room_is_made_for_them() -> None:
    for ranks, slots in ((1, 2**24 + 1), (2**13, 2**12), (10**9, 10**9)):
        with pytest.raises(PackingError, match=f"num_ranks \\* num_slots is {ranks * slots}"):
            partition_grid([1, 2], ranks, slots)
