"""Packers and partitioners of installed packages, called as they are: each is optional and skipped when absent.

    trl           pack_dataset(strategy="bfd"): its function on an Arrow table whose tokens are nulls: no bytes move
    transformers  BatchRebalanceSampler: ranks x slots from lengths, without a capacity
    lhotse        DynamicCutSampler, DynamicBucketingSampler (by padded tokens) and concat_cuts
    prtpy         first-fit and best-fit decreasing, greedy (LPT) and Karmarkar-Karp
    binpacking    to_constant_volume (least loaded fit), to_constant_bin_number (LPT)

They have the signatures of `baselines`. Making the dict, table or list of samples they ask for is part of a call, as it
is for a user; it is small beside what they do. What they return is reported as it is, above capacities included.
Packages are imported on first use, some of them take seconds.
"""

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from tools.benchmarks.baseline_types import Bins, Grid, IntArray, Items, Weights
from tools.benchmarks.baselines import GridBaseline, PackBaseline, PartitionBaseline

PACKAGES = ("trl", "transformers", "lhotse", "prtpy", "binpacking")


def installed_versions() -> dict[str, str]:
    """Version of each package that is installed."""
    return {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name) is not None}


def missing_packages() -> list[str]:
    """Packages whose rows will be absent."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def trl_bfd(items: Items) -> list[list[int]]:
    """TRL's whole packing function, as `pack_dataset(strategy="bfd")` calls it on a batch."""
    arrow, data_utils = importlib.import_module("pyarrow"), importlib.import_module("trl.data_utils")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(items.sizes[:, 0])])
    tokens = arrow.LargeListArray.from_arrays(arrow.array(offsets), arrow.nulls(int(offsets[-1])))
    packed = data_utils._pack_bfd(arrow.table({"input_ids": tokens}), items.limits[0])
    return _items_of_lengths(packed["seq_lengths"].to_pylist(), items.lengths)


