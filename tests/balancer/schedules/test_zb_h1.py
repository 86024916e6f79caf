"""ZB-H1: a third of the bubble in the memory of 1F1B's first rank."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balancer.schedule import Schedule, build_schedule
from balancer.simulate import peak_live, simulate


def makespan(schedule: Schedule, forward: float, backward: float, weight: float) -> float:
    shape = (schedule.num_stages, schedule.num_microbatches)
    return simulate(
        schedule,
        forward_ms=np.full(shape, forward),
        backward_ms=np.full(shape, backward),
        weight_ms=np.full(shape, weight),
    ).makespan_ms


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    return build_schedule("ZB-H1", num_ranks=num_ranks, num_microbatches=num_microbatches)


def test_three_ranks_and_four_microbatches_are_the_ones_in_the_module_text() -> None:
    assert zb_h1(3, 4).to_grid().split("\n") == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
        "1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3",
        "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3",
    ]


@given(st.integers(1, 8), st.integers(0, 12))
def test_with_equal_thirds_only_one_part_of_the_bubble_is_left(num_ranks: int, more: int) -> None:
    num_microbatches = num_ranks + more
    assert makespan(zb_h1(num_ranks, num_microbatches), 1.0, 2.0, 1.0) == 3 * num_microbatches + num_ranks - 1


@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.5, 4.0), st.floats(0.1, 0.9))
def test_it_is_never_slower_than_1f1b(num_ranks, num_microbatches, backward, part) -> None:
    plain = build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    weight = part * backward
    split = makespan(zb_h1(num_ranks, num_microbatches), 1.0, backward, weight)
    assert split <= makespan(plain, 1.0, backward, weight) * (1 + 1e-12)


@given(st.integers(1, 8), st.integers(1, 20))
def test_no_rank_holds_more_than_the_first_rank_of_1f1b(num_ranks: int, num_microbatches: int) -> None:
    assert peak_live(zb_h1(num_ranks, num_microbatches)).tolist() == [min(num_ranks, num_microbatches)] * num_ranks


def test_stages_of_one_rank_hand_the_gradient_on_before_any_of_them_turns_to_its_weights() -> None:
    schedule = build_schedule("zb-h1", stage_ranks=[0, 0], num_microbatches=1)
    assert schedule.to_grid() == "0F0,1F0,1I0,0I0,1W0,0W0"
