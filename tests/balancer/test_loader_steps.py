"""What a step is to a training loop: its micro-batches, its limits, its label tokens, and a report that adds up.

DU-02, DU-04, DU-05, DU-08, DU-10, AM-04. Every rank's loader runs in this process.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils.data import Dataset  # noqa: E402

from balancer.batch import MicroBatch  # noqa: E402
from balancer.errors import BalancerError, OversizeError, PlanError  # noqa: E402
from balancer.layout import ParallelSpec  # noqa: E402
from balancer.loader import BalancedBatchSampler, BalancedDataLoader  # noqa: E402
from balancer.metrics import imbalance  # noqa: E402
from balancer.microbatch_info import MicroBatchInfo  # noqa: E402
from dataloaders.chat import IGNORED_LABEL  # noqa: E402
from dataloaders.sample import LoadedSample  # noqa: E402

Loaders = list[BalancedDataLoader[Any]]
Seen = list[tuple[MicroBatchInfo, Any]]


def skewed(num_samples: int, seed: int = 0) -> np.ndarray:
    """Lengths as of real sets: most are short, a few are very long."""
    rng = np.random.Generator(np.random.Philox(seed))
    return np.clip(np.exp(rng.normal(5.0, 1.2, num_samples)).astype(np.int64), 8, 4096)


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> int:
        return i


class Texts(Numbers):
    """Sample i is a text of `lengths[i]` tokens, the last `labels[i]` of which are learned."""

    def __init__(self, lengths: Any, labels: Any = None) -> None:
        super().__init__(len(lengths))
        self.lengths = np.asarray(lengths)
        self.labels = self.lengths // 2 if labels is None else np.asarray(labels)

    def __getitem__(self, i: int) -> Any:
        length, learned = int(self.lengths[i]), int(self.labels[i])
        labels = np.full(length, IGNORED_LABEL, dtype=np.int32)
        labels[length - learned :] = 1
        return LoadedSample(
            sample_id=i,
            place=f"text {i}",
            tokens=np.full(length, i % 250, dtype=np.int32),
            labels=labels,
            position_ids=np.tile(np.arange(length, dtype=np.int64), (3, 1)),
            visual_index=np.zeros(0, dtype=np.int64),
            patches=np.zeros((0, 12), dtype=np.float32),
            grids=np.zeros((0, 3), dtype=np.int64),
        )

    @property
    def columns(self) -> dict[str, Any]:
        return {"llm_tokens": self.lengths, "label_tokens": self.labels}


def spec(dp_size: int, micro: int | None = None) -> ParallelSpec:
    return ParallelSpec.pipeline(dp_size=dp_size, num_microbatches=micro)


def ranks(dataset: Any, batch_size: int, parallel: ParallelSpec, **options: Any) -> Loaders:
    return [
        BalancedDataLoader(dataset, batch_size, parallel=parallel, dp_rank=rank, **options)
        for rank in range(parallel.dp_size)
    ]


def seen_by(loader: BalancedDataLoader[Any]) -> Seen:
    """What an epoch hands out, with what `current` says of it."""
    found: Seen = []
    for batch in loader:
        assert loader.current is not None
        found.append((loader.current, batch))
    return found


def cells(many: Loaders) -> dict[int, np.ndarray]:
    """Step -> sample ids of its cells, [R, M] of arrays."""
    steps: dict[int, list[list[np.ndarray]]] = {}
    for rank, loader in enumerate(many):
        for info, batch in seen_by(loader):
            assert torch.equal(torch.as_tensor(batch), torch.as_tensor(info.sample_ids))
            row = steps.setdefault(info.step, [[] for _ in many])[rank]
            assert info.microbatch_index == len(row)
            row.append(info.sample_ids)
    made = {}
    for step, rows in steps.items():
        assert len({len(row) for row in rows}) == 1, "as many micro-batches on every rank"
        made[step] = np.empty((len(rows), len(rows[0])), dtype=object)
        for place in np.ndindex(made[step].shape):
            made[step][place] = rows[place[0]][place[1]]
    return made


def ids_of(step: np.ndarray) -> list[int]:
    return sorted(int(i) for cell in step.flat for i in cell)


def sums(step: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Cost of every cell, [R, M]."""
    return np.array([[costs[cell].sum() for cell in row] for row in step])