def _items_of_lengths(bins: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """It returns lengths; items of equal length are interchangeable."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for item, length in enumerate(lengths):
        waiting[length].append(item)
    return [[waiting[length].pop() for length in current] for current in bins]


class _Sample:
    """What lhotse's samplers read of an example; they attach an attribute of their own."""

    def __init__(self, index: int, num_tokens: int) -> None:
        self.id = index
        self.num_tokens = num_tokens


def _lhotse_sampler(items: Items, name: str, **options: Any) -> list[list[int]]:
    sampling = importlib.import_module("lhotse.dataset.sampling")
    constraint = importlib.import_module("lhotse.dataset.sampling.base").TokenConstraint(max_tokens=items.limits[0])
    samples = [_Sample(index, length) for index, length in enumerate(items.lengths)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = getattr(sampling, name)(
            samples, constraint=constraint, shuffle=False, world_size=1, rank=0, **options
        )
        return [[sample.id for sample in batch] for batch in sampler]


def lhotse_dynamic(items: Items) -> list[list[int]]:
    """Consecutive samples until one more of the longest would not fit; made for padded batches."""
    return _lhotse_sampler(items, "DynamicCutSampler")


def lhotse_bucketing(items: Items) -> list[list[int]]:
    """The same within 30 buckets of similar length."""
    return _lhotse_sampler(items, "DynamicBucketingSampler", num_buckets=30, buffer_size=20_000)


class _Cut:
    """What `concat_cuts` uses of a cut."""

    def __init__(self, duration: int, items: list[int]) -> None:
        self.duration = duration
        self.items = items
        self.id = items[0]

    def pad(self, duration: int) -> "_Cut":
        return self

    def append(self, other: "_Cut") -> "_Cut":
        return _Cut(self.duration + other.duration, self.items + other.items)


def lhotse_concat(items: Items) -> list[list[int]]:
    """lhotse `concat_cuts`: the shortest cuts are appended to the longest one that has room."""
    concatenate = importlib.import_module("lhotse.dataset.cut_transforms.concatenate")
    cuts = [_Cut(length, [index]) for index, length in enumerate(items.lengths)]
    return [cut.items for cut in concatenate.concat_cuts(cuts, gap=0, max_duration=items.limits[0])]


def _prtpy_pack(module: str) -> Callable[[Items], Bins]:
    def run(items: Items) -> list[list[int]]:
        algorithm = importlib.import_module(f"prtpy.packing.{module}").decreasing
        sizes = dict(enumerate(items.lengths))
        bins: list[list[int]] = importlib.import_module("prtpy").pack(
            algorithm=algorithm, binsize=items.limits[0], items=sizes
        )
        return bins

    return run


def _prtpy_partition(module: str, name: str) -> Callable[[Weights], Bins]:
    def run(weights: Weights) -> list[list[int]]:
        algorithm = getattr(importlib.import_module(f"prtpy.partitioning.{module}"), name)
        costs = dict(enumerate(weights.stages[-1]))
        parts: list[list[int]] = importlib.import_module("prtpy").partition(
            algorithm=algorithm, numbins=weights.num_parts, items=costs
        )
        return parts

    return run


def binpacking_pack(items: Items) -> list[list[int]]:
    """binpacking `to_constant_volume`: decreasing, into the emptiest bin that has room."""
    bins = importlib.import_module("binpacking").to_constant_volume(dict(enumerate(items.lengths)), items.limits[0])
    return [list(current) for current in bins]


def binpacking_partition(weights: Weights) -> list[list[int]]:
    """binpacking `to_constant_bin_number`: LPT."""
    costs = dict(enumerate(weights.stages[-1]))
    parts = importlib.import_module("binpacking").to_constant_bin_number(costs, weights.num_parts)
    return [list(current) for current in parts]


def transformers_rebalance(grid: Grid) -> IntArray:
    """transformers `BatchRebalanceSampler`, the assignment of all ranks at once. It knows lengths only, as tokens."""
    trainer = importlib.import_module("transformers.trainer_pt_utils")
    num_items = len(grid.lengths)
    sampler = trainer.BatchRebalanceSampler(grid.lengths, num_items, grid.num_ranks, grid.num_slots, shuffle=False)
    ranks = sampler._assign(list(range(num_items)), grid.lengths)
    cells = np.full((num_items, 2), -1, np.int64)
    for rank, slots in enumerate(ranks):
        for slot, items in enumerate(slots):
            cells[items] = rank, slot
    return cells


_PACKERS: Mapping[str, PackBaseline] = MappingProxyType(
    {
        "trl_bfd": PackBaseline(system="trl", run=trl_bfd, max_items=100_000),
        "lhotse_dynamic": PackBaseline(system="lhotse", run=lhotse_dynamic, max_items=100_000),
        "lhotse_bucketing": PackBaseline(system="lhotse", run=lhotse_bucketing, max_items=100_000),
        "lhotse_concat": PackBaseline(system="lhotse", run=lhotse_concat, max_items=10_000),
        "prtpy_first_fit_decreasing": PackBaseline(system="prtpy", run=_prtpy_pack("first_fit"), max_items=3_000),
        "prtpy_best_fit_decreasing": PackBaseline(system="prtpy", run=_prtpy_pack("best_fit"), max_items=3_000),
        "binpacking": PackBaseline(system="binpacking", run=binpacking_pack, max_items=3_000),
    }
)

_PARTITIONERS: Mapping[str, PartitionBaseline] = MappingProxyType(
    {
        "prtpy_greedy": PartitionBaseline(system="prtpy", run=_prtpy_partition("greedy", "greedy")),
        "prtpy_karmarkar_karp": PartitionBaseline(
            system="prtpy", run=_prtpy_partition("karmarkar_karp", "kk"), max_cells=1_000_000
        ),
        "binpacking": PartitionBaseline(system="binpacking", run=binpacking_partition),
    }
)

_GRIDS: Mapping[str, GridBaseline] = MappingProxyType(
    {"transformers_rebalance": GridBaseline(system="transformers", run=transformers_rebalance, may_exceed=True)}
)


def pack_peers() -> dict[str, PackBaseline]:
    """Packers of the packages that are installed."""
    return {name: peer for name, peer in _PACKERS.items() if peer.system in installed_versions()}


def partition_peers() -> dict[str, PartitionBaseline]:
    """Partitioners of the packages that are installed."""
    return {name: peer for name, peer in _PARTITIONERS.items() if peer.system in installed_versions()}


def grid_peers() -> dict[str, GridBaseline]:
    """Grid placers of the packages that are installed."""
    return {name: peer for name, peer in _GRIDS.items() if peer.system in installed_versions()}
