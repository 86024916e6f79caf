"""The trainer's loader: what the plan says is what arrives, nothing else is opened, and errors travel as values."""

import dataclasses
import gc
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.batch import MicroBatch  # noqa: E402
from balancer.cost_model import CostModel  # noqa: E402
from balancer.errors import BalancerError, PlanError  # noqa: E402
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


# A module of its own, which workers can find: a source whose disk hangs or which ends the process that reads.
ODD_SOURCE = """
import os, time

class OddSource:
    def __init__(self, source, hangs=(), kills=()):
        self.source, self.fingerprint, self.hangs, self.kills = source, source.fingerprint, hangs, kills

    def __len__(self):
        return len(self.source)

    def record(self, i):
        return self.source.record(i)

    def media_reader(self, i, j):
        raise AssertionError("training probes no header")

    def media_bytes(self, i, j):
        if i in self.hangs:
            time.sleep(60)
        if i in self.kills:
            os._exit(3)
        return self.source.media_bytes(i, j)

    def place(self, i):
        return self.source.place(i)
"""


@pytest.fixture(scope="module")
def odd_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SampleSource]]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_source_of_this_test.py").write_text(ODD_SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import odd_source_of_this_test  # type: ignore[import-not-found]

        yield odd_source_of_this_test.OddSource


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
                    assert (batch.step, batch.microbatch_index) == (number, m)
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
    batch = reader.read([0, 4], step=2, microbatch_index=1)
    assert batch.tokens.numel() % 64 == 0
    assert batch.weight_sum == pytest.approx(2.0)
    assert (batch.step, batch.microbatch_index) == (2, 1)


# --- workers that hang or die


def test_vd08_a_read_of_a_minute_costs_its_budget_and_one_sample_of_its_step(
    source: TarSource,
    index: CostIndex,
    reader: SampleReader,
    plans: PlanSequence,
    odd_source: Callable[..., SampleSource],
) -> None:
    slow = int(next(i for i in plans.sample_ids(0) if index.samples["num_items"][i]))
    rank = int(plans.plan(0).dp_rank[plans.sample_ids(0).tolist().index(slow)])
    odd = dataclasses.replace(reader, source=odd_source(source, hangs=(slow,)))
    start = time.monotonic()
    steps = list(PlanLoader(odd, plans, dp_rank=rank, steps=range(1), num_workers=1, sample_timeout_s=1.0))
    assert time.monotonic() - start < 45, "the read itself takes a minute"
    assert [step.error for step in steps] == [None]
    assert steps[0].plan.digest == plans.plan(0).digest, "the plan stays what the other ranks have"
    whole = list(PlanLoader(reader, plans, dp_rank=rank, steps=range(1)))
    replaced = []
    for late, good in zip(flat(steps), flat(whole), strict=True):
        if late is None or good is None:
            assert late is good
            continue
        for field in dataclasses.fields(late):
            if isinstance(value := getattr(late, field.name), torch.Tensor):
                assert value.shape == getattr(good, field.name).shape, field.name
        for slot, (begin, end) in enumerate(itertools.pairwise(late.cu_seqlens.tolist())):
            if late.sample_ids[slot] == slow:
                assert (late.labels[begin:end] == -100).all()
                assert not late.loss_weights[begin:end].any()
            else:
                assert torch.equal(late.labels[begin:end], good.labels[begin:end])
                assert torch.equal(late.tokens[begin:end], good.tokens[begin:end])
        replaced += late.replaced
    (item,) = replaced
    assert (item.sample_id, item.place) == (slow, source.place(slow))
    assert item.reason.startswith("timeout: not loaded within 1 s by loader worker 0 (pid ")
    assert source.place(slow) in item.reason


def test_a_sample_that_ends_the_process_is_replaced_and_all_others_arrive(
    source: TarSource,
    index: CostIndex,
    reader: SampleReader,
    plans: PlanSequence,
    odd_source: Callable[..., SampleSource],
) -> None:
    odd = dataclasses.replace(reader, source=odd_source(source, kills=(1,)))
    replaced, seen = [], []
    fatal = {
        int(plans.plan(step).dp_rank[plans.sample_ids(step).tolist().index(1)])
        for step in range(2)
        if 1 in plans.sample_ids(step)
    }
    for rank in range(2):
        num_workers = 1 if rank in fatal else 0  # in this process, reading it would end the test
        for step in PlanLoader(odd, plans, dp_rank=rank, steps=range(2), num_workers=num_workers):
            assert step.error is None
            for batch in step.microbatches:
                if batch is not None:
                    seen += batch.sample_ids.tolist()
                    replaced += batch.replaced
    assert sorted(seen) == list(range(6))
    assert [item.sample_id for item in replaced] == [1]
    assert replaced[0].reason.startswith("lost_worker: worker died while loading it twice (exit code 3)")


