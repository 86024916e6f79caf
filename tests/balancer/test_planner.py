"""Planning a step: the cases people met elsewhere, what a plan certifies, and what is refused with its arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.cost_model import CostModel, EncoderDims, LLMDims, StageCost, StageTerms
from balancer.counts import COUNT_COLUMNS, StepCounts
from balancer.errors import BalancerError, LayoutError, PlanError, ScheduleError
from balancer.layout import ParallelSpec
from balancer.metrics import imbalance
from balancer.plan import Capacities, StepPlan
from balancer.plan_check import verify
from balancer.planner import placement_problem, plan_step
from balancer.policies import get_policy, policy_names
from balancer.schedule import schedule_names

EVERY_POLICY = pytest.mark.parametrize("policy", policy_names())
ATTENTION = StageTerms(per_token_ns=1.0, per_token_sq_ns=0.01)
QUADRATIC_3 = CostModel(
    stages=tuple(
        StageCost(forward=term, backward=term.scaled(2.0))
        for term in (StageTerms(per_patch_ns=1.0), StageTerms(per_token_sq_ns=1.0), StageTerms(per_token_sq_ns=1.0))
    )
)
QUADRATIC = CostModel(
    stages=tuple(
        StageCost(forward=term, backward=term.scaled(2.0)) for term in (StageTerms(per_patch_ns=1.0), ATTENTION)
    )
)


@pytest.fixture
def plan(plain_model):
    """`plan(counts, tokens=..., ...)` with the plain cost model of the layout's number of stages."""

    def call(counts, *, dp_size=1, pp_size=1, tokens, patches=None, items=None, cost_model=None, **options):
        names = ("num_microbatches", "min_num_microbatches", "num_microbatches_multiple", "meet", "encoder")
        own = {name: options.pop(name) for name in names if name in options}
        parallel = ParallelSpec.pipeline(dp_size=dp_size, pp_size=pp_size, **own)
        capacities = Capacities(tokens=tokens, patches=patches, items=items)
        made = plan_step(
            counts,
            parallel=parallel,
            cost_model=cost_model or plain_model(parallel.num_stages),
            capacities=capacities,
            **options,
        )
        verify(made, counts, capacities)
        return made

    return call


@EVERY_POLICY
@pytest.mark.parametrize("cost_model", [None, QUADRATIC])
def test_pk_01_capacity_is_a_ceiling_and_not_an_average(plan, counts_of, policy: str, cost_model) -> None:
    made = plan(counts_of([7] * 8), tokens=8, policy=policy, cost_model=cost_model)
    assert made.num_microbatches == 8
    assert made.llm_tokens.tolist() == [[7] * 8]


@EVERY_POLICY
def test_pk_02_a_sample_beyond_the_capacity_is_refused_by_name(plan, counts_of, policy: str) -> None:
    with pytest.raises(
        PlanError, match=r"larger than the capacity of 10 tokens .*: sample 31: 12\. Raise the capacity"
    ):
        plan(counts_of([5, 12, 3], sample_ids=[30, 31, 32]), tokens=10, policy=policy)


@EVERY_POLICY
def test_pk_02_what_is_left_after_dropping_fills_cells_without_an_empty_one(plan, counts_of, policy: str) -> None:
    made = plan(counts_of([5, 3], sample_ids=[30, 32]), tokens=10, policy=policy)
    assert made.llm_tokens.tolist() == [[8]]


@pytest.mark.parametrize("policy", policy_names())
def test_pk_04_a_step_without_samples_is_a_clear_error(plan, counts_of, policy: str) -> None:
    with pytest.raises(PlanError, match=r"a step without samples cannot be planned: .* every sample was dropped"):
        plan(counts_of([]), tokens=10, policy=policy)


def test_bl_02_nine_samples_over_four_ranks_leave_no_rank_empty(plan, counts_of) -> None:
    made = plan(counts_of([1] * 9), dp_size=4, tokens=10, policy="sequential")
    assert made.num_samples[:, 0].tolist() == [3, 2, 2, 2]


