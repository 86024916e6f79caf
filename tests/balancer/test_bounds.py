"""The certificate: on instances small enough to try every placement, nothing beats a bound, and bounds are close."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balancer.bounds import lower_bounds, stage_work_ns
from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from balancer.errors import LayoutError, ScheduleError
from balancer.layout import ParallelSpec
from balancer.pipeline_bound import pipeline_bound_ns
from balancer.pipeline_paths import path_pool, solve_game
from balancer.placement_problem import placement_problem
from balancer.plan import Capacities
from balancer.policies import Placement
from balancer.schedule import build_schedule, schedule_names
from balancer.simulate import makespans_ns, meeting_makespans_ns


def counts_of(tokens: list[int], patches: list[int]) -> StepCounts:
    text, pixels = np.array(tokens, dtype=np.int64), np.array(patches, dtype=np.int64)
    return StepCounts(
        sample_ids=np.arange(len(text)),
        llm_tokens=text,
        label_tokens=text // 2,
        visual_tokens=pixels // 4,
        patches=pixels,
        num_items=(pixels > 0).astype(np.int64),
        full_total_sq=pixels * pixels,
        window_total_sq=pixels,
    )


def model_of(parallel: ParallelSpec, forward: list[int], backward: list[int], constant: int = 0) -> CostModel:
    """ns per patch in the encoder, per token elsewhere."""
    stages = []
    for index, domain in enumerate(parallel.domain_of_stage):
        kind = "per_patch_ns" if domain == "encoder" else "per_token_ns"
        ahead, back = forward[index % len(forward)], backward[index % len(backward)]
        stages.append(
            StageCost(
                forward=StageTerms(constant_ns=constant, **{kind: ahead}),
                backward=StageTerms(constant_ns=constant, **{kind: back}),
            )
        )
    return CostModel(stages=tuple(stages))


def best_makespan_ns(problem, num_microbatches: int) -> int:
    """The least simulated makespan over all assignments of samples to cells."""
    n, cells = problem.num_samples, problem.dp_size * num_microbatches
    every = np.array(list(itertools.product(range(cells), repeat=n)))  # [C, n]
    candidate = np.arange(len(every))[:, np.newaxis]

    def sums(values: np.ndarray) -> np.ndarray:
        out = np.zeros((len(every), cells, *values.shape[1:]), dtype=np.int64)
        np.add.at(out, (candidate, every), np.broadcast_to(values, (len(every), *values.shape)))
        return out

    fits = (sums(problem.sizes) <= np.asarray(problem.capacity)).all(axis=(1, 2))
    present = np.repeat((sums(np.ones(n, dtype=np.int64)) > 0)[:, :, np.newaxis], problem.num_stages, axis=2)
    if problem.parallel.has_encoder:
        present[:, :, 0] = sums(problem.counts.patches) > 0
    shape = (len(every), problem.dp_size, num_microbatches, problem.num_stages)
    makespans = meeting_makespans_ns(
        problem.schedule_for(num_microbatches),
        (sums(problem.forward_ns) + present * problem.forward_constant_ns).reshape(shape),
        (sums(problem.backward_ns) + present * problem.backward_constant_ns).reshape(shape),
        present.reshape(shape),
        problem.parallel.meet,
        weight_ns=(sums(problem.weight_ns) + present * problem.weight_constant_ns).reshape(shape),
    )
    assert fits.any()
    return int(makespans[fits].min())


@st.composite
def problems(draw: st.DrawFn):
    dp_size, num_microbatches = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 2), (3, 1)]))
    n = draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(schedule_names()))
    encoder = draw(st.sampled_from(["own", "shared", "none"]))
    num_chunks = 1
    if schedule == "interleaved1f1b":
        encoder, num_chunks = "none", draw(st.integers(1, 2))
    elif schedule in {"nested", "phased"}:
        encoder = "spread"
    pp_size = draw(st.integers(1, 3))
    try:
        parallel = ParallelSpec.pipeline(
            dp_size=dp_size,
            pp_size=pp_size,
            encoder=encoder,
            num_chunks=num_chunks,
            num_microbatches=num_microbatches,
            meet=draw(st.sampled_from(["step", "microbatch", "unit"])),
        )
        tokens = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
        patches = draw(st.lists(st.sampled_from([0, 0, 5, 30, 100]), min_size=n, max_size=n))
        costs = st.lists(st.integers(0, 9), min_size=4, max_size=4)
        model = model_of(parallel, draw(costs), draw(costs), draw(st.sampled_from([0, 0, 13])))
        capacity = Capacities(tokens=draw(st.sampled_from([10**9, max(sum(tokens), 40)])))
        problem = placement_problem(
            counts_of(tokens, patches), parallel=parallel, cost_model=model, capacities=capacity, schedule=schedule
        )
        problem.schedule_for(num_microbatches)
    except (ScheduleError, LayoutError):
        return None
    return problem, num_microbatches


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_no_placement_of_any_kind_beats_any_of_the_bounds(drawn) -> None:
    if drawn is None:
        return
    problem, num_microbatches = drawn
    bounds = lower_bounds(problem, num_microbatches)
    best = best_makespan_ns(problem, num_microbatches)
    assert bounds.work_ns <= best
    assert bounds.longest_ns <= best
    assert bounds.granularity_ns <= best
    assert bounds.pipeline_ns <= best
    assert bounds.lower_ns == max(bounds.work_ns, bounds.longest_ns, bounds.granularity_ns, bounds.pipeline_ns)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([name for name in schedule_names() if name != "interleaved1f1b"]),
    st.integers(2, 5),
    st.sampled_from(["own", "shared", "none"]),
    st.sampled_from([1, 2, 3, 5, 8, 13]),
    st.integers(0, 2**32 - 1),
)
def test_every_path_is_shorter_than_any_simulation(
    schedule: str, pp_size: int, encoder: str, num_microbatches: int, seed: int
) -> None:
    """Times of their own for every act, micro-batches that are empty or have text only: stronger than plans need."""
    place = "spread" if schedule in {"nested", "phased"} else encoder
    parallel = ParallelSpec.pipeline(pp_size=pp_size, encoder=place)
    rng = np.random.default_rng(seed)
    shape = (64, num_microbatches, parallel.num_stages)
    forward, backward = (rng.integers(0, 20, shape) * rng.integers(0, 2, shape) for _ in range(2))
    present = np.repeat(rng.random(shape[:2])[:, :, np.newaxis] < rng.random((64, 1, 1)), shape[2], axis=2)
    if parallel.has_encoder:
        present[:, :, 0] &= rng.random(shape[:2]) < 0.5
    forward, backward = forward * present, backward * present
    built = build_schedule(schedule, stage_ranks=parallel.stage_ranks, num_microbatches=num_microbatches)
    weight = backward // 2 if (built.op == 3).any() else np.zeros_like(backward)
    makespans = makespans_ns(built, forward, backward, present, weight_ns=weight)
    chained = np.array(parallel.stage_ranks) >= 0
    times = np.concatenate([forward * chained, (backward - weight) * chained, weight * chained], axis=2)
    pool = path_pool(schedule, parallel.stage_ranks, parallel.has_encoder, num_microbatches)
    lengths = np.einsum("kcm,rmc->rk", pool, times)
    assert (lengths.max(axis=1) <= makespans).all()


def problem_of(tokens: list[int], patches: list[int], parallel: ParallelSpec, *, capacity: int = 10**9, **costs):
    return placement_problem(
        counts_of(tokens, patches),
        parallel=parallel,
        cost_model=model_of(parallel, costs.get("forward", [1]), costs.get("backward", [2]), costs.get("constant", 0)),
        capacities=Capacities(tokens=capacity),
        schedule=costs.get("schedule", "1f1b"),
    )


def test_work_counts_the_constants_of_as_many_cells_as_capacities_force() -> None:
    """Six samples of 6 in cells of 10 are six cells: 6 x (6 x 3 + 2 x 5) ns over two replicas."""
    parallel = ParallelSpec.pipeline(dp_size=2, encoder="none")
    problem = problem_of([6] * 6, [0] * 6, parallel, capacity=10, constant=5)
    assert lower_bounds(problem, 3).work_ns == 6 * (18 + 10) // 2
    roomy = problem_of([6] * 6, [0] * 6, parallel, constant=5)
    assert lower_bounds(roomy, 3).work_ns == (6 * 18 + 2 * 10) // 2


def test_one_sample_takes_a_whole_trip_through_the_pipeline() -> None:
    parallel = ParallelSpec.pipeline(dp_size=2, pp_size=3)
    problem = problem_of([10, 1], [4, 0], parallel)
    assert lower_bounds(problem, 2).longest_ns == 3 * (4 + 10 + 10)


def test_samples_are_not_divided() -> None:
    problem = problem_of([5, 5, 5], [0, 0, 0], ParallelSpec.pipeline(dp_size=2, encoder="none"))
    bounds = lower_bounds(problem, 1)
    assert (bounds.work_ns, bounds.granularity_ns) == (23, 30)


def test_where_replicas_meet_in_every_microbatch_each_pays_for_the_giant() -> None:
    """One giant of 100 and six of 30 in cells of two: see packing.grid_bounds, 160 instead of 140, times 3."""
    spec = {"dp_size": 2, "encoder": "none", "num_microbatches": 2}
    tokens = [100, 30, 30, 30, 30, 30, 30]
    limits = Capacities(tokens=10**9, items=4)
    counts = StepCounts(
        sample_ids=np.arange(7),
        llm_tokens=np.array(tokens),
        label_tokens=np.zeros(7),
        visual_tokens=np.zeros(7),
        patches=np.zeros(7),
        num_items=np.array([4, 2, 2, 2, 2, 2, 2]),
        full_total_sq=np.zeros(7),
        window_total_sq=np.zeros(7),
    )
    found = {}
    for meet in ("step", "microbatch"):
        parallel = ParallelSpec.pipeline(meet=meet, **spec)
        problem = placement_problem(
            counts,
            parallel=parallel,
            cost_model=model_of(parallel, [1], [2]),
            capacities=limits,
            schedule="1f1b",
        )
        found[meet] = lower_bounds(problem, 2).granularity_ns
    assert found == {"step": 3 * 150, "microbatch": 3 * 160}


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pp_size", [2, 3, 4])
def test_warm_up_and_drain_are_bounded_within_a_few_percent(pp_size: int, num_microbatches: int) -> None:
    """Many equal samples are as good as divisible: cells of any size, and still the bubble does not vanish."""
    parallel = ParallelSpec.pipeline(pp_size=pp_size, encoder="none", num_microbatches=num_microbatches)
    problem = problem_of([100] * 240, [0] * 240, parallel)
    uniform = problem.makespan_ns(problem.cell_times(even(problem, num_microbatches)))
    bound = pipeline_bound_ns(problem, num_microbatches)
    work = lower_bounds(problem, num_microbatches).work_ns
    assert work <= bound <= uniform
    # Without tapering (M + P - 1) / M; what the bound leaves is tapering (about half of it for M > P) and looseness.
    assert bound >= 0.88 * uniform
    if num_microbatches == 1:
        assert bound == uniform


def even(problem, num_microbatches: int) -> Placement:
    cell = np.arange(problem.num_samples) % (problem.dp_size * num_microbatches)
    return Placement.from_cells(cell // num_microbatches, cell % num_microbatches, num_microbatches)


def test_one_pipeline_rank_has_no_bubble_to_bound() -> None:
    problem = problem_of([5, 5], [3, 0], ParallelSpec.pipeline(num_microbatches=2))
    assert pipeline_bound_ns(problem, 2) == 0


def test_times_beyond_the_range_of_the_mixture_give_no_pipeline_bound_instead_of_a_wrong_one() -> None:
    parallel = ParallelSpec.pipeline(pp_size=2, encoder="none", num_microbatches=2)
    problem = problem_of([10**8] * 3, [0] * 3, parallel, forward=[10**9], backward=[10**9])
    assert pipeline_bound_ns(problem, 2) == 0
    assert lower_bounds(problem, 2).work_ns > 0


def test_a_game_with_a_known_value_is_solved() -> None:
    """Rock, paper, scissors: each a third; and a row that is always better gets everything."""
    rows, _ = solve_game(np.array([[[0.0, 1.0, 0.5], [0.5, 0.0, 1.0], [1.0, 0.5, 0.0]]]), 400)
    np.testing.assert_allclose(rows, 1 / 3, atol=0.02)
    rows, _ = solve_game(np.array([[[1.0, 2.0], [0.5, 1.0]]]), 50)
    assert rows[0] > 0.99


def test_a_spread_encoder_counts_as_shared_out_over_the_ranks() -> None:
    parallel = ParallelSpec.pipeline(pp_size=2, encoder="spread", num_microbatches=2)
    problem = problem_of([10, 10], [40, 0], parallel, schedule="nested")
    bounds = lower_bounds(problem, 2)
    assert stage_work_ns(problem).tolist() == [[120, 30, 30], [0, 30, 30]]
    assert bounds.work_ns == (120 + 120) // 2
    # One item cannot be shared out.
    assert bounds.longest_ns == 120 + 60


def test_what_binds_is_judged_by_the_bound_that_is_near() -> None:
    parallel = ParallelSpec.pipeline(dp_size=2, pp_size=2, encoder="none", num_microbatches=2)
    problem = problem_of([10] * 8, [0] * 8, parallel, capacity=20)
    bounds = lower_bounds(problem, 2)
    assert bounds.judge(problem, 121)[0] == "none"
    assert bounds.judge(problem, bounds.lower_ns)[0] == "none"
    kind, note = bounds.judge(problem, 2 * bounds.lower_ns)
    assert kind == "capacity"
    assert "micro-batches are 100% full of tokens" in note
    roomy = problem_of([10] * 8, [0] * 8, parallel)
    assert lower_bounds(roomy, 2).judge(roomy, 2 * bounds.lower_ns) == ("data", "")
    uneven = problem_of([10] * 8, [0] * 8, parallel, forward=[1, 9], backward=[2, 18])
    bounds = lower_bounds(uneven, 2)
    kind, note = bounds.judge(uneven, bounds.lower_ns)
    assert kind == "stage split"
    assert "pipeline rank 1 has 1.80 x the mean work" in note


def test_bounds_are_the_same_in_every_run() -> None:
    parallel = ParallelSpec.pipeline(dp_size=2, pp_size=3, num_microbatches=4)
    rng = np.random.default_rng(1)
    tokens, patches = rng.integers(1, 100, 64).tolist(), rng.integers(0, 300, 64).tolist()
    found = {pipeline_bound_ns(problem_of(tokens, patches, parallel), 4) for _ in range(3)}
    assert len(found) == 1
