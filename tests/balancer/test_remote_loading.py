"""The whole loader over HTTP: slow, failing and stalling answers change nothing of what arrives, and bytes stay few."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("aiohttp", reason="remote storage")
pytestmark = pytest.mark.torch

from balancer.batch import MicroBatch  # noqa: E402
from balancer.cost_model import CostModel  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.plan import Capacities  # noqa: E402
from balancer.plan_loader import PlanLoader, SampleReader  # noqa: E402
from balancer.plan_sequence import PlanSequence  # noqa: E402
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator  # noqa: E402
from dataloaders.index import CostIndex  # noqa: E402
from dataloaders.scan import scan_source  # noqa: E402
from dataloaders.tar_source import TarSource  # noqa: E402
from tools.benchmarks.range_server import Behaviour, Counts, RangeServer  # noqa: E402
from tools.benchmarks.remote_corpus import write_remote_corpus  # noqa: E402

NUM_SHARDS, SAMPLES_PER_SHARD = 4, 12
NUM_SAMPLES = NUM_SHARDS * SAMPLES_PER_SHARD
ESTIMATOR = Qwen25VLEstimator(Qwen25VLConfig(min_pixels=4 * 784, max_pixels=16 * 784))
MakePlans = Callable[[str, int], PlanSequence]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_remote_corpus(
        tmp_path_factory.mktemp("shards"),
        num_shards=NUM_SHARDS,
        samples_per_shard=SAMPLES_PER_SHARD,
        num_pictures=12,
        sizes_px=((112, 84), (56, 84), (112, 112)),
    )


@pytest.fixture(scope="module")
def local(shards: list[Path]) -> TarSource:
    return TarSource([str(shard) for shard in shards])


@pytest.fixture(scope="module")
def index(local: TarSource) -> CostIndex:
    return scan_source(local, ESTIMATOR)


@pytest.fixture
def server(shards: list[Path]) -> Iterator[RangeServer]:
    with RangeServer(shards[0].parent) as server:
        yield server


@pytest.fixture
def remote(server: RangeServer, shards: list[Path]) -> TarSource:
    """The shards behind the server, which from here on is slow, fails now and then, and stalls once."""
    source = TarSource([server.url(shard.name) for shard in shards])
    server.counts = Counts()
    server.behaviour = Behaviour(latency_s=0.005, first=(503, 0, 503), error_share=0.05, stall_s=20.0)
    return source


@pytest.fixture
def plans_of(index: CostIndex, plain_model: Callable[[int], CostModel]) -> MakePlans:
    def make(shuffle: Any, dp_size: int) -> PlanSequence:
        return PlanSequence(
            index=index,
            ids=np.arange(NUM_SAMPLES),
            global_batch_size=8,
            layout=Layout(dp_size=dp_size),
            cost_model=plain_model(2),
            capacities=Capacities(tokens=2048),
            shuffle=shuffle,
            block_shards=2,
            seed=3,
        )

    return make


def batches(source: TarSource, plans: PlanSequence, *, dp_rank: int = 0, num_workers: int = 0) -> list[MicroBatch]:
    """The micro-batches of an epoch, all of which must have loaded, without a stand-in."""
    reader = SampleReader(source=source, index=plans.index, estimator=ESTIMATOR)  # type: ignore[arg-type]
    steps = range(plans.steps_per_epoch)
    loaded = list(PlanLoader(reader, plans, dp_rank=dp_rank, steps=steps, num_workers=num_workers))
    assert [step.error for step in loaded] == [None] * len(steps)
    return [batch for step in loaded for batch in step.microbatches if batch is not None]


def same(one: MicroBatch, other: MicroBatch) -> bool:
    """Whether two micro-batches agree in every field but the places of samples, which name their shard."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)]
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    assert len(tensors) > 4
    return all(torch.equal(a, b) for a, b in tensors) and one.num_samples == other.num_samples


def wanted_bytes(source: TarSource) -> int:
    """Bytes of the texts and media of all samples."""
    return sum(source.table.size(row) for i in range(len(source)) for row in source.table.rows(i))


@pytest.mark.parametrize("shuffle", ["block", "full"])
def test_every_sample_arrives_as_from_disk_over_a_server_that_fails_and_stalls(
    local: TarSource, remote: TarSource, server: RangeServer, plans_of: MakePlans, shuffle: str
) -> None:
    plans = plans_of(shuffle, 1)
    expected = batches(local, plans)
    assert not server.counts.requests
    arrived = batches(remote, plans, num_workers=2)
    assert sum(batch.num_samples for batch in arrived) == NUM_SAMPLES
    assert len(arrived) == len(expected)
    assert all(map(same, arrived, expected))
    assert server.counts.stalls == 1
    assert server.counts.errors >= 1
    assert server.counts.bytes_sent <= 1.1 * wanted_bytes(local)


def test_two_ranks_together_read_the_dataset_once(
    local: TarSource, remote: TarSource, server: RangeServer, plans_of: MakePlans
) -> None:  # DU-13
    plans = plans_of("block", 2)
    arrived = [batches(remote, plans, dp_rank=rank, num_workers=1) for rank in (0, 1)]
    assert all(arrived)
    assert sum(batch.num_samples for of_rank in arrived for batch in of_rank) == NUM_SAMPLES
    assert wanted_bytes(local) <= server.counts.bytes_sent <= 1.1 * wanted_bytes(local)


def test_a_step_of_a_block_epoch_touches_the_shards_of_its_windows_alone(
    remote: TarSource, server: RangeServer, plans_of: MakePlans
) -> None:
    plans = plans_of("block", 1)
    reader = SampleReader(source=remote, index=plans.index, estimator=ESTIMATOR)  # type: ignore[arg-type]
    (step,) = PlanLoader(reader, plans, dp_rank=0, steps=range(1), num_workers=1)
    assert step.error is None
    touched = {name for name, _, _ in server.counts.ranges}
    assert len(touched) == 2
