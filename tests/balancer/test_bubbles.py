"""The bubble by kind: each kind alone, and that kinds add up to all idle time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.bubbles import BUBBLE_KINDS, Bubbles, bubbles_of
from balancer.errors import ScheduleError
from balancer.metrics import bubble_ratio
from balancer.schedule import build_schedule
from balancer.simulate import rank_ends_ns

MS = 1_000_000


def by_kind(bubbles: Bubbles) -> dict[str, float]:
    return {kind: bubbles.of_kind(kind) for kind in BUBBLE_KINDS if bubbles.of_kind(kind) != 0.0}


def replicas(*forward_ms: list[list[int]]) -> np.ndarray:
    """[R][M][S] in ms -> int64 ns."""
    return np.array(forward_ms, dtype=np.int64) * MS


def test_equal_acts_leave_the_structural_bubble_alone() -> None:
    """(P-1) * (tf + tb) on each of P ranks."""
    schedule = build_schedule("1f1b", stage_ranks=[0, 1, 2], num_microbatches=4)
    times = np.full((2, 4, 3), MS)
    bubbles = bubbles_of(schedule, times, 2 * times)
    assert by_kind(bubbles) == {"structural": 2 * 3 * 2 * 3.0}
    assert bubbles.share("structural") == pytest.approx(2 / 6)
    assert (bubbles.num_ranks, bubbles.makespan_ms, bubbles.busy_ms) == (6, 18.0, 2 * 3 * 4 * 3.0)


def test_a_worked_example_of_every_kind() -> None:
    """Forward only, two stages, two micro-batches.

    Replica 0: stage 0 takes 1 and 1, stage 1 takes 3 and 5. Work 10.
        uniform 2.5:  makespan 7.5      structural     2 * 7.5 - 10 = 5
        stages 1, 4:  makespan 9        stage skew     2 * 1.5 = 3
        as they are:  1 + 3 + 5 = 9     data           0
        latency 1:    10                communication  2 * 1 = 2
    Replica 1: stage 0 takes 1 and 3, stage 1 takes 4 and 2. Work 10.
        uniform 2.5:  7.5               5
        stages 2, 3:  2 + 3 + 3 = 8     2 * 0.5 = 1
        as they are:  1 + 4 + 2 = 7     2 * -1 = -2
        latency 1:    8                 2 * 1 = 2
        the slower takes 10             straggler      2 * 2 = 4
    """
    schedule = build_schedule("gpipe", stage_ranks=[0, 1], num_microbatches=2).forward_only()
    times = replicas([[1, 3], [1, 5]], [[1, 4], [3, 2]])
    bubbles = bubbles_of(schedule, times, 0 * times, p2p_ns=MS)
    assert by_kind(bubbles) == {
        "structural": 10.0,
        "stage_skew": 4.0,
        "data": -2.0,
        "communication": 4.0,
        "straggler": 4.0,
    }
    assert bubbles.idle_ms == 20.0


def test_one_rank_waits_for_other_replicas_only() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 0], num_microbatches=2)
    times = replicas([[1, 2], [3, 4]], [[1, 1], [1, 1]])
    assert by_kind(bubbles_of(schedule, times, 0 * times)) == {"straggler": 6.0}


def test_a_text_only_microbatch_is_a_matter_of_data() -> None:
    """The encoder has nothing for micro-batch 1: with 2 ms for each it would be even."""
    schedule = build_schedule("gpipe", stage_ranks=[0, 1], num_microbatches=2).forward_only()
    times = replicas([[4, 2], [0, 2]])
    present = times > 0
    bubbles = bubbles_of(schedule, times, 0 * times, present)
    # Uniform 2: 6 ms. As they are: stage 1 runs micro-batch 0 from 4 to 6, then micro-batch 1 until 8.
    assert by_kind(bubbles) == {"structural": 4.0, "data": 4.0}
    # What an absent act would take is not read.
    filled = np.where(present, times, 77 * MS)
    assert bubbles_of(schedule, filled, 0 * times, present) == bubbles


def test_a_step_without_replicas_is_refused_and_one_without_work_has_no_bubble() -> None:
    schedule = build_schedule("1f1b", stage_ranks=[0, 1], num_microbatches=2)
    none = np.zeros((0, 2, 2), dtype=np.int64)
    with pytest.raises(ScheduleError, match="forward_ns holds no replica"):
        bubbles_of(schedule, none, none)
    idle = np.zeros((1, 2, 2), dtype=np.int64)
    assert [bubbles_of(schedule, idle, idle).share(kind) for kind in BUBBLE_KINDS] == [0.0] * 5


@given(
    st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    st.sampled_from([[0], [0, 1], [0, 0, 1], [0, 1, 2, 3]]),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.sampled_from([0, 7]),
    st.integers(0, 2**32),
)
def test_kinds_add_up_to_all_idle_time(
    name: str, stage_ranks: list[int], size: tuple[int, int], p2p: int, seed: int
) -> None:
    num_replicas, microbatches = size
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=microbatches)
    rng = np.random.default_rng(seed)
    shape = (num_replicas, microbatches, len(stage_ranks))
    forward, backward = rng.integers(0, 90, shape), rng.integers(0, 90, shape)
    present = rng.random(shape) < 0.8
    bubbles = bubbles_of(schedule, forward, backward, present, p2p_ns=p2p)
    makespan = int(rank_ends_ns(schedule, forward, backward, present, p2p_ns=p2p).max())
    busy = np.where(present, forward + backward, 0)
    of_rank = [
        sum(int(busy[replica, :, stage].sum()) for stage, home in enumerate(stage_ranks) if home == rank)
        for replica in range(num_replicas)
        for rank in range(schedule.num_ranks)
    ]
    idle = len(of_rank) * makespan - sum(of_rank)
    assert sum(bubbles.of_kind(kind) for kind in BUBBLE_KINDS) == pytest.approx(idle / 1e6, abs=1e-12)
    assert bubbles.idle_ms == pytest.approx(idle / 1e6, abs=1e-12)
    assert sum(bubbles.share(kind) for kind in BUBBLE_KINDS) == pytest.approx(bubble_ratio(of_rank, makespan))
    assert bubbles.straggler_ms >= 0.0
    assert bubbles.communication_ms >= 0.0
