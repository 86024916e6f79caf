"""A run's plans as a pure function of the step number."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.errors import PlanError
from balancer.layout import Layout
from balancer.plan import Capacities, verify
from balancer.plan_sequence import PLANS_KEPT, PlanSequence
from balancer.select import StepRange
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import CostIndex
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource

CELL = 784
ESTIMATOR = Qwen25VLEstimator(
    Qwen25VLConfig(min_pixels=4 * CELL, max_pixels=16 * CELL, video_min_pixels=4 * CELL, video_max_pixels=16 * CELL)
)
CAPACITIES = Capacities(tokens=300)


@pytest.fixture(scope="module")
def index(small_shard: Path) -> CostIndex:
    return scan_source(TarSource(str(small_shard)), ESTIMATOR)


def cost_model(num_stages: int) -> CostModel:
    terms = [StageTerms(per_patch_ns=1.0)] + [StageTerms(per_token_ns=1.0)] * (num_stages - 1)
    return CostModel(stages=tuple(StageCost(forward=term, backward=term.scaled(2.0)) for term in terms))


def sequence(index: CostIndex, **options: object) -> PlanSequence:
    layout = Layout(dp_size=2)
    fixed: dict[str, object] = {
        "index": index,
        "ids": np.arange(len(index)),
        "global_batch_size": 4,
        "layout": layout,
        "cost_model": cost_model(layout.num_stages),
        "capacities": CAPACITIES,
    }
    return PlanSequence(**{**fixed, **options})  # type: ignore[arg-type]


def test_an_epoch_visits_every_sample_once_and_epochs_follow_each_other(index: CostIndex) -> None:
    plans = sequence(index)
    assert plans.steps_per_epoch == 2
    for epoch in range(3):
        steps = [plans.plan(2 * epoch + k) for k in range(2)]
        assert sorted(i for plan in steps for i in plan.sample_ids.tolist()) == list(range(6))
        assert {plan.epoch for plan in steps} == {epoch}
        assert [plan.cursor for plan in steps] == [0, 4]
        assert [plan.step for plan in steps] == [2 * epoch, 2 * epoch + 1]
    assert plans.sample_ids(0).tolist() + plans.sample_ids(1).tolist() != list(range(6))


def test_a_late_step_costs_no_more_than_the_first_and_needs_none_before_it(index: CostIndex) -> None:
    far, fresh = sequence(index), sequence(index)
    for step in range(5):
        far.plan(step)
    assert far.plan(1_000_001).digest == fresh.plan(1_000_001).digest


def test_asking_again_even_after_being_forgotten_gives_the_same_plan(index: CostIndex) -> None:
    plans = sequence(index)
    first = plans.plan(3)
    assert plans.plan(3) is first
    for step in range(10, 10 + PLANS_KEPT):
        plans.plan(step)
    again = plans.plan(3)
    assert again is not first
    assert (again.inputs_digest, again.digest) == (first.inputs_digest, first.digest)


def test_another_policy_places_the_same_samples(index: CostIndex) -> None:
    plans = sequence(index)
    on, off = plans.plan(0), plans.plan(0, policy="sequential")
    assert (on.policy, off.policy) == ("lpt", "sequential")
    assert np.array_equal(on.sample_ids, off.sample_ids)
    assert plans.plan(0) is on
    verify(off, plans.counts(0), CAPACITIES)


def test_selection_is_blind_to_layout_policy_and_number_of_micro_batches(index: CostIndex) -> None:
    plans = sequence(index)
    others = [
        replace(plans, layout=Layout(dp_size=1)),
        replace(plans, layout=Layout(pp_size=3), cost_model=cost_model(3)),
        replace(plans, policy="sequential", num_microbatches=4),
    ]
    for other in others:
        for step in range(4):
            assert np.array_equal(other.sample_ids(step), plans.sample_ids(step))
            assert np.array_equal(other.plan(step).sample_ids, plans.sample_ids(step))


def test_without_shuffling_the_order_is_that_of_the_ids(index: CostIndex) -> None:
    plans = sequence(index, ids=np.array([5, 0, 3]), shuffle=False, global_batch_size=2)
    assert [plans.sample_ids(step).tolist() for step in range(4)] == [[5, 0], [3], [5, 0], [3]]


def test_fewer_samples_than_ranks_leave_cells_empty_on_a_plan_for_all(index: CostIndex) -> None:
    plan = sequence(index, ids=np.array([2]), layout=Layout(dp_size=4)).plan(0)
    assert plan.dp_size == 4
    assert plan.num_samples.sum() == 1
    assert (plan.num_samples == 0).any(axis=1).sum() == 3


def test_the_planned_weight_is_that_of_the_samples_in_every_reduction(index: CostIndex) -> None:
    plans = sequence(index)
    labels = index.samples["label_tokens"][plans.sample_ids(1)].tolist()
    assert plans.weight_sum(1, "token_mean") == sum(labels) == plans.plan(1).num_label_tokens
    assert plans.weight_sum(1, "sample_mean") == sum(count > 0 for count in labels)
    assert plans.weight_sum(1, "sqrt") == pytest.approx(sum(count**0.5 for count in labels))


def test_nothing_to_train_on_and_a_batch_of_nothing_are_errors(index: CostIndex) -> None:
    with pytest.raises(PlanError, match="no samples to train on"):
        sequence(index, ids=np.zeros(0, dtype=np.int64))
    with pytest.raises(PlanError, match="global_batch_size=0"):
        sequence(index, global_batch_size=0)


def test_a_selector_of_ones_own_decides_the_samples(index: CostIndex) -> None:
    class Pairs:
        steps_per_epoch = 3

        def step_ids(self, step: int) -> tuple[StepRange, np.ndarray]:
            cursor = 2 * (step % 3)
            return StepRange(step=step, epoch=step // 3, cursor=cursor, stop=cursor + 2), np.array([cursor, cursor + 1])

    plans = sequence(index, selector=Pairs(), seed=5)
    assert plans.steps_per_epoch == 3
    assert plans.sample_ids(4).tolist() == [2, 3]
    assert (plans.plan(4).epoch, plans.plan(4).cursor) == (1, 2)
    assert plans.position(4) == StepRange(step=4, epoch=1, cursor=2, stop=4)
    assert replace(plans, policy="sequential").sample_ids(4).tolist() == [2, 3]


def test_blocks_follow_the_shards_of_the_index(index: CostIndex) -> None:
    assert len(set(index.shard_numbers.tolist())) == 1
    plans = sequence(index, shuffle="block", block_shards=1)
    assert sorted(i for step in range(2) for i in plans.sample_ids(step).tolist()) == list(range(6))
    assert plans.sample_ids(0).tolist() != sequence(index).sample_ids(0).tolist()


def test_blocks_follow_groups_where_a_source_reads_by_others_than_shards(index: CostIndex) -> None:
    groups = np.array([0, 0, 1, 1, 2, 2])
    plans = sequence(index, shuffle="block", block_shards=1, groups=groups, global_batch_size=2)
    for epoch in range(3):
        steps = [plans.sample_ids(3 * epoch + step) for step in range(3)]
        assert [len(set(groups[ids].tolist())) for ids in steps] == [1, 1, 1]
        assert sorted(np.concatenate(steps).tolist()) == list(range(6))
    assert sequence(index, groups=groups).sample_ids(0).tolist() == sequence(index).sample_ids(0).tolist()
    with pytest.raises(PlanError, match=r"groups are given for \(5,\) samples, and the index holds 6"):
        sequence(index, shuffle="block", groups=groups[:5])
