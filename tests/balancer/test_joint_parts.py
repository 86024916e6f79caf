"""Parts of the `joint` policy on their own: shares, local search, tops, orders, routing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.layout import ParallelSpec
from balancer.makespans import makespans_ns
from balancer.policies import PlacementProblem
from balancer.policies.item_routing import route_items
from balancer.policies.joint_core import route
from balancer.policies.joint_profile import PARTS, TOTAL, divisible_times, levels, slot_shares
from balancer.policies.joint_tops import lower_tops
from balancer.schedule import build_schedule


def divisible_makespan(schedule, shares, work, *, routed=False) -> float:
    """Makespan in units of a share of everything."""
    times = [divisible_times(schedule, shares[np.newaxis], part, routed) for part in work]
    return int(makespans_ns(schedule, times[0], times[1], routed=routed)[0]) / TOTAL


@pytest.mark.parametrize(
    ("stage_ranks", "num_microbatches", "encoder", "optimum"),
    [
        # Optima of the linear program over shares and start times, in units of the work of an LLM rank.
        ((0, 1), 4, 32, 1.041),
        ((0, 1), 4, 64, 1.178),
        ((0, 1, 2, 3), 4, 32, 1.519),
        ((0, 1, 2, 3), 16, 32, 1.075),
        ((0, 1, 2, 3), 16, 64, 1.109),
    ],
)
def test_shares_come_within_a_percent_of_the_optimum(stage_ranks, num_microbatches, encoder, optimum) -> None:
    schedule = build_schedule("1f1b", stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    work = np.array([[encoder, *[64] * (len(stage_ranks) - 1)]], dtype=np.int64) * np.array([[1], [2]])
    shares = slot_shares(schedule, work, PARTS * num_microbatches, routed=False)
    assert abs(int(shares.sum()) - TOTAL) <= num_microbatches
    assert divisible_makespan(schedule, shares, work) / (3 * 64) <= 1.01 * optimum


@pytest.mark.parametrize("most", [PARTS, PARTS + 2, 3 * PARTS // 2])
def test_shares_keep_to_what_capacities_leave_room_for(most: int) -> None:
    schedule = build_schedule("1f1b", stage_ranks=(0, 1, 2), num_microbatches=8)
    work = np.array([[20, 40, 40], [40, 80, 80]])
    shares = slot_shares(schedule, work, most, routed=False)
    assert int(shares.max()) <= TOTAL * most // (PARTS * 8) + 1
    assert abs(int(shares.sum()) - TOTAL) <= 8


def test_microbatches_are_equal_where_there_is_no_pipeline() -> None:
    schedule = build_schedule("1f1b", stage_ranks=(0, 0), num_microbatches=4)
    assert slot_shares(schedule, np.ones((2, 2), np.int64), 4 * PARTS, routed=False).tolist() == [TOTAL // 4] * 4


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=8),
    st.lists(st.integers(0, 2**40), min_size=8, max_size=8),
    st.integers(0, 2**44),
)
def test_levels_hold_what_there_is_and_no_giant_stands_above_its_level(parts, giants, total: int) -> None:
    shares = np.array(parts, dtype=np.int64) * TOTAL // max(sum(parts), 1)
    giants = np.sort(np.array(giants[: len(parts)], dtype=np.int64))[::-1].copy()
    found = levels(shares, total, giants)
    by_share = np.argsort(-shares, kind="stable")
    assert (found[by_share] >= giants).all()
    if not giants.any() and sum(parts):
        assert abs(int(found.sum()) - total) <= max(total // 2**16, 16)


@given(st.integers(0, 50), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2))
def test_no_top_ever_rises(seed: int, num_replicas: int, num_slots: int, num_stages: int) -> None:
    generator = np.random.Generator(np.random.Philox(seed))
    count, num_cells = 30, num_replicas * num_slots
    values = generator.integers(1, 100, (count, num_stages + 1))
    cell_of = np.concatenate([np.arange(num_cells), generator.integers(0, num_cells, count - num_cells)])
    cell_of = cell_of.astype(np.int32)

    def loads(cells):
        load = np.zeros((num_cells, num_stages + 1), dtype=np.int64)
        np.add.at(load, cells, values)
        return load.reshape(num_replicas, num_slots, -1)

    before = loads(cell_of)
    capacity = np.array([before[:, :, -1].max()])
    found = lower_tops(values, capacity, cell_of, num_replicas, num_slots, 100_000)
    after = loads(found)
    assert (after[:, :, :-1].max(axis=0) <= before[:, :, :-1].max(axis=0)).all()
    assert (after[:, :, -1] <= capacity).all()
    assert np.bincount(found, minlength=num_cells).min() > 0
    assert np.array_equal(after.sum(axis=(0, 1)), before.sum(axis=(0, 1)))


def test_tops_are_lowered_by_the_example_of_their_text() -> None:
    values = np.array([[9], [4], [10], [5], [6], [1]])
    found = lower_tops(values, np.zeros(0, np.int64), np.array([0, 0, 2, 1, 3, 3], np.int32), 2, 2, 10_000)
    load = np.bincount(found, weights=values[:, 0], minlength=4).reshape(2, 2)
    assert load.max(axis=0).sum() < 13 + 7


def test_items_go_to_the_lightest_rank_of_their_group() -> None:
    """Items 5, 4 and 1 of a unit on two ranks: 5 | 4 1. A group of width 1 has one rank."""
    cost, group = np.array([4, 1, 5, 7, 3]), np.array([0, 0, 0, 1, 1])
    order, width, own = np.argsort(-cost, kind="stable"), np.array([2, 1]), np.zeros(5, dtype=np.int64)
    nothing, unlimited = np.zeros((5, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    assert route(order, group, own, cost, width, 2, nothing, unlimited).tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(("limit", "expected"), [(2, [1, 1, 0, 0]), (1, [1, 1, 1, 0])])
def test_items_go_where_there_is_room_and_stay_where_there_is_none(limit: int, expected: list[int]) -> None:
    """Items 9, 1, 1, 1 of a unit: at most two a rank is 9 1 | 1 1; at most one a rank leaves all where they were."""
    cost, group, own = np.array([1, 1, 1, 9]), np.zeros(4, dtype=np.int64), np.array([1, 1, 1, 0])
    order, ones = np.array([3, 0, 1, 2]), np.ones((4, 1), dtype=np.int64)
    assert route(order, group, own, cost, np.array([2]), 2, ones, np.array([limit])).tolist() == expected


def test_a_partial_last_unit_uses_no_more_ranks_than_it_has_microbatches(counts_of) -> None:
    count = 80
    counts = counts_of([100] * count, patches=[40 + row for row in range(count)])
    parallel = ParallelSpec.pipeline(dp_size=2, pp_size=4, encoder="spread", num_microbatches=5)
    times = np.stack([counts.patches, *[counts.llm_tokens] * 4], axis=1)
    zeros = np.zeros(5, dtype=np.int64)
    problem = PlacementProblem(
        counts=counts,
        forward_ns=times,
        backward_ns=2 * times,
        weight_ns=times,
        forward_constant_ns=zeros,
        backward_constant_ns=zeros,
        weight_constant_ns=zeros,
        item_forward_ns=counts.patches,
        item_backward_ns=2 * counts.patches,
        parallel=parallel,
        schedule="nested",
        sizes=counts.llm_tokens[:, np.newaxis],
        capacity=(10**6,),
        capacity_names=("tokens",),
        num_microbatches=5,
    )
    rank, unit = route_items(problem, (np.arange(count) % 10).astype(np.int32), 5)
    assert set(unit.tolist()) == {0, 1}
    assert set(rank[unit == 1].tolist()) == {0}
    assert set(rank[unit == 0].tolist()) == {0, 1, 2, 3}
