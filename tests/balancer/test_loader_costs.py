"""Costs in every form that a user has: limits and times come out as given, and what is wrong is said with its place."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.cost_table import AS_GIVEN, joined, table_of, taken, with_times
from balancer.counts import StepCounts
from balancer.errors import BalancerError, CostModelError, MissingCostError, OversizeError, PlanError
from balancer.layout import Layout, ParallelSpec
from balancer.loader_costs import PER_TOKEN, LoaderCosts, loader_costs
from balancer.lookahead import index_costs
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.select import eligible_ids
from dataloaders.demo import DEMO_PROCESSOR
from dataloaders.estimators import estimator_from_config
from dataloaders.index import CostIndex
from dataloaders.index_concat import IndexConcat
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource

LENGTHS = [5, 3, 9, 1, 7, 2]


class Items:
    """A dataset of n items that knows nothing of itself and fails when one is loaded."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> int:
        raise AssertionError("costs never load a sample")


@pytest.fixture(scope="module")
def index(small_shard: Path) -> CostIndex:
    return scan_source(TarSource([str(small_shard)]), estimator_from_config(DEMO_PROCESSOR))


@pytest.fixture(scope="module")
def with_unusable(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path]) -> CostIndex:
    shard = write_shard(
        tmp_path_factory.mktemp("bad") / "bad.tar",
        [("0.json", b'{"messages": [{"role": "user", "content": "Hi"}]}'), ("1.json", b"{")],
    )
    return scan_source(TarSource([str(shard)]), estimator_from_config(DEMO_PROCESSOR))


def times(costs: LoaderCosts) -> np.ndarray:
    """[n, 2]: whole time of every sample in the encoder and in the LLM."""
    return index_costs(costs.index, costs.cost_model, with_tokens=False)(np.arange(len(costs.index)))


def sizes(costs: LoaderCosts) -> np.ndarray:
    """[n, 2]: what capacities see, (patches, tokens)."""
    return np.stack([np.asarray(costs.index.samples[name]) for name in ("patches", "llm_tokens")], axis=1)


@pytest.mark.parametrize(
    "cost",
    [LENGTHS, tuple(LENGTHS), np.array(LENGTHS, np.int16), np.array(LENGTHS, np.float32), lambda i: LENGTHS[i]],
    ids=["list", "tuple", "int16", "float32", "function"],
)
def test_numbers_alone_are_limits_and_times(cost: Any) -> None:
    costs = loader_costs(Items(6), cost=cost, cost_index=None)
    assert sizes(costs).tolist() == [[0, length] for length in LENGTHS]
    assert times(costs).tolist() == [[0, length] for length in LENGTHS]
    assert (costs.labels_known, costs.by_stage, costs.limits_known) == (False, False, True)


def test_pairs_are_encoder_and_llm() -> None:
    pairs = [(4, 2), (0, 3), (1, 0)]
    for cost in (pairs, np.array(pairs), lambda i: pairs[i]):
        costs = loader_costs(Items(3), cost=cost)
        assert sizes(costs).tolist() == [[4, 2], [0, 3], [1, 1]], "a free sample weighs one unit"
        assert times(costs).tolist() == [[4, 2], [0, 3], [1, 1]]


@given(costs=st.lists(st.floats(0.0, 1e6, allow_subnormal=False), min_size=1, max_size=20))
def test_fractions_keep_their_proportions_in_times_and_are_rounded_up_for_limits(costs: list[float]) -> None:
    known = loader_costs(Items(len(costs)), cost=costs)
    assert sizes(known)[:, 1].tolist() == [max(1, int(np.ceil(cost))) for cost in costs]
    found, largest = times(known)[:, 1], max(costs)
    if largest > 0.0 and not all(cost == round(cost) for cost in costs):
        np.testing.assert_allclose(found / found.max(), np.array(costs) / largest, atol=2e-9)


@pytest.mark.parametrize("cost", [[2**40, 2**41], [3e15, 6e15], np.array([2**62, 2**63], np.uint64)])
def test_numbers_beyond_31_bits_keep_their_proportions_and_have_no_limits(cost: Any) -> None:
    costs = loader_costs(Items(2), cost=cost)
    assert not costs.limits_known
    assert times(costs)[:, 1].tolist() == [2**29, 2**30]
    assert sizes(costs)[:, 1].tolist() == [2**19, 2**20]


