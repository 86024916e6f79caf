"""A run's plans as a pure function of the step number."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.errors import PlanError
from balancer.layout import Layout, ParallelSpec
from balancer.plan import Capacities
from balancer.plan_check import verify
from balancer.plan_sequence import PLANS_KEPT, PlanSequence, plan_epoch
from balancer.planner import DEFAULT_POLICY
from balancer.select import TAILS, StepRange, TailPolicy, eligible_ids
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, CostIndex, IndexKey
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
    assert (on.policy, off.policy) == (DEFAULT_POLICY, "sequential")
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


def costs(num: int) -> CostIndex:
    """An index of `num` text samples of 10 to 59 tokens, every tenth with ten times as many."""
    tokens = (10 + np.arange(num) * 7 % 50) * np.where(np.arange(num) % 10 == 0, 10, 1)
    samples = {name: np.zeros(num, dtype=dtype) for name, dtype in SAMPLE_COLUMNS.items()}
    samples["llm_tokens"] = tokens.astype(np.int32)
    samples["label_tokens"] = (tokens // 2).astype(np.int32)
    return CostIndex(
        key=IndexKey(
            rules=1,
            source="s",
            estimator="e",
            tokenizer="t",
            train_on="all",
            apply_orientation=True,
            limits="",
            unfit="skip",
        ),
        samples=samples,
        items={name: np.zeros(0, dtype=dtype) for name, dtype in ITEM_COLUMNS.items()},
        names=pa.table({"shard": ["a"] * num, "key": [str(i) for i in range(num)]}),
        bad=[],
        reasons=[""],
    )


@settings(max_examples=25, deadline=None)
@given(
    num=st.integers(12, 60),
    batch=st.integers(1, 9),
    step_tokens=st.sampled_from([None, 300, 900]),
    tail=st.sampled_from(TAILS),
    lookahead=st.integers(1, 4),
    epoch=st.integers(0, 2),
)
def test_every_sample_of_the_index_is_planned_once_per_epoch_or_listed_with_a_reason(
    *, num: int, batch: int, step_tokens: int | None, tail: TailPolicy, lookahead: int, epoch: int
) -> None:
    index = costs(num)
    eligibility = eligible_ids(index, Capacities(tokens=400), "drop")
    plans = sequence(
        index,
        ids=eligibility.ids,
        global_batch_size=batch,
        step_tokens=step_tokens,
        tail="pad" if step_tokens else tail,
        lookahead_steps=lookahead,
        capacities=Capacities(tokens=400),
        dropped=eligibility.dropped,
    )
    made = list(plans.epoch(epoch))
    assert [plan.step for plan in made] == [epoch * plans.steps_per_epoch + k for k in range(plans.steps_per_epoch)]
    planned = [i for plan in made for i in plan.sample_ids.tolist()]
    listed = [sample for plan in made for sample, _ in plan.dropped]
    assert sorted({*planned, *listed}) == list(range(num))
    assert len(listed) == len(set(listed))
    assert not set(planned) & set(listed)
    assert len(planned) - len(set(planned)) == plans.epoch_tail.num_repeated
    assert len(listed) == len(eligibility.dropped) + plans.epoch_tail.num_dropped
    assert all(reason.startswith(("oversize: ", "tail: ")) for plan in made for _, reason in plan.dropped)


def test_an_epoch_is_planned_lazily_and_from_any_step() -> None:
    plans = sequence(costs(40), capacities=Capacities(tokens=1000))
    epoch = plan_epoch(plans, 2, start=3)
    assert not plans._plans
    first = next(epoch)
    assert first.step == 2 * plans.steps_per_epoch + 3
    assert len(plans._plans) == 1
    assert [plan.digest for plan in plans.epoch(2)][3:] == [first.digest, *(plan.digest for plan in epoch)]
    assert list(plan_epoch(plans, start=10)) == []
    with pytest.raises(PlanError, match="epoch=0, start=11: epochs count from 0 and have the steps 0 to 9"):
        plan_epoch(plans, 0, start=11)
    with pytest.raises(PlanError, match="epoch=-1, start=0: epochs count from 0"):
        plan_epoch(plans, -1)


def test_look_ahead_moves_samples_inside_blocks_and_shows_in_the_digest_of_the_inputs() -> None:
    plain = sequence(costs(64), capacities=Capacities(tokens=1000))
    ahead = replace(plain, lookahead_steps=4)
    for start in range(0, 16, 4):
        before, after = (
            [plans.sample_ids(step).tolist() for step in range(start, start + 4)] for plans in (plain, ahead)
        )
        assert sorted(chain.from_iterable(before)) == sorted(chain.from_iterable(after))
        assert [len(ids) for ids in after] == [4] * 4
    digests = [[plans.plan(step).inputs_digest for step in range(4)] for plans in (plain, ahead)]
    assert digests[0] != digests[1]
    tokens = [[int(plans.counts(step).llm_tokens.sum()) for step in range(16)] for plans in (plain, ahead)]
    assert max(tokens[1]) < max(tokens[0])
    assert plain.selection_notes() == []
    assert ahead.selection_notes()[0].startswith("ITERATION ORDER: samples are exchanged inside blocks of 4 steps")


def test_look_ahead_selects_alike_on_another_layout_when_it_is_given_a_cost_of_its_own() -> None:
    plans = sequence(costs(64), lookahead_steps=4, selection_cost=cost_model(2), capacities=Capacities(tokens=1000))
    other = replace(plans, layout=Layout(dp_size=1, pp_size=4), cost_model=cost_model(4))
    for step in range(8):
        assert plans.sample_ids(step).tolist() == other.sample_ids(step).tolist()


def test_a_token_budget_makes_steps_of_even_tokens_and_is_known_in_number() -> None:
    plans = sequence(costs(200), step_tokens=1000, capacities=Capacities(tokens=1000))
    assert plans.steps_per_epoch == -(-int(plans.index.samples["llm_tokens"].sum()) // 1000)
    sums = [int(plans.plan(step).llm_tokens.sum()) for step in range(plans.steps_per_epoch)]
    assert max(sums) < 1000 + 590
    assert len({len(plans.sample_ids(step)) for step in range(plans.steps_per_epoch)}) > 1
    assert plans.position(1).cursor == len(plans.sample_ids(0))


def test_what_the_tail_does_is_told_in_counts_and_in_words() -> None:
    drop, repeat = (sequence(costs(10), tail=tail) for tail in ("drop", "repeat"))
    assert (drop.epoch_tail.num_dropped, repeat.epoch_tail.num_repeated) == (2, 2)
    assert drop.selection_notes() == ["2 samples are left out of every epoch (tail=drop), other ones each time"]
    assert drop.plan(1).dropped == tuple(
        (sample, "tail: the last 2 samples of epoch 0 do not fill a step") for sample, _ in drop.plan(1).dropped
    )
    assert len(repeat.plan(2).sample_ids) == 4


@pytest.mark.parametrize(
    "options", [{"step_tokens": 100}, {"lookahead_steps": 2}, {"tail": "drop"}, {"tail": "repeat"}]
)
def test_a_mixture_refuses_what_would_change_its_draws(index: CostIndex, options: dict[str, object]) -> None:
    class Fixed:
        steps_per_epoch = 1

        def step_ids(self, step: int) -> tuple[StepRange, np.ndarray]:
            raise AssertionError("not asked")

    name = next(iter(options))
    with pytest.raises(PlanError, match=rf"^{name}=.*: not with a mixture\. It draws a fixed number of samples"):
        sequence(index, selector=Fixed(), **options)


def test_the_domains_of_a_plan_may_be_given_instead_of_a_layout(index: CostIndex) -> None:
    spec = ParallelSpec.pipeline(dp_size=2, pp_size=2, encoder="shared")
    plans = sequence(index, parallel=spec, cost_model=cost_model(3))
    assert plans.spec is spec
    assert plans.plan(0).num_stages == 3
