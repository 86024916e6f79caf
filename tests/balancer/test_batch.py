"""AM-02, AM-04, AM-07, AM-08 and LN-07: a pack keeps every sample as it was alone, and its tail is nobody."""

import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.batch import IGNORED_LABEL, MicroBatch, collate  # noqa: E402
from balancer.errors import BalancerError  # noqa: E402
from balancer.weights import LOSS_REDUCTIONS, planned_weight_sum  # noqa: E402
from dataloaders.decode import Conformed  # noqa: E402
from dataloaders.sample import LoadedSample  # noqa: E402
from dataloaders.tokenizer import Special  # noqa: E402

PATCH_DIM = 6
PER_TOKEN = ("tokens", "labels", "loss_weights")


def sample(
    sample_id: int, length: int, *, labels: int = 0, visual: int = 0, replaced: str | None = None
) -> LoadedSample:
    """`visual` tokens follow the first position, `labels` are learned at the end."""
    rng = np.random.Generator(np.random.Philox(sample_id))
    label_row = np.full(length, IGNORED_LABEL, dtype=np.int32)
    if labels:
        label_row[length - labels :] = rng.integers(0, 256, labels)
    return LoadedSample(
        sample_id=sample_id,
        place=f"shard x, key {sample_id}",
        tokens=rng.integers(0, 256, length).astype(np.int32),
        labels=label_row,
        position_ids=np.stack([np.arange(length), np.arange(length) * 2, np.arange(length) * 3]),
        visual_index=np.arange(1, 1 + visual),
        patches=rng.random((visual * 4, PATCH_DIM), dtype=np.float32),
        grids=np.array([[1, 2, 2 * visual]] if visual else [], dtype=np.int64).reshape(-1, 3),
        replaced=replaced,
        conformed=(Conformed(frames_repeated=1),) if replaced is None and visual > 4 else (),
    )


def parts_of(batch: MicroBatch) -> list[slice]:
    bounds = batch.cu_seqlens.tolist()[: batch.num_samples + 1]  # without the tail
    return [slice(start, stop) for start, stop in pairwise(bounds)]