def test_bl_05_one_long_document_is_not_two_short_ones(plan, counts_of) -> None:
    """Ranks [1024, 64] and [512, 512, 64] have equal tokens; attention makes the first slower, so balance shifts."""
    counts = counts_of([1024, 64, 512, 448, 64, 64])
    before = plan(counts, dp_size=2, tokens=4096, policy="sequential", cost_model=QUADRATIC)
    after = plan(counts, dp_size=2, tokens=4096, cost_model=QUADRATIC)
    assert after.makespan_ns < before.makespan_ns
    alone = [rank for rank in range(2) if after.members(rank, 0).tolist() == [0]]
    assert alone, "the long document needs a rank of its own under quadratic cost"
    pair = counts_of([1024, 512, 512])
    uneven = plan(pair, dp_size=2, tokens=1024, cost_model=QUADRATIC)
    assert sorted(uneven.llm_tokens[:, 0].tolist()) == [1024, 1024]
    assert uneven.imbalance_after > 1.2, "equal tokens must not be called balanced"


def test_bl_07_image_load_is_balanced_beside_equal_text(plan, counts_of) -> None:
    """Equal text everywhere, patches 64 or 8192: both the encoder and the LLM come out even."""
    patches = [8192, 8192, 8192, 8192, 64, 64, 64, 64]
    counts = counts_of([1000] * 8, patches=patches)
    before = plan(counts, dp_size=2, pp_size=2, tokens=10_000, policy="sequential")
    after = plan(counts, dp_size=2, pp_size=2, tokens=10_000, policy="lpt")
    encoder, llm = after.forward_ns.sum(axis=1).T
    assert imbalance(before.forward_ns[:, :, 0].sum(axis=1)) > 1.9
    assert imbalance(encoder) < 1.1
    assert imbalance(llm) < 1.1


@EVERY_POLICY
@pytest.mark.parametrize("encoder", ["own", "spread"])
def test_bl_08_moving_samples_keeps_every_counter_also_where_a_replica_has_no_image(
    plan, counts_of, policy: str, encoder: str
) -> None:
    counts = counts_of([7, 50, 3, 20, 20, 9, 31, 4, 12], patches=[0, 0, 0, 64, 0, 0, 128, 0, 0])
    options = {"dp_size": 4, "pp_size": 2, "tokens": 60, "encoder": encoder}
    schedule = {"schedule": "nested"} if encoder == "spread" else {}
    off = plan(counts, policy="sequential", **options, **schedule)
    on = plan(counts, policy=policy, **options, **schedule)
    assert any(on.patches[rank].sum() == 0 for rank in range(4))
    for name in ("num_samples", "llm_tokens", "label_tokens", "visual_tokens", "patches"):
        assert getattr(on, name).sum() == getattr(off, name).sum(), name
    planned = [on.members(rank, microbatch) for rank in range(4) for microbatch in range(on.num_microbatches)]
    assert counts.num_items[np.concatenate(planned)].sum() == counts.num_items.sum() > 0


