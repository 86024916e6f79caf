"""Aligned media: on all ranks or on none in every micro-batch, nothing lost, no capacity exceeded, little slower."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from balancer.errors import PlanError
from balancer.layout import ParallelSpec
from balancer.placement_problem import placement_problem
from balancer.plan import Capacities, StepPlan
from balancer.plan_check import verify
from balancer.planner import plan_step
from balancer.policies import Placement, policy_names
from balancer.policies.aligned_cells import IN_POOL, AlignedCells
from balancer.policies.aligned_media import is_aligned, with_aligned_media

EVERY_POLICY = pytest.mark.parametrize("policy", policy_names())
ENCODER, LLM = StageTerms(per_patch_ns=5.0), StageTerms(per_token_ns=10.0)
ROOMY = Capacities(tokens=10_000)


def model_for(spec: ParallelSpec) -> CostModel:
    """5 ns per patch where there is an encoder, 10 ns per token in every LLM stage, backward doubled."""
    terms = [ENCODER if name == "encoder" else LLM for name in spec.domain_of_stage]
    return CostModel(stages=tuple(StageCost(forward=term, backward=term.scaled(2.0)) for term in terms))


def aligned(**options: Any) -> ParallelSpec:
    own = {name: options.pop(name) for name in ("fill_cells", "media_presence") if name in options}
    return replace(ParallelSpec.pipeline(**options), **{"media_presence": "aligned", **own})


def planned(counts: StepCounts, spec: ParallelSpec, capacities: Capacities = ROOMY, **options: Any) -> StepPlan:
    plan = plan_step(counts, parallel=spec, cost_model=model_for(spec), capacities=capacities, **options)
    verify(plan, counts, capacities, model_for(spec))
    return plan


def has_media(plan: StepPlan) -> np.ndarray:
    """bool [R, M]"""
    return plan.patches > 0


def all_or_none(plan: StepPlan) -> bool:
    present = has_media(plan)
    return bool((present == present[0]).all())


def seeded(n: int, share: float, seed: int) -> StepCounts:
    """Heavy-tailed samples, a `share` of them with media."""
    rng = np.random.Generator(np.random.Philox(seed))
    patches = np.where(rng.random(n) < share, rng.lognormal(6, 1, n).astype(np.int64) + 4, 0)
    tokens = rng.lognormal(5, 1, n).astype(np.int64) + 1 + patches // 4
    return StepCounts(
        sample_ids=np.arange(n),
        llm_tokens=tokens,
        label_tokens=tokens // 2,
        visual_tokens=patches // 4,
        patches=patches,
        num_items=(patches > 0).astype(np.int64),
        full_total_sq=patches * patches,
        window_total_sq=patches * 64,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[StepCounts, ParallelSpec, Capacities, str]:
    """Any layout; text only, few media, media only; capacities from one sample to everything."""
    n = draw(st.integers(1, 30))
    tokens = np.array(draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)))
    patches = np.array(draw(st.lists(st.sampled_from([0, 0, 0, 1, 5, 80]), min_size=n, max_size=n)))
    counts = StepCounts(
        sample_ids=np.array(draw(st.permutations(range(n)))) * 3,
        llm_tokens=tokens,
        label_tokens=tokens // 2,
        visual_tokens=patches // 4,
        patches=patches,
        num_items=(patches > 0).astype(np.int64),
        full_total_sq=patches * patches,
        window_total_sq=patches * 64,
    )
    spec = aligned(
        dp_size=draw(st.integers(1, 4)),
        pp_size=draw(st.integers(1, 2)),
        encoder=draw(st.sampled_from(["own", "shared", "none"])),
        num_microbatches=draw(st.none() | st.integers(1, 5)),
        meet=draw(st.sampled_from(["step", "microbatch"])),
        fill_cells=draw(st.booleans()),
    )
    limits = Capacities(
        tokens=draw(st.sampled_from([40, 55, 90, 4000])), patches=draw(st.sampled_from([None, 80, 200]))
    )
    return counts, spec, limits, draw(st.sampled_from(policy_names()))


@given(case=cases())
def test_a_plan_is_aligned_and_valid_or_refused_with_the_remedy(
    case: tuple[StepCounts, ParallelSpec, Capacities, str],
) -> None:
    counts, spec, capacities, policy = case
    try:
        plan = planned(counts, spec, capacities, policy=policy)
    except PlanError as error:
        text = str(error)
        if "media_presence" in text:
            assert "use media_presence='dummy'" in text
        else:  # what the step says without alignment, too
            with pytest.raises(PlanError, match="does not hold the"):
                planned(counts, replace(spec, media_presence="any"), capacities, policy=policy)
        return
    assert all_or_none(plan)
    if (spec.meet != "step" or spec.fill_cells) and len(counts) >= plan.num_samples.size:
        assert (plan.num_samples > 0).all()


@given(case=cases())
def test_roomy_steps_with_two_samples_per_cell_are_always_aligned(
    case: tuple[StepCounts, ParallelSpec, Capacities, str],
) -> None:
    """With 2 * R * M samples the counts leave a choice of K, so that only capacities could refuse."""
    counts, spec, _, policy = case
    num_cells = spec.dp_size * (spec.num_microbatches or 1)
    if len(counts) < 2 * num_cells or 0 < np.count_nonzero(counts.patches) < spec.dp_size:
        return
    assert all_or_none(planned(counts, spec, ROOMY, policy=policy))


@EVERY_POLICY
@pytest.mark.parametrize("meet", ["step", "microbatch"])
def test_one_rank_s_text_moves_until_kinds_meet(counts_of, policy: str, meet: str) -> None:
    """DU-02: all media are selected for rank 0; a rank without would leave the others waiting in the encoder."""
    counts = counts_of([30] * 8, patches=[40, 40, 40, 40, 0, 0, 0, 0])
    spec = aligned(dp_size=2, num_microbatches=2, meet=meet)
    plain = planned(counts, replace(spec, media_presence="any"), policy="sequential")
    assert has_media(plain).tolist() == [[True, True], [False, False]]
    plan = planned(counts, spec, policy=policy)
    assert all_or_none(plan)
    assert (plan.num_samples > 0).all()
    assert has_media(plan).any()


def test_the_example_of_the_module(counts_of) -> None:
    """rank 0 [A b][C d], rank 1 [e f][G h]: the smaller medium joins the larger one, and cells are renumbered."""
    counts = counts_of([10] * 8, patches=[8, 0, 4, 0, 0, 0, 8, 0])
    spec = aligned(dp_size=2, num_microbatches=2, meet="microbatch")
    plan = planned(counts, spec, policy="sequential")
    cells = [[sorted(plan.members(rank, m).tolist()) for m in range(2)] for rank in range(2)]
    assert cells == [[[0, 1, 2], [3]], [[6, 7], [4, 5]]]


@EVERY_POLICY
def test_text_only_steps_and_steps_of_media_only_are_left_as_they_are(counts_of, policy: str) -> None:
    for patches in ([0] * 12, [16] * 12):
        counts = counts_of([7, 30, 2, 9, 11, 25, 3, 8, 19, 4, 6, 12], patches=patches)
        spec = aligned(dp_size=3, num_microbatches=2)
        with_it = planned(counts, spec, policy=policy)
        without = planned(counts, replace(spec, media_presence="any"), policy=policy)
        for name in ("dp_rank", "microbatch", "slot", "forward_ns"):
            assert np.array_equal(getattr(with_it, name), getattr(without, name)), name


@EVERY_POLICY
def test_fewer_media_than_ranks_are_refused_with_the_remedy(counts_of, policy: str) -> None:
    counts = counts_of([10] * 12, patches=[8, 0, 0, 8] + [0] * 8)
    with pytest.raises(
        PlanError,
        match=r"media_presence='aligned': 2 of the 12 samples of the step have media, fewer than the 3 ranks, .*"
        r"use media_presence='dummy' \(a rank without media encodes a small dummy\) or a larger batch size",
    ):
        planned(counts, aligned(dp_size=3, num_microbatches=2), policy=policy)


@EVERY_POLICY
def test_cells_of_one_sample_and_media_that_ranks_do_not_divide_are_refused(counts_of, policy: str) -> None:
    counts = counts_of([10] * 4, patches=[8, 8, 8, 0])
    spec = aligned(dp_size=2, num_microbatches=2, meet="microbatch")
    with pytest.raises(
        PlanError,
        match=r"no arrangement was found of 3 samples with media and 1 without in 2 ranks x 2 micro-batches of "
        r"10000 tokens, each with a sample, that gives .*; use media_presence='dummy', more samples per",
    ):
        planned(counts, spec, policy=policy)
    # Where a rank may be without samples for a micro-batch, the same step is planned.
    assert all_or_none(planned(counts, replace(spec, meet="step"), policy=policy))


def test_capacities_are_named_where_they_are_what_stops_it(counts_of) -> None:
    counts = counts_of([10, 10, 10, 10], patches=[8, 8, 8, 0])
    spec = aligned(dp_size=2, num_microbatches=2)
    with pytest.raises(PlanError, match="micro-batches of 10 tokens that gives every micro-batch"):
        planned(counts, spec, Capacities(tokens=10))


@EVERY_POLICY
def test_a_free_number_of_micro_batches_grows_until_it_fits(counts_of, policy: str) -> None:
    """Full cells [A d][B e] | [C f][g]: two micro-batches hold all samples, but only three let kinds meet."""
    counts = counts_of([15, 15, 15, 5, 5, 5, 20], patches=[8, 8, 8, 8, 0, 0, 0])
    plan = planned(counts, aligned(dp_size=2), Capacities(tokens=20), policy=policy)
    assert all_or_none(plan)
    assert plan.num_microbatches == 3
    with pytest.raises(PlanError, match=r"does not hold|no arrangement was found"):
        planned(counts, aligned(dp_size=2, num_microbatches=2), Capacities(tokens=20), policy=policy)


@pytest.mark.parametrize("policy", ["sequential", "lpt", "joint"])
def test_text_makes_way_in_cells_that_are_full(counts_of, policy: str) -> None:
    counts = counts_of([60, 40, 50, 50, 45, 55, 30, 70], patches=[16, 0, 16, 0, 0, 0, 0, 0])
    plan = planned(counts, aligned(dp_size=2, num_microbatches=2), Capacities(tokens=100), policy=policy)
    assert all_or_none(plan)
    assert plan.llm_tokens.max() <= 100


@pytest.mark.parametrize("meet", ["step", "microbatch"])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_aligned_plans_are_little_slower_than_free_ones(share: float, meet: str) -> None:
    """Measured at most 5 % here; and never slower than what sequential becomes when it is aligned."""
    for seed in range(3):
        counts = seeded(256, share, seed)
        spec = aligned(dp_size=8, num_microbatches=4, meet=meet, fill_cells=True)
        capacities = Capacities(tokens=int(counts.llm_tokens.sum()) // 16)
        plan = planned(counts, spec, capacities)
        free = planned(counts, replace(spec, media_presence="any"), capacities)
        assert all_or_none(plan)
        assert plan.makespan_ns <= 1.08 * free.makespan_ns
        assert plan.makespan_ns <= plan.makespan_before_ns


def test_slow_micro_batches_of_a_kind_meet_slow_ones(counts_of) -> None:
    """Where ranks meet in every micro-batch, the cells of a kind run longest first on every rank."""
    counts = seeded(64, 0.3, 5)
    spec = aligned(dp_size=2, num_microbatches=8, meet="microbatch")
    problem = placement_problem(counts, parallel=spec, cost_model=model_for(spec), capacities=ROOMY, schedule="1f1b")
    rng = np.random.Generator(np.random.Philox(1))
    placement = Placement.from_cells(rng.integers(0, 2, 64), np.arange(64) % 8, 8)
    assert not is_aligned(problem, placement)
    settled = with_aligned_media(problem, placement, balanced=True)
    assert is_aligned(problem, settled)
    times = problem.cell_times(settled)
    total = (times.forward_ns + times.backward_ns).sum(axis=2)
    kind = times.present[0, :, 0]
    for rank in range(2):
        for of_kind in (total[rank][kind], total[rank][~kind]):
            assert (np.diff(of_kind) <= 0).all()


def test_the_sequential_baseline_obeys_too(counts_of) -> None:
    counts = counts_of([10] * 8, patches=[8] * 4 + [0] * 4)
    spec = aligned(dp_size=2, num_microbatches=2)
    plan, sequential = planned(counts, spec), planned(counts, spec, policy="sequential")
    assert all_or_none(sequential)
    assert plan.makespan_before_ns == sequential.makespan_ns


def test_the_inputs_digest_tells_media_presence_apart_and_keeps_that_of_any(counts_of) -> None:
    """A rank that was configured otherwise is found before the first forward, even where the plans are equal."""
    counts = counts_of([10] * 4, patches=[8] * 4)
    spec = ParallelSpec.pipeline(dp_size=2, num_microbatches=2)
    any_, explicit = planned(counts, spec), planned(counts, replace(spec, media_presence="any"))
    held = planned(counts, replace(spec, media_presence="aligned"))
    assert any_.inputs_digest == explicit.inputs_digest != held.inputs_digest
    assert np.array_equal(any_.microbatch, held.microbatch)


def cells(**changed: Any) -> AlignedCells:
    """Two ranks of a media cell and a text cell; samples 0 and 1 have media."""
    fixed: dict[str, Any] = {
        "media": np.array([True, True, False, False]),
        "is_media_cell": np.array([True, False, True, False]),
        "sizes": np.full((4, 1), 10),
        "capacity": np.array([20]),
        "time_ns": np.array([4, 3, 2, 1]),
        "num_microbatches": 2,
        "totals_count": True,
    }
    start = changed.pop("start", np.full(4, IN_POOL))
    return AlignedCells(start, **{**fixed, **changed})


def test_from_nothing_every_cell_gets_a_sample_of_its_kind() -> None:
    made = cells()
    assert made.settle(np.arange(4), fill=True)
    assert made.cell_of.tolist() == [0, 2, 1, 3]


def test_what_is_in_its_place_stays_there() -> None:
    made = cells(start=np.array([2, 0, 3, 1]))
    assert made.settle(np.arange(4), fill=True)
    assert made.cell_of.tolist() == [2, 0, 3, 1]


def test_a_full_cell_gives_its_text_away_for_media() -> None:
    """Both text samples fill the media cell of rank 1, which has to have one of the media."""
    made = cells(start=np.array([0, 0, 2, 2]))
    assert made.settle(np.arange(4), fill=False)
    assert sorted(made.cell_of[:2].tolist()) == [0, 2]


def test_media_that_fit_nowhere_are_told() -> None:
    assert not cells(is_media_cell=np.array([True, False, False, False]), capacity=np.array([10])).settle(
        np.arange(4), fill=False
    )


def test_too_few_media_for_their_cells_are_told() -> None:
    assert not cells(media=np.array([True, False, False, False])).settle(np.arange(4), fill=False)


def test_too_few_text_samples_for_their_cells_are_told_where_cells_must_be_filled() -> None:
    few = {"media": np.array([True, True, True, False]), "start": np.array([0, 2, IN_POOL, 1])}
    assert not cells(**few).settle(np.arange(4), fill=True)
    assert cells(**few).settle(np.arange(4), fill=False)
