"""What datasets say of themselves: torch's views of them, Hugging Face columns, and a function of their own."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer import dataset_costs
from balancer.dataset_costs import DatasetCounts, known_costs
from balancer.errors import BalancerError, MissingCostError
from balancer.loader_costs import PER_TOKEN, loader_costs
from dataloaders.demo import DEMO_PROCESSOR
from dataloaders.estimators import estimator_from_config
from dataloaders.index import CostIndex
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource


class Silent:
    """n samples that fail when one is loaded."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> int:
        raise AssertionError("costs never load a sample")


class Indexed(Silent):
    def __init__(self, index: CostIndex) -> None:
        super().__init__(len(index))
        self.cost_index = index


class Costed(Silent):
    """Knows the cost of a sample; counts who asks."""

    def __init__(self, costs: Sequence[Any]) -> None:
        super().__init__(len(costs))
        self.costs, self.asked = list(costs), Counter[int]()

    def cost(self, i: int) -> Any:
        self.asked[i] += 1
        return self.costs[i]


class Broken(Silent):
    def cost(self, i: int) -> int:
        return i if i < 1 else len(i)  # type: ignore[arg-type]


class Chosen(Silent):
    """Looks like torch's Subset."""

    def __init__(self, dataset: Any, indices: Any) -> None:
        super().__init__(len(indices))
        self.dataset, self.indices = dataset, indices