@EVERY_POLICY
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_size": 2**12, "pp_size": 64, "num_microbatches_multiple": 1024}, "268435456 entries of a plan"),
        ({"pp_size": 2, "num_microbatches_multiple": 40_000, "min_num_microbatches": 40_001}, "(80000|at most)"),
    ],
)
def test_a_free_number_of_microbatches_keeps_the_limits_of_a_layout(
    plan, counts_of, policy: str, options: dict, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        plan(counts_of([1, 1, 1, 1]), tokens=10, policy=policy, **options)


@EVERY_POLICY
def test_a_number_of_microbatches_that_the_samples_force_is_checked_when_it_is_chosen(
    plan, counts_of, policy: str
) -> None:
    """No option is at fault: one token a cell makes 100,000 cells on one rank."""
    with pytest.raises(LayoutError, match="takes 100000 micro-batches, at most 65536: raise the capacity"):
        plan(counts_of([1] * 100_000), tokens=1, policy=policy)


@EVERY_POLICY
def test_capacities_beyond_every_load_do_not_leave_64_bits(plain_model, counts_of, policy: str) -> None:
    """Plans refuse such a capacity; a policy by itself neither wraps nor fails in the packing below it."""
    parallel = ParallelSpec.pipeline(dp_size=2, num_microbatches=16)
    problem = placement_problem(
        counts_of([5, 9, 2, 7]),
        parallel=parallel,
        cost_model=plain_model(2),
        capacities=Capacities(tokens=100),
        schedule="1f1b",
    )
    placement = get_policy(policy).place(replace(problem, capacity=(2**60,)))
    assert len(set(zip(placement.dp_rank, placement.microbatch, placement.slot, strict=True))) == 4
    assert np.bincount(placement.dp_rank, minlength=2).min() > 0


@EVERY_POLICY
def test_bl_11_tokens_patches_and_items_have_limits_of_their_own(plan, counts_of, policy: str) -> None:
    counts = counts_of([100] * 4, patches=[4096, 4097, 4096, 4096])
    by_patches = plan(counts, tokens=8192, patches=8192, policy=policy)
    assert by_patches.patches.max() <= 8192
    assert by_patches.num_microbatches == 3
    assert plan(counts, tokens=8192, items=1, policy=policy).num_microbatches == 4


def test_du_02_cross_rank_moves_give_three_and_three(plan, counts_of) -> None:
    """Six samples of 9 and four of 1, capacity 10: in order rank 0 needs five, together three each are enough."""
    counts = counts_of([9] * 6 + [1] * 4)
    made = plan(counts, dp_size=2, tokens=10, policy="lpt")
    assert made.num_microbatches == 3
    assert (made.num_samples > 0).all()
    assert plan(counts, dp_size=2, tokens=10, policy="sequential").num_microbatches == 5


@EVERY_POLICY
def test_bl_04_the_count_is_rounded_up_to_a_multiple_with_cells_to_match(plan, counts_of, policy: str) -> None:
    counts = counts_of([6] * 6 + [2] * 6)
    assert plan(counts, tokens=8, num_microbatches_multiple=4, policy=policy).num_microbatches % 4 == 0
    made = plan(counts, tokens=8, num_microbatches_multiple=4, policy="lpt")
    assert made.num_microbatches == 8
    assert (made.num_samples > 0).all()


@EVERY_POLICY
def test_bl_04_six_micro_batches_become_eight_that_all_hold_samples(plan, counts_of, policy: str) -> None:
    """Six cells would hold them; the multiple of 4 asks for 8, so the heaviest are split."""
    made = plan(counts_of([8, 8, 8, 8, 4, 4, 2, 6]), tokens=8, num_microbatches_multiple=4, policy=policy)
    assert made.num_microbatches == 8
    assert made.num_samples.tolist() == [[1] * 8]


def test_bl_04_an_impossible_combination_spells_out_its_arithmetic(plan, counts_of) -> None:
    with pytest.raises(LayoutError, match=r"num_microbatches=6 is no multiple of 4 \(6 = 1 x 4 \+ 2\); use 4 or 8"):
        plan(counts_of([1] * 8), tokens=8, num_microbatches=6, num_microbatches_multiple=4)


@pytest.mark.parametrize("num_microbatches", [1, 5, 6, 7])
@pytest.mark.parametrize("schedule", schedule_names())
def test_bl_04_no_schedule_asks_for_a_multiple_of_its_own(
    counts_of, plain_model, schedule: str, num_microbatches: int
) -> None:
    """Also interleaved ones: groups of unequal size share what does not divide by the ranks."""
    chunks = 2 if schedule == "interleaved1f1b" else 1
    encoder = "spread" if schedule in {"nested", "phased"} else "none"
    spec = ParallelSpec.pipeline(pp_size=4, encoder=encoder, num_chunks=chunks, num_microbatches=num_microbatches)
    options = {
        "cost_model": plain_model(spec.num_stages),
        "capacities": Capacities(tokens=8),
        "schedule": schedule,
    }
    assert plan_step(counts_of([1] * 8), parallel=spec, **options).num_microbatches == num_microbatches
    free = replace(spec, num_microbatches=None, num_microbatches_multiple=5)
    assert plan_step(counts_of([6] * 6), parallel=free, **options).num_microbatches == 10


def test_stages_that_a_schedule_cannot_run_are_refused_before_anything_is_placed(counts_of, plain_model) -> None:
    spec = ParallelSpec.pipeline(pp_size=2, encoder="spread")
    with pytest.raises(ScheduleError, match=r"spread over all ranks .* needs the schedule phased or nested"):
        plan_step(counts_of([9]), parallel=spec, cost_model=plain_model(3), capacities=Capacities(tokens=8))


@pytest.mark.parametrize("encoder", ["own", "shared", "none"])
@pytest.mark.parametrize("schedule", ["nested", "phased"])
def test_nested_and_phased_need_a_spread_encoder(counts_of, plain_model, schedule: str, encoder: str) -> None:
    """Once planned as plain 1F1B, without a word."""
    spec = ParallelSpec.pipeline(pp_size=2, encoder=encoder)
    model = plain_model(spec.num_stages)
    with pytest.raises(ScheduleError, match=rf"schedule {schedule} .* no stage is spread .*encoder=.spread"):
        plan_step(counts_of([9]), parallel=spec, cost_model=model, capacities=Capacities(tokens=9), schedule=schedule)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=50), st.integers(1, 8))
