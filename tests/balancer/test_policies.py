"""Policies on their own: the worked examples of their texts, and the parts that plans only show in sum."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import PlanError
from balancer.layout import ParallelSpec
from balancer.policies import Placement, PlacementProblem, get_policy, length_grouped, lpt, policy_names, sequential
from balancer.policies.base import even_bounds, groups_of, sum_over_cells
from balancer.policies.empty_cells import without_empty_cells
from packing import pack


@pytest.fixture(scope="session")
def problem_of(counts_of):
    """`problem_of(tokens, encoder=[...])`: 1 ns per token in the LLM, `encoder` ns in the encoder, both ways."""

    def build(tokens, *, encoder=None, dp_size=1, stage_ranks=(0, 0), capacity=10**6, meet="step", **options):
        counts = counts_of(tokens, patches=encoder)
        times = np.stack([counts.patches, counts.llm_tokens], axis=1)
        zeros = np.zeros(2, dtype=np.int64)
        nothing = np.zeros(0, dtype=np.int64)
        return PlacementProblem(
            counts=counts,
            forward_ns=times,
            backward_ns=times,
            weight_ns=times // 2,
            forward_constant_ns=zeros,
            backward_constant_ns=zeros,
            weight_constant_ns=zeros,
            item_forward_ns=nothing,
            item_backward_ns=nothing,
            parallel=ParallelSpec.pipeline(dp_size=dp_size, pp_size=stage_ranks[-1] + 1, meet=meet),
            schedule="1f1b",
            sizes=counts.llm_tokens[:, np.newaxis],
            capacity=(capacity,),
            capacity_names=("tokens",),
            **{"num_microbatches": None, **options},
        )

    return build


def cells(placement: Placement, dp_size: int, values: list[int]) -> list[list[list[int]]]:
    """Values of the samples per rank and micro-batch, in slot order."""
    grid = [[[] for _ in range(placement.num_microbatches)] for _ in range(dp_size)]
    for row in np.argsort(placement.slot, kind="stable").tolist():
        grid[placement.dp_rank[row]][placement.microbatch[row]].append(values[row])
    return grid


def test_sequential_cuts_the_order_into_even_pieces(problem_of) -> None:
    placement = sequential.place(problem_of([1] * 7, dp_size=2, num_microbatches=2))
    assert cells(placement, 2, list(range(7))) == [[[0, 1], [2, 3]], [[4, 5], [6]]]


def test_sequential_fills_up_where_even_counts_do_not_fit(problem_of) -> None:
    tokens = [9, 2, 2, 2, 2, 2]
    placement = sequential.place(problem_of(tokens, capacity=10, num_microbatches=2))
    assert cells(placement, 1, tokens) == [[[9], [2, 2, 2, 2, 2]]]


def test_sequential_moves_rank_borders_before_it_gives_up(problem_of) -> None:
    """Three samples each: the first rank would need three cells of 10, but all six fit into four."""
    tokens = [9, 9, 9, 1, 1, 1]
    placement = sequential.place(problem_of(tokens, dp_size=2, capacity=10, num_microbatches=2))
    assert cells(placement, 2, tokens) == [[[9], [9]], [[9, 1], [1, 1]]]


def test_length_grouped_runs_similar_lengths_at_the_same_time(problem_of) -> None:
    tokens = [2, 9, 4, 7, 6, 5, 8, 3]
    placement = length_grouped.place(problem_of(tokens, dp_size=2, num_microbatches=2))
    found = [[sorted(cell, reverse=True) for cell in rank] for rank in cells(placement, 2, tokens)]
    assert found == [[[9, 7], [5, 3]], [[8, 6], [4, 2]]]


def test_lpt_splits_the_example_of_its_text(problem_of) -> None:
    tokens = [9, 1, 9, 1, 9, 1]
    placement = lpt.place(problem_of(tokens, dp_size=2, num_microbatches=2))
    found = [sorted(sorted(cell) for cell in rank) for rank in cells(placement, 2, tokens)]
    assert sorted(found) == [[[1, 1, 1], [9]], [[9], [9]]]


def test_lpt_balances_whole_bins_where_the_two_level_split_finds_no_room(problem_of) -> None:
    """Four pairs of 6 and 4 fill four cells of 10; times that contradict the sizes lead every greedy split astray."""
    tokens, encoder = [6, 6, 6, 6, 4, 4, 4, 4], [1, 2, 3, 4, 900, 800, 700, 600]
    placement = lpt.place(problem_of(tokens, encoder=encoder, dp_size=2, capacity=10, num_microbatches=2))
    assert [[sum(cell) for cell in rank] for rank in cells(placement, 2, tokens)] == [[10, 10], [10, 10]]


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=6, max_size=12),
    st.integers(1, 2),
    st.integers(2, 6),
)
def test_lpt_keeps_the_fastest_order_it_tried(problem_of, times, dp_size: int, num_microbatches: int) -> None:
    tokens, encoder = map(list, zip(*times, strict=True))
    problem = problem_of(
        tokens, encoder=encoder, dp_size=dp_size, stage_ranks=(0, 1), num_microbatches=num_microbatches
    )
    found = problem.cell_times(lpt.place(problem))
    makespans = problem.makespans_ns(found)
    total, first = found.forward_ns.sum(axis=2), found.forward_ns[:, :, 0]
    for key in (-total, total, -first, first):
        # Ties in a key leave room for another order; without ties the sorted order was among those tried.
        if all(len(set(row)) == len(row) for row in key.tolist()):
            assert (makespans <= problem.makespans_ns(found.reordered(np.argsort(key, axis=1)))).all()


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=4, max_size=8))
def test_no_order_of_four_microbatches_is_faster(problem_of, times: list[tuple[int, int]]) -> None:
    tokens, encoder = map(list, zip(*times, strict=True))
    problem = problem_of(tokens, encoder=encoder, stage_ranks=(0, 1), num_microbatches=4)
    found = problem.cell_times(lpt.place(problem))
    every = [int(problem.makespans_ns(found.reordered(np.array([order])))[0]) for order in permutations(range(4))]
    assert int(problem.makespans_ns(found)[0]) == min(every)


@given(st.integers(0, 60), st.integers(1, 9))
def test_even_groups_differ_by_at_most_one_and_none_is_empty_without_need(n: int, k: int) -> None:
    sizes = np.diff(even_bounds(n, k))
    assert sizes.sum() == n
    assert sizes.max() - sizes.min() <= 1
    assert sizes.tolist() == sorted(sizes.tolist(), reverse=True)
    assert groups_of(even_bounds(n, k)).tolist() == [group for group, size in enumerate(sizes) for _ in range(size)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=20))
def test_slots_follow_the_order_of_the_samples_in_each_cell(where: list[tuple[int, int]]) -> None:
    ranks, microbatches = (np.array(column, dtype=np.int64) for column in zip(*where, strict=True))
    placement = Placement.from_cells(ranks, microbatches, 4)
    for cell in set(where):
        rows = [row for row, place in enumerate(where) if place == cell]
        assert placement.slot[rows].tolist() == list(range(len(rows)))


def test_empty_cells_are_filled_by_cutting_the_heaviest_in_two(problem_of) -> None:
    tokens = [1, 1, 6, 5, 9]
    problem = problem_of(tokens, num_microbatches=4)
    packed = Placement.from_cells(np.zeros(5, dtype=np.int64), np.array([0, 0, 0, 0, 2]), 4)
    filled = without_empty_cells(problem, packed)
    assert cells(filled, 1, tokens) == [[[1, 1], [6], [5], [9]]]
    assert without_empty_cells(problem, filled) is filled


def test_a_rank_keeps_an_empty_cell_where_ranks_meet_once_and_is_fed_where_they_meet_inside(problem_of) -> None:
    tokens = [9, 2, 3, 4]
    where = (np.array([0, 1, 1, 1]), np.array([0, 0, 0, 1]), 2)
    once = without_empty_cells(problem_of(tokens, dp_size=2, num_microbatches=2), Placement.from_cells(*where))
    assert cells(once, 2, tokens) == [[[9], []], [[2, 3], [4]]]
    inside = problem_of(tokens, dp_size=2, num_microbatches=2, meet="microbatch")
    assert cells(without_empty_cells(inside, Placement.from_cells(*where)), 2, tokens) == [[[9], [2]], [[3], [4]]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 11)), min_size=1, max_size=20))
def test_filling_empty_cells_keeps_every_sample_on_its_rank_and_the_order(problem_of, drawn) -> None:
    tokens, cell = map(list, zip(*drawn, strict=True))
    problem = problem_of(tokens, dp_size=3, num_microbatches=4)
    before = Placement.from_cells(np.array(cell) // 4, np.array(cell) % 4, 4)
    after = without_empty_cells(problem, before)
    assert after.dp_rank.tolist() == before.dp_rank.tolist()
    rows = list(range(len(tokens)))
    for old, new in zip(cells(before, 3, rows), cells(after, 3, rows), strict=True):
        assert [row for group in old for row in group] == [row for group in new for row in group]
        assert sum(bool(group) for group in new) == min(4, sum(map(len, new)))


def test_ranks_that_meet_are_fed_in_order_where_the_samples_are(problem_of) -> None:
    """[1 1 8][8] and nothing for the third rank, all in order: the heaviest cell is cut, and all move up."""
    tokens = [1, 1, 8, 8]
    problem = problem_of(tokens, dp_size=3, capacity=10, meet="microbatch", num_microbatches=1)
    before = Placement.from_cells(np.array([0, 0, 0, 1]), np.zeros(4, dtype=np.int64), 1)
    assert cells(without_empty_cells(problem, before), 3, tokens) == [[[1, 1]], [[8]], [[8]]]
    before = Placement.from_cells(np.array([1, 1, 1, 0]), np.zeros(4, dtype=np.int64), 1)  # not in order
    assert cells(without_empty_cells(problem, before), 3, tokens) == [[[8]], [[1, 8]], [[1]]]


@given(st.lists(st.integers(1, 10), min_size=1, max_size=30), st.integers(1, 5))
def test_pieces_are_filled_as_if_each_were_alone(tokens: list[int], num_pieces: int) -> None:
    sizes = np.array(tokens, dtype=np.int64)[:, np.newaxis]
    starts = even_bounds(len(tokens), num_pieces)
    found = sequential.fill_pieces_in_order(sizes, (10,), starts)
    for start, stop in pairwise(starts.tolist()):
        expected = pack(sizes[start:stop], capacity=(10,), algorithm="next_fit").bin_of if stop > start else []
        assert found[start:stop].tolist() == list(expected)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=30))
def test_sums_over_cells_are_those_of_their_samples(rows: list[tuple[int, int, int]]) -> None:
    cell = np.array([row[0] for row in rows], dtype=np.int64)
    values = np.array([row[1:] for row in rows], dtype=np.int64)
    sums = sum_over_cells(cell, values, (2, 3))
    assert sums.shape == (2, 3, 2)
    for index in range(6):
        assert sums[index // 3, index % 3].tolist() == values[cell == index].sum(axis=0).tolist()
    assert sum_over_cells(cell, values[:, 0], (2, 3)).tolist() == sums[:, :, 0].tolist()


def test_a_placement_that_routes_nothing_has_no_encoder_entries(problem_of) -> None:
    problem = problem_of([1, 2], num_microbatches=1)
    with pytest.raises(PlanError, match="without encoder ranks has no encoder entries"):
        problem.encoder_entries(sequential.place(problem))


def test_registered_policies_answer_to_their_names() -> None:
    assert {"length_grouped", "lpt", "sequential"} <= set(policy_names())
    assert all(get_policy(name).name == name for name in policy_names())
    assert {name for name in policy_names() if get_policy(name).never_worse} == set(policy_names()) - {
        "length_grouped",
        "sequential",
    }
