"""Interleaved 1F1B: the bubble shrinks by the chunks, for any number of micro-batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.schedule import Schedule, build_schedule
from balancer.simulate import peak_live, simulate

RANKS, CHUNKS = st.integers(1, 8), st.integers(2, 4)


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    return build_schedule(
        "interleaved1f1b", num_ranks=num_ranks, num_stages=num_ranks * num_chunks, num_microbatches=num_microbatches
    )


def makespan(schedule: Schedule, forward: float = 1.0, backward: float = 2.0) -> float:
    shape = (schedule.num_stages, schedule.num_microbatches)
    return simulate(schedule, forward_ms=np.full(shape, forward), backward_ms=np.full(shape, backward)).makespan_ms


def test_two_ranks_with_two_chunks_are_the_ones_in_the_module_text() -> None:
    assert interleaved(2, 2, 4).to_grid().split("\n") == [
        "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3",
        "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3",
    ]


@given(RANKS, CHUNKS, st.integers(0, 20))
def test_the_bubble_is_that_of_one_chunk_for_every_number_of_microbatches(num_ranks, num_chunks, more) -> None:
    num_microbatches = num_ranks + more
    num_chunks = 1 if num_ranks == 1 else num_chunks
    schedule = interleaved(num_ranks, num_chunks, num_microbatches)
    assert makespan(schedule) == 3 * (num_microbatches * num_chunks + num_ranks - 1)


@given(st.integers(2, 8), CHUNKS, st.integers(1, 8))
def test_fewer_microbatches_than_ranks_run_and_are_never_slower_than_without_chunks(
    num_ranks, num_chunks, num_microbatches
) -> None:
    whole = build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    assert makespan(interleaved(num_ranks, num_chunks, num_microbatches)) <= makespan(
        whole, 1.0 * num_chunks, 2.0 * num_chunks
    )


@given(st.integers(2, 8), CHUNKS, st.integers(1, 5))
def test_a_rank_holds_the_chunks_that_the_module_text_says(num_ranks, num_chunks, num_groups) -> None:
    num_microbatches = num_ranks * num_groups
    peaks = peak_live(interleaved(num_ranks, num_chunks, num_microbatches))
    expected = [2 * (num_ranks - 1 - rank) + (num_chunks - 1) * num_ranks + 1 for rank in range(num_ranks)]
    assert peaks.tolist() == [min(count, num_chunks * num_microbatches) for count in expected]


def test_every_grid_of_ranks_chunks_and_microbatches_runs_to_the_end(blocked) -> None:
    for num_ranks in range(1, 7):
        for num_chunks in range(2, 5):
            for num_microbatches in range(1, 3 * num_ranks + 1):
                assert blocked(interleaved(num_ranks, num_chunks, num_microbatches)) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_chunks", [2, 4])
def test_an_encoder_on_its_own_rank_feeds_the_rounds_without_a_gap_in_between(num_ranks: int, num_chunks: int) -> None:
    """Rounds take micro-batches in bursts: only the first and the last burst wait for an encoder as slow as a rank."""

    def steps(num_groups: int) -> float:
        schedule = build_schedule(
            "interleaved1f1b",
            stage_ranks=[0] + [1 + chunk % num_ranks for chunk in range(num_ranks * num_chunks)],
            num_microbatches=num_groups * num_ranks,
        )
        durations = np.ones((schedule.num_stages, schedule.num_microbatches))
        durations[0] = num_chunks
        return simulate(schedule, forward_ms=durations, backward_ms=2 * durations).makespan_ms

    assert steps(8) - steps(4) == 4 * num_ranks * num_chunks * 3


def test_with_one_chunk_a_rank_it_is_1f1b() -> None:
    one = build_schedule("interleaved1f1b", stage_ranks=[0, 1, 1, 2], num_microbatches=5)
    assert one.ranks == build_schedule("1f1b", stage_ranks=[0, 1, 1, 2], num_microbatches=5).ranks
