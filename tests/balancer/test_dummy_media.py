"""Dummy media: encoders run in batches without media, tokens stay, and only a path for gradients is added."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.batch import MicroBatch, collate  # noqa: E402
from balancer.dummy_media import place_visual, with_dummy_media  # noqa: E402
from balancer.errors import BalancerError  # noqa: E402
from dataloaders.sample import LoadedSample  # noqa: E402

PATCH_DIM, DIM = 6, 5
PER_TOKEN = ("tokens", "labels", "loss_weights", "position_ids", "cu_seqlens", "visual_index")


def sample(sample_id: int, length: int, visual: int = 0, *, width: int = PATCH_DIM) -> LoadedSample:
    rng = np.random.Generator(np.random.Philox(sample_id))
    return LoadedSample(
        sample_id=sample_id,
        place=f"shard x, key {sample_id}",
        tokens=rng.integers(0, 256, length).astype(np.int32),
        labels=rng.integers(0, 256, length).astype(np.int32),
        position_ids=np.tile(np.arange(length), (3, 1)),
        visual_index=np.arange(1, 1 + visual),
        patches=rng.random((visual * 4, width), dtype=np.float32),
        grids=np.array([[1, 2, 2 * visual]] if visual else [], dtype=np.int64).reshape(-1, 3),
    )


def batch_of(samples: Sequence[LoadedSample], **options: Any) -> MicroBatch:
    return collate(samples, step=3, microbatch_index=1, **options)


@pytest.mark.parametrize("align_tokens", [1, 16])
@given(merge=st.integers(1, 4), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_text_only_batch_gets_the_smallest_medium_and_keeps_its_tokens(
    merge: int, lengths: list[int], align_tokens: int
) -> None:
    """AM-04: dummy media never change per-token arrays; a text-only pack keeps its length."""
    batch = batch_of([sample(i, n) for i, n in enumerate(lengths)], align_tokens=align_tokens)
    dummy = with_dummy_media(batch, merge, PATCH_DIM)
    for name in PER_TOKEN:
        assert getattr(dummy, name) is getattr(batch, name), name
    assert (dummy.max_seqlen, dummy.num_label_tokens, dummy.weight_sum) == (
        batch.max_seqlen,
        batch.num_label_tokens,
        batch.weight_sum,
    )
    assert dummy.patches.shape == (merge * merge, PATCH_DIM)
    assert not dummy.patches.any()
    assert dummy.patches.dtype == torch.float32
    assert dummy.grids.tolist() == [[1, merge, merge]]
    assert dummy.num_dummy_patches == merge * merge
    assert int(dummy.grids.prod(dim=1).sum()) == len(dummy.patches)
    assert (batch.num_dummy_patches, len(batch.patches), len(batch.grids)) == (0, 0, 0), "the batch itself is as it was"


def test_a_batch_with_media_is_returned_as_it_is() -> None:
    batch = batch_of([sample(0, 8), sample(1, 8, 2)])
    assert with_dummy_media(batch, 2, PATCH_DIM) is batch


def test_a_dummy_is_not_added_twice() -> None:
    dummy = with_dummy_media(batch_of([sample(0, 8)]), 2, PATCH_DIM)
    assert with_dummy_media(dummy, 2, PATCH_DIM) is dummy


def test_a_dummy_goes_with_its_batch_to_another_type() -> None:
    moved = with_dummy_media(batch_of([sample(0, 8)]), 2, PATCH_DIM).to(torch.device("cpu"), torch.bfloat16)
    assert (moved.patches.dtype, moved.num_dummy_patches) == (torch.bfloat16, 4)


@pytest.mark.parametrize(
    ("merge", "patch_dim", "text"),
    [
        (0, PATCH_DIM, "merge=0: give a whole number from 1 on"),
        (2, 0, "patch_dim=0: give a whole number"),
        (True, PATCH_DIM, "merge=True: give a whole number"),
        (2.0, PATCH_DIM, r"merge=2\.0: give a whole number"),
    ],
)
def test_a_dummy_of_no_size_is_refused(merge: Any, patch_dim: int, text: str) -> None:
    with pytest.raises(BalancerError, match=text):
        with_dummy_media(batch_of([sample(0, 8)]), merge, patch_dim)


@pytest.mark.parametrize("visual", [0, 2])
def test_patches_of_another_width_are_refused(visual: int) -> None:
    """Also in a batch that needs no dummy: the mistake is found in the first batch, not in the first text-only one."""
    batch = batch_of([sample(0, 8, 2)])
    if not visual:
        batch = batch_of([sample(0, 8)])
        object.__setattr__(batch, "patches", batch.patches.new_zeros(0, 9))
    else:
        batch = batch_of([sample(0, 8, 2, width=9)])
    with pytest.raises(BalancerError, match="patches of this batch have 9 values, patch_dim=6: give the width"):
        with_dummy_media(batch, 2, PATCH_DIM)


def place(num_tokens: int, index: Sequence[int], left_over: int) -> tuple[Any, Any, Any]:
    """(embeds, visual, what place_visual makes of them)"""
    embeds = torch.randn(num_tokens, DIM, requires_grad=True)
    visual = torch.randn(len(index) + left_over, DIM, requires_grad=True)
    return embeds, visual, place_visual(embeds, visual, torch.tensor(index, dtype=torch.int64))


@given(data=st.data(), left_over=st.integers(0, 3), num_tokens=st.integers(1, 12))
def test_visual_rows_go_to_their_places_and_what_is_left_adds_nothing(
    data: st.DataObject, left_over: int, num_tokens: int
) -> None:
    index = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=num_tokens, unique=True))
    embeds, visual, placed = place(num_tokens, index, left_over)
    for token in range(num_tokens):
        expected = visual[index.index(token)] if token in index else embeds[token]
        assert torch.equal(placed[token], expected)


def test_what_is_left_over_has_gradients_and_they_are_zero() -> None:
    embeds, visual, placed = place(4, [1], 2)
    placed.sum().backward()
    assert visual.grad.tolist() == [[1.0] * DIM, [0.0] * DIM, [0.0] * DIM]
    assert embeds.grad[:, 0].tolist() == [1.0, 0.0, 1.0, 1.0]


def test_an_encoder_on_a_dummy_has_zero_gradients_and_not_none() -> None:
    """Without a path through the graph they would be None, and the collectives of a text-only rank missing."""
    batch = with_dummy_media(batch_of([sample(0, 8)]), 2, PATCH_DIM)
    encoder = torch.nn.Linear(PATCH_DIM * 4, DIM)
    embeds = torch.randn(8, DIM)
    visual = encoder(batch.patches.reshape(-1, PATCH_DIM * 4))
    placed = place_visual(embeds, visual, batch.visual_index)
    assert torch.equal(placed, embeds)
    placed.square().sum().backward()
    for parameter in encoder.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_large_values_that_are_left_over_do_not_overflow() -> None:
    visual = torch.full((8, DIM), 60_000.0, dtype=torch.float16)
    placed = place_visual(torch.ones(2, DIM, dtype=torch.float16), visual, torch.zeros(0, dtype=torch.int64))
    assert torch.equal(placed, torch.ones(2, DIM, dtype=torch.float16))


def test_visual_rows_take_the_type_of_the_embeddings() -> None:
    placed = place_visual(torch.zeros(3, DIM, dtype=torch.bfloat16), torch.ones(2, DIM), torch.tensor([2]))
    assert placed.dtype == torch.bfloat16
    assert placed[:, 0].tolist() == [0.0, 0.0, 1.0]


def test_the_embeddings_given_are_not_changed() -> None:
    embeds = torch.zeros(3, DIM)
    place_visual(embeds, torch.ones(1, DIM), torch.tensor([0]))
    assert not embeds.any()


@pytest.mark.parametrize("shape", [(1, DIM), (2, DIM + 1), (2,)])
def test_visual_rows_that_do_not_fill_their_places_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        BalancerError, match=r"visual embeddings \[.*\] do not fill 2 positions of token embeddings \[4, 5\]: give what"
    ):
        place_visual(torch.zeros(4, DIM), torch.zeros(shape), torch.tensor([0, 1]))