SAMPLES = st.lists(st.tuples(st.integers(6, 20), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=6).map(
    lambda rows: [sample(i, n, labels=k, visual=v) for i, (n, k, v) in enumerate(rows)]
)


@given(samples=SAMPLES, align=st.integers(1, 40), reduction=st.sampled_from(LOSS_REDUCTIONS))
def test_every_sample_of_a_pack_is_what_it_is_alone(samples: list[LoadedSample], align: int, reduction: str) -> None:
    batch = collate(samples, align_tokens=align, loss_reduction=reduction)
    total = sum(len(one.tokens) for one in samples)
    assert batch.num_valid_tokens == total
    assert batch.tokens.numel() == -(-total // align) * align
    for name in PER_TOKEN:
        assert getattr(batch, name).shape == batch.tokens.shape, name
    assert batch.position_ids.shape == (3, batch.tokens.numel())
    for one, part in zip(samples, parts_of(batch), strict=True):
        alone = collate([one], loss_reduction=reduction)
        for name in PER_TOKEN:
            assert torch.equal(getattr(batch, name)[part], getattr(alone, name)), name
        assert torch.equal(batch.position_ids[:, part], alone.position_ids)
    assert batch.weight_sum == pytest.approx(
        planned_weight_sum([int((one.labels != IGNORED_LABEL).sum()) for one in samples], reduction), rel=1e-12
    )


@given(samples=SAMPLES)
def test_visual_positions_and_patches_keep_the_order_of_their_samples(samples: list[LoadedSample]) -> None:
    """CE-10."""
    batch = collate(samples)
    starts = batch.cu_seqlens.tolist()
    expected = [start + int(at) for one, start in zip(samples, starts, strict=False) for at in one.visual_index]
    assert batch.visual_index.tolist() == expected
    assert torch.equal(batch.patches, torch.from_numpy(np.concatenate([one.patches for one in samples])))
    assert batch.grids.tolist() == [row for one in samples for row in one.grids.tolist()]
    assert batch.sample_ids.tolist() == [one.sample_id for one in samples]


def test_a_tail_is_a_segment_without_loss_and_is_no_sample() -> None:
    batch = collate([sample(0, 10, labels=3)], align_tokens=32)
    assert batch.cu_seqlens.tolist() == [0, 10, 32]
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.num_samples, batch.num_valid_tokens, batch.max_seqlen) == (1, 10, 22)
    assert (batch.tokens[10:] == Special.PAD).all()
    assert (batch.labels[10:] == IGNORED_LABEL).all()
    assert (batch.loss_weights[10:] == 0).all()
    assert batch.position_ids[:, 10:].tolist() == [list(range(22))] * 3
    assert batch.num_label_tokens == 3


def test_a_full_pack_gets_no_tail_and_a_text_only_pack_keeps_its_length() -> None:
    batch = collate([sample(0, 8), sample(1, 8)], align_tokens=8)
    assert batch.cu_seqlens.tolist() == [0, 8, 16]
    assert batch.max_seqlen == 8
    assert batch.patches.shape == (0, PATCH_DIM)
    assert batch.grids.shape == (0, 3)
    assert batch.visual_index.shape == (0,)


def test_weights_follow_the_reduction_that_was_asked_for() -> None:
    samples = [sample(0, 10, labels=4), sample(1, 6, labels=1), sample(2, 6)]
    weights = {r: collate(samples, loss_reduction=r) for r in LOSS_REDUCTIONS}
    assert weights["token_mean"].loss_weights.tolist() == [0.0] * 6 + [1.0] * 4 + [0.0] * 5 + [1.0] + [0.0] * 6
    assert weights["sample_mean"].loss_weights[6:10].tolist() == [0.25] * 4
    assert weights["sqrt"].loss_weights[6:10].tolist() == [0.5] * 4
    assert [weights[r].weight_sum for r in LOSS_REDUCTIONS] == [5.0, 2.0, 3.0]


def test_stand_ins_are_named_and_conformed_media_counted() -> None:
    """ID-01."""
    batch = collate([sample(3, 12, visual=6), sample(4, 12, visual=1, replaced="truncated: ends early")])
    assert [(item.sample_id, item.place, item.reason) for item in batch.replaced] == [
        (4, "shard x, key 4", "truncated: ends early")
    ]
    assert batch.num_conformed == 1


def test_the_loss_of_a_sample_can_be_taken_away_without_touching_the_others() -> None:
    batch = collate([sample(7, 10, labels=3), sample(8, 9, labels=2)], align_tokens=16, loss_reduction="sqrt")
    less = batch.without_loss_of({8, 99})
    assert less.num_label_tokens == 3
    assert less.weight_sum == pytest.approx(3**0.5)
    assert torch.equal(less.labels[:10], batch.labels[:10])
    assert (less.labels[10:] == IGNORED_LABEL).all()
    assert (less.loss_weights[10:] == 0).all()
    assert torch.equal(less.tokens, batch.tokens)
    assert batch.num_label_tokens == 5, "the original must stay as it was"
    assert batch.without_loss_of({1, 2}) is batch


def test_moving_a_batch_converts_pixels_only_and_leaves_what_the_host_reads() -> None:
    batch = collate([sample(0, 8, labels=2, visual=1)])
    moved = batch.to(torch.device("cpu"), torch.float64)
    assert moved.patches.dtype == torch.float64
    assert moved.loss_weights.dtype == torch.float64
    assert moved.tokens.dtype == torch.int64
    assert moved.cu_seqlens is batch.cu_seqlens
    assert moved.grids is batch.grids


def test_a_batch_survives_the_way_from_a_worker() -> None:
    batch = collate([sample(0, 8, visual=1, replaced="corrupt")], step=3, microbatch_index=2)
    again = pickle.loads(pickle.dumps(batch))
    assert (again.step, again.microbatch_index, again.replaced) == (3, 2, batch.replaced)
    assert torch.equal(again.patches, batch.patches)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: collate([]), "at least one sample"),
        (lambda: collate([sample(0, 6)], loss_reduction="mean"), "choose one of token_mean, sample_mean, sqrt"),
        (lambda: collate([sample(0, 6)], align_tokens=0), "align_tokens=0"),
    ],
)
def test_what_cannot_be_packed_says_why(make: Callable[[], MicroBatch], message: str) -> None:
    with pytest.raises(BalancerError, match=message):
        make()


def test_ids_and_slots_are_those_of_the_cell() -> None:
    order: Sequence[int] = [5, 1, 3]
    batch = collate([sample(i, 6 + i) for i in order], step=9, microbatch_index=4)
    assert batch.sample_ids.tolist() == order
    assert (batch.step, batch.microbatch_index, batch.num_samples) == (9, 4, 3)