def test_an_index_alone_is_timed_by_tokens_and_patches(index: CostIndex) -> None:
    costs = loader_costs(Items(6), cost=None, cost_index=index)
    assert costs.index is index
    assert costs.cost_model is PER_TOKEN
    assert costs.labels_known
    assert not costs.by_stage
    tokens, patches = (np.asarray(index.samples[name], dtype=np.int64) for name in ("llm_tokens", "patches"))
    np.testing.assert_allclose(times(costs)[:, 0], 300 * patches)
    np.testing.assert_allclose(times(costs)[:, 1], 3000 * tokens + 3000 * tokens**2 / 2**16, atol=2)


def test_the_stand_in_model_doubles_a_token_at_65536() -> None:
    costs = loader_costs(Items(2), cost_index={"llm_tokens": [2**16, 1], "patches": [0, 10]})
    long, short = times(costs)
    assert long[1] == 2 * 2**16 * 3000
    assert short.tolist() == [3000, 3000], "ten patches take as long as one token"


def test_an_index_with_numbers_keeps_its_limits_and_labels(index: CostIndex) -> None:
    cost = np.array([[9, 1], [2, 2], [3, 3], [4, 4], [5, 5], [6, 0]])
    costs = loader_costs(Items(6), cost=cost, cost_index=index)
    assert costs.labels_known
    assert not costs.by_stage
    for name in ("llm_tokens", "patches", "label_tokens", "visual_tokens", "num_items"):
        assert costs.index.samples[name] is index.samples[name], name
    assert times(costs).tolist() == [[0, 10], [2, 2], [3, 3], [4, 4], [5, 5], [6, 1]], (
        "what the encoder would take for a sample without media counts as the LLM's"
    )
    assert costs.index.keys(2) == index.keys(2)
    assert costs.index.shard(2) == index.shard(2)


def test_a_model_times_the_counts_of_an_index(index: CostIndex, plain_model: Callable[[int], CostModel]) -> None:
    model = plain_model(4)
    costs = loader_costs(Items(6), cost=model, cost_index=index)
    assert costs.cost_model is model
    assert costs.index is index
    assert costs.by_stage


def test_columns_may_be_few_and_the_others_are_none() -> None:
    model = CostModel(stages=(StageCost(forward=StageTerms(per_token_ns=2.0, per_item_ns=5.0), backward=StageTerms()),))
    costs = loader_costs(Items(3), cost=model, cost_index={"llm_tokens": [3, 4, 5], "patches": np.array([0, 8, 0])})
    assert times(costs)[:, 0].tolist() == [6, 13, 10], "a sample with patches holds one item"
    assert not costs.labels_known
    named = loader_costs(Items(2), cost_index={"llm_tokens": [3, 4], "label_tokens": [1, 4], "num_items": [2, 0]})
    assert named.labels_known
    assert StepCounts.from_index(named.index, [1, 0]).label_tokens.tolist() == [4, 1]
    assert StepCounts.from_index(named.index, [1, 0]).num_items.tolist() == [0, 2]


def test_columns_without_tokens_take_them_from_the_numbers() -> None:
    costs = loader_costs(Items(3), cost=[4.5, 2.0, 1.0], cost_index={"label_tokens": [1, 2, 0]})
    assert sizes(costs)[:, 1].tolist() == [5, 2, 1]
    assert costs.labels_known
    assert costs.index.samples["label_tokens"].tolist() == [1, 2, 0]


def test_the_own_index_of_a_dataset_is_found_and_combined_with_numbers(index: CostIndex) -> None:
    dataset = Items(6)
    dataset.cost_index = index  # type: ignore[attr-defined]
    assert loader_costs(dataset).index is index
    costs = loader_costs(dataset, cost=LENGTHS)
    assert times(costs)[:, 1].tolist() == LENGTHS
    assert costs.index.samples["llm_tokens"] is index.samples["llm_tokens"]
    given = loader_costs(dataset, cost_index={"llm_tokens": LENGTHS})
    assert sizes(given)[:, 1].tolist() == LENGTHS, "what is passed comes before what the dataset has"


def plans(costs: LoaderCosts, ids: np.ndarray, **options: Any) -> PlanSequence:
    return PlanSequence(
        index=costs.index,
        ids=ids,
        global_batch_size=16,
        layout=Layout(dp_size=2),
        cost_model=costs.cost_model,
        capacities=Capacities(tokens=2**20),
        **options,
    )


@pytest.mark.parametrize("options", [{}, {"lookahead_steps": 2}, {"shuffle": False}, {"step_tokens": 4000}])
@pytest.mark.parametrize("pairs", [False, True])
def test_planning_takes_the_costs_as_any_index(*, options: dict[str, Any], pairs: bool) -> None:
    rng = np.random.Generator(np.random.Philox(3))
    numbers = rng.lognormal(5.0, 1.0, (64, 2)) * [[1.0 if pairs else 0.0, 1.0]]
    costs = loader_costs(Items(64), cost=numbers)
    ids = eligible_ids(costs.index, Capacities(tokens=2**20)).ids
    sequence = plans(costs, ids, **options)
    seen: list[int] = []
    for plan in sequence.epoch():
        seen += plan.sample_ids.tolist()
        for rank in range(2):
            own = [i for m in range(plan.num_microbatches) for i in plan.members(rank, m).tolist()]
            share = times(costs)[own].sum() / times(costs)[plan.sample_ids].sum()
            assert abs(share - 0.5) < 0.2
    assert sorted(seen) == list(range(64))


