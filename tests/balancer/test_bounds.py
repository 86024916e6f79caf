"""The certificate: on instances small enough to try every placement, nothing beats a bound, and bounds are close."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balancer import pipeline_bound
from balancer.bounds import lower_bounds, stage_work_ns
from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from balancer.errors import LayoutError, ScheduleError
from balancer.layout import ParallelSpec
from balancer.pipeline_bound import pipeline_bound_ns
from balancer.pipeline_bound_game import Game, Solved, solve_game
from balancer.pipeline_bound_graph import constraint_graph
from balancer.placement_problem import placement_problem
from balancer.plan import Capacities
from balancer.planner import plan_step
from balancer.policies import Placement, policy_names
from balancer.schedule import build_schedule, schedule_names
from balancer.simulate import makespans_ns, meeting_makespans_ns


def counts_of(tokens: list[int], patches: list[int]) -> StepCounts:
    text, pixels = np.array(tokens, dtype=np.int64), np.array(patches, dtype=np.int64)
    return StepCounts(
        sample_ids=np.arange(len(text)),
        llm_tokens=text,
        label_tokens=text // 2,
        visual_tokens=np.minimum(pixels // 4, text),
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
    # Nothing fits: no placement, no time to be above.
    return int(makespans[fits].min()) if fits.any() else 2**62


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
            generator=draw(st.booleans()),
            num_microbatches=num_microbatches,
            meet=draw(st.sampled_from(["step", "microbatch", "unit"])),
        )
        tokens = draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))
        patches = draw(st.lists(st.sampled_from([0, 0, 5, 30, 100]), min_size=n, max_size=n))
        costs = st.lists(st.integers(0, 9), min_size=4, max_size=4)
        model = model_of(parallel, draw(costs), draw(costs), draw(st.sampled_from([0, 0, 13])))
        even = -(-sum(tokens) // (dp_size * num_microbatches))
        capacity = Capacities(tokens=draw(st.sampled_from([10**9, max(sum(tokens), 40), max(*tokens, even + 9, 9)])))
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", schedule_names())
def test_every_path_is_shorter_than_any_simulation(schedule: str, seed: int) -> None:
    """Times of their own for every act, micro-batches that are empty or have text only, items routed inside units."""
    rng = np.random.default_rng(seed)
    checked = 0
    for _ in range(12):
        drawn = drawn_pipeline(schedule, rng)
        if drawn is None:
            continue
        parallel, num_microbatches = drawn
        built = build_schedule(schedule, stage_ranks=parallel.stage_ranks, num_microbatches=num_microbatches)
        graph = constraint_graph(built, parallel.stage_ranks, parallel.has_encoder)
        for _ in range(25):
            routed = parallel.encoder_is_spread and rng.random() < 0.5
            present = drawn_presence(parallel, num_microbatches, built.unit_size if routed else 0, rng)
            forward, backward = (
                rng.integers(0, 20, present.shape) * rng.integers(0, 2, present.shape) * present for _ in range(2)
            )
            scale = rng.integers(1, 15, parallel.num_stages)
            forward, backward = forward * scale, backward * scale
            weight = backward // 2 if (built.op == 3).any() else np.zeros_like(backward)
            makespan = makespans_ns(built, forward, backward, present, weight_ns=weight, routed=routed)[0]
            times = np.concatenate([forward[0].T, (backward - weight)[0].T, weight[0].T])
            assert (graph.longest_path(times.astype(float)) * times).sum() <= makespan
            checked += 1
    assert checked


def drawn_pipeline(schedule: str, rng: np.random.Generator) -> tuple[ParallelSpec, int] | None:
    num_microbatches = int(rng.choice([1, 2, 3, 4, 5, 6, 8, 9, 13]))
    spread = schedule in {"nested", "phased"}
    try:
        parallel = ParallelSpec.pipeline(
            pp_size=int(rng.integers(2, 6)),
            encoder="spread" if spread else str(rng.choice(["own", "shared", "none"])),
            num_chunks=int(rng.integers(1, 4)) if spread or schedule == "interleaved1f1b" else 1,
            generator=bool(rng.random() < 0.4),
        )
        build_schedule(schedule, stage_ranks=parallel.stage_ranks, num_microbatches=num_microbatches)
    except (ScheduleError, LayoutError):
        return None
    return parallel, num_microbatches


def drawn_presence(parallel: ParallelSpec, num_microbatches: int, unit: int, rng: np.random.Generator) -> np.ndarray:
    """bool [1, M, S]: some micro-batches are empty, at the ends more often, and some have no media."""
    here = rng.random(num_microbatches) < rng.choice([1.0, 0.9, 0.7, 0.4, 0.2])
    if rng.random() < 0.3:
        here[: rng.integers(0, num_microbatches + 1)] = False
    if rng.random() < 0.3:
        here[num_microbatches - rng.integers(0, num_microbatches + 1) :] = False
    present = np.repeat(here[np.newaxis, :, np.newaxis], parallel.num_stages, axis=2)
    if parallel.has_encoder:
        media = rng.random(num_microbatches) < rng.choice([1.0, 0.6, 0.3])
        if unit:
            starts = range(0, num_microbatches, unit)
            here = np.concatenate(
                [np.full(len(here[start : start + unit]), here[start : start + unit].any()) for start in starts]
            )
        present[0, :, 0] = here & media
    return present


def test_with_all_acts_present_the_longest_path_is_the_makespan_on_gpipe() -> None:
    """Where no rule has to give anything up, nothing is lost."""
    rng = np.random.default_rng(3)
    built = build_schedule("gpipe", stage_ranks=(0, 1, 2), num_microbatches=6)
    graph = constraint_graph(built, (0, 1, 2), has_encoder=False)
    for _ in range(20):
        forward, backward = rng.integers(1, 50, (2, 1, 6, 3))
        times = np.concatenate([forward[0].T, backward[0].T, np.zeros((3, 6), dtype=np.int64)])
        makespan = makespans_ns(built, forward, backward)[0]
        assert 0.9 * makespan <= (graph.longest_path(times.astype(float)) * times).sum() <= makespan


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.integers(0, 2**32 - 1))
def test_any_weights_and_any_prices_give_a_bound(drawn, seed: int) -> None:
    """The solver of the game may be as wrong as it likes: it decides how tight the bound is, never whether it holds."""
    if drawn is None:
        return
    problem, num_microbatches = drawn
    rng = np.random.default_rng(seed)

    def careless(game, pool, graph, **_):
        prices = rng.random((game.loads.shape[1], num_microbatches)) * 10.0 ** rng.integers(-2, 4)
        return Solved(weights=rng.random(len(pool)), prices=prices, length=float(rng.integers(1, 5000))), pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_bound, "solve_game", careless)
        assert pipeline_bound_ns(problem, num_microbatches) <= best_makespan_ns(problem, num_microbatches)


LAYOUTS_OF_PIPELINES = (
    ("1f1b", {"pp_size": 2, "encoder": "own"}),
    ("1f1b", {"pp_size": 4, "encoder": "own"}),
    ("zb-h1", {"pp_size": 3, "encoder": "shared"}),
    ("interleaved1f1b", {"pp_size": 2, "encoder": "shared", "num_chunks": 2}),
    ("nested", {"pp_size": 2, "encoder": "spread"}),
    ("nested", {"pp_size": 3, "encoder": "spread", "generator": True}),
    ("phased", {"pp_size": 3, "encoder": "spread"}),
    ("phased", {"pp_size": 2, "encoder": "spread", "generator": True}),
)


@pytest.mark.parametrize("meet", ["step", "microbatch", "unit"])
@pytest.mark.parametrize(("schedule", "layout"), LAYOUTS_OF_PIPELINES)
def test_no_policy_and_no_random_placement_is_below_the_bound(schedule: str, layout: dict, meet: str) -> None:
    rng = np.random.default_rng(7)
    for num_microbatches, slack in ((1, 1.2), (4, 1.1), (6, 3.0)):
        tokens, patches = rng.integers(20, 100, 48), rng.integers(0, 2, 48) * rng.integers(0, 300, 48)
        cells = 2 * num_microbatches
        capacity = int(slack * tokens.sum() / cells) + int(tokens.max())
        parallel = ParallelSpec.pipeline(dp_size=2, num_microbatches=num_microbatches, meet=meet, **layout)
        options = {"parallel": parallel, "cost_model": model_of(parallel, [3, 1], [6, 2])}
        counts, limits = counts_of(tokens.tolist(), patches.tolist()), Capacities(tokens=capacity)
        problem = placement_problem(counts, capacities=limits, schedule=schedule, **options)
        lower = lower_bounds(problem, num_microbatches).lower_ns
        for policy in policy_names():
            plan = plan_step(counts, capacities=limits, schedule=schedule, policy=policy, **options)
            if plan.num_microbatches == num_microbatches:
                assert lower <= plan.makespan_ns
        for _ in range(100):
            cell = rng.integers(0, cells, 48) if rng.random() < 0.5 else rng.permutation(np.arange(48) % cells)
            if (np.bincount(cell, weights=tokens, minlength=cells) <= capacity).all():
                placement = Placement.from_cells(cell // num_microbatches, cell % num_microbatches, num_microbatches)
                assert lower <= problem.makespan_ns(problem.cell_times(placement))


def test_a_capacity_that_leaves_no_room_to_taper_raises_the_bound() -> None:
    """Small first and last micro-batches shorten warm-up and drain; full micro-batches cannot be small."""
    parallel = ParallelSpec.pipeline(pp_size=4, encoder="none", num_microbatches=8)
    tokens, none = [100] * 240, [0] * 240
    free = pipeline_bound_ns(problem_of(tokens, none, parallel), 8)
    full = problem_of(tokens, none, parallel, capacity=3000)
    uniform = full.makespan_ns(full.cell_times(even(full, 8)))
    assert free < 0.97 * uniform
    assert 0.98 * uniform <= pipeline_bound_ns(full, 8) <= uniform


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
    built = build_schedule("gpipe", stage_ranks=(0,), num_microbatches=3)
    graph = constraint_graph(built, (0,), has_encoder=False)
    game = Game(times=np.array([[1.0, 0.0, 0.0]]), loads=np.zeros((1, 0)), unit=0)
    pool = np.zeros((3, 3, 3), dtype=np.int64)
    pool[:, 0] = [[0, 2, 1], [1, 0, 2], [2, 1, 0]]
    solved, _ = solve_game(game, pool, graph, num_rounds=1, num_iterations=400)
    np.testing.assert_allclose(solved.weights, 1 / 3, atol=0.02)
    pool[:, 0] = [[2, 4, 3], [1, 2, 2], [1, 2, 2]]
    solved, _ = solve_game(game, pool, graph, num_rounds=1, num_iterations=50)
    assert solved.weights[0] > 0.99


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
