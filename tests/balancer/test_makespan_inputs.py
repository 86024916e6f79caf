"""Durations that the simulators refuse: what would wrap, be cut off, or end at infinity."""

import numpy as np
import pytest

from balancer.errors import ScheduleError
from balancer.makespans import makespans_ns, makespans_of_orders_ns, meeting_makespans_ns
from balancer.schedule import build_schedule
from balancer.simulate import simulate

PLAIN = build_schedule("1f1b", num_ranks=2, num_microbatches=3)
HALVES = build_schedule("zb-h1", num_ranks=2, num_microbatches=3)


def times(value: int = 5, *, replicas: int = 2) -> np.ndarray:
    return np.full((replicas, 3, 2), value, dtype=np.int64)


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint64, np.bool_])
@pytest.mark.parametrize("place", [0, 1])
def test_durations_that_are_no_int64_are_refused(kind: type[np.generic], place: int) -> None:
    arrays = [times(), times()]
    arrays[place] = arrays[place].astype(kind)
    with pytest.raises(ScheduleError, match=rf"{('forward_ns', 'backward_ns')[place]} holds {np.dtype(kind)}"):
        makespans_ns(PLAIN, *arrays)


@pytest.mark.parametrize("kind", [np.int32, np.uint16])
def test_narrower_integers_are_the_same_durations(kind: type[np.generic]) -> None:
    assert makespans_ns(PLAIN, times().astype(kind), times()).tolist() == makespans_ns(PLAIN, times(), times()).tolist()


@pytest.mark.parametrize("meet", ["step", "microbatch", "unit"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_negative_duration_is_named_also_where_another_replica_is_longer(meet: str, place: int) -> None:
    arrays = [times()[np.newaxis], times()[np.newaxis]]
    arrays[place][0, 1, 2, 0] = -1
    with pytest.raises(ScheduleError, match=r"_ns\[.*\]( is negative|=-1).*not a duration"):
        meeting_makespans_ns(PLAIN, *arrays, None, meet)


def test_durations_of_absent_acts_are_not_read() -> None:
    forward, backward, present = times(), times(), np.ones((2, 3, 2), dtype=np.bool_)
    expected = makespans_ns(PLAIN, forward, backward, np.where(np.arange(2) == 0, False, present)).tolist()
    forward[:, :, 0], backward[:, :, 0], present[:, :, 0] = -(2**62), 2**62, False
    assert makespans_ns(PLAIN, forward, backward, present).tolist() == expected


def test_a_weight_gradient_is_part_of_its_backward() -> None:
    with pytest.raises(ScheduleError, match=r"backward_ns without weight_ns\[0, 0, 0\]=-1"):
        makespans_ns(HALVES, times(), times(), weight_ns=times(6))
    with pytest.raises(ScheduleError, match=r"weight_ns\[0, 0, 0\]=-6"):
        makespans_ns(HALVES, times(), times(), weight_ns=times(-6))


def test_sums_are_refused_from_2_to_the_62_on_and_exact_below() -> None:
    forward, backward = times(0), times(0)
    forward[1, 0, 0] = 2**61
    backward[1, 2, 1] = 2**61 - 1
    assert makespans_ns(PLAIN, forward, backward).tolist() == [0, 2**62 - 1]
    backward[1, 1, 1] = 1
    with pytest.raises(ScheduleError, match=f"replica 1 add up to {2**62} ns"):
        makespans_ns(PLAIN, forward, backward)
    with pytest.raises(ScheduleError, match="replica 0 add up to"):
        makespans_ns(PLAIN, times(2**62), times(2**62))


@pytest.mark.parametrize("p2p_ns", [-1, 1.5, "7", True, 2**62])
def test_a_latency_is_a_whole_number_in_range(p2p_ns: object) -> None:
    with pytest.raises(ScheduleError, match="p2p_ns="):
        makespans_ns(PLAIN, times(), times(), p2p_ns=p2p_ns)


def test_orders_of_another_shape_or_kind_are_refused() -> None:
    orders = np.tile(np.arange(3), (4, 2, 1))
    assert makespans_of_orders_ns(PLAIN, times(), times(), None, orders).shape == (4, 2)
    with pytest.raises(ScheduleError, match="orders has shape"):
        makespans_of_orders_ns(PLAIN, times(), times(), None, orders.reshape(8, 3))
    with pytest.raises(ScheduleError, match="orders holds float64"):
        makespans_of_orders_ns(PLAIN, times(), times(), None, orders.astype(np.float64))


def test_durations_that_end_at_infinity_are_refused() -> None:
    shape = (2, 3)
    with pytest.raises(ScheduleError, match="beyond what a float holds"):
        simulate(PLAIN, forward_ms=np.full(shape, 1e308), backward_ms=np.full(shape, 1e308))
    # The end is finite, the time of both ranks together is not.
    with pytest.raises(ScheduleError, match="on 2 ranks, beyond"):
        simulate(PLAIN.forward_only(), forward_ms=[[1e308, 0.0, 0.0], [0.0, 0.0, 0.0]])
    with pytest.raises(ScheduleError, match="forward_ms is no table of durations"):
        simulate(PLAIN.forward_only(), forward_ms=[["a"] * 3] * 2)
