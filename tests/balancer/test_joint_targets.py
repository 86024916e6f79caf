"""Mixtures of micro-batches: the descent against a linear program and the simulator, and samples on their targets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.layout import ParallelSpec
from balancer.makespans import makespans_ns
from balancer.policies import PlacementProblem
from balancer.policies.joint_grid import by_rank, work_columns
from balancer.policies.joint_profile import TOTAL, divisible_times
from balancer.policies.joint_targets import Targets, by_targets, slot_targets
from balancer.policies.joint_targets_core import FULL, best_shares, makespan_of
from balancer.policies.joint_trial import Trials
from balancer.schedule import build_schedule

EQUAL_4 = np.full(4, TOTAL // 4, dtype=np.int64)


def two_classes(encoder: int, llm: list[int]) -> tuple[int, ...]:
    """One class with all of the encoder time and half of the LLM's, one with the rest; backward is twice forward."""
    half = [stage // 2 for stage in llm]
    text, media = np.array([0, *half]), np.array([encoder, *half])
    return tuple(np.concatenate([text, 2 * text, media, 2 * media]).tolist())


@pytest.mark.parametrize(
    ("pipeline", "encoder", "routed", "optimum"),
    [
        # Optima of the linear program over shares and start times, in units of the work of an LLM stage.
        (("1f1b", (0, 1), 4), 64, False, 1.008),
        (("1f1b", (0, 1, 2, 3), 16), 64, False, 1.066),
        (("gpipe", (0, 1), 4), 64, False, 1.222),
        (("zb-h1", (0, 1, 2, 3), 4), 64, False, 1.212),
        (("phased", (-1, 0, 1, 2, 3), 16), 256, False, 2.061),
        (("nested", (-1, 0, 1, 2, 3), 16), 256, False, 2.069),
        (("nested", (-1, 0, 1, 2, 3), 16), 256, True, 2.117),
        (("nested", (-1, 0, 1), 4), 128, True, 2.030),
    ],
)
def test_mixtures_come_within_half_a_percent_of_the_optimum(pipeline, encoder, routed, optimum) -> None:
    name, stage_ranks, num_microbatches = pipeline
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    work = two_classes(encoder, [64] * (len(stage_ranks) - 1))
    share, makespan = best_shares(schedule, work, (0, 0), routed)
    assert abs(share.sum(axis=1) - TOTAL).max() <= num_microbatches
    assert 0.999 * optimum <= makespan / (2 * TOTAL) / (3 * 64) <= 1.005 * optimum


def test_the_example_of_the_text() -> None:
    schedule = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=4)
    work = two_classes(64, [64])
    alike = tuple((np.array(work).reshape(2, 2, 2).sum(axis=0)).reshape(-1).tolist())
    unit = 2 * TOTAL * 3 * 64
    assert makespan_of(schedule, work, np.stack([EQUAL_4] * 2), False) / unit == pytest.approx(1.25)
    assert best_shares(schedule, alike, (0,), False)[1] / unit == pytest.approx(1.18, abs=0.01)
    assert best_shares(schedule, work, (0, 0), False)[1] / unit == pytest.approx(1.01, abs=0.01)


