"""The nested schedule in the simulator: the published claims as closed forms (../shared/references/bigmac.md)."""

import numpy as np
import pytest

from balancer.errors import ScheduleError
from balancer.schedule import Schedule, build_schedule
from balancer.simulate import Timeline, makespans_ns, peak_live, simulate

FORWARD, BACKWARD = 1.0, 2.0  # of one LLM chunk
ENCODER = (3.0, 5.0)
GENERATOR = (4.0, 2.0)


def nested(ranks: int, chunks: int, microbatches: int, *, generator: bool = False, ahead: int = 3) -> Schedule:
    stage_ranks = [-1, *list(range(ranks)) * chunks, *([-1] if generator else [])]
    return build_schedule("nested", stage_ranks=stage_ranks, num_microbatches=microbatches, num_units_ahead=ahead)


def run(schedule: Schedule, encoder: np.ndarray | float = 1.0, *, routed: bool = False, scale: float = 1.0) -> Timeline:
    """Uniform chunks; `encoder` scales the encoder's times, one number or one per micro-batch."""
    shape = (schedule.num_stages, schedule.num_microbatches)
    forward, backward = np.full(shape, FORWARD), np.full(shape, BACKWARD)
    forward[0], backward[0] = ENCODER[0] * scale * encoder, ENCODER[1] * scale * encoder
    if schedule.place[-1].max() > schedule.place[-1].min():
        forward[-1], backward[-1] = GENERATOR
    return simulate(schedule, forward_ms=forward, backward_ms=backward, routed=routed)


def ideal(schedule: Schedule, chunks: int, *, generator: bool) -> float:
    """M*V*(tf+tb) + (P-1)*(tf+tb) + (M/P)*(ef+eb+g)."""
    ranks, microbatches = schedule.num_ranks, schedule.num_microbatches
    spread = sum(ENCODER) + (sum(GENERATOR) if generator else 0.0)
    pipeline = (microbatches * chunks + ranks - 1) * (FORWARD + BACKWARD)
    return pipeline + microbatches // ranks * spread


@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_nested_takes_what_unlimited_memory_would_take_and_holds_three_units(
    ranks: int, chunks: int, generator: bool
) -> None:
    for units in (3, 6):
        schedule = nested(ranks, chunks, units * ranks, generator=generator)
        assert run(schedule).makespan_ms == ideal(schedule, chunks, generator=generator)
        assert peak_live(schedule, stages=[0]).max() == 3
        if generator:
            assert peak_live(schedule, stages=[schedule.num_stages - 1]).max() == 1


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 7, 8, 13, 32, 101, 400])
def test_encoder_memory_does_not_grow_with_the_number_of_microbatches(microbatches: int) -> None:
    schedule = nested(4, 2, microbatches)
    assert peak_live(schedule, stages=[0]).max() == min(3, -(-microbatches // 4))
    assert peak_live(schedule, stages=[0], weights=np.full(schedule.place.shape, 7)).max() <= 21


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_two_units_ahead_deadlock_where_the_reference_says_so(ranks: int, chunks: int) -> None:
    """W_min = 3 for V >= 2 and P >= 3, else 2."""
    schedule = nested(ranks, chunks, 6 * ranks, ahead=2)
    if chunks >= 2 and ranks >= 3:
        with pytest.raises(ScheduleError) as caught:
            run(schedule)
        assert str(caught.value) == (
            f"schedule nested would deadlock: rank 0: 1F{2 * ranks} waits for 0F{2 * ranks}, "
            f"which rank 0 runs only after 1F{2 * ranks}"
        )
    else:
        assert run(schedule).makespan_ms == ideal(schedule, chunks, generator=False)


@pytest.mark.parametrize("seed", range(3))
def test_uneven_encoder_shares_cost_time_and_even_ones_inside_units_cost_none(seed: int) -> None:
    """P=8, V=2, M=256, lognormal sigma 1: about 12 % lost with items at home, nothing once each unit is even."""
    ranks, chunks, microbatches = 8, 2, 256
    schedule = nested(ranks, chunks, microbatches)
    share = np.random.default_rng(seed).lognormal(0.0, 1.0, microbatches)
    share /= share.mean()
    scale = 0.75  # encoder 2.25 + 3.75 of one micro-batch on a rank, LLM 6.0
    pipeline = (microbatches * chunks + ranks - 1) * (FORWARD + BACKWARD)
    best = pipeline + microbatches // ranks * scale * sum(ENCODER)
    uneven = run(schedule, share, scale=scale).makespan_ms / best - 1.0
    assert 0.10 < uneven < 0.18
    even = np.repeat(share.reshape(-1, ranks).mean(axis=1), ranks)
    for routed in (False, True):
        assert run(schedule, even, scale=scale, routed=routed).makespan_ms == pytest.approx(best, rel=1e-12)


def test_routing_waits_for_the_longest_share_of_the_unit_and_never_less() -> None:
    schedule = nested(4, 2, 24)
    share = np.random.default_rng(0).lognormal(0.0, 1.0, 24)
    at_home, routed = run(schedule, share), run(schedule, share, routed=True)
    assert routed.makespan_ms >= at_home.makespan_ms
    rank_0 = schedule.act_rank == 0
    first_llm = np.flatnonzero(rank_0 & (schedule.op == 0) & (schedule.stage == 1) & (schedule.microbatch == 0))[0]
    encoders = (schedule.op == 0) & (schedule.stage == 0) & (schedule.microbatch < 4)
    assert routed.start_ms[first_llm] >= routed.end_ms[encoders].max()


@pytest.mark.parametrize("name", ["phased", "nested"])
def test_integers_of_spread_schedules_agree_with_the_timeline(name: str) -> None:
    stage_ranks = [-1, 0, 1, 0, 1, -1]
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=7)
    times = np.random.default_rng(1).integers(0, 99, (3, 7, 6))
    for routed in (False, True):
        found = makespans_ns(schedule, times, 2 * times, p2p_ns=5, routed=routed)
        expected = [
            simulate(schedule, forward_ms=one.T, backward_ms=2 * one.T, p2p_ms=5.0, routed=routed).makespan_ms
            for one in times
        ]
        assert found.tolist() == expected