def test_capacities_limit_the_callers_own_numbers() -> None:
    costs = loader_costs(Items(4), cost=[10.5, 3.0, 2.0, 1.0])
    with pytest.raises(OversizeError, match=r"sample 0 \(shard dataset, key 0\): 11 tokens > 10"):
        eligible_ids(costs.index, Capacities(tokens=10))
    assert eligible_ids(costs.index, Capacities(tokens=10), "drop").ids.tolist() == [1, 2, 3]
    assert eligible_ids(loader_costs(Items(2), cost=[[5, 1], [2, 1]]).index, Capacities(tokens=9, patches=4), "drop")


def test_unusable_samples_stay_out_with_their_reason(with_unusable: CostIndex) -> None:
    for cost in (None, [1, 2]):
        found = eligible_ids(loader_costs(Items(2), cost=cost, cost_index=with_unusable).index, Capacities(tokens=99))
        assert found.ids.tolist() == [0]
        assert found.dropped[0].reason == "unusable: bad_record"


def test_rows_are_taken_and_joined_with_their_items_names_and_reasons(
    index: CostIndex, with_unusable: CostIndex
) -> None:
    rows = np.array([5, 0, 2, 2])
    part = taken(index, rows)
    for row, at in enumerate(rows.tolist()):
        one, other = StepCounts.from_index(part, [row]), StepCounts.from_index(index, [at])
        for name in ("llm_tokens", "label_tokens", "num_items", "full_total_sq", "window_total_sq", "item_patches"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
        assert (part.shard(row), part.keys(row)) == (index.shard(at), index.keys(at))
    both = joined([taken(with_unusable, np.array([1, 0])), part, table_of({"llm_tokens": np.array([7])}, 1)])
    assert len(both) == 7
    assert both.samples["llm_tokens"].tolist()[2:] == [*part.samples["llm_tokens"].tolist(), 7]
    assert both.item_offsets.tolist()[2:7] == part.item_offsets.tolist()
    assert [(bad.sample_id, bad.reason) for bad in both.bad] == [(0, "bad_record")]
    assert (both.shard(6), both.keys(6)) == ("dataset", 0)
    assert both.keys(3) == index.keys(0)
    numbers = both.shard_numbers.tolist()
    assert len(set(numbers)) == 3
    assert len(set(numbers[2:6])) == 1
    counts = StepCounts.from_index(both, np.arange(1, 7))
    assert counts.sum_of_items(counts.item_patches).tolist() == counts.patches.tolist()


def test_a_mixture_is_read_like_one_index(index: CostIndex) -> None:
    mixture = IndexConcat({"a": index, "b": index})
    assert loader_costs(Items(12), cost_index=mixture).index is mixture
    part = taken(mixture, np.array([11, 3]))
    assert part.samples["patches"].tolist() == [index.samples["patches"][i] for i in (5, 3)]
    costs = loader_costs(Items(12), cost=range(12), cost_index=mixture)
    assert times(costs)[:, 1].tolist() == [1, *range(1, 12)]


def test_equal_costs_have_equal_fingerprints_and_every_number_counts() -> None:
    first, again = (loader_costs(Items(3), cost=[1, 2, 3]).index for _ in range(2))
    assert first.fingerprint == again.fingerprint  # type: ignore[attr-defined]
    others = [
        loader_costs(Items(3), cost=[1, 2, 4]),
        loader_costs(Items(3), cost=[1.0, 2.0, 2.5]),
        loader_costs(Items(3), cost=[1, 2, 3], cost_index={"llm_tokens": [1, 2, 3], "label_tokens": [1, 0, 0]}),
    ]
    assert len({first.fingerprint, *(costs.index.fingerprint for costs in others)}) == 4  # type: ignore[attr-defined]


def test_times_of_the_caller_add_nothing_per_micro_batch() -> None:
    table = with_times(table_of({"llm_tokens": np.array([5, 5])}, 2), np.array([[0, 3], [0, 4]]))
    counts = StepCounts.from_index(table, [1, 0])
    assert AS_GIVEN.forward_ns(counts).tolist() == [[0, 4], [0, 3]]
    assert not AS_GIVEN.backward_ns(counts).any()
    assert not AS_GIVEN.forward_constant_ns().any()
    assert AS_GIVEN.num_stages == PER_TOKEN.num_stages == ParallelSpec.pipeline().num_stages


def failing(i: int) -> int:
    raise KeyError("lengths")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cost": [1, 2]}, BalancerError, "cost has 2 entries for 3 samples"),
        ({"cost": [1, -1, 2]}, BalancerError, "the smallest is -1, the first wrong one of sample 1"),
        ({"cost": [1.0, 2.0, float("nan")]}, BalancerError, "finite and not negative; the smallest is nan"),
        ({"cost": [1.0, float("inf"), 1.0]}, BalancerError, "first wrong one of sample 1"),
        ({"cost": np.ones((3, 3))}, BalancerError, r"costs have shape \(3, 3\)"),
        ({"cost": 5}, BalancerError, r"costs have shape \(\)"),
        ({"cost": ["a", "b", "c"]}, BalancerError, "expected numbers"),
        ({"cost": [True, False, True]}, BalancerError, "type bool; expected numbers"),
        ({"cost": [[1], [1, 2], [3]]}, BalancerError, "cost is no array of numbers"),
        ({"cost": failing}, BalancerError, r"cost\(0\) failed: KeyError: 'lengths'"),
        ({"cost": lambda i: "long"}, BalancerError, r"cost\(0\) gives 'long'; expected a number"),
        ({"cost": lambda i: [1, 2] if i else 1}, BalancerError, r"cost\(1\) gives \[1, 2\]"),
        ({"cost_index": {"llm_tokens": [1, 2]}}, BalancerError, r"'llm_tokens'\] has shape \(2,\) for 3 samples"),
        ({"cost_index": {"tokens": [1, 2, 3]}}, BalancerError, r"has columns \['tokens'\]; known are llm_tokens"),
        ({"cost_index": {"patches": [1, 2, 3]}}, MissingCostError, r'Add it: cost_index={"llm_tokens": lengths'),
        (
            {"cost": [1e15, 2, 3], "cost_index": {"patches": [1, 2, 3]}},
            MissingCostError,
            'no column "llm_tokens", which says how long a sample is',
        ),
        ({"cost_index": {"llm_tokens": [1, 2.5, 3]}}, PlanError, "llm_tokens=2.5 of sample 1 is no whole number"),
        ({"cost_index": {"llm_tokens": [1, -2, 3]}}, PlanError, "llm_tokens=-2 of sample 1 is negative"),
        (
            {"cost_index": {"llm_tokens": [1, 2, 3], "label_tokens": [1, 3, 3]}},
            PlanError,
            "label_tokens=3 of sample 1 is above its llm_tokens=2",
        ),
        ({"cost_index": [1, 2, 3]}, BalancerError, "cost_index is a list; give a dataloaders CostIndex"),
        ({}, MissingCostError, r"of a Items\). Add cost=lengths .*method cost\(i\)"),
    ],
)
def test_what_says_no_cost_is_refused_with_its_place(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        loader_costs(Items(3), **options)


def test_the_missing_line_is_shown_as_code() -> None:
    with pytest.raises(MissingCostError) as caught:
        loader_costs(Items(3))
    assert "\n    BalancedDataLoader(dataset, ..., cost=lengths)\n" in str(caught.value)
    assert re.search(r"\n    def cost\(self, i: int\) -> int: return ", str(caught.value))


def test_an_index_of_other_samples_is_refused(index: CostIndex) -> None:
    with pytest.raises(BalancerError, match="cost_index has 6 rows for 3 samples"):
        loader_costs(Items(3), cost_index=index)


def test_a_model_alone_has_nothing_to_time(plain_model: Callable[[int], CostModel]) -> None:
    with pytest.raises(MissingCostError, match="Add cost=lengths"):
        loader_costs(Items(3), cost=plain_model(2))
    dataset = Items(3)
    dataset.cost = lambda i: i  # type: ignore[attr-defined]
    with pytest.raises(MissingCostError, match=r'Add the counts: cost_index={"llm_tokens": lengths}'):
        loader_costs(dataset, cost=plain_model(2))


def test_tokens_whose_square_leaves_64_bits_are_refused_when_they_are_planned() -> None:
    costs = loader_costs(Items(1), cost_index={"llm_tokens": [2**40]})
    with pytest.raises(CostModelError, match="its square leaves int64"):
        times(costs)


def test_no_samples_have_no_costs() -> None:
    for cost in ([], np.zeros((0, 2)), lambda i: 1):
        costs = loader_costs(Items(0), cost=cost)
        assert len(costs.index) == 0
        assert costs.limits_known