class Chain(Silent):
    """Looks like torch's ConcatDataset."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        super().__init__(sum(map(len, datasets)))
        self.datasets, self.cumulative_sizes = datasets, np.cumsum([len(part) for part in datasets]).tolist()


@pytest.fixture(scope="module")
def index(small_shard: Path) -> CostIndex:
    return scan_source(TarSource([str(small_shard)]), estimator_from_config(DEMO_PROCESSOR))


def tokens(dataset: Any) -> list[int]:
    known = known_costs(dataset)
    assert isinstance(known, DatasetCounts)
    found: list[int] = np.asarray(known.index.samples["llm_tokens"]).tolist()
    return found


def test_a_cost_function_is_asked_once_for_each_sample_and_no_sample_is_loaded() -> None:
    dataset = Costed([4, 2, 8])
    costs = loader_costs(dataset)
    assert costs.index.samples["llm_tokens"].tolist() == [4, 2, 8]
    assert dataset.asked == {0: 1, 1: 1, 2: 1}
    assert not costs.labels_known


def test_a_cost_may_be_an_array_or_pairs() -> None:
    dataset = Silent(3)
    dataset.cost = np.array([4, 2, 8])  # type: ignore[attr-defined]
    assert loader_costs(dataset).index.samples["llm_tokens"].tolist() == [4, 2, 8]
    dataset.cost = [1, 2]  # type: ignore[attr-defined]
    with pytest.raises(BalancerError, match="cost has 2 entries for 3 samples"):
        loader_costs(dataset)
    assert loader_costs(Costed([(6, 1), (0, 3)])).index.samples["patches"].tolist() == [6, 0]


def test_a_cost_that_fails_names_its_sample() -> None:
    with pytest.raises(BalancerError, match=r"cost\(1\) failed: TypeError: "):
        loader_costs(Broken(2))


@given(
    rows=st.lists(st.integers(-6, 5), max_size=12),
    again=st.lists(st.integers(0, 100), max_size=8),
)
def test_views_of_views_have_the_costs_of_their_samples(rows: list[int], again: list[int]) -> None:
    costs = [3, 1, 4, 1, 5, 9]
    view = Chosen(Costed(costs), rows)
    picked = [i % len(rows) for i in again] if rows else []
    known = known_costs(Chosen(view, picked))
    assert isinstance(known, np.ndarray)
    assert known.tolist() == [costs[rows[i]] for i in picked]


def test_a_view_asks_for_the_samples_that_it_holds() -> None:
    dataset = Costed([3, 1, 4, 1, 5])
    assert loader_costs(Chosen(dataset, [4, 0])).index.samples["llm_tokens"].tolist() == [5, 3]
    assert dataset.asked == {4: 1, 0: 1}
    with pytest.raises(BalancerError, match="a Subset names index 7 of a dataset of 5 samples"):
        loader_costs(Chosen(dataset, [0, 7]))
    with pytest.raises(BalancerError, match="a Subset names index -6 of a dataset of 5 samples"):
        loader_costs(Chosen(dataset, [0, -6]))


def test_views_of_an_index_keep_counts_labels_and_names(index: CostIndex) -> None:
    whole = np.asarray(index.samples["llm_tokens"]).tolist()
    assert tokens(Chosen(Indexed(index), [5, 1, 1])) == [whole[5], whole[1], whole[1]]
    both = Chain([Indexed(index), Chosen(Indexed(index), np.array([2, 0])), Indexed(index)])
    assert tokens(both) == [*whole, whole[2], whole[0], *whole]
    known = known_costs(Chosen(both, [7, 6]))
    assert isinstance(known, DatasetCounts)
    assert known.labels_known
    assert known.index.keys(0) == index.keys(0)
    assert known.index.samples["label_tokens"].tolist() == [index.samples["label_tokens"][i] for i in (0, 2)]


def test_parts_that_only_have_numbers_are_joined() -> None:
    known = known_costs(Chain([Costed([1, 2]), Chosen(Costed([3, 4, 5]), [2])]))
    assert isinstance(known, np.ndarray)
    assert known.tolist() == [1, 2, 5]
    assert known_costs(Chain([Silent(2), Silent(1)])) is None
    assert known_costs(Chosen(Silent(2), [0])) is None


def test_parts_that_say_different_things_are_not_mixed(index: CostIndex) -> None:
    for parts, text in (
        ([Indexed(index), Costed([1])], r"part 0 \(Indexed\): counts of tokens, part 1 \(Costed\): numbers in a unit"),
        ([Costed([1]), Silent(1)], r"part 1 \(Silent\): nothing. Add cost=lengths"),
        ([Costed([1]), Costed([(1, 2)])], "do not say alike"),
    ):
        with pytest.raises(MissingCostError, match=text):
            loader_costs(Chain(parts))
        assert loader_costs(Chain(parts), cost=range(len(Chain(parts)))).index is not None


def test_an_index_that_is_none_or_of_other_samples_is_refused(index: CostIndex) -> None:
    dataset = Silent(3)
    dataset.cost_index = index  # type: ignore[attr-defined]
    with pytest.raises(BalancerError, match="cost_index has 6 rows for 3 samples"):
        loader_costs(dataset)
    dataset.cost_index = [1, 2, 3]  # type: ignore[attr-defined]
    with pytest.raises(BalancerError, match=r"Silent.cost_index is a list, no index; pass cost= or cost_index="):
        loader_costs(dataset)


@pytest.mark.torch
def test_torchs_own_views_are_known(index: CostIndex) -> None:
    data = pytest.importorskip("torch.utils.data")
    whole = np.asarray(index.samples["llm_tokens"]).tolist()
    assert tokens(data.Subset(Indexed(index), [3, 0])) == [whole[3], whole[0]]
    assert tokens(data.ConcatDataset([Indexed(index), Indexed(index)])) == whole * 2
    first, second = data.random_split(Indexed(index), [4, 2])
    assert sorted(tokens(first) + tokens(second)) == sorted(whole)
    assert data.random_split(data.ConcatDataset([Costed([1, 2]), Costed([3])]), [2, 1])


def hf(columns: dict[str, Any]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


@pytest.mark.parametrize("name", ["length", "lengths", "num_tokens"])
def test_a_column_of_lengths_is_taken(name: str) -> None:
    costs = loader_costs(hf({"text": ["a", "bb", "c"], name: [7, 3, 5]}))
    assert costs.index.samples["llm_tokens"].tolist() == [7, 3, 5]
    assert costs.cost_model is PER_TOKEN
    assert not costs.labels_known


def test_lengths_of_input_ids_come_from_offsets_and_labels_are_counted() -> None:
    ids = [[1, 2, 3], [4], [], [5, 6]]
    labels = [[-100, 2, 3], [4], [], [5, -100]]
    costs = loader_costs(hf({"input_ids": ids, "labels": labels}))
    assert costs.index.samples["llm_tokens"].tolist() == [3, 1, 0, 2]
    assert costs.index.samples["label_tokens"].tolist() == [2, 0, 0, 0], "the first position is predicted by none"
    assert costs.labels_known
    assert not loader_costs(hf({"input_ids": ids})).labels_known


@given(seed=st.integers(0, 2**16), share=st.booleans())
def test_selected_shuffled_and_joined_tables_follow_their_rows(*, seed: int, share: bool) -> None:
    datasets = pytest.importorskip("datasets")
    rng = np.random.Generator(np.random.Philox(seed))
    made = [[int(n) for n in rng.integers(1, 9, 5)] for _ in range(2)]
    parts = [hf({"input_ids": [[7] * n for n in lengths], "labels": [[7] * n for n in lengths]}) for lengths in made]
    whole = datasets.concatenate_datasets(parts)
    lengths = np.array([*made[0], *made[1]])
    rows = rng.permutation(10)[:6]
    view = whole.select(rows.tolist())
    if share:
        view, rows = view.shard(2, 0, contiguous=True), rows[:3]
    known = known_costs(view)
    assert isinstance(known, DatasetCounts)
    assert known.index.samples["llm_tokens"].tolist() == lengths[rows].tolist()
    assert known.index.samples["label_tokens"].tolist() == (lengths[rows] - 1).tolist()
    sliced = whole.select(range(3, 8))  # a slice of the table, without a list of rows
    assert tokens(sliced) == lengths[3:8].tolist()


def test_labels_that_are_many_are_left_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = hf({"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3]]})
    monkeypatch.setattr(dataset_costs, "MAX_LABELS", 2)
    costs = loader_costs(dataset)
    assert not costs.labels_known
    assert not costs.index.samples["label_tokens"].any()


def test_columns_of_something_else_are_refused_or_passed_over() -> None:
    with pytest.raises(BalancerError, match="column 'length' holds string, no lengths; rename it, or pass cost="):
        loader_costs(hf({"length": ["a", "b"]}))
    with pytest.raises(BalancerError, match=r"column 'length' has no length for sample 1 \(nan\)"):
        loader_costs(hf({"length": [3, None]}))
    with pytest.raises(BalancerError, match=r"column 'length' has no length for sample 0 \(-3.0\)"):
        loader_costs(hf({"length": [-3, 2]}))
    with pytest.raises(BalancerError, match="column 'input_ids' has no length for sample 1"):
        loader_costs(hf({"input_ids": [[1], None]}))
    for columns in ({"text": ["a"]}, {"input_ids": ["1 2 3"]}):
        with pytest.raises(MissingCostError, match=r"of a Dataset\). Add cost=lengths"):
            loader_costs(hf(columns))
    assert loader_costs(hf({"text": ["a", "b"]}), cost=[1, 2]).index.samples["llm_tokens"].tolist() == [1, 2]


def test_a_formatted_or_saved_table_gives_the_same_lengths(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = hf({"input_ids": [[1, 2, 3], [4]], "other": [1, 2]})
    dataset.save_to_disk(tmp_path / "saved")
    for view in (dataset.with_format("numpy"), datasets.load_from_disk(tmp_path / "saved"), dataset.flatten_indices()):
        assert tokens(view) == [3, 1]