# Steps and micro-batches.


def test_current_says_what_every_batch_is_to_its_step() -> None:
    many = ranks(Numbers(24), 2, spec(2, 3), cost=skewed(24), shuffle=True)
    assert all(loader.current is None for loader in many)
    for rank, loader in enumerate(many):
        for epoch in range(2):
            infos = [info for info, _ in seen_by(loader)]
            assert [(i.step, i.microbatch_index) for i in infos] == [
                (2 * epoch + s, m) for s in range(2) for m in range(3)
            ]
            assert [i.is_last_microbatch for i in infos] == [False, False, True] * 2
            assert {(i.epoch, i.num_microbatches, i.step_samples, i.step_label_tokens) for i in infos} == {
                (epoch, 3, 12, None)
            }
        assert (len(loader), loader.steps_per_epoch, loader.num_microbatches, loader.num_dropped) == (6, 2, 3, 0)
        assert loader.current.is_last_microbatch, f"rank {rank}"


def test_yielding_steps_gives_lists_of_the_same_batches() -> None:
    options = {"cost": skewed(26), "shuffle": True}
    single = seen_by(ranks(Numbers(26), 2, spec(2, 3), **options)[0])
    loader = ranks(Numbers(26), 2, spec(2, 3), yield_per="step", **options)[0]
    steps = list(loader)
    assert [type(step) for step in steps] == [list] * 3
    assert [len(step) for step in steps] == [3, 3, 1]
    assert len(loader) == loader.steps_per_epoch == 3
    assert [batch.tolist() for step in steps for batch in step] == [batch.tolist() for _, batch in single]
    assert loader.current.is_last_microbatch


def test_a_collate_fn_gets_the_samples_of_one_microbatch() -> None:
    loader = ranks(Numbers(24), 2, spec(2, 3), cost=skewed(24), collate_fn=tuple)[0]
    assert [batch for _, batch in seen_by(loader)] == [tuple(i.sample_ids.tolist()) for i, _ in seen_by(loader)]