# --- what does not depend on the workers


def test_du05_the_length_is_that_of_the_plan_whatever_the_workers(reader: SampleReader, plans: PlanSequence) -> None:
    loaders = [PlanLoader(reader, plans, dp_rank=0, steps=range(7), num_workers=count) for count in (0, 1, 16)]
    assert [len(loader) for loader in loaders] == [7, 7, 7]


@pytest.mark.parametrize(("num_workers", "recycle_after"), [(3, None), (1, 3)])
def test_batches_are_the_same_with_any_number_of_workers(
    reader: SampleReader, plans: PlanSequence, num_workers: int, recycle_after: int | None
) -> None:
    here = flat(list(PlanLoader(reader, plans, dp_rank=0, steps=range(4))))
    assert sum(batch is not None for batch in here) > 3
    options: dict[str, Any] = {"num_workers": num_workers, "recycle_after": recycle_after}
    there = flat(list(PlanLoader(reader, plans, dp_rank=0, steps=range(4), **options)))
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            for field in dataclasses.fields(one):
                a, b = getattr(one, field.name), getattr(other, field.name)
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def test_du13_every_medium_is_read_once_over_all_ranks(
    source: TarSource, index: CostIndex, plans: PlanSequence
) -> None:
    watched = Watched(source)
    for rank in range(2):
        reader = SampleReader(source=watched, index=index, estimator=ESTIMATOR)
        list(PlanLoader(reader, plans, dp_rank=rank, steps=range(plans.steps_per_epoch)))
    assert watched.records == Counter(range(6))
    assert watched.media == Counter({i: int(index.samples["num_items"][i]) for i in range(1, 6)})


def test_a_source_hears_of_each_cell_once_and_one_ahead(
    source: TarSource, index: CostIndex, plans: PlanSequence
) -> None:
    class Foreseeing(Watched):
        told: tuple[tuple[tuple[int, ...], bool, int], ...] = ()

        def prefetch(self, ids: Any, *, media: bool = True) -> None:
            self.told += ((tuple(ids), media, sum(self.records.values())),)

    source_ = Foreseeing(source)
    loader = PlanLoader(
        SampleReader(source=source_, index=index, estimator=ESTIMATOR, with_pixels=False),
        plans,
        dp_rank=0,
        steps=range(4),
    )
    list(loader)
    cells = [cell.sample_ids for cell in loader.cells()]
    assert [ids for ids, _, _ in source_.told] == cells
    assert {media for _, media, _ in source_.told} == {False}
    read_before = [0, *itertools.accumulate(len(ids) for ids in cells)]
    assert [count for _, _, count in source_.told][1:] == read_before[: len(cells) - 1]


# --- ends


def test_workers_end_with_an_iteration_given_up_and_with_the_loader(reader: SampleReader, plans: PlanSequence) -> None:
    def all_children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = all_children()  # servers that other tests have started

    def children() -> set[str]:
        return all_children() - before

    loader = PlanLoader(reader, plans, dp_rank=0, steps=range(100), num_workers=1)
    steps = iter(loader)
    next(steps)
    assert len(children()) == 1
    del steps
    gc.collect()
    assert not children()
    with loader:
        steps = iter(loader)
        next(steps)
    assert not children()
    with pytest.raises(BalancerError, match="was closed while it was being iterated over"):
        list(steps)


def test_a_reader_that_reads_in_its_own_way_is_refused_in_workers(reader: SampleReader, plans: PlanSequence) -> None:
    class Own(SampleReader):
        def read(self, *arguments: Any, **options: Any) -> MicroBatch:
            return SampleReader.read(self, *arguments, **options)

    own = Own(**{field.name: getattr(reader, field.name) for field in dataclasses.fields(reader)})
    assert len(list(PlanLoader(own, plans, dp_rank=0, steps=range(1)))) == 1
    with pytest.raises(BalancerError, match=r"Own has a read\(\) of its own.*num_workers=0"):
        PlanLoader(own, plans, dp_rank=0, steps=range(1), num_workers=1)
    with pytest.raises(BalancerError, match="num_workers=-1"):
        PlanLoader(reader, plans, dp_rank=0, steps=range(1), num_workers=-1)
