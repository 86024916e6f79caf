"""No sum of a plan wraps: what leaves 64 bits is refused at the door, with the column and the sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import StepCounts
from balancer.errors import BalancerError, PlanError
from balancer.exact_sums import MAX_TOTAL, exact_total
from balancer.layout import ParallelSpec
from balancer.plan import Capacities
from balancer.planner import plan_step
from balancer.policies import policy_names
from balancer.token_steps import TokenStepSelector


def model_of(per_token_ns: float = 1.0, constant_ns: float = 0.0) -> CostModel:
    term = StageTerms(per_token_ns=per_token_ns, constant_ns=constant_ns)
    return CostModel(
        stages=(StageCost(forward=StageTerms(), backward=StageTerms()), StageCost(forward=term, backward=term))
    )


@given(st.lists(st.integers(0, 2**63 - 1), max_size=12))
def test_a_total_is_exact_also_where_numpy_wraps(values: list[int]) -> None:
    assert exact_total(np.array(values, dtype=np.int64)) == sum(values)


@pytest.mark.parametrize("name", ["patches", "label_tokens", "visual_tokens", "num_items", "window_total_sq"])
def test_a_column_of_counts_that_wraps_is_named_with_its_largest_sample(name: str) -> None:
    columns = {key: [0, 0] for key in ("visual_tokens", "patches", "num_items", "full_total_sq", "window_total_sq")}
    columns |= {"llm_tokens": [2**60, 2**60], "label_tokens": [0, 0]}
    columns[name] = [2**61, 2**62 - 1]
    if name == "label_tokens":
        columns["llm_tokens"] = columns[name]
    counts = StepCounts(sample_ids=[7, 8], **columns)
    with pytest.raises(PlanError, match=rf"(llm_tokens|{name}) of the step add up to \d+, .* of sample 8"):
        plan_step(counts, parallel=ParallelSpec.pipeline(), cost_model=model_of(), capacities=Capacities(tokens=2**42))


def test_constants_that_wrap_are_refused_and_not_planned_as_zero(counts_of) -> None:
    for policy in policy_names():
        with pytest.raises(PlanError, match="the times of the step add up to"):
            plan_step(
                counts_of([3] * 64),
                parallel=ParallelSpec.pipeline(pp_size=2, num_microbatches=2**14),
                cost_model=model_of(constant_ns=2.0**47),
                capacities=Capacities(tokens=400),
                policy=policy,
            )


@given(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=12),
    st.sampled_from([0.0, 1.0, 2.0**10, 2.0**18, 2.0**20, 2.0**22]),  # times 2^40 tokens: up to 2^62
    st.sampled_from([0.0, 1.0, 2.0**47]),
    st.sampled_from(policy_names()),
    st.sampled_from(["step", "microbatch"]),
)
def test_huge_costs_give_an_exact_plan_or_one_typed_error(
    tokens: list[int], rate: float, constant: float, policy: str, meet: str
) -> None:
    """In particular no SizeOverflowError of packing, which callers of the planner do not know."""
    zeros = [0] * len(tokens)
    names = ("label_tokens", "visual_tokens", "patches", "num_items", "full_total_sq", "window_total_sq")
    counts = StepCounts(sample_ids=range(len(tokens)), llm_tokens=tokens, **dict.fromkeys(names, zeros))
    try:
        plan = plan_step(
            counts,
            parallel=ParallelSpec.pipeline(dp_size=2, pp_size=2, meet=meet),
            cost_model=model_of(rate, constant),
            capacities=Capacities(tokens=2**41),
            policy=policy,
        )
    except BalancerError:
        return
    times = [plan.forward_ns, plan.backward_ns]
    total = sum(sum(part.reshape(-1).tolist()) for part in times)
    assert min(part.min() for part in times) >= 0
    assert total < MAX_TOTAL
    assert max(plan.forward_ns.max(), plan.lower_bound_ns) <= plan.makespan_ns <= total


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([2**62] * 4, r"tokens of the step add up to 18446744073709551616"),
        ([3, -5], "tokens=-5 of sample 1 is negative"),
    ],
)
def test_token_steps_do_not_wrap(tokens: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        TokenStepSelector(np.arange(len(tokens)), np.array(tokens), seed=0, step_tokens=2**62)
