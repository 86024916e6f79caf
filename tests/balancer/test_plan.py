"""The plan as a document: read back equal, tamper-evident, and checked against the counts it was made from."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from balancer.cost_model import CostModel, StageCost, StageMemory, StageTerms
from balancer.counts import StepCounts
from balancer.errors import PlanError, PlanMismatchError
from balancer.layout import ParallelSpec
from balancer.plan import ARRAY_FIELDS, Capacities, StepPlan, digest_fields, require_same
from balancer.plan_check import verify
from balancer.planner import plan_step

CAPACITIES = Capacities(tokens=10, patches=100)


@pytest.fixture
def counts(counts_of):
    return counts_of([4, 9, 1, 6, 3], patches=[8, 0, 0, 40, 0], sample_ids=[50, 40, 30, 20, 10])


@pytest.fixture
def plan(counts, plain_model) -> StepPlan:
    return plan_step(
        counts,
        parallel=ParallelSpec.pipeline(dp_size=2, pp_size=2),
        cost_model=plain_model(2),
        capacities=CAPACITIES,
        step=7,
        epoch=1,
        cursor=35,
    )


@pytest.fixture
def spread_counts() -> StepCounts:
    """Four samples with 2, 0, 1, 3 media items."""
    patches = np.array([8, 4, 40, 4, 4, 8])
    sums = np.array([12, 0, 40, 16])
    return StepCounts(
        sample_ids=np.array([5, 4, 3, 2]),
        llm_tokens=np.array([4, 9, 10, 6]),
        label_tokens=np.array([1, 2, 3, 4]),
        visual_tokens=sums // 4,
        patches=sums,
        num_items=np.array([2, 0, 1, 3]),
        full_total_sq=sums,
        window_total_sq=sums,
        item_offsets=np.array([0, 2, 2, 3, 6]),
        item_patches=patches,
        item_visual_tokens=patches // 4,
        item_full_sq=patches,
        item_window_sq=patches,
    )


@pytest.fixture
def spread_plan(spread_counts: StepCounts, plain_model) -> StepPlan:
    """The encoder on both pipeline ranks, four micro-batches: two units."""
    return plan_step(
        spread_counts,
        parallel=ParallelSpec.pipeline(pp_size=2, encoder="spread", num_microbatches=4),
        cost_model=plain_model(3),
        capacities=CAPACITIES,
        schedule="nested",
        policy="sequential",
        dropped=((9, "oversize: 20 tokens"),),
    )


def tampered(plan: StepPlan, **changed: object) -> StepPlan:
    return replace(plan, digest="", **changed)


def test_a_plan_reads_back_equal(plan: StepPlan) -> None:
    loaded = StepPlan.from_json(plan.to_json())
    for field in fields(StepPlan):
        before, after = getattr(plan, field.name), getattr(loaded, field.name)
        if field.name in ARRAY_FIELDS:
            assert before.dtype == after.dtype
            np.testing.assert_array_equal(before, after)
        else:
            assert before == after
    assert "\n" not in plan.to_json()


def test_members_are_sample_ids_in_slot_order(plan: StepPlan) -> None:
    swapped = tampered(plan, slot=np.where(plan.slot == 0, 1, 0)) if plan.num_samples.max() == 2 else plan
    for rank in range(plan.dp_size):
        for microbatch in range(plan.num_microbatches):
            rows = plan.positions(rank, microbatch)
            assert plan.slot[rows].tolist() == list(range(len(rows)))
            assert plan.members(rank, microbatch).tolist() == plan.sample_ids[rows].tolist()
            if plan.num_samples[rank, microbatch] == 2:
                assert swapped.members(rank, microbatch).tolist() == plan.members(rank, microbatch)[::-1].tolist()


def test_a_cell_outside_the_plan_is_refused(plan: StepPlan) -> None:
    with pytest.raises(PlanError, match=r"cell \(2, 0\) is outside a plan of 2 ranks x"):
        plan.members(2, 0)


def test_absent_names_encoders_without_patches(plan: StepPlan) -> None:
    for rank in range(plan.dp_size):
        text_only = {(0, int(mb)) for mb in np.flatnonzero((plan.patches[rank] == 0) & (plan.num_samples[rank] > 0))}
        empty = {(stage, int(mb)) for mb in np.flatnonzero(plan.num_samples[rank] == 0) for stage in range(2)}
        assert plan.absent(rank) == text_only | empty
    assert any(plan.absent(rank) for rank in range(plan.dp_size))


def test_plan_arrays_are_read_only(plan: StepPlan) -> None:
    with pytest.raises(ValueError, match="read-only"):
        plan.dp_rank[0] = 1


def test_a_changed_file_does_not_match_its_digest(plan: StepPlan) -> None:
    content = json.loads(plan.to_json())
    content["dp_rank"][0] = 1 - content["dp_rank"][0]
    with pytest.raises(PlanError, match="step plan of step 7 does not match its digest"):
        StepPlan.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a step plan"),
        ("[1]", "step plan of format list; this version reads format 2"),
        ('{"format_version": 1}', "step plan of format 1; this version reads format 2"),
        ('{"format_version": 9}', "step plan of format 9; this version reads format 2"),
        ('{"format_version": 2}', "missing or unknown fields"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StepPlan.from_json(text)


@pytest.mark.parametrize("name", sorted(ARRAY_FIELDS))
def test_every_array_is_part_of_the_digest(spread_plan: StepPlan, name: str) -> None:
    assert tampered(spread_plan, **{name: getattr(spread_plan, name) + 1}).digest != spread_plan.digest


@pytest.mark.parametrize(
    "changed", [{"binding": "none"}, {"meet": "unit"}, {"dropped": ((3, "too long"),)}, {"routed": True}]
)
def test_judgement_and_dropped_samples_are_part_of_the_digest(plan: StepPlan, changed: dict[str, object]) -> None:
    assert plan.binding != "none"
    assert tampered(plan, **changed).digest != plan.digest


def test_a_bound_that_is_not_the_largest_of_its_parts_is_refused(plan: StepPlan) -> None:
    with pytest.raises(PlanError, match="lower_bound_ns=1 is not the largest of the plan's bounds"):
        tampered(plan, lower_bound_ns=1)


def test_an_unknown_binding_is_refused(plan: StepPlan) -> None:
    with pytest.raises(PlanError, match="binding='weather' does not exist; available: none, data, stage split"):
        tampered(plan, binding="weather")


def test_the_plan_digest_does_not_cover_its_inputs(plan: StepPlan) -> None:
    """So that a mismatch says which of the two differs."""
    assert tampered(plan, inputs_digest="other").digest == plan.digest


def test_digests_tell_names_shapes_and_values_apart() -> None:
    ones = np.ones(4, dtype=np.int64)
    named = [{"a": ones}, {"b": ones}, {"a": ones.reshape(2, 2)}, {"a": 1}, {"a": "1"}, {"a": ones * 2}, {}]
    assert len({digest_fields(fields) for fields in named}) == len(named)
    assert digest_fields({"a": ones}) == digest_fields({"a": ones.astype(np.int32)})
    big_endian = ones.astype(">i8")
    assert digest_fields({"a": ones}) == digest_fields({"a": big_endian})
    with pytest.raises(PlanError, match=r"a=0\.5 cannot be digested"):
        digest_fields({"a": 0.5})


def test_a_good_plan_verifies(plan: StepPlan, counts) -> None:
    verify(plan, counts, CAPACITIES)


def test_verify_finds_a_lost_and_a_foreign_sample(plan: StepPlan, counts) -> None:
    ids = plan.sample_ids.copy()
    ids[0] = 99
    with pytest.raises(PlanError, match=r"holds 5 samples for 5 selected: missing \[50\], foreign \[99\]"):
        verify(tampered(plan, sample_ids=ids), counts, CAPACITIES)


def test_verify_finds_a_sample_that_moved_without_its_sums(plan: StepPlan, counts) -> None:
    with pytest.raises(PlanError, match=r"slots|do not add up"):
        verify(tampered(plan, dp_rank=1 - plan.dp_rank), counts, CAPACITIES)


def test_verify_finds_doubled_slots_and_samples_in_no_cell(plan: StepPlan, counts) -> None:
    with pytest.raises(PlanError, match=r"slots .* are not 0 to"):
        verify(tampered(plan, slot=np.ones_like(plan.slot)), counts, CAPACITIES)
    with pytest.raises(PlanError, match=r"slots \[\]|are in no cell|are not 0 to"):
        verify(tampered(plan, microbatch=plan.microbatch + 1), counts, CAPACITIES)


def test_verify_finds_wrong_sums(plan: StepPlan, counts) -> None:
    with pytest.raises(PlanError, match="label_tokens per cell do not add up"):
        verify(tampered(plan, label_tokens=plan.label_tokens + 1), counts, CAPACITIES)


def test_verify_finds_a_cell_above_its_capacity(plan: StepPlan, counts) -> None:
    with pytest.raises(PlanError, match=r"holds 9 tokens, the capacity is 8|holds 10 tokens, the capacity is 8"):
        verify(plan, counts, Capacities(tokens=8))
    with pytest.raises(PlanError, match="patches, the capacity is 7"):
        verify(plan, counts, Capacities(tokens=10, patches=7))


def test_fields_of_another_shape_are_refused(plan: StepPlan) -> None:
    with pytest.raises(PlanError, match=r"plan field slot has shape \(2,\); expected \(5,\)"):
        tampered(plan, slot=plan.slot[:2])


@pytest.mark.parametrize("limits", [{"tokens": 0}, {"tokens": 1, "patches": 0}, {"tokens": 1, "items": -1}])
def test_a_capacity_below_one_is_refused(limits: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="a capacity is at least 1"):
        Capacities(**limits)


def test_du_01_equal_digests_pass_and_a_tampered_one_is_named() -> None:
    require_same([("in", "out")] * 3)
    with pytest.raises(
        PlanMismatchError, match=r"ranks \[2\] planned from other inputs than rank 0 \(other instead of in\)"
    ):
        require_same([("in", "out"), ("in", "out"), ("other", "out")])
    with pytest.raises(PlanMismatchError, match=r"ranks \[1, 2\] made another plan of the same inputs .* same version"):
        require_same([("in", "out"), ("in", "x"), ("in", "x")])


def test_every_media_item_has_an_encoder_rank_and_a_unit(spread_plan: StepPlan, spread_counts: StepCounts) -> None:
    assert spread_plan.microbatch.tolist() == [0, 1, 2, 3]
    assert spread_plan.item_row.tolist() == [0, 0, 2, 3, 3, 3]
    assert spread_plan.unit.tolist() == [0, 0, 1, 1, 1, 1]
    assert spread_plan.encoder_rank.tolist() == [0, 0, 0, 1, 1, 1]
    assert spread_plan.encoder_patches.tolist() == [[12, 0, 40, 16]]
    verify(spread_plan, spread_counts, CAPACITIES)
    assert StepPlan.from_json(spread_plan.to_json()).digest == spread_plan.digest


def test_ps_10_items_may_be_encoded_on_any_rank_of_their_unit(spread_plan: StepPlan, spread_counts) -> None:
    """Uneven shares and none at all are legal; what counts is that every item has exactly one act."""
    routed = tampered(
        spread_plan,
        routed=True,
        encoder_rank=np.array([1, 1, 0, 1, 1, 0], dtype=np.int32),
        encoder_patches=np.array([[0, 12, 48, 8]]),
        rank_makespan_ns=np.array([225]),
        makespan_ns=225,
        stage_work_ns=np.array([207, 135]),
    )
    verify(routed, spread_counts, CAPACITIES)
    assert routed.absent(0) == {(0, 0)}
    with pytest.raises(PlanError, match="rank 0, micro-batch 2 holds 48 patches in the encoder, the capacity is 44"):
        verify(routed, spread_counts, Capacities(tokens=10, patches=44))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"unit": [1, 0, 1, 1, 1, 1]}, "item 0 of sample 5 in micro-batch 0 is encoded on rank 0 in unit 1"),
        ({"encoder_rank": [0, 0, 0, 2, 1, 1]}, "item 3 of sample 2 in micro-batch 3 is encoded on rank 2"),
        ({"encoder_rank": [0, 1, 0, 1, 1, 1]}, "item 1 of sample 5 in micro-batch 0 is encoded on rank 1"),
        ({"item_row": [0, 2, 2, 3, 3, 3]}, "places 6 media items in the encoder, its samples hold 6"),
        ({"encoder_patches": [[12, 0, 40, 17]]}, "routes no item, yet encoder_patches differ"),
        ({"encoder_patches": [[12, 0, 40, 17]], "routed": True}, "encoder_patches per act do not add up"),
    ],
)
def test_verify_finds_an_item_that_no_encoder_act_holds(spread_plan, spread_counts, changed, message) -> None:
    with pytest.raises(PlanError, match=message):
        verify(tampered(spread_plan, **changed), spread_counts, CAPACITIES)


def test_samples_may_be_split_over_a_group_of_ranks_that_exists(plan: StepPlan, counts) -> None:
    assert plan.cp_degree.tolist() == [1] * 5
    assert plan.cp_first_rank.tolist() == plan.dp_rank.tolist()
    verify(tampered(plan, cp_degree=[2] * 5, cp_first_rank=[0] * 5), counts, CAPACITIES)
    with pytest.raises(PlanError, match=r"sample 50 on rank \d is split over 3 ranks from 0 of 2"):
        verify(tampered(plan, cp_degree=[3] * 5, cp_first_rank=[0] * 5), counts, CAPACITIES)
    with pytest.raises(PlanError, match="is split over 0 ranks"):
        verify(tampered(plan, cp_degree=[0] * 5), counts, CAPACITIES)
    with pytest.raises(PlanError, match="is split over 1 ranks"):
        verify(tampered(plan, cp_first_rank=1 - plan.dp_rank), counts, CAPACITIES)


def test_verify_finds_a_sample_that_is_planned_and_dropped(plan: StepPlan, counts) -> None:
    with pytest.raises(PlanError, match=r"samples \[40\] are planned and dropped"):
        verify(tampered(plan, dropped=((40, "damaged"),)), counts, CAPACITIES)


def test_verify_finds_a_bound_above_what_it_bounds(plan: StepPlan, counts) -> None:
    above = plan.makespan_ns + 1
    with pytest.raises(PlanError, match=r"its lower bound of .* is above its own makespan"):
        verify(tampered(plan, pipeline_bound_ns=above, lower_bound_ns=above), counts, CAPACITIES)
    with pytest.raises(PlanError, match="a replica takes longer by itself than the step"):
        verify(tampered(plan, rank_makespan_ns=plan.rank_makespan_ns + above), counts, CAPACITIES)


def memory_model(constant_bytes: int = 0) -> CostModel:
    term = StageTerms(per_token_ns=1.0)
    return CostModel(
        stages=(StageCost(forward=term, backward=term),) * 2,
        memory=(
            StageMemory(per_patch_bytes=3),
            StageMemory(per_token_bytes=5, per_patch_bytes=1, constant_bytes=constant_bytes),
        ),
    )


def test_modelled_bytes_are_a_hard_limit_on_every_stage(counts) -> None:
    limits = Capacities(tokens=100, activation_bytes=120)
    parallel = ParallelSpec.pipeline(dp_size=1, pp_size=1)
    for constant, least in ((0, 2), (30, 3)):
        model = memory_model(constant)
        if constant == 0:
            made = plan_step(counts, parallel=parallel, cost_model=model, capacities=limits)
            verify(made, counts, limits, model)
            assert made.num_microbatches >= least
            with pytest.raises(PlanError, match="activation_bytes of stage 0, the capacity is 119"):
                verify(made, counts, Capacities(tokens=100, activation_bytes=119), model)
        else:
            roomy = Capacities(tokens=100, activation_bytes=150)
            made = plan_step(counts, parallel=parallel, cost_model=model, capacities=roomy)
            verify(made, counts, roomy, model)


def test_bytes_that_no_model_knows_or_that_nothing_fits_are_refused(counts, plain_model) -> None:
    with pytest.raises(PlanError, match="needs a cost model with memory terms"):
        Capacities(tokens=10, activation_bytes=5).table(counts, plain_model(2))
    with pytest.raises(PlanError, match="stage 1 takes 30 bytes for a micro-batch without any sample"):
        Capacities(tokens=10, activation_bytes=30).table(counts, memory_model(30))


def test_stages_that_never_fill_up_first_are_no_capacity_of_their_own(counts) -> None:
    term = StageTerms(per_token_ns=1.0)
    model = CostModel(
        stages=(StageCost(forward=term, backward=term),) * 3,
        memory=(StageMemory(per_patch_bytes=1), StageMemory(per_token_bytes=4), StageMemory(per_token_bytes=3)),
    )
    limits, sizes = Capacities(tokens=10, activation_bytes=500).table(counts, model)
    assert [name for name, _ in limits] == ["tokens", "activation_bytes of stage 1", "activation_bytes of stage 0"]
    assert sizes.shape == (5, 3)