@given(
    st.sampled_from(
        [
            ("1f1b", (0, 1, 2), False),
            ("interleaved1f1b", (0, 0, 1, 0, 1), False),
            ("zb-h1", (0, 0, 1), False),
            ("phased", (-1, 0, 1), True),
            ("nested", (-1, 0, 1), True),
            ("nested", (-1, 0, 1), False),
        ]
    ),
    st.sampled_from([2, 4, 6]),
    st.integers(0, 2**32 - 1),
)
def test_makespans_are_those_of_the_simulator(pipeline, num_microbatches: int, seed: int) -> None:
    name, stage_ranks, routed = pipeline
    schedule = build_schedule(name, stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    generator = np.random.Generator(np.random.Philox(seed))
    work = generator.integers(0, 33, (2, 2, len(stage_ranks)))
    work[1] += 1
    share, makespan = best_shares(schedule, tuple(work.reshape(-1).tolist()), (0, 0), routed)
    forward, backward = (
        sum(divisible_times(schedule, share[row : row + 1], 2 * work[row, kind], False) for row in range(2))
        for kind in range(2)
    )
    if routed:
        for first in range(0, num_microbatches, schedule.unit_size):
            unit = slice(first, first + schedule.unit_size)
            mean = share[:, unit].sum(axis=1) // len(share[0, unit])
            forward[0, unit, 0], backward[0, unit, 0] = (2 * (mean * work[:, kind, 0]).sum() for kind in range(2))
    assert makespan == int(makespans_ns(schedule, forward, backward, weight_ns=backward // 2, routed=routed)[0])
    assert makespan == makespan_of(schedule, tuple(work.reshape(-1).tolist()), share, routed)
    equal = np.full_like(share, TOTAL // num_microbatches)
    assert makespan <= makespan_of(schedule, tuple(work.reshape(-1).tolist()), equal, routed)


@pytest.mark.parametrize("filled", [(464, 464), (900, 60), (100, 880)])
def test_mixtures_keep_to_what_capacities_leave_room_for(filled) -> None:
    schedule = build_schedule("1f1b", stage_ranks=(0, 1, 2, 3), num_microbatches=8)
    share, _ = best_shares(schedule, two_classes(24, [32, 32, 32]), filled, False)
    size = (share * np.array(filled)[:, np.newaxis]).sum(axis=0) * 8 / TOTAL
    assert size.max() <= FULL * 1.005
    free, _ = best_shares(schedule, two_classes(24, [32, 32, 32]), (0, 0), False)
    assert (free * np.array(filled)[:, np.newaxis]).sum(axis=0).max() * 8 / TOTAL > FULL * 1.05


def problem_of(counts_of, *, encoder: float = 1.0, count: int = 256, seed: int = 0, room: float = 1.3, **layout):
    """Half of the samples with media; the encoder takes `encoder` of the time of the LLM's first stage."""
    generator = np.random.Generator(np.random.Philox(seed))
    tokens = generator.integers(50, 150, count)
    patches = np.where(np.arange(count) % 2 == 0, tokens, 0)
    layout = {"dp_size": 4, "pp_size": 2, "encoder": "own", "num_microbatches": 4} | layout
    parallel = ParallelSpec.pipeline(**layout)
    num_llm = parallel.num_stages - int(parallel.has_encoder)
    llm = np.repeat(tokens[:, np.newaxis] * 1000, num_llm, axis=1)
    first = (patches * int(1000 * encoder * tokens.sum() / max(1, patches.sum())))[:, np.newaxis]
    times = np.concatenate([first, llm], axis=1) if parallel.has_encoder else llm
    zeros, nothing = np.zeros(parallel.num_stages, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return PlacementProblem(
        counts=counts_of(tokens.tolist(), patches=patches.tolist()),
        forward_ns=times,
        backward_ns=2 * times,
        weight_ns=times,
        forward_constant_ns=zeros,
        backward_constant_ns=zeros,
        weight_constant_ns=zeros,
        item_forward_ns=nothing,
        item_backward_ns=nothing,
        parallel=parallel,
        schedule="nested" if layout["encoder"] == "spread" else "1f1b",
        sizes=tokens[:, np.newaxis],
        capacity=(int(room * tokens.sum() / parallel.dp_size / layout["num_microbatches"]),),
        capacity_names=("tokens",),
        num_microbatches=layout["num_microbatches"],
        splits_backward=False,
    )


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        ({"encoder": 0.0}, EQUAL_4),
        ({"encoder": 8.0, "num_microbatches": 16}, None),  # the encoder's rank is busy all the time, whatever the sizes
        ({"num_microbatches": 1}, np.array([TOTAL])),
        ({"pp_size": 1}, EQUAL_4),
    ],
)
def test_there_are_no_targets_where_mixture_cannot_help(counts_of, change, shares) -> None:
    problem = problem_of(counts_of, **change)
    if shares is None:
        work = problem.forward_ns.sum(axis=0) // 1_000_000
        schedule = problem.schedule_for(16)
        shares = best_shares(schedule, (*work.tolist(), *(2 * work).tolist()), (0,), False)[0][0]
    assert slot_targets(problem, shares, routed=False) is None


@pytest.mark.parametrize(
    ("change", "gain"),
    [
        ({}, 0.1),
        ({"pp_size": 4, "count": 512}, 0.05),
        ({"meet": "microbatch"}, 0.1),
    ],
)
def test_samples_on_their_targets_beat_one_share_a_microbatch(counts_of, change, gain: float) -> None:
    problem = problem_of(counts_of, **change)
    num_microbatches = problem.num_microbatches
    schedule, stage = problem.schedule_for(num_microbatches), problem.forward_ns.sum(axis=0) * 32
    stage //= stage.max() // 32
    shares = best_shares(schedule, (*stage.tolist(), *(2 * stage).tolist()), (0,), False)[0][0]
    targets = slot_targets(problem, shares, routed=False)
    assert targets is not None
    start = by_rank(problem, work_columns(problem, "rank"), shares)
    found = by_targets(problem, start, targets)
    trials = Trials(problem, num_microbatches)
    assert trials.evaluate(found).makespan_ns < (1 - gain) * trials.evaluate(start).makespan_ns


@pytest.mark.parametrize("seed", range(8))
def test_samples_stay_on_their_replica_and_within_the_capacity(counts_of, seed: int) -> None:
    problem = problem_of(counts_of, count=48 + seed, seed=seed, room=1.25)
    targets = slot_targets(problem, EQUAL_4, routed=False)
    start = by_rank(problem, work_columns(problem, "rank"), EQUAL_4)
    found = by_targets(problem, start, targets)
    assert np.array_equal(found // 4, start // 4)
    assert np.bincount(found, weights=problem.sizes[:, 0], minlength=16).max() <= problem.capacity[0]
    assert np.bincount(found, minlength=16).min() > 0
    assert np.array_equal(found, by_targets(problem, start, targets))


def test_small_samples_reach_their_targets(counts_of) -> None:
    problem = problem_of(counts_of, count=4096)
    targets = slot_targets(problem, EQUAL_4, routed=False)
    start = by_rank(problem, work_columns(problem, "rank"), EQUAL_4)
    cell_of = by_targets(problem, start, targets)
    held = np.stack([np.bincount(cell_of, weights=targets.columns[:, column], minlength=16) for column in range(2)])
    part = held.reshape(2, 4, 4) / targets.columns.sum(axis=0)[:, np.newaxis, np.newaxis] * 4  # [columns, R, M]
    wanted = targets.slots.sum(axis=0).T[:, np.newaxis] / TOTAL  # [columns, 1, M]
    assert np.abs(wanted - 0.25).max() > 0.2  # they are no equal shares
    assert np.abs(part - wanted).max() < 0.01


def test_samples_that_find_no_room_leave_the_candidate_out(counts_of) -> None:
    problem = problem_of(counts_of, count=48)
    start = np.zeros(48, dtype=np.int32)  # all on one replica
    columns = work_columns(problem, "stage")
    slots = np.full((2, 4, 2), TOTAL // 8)
    targets = Targets(slots=slots, columns=columns, rich=(columns[:, 0] > columns[:, 1]).astype(np.int64))
    assert by_targets(problem, start, targets) is None
