"""The plan as a document: read back equal, tamper-evident, and checked against the counts it was made from."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from balancer.errors import PlanError, PlanMismatchError
from balancer.layout import Layout
from balancer.plan import ARRAY_FIELDS, Capacities, StepPlan, digest_fields, require_same, verify
from balancer.planner import plan_step

CAPACITIES = Capacities(tokens=10, patches=100)


@pytest.fixture
def counts(counts_of):
    return counts_of([4, 9, 1, 6, 3], patches=[8, 0, 0, 40, 0], sample_ids=[50, 40, 30, 20, 10])


@pytest.fixture
def plan(counts, plain_model) -> StepPlan:
    return plan_step(
        counts,
        layout=Layout(dp_size=2, pp_size=2),
        cost_model=plain_model(2),
        capacities=CAPACITIES,
        step=7,
        epoch=1,
        cursor=35,
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
        ("[1]", "step plan of format list; this version reads format 1"),
        ('{"format_version": 9}', "step plan of format 9; this version reads format 1"),
        ('{"format_version": 1}', "missing or unknown fields"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StepPlan.from_json(text)


@pytest.mark.parametrize("name", sorted(ARRAY_FIELDS))
def test_every_array_is_part_of_the_digest(plan: StepPlan, name: str) -> None:
    assert tampered(plan, **{name: getattr(plan, name) + 1}).digest != plan.digest


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