def test_bl_01_counts_of_any_size_divide_over_any_ranks(counts_of, tokens: list[int], dp_size: int) -> None:
    made = plan_step(
        counts_of(tokens),
        parallel=ParallelSpec.pipeline(dp_size=dp_size, num_microbatches=1),
        cost_model=QUADRATIC,
        capacities=Capacities(tokens=10**6),
        policy="sequential",
    )
    held = made.num_samples.sum(axis=1)
    assert held.max() - held.min() <= 1
    assert sorted(made.sample_ids.tolist()) == list(range(len(tokens)))


@EVERY_POLICY
@pytest.mark.parametrize("meet", ["step", "microbatch", "unit"])
def test_peers_fewer_samples_than_ranks_or_cells_is_a_step_like_any_other(
    plan, counts_of, policy: str, meet: str
) -> None:
    """Megatron's balancer asserts with fewer samples than DP ranks."""
    made = plan(counts_of([7, 3, 5]), dp_size=8, tokens=10, num_microbatches=2, policy=policy, meet=meet)
    assert made.num_samples.sum() == 3
    assert made.num_samples.shape == (8, 2)


@EVERY_POLICY
@pytest.mark.parametrize("patches", [[0, 0, 0, 0], [0, 0, 40, 0]])
def test_peers_no_image_anywhere_or_fewer_images_than_ranks_is_planned(plan, counts_of, policy: str, patches) -> None:
    """LoongForge raises where no rank has an image, MindSpeed-MM with fewer images than ranks."""
    counts = counts_of([5, 4, 3, 2], patches=patches)
    made = plan(counts, dp_size=3, tokens=10, policy=policy)
    assert made.patches.sum() == sum(patches)
    for encoder, schedule in (("shared", "1f1b"), ("spread", "nested"), ("spread", "phased")):
        parallel = ParallelSpec.pipeline(dp_size=3, pp_size=2, encoder=encoder, num_microbatches=3)
        options = {"cost_model": QUADRATIC_3, "capacities": Capacities(tokens=10), "policy": policy}
        made = plan_step(counts, parallel=parallel, schedule=schedule, **options)
        verify(made, counts, Capacities(tokens=10))
        assert made.encoder_patches.sum() == sum(patches)


@EVERY_POLICY
def test_peers_an_oversize_first_sample_makes_no_empty_pack_and_no_lost_group(plan, counts_of, policy: str) -> None:
    with pytest.raises(PlanError, match="sample 0: 11"):
        plan(counts_of([11, 5, 5, 3]), tokens=10, policy=policy)
    made = plan(counts_of([10, 5, 5, 3]), tokens=10, policy=policy)
    assert (made.num_samples > 0).all()
    assert made.num_samples.sum() == 4


@EVERY_POLICY
def test_peers_equal_weights_never_break_the_token_capacity(plan, policy: str) -> None:
    """verl's partition breaks its token capacity in up to 17 % of batches; `verify` in the fixture would raise."""
    rng = np.random.default_rng(7)
    for _ in range(8):
        tokens = np.minimum(rng.lognormal(4, 1.2, 64).astype(np.int64) + 1, 1000)
        counts = StepCounts(
            sample_ids=np.arange(64),
            **{name: tokens if name == "llm_tokens" else np.zeros(64, np.int64) for name in COUNT_COLUMNS},
        )
        made = plan(counts, dp_size=4, tokens=1000, policy=policy)
        assert made.llm_tokens.max() <= 1000


def test_samples_that_were_dropped_are_listed_with_their_reasons(plan, counts_of) -> None:
    dropped = ((7, "oversize: 30 tokens"), (9, "damaged"))
    made = plan(counts_of([5, 5]), tokens=10, dropped=dropped)
    assert made.dropped == dropped
    assert made.inputs_digest != plan(counts_of([5, 5]), tokens=10).inputs_digest
    assert StepPlan.from_json(made.to_json()).dropped == dropped


