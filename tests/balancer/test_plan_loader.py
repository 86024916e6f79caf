"""The trainer's loader: what the plan says is what arrives, nothing else is opened, and errors travel as values."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.batch import MicroBatch  # noqa: E402
from balancer.cost_model import CostModel  # noqa: E402
from balancer.errors import PlanError  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.plan import Capacities  # noqa: E402
from balancer.plan_loader import PlanLoader, SampleReader, StepBatches  # noqa: E402
from balancer.plan_sequence import PlanSequence  # noqa: E402
from dataloaders.errors import SourceError  # noqa: E402
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator  # noqa: E402
from dataloaders.index import CostIndex  # noqa: E402
from dataloaders.probe.reader import ByteReader  # noqa: E402
from dataloaders.record import Record  # noqa: E402
from dataloaders.scan import scan_source  # noqa: E402
from dataloaders.source import SampleSource  # noqa: E402
from dataloaders.tar_source import TarSource  # noqa: E402

CELL = 784
ESTIMATOR = Qwen25VLEstimator(
    Qwen25VLConfig(min_pixels=4 * CELL, max_pixels=16 * CELL, video_min_pixels=4 * CELL, video_max_pixels=16 * CELL)
)
PlainModel = Callable[[int], CostModel]


@pytest.fixture(scope="module")
def source(small_shard: Path) -> TarSource:
    return TarSource(str(small_shard))


@pytest.fixture(scope="module")
def index(source: TarSource) -> CostIndex:
    return scan_source(source, ESTIMATOR)


@pytest.fixture(scope="module")
def reader(source: TarSource, index: CostIndex) -> SampleReader:
    return SampleReader(source=source, index=index, estimator=ESTIMATOR)


@pytest.fixture(scope="module")
def plans(index: CostIndex, plain_model: PlainModel) -> PlanSequence:
    return PlanSequence(
        index=index,
        ids=np.arange(6),
        global_batch_size=4,
        layout=Layout(dp_size=2),
        cost_model=plain_model(2),
        capacities=Capacities(tokens=150),
        seed=1,
    )


class Watched:
    """A source that counts which samples are read, and fails where it is told to."""

    def __init__(self, source: SampleSource, broken: int | None = None) -> None:
        self.source, self.fingerprint, self.broken = source, source.fingerprint, broken
        self.records: Counter[int] = Counter()
        self.media: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.source)

    def record(self, i: int) -> Record:
        self.records[i] += 1
        if i == self.broken:
            raise OSError(f"the disk of sample {i} is gone")
        return self.source.record(i)

    def media_reader(self, i: int, j: int) -> ByteReader:
        raise AssertionError("training probes no header")

    def media_bytes(self, i: int, j: int) -> bytes:
        self.media[i] += 1
        return self.source.media_bytes(i, j)

    def place(self, i: int) -> str:
        return self.source.place(i)


def flat(steps: list[StepBatches]) -> list[MicroBatch | None]:
    return [batch for step in steps for batch in step.microbatches]


def test_every_rank_gets_the_cells_of_its_plan_in_slot_order(reader: SampleReader, plans: PlanSequence) -> None:
    seen: list[int] = []
    for dp_rank in range(2):
        for number, batches in enumerate(PlanLoader(reader, plans, dp_rank=dp_rank, steps=range(2))):
            assert batches.plan is plans.plan(number)
            assert batches.error is None
            assert batches.data_wait_ms >= 0.0
            assert len(batches.microbatches) == batches.plan.num_microbatches
            for m, batch in enumerate(batches.microbatches):
                members = batches.plan.members(dp_rank, m).tolist()
                assert (batch is None) == (not members)
                if batch is not None:
                    assert batch.sample_ids.tolist() == members
                    assert (batch.step, batch.microbatch) == (number, m)
                    assert batch.tokens.numel() == batches.plan.llm_tokens[dp_rank, m]
                    assert batch.visual_index.numel() == batches.plan.visual_tokens[dp_rank, m]
                    assert batch.patches.shape[0] == batches.plan.patches[dp_rank, m]
                    assert batch.num_label_tokens == batches.plan.label_tokens[dp_rank, m]
                    seen += members
    assert sorted(seen) == list(range(6)), "an epoch holds every sample once over all ranks"


def test_workers_change_nothing_and_their_errors_arrive_at_their_own_step(
    small_shard: Path,
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
    plain_model: PlainModel,
    tmp_path: Path,
) -> None:
    extra = write_shard(tmp_path / "extra.tar", [(f"9{i}.json", chat_json("Gone?", "Soon.")) for i in range(2)])
    source = TarSource([str(small_shard), str(extra)])
    index = scan_source(source, ESTIMATOR)
    reader = SampleReader(source=TarSource([str(small_shard), str(extra)]), index=index, estimator=ESTIMATOR)
    plans = PlanSequence(
        index=index,
        ids=np.arange(8),
        global_batch_size=3,
        layout=Layout(),
        cost_model=plain_model(2),
        capacities=Capacities(tokens=150),
        shuffle=False,
    )
    here = list(PlanLoader(reader, plans, dp_rank=0, steps=range(2)))
    extra.unlink()
    there = list(PlanLoader(reader, plans, dp_rank=0, steps=range(3), num_workers=1))
    for one, other in zip(flat(here), flat(there), strict=False):
        assert one is not None
        assert other is not None
        for field in dataclasses.fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name
    assert [step.error for step in there[:2]] == [None, None]
    assert isinstance(there[2].error, OSError | SourceError)
    assert "extra.tar" in str(there[2].error)


def test_a_resumed_range_opens_nothing_before_its_first_step(
    source: TarSource, index: CostIndex, plans: PlanSequence
) -> None:
    watched = Watched(source)
    loader = PlanLoader(
        SampleReader(source=watched, index=index, estimator=ESTIMATOR), plans, dp_rank=0, steps=range(1001, 1003)
    )
    assert len(loader) == 2
    assert not watched.records, "making the loader reads nothing"
    first = next(iter(loader))
    own = {i for m in range(first.plan.num_microbatches) for i in first.plan.members(0, m).tolist()}
    assert first.plan.step == 1001
    assert set(watched.records) == own
    assert set(watched.media) == {i for i in own if index.samples["num_items"][i]}
    assert set(watched.records.values()) == {1}


def test_an_error_of_one_cell_is_carried_and_the_other_cells_still_arrive(
    source: TarSource, index: CostIndex, plans: PlanSequence
) -> None:
    broken = int(plans.sample_ids(0)[0])
    rank = int(plans.plan(0).dp_rank[0])
    reader = SampleReader(source=Watched(source, broken), index=index, estimator=ESTIMATOR)
    steps = list(PlanLoader(reader, plans, dp_rank=rank, steps=range(2)))
    assert isinstance(steps[0].error, OSError)
    assert str(steps[0].error) == f"the disk of sample {broken} is gone"
    assert steps[1].error is None
    (cell,) = [m for m in range(steps[0].plan.num_microbatches) if broken in steps[0].plan.members(rank, m)]
    for m, batch in enumerate(steps[0].microbatches):
        assert (batch is None) == (m == cell or not len(steps[0].plan.members(rank, m)))


def test_ranks_without_an_encoder_read_no_media(source: TarSource, index: CostIndex, plans: PlanSequence) -> None:
    watched = Watched(source)
    reader = SampleReader(source=watched, index=index, estimator=ESTIMATOR, with_pixels=False)
    whole = PlanLoader(SampleReader(source=source, index=index, estimator=ESTIMATOR), plans, dp_rank=0, steps=range(2))
    for lean, full in zip(PlanLoader(reader, plans, dp_rank=0, steps=range(2)), whole, strict=True):
        for one, other in zip(lean.microbatches, full.microbatches, strict=True):
            if one is None or other is None:
                assert one is other
                continue
            assert one.patches.shape == (0, other.patches.shape[1])
            for name in ("tokens", "labels", "position_ids", "visual_index", "grids", "loss_weights"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert watched.records
    assert not watched.media


def test_a_rank_without_samples_gets_steps_of_empty_cells(
    source: TarSource, index: CostIndex, plans: PlanSequence
) -> None:
    alone = dataclasses.replace(plans, ids=np.array([4]))
    reader = SampleReader(source=Watched(source), index=index, estimator=ESTIMATOR)
    empty = 1 - int(alone.plan(0).dp_rank[0])
    steps = list(PlanLoader(reader, alone, dp_rank=empty, steps=range(3)))
    assert [step.microbatches for step in steps] == [(None,) * step.plan.num_microbatches for step in steps]
    assert len(steps) == 3


def test_a_plan_that_cannot_be_made_is_raised_at_its_own_step_not_where_it_was_read_ahead(
    reader: SampleReader, plans: PlanSequence
) -> None:
    class FailsLater(PlanSequence):
        def plan(self, step, *, policy=None):  # type: ignore[no-untyped-def]
            if step == 1:
                raise PlanError("step 1 does not fit")
            return super().plan(step, policy=policy)

    later = FailsLater(**{f.name: getattr(plans, f.name) for f in dataclasses.fields(plans) if f.init})
    steps = iter(PlanLoader(reader, later, dp_rank=0, steps=range(3)))
    assert next(steps).plan.step == 0
    with pytest.raises(PlanError, match="step 1 does not fit"):
        next(steps)


def test_a_loader_can_be_iterated_again(reader: SampleReader, plans: PlanSequence) -> None:
    loader = PlanLoader(reader, plans, dp_rank=1, steps=range(2))
    ids = [[None if b is None else b.sample_ids.tolist() for b in flat(list(loader))] for _ in range(2)]
    assert ids[0] == ids[1]


def test_packs_are_aligned_and_weighted_as_the_reader_says(source: TarSource, index: CostIndex) -> None:
    reader = SampleReader(
        source=source, index=index, estimator=ESTIMATOR, align_tokens=64, loss_reduction="sample_mean"
    )
    batch = reader.read([0, 4], step=2, microbatch=1)
    assert batch.tokens.numel() % 64 == 0
    assert batch.weight_sum == pytest.approx(2.0)
    assert (batch.step, batch.microbatch) == (2, 1)
