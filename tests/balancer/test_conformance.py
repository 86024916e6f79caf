"""DESIGN's laws 1 to 4 over every registered policy and schedule: what a new one has to pass unseen."""

import hashlib
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import SUM_OF_ITEMS, StepCounts, sum_of_items
from balancer.errors import PlanError, ScheduleError
from balancer.layout import ParallelSpec
from balancer.plan import Capacities, StepPlan
from balancer.plan_check import verify
from balancer.planner import plan_step
from balancer.policies import get_policy, policy_names
from balancer.schedule import build_schedule, schedule_names
from balancer.simulate import simulate

EVERY_POLICY = pytest.mark.parametrize("policy", policy_names())
EVERY_BALANCER = pytest.mark.parametrize("policy", [name for name in policy_names() if get_policy(name).never_worse])
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", schedule_names())
TOKENS, PATCHES = 100, 399


@dataclass(frozen=True, kw_only=True)
class Case:
    counts: StepCounts
    parallel: ParallelSpec
    schedule: str
    capacities: Capacities
    cost_model: CostModel


def counts_from(draw: st.DrawFn) -> StepCounts:
    """Few or many samples, text only, giants at the capacity, samples with several media items."""
    n = draw(st.integers(1, 24))

    def column(largest: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(0, largest), min_size=n, max_size=n)), dtype=np.int64)

    num_items = np.maximum(column(6) - 3, 0)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_items)])
    # Some items have no patches at all: a video that was cut to nothing.
    item_patches = np.array(
        draw(st.lists(st.integers(0, PATCHES // 3), min_size=int(offsets[-1]), max_size=int(offsets[-1]))),
        dtype=np.int64,
    )
    tokens = np.maximum(column(TOKENS), 1)
    items = {
        "item_patches": item_patches,
        "item_visual_tokens": item_patches // 4,
        "item_full_sq": item_patches * item_patches,
        "item_window_sq": item_patches * 64,
    }
    sums = {SUM_OF_ITEMS[name]: sum_of_items(values, offsets) for name, values in items.items()}
    return StepCounts(
        sample_ids=np.array(draw(st.permutations(range(n)))) * 7,
        llm_tokens=tokens,
        label_tokens=tokens // 3,
        num_items=num_items,
        item_offsets=offsets,
        **sums,
        **items,
    )


def parallel_from(draw: st.DrawFn, schedule: str, num_microbatches: int | None) -> ParallelSpec:
    """Any layout that the schedule runs."""
    spread = schedule in {"nested", "phased"}
    return ParallelSpec.pipeline(
        dp_size=draw(st.integers(1, 5)),
        pp_size=draw(st.sampled_from([1, 2, 3])),
        encoder="spread" if spread else draw(st.sampled_from(["own", "shared", "none"])),
        num_chunks=draw(st.sampled_from([1, 2])) if schedule == "interleaved1f1b" else 1,
        num_microbatches=num_microbatches,
        meet=draw(st.sampled_from(["step", "step", "microbatch", "unit"])),
    )


@st.composite
def cases(draw: st.DrawFn, schedule: str | None = None) -> Case:
    """Any step on any layout, with and without patch and item limits."""
    name = draw(st.sampled_from(schedule_names())) if schedule is None else schedule
    counts = counts_from(draw)
    parallel = parallel_from(draw, name, draw(st.sampled_from([None, None, 1, 2, 5, 24])))
    try:
        for num_microbatches in (1, 2, 6, 24):
            build_schedule(name, stage_ranks=parallel.stage_ranks, num_microbatches=num_microbatches)
    except ScheduleError:
        reject()
    encoder = StageTerms(constant_ns=draw(st.sampled_from([0, 50])), per_patch_ns=2.5, per_full_sq_ns=0.01)
    llm = StageTerms(per_token_ns=7.3, per_token_sq_ns=0.1)
    terms = [encoder if domain == "encoder" else llm for domain in parallel.domain_of_stage]
    return Case(
        counts=counts,
        parallel=parallel,
        schedule=name,
        capacities=Capacities(
            tokens=draw(st.sampled_from([TOKENS, 3 * TOKENS])),
            patches=draw(st.sampled_from([None, PATCHES])),
            items=draw(st.sampled_from([None, 3, 5])),
        ),
        cost_model=CostModel(stages=tuple(StageCost(forward=term, backward=term.scaled(2.0)) for term in terms)),
    )


def plan_of(case: Case, policy: str) -> StepPlan | None:
    """The plan, or None where a fixed number of micro-batches is refused with its arithmetic."""
    try:
        return plan_step(
            case.counts,
            parallel=case.parallel,
            cost_model=case.cost_model,
            capacities=case.capacities,
            schedule=case.schedule,
            policy=policy,
        )
    except PlanError as error:
        if case.parallel.num_microbatches is None or "fits them with num_microbatches=" not in str(error):
            raise
        return None


def cells(plan: StepPlan) -> itertools.product:
    return itertools.product(range(plan.dp_size), range(plan.num_microbatches))


@EVERY_POLICY
@settings(max_examples=25)
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
@settings(max_examples=25)
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
@pytest.mark.parametrize("schedule", ["nested", "phased"])
@settings(max_examples=40)
@given(data=st.data())
def test_law_2_no_encoder_act_exceeds_a_capacity(policy: str, schedule: str, data: st.DataObject) -> None:
    case = data.draw(cases(schedule=schedule))
    plan = plan_of(case, policy)
    if plan is None:
        return
    unit_size = plan.num_pipeline_ranks
    entry = plan.dp_rank[plan.item_row].astype(np.int64) * plan.num_microbatches + plan.unit * unit_size
    act = entry + plan.encoder_rank
    assert np.bincount(act).max(initial=0) <= (case.capacities.items or np.inf)
    assert plan.encoder_patches.max() <= (case.capacities.patches or np.inf)


@EVERY_POLICY
@settings(max_examples=25)
@given(case=cases())
def test_law_2_a_refused_number_of_microbatches_names_one_that_works(policy: str, case: Case) -> None:
    fixed = case.parallel.num_microbatches
    if fixed is None:
        return
    options = {
        "cost_model": case.cost_model,
        "capacities": case.capacities,
        "policy": policy,
        "schedule": case.schedule,
    }
    try:
        plan_step(case.counts, parallel=case.parallel, **options)
    except PlanError as error:
        suggested = int(str(error).split("fits them with num_microbatches=")[1].split(":")[0])
        assert suggested > fixed
        parallel = replace(case.parallel, num_microbatches=suggested)
        assert plan_step(case.counts, parallel=parallel, **options).num_microbatches == suggested


@EVERY_POLICY
@settings(max_examples=25)
@given(case=cases())
def test_law_3_the_number_of_microbatches_is_one_number_for_all_ranks(policy: str, case: Case) -> None:
    plan = plan_of(case, policy)
    if plan is None:
        return
    assert plan.num_microbatches == (case.parallel.num_microbatches or plan.num_microbatches)
    assert plan.num_samples.shape == (case.parallel.dp_size, plan.num_microbatches)
    if case.parallel.num_microbatches is None:
        # Free M is not larger than some rank needs.
        assert (plan.num_samples > 0).any(axis=0).all()


@EVERY_POLICY
@settings(max_examples=25)
@given(case=cases())
def test_law_3_no_rank_has_an_empty_microbatch_that_its_samples_could_fill(policy: str, case: Case) -> None:
    plan = plan_of(case, policy)
    if plan is None or plan.routed:
        return
    held = plan.num_samples.sum(axis=1)
    assert ((plan.num_samples > 0).sum(axis=1) == np.minimum(held, plan.num_microbatches)).all()
    if case.parallel.meet != "step" and len(case.counts) >= plan.num_samples.size:
        assert (plan.num_samples > 0).all()


@EVERY_POLICY
@EVERY_SCHEDULE
@given(data=st.data())
@settings(max_examples=12)
def test_law_3_every_replica_runs_its_schedule_to_the_end_in_the_planned_time(
    policy: str, schedule: str, data: st.DataObject
) -> None:
    case = data.draw(cases(schedule))
    plan = plan_of(case, policy)
    if plan is None:
        return
    complete = build_schedule(schedule, stage_ranks=case.parallel.stage_ranks, num_microbatches=plan.num_microbatches)
    for dp_rank in range(plan.dp_size):
        timeline = simulate(
            complete.without(plan.absent(dp_rank)),
            forward_ms=plan.forward_ns[dp_rank].T,
            backward_ms=plan.backward_ns[dp_rank].T,
            weight_ms=plan.weight_ns[dp_rank].T,
            routed=plan.routed,
        )
        assert timeline.makespan_ms == plan.rank_makespan_ns[dp_rank]
    if case.parallel.meet == "step":
        assert plan.makespan_ns == plan.rank_makespan_ns.max()
    else:
        assert plan.makespan_ns >= plan.rank_makespan_ns.max()


@EVERY_POLICY
@settings(max_examples=25)
@given(case=cases())
def test_law_4_a_plan_is_a_pure_function_of_its_inputs(policy: str, case: Case) -> None:
    first, second = plan_of(case, policy), plan_of(case, policy)
    if first is None or second is None:
        assert first is second
        return
    assert (first.inputs_digest, first.digest) == (second.inputs_digest, second.digest)
    assert first.to_json() == second.to_json()


@EVERY_POLICY
@settings(max_examples=25)
@given(case=cases())
def test_law_9_no_plan_beats_its_lower_bound(policy: str, case: Case) -> None:
    plan = plan_of(case, policy)
    if plan is not None:
        assert plan.lower_bound_ns <= plan.makespan_ns
        if case.parallel.num_microbatches is not None and "sequential needs" not in plan.note:
            assert plan.lower_bound_ns <= plan.makespan_before_ns


@EVERY_BALANCER
@settings(max_examples=25)
@given(case=cases())
def test_no_balancer_is_ever_slower_than_sequential(policy: str, case: Case) -> None:
    """Whenever sequential can run with the same options, on any layout and schedule, wherever ranks meet."""
    balanced, plain = plan_of(case, policy), plan_of(case, "sequential")
    if balanced is None:
        # The balanced split has more freedom: what fits in order also fits out of order.
        assert plain is None
    elif plain is not None:
        assert balanced.makespan_ns <= plain.makespan_ns
        assert balanced.makespan_before_ns == plain.makespan_ns


@settings(max_examples=25)
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
from balancer.layout import ParallelSpec
from balancer.plan import Capacities
from balancer.planner import plan_step
from balancer.policies import policy_names
ids = np.arange(64)
columns = {name: (ids * 7919 + 13 * place) % 97 + 1 for place, name in enumerate(COUNT_COLUMNS)}
columns["label_tokens"] = columns["llm_tokens"] // 2
model = CostModel.from_dims(
    EncoderDims(dim=32, depth=2, mlp_dim=64, num_full_layers=1, out_dim=48),
    LLMDims(dim=48, depth=4, num_heads=4, num_kv_heads=2, mlp_dim=96, vocab_size=264),
    llm_layers_per_stage=[2, 2],
)
for policy in policy_names():
    plan = plan_step(
        StepCounts(sample_ids=ids, **columns), parallel=ParallelSpec.pipeline(dp_size=4, pp_size=3), cost_model=model,
        capacities=Capacities(tokens=400, patches=500), policy=policy,
    )
    print(plan.inputs_digest, plan.digest)
"""


def test_law_4_another_process_with_another_hash_seed_derives_the_same_plans() -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        code = f"import sys; sys.path[:0] = {sys.path!r}\n{DIGESTS}"
        environment = {"PYTHONHASHSEED": hash_seed, "PATH": "", "OMP_NUM_THREADS": "1", "HOME": "/nonexistent"}
        if "NUMBA_CACHE_DIR" in os.environ:  # two more processes that compile every kernel would say nothing new
            environment["NUMBA_CACHE_DIR"] = os.environ["NUMBA_CACHE_DIR"]
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        digests.add(hashlib.sha256(done.stdout.encode()).hexdigest())
        assert len(done.stdout.split()) == 2 * len(policy_names())
    assert len(digests) == 1
