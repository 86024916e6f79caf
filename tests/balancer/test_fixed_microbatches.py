"""A fixed number of micro-batches is checked before step 1, mostly without planning."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel
from balancer.counts import StepCounts
from balancer.errors import PlanError
from balancer.fixed_microbatches import check_steps_fit, surely_fits
from balancer.layout import Layout, ParallelSpec
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.planner import plan_step
from balancer.policies import policy_names


class Costs:
    """An index of text samples with so many tokens each."""

    def __init__(self, tokens: list[int]) -> None:
        n = len(tokens)
        zeros = np.zeros(n, dtype=np.int64)
        self.samples = dict.fromkeys(("label_tokens", "visual_tokens", "patches", "num_items", "confidence"), zeros)
        self.samples["llm_tokens"] = np.array(tokens, dtype=np.int64)
        names = ("patches", "visual_tokens", "full_total_sq", "window_total_sq")
        self.items = {name: np.zeros(0, dtype=np.int64) for name in names}
        self.item_offsets = np.zeros(n + 1, dtype=np.int64)
        self.shard_numbers = zeros
        self.bad: list[object] = []

    def __len__(self) -> int:
        return len(self.samples["llm_tokens"])

    def keys(self, i: int) -> str:
        return str(i)

    def shard(self, i: int) -> str:
        return "s"


def sequence(
    tokens: list[int], model: CostModel, *, batch: int, num_microbatches: int, dp_size: int = 2
) -> PlanSequence:
    return PlanSequence(
        index=Costs(tokens),
        ids=np.arange(len(tokens)),
        global_batch_size=batch,
        layout=Layout(dp_size=2),
        cost_model=model,
        capacities=Capacities(tokens=100),
        policy="lpt",
        num_microbatches=num_microbatches,
        shuffle=False,
    )


@pytest.mark.parametrize("policy", policy_names())
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_surely_fits_is_placed_by_every_policy(
    policy: str, data: st.DataObject, counts_of: Callable[..., StepCounts], plain_model: Callable[[int], CostModel]
) -> None:
    tokens = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=24))
    patches = data.draw(st.lists(st.integers(0, 60), min_size=len(tokens), max_size=len(tokens)))
    counts, capacities = counts_of(tokens, patches=patches), Capacities(tokens=60, patches=90)
    limits, sizes = capacities.table(counts)
    dp_size = data.draw(st.integers(1, 3))
    fits = (m for m in range(1, 100) if surely_fits(sizes, tuple(limit for _, limit in limits), dp_size * m))
    num_microbatches = next(fits)
    spec = ParallelSpec.of(Layout(dp_size=dp_size), num_microbatches=num_microbatches)
    plan = plan_step(counts, parallel=spec, cost_model=plain_model(2), capacities=capacities, policy=policy)
    assert plan.num_microbatches == num_microbatches
    assert sorted(plan.sample_ids.tolist()) == list(range(len(tokens)))


def test_loose_steps_are_not_planned_and_tight_ones_are(plain_model: Callable[[int], CostModel]) -> None:
    loose, tight = [10] * 8, [30, 30, 30, 30, 40, 40, 40, 40]
    plans = sequence([*loose, *tight, *loose], plain_model(2), batch=8, num_microbatches=2)
    assert check_steps_fit(plans, range(3)) == 1
    assert check_steps_fit(plans, [0, 2]) == 0


def test_a_step_that_cannot_fit_by_its_sums_is_refused_with_the_arithmetic(
    plain_model: Callable[[int], CostModel],
) -> None:
    plans = sequence([10] * 4 + [90] * 4, plain_model(2), batch=4, num_microbatches=1)
    with pytest.raises(PlanError, match=r"num_microbatches=1 does not hold step 2: it has 360 tokens, and 2 micro"):
        check_steps_fit(plans, range(2))
    with pytest.raises(PlanError, match="fit with num_microbatches=2 or more, a larger capacity, or fewer samples"):
        check_steps_fit(plans, range(2))


def test_a_step_that_only_packing_can_refuse_is_refused_too(plain_model: Callable[[int], CostModel]) -> None:
    plans = sequence([60, 60, 60], plain_model(2), batch=3, num_microbatches=1)  # 180 of 200, but no two together
    with pytest.raises(PlanError, match="micro-batches"):
        check_steps_fit(plans, range(1))


def test_nothing_is_checked_where_the_number_is_free(plain_model: Callable[[int], CostModel]) -> None:
    plans = PlanSequence(
        index=Costs([60, 60, 60]),
        ids=np.arange(3),
        global_batch_size=3,
        layout=Layout(),
        cost_model=plain_model(2),
        capacities=Capacities(tokens=100),
        policy="lpt",
    )
    assert check_steps_fit(plans, range(10)) == 0


def test_a_sample_above_the_capacity_never_surely_fits() -> None:
    assert not surely_fits(np.array([[5], [11]]), (10,), 100)
    assert surely_fits(np.array([[5], [10]]), (10,), 100)
