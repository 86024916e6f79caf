"""DU-04, DU-05, DU-08, DR-14: `BalancedDataLoader` changes who gets a sample, and nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils.data import Dataset, IterableDataset, SequentialSampler  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from balancer import BalancedDataLoader as ExportedLoader  # noqa: E402
from balancer.errors import BalancerError, LayoutError, MissingCostError, PlanError  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.loader import BalancedBatchSampler, BalancedDataLoader  # noqa: E402
from balancer.metrics import imbalance  # noqa: E402
from balancer.shuffle import epoch_order  # noqa: E402


def skewed(num_samples: int, seed: int = 0) -> np.ndarray:
    """Lengths as of real sets: most are short, a few are very long."""
    rng = np.random.Generator(np.random.Philox(seed))
    return np.clip(np.exp(rng.normal(5.0, 1.2, num_samples)).astype(np.int64), 8, 4096)


class Texts(Dataset[int]):
    """Sample i is the number i; it knows its cost."""

    def __init__(self, costs: np.ndarray) -> None:
        self.costs, self.opened = costs, 0

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, i: int) -> int:
        self.opened += 1
        return i

    def cost(self, i: int) -> int:
        return int(self.costs[i])


class WithoutCost(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> int:
        return i


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def of_four(**options: Any) -> BalancedDataLoader[int]:
    return BalancedDataLoader(Texts(skewed(4)), **options)


def share_of_a_rank() -> DistributedSampler[int]:
    return DistributedSampler(Texts(skewed(4)), num_replicas=2, rank=0)


def loaders(dataset: Dataset[int], dp_size: int, **options: Any) -> list[BalancedDataLoader[int]]:
    layout = Layout(dp_size=dp_size)
    return [BalancedDataLoader(dataset, parallel=layout, dp_rank=rank, **options) for rank in range(dp_size)]


def epoch_of(many: list[BalancedDataLoader[int]]) -> list[list[list[int]]]:
    """[step][rank] -> sample ids."""
    per_rank = [[batch.tolist() for batch in loader] for loader in many]
    return [list(step) for step in zip(*per_rank, strict=True)]


@given(
    num_samples=st.integers(4, 60),
    dp_size=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    policy=st.sampled_from(["joint", "lpt", "sequential"]),
    seed=st.integers(0, 5),
)
def test_a_global_batch_holds_the_samples_of_the_unbalanced_order_split_over_the_ranks(
    *, num_samples: int, dp_size: int, batch_size: int, shuffle: bool, drop_last: bool, policy: str, seed: int
) -> None:
    size = dp_size * batch_size
    if drop_last and num_samples < size:
        return
    costs = skewed(num_samples, seed)
    samplers = [
        BalancedBatchSampler(
            costs, batch_size, parallel=Layout(dp_size=dp_size), dp_rank=rank,
            shuffle=shuffle, drop_last=drop_last, policy=policy, seed=seed,
        )
        for rank in range(dp_size)
    ]  # fmt: skip
    assert len({len(sampler) for sampler in samplers}) == 1
    order = epoch_order(np.arange(num_samples), seed, 0, shuffle).tolist()
    visited: list[int] = []
    steps = list(zip(*(list(sampler) for sampler in samplers), strict=True))
    assert len(steps) == len(samplers[0])
    for number, parts in enumerate(steps):
        assert all(parts), "no rank goes without a sample"
        together = [i for part in parts for i in part]
        assert sorted(together) == sorted(order[number * size : (number + 1) * size])
        visited += together
    assert len(visited) + samplers[0].num_dropped == num_samples
    assert samplers[0].num_dropped < (size if drop_last else dp_size)


@given(costs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=12))
def test_encoder_and_llm_costs_never_leave_a_rank_without_a_sample(costs: list[tuple[int, int]]) -> None:
    layout = Layout(dp_size=2)
    parts = [
        list(BalancedBatchSampler(np.array(costs), len(costs), parallel=layout, dp_rank=rank)) for rank in range(2)
    ]
    assert [len(part) for part in parts] == [1, 1]
    assert sorted(parts[0][0] + parts[1][0]) == list(range(len(costs)))


def test_balancing_brings_the_heaviest_rank_close_to_the_mean() -> None:
    costs = skewed(2000)
    ratios = {}
    for policy in ("joint", "lpt", "sequential"):
        steps = epoch_of(loaders(Texts(costs), 8, batch_size=16, shuffle=True, policy=policy))
        ratios[policy] = np.mean([imbalance([costs[ids].sum() for ids in ranks]) for ranks in steps])
    assert ratios["joint"] <= ratios["lpt"] < 1.05
    assert ratios["sequential"] > 1.3


@pytest.mark.filterwarnings("ignore:This DataLoader will create 16 worker processes")
def test_the_length_does_not_depend_on_workers_or_rank() -> None:
    dataset = Texts(skewed(40))
    lengths = {
        len(loader) for workers in (0, 1, 16) for loader in loaders(dataset, 3, batch_size=4, num_workers=workers)
    }
    assert lengths == {4}
    assert dataset.opened == 0


def test_epochs_advance_by_themselves_and_can_be_set_again_and_again() -> None:
    dataset = Texts(skewed(24))
    (one,) = loaders(dataset, 1, batch_size=6, shuffle=True, seed=3)
    first, second = list(one), list(one)
    assert [batch.tolist() for batch in first] != [batch.tolist() for batch in second]
    (other,) = loaders(dataset, 1, batch_size=6, shuffle=True, seed=3)
    other.set_epoch(1)
    other.set_epoch(1)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in second]
    other.set_epoch(0)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in first]
    (third,) = loaders(dataset, 1, batch_size=6, shuffle=True, seed=4)
    assert [batch.tolist() for batch in third] != [batch.tolist() for batch in first]


def test_collation_and_workers_are_those_of_torch() -> None:
    dataset = Texts(np.full(6, 5))
    plain = list(loaders(dataset, 1, batch_size=2, collate_fn=lambda items: [-i for i in items])[0])
    assert sorted(i for batch in plain for i in batch) == [-5, -4, -3, -2, -1, 0]
    assert ExportedLoader is BalancedDataLoader


def test_a_dataset_without_costs_is_refused_with_the_line_to_add() -> None:
    with pytest.raises(MissingCostError, match=r"Add cost=lengths .*method cost\(i\)"):
        BalancedDataLoader(WithoutCost(), 2)
    lengths = list(range(1, 11))
    for cost in (lengths, np.array(lengths), lambda i: i + 1):
        batches = list(BalancedDataLoader(WithoutCost(), 5, cost=cost))
        assert [len(batch) for batch in batches] == [5, 5]


def test_costs_of_fractions_of_a_unit_balance_like_whole_ones() -> None:
    costs = skewed(64)
    whole, seconds = (
        epoch_of(loaders(WithoutCostOf(64), 4, batch_size=16, cost=values)) for values in (costs, costs * 1e-6)
    )
    ratio = [imbalance([costs[ids].sum() for ids in step]) for step in (whole[0], seconds[0])]
    assert ratio[0] < 1.05
    assert ratio[1] < 1.05


class WithoutCostOf(WithoutCost):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def test_free_samples_are_spread_all_the_same() -> None:
    steps = epoch_of(loaders(Texts(np.zeros(16, dtype=np.int64)), 4, batch_size=4))
    assert [len(ids) for ids in steps[0]] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: of_four(sampler=share_of_a_rank()), BalancerError, "rank its own share.*pass shuffle= and seed="),
        (lambda: of_four(sampler=SequentialSampler(range(4)), shuffle=True), BalancerError, "exclude each other"),
        (lambda: of_four(sampler=7), BalancerError, "sampler=7 is no iterable of indices"),
        (lambda: of_four(batch_sampler=[[0]]), BalancerError, "DistributedSampler"),
        (lambda: BalancedDataLoader(Stream()), BalancerError, "no index to plan with"),
        (lambda: BalancedDataLoader(WithoutCost(), cost=[1, 2]), BalancerError, "2 entries for 10 samples"),
        (lambda: BalancedBatchSampler([3, -1]), BalancerError, "the smallest is -1"),
        (lambda: BalancedBatchSampler([1.0, float("nan")]), BalancerError, "finite"),
        (lambda: BalancedBatchSampler(np.ones((4, 3))), BalancerError, r"shape \(4, 3\)"),
        (lambda: BalancedBatchSampler([1, 2], 0), PlanError, "batch_size=0"),
        (lambda: BalancedBatchSampler([1, 2], parallel=Layout(dp_size=2), dp_rank=2), LayoutError, "dp_rank=2 is"),
        (lambda: BalancedBatchSampler([1], parallel=Layout(dp_size=2), dp_rank=0), PlanError, "do not give each of 2"),
        (lambda: BalancedBatchSampler([1, 2, 3], 4, drop_last=True), PlanError, "do not give each"),
        (lambda: BalancedBatchSampler([]), PlanError, "no samples"),
    ],
)  # fmt: skip
def test_what_cannot_be_balanced_says_why(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_rank_that_cannot_be_known_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match="init_process_group before making the loader"):
        BalancedDataLoader(Texts(skewed(8)), parallel=Layout(dp_size=2))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LayoutError, match="pass parallel= and dp_rank="):
        BalancedDataLoader(Texts(skewed(8)))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert len(BalancedDataLoader(Texts(skewed(8)))) == 8


def test_a_pipeline_layout_counts_replicas_only() -> None:
    sampler = BalancedBatchSampler(skewed(12), 2, parallel=Layout(dp_size=2, pp_size=3), dp_rank=1)
    assert len(sampler) == 3