@settings(max_examples=30)
@given(
    num_samples=st.integers(3, 70),
    dp_size=st.integers(1, 3),
    micro=st.integers(1, 4),
    batch_size=st.integers(1, 3),
    drop_last=st.booleans(),
    meet=st.sampled_from(["step", "microbatch"]),
    policy=st.sampled_from(["joint", "lpt", "sequential"]),
)
def test_every_rank_has_a_sample_in_every_microbatch_and_every_sample_comes_once(
    *, num_samples: int, dp_size: int, micro: int, batch_size: int, drop_last: bool, meet: str, policy: str
) -> None:
    """DU-04: equal steps by construction; a short last step has fewer micro-batches."""
    size = dp_size * micro * batch_size
    if num_samples < size and drop_last:
        return
    options = {"cost": skewed(num_samples), "drop_last": drop_last, "meet": meet, "policy": policy}
    many = ranks(Numbers(num_samples), batch_size, spec(dp_size, micro), **options)
    steps = cells(many)
    assert all(len(cell) for step in steps.values() for cell in step.flat)
    assert {len(loader) for loader in many} == {sum(step.shape[1] for step in steps.values())}
    assert many[0].steps_per_epoch == len(steps)
    rest = num_samples % size
    ids = [i for step in steps.values() for i in ids_of(step)]
    assert max(Counter(ids).values()) == 1
    assert many[0].num_dropped == num_samples - len(ids) == (rest if drop_last or rest < dp_size else 0)
    assert all(step.shape == (dp_size, micro) for step in list(steps.values())[:-1])
    if rest and not many[0].num_dropped:
        assert steps[len(steps) - 1].shape == (dp_size, min(micro, rest // dp_size))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_one_shard_is_enough_for_many_ranks_and_workers() -> None:
    """DU-04, DU-05: 4 ranks x 3 workers; the length is the plan's, whatever loads it."""
    lengths = {}
    for num_workers in (0, 3):
        many = ranks(Numbers(50), 2, spec(4, 2), cost=skewed(50), num_workers=num_workers, shuffle=True)
        steps = cells(many)
        lengths[num_workers] = [len(loader) for loader in many]
        left_out = many[0].balanced.plans(0).dropped_of(0).tolist()
        assert sorted([i for step in steps.values() for i in ids_of(step)] + left_out) == list(range(50))
        assert len(left_out) == many[0].num_dropped == 2
    assert lengths[0] == lengths[3] == [6] * 4


# Balance.


@pytest.mark.parametrize("micro", [1, 4])
def test_ranks_cost_the_same_where_they_wait_for_each_other(micro: int) -> None:
    """DU-08: in every micro-batch, or once a step; mean over steps of max / mean below 1.05, unlike drawn order."""
    costs = skewed(4096)
    ratio = {}
    for meet, axis in (("microbatch", None), ("step", 1)):
        for policy in ("joint", "sequential"):
            options = {"cost": costs, "meet": meet, "policy": policy, "shuffle": True}
            steps = cells(ranks(Numbers(4096), 32 // micro, spec(4, micro), **options)).values()
            tables = [sums(step, costs) for step in steps]
            waits = [
                table.max(axis=0).sum() / table.mean(axis=0).sum() if axis is None else imbalance(table.sum(axis=1))
                for table in tables
            ]
            ratio[meet, policy] = float(np.mean(waits))
    assert ratio["microbatch", "joint"] < 1.05
    assert ratio["step", "joint"] < 1.05
    assert min(ratio["microbatch", "sequential"], ratio["step", "sequential"]) > 1.1


def test_look_ahead_evens_steps_and_moves_samples_inside_its_blocks_only() -> None:
    costs = skewed(1024)
    tables, blocks = [], []
    for lookahead_steps in (1, 4):
        options = {"cost": costs, "shuffle": True, "lookahead_steps": lookahead_steps}
        steps = cells(ranks(Numbers(1024), 8, spec(2, 2), **options))
        tables.append([sums(step, costs).sum() for step in steps.values()])
        blocks.append([sorted(i for s in range(b, b + 4) for i in ids_of(steps[s])) for b in range(0, 32, 4)])
    assert blocks[0] == blocks[1]
    spread = [float(np.mean(np.ptp(np.reshape(table, (8, 4)), axis=1))) for table in tables]  # [block, step]
    assert spread[1] < 0.01 * spread[0]


# Limits.


def test_a_free_number_of_microbatches_is_what_the_capacity_needs_on_all_ranks_together() -> None:
    """DU-02: six samples of 9 and four of 1 under a capacity of 10: three micro-batches on either rank, none empty."""
    costs = np.array([9] * 6 + [1] * 4)
    many = ranks(Numbers(10), 5, spec(2), cost=costs, capacity_tokens=10)
    (step,) = cells(many).values()
    assert step.shape == (2, 3)
    assert sums(step, costs).max() <= 10
    assert ids_of(step) == list(range(10))
    assert many[0].num_microbatches is None


@settings(max_examples=30)
@given(
    seed=st.integers(0, 50),
    dp_size=st.integers(1, 3),
    batch_size=st.integers(2, 9),
    meet=st.sampled_from(["step", "microbatch"]),
)
def test_capacities_hold_in_every_microbatch(*, seed: int, dp_size: int, batch_size: int, meet: str) -> None:
    costs = np.stack([skewed(60, seed) // 2, skewed(60, seed + 1)], axis=1)
    options = {"cost": costs, "meet": meet, "capacity_tokens": 4096, "capacity_patches": 3000, "shuffle": True}
    many = ranks(Numbers(60), batch_size, spec(dp_size), **options)
    try:
        steps = cells(many)
    except PlanError:  # few heavy samples leave a cell empty, see below
        return
    for step in steps.values():
        assert sums(step, costs[:, 0]).max() <= 3000
        assert sums(step, costs[:, 1]).max() <= 4096


def test_where_steps_differ_there_is_a_number_of_steps_and_no_length() -> None:
    costs = np.array([60] * 8 + [10] * 8)
    options: dict[str, Any] = {"cost": costs, "capacity_tokens": 120}
    loader = ranks(Numbers(16), 4, spec(2), **options)[0]
    with pytest.raises(TypeError, match=r"there is no length; use steps_per_epoch, yield_per='step', or fix num_micro"):
        len(loader)
    assert loader.steps_per_epoch == 2
    by_step = ranks(Numbers(16), 4, spec(2), yield_per="step", **options)[0]
    assert len(by_step) == 2
    assert [len(step) for step in by_step] == [2, 1]


def test_without_a_limit_a_step_is_one_microbatch_and_has_a_length() -> None:
    many = ranks(Numbers(16), 4, spec(2), cost=skewed(16))
    assert [len(loader) for loader in many] == [2, 2]
    assert many[0].num_microbatches == 1


def test_a_fixed_number_of_microbatches_that_cannot_hold_a_step_is_refused_where_that_step_is_due() -> None:
    costs = np.array([10] * 8 + [60] * 8)
    for num_workers in (0, 1):
        for loader in ranks(Numbers(16), 4, spec(2, 1), cost=costs, capacity_tokens=120, num_workers=num_workers):
            batches = iter(loader)
            assert len(next(batches)) == 4
            with pytest.raises(PlanError, match="num_microbatches=1 does not hold the 8 samples of the step"):
                next(batches)
            assert next(batches, None) is None
            assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, 1)


def test_cells_that_would_stay_empty_are_refused_with_the_step_and_a_remedy() -> None:
    costs = np.array([1, 1, 1, 1, 90, 90, 90, 1])
    steps = cells(ranks(Numbers(8), 2, spec(2), cost=costs, capacity_tokens=100))
    assert [step.shape for step in steps.values()] == [(2, 1), (2, 2)]
    assert all(len(cell) == 1 for cell in steps[1].flat), "four samples fill four cells"
    few = ranks(Numbers(3), 2, spec(2), cost=np.array([90, 90, 90]), capacity_tokens=100)[0]
    with pytest.raises(
        PlanError, match=r"step 0 of epoch 0 needs 2 .* 3 samples leave 1 of the 4 cells .* empty; raise b"
    ):
        next(iter(few))


def test_samples_above_a_capacity_are_listed_or_left_out_and_counted() -> None:
    costs = np.array([5, 50, 5, 60, 5, 5])
    with pytest.raises(OversizeError, match=r"2 of 6 samples exceed .*\n  sample 1 .*50 tokens > 40\n  sample 3"):
        ranks(Numbers(6), 2, spec(2), cost=costs, capacity_tokens=40)
    many = ranks(Numbers(6), 2, spec(2), cost=costs, capacity_tokens=40, oversize="drop", shuffle=True)
    assert [ids_of(step) for step in cells(many).values()] == [[0, 2, 4, 5]]
    report = many[0].report()
    assert (report.samples_unusable, report.samples_used, report.samples_left_out) == (2, 4, 0)
    sampled = ranks(Numbers(6), 2, spec(1), cost=costs, capacity_tokens=40, oversize="drop", sampler=[3, 4, 4, 1, 0])
    assert sorted(int(i) for batch in sampled[0] for i in batch) == [0, 4, 4]
    with pytest.raises(PlanError, match="every sample was left out as unusable or oversize"):
        ranks(Numbers(6), 2, spec(2), cost=costs, capacity_tokens=4, oversize="drop")


# Label tokens and packs.


def test_label_tokens_of_a_step_are_those_of_the_cost_index_for_batches_of_the_users_own() -> None:
    labels = np.arange(40) % 7
    options = {"cost_index": {"llm_tokens": skewed(40), "label_tokens": labels}, "shuffle": True}
    many = ranks(Numbers(40), 3, spec(2, 3), **options)
    told: dict[int, set[int | None]] = {}
    own: Counter[int] = Counter()
    for loader in many:
        for info, batch in seen_by(loader):
            told.setdefault(info.step, set()).add(info.step_label_tokens)
            own[info.step] += int(labels[batch.numpy()].sum())
    assert told == {step: {total} for step, total in own.items()}
    assert many[0].report().label_tokens == sum(own.values())
    unknown = ranks(Numbers(40), 3, spec(2, 3), cost=skewed(40))[0]
    assert {info.step_label_tokens for info, _ in seen_by(unknown)} == {None}
    assert unknown.report().label_tokens is None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_packs_carry_what_current_says(num_workers: int) -> None:
    dataset = Texts(skewed(20) % 90 + 4)
    loader = ranks(dataset, 3, spec(1, 2), cost_index=dataset.columns, shuffle=True, num_workers=num_workers)[0]
    for info, batch in seen_by(loader):
        assert isinstance(batch, MicroBatch)
        assert (batch.step, batch.microbatch_index, batch.num_microbatches) == (
            info.step,
            info.microbatch_index,
            info.num_microbatches,
        )
        assert (batch.step_label_tokens, batch.is_last_microbatch) == (info.step_label_tokens, info.is_last_microbatch)
        assert batch.sample_ids.tolist() == info.sample_ids.tolist()
        assert batch.num_valid_tokens == dataset.lengths[info.sample_ids].sum() == len(batch.tokens)
        assert batch.num_label_tokens == dataset.labels[info.sample_ids].sum()
    assert loader.report().label_tokens == dataset.labels.sum()
    as_dicts = ranks(dataset, 3, spec(1, 2), cost_index=dataset.columns, shuffle=True, output="dict")[0]
    for (_, pack), batch in zip(seen_by(loader), as_dicts, strict=False):
        assert isinstance(batch, dict)
        assert set(batch) >= {"tokens", "cu_seqlens", "step_label_tokens", "is_last_microbatch"}
        assert batch["is_last_microbatch"] == pack.is_last_microbatch


def test_label_tokens_of_packs_are_counted_in_the_batches_and_not_taken_from_the_index() -> None:
    """A sample that could not be decoded has lost its labels; a loss must not be divided by them."""
    dataset = Texts([8, 8, 8, 8], [4, 0, 4, 4])
    planned = {"llm_tokens": dataset.lengths, "label_tokens": [4, 4, 4, 4]}
    loader = ranks(dataset, 2, spec(1), cost_index=planned)[0]
    assert [info.step_label_tokens for info, _ in seen_by(loader)] == [4, 8]


@pytest.mark.parametrize(("align", "capacity"), [(8, 1234), (16, 500), (6, 301)])
def test_aligned_packs_stay_within_the_capacity_and_their_tails_are_counted(align: int, capacity: int) -> None:
    """AM-04: the capacity is rounded once, up front; every array of tokens is as long as the others."""
    dataset = Texts(skewed(60) % 250 + 4)
    options = {"cost_index": dataset.columns, "capacity_tokens": capacity, "align_tokens": align}
    loader = ranks(dataset, 12, spec(1), **options)[0]
    assert loader.balanced.options.capacities.tokens == capacity // align * align
    padded = 0
    for info, batch in seen_by(loader):
        total = len(batch.tokens)
        assert total % align == 0
        assert total <= capacity
        assert {len(batch.labels), len(batch.loss_weights), batch.position_ids.shape[-1]} == {total}
        assert int(batch.cu_seqlens[-1]) == total
        assert batch.num_valid_tokens == dataset.lengths[info.sample_ids].sum()
        assert (batch.labels[batch.num_valid_tokens :] == IGNORED_LABEL).all()
        assert batch.loss_weights[batch.num_valid_tokens :].sum() == 0
        padded += total - batch.num_valid_tokens
    assert loader.report().padded_tokens == padded > 0
    with pytest.raises(BalancerError, match=f"capacity_tokens=5 holds no multiple of align_tokens={align}"):
        ranks(dataset, 12, spec(1), **{**options, "capacity_tokens": 5})


@pytest.mark.parametrize("options", [{"output": "dict"}, {"align_tokens": 8}, {"media_presence": "dummy"}])
def test_options_of_packs_need_samples_that_can_be_packed(options: dict[str, Any]) -> None:
    with pytest.raises(
        BalancerError, match=r"the dataset gives int, not LoadedSample: .* need a balancer.SampleDataset"
    ):
        list(ranks(Numbers(4), 2, spec(1), cost=[1] * 4, **options)[0])


# The report.


@pytest.mark.parametrize(
    "options",
    [{}, {"drop_last": True}, {"capacity_tokens": 900, "oversize": "drop"}, {"sampler": list(range(40)) * 2}],
    ids=lambda options: ",".join(options) or "plain",
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_report_equals_a_recount(options: dict[str, Any], num_workers: int) -> None:
    """DU-10: used, left out and dropped add up to the dataset, counted from the ids that were handed out."""
    costs, labels = skewed(101), np.arange(101) % 5
    columns = {"llm_tokens": costs, "label_tokens": labels}
    parallel = spec(2) if "capacity_tokens" in options else spec(2, 2)
    many = ranks(Numbers(101), 5, parallel, cost_index=columns, num_workers=num_workers, **options)
    seen = [seen_by(loader) for loader in many]
    used = [int(i) for infos in seen for info, _ in infos for i in info.sample_ids]
    too_large = int((costs > 900).sum()) if "capacity_tokens" in options else 0
    total = 80 if "sampler" in options else 101 - too_large
    for loader, own in zip(many, seen, strict=True):
        report = loader.report()
        assert report.epoch == 0
        assert report.num_steps == len({info.step for info, _ in own}) == loader.steps_per_epoch
        assert report.num_microbatches == len(own)
        assert report.samples_used == len(used)
        assert report.samples_of_rank == sum(len(info.sample_ids) for info, _ in own)
        assert report.samples_left_out == loader.num_dropped == total - len(used)
        assert report.samples_unusable == too_large
        assert report.label_tokens == int(labels[used].sum())
        assert report.imbalance_before >= report.imbalance_after >= 1.0
        assert report.bound_ratio >= 1.0 - 1e-9
        assert report.gain >= 1.0
        assert f"{len(used)} samples used, {loader.num_dropped} left out at the end, {too_large} unus" in report.text()
    assert sum(loader.report().samples_of_rank for loader in many) == len(used)


def test_the_report_is_about_the_current_epoch_and_can_be_read_in_its_middle() -> None:
    loader = ranks(Numbers(32), 4, spec(1), cost=skewed(32))[0]
    assert (loader.report().num_steps, loader.report().samples_used) == (0, 0)
    list(loader)
    batches = iter(loader)
    for number in range(1, 4):
        next(batches)
        report = loader.report()
        assert (report.epoch, report.num_steps, report.samples_used) == (1, number, 4 * number)
    assert report.data_wait_ms > 0


def test_the_epoch_s_report_is_logged_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    loader = ranks(Numbers(9), 2, spec(2), cost=skewed(9), shuffle=True)[0]
    with caplog.at_level("INFO", "balancer"):
        list(loader)
    assert "epoch 0: 2 steps, 8 samples used, 1 left out at the end" in caplog.text


def test_the_sampler_alone_gives_the_batches_of_the_loader() -> None:
    """For those who keep their own DataLoader."""
    costs = skewed(40)
    for rank, loader in enumerate(ranks(Numbers(40), 3, spec(2, 2), cost=costs, shuffle=True, seed=9)):
        sampler = BalancedBatchSampler(costs, 3, parallel=spec(2, 2), dp_rank=rank, shuffle=True, seed=9)
        own: torch.utils.data.DataLoader[int] = torch.utils.data.DataLoader(Numbers(40), batch_sampler=sampler)
        for _ in range(2):
            assert [batch.tolist() for batch in own] == [batch.tolist() for batch in loader]
        assert len(own) == len(loader)