def test_label_tokens_are_reported_before_and_after(plan, counts_of) -> None:
    made = plan(counts_of([8, 8, 2, 2]), dp_size=2, tokens=16, policy="lpt")
    assert (made.label_imbalance_before, made.label_imbalance_after) == (1.6, 1.0)


def test_the_plan_says_when_the_stage_split_binds(plan, counts_of, plain_model) -> None:
    """All the work is in the LLM: its rank sets the pace whatever is placed where."""
    made = plan(counts_of([4] * 32, patches=[4] * 32), dp_size=2, pp_size=2, tokens=100, num_microbatches=4)
    assert made.stage_work_ns.tolist() == [32 * 12, 32 * 12]
    assert made.binding in {"none", "data"}
    made = plan(counts_of([40] * 32, patches=[4] * 32), dp_size=2, pp_size=2, tokens=1000, num_microbatches=4)
    assert made.binding == "stage split"
    assert "pipeline rank 1 has 1.82 x the mean work of a rank" in made.note


def test_the_plan_says_when_the_largest_sample_binds(plan, counts_of) -> None:
    made = plan(counts_of([100, 1, 1, 1]), dp_size=2, tokens=100)
    assert made.binding == "largest sample"
    assert "sample 0 alone takes 300 ns of 300 ns" in made.note


def test_where_replicas_meet_inside_the_step_the_slowest_counts_in_every_microbatch(plan, counts_of) -> None:
    counts = counts_of([9, 1, 1, 9])
    once = plan(counts, dp_size=2, tokens=10, num_microbatches=2, policy="sequential")
    inside = plan(counts, dp_size=2, tokens=10, num_microbatches=2, policy="sequential", meet="microbatch")
    assert once.rank_makespan_ns.tolist() == inside.rank_makespan_ns.tolist() == [30, 30]
    assert (once.makespan_ns, inside.makespan_ns) == (30, 54)
    assert inside.lower_bound_ns == 30
    assert once.inputs_digest != inside.inputs_digest


@EVERY_POLICY
def test_fewer_samples_than_cells_leave_empty_cells_on_an_equal_grid(plan, counts_of, policy: str) -> None:
    made = plan(counts_of([5, 6]), dp_size=3, tokens=10, num_microbatches=2, policy=policy)
    assert made.num_samples.shape == (3, 2)
    assert made.num_samples.sum() == 2
    empty = [rank for rank in range(3) if made.num_samples[rank].sum() == 0]
    assert made.absent(empty[0]) == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert made.rank_makespan_ns[empty[0]] == 0


@EVERY_POLICY
def test_one_sample_is_a_step(plan, counts_of, policy: str) -> None:
    made = plan(counts_of([5]), tokens=10, policy=policy)
    assert (made.num_microbatches, made.makespan_ns, made.lower_bound_ns) == (1, 15, 15)


