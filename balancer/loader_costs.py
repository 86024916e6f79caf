"""What the samples of a loader cost, from whatever the user has: numbers, a function, an index, or the dataset itself.

    cost=                cost_index=        counts that limits see                      times
    numbers, cost(i)     -                  these numbers, rounded up                   these numbers
    numbers, cost(i)     index, columns     the index                                   these numbers
    CostModel            index, columns     the index                                   the model
    -                    index, columns     the index                                   PER_TOKEN
    - or CostModel       -                  what the dataset says (`dataset_costs`)     as above

Nothing is decoded and no sample is loaded. Without a cost model, `PER_TOKEN` stands in: a token costs one unit, a patch
of a vision tower a tenth of that, and attention lets a token of a sample of 65,536 tokens cost twice as much as one of
a short sample; these are the proportions of a 7-billion-parameter LLM with a 0.7-billion-parameter tower. Price: for
other proportions the balance is off; give `cost=CostModel.from_config(...)` or measured times.

Numbers that are no whole numbers, or beyond 31 bits, are made so by another unit: only their ratios count for times.
Limits see them rounded up, in the caller's unit; those beyond 31 bits have no limits (`limits_known`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.cost_table import AS_GIVEN, table_of, with_times
from balancer.counts import COUNT_COLUMNS, Int64Array
from balancer.dataset_costs import DatasetCounts, costs_as_array, costs_of_each, is_index, known_costs
from balancer.errors import BalancerError, MissingCostError
from balancer.select import SelectIndex

Numbers: TypeAlias = Sequence[int] | Sequence[float] | Sequence[Sequence[float]] | NDArray[Any]
Cost: TypeAlias = Numbers | Callable[[int], float | Sequence[float]] | CostModel
IndexOrColumns: TypeAlias = SelectIndex | Mapping[str, Numbers]

NUM_COST_COLUMNS = 2
PER_TOKEN = CostModel(
    stages=tuple(
        StageCost(forward=terms, backward=terms.scaled(2.0))
        for terms in (StageTerms(per_patch_ns=100.0), StageTerms(per_token_ns=1000.0, per_token_sq_ns=1000.0 / 2**16))
    ),
    note="proportions of an LLM of 7 billion parameters; only ratios count",
)
_LARGEST_TOKENS = 2**31  # squares of longer samples leave 64 bits
_FINEST_COST = 2.0**30
_LARGEST_WITHOUT_UNIT = 2**20  # a cell of millions of samples still keeps the largest capacity
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderCosts:
    """What planning needs to know of the samples of a dataset.

    Attributes:
        index: counts of every sample, in the order of the dataset.
        cost_model: counts to times.
        labels_known: whether `label_tokens` of the index are those of the samples; otherwise they are 0.
        by_stage: the model has the stages of the caller's ParallelSpec; otherwise one encoder and one LLM stage.
        limits_known: whether tokens and patches of the index are in the caller's unit, so that capacities apply.
    """

    index: SelectIndex
    cost_model: CostModel
    labels_known: bool
    by_stage: bool
    limits_known: bool = True


def loader_costs(dataset: Any, *, cost: Cost | None = None, cost_index: IndexOrColumns | None = None) -> LoaderCosts:
    """The costs of `dataset`, n samples.

    Args:
        cost: int or float [n], or [n, 2] for (encoder, LLM), any unit, at least 0; or a function of the index that
            gives one or two numbers; or a model of times. None: see the module.
        cost_index: a `dataloaders.CostIndex`, or columns [n] by name: `llm_tokens`, `label_tokens`, `patches`,
            `visual_tokens`, `num_items` (also `full_total_sq`, `window_total_sq`). `llm_tokens` are needed unless
            `cost` has numbers; others are 0. None: the dataset's own.

    Raises:
        MissingCostError: nothing says what a sample costs; the text shows the line to add.
        BalancerError: numbers of another shape or length, negative or not finite, or a function that fails.
    """
    numbers = None if cost is None or isinstance(cost, CostModel) else _numbers(dataset, cost)
    if cost_index is not None:
        return _of_counts(_given_counts(cost_index, len(dataset), numbers), cost, numbers)
    own = getattr(dataset, "cost_index", None)
    if numbers is not None and own is None:
        return _of_numbers(numbers)
    known = known_costs(dataset)
    if known is None:
        raise _missing(dataset)
    if isinstance(known, DatasetCounts):
        return _of_counts(known, cost, numbers)
    if isinstance(cost, CostModel):
        raise MissingCostError(
            "a CostModel turns counts into times, and the dataset's cost(i) gives no counts. Add the counts: "
            'cost_index={"llm_tokens": lengths}, one number per sample'
        )
    return _of_numbers(_checked_costs(known))


def _numbers(dataset: Any, cost: Any) -> NDArray[Any]:
    """Numbers [n, 2] of the caller, checked."""
    if callable(cost):
        return _checked_costs(costs_of_each(cost, range(len(dataset))))
    return _checked_costs(costs_as_array(cost, len(dataset)))


def _checked_costs(array: NDArray[Any]) -> NDArray[Any]:
    """Costs [n] or [n, 2] as int64 or float64 [n, 2], finite and not negative."""
    shape = array.shape
    if array.ndim == 1:
        array = np.stack([np.zeros_like(array), array], axis=1)
    if array.ndim != 2 or array.shape[1] != NUM_COST_COLUMNS or array.dtype.kind not in "iuf":
        raise BalancerError(
            f"costs have shape {shape} and type {array.dtype}; expected numbers [n], or [n, 2] for (encoder, LLM)"
        )
    if len(array) and not (np.isfinite(array).all() and array.min() >= 0):
        row = int((~np.isfinite(array) | (array < 0)).any(axis=1).argmax())
        raise BalancerError(
            f"costs are finite and not negative; the smallest is {array.min()}, the first wrong one of sample {row}"
        )
    # Unsigned ones may not fit into int64; they are scaled below like other large numbers.
    return array.astype(np.int64 if array.dtype.kind == "i" else np.float64)


def _of_numbers(costs: NDArray[Any]) -> LoaderCosts:
    """Limits and times from the same numbers [n, 2]."""
    limits_known = not len(costs) or float(costs.max()) <= _LARGEST_TOKENS
    sizes = costs if limits_known else costs / costs.max() * _LARGEST_WITHOUT_UNIT
    whole = np.ceil(sizes).astype(np.int64)
    # Zero-cost samples weigh one unit, or they could all end up on one rank.
    columns = {"llm_tokens": np.maximum(whole[:, 1], 1), "patches": whole[:, 0]}
    return LoaderCosts(
        index=with_times(table_of(columns, len(costs)), _times(costs)),
        cost_model=AS_GIVEN,
        labels_known=False,
        by_stage=False,
        limits_known=limits_known,
    )


def _times(costs: NDArray[Any]) -> Int64Array:
    """Costs [n, 2] in whole units, int64 [n, 2]; an LLM cost is at least 1."""
    if len(costs) and (float(costs.max()) > _LARGEST_TOKENS or (costs != np.rint(costs)).any()):
        # Fractions (seconds, say) would be lost in whole numbers; only ratios matter, so the unit is another one.
        costs = costs / costs.max() * _FINEST_COST
    times: Int64Array = np.rint(costs).astype(np.int64)
    return np.stack([times[:, 0], np.maximum(times[:, 1], 1)], axis=1)


def _of_counts(counts: DatasetCounts, cost: Cost | None, numbers: NDArray[Any] | None) -> LoaderCosts:
    """Limits and labels from counts; times from numbers [n, 2], a model, or `PER_TOKEN`."""
    index, model = counts.index, cost if isinstance(cost, CostModel) else PER_TOKEN
    if numbers is not None:
        index, model = with_times(index, _times(numbers)), AS_GIVEN
    elif model is PER_TOKEN:
        _logger.info("no cost model was given: a token counts as one unit, a patch as a tenth (cost=CostModel...)")
    return LoaderCosts(
        index=index, cost_model=model, labels_known=counts.labels_known, by_stage=isinstance(cost, CostModel)
    )


def _given_counts(cost_index: Any, num_samples: int, numbers: NDArray[Any] | None) -> DatasetCounts:
    if is_index(cost_index):
        if len(cost_index) != num_samples:
            raise BalancerError(f"cost_index has {len(cost_index)} rows for {num_samples} samples")
        return DatasetCounts(index=cost_index, labels_known=True)
    if not isinstance(cost_index, Mapping):
        raise BalancerError(
            f"cost_index is a {type(cost_index).__name__}; give a dataloaders CostIndex, or columns by name: "
            f'{{"llm_tokens": lengths}}'
        )
    if unknown := [str(name) for name in cost_index if name not in COUNT_COLUMNS]:
        raise BalancerError(f"cost_index has columns {unknown}; known are {', '.join(COUNT_COLUMNS)}")
    columns: dict[str, NDArray[Any]] = {name: np.asarray(column) for name, column in cost_index.items()}
    for name, column in columns.items():
        if column.shape != (num_samples,):
            raise BalancerError(f"cost_index[{name!r}] has shape {column.shape} for {num_samples} samples")
    if "llm_tokens" not in columns:
        own = None if numbers is None else _of_numbers(numbers)
        if own is None or not own.limits_known:
            raise MissingCostError(
                'cost_index has no column "llm_tokens", which says how long a sample is. Add it: '
                'cost_index={"llm_tokens": lengths, ...}, or cost=lengths'
            )
        columns["llm_tokens"] = np.asarray(own.index.samples["llm_tokens"])
    return DatasetCounts(index=table_of(columns, num_samples), labels_known="label_tokens" in columns)


def _missing(dataset: Any) -> MissingCostError:
    return MissingCostError(
        f"no cost is known for these samples (of a {type(dataset).__name__}). Add cost=lengths (one number per sample, "
        "e.g. its tokens), or give the dataset a method cost(i) that does not decode the sample:\n"
        "    BalancedDataLoader(dataset, ..., cost=lengths)\n"
        "    def cost(self, i: int) -> int: return self.lengths[i]"
    )
