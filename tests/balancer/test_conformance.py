"""DESIGN's laws 1 to 4 over every registered policy and schedule: what a new one has to pass unseen."""

import hashlib
import itertools
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from balancer.errors import PlanError
from balancer.layout import Layout
from balancer.plan import Capacities, StepPlan, verify
from balancer.planner import plan_step
from balancer.policies import policy_names
from balancer.schedule import build_schedule, schedule_names
from balancer.simulate import simulate

EVERY_POLICY = pytest.mark.parametrize("policy", policy_names())
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", schedule_names())
TOKENS, PATCHES = 100, 400


@dataclass(frozen=True, kw_only=True)
class Case:
    counts: StepCounts
    layout: Layout
    capacities: Capacities
    cost_model: CostModel
    num_microbatches: int | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any step: few or many samples, text only, giants at the capacity, with and without patch and item limits."""
    n = draw(st.integers(1, 24))

    def column(largest: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(0, largest), min_size=n, max_size=n)), dtype=np.int64)

    patches = column(PATCHES) * column(1)
    tokens = np.maximum(column(TOKENS), 1)
    counts = StepCounts(
        sample_ids=np.array(draw(st.permutations(range(n)))) * 7,
        llm_tokens=tokens,
        label_tokens=tokens // 3,
        visual_tokens=np.minimum(patches // 4, tokens),
        patches=patches,
        num_items=(patches > 0).astype(np.int64),
        full_total_sq=patches * patches,
        window_total_sq=patches * 64,
    )
    pp_size = draw(st.sampled_from([1, 2, 3]))
    encoder = StageTerms(constant_ns=draw(st.sampled_from([0, 50])), per_patch_ns=2.5, per_full_sq_ns=0.01)
    llm = StageTerms(per_token_ns=7.3, per_token_sq_ns=0.1)
    stages = [encoder, *[llm] * max(pp_size - 1, 1)]
    return Case(
        counts=counts,
        layout=Layout(dp_size=draw(st.integers(1, 5)), pp_size=pp_size),
        capacities=Capacities(
            tokens=draw(st.sampled_from([TOKENS, 3 * TOKENS])),
            patches=draw(st.sampled_from([None, PATCHES])),
            items=draw(st.sampled_from([None, 1, 3])),
        ),
        cost_model=CostModel(stages=tuple(StageCost(forward=term, backward=term.scaled(2.0)) for term in stages)),
        num_microbatches=draw(st.sampled_from([None, None, 1, 2, 5, 24])),
    )


def plan_of(case: Case, policy: str, schedule: str = "1f1b") -> StepPlan | None:
    """The plan, or None where a fixed number of micro-batches is refused with its arithmetic."""
    try:
        return plan_step(
            case.counts,
            layout=case.layout,
            cost_model=case.cost_model,
            capacities=case.capacities,
            schedule=schedule,
            policy=policy,
            num_microbatches=case.num_microbatches,
        )
    except PlanError as error:
        if case.num_microbatches is None or "fits them with num_microbatches=" not in str(error):
            raise
        return None


def cells(plan: StepPlan) -> itertools.product:
    return itertools.product(range(plan.dp_size), range(plan.num_microbatches))


@EVERY_POLICY
@given(case=cases())
def test_law_1_every_sample_is_planned_exactly_once_and_all_counts_are_kept(policy: str, case: Case) -> None:
    plan = plan_of(case, policy)
    if plan is None:
        return
    planned = [sample for cell in cells(plan) for sample in plan.members(*cell).tolist()]
    assert sorted(planned) == sorted(case.counts.sample_ids.tolist())
    for name in ("llm_tokens", "label_tokens", "patches", "visual_tokens"):
        assert getattr(plan, name).sum() == getattr(case.counts, name).sum()
    assert plan.num_samples.sum() == len(case.counts)
    verify(plan, case.counts, case.capacities)


@EVERY_POLICY
@given(case=cases())
def test_law_2_no_cell_exceeds_a_capacity(policy: str, case: Case) -> None:
    plan = plan_of(case, policy)
    if plan is None:
        return
    row = {int(sample): index for index, sample in enumerate(case.counts.sample_ids)}
    for cell in cells(plan):
        rows = [row[sample] for sample in plan.members(*cell).tolist()]
        assert case.counts.llm_tokens[rows].sum() <= case.capacities.tokens
        assert case.counts.patches[rows].sum() <= (case.capacities.patches or np.inf)
        assert case.counts.num_items[rows].sum() <= (case.capacities.items or np.inf)


@EVERY_POLICY
@given(case=cases())
def test_law_2_a_refused_number_of_microbatches_names_one_that_works(policy: str, case: Case) -> None:
    if case.num_microbatches is None:
        return
    options = {"layout": case.layout, "cost_model": case.cost_model, "capacities": case.capacities, "policy": policy}
    try:
        plan_step(case.counts, num_microbatches=case.num_microbatches, **options)
    except PlanError as error:
        suggested = int(str(error).split("fits them with num_microbatches=")[1].split(":")[0])
        assert suggested > case.num_microbatches
        assert plan_step(case.counts, num_microbatches=suggested, **options).num_microbatches == suggested


@EVERY_POLICY
@given(case=cases())
def test_law_3_the_number_of_microbatches_is_one_number_for_all_ranks(policy: str, case: Case) -> None:
    plan = plan_of(case, policy)
    if plan is None:
        return
    assert plan.num_microbatches == (case.num_microbatches or plan.num_microbatches)
    assert plan.num_samples.shape == (case.layout.dp_size, plan.num_microbatches)
    if case.num_microbatches is None:
        # Free M is not larger than some rank needs.
        assert (plan.num_samples > 0).any(axis=0).all()


@EVERY_POLICY
@EVERY_SCHEDULE
@given(case=cases())
@settings(max_examples=40)
def test_law_3_every_replica_runs_its_schedule_to_the_end_in_the_planned_time(
    policy: str, schedule: str, case: Case
) -> None:
    plan = plan_of(case, policy, schedule)
    if plan is None:
        return
    complete = build_schedule(schedule, stage_ranks=case.layout.stage_ranks(), num_microbatches=plan.num_microbatches)
    for dp_rank in range(plan.dp_size):
        timeline = simulate(
            complete.without(plan.absent(dp_rank)), plan.forward_ns[dp_rank].T, plan.backward_ns[dp_rank].T
        )
        assert timeline.makespan_ms == plan.rank_makespan_ns[dp_rank]
    assert plan.makespan_ns == plan.rank_makespan_ns.max()


@EVERY_POLICY
@given(case=cases())
def test_law_4_a_plan_is_a_pure_function_of_its_inputs(policy: str, case: Case) -> None:
    first, second = plan_of(case, policy), plan_of(case, policy)
    if first is None or second is None:
        assert first is second
        return
    assert (first.inputs_digest, first.digest) == (second.inputs_digest, second.digest)
    assert first.to_json() == second.to_json()


@EVERY_POLICY
@given(case=cases())
def test_law_9_no_plan_beats_its_lower_bound(policy: str, case: Case) -> None:
    plan = plan_of(case, policy)
    if plan is not None:
        assert plan.lower_bound_ns <= plan.makespan_ns
        assert plan.lower_bound_ns <= plan.makespan_before_ns


@given(case=cases())
def test_lpt_is_never_slower_than_sequential(case: Case) -> None:
    """Whenever sequential can run with the same options, on any layout and schedule."""
    balanced, plain = plan_of(case, "lpt"), plan_of(case, "sequential")
    if balanced is None:
        # The balanced split has more freedom: what fits in order also fits out of order.
        assert plain is None
    elif plain is not None:
        assert balanced.makespan_ns <= plain.makespan_ns
        assert balanced.makespan_before_ns == plain.makespan_ns


@given(case=cases())
def test_sequential_emits_the_samples_in_their_order(case: Case) -> None:
    plan = plan_of(case, "sequential")
    if plan is not None:
        emitted = [sample for cell in cells(plan) for sample in plan.members(*cell).tolist()]
        assert emitted == case.counts.sample_ids.tolist()


DIGESTS = """
import numpy as np
from balancer.cost_model import CostModel, EncoderDims, LLMDims
from balancer.counts import COUNT_COLUMNS, StepCounts
from balancer.layout import Layout
from balancer.plan import Capacities
from balancer.planner import plan_step
ids = np.arange(64)
columns = {name: (ids * 7919 + 13 * place) % 97 + 1 for place, name in enumerate(COUNT_COLUMNS)}
model = CostModel.from_dims(
    EncoderDims(dim=32, depth=2, mlp_dim=64, num_full_layers=1, out_dim=48),
    LLMDims(dim=48, depth=4, num_heads=4, num_kv_heads=2, mlp_dim=96, vocab_size=264),
    llm_layers_per_stage=[2, 2],
)
for policy in ("sequential", "length_grouped", "lpt"):
    plan = plan_step(
        StepCounts(sample_ids=ids, **columns), layout=Layout(dp_size=4, pp_size=3), cost_model=model,
        capacities=Capacities(tokens=400, patches=500), policy=policy,
    )
    print(plan.inputs_digest, plan.digest)
"""


def test_law_4_another_process_with_another_hash_seed_derives_the_same_plans() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        code = f"import sys; sys.path[:0] = {sys.path!r}\n{DIGESTS}"
        environment = {"PYTHONHASHSEED": hash_seed, "PATH": "", "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        digests.add(hashlib.sha256(done.stdout.encode()).hexdigest())
        assert len(done.stdout.split()) == 6
    assert len(digests) == 1