@EVERY_POLICY
def test_a_fixed_count_that_does_not_fit_says_why_and_what_does(plan, counts_of, policy: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan(counts_of([7] * 8), dp_size=2, tokens=8, num_microbatches=3, policy=policy)
    text = str(caught.value)
    assert "num_microbatches=3 does not hold the 8 samples" in text
    assert "56 tokens into 2 ranks x 3 micro-batches x 8 = 48" in text
    assert f"Policy '{policy}' fits them with num_microbatches=4" in text


def test_microbatches_do_not_go_below_the_minimum(plan, counts_of) -> None:
    assert plan(counts_of([1] * 8), tokens=100, min_num_microbatches=4).num_microbatches == 4
    with pytest.raises(LayoutError, match="num_microbatches=2 is below the minimum of 3"):
        plan(counts_of([1] * 8), tokens=100, num_microbatches=2, min_num_microbatches=3)


def test_when_in_order_does_not_fit_the_comparison_says_so(plan, counts_of) -> None:
    """Fixed M = 2: in order 6 6 | 4 4 needs 2 + 1 cells per rank, but 6+4 pairs fit into one each."""
    made = plan(counts_of([6, 6, 6, 4, 4, 4]), tokens=10, num_microbatches=3, policy="lpt")
    assert made.policy_used == "lpt"
    assert "sequential needs 4 micro-batches" in made.note
    assert made.makespan_before_ns > 0


def test_where_lpt_would_be_slower_sequential_is_kept_and_said(monkeypatch, plan, counts_of) -> None:
    """A `never_worse` policy that puts everything on one rank loses to the order of selection."""
    counts = counts_of([5, 5, 5, 5])
    lopsided = get_policy("sequential").place

    def one_rank(problem):
        placement = lopsided(problem)
        return type(placement).from_cells(
            np.zeros(problem.num_samples, dtype=np.int64),
            np.zeros(problem.num_samples, dtype=np.int64),
            placement.num_microbatches,
        )

    lpt = get_policy("lpt")
    monkeypatch.setattr(
        "balancer.planner.get_policy",
        lambda name: type(lpt)(name="lpt", place=one_rank, never_worse=True) if name == "lpt" else get_policy(name),
    )
    made = plan(counts, dp_size=2, tokens=100, policy="lpt")
    assert (made.policy, made.policy_used) == ("lpt", "sequential")
    assert made.note == "kept sequential: lpt simulates to 60 ns, sequential to 30 ns"
    assert made.makespan_ns == made.makespan_before_ns == 30


def test_where_lpt_finds_no_room_but_the_order_fits_the_order_is_kept(plan, counts_of) -> None:
    """Three cells of 26 are filled to the last token; best fit decreasing needs four, balanced sizes do not fit."""
    encoder_only = CostModel(
        stages=tuple(StageCost(forward=terms, backward=terms) for terms in (StageTerms(per_patch_ns=1.0), StageTerms()))
    )
    tokens = [9, 5, 12, 12, 13, 1, 6, 16, 4]
    made = plan(
        counts_of(tokens, patches=tokens[::-1]), tokens=26, num_microbatches=3, cost_model=encoder_only, policy="lpt"
    )
    assert made.policy_used == "sequential"
    assert made.note == "kept sequential: lpt found no room in its micro-batches"


def test_on_a_pipeline_more_microbatches_are_taken_where_they_are_faster(plan, counts_of) -> None:
    """In order needs three micro-batches of one; the least is two, which on three ranks is slower."""
    counts = counts_of([6, 5, 4], patches=[6, 5, 4])
    least = plan(counts, pp_size=3, tokens=10, num_microbatches=2)
    free = plan(counts, pp_size=3, tokens=10)
    assert free.makespan_ns <= free.makespan_before_ns
    assert free.makespan_ns <= least.makespan_ns


def test_balance_before_and_after_and_the_certificate_are_what_they_say(plan, counts_of) -> None:
    made = plan(counts_of([9, 9, 1, 1]), dp_size=2, tokens=20)
    assert made.imbalance_before == pytest.approx(1.8)
    assert made.imbalance_after == 1.0
    assert (made.makespan_before_ns, made.makespan_ns, made.lower_bound_ns) == (54, 30, 30)
    assert made.gap == 0.0
    assert made.fill == 0.5


def test_fill_counts_only_cells_that_hold_samples(plan, counts_of) -> None:
    made = plan(counts_of([5, 5]), dp_size=2, tokens=10, num_microbatches=3)
    assert made.fill == 0.5


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3), st.sampled_from([1, 2, 3]), st.data())
def test_the_lower_bound_holds_for_any_placement_with_any_backward(
    counts_of, tokens: list[int], dp_size: int, pp_size: int, data
) -> None:
    """Forward and backward out of proportion: the bound may not borrow one sample's forward for another's backward."""
    n, num_stages = len(tokens), max(pp_size, 2)
    coefficient = st.sampled_from([0.0, 1.0, 3.0, 10.0])
    terms = st.builds(StageTerms, per_patch_ns=coefficient, per_token_ns=coefficient, per_token_sq_ns=coefficient)
    stages = tuple(StageCost(forward=data.draw(terms), backward=data.draw(terms)) for _ in range(num_stages))
    encoder = StageCost(
        forward=StageTerms(per_patch_ns=data.draw(coefficient)),
        backward=StageTerms(per_full_sq_ns=data.draw(coefficient)),
    )
    patches = data.draw(st.lists(st.integers(0, 30), min_size=n, max_size=n))
    made = plan_step(
        counts_of(tokens, patches=patches),
        parallel=ParallelSpec.pipeline(dp_size=dp_size, pp_size=pp_size, num_microbatches=data.draw(st.integers(1, 4))),
        cost_model=CostModel(stages=(encoder, *stages[1:])),
        capacities=Capacities(tokens=10**6),
        policy=data.draw(st.sampled_from(policy_names())),
        schedule=data.draw(st.sampled_from(["1f1b", "gpipe"])),
    )
    assert made.lower_bound_ns <= min(made.makespan_ns, made.makespan_before_ns)


