"""torch's own listings, built by its helpers without process groups, say what ours say."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.distributed.pipelining import schedules as theirs  # noqa: E402

from balancer.schedule import build_schedule, schedule_names  # noqa: E402


def texts(actions: list[Any]) -> list[str]:
    """Acts of one rank, without idle slots and what is no computation."""
    return [str(a) for a in actions if a is not None and a.computation_type.value in ("F", "B", "I", "W")]


def ours(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> list[list[str]]:
    schedule = build_schedule(
        name, num_ranks=num_ranks, num_stages=num_ranks * num_chunks, num_microbatches=num_microbatches
    )
    return [[str(act) for act in program] for program in schedule.ranks]


def listing(schedule: Any, num_ranks: int, num_microbatches: int) -> list[list[str]]:
    order = schedule._get_pipeline_order(SimpleNamespace(_num_stages=num_ranks, _n_microbatches=num_microbatches))
    return [texts(order[rank]) for rank in range(num_ranks)]


def rounds(schedule: Any, num_ranks: int, num_microbatches: int, num_chunks: int) -> list[list[str]]:
    num_rounds = max(1, num_microbatches // num_ranks)
    itself = SimpleNamespace(
        n_local_stages=num_chunks,
        microbatches_per_round=num_microbatches // num_rounds,
        pp_group_size=num_ranks,
        _n_microbatches=num_microbatches,
    )
    return [texts(schedule._calculate_single_rank_operations(itself, rank)) for rank in range(num_ranks)]


@given(st.integers(2, 6), st.integers(1, 12))
def test_gpipe(num_ranks: int, num_microbatches: int) -> None:
    assert listing(theirs.ScheduleGPipe, num_ranks, num_microbatches) == ours("GPipe", num_ranks, num_microbatches)


@given(st.integers(2, 6), st.integers(0, 8))
def test_1f1b_on_all_ranks_but_the_last_whose_forwards_torch_numbers_from_one(num_ranks: int, more: int) -> None:
    num_microbatches = num_ranks + more
    expected = listing(theirs.Schedule1F1B, num_ranks, num_microbatches)
    got = ours("1F1B", num_ranks, num_microbatches)
    assert got[:-1] == expected[:-1]
    last = num_ranks - 1
    shifted = [f"{last}F{m + 1}" if op == "F" else f"{last}B{m}" for m in range(num_microbatches) for op in "FB"]
    if expected[-1] == shifted:  # torch up to 2.13
        expected[-1] = [f"{last}{op}{m}" for m in range(num_microbatches) for op in "FB"]
    assert got[-1] == expected[-1]


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 24))
def test_interleaved_wherever_torch_takes_the_number_of_microbatches(num_ranks, num_chunks, num_microbatches) -> None:
    if num_microbatches % max(1, num_microbatches // num_ranks) == 0:
        expected = rounds(theirs.ScheduleInterleaved1F1B, num_ranks, num_microbatches, num_chunks)
        assert ours("Interleaved1F1B", num_ranks, num_microbatches, num_chunks) == expected


@given(st.integers(2, 6), st.integers(0, 10))
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage_a_rank(num_ranks: int, more: int) -> None:
    num_microbatches = num_ranks + more
    expected = rounds(theirs.ScheduleInterleavedZeroBubble, num_ranks, num_microbatches, 1)
    assert ours("ZB-H1", num_ranks, num_microbatches) == expected


@pytest.mark.parametrize("name", schedule_names())
def test_torch_reads_every_cell_of_our_grids(name: str) -> None:
    schedule = build_schedule(name, num_ranks=2, num_microbatches=3)
    for line, program in zip(schedule.to_grid().split("\n"), schedule.ranks, strict=True):
        read = [theirs._Action.from_str(cell) for cell in line.split(",")]
        assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in read] == [
            (act.stage, act.op, act.microbatch) for act in program
        ]