def test_a_heavy_tail_on_eight_ranks_comes_close_to_the_bound(plan) -> None:
    """The shape of real data: log-normal text and images; in order 20 % and more are lost, balanced next to nothing."""
    rng = np.random.default_rng(3)
    text = np.minimum(rng.lognormal(5, 1, 512).astype(np.int64) + 1, 3000)
    visual = np.where(rng.random(512) < 0.8, np.minimum(rng.lognormal(5, 1.2, 512).astype(np.int64) + 1, 4000), 0)
    counts = StepCounts(
        sample_ids=np.arange(512),
        llm_tokens=text + visual,
        label_tokens=text // 2,
        visual_tokens=visual,
        patches=visual * 4,
        num_items=(visual > 0).astype(np.int64),
        full_total_sq=(visual * 4) ** 2,
        window_total_sq=visual * 4 * 64,
    )
    encoder = EncoderDims(dim=1280, depth=32, mlp_dim=3420, num_full_layers=4, out_dim=2048)
    llm = LLMDims(dim=2048, depth=36, num_heads=16, num_kv_heads=2, mlp_dim=11008, vocab_size=150_000)
    cost_model = CostModel.from_dims(encoder, llm, llm_layers_per_stage=[36], flops_per_second=4e14)
    made = plan(counts, dp_size=8, tokens=16_384, patches=65_536, cost_model=cost_model)
    assert made.makespan_before_ns > 1.1 * made.lower_bound_ns
    assert made.gap < 0.02
    pipelined = plan(counts, dp_size=8, pp_size=2, tokens=16_384, cost_model=cost_model, num_microbatches=4)
    assert pipelined.makespan_ns < 0.95 * pipelined.makespan_before_ns


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 1),
        ("step", 1),
        ("epoch", 1),
        ("cursor", 8),
        ("policy", "sequential"),
        ("schedule", "gpipe"),
        ("num_microbatches", 1),
        ("min_num_microbatches", 2),
        ("num_microbatches_multiple", 2),
        ("meet", "microbatch"),
        ("dropped", ((3, "too long"),)),
    ],
)
def test_every_option_is_part_of_the_inputs_digest(plan, counts_of, field: str, value: object) -> None:
    counts = counts_of([5, 5])
    options = {"tokens": 10, "pp_size": 2, "policy": "lpt"}
    assert plan(counts, **options).inputs_digest != plan(counts, **(options | {field: value})).inputs_digest


def test_counts_capacities_layout_and_cost_model_are_part_of_the_inputs_digest(plan, counts_of) -> None:
    plans = [
        plan(counts_of([5, 5]), tokens=10),
        plan(counts_of([5, 5], sample_ids=[1, 0]), tokens=10),
        plan(counts_of([5, 4]), tokens=10),
        plan(counts_of([5, 5], patches=[4, 0]), tokens=10),
        plan(counts_of([5, 5]), tokens=11),
        plan(counts_of([5, 5]), tokens=10, patches=10),
        plan(counts_of([5, 5]), tokens=10, items=10),
        plan(counts_of([5, 5]), tokens=10, dp_size=2),
        plan(counts_of([5, 5]), tokens=10, cost_model=QUADRATIC),
    ]
    assert len({made.inputs_digest for made in plans}) == len(plans)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "magic"}, "'magic' does not exist; available: "),
        ({"schedule": "zb"}, "schedule 'zb' is not available; available: 1f1b, gpipe"),
        ({"min_num_microbatches": 0}, "both are at least 1"),
        ({"num_microbatches": 0}, "num_microbatches=0: a step has at least one"),
        (
            {"pp_size": 3, "cost_model": QUADRATIC},
            r"the cost model has 2 stages, the layout 3 \(encoder, llm, llm on pipeline ranks \[0, 1, 2\]\)",
        ),
        ({"pp_size": 2, "encoder": "spread", "cost_model": QUADRATIC_3}, "needs the schedule phased or nested"),
    ],
)
def test_options_that_do_not_go_together_are_refused(plan, counts_of, options: dict, message: str) -> None:
    with pytest.raises(BalancerError, match=message):
        plan(counts_of([5]), tokens=10, **options)
