"""Packs give a transformers model the logits, loss and gradients of their samples one by one (float32, sdpa, 1e-5)."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from balancer.adapters.hf_batch import HfCollate, count_labels, has_three_axes, num_tail_tokens  # noqa: E402
from balancer.errors import BalancerError  # noqa: E402
from balancer.packed_cell import pack_samples  # noqa: E402
from balancer.room import Room  # noqa: E402
from dataloaders.chat import IGNORED_LABEL  # noqa: E402
from dataloaders.sample import LoadedSample  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # warnings of the other library

IMAGE, VIDEO = 90, 91
PER_TOKEN = ("input_ids", "labels", "position_ids")


def text_sample(length, *, seed=0, start=0):
    tokens = np.random.Generator(np.random.Philox(seed)).integers(0, 80, length).tolist()
    return {"input_ids": tokens, "labels": tokens, "position_ids": list(range(start, start + length))}


def segments_of(batch, tensor):
    return torch.split(tensor, batch["cu_seq_lens_q"].diff().tolist())


def gradients(model, batches):
    """(sum of losses, gradients by name) of sum over batches of the loss sums, divided by all label tokens."""
    model.zero_grad()
    total = sum(count_labels(batch) for batch in batches)
    losses = []
    for batch in batches:
        loss = model(**batch, num_items_in_batch=torch.tensor(total)).loss
        loss.backward()
        losses.append(loss.item())
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return sum(losses), found


def assert_same_gradients(found, wanted):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * max(scale, 1.0), rtol=1e-5, msg=name)


class TestOnQwen25VL:
    """LoadedSample with text, image, video, and both, through the vision tower and three position axes."""

    @pytest.mark.parametrize("align_tokens", [1, 16, 128])
    def test_a_pack_gives_the_logits_of_its_samples_one_by_one(self, qwen_vl, all_kinds, align_tokens):
        """AM-02, AM-08: also with a tail, and one that is longer than every sample (128)."""
        batch = HfCollate.for_model(qwen_vl, align_tokens=align_tokens)(all_kinds)
        alone = HfCollate.for_model(qwen_vl)
        with torch.no_grad():
            logits = qwen_vl(**batch).logits[0]
            assert logits.isfinite().all()
            for sample, packed in zip(all_kinds, segments_of(batch, logits), strict=False):
                torch.testing.assert_close(packed, qwen_vl(**alone([sample])).logits[0], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("align_tokens", [1, 128])
    def test_a_pack_gives_the_loss_and_gradients_of_its_samples_one_by_one(self, qwen_vl, all_kinds, align_tokens):
        """AM-08: a tail longer than any sample adds nothing, and no NaN, to loss and gradients."""
        alone = HfCollate.for_model(qwen_vl)
        wanted_loss, wanted = gradients(qwen_vl, [alone([sample]) for sample in all_kinds])
        loss, found = gradients(qwen_vl, [HfCollate.for_model(qwen_vl, align_tokens=align_tokens)(all_kinds)])
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert any(name.startswith("model.visual") for name in found)
        assert_same_gradients(found, wanted)

    def test_any_split_of_a_step_gives_the_same_gradients(self, qwen_vl, all_kinds):
        """LN-01: each micro-batch divides by the label tokens of the step."""
        collate = HfCollate.for_model(qwen_vl, align_tokens=8)
        wanted_loss, wanted = gradients(qwen_vl, [collate(all_kinds)])
        loss, found = gradients(qwen_vl, [collate([all_kinds[2]]), collate([all_kinds[0], all_kinds[3], all_kinds[1]])])
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert_same_gradients(found, wanted)

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
    def test_order_in_a_pack_does_not_matter(self, qwen_vl, all_kinds, order):
        collate = HfCollate.for_model(qwen_vl)
        with torch.no_grad():
            batch = collate([all_kinds[k] for k in order])
            mine = dict(zip(order, segments_of(batch, qwen_vl(**batch).logits[0]), strict=True))
            straight = collate(all_kinds)
            for k, logits in enumerate(segments_of(straight, qwen_vl(**straight).logits[0])):
                torch.testing.assert_close(mine[k], logits, atol=1e-5, rtol=1e-5)

    def test_another_first_sample_leaves_the_logits_of_the_second_bit_equal(self, qwen_vl, sample_of):
        """AM-01, under sdpa, for a sample with an image behind text."""
        collate, second = HfCollate.for_model(qwen_vl), sample_of([(3, (1, 4, 8), IMAGE)], seed=2)
        with torch.no_grad():
            one, other = (qwen_vl(**collate([sample_of(num_text=9, seed=s), second])).logits[0, 9:] for s in (5, 6))
        assert torch.equal(one, other)

    @pytest.mark.parametrize("broken", ["a cache", "three rows", "one row"])
    def test_without_each_of_the_three_precautions_samples_would_mix(self, qwen_vl, all_kinds, broken):
        """AM-01, AM-02: why `use_cache` is in the batch, and why the text row is."""
        batch = HfCollate.for_model(qwen_vl)(all_kinds)
        bad = dict(batch)
        if broken == "a cache":
            bad["use_cache"] = True
        else:
            bad["position_ids"] = batch["position_ids"][1:] if broken == "three rows" else batch["position_ids"][0]
        with torch.no_grad():
            assert not torch.allclose(qwen_vl(**bad).logits, qwen_vl(**batch).logits, atol=1e-2)

    def test_a_stand_in_runs_and_teaches_nothing(self, qwen_vl, sample_of):
        sample = sample_of([(1, (2, 4, 4), VIDEO)], num_text=4, seed=9)
        plain = sample_of(num_text=8, seed=1)
        lost = LoadedSample(
            sample_id=9,
            place=sample.place,
            tokens=np.zeros_like(sample.tokens),
            labels=np.full_like(sample.labels, IGNORED_LABEL),
            position_ids=np.tile(np.arange(len(sample.tokens)), (3, 1)),
            visual_index=np.arange(len(sample.visual_index)),
            patches=np.zeros_like(sample.patches),
            grids=sample.grids,
            replaced="missing_media: gone",
        )
        collate = HfCollate.for_model(qwen_vl)
        wanted_loss, wanted = gradients(qwen_vl, [collate([plain])])
        loss, found = gradients(qwen_vl, [collate([lost, plain])])
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert all(not gradient.any() for name, gradient in found.items() if "visual" in name)
        assert_same_gradients({name: found[name] for name in wanted}, wanted)


class TestOnATextModel:
    """Tokenised mappings through a Qwen2."""

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("start", [0, 2])
    def test_boundaries_hold_wherever_positions_start(self, text_model, attention, start):
        """AM-05: a model whose first position is 2 is split at the same places."""
        model, collate = text_model(attention), HfCollate(align_tokens=8)
        samples = [text_sample(n, seed=n, start=start) for n in (1, 2, 9, 4)]
        batch = collate(samples)
        assert batch["cu_seq_lens_q"].tolist() == [0, 1, 3, 12, 16]
        with torch.no_grad():
            for sample, packed in zip(samples, segments_of(batch, model(**batch).logits[0]), strict=False):
                alone = model(**HfCollate()([sample])).logits[0]
                torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)

    def test_sliding_windows_do_not_reach_over_a_boundary(self, text_model):
        model = text_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
        samples = [text_sample(n, seed=n) for n in (7, 11)]
        with torch.no_grad():
            packed = model(**HfCollate()(samples)).logits[0, 7:]
            torch.testing.assert_close(packed, model(**HfCollate()(samples[1:])).logits[0], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_one_sample_and_a_tail_are_one_sample(self, text_model, attention):
        """AM-07: the tail is described apart; it changes neither logits, nor the loss, nor the count of labels."""
        model, sample = text_model(attention), text_sample(5)
        plain, filled = HfCollate()([sample]), HfCollate(align_tokens=8)([sample])
        assert filled["cu_seq_lens_q"].tolist() == [0, 5, 8]
        assert count_labels(filled) == count_labels(plain) == 4
        assert (num_tail_tokens(filled, 1), num_tail_tokens(plain, 1)) == (3, 0)
        with torch.no_grad():
            alone, packed = model(**plain), model(**filled)
        torch.testing.assert_close(packed.logits[:, :5], alone.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.loss, alone.loss, atol=1e-5, rtol=1e-5)

    def test_a_sample_without_labels_gives_a_loss_of_zero(self, text_model):
        """LN-05: nothing is divided by the labels of one micro-batch."""
        silent = {**text_sample(5), "labels": [IGNORED_LABEL] * 5}
        loss, found = gradients(text_model(), [HfCollate()([silent]), HfCollate()([text_sample(6)])])
        only, wanted = gradients(text_model(), [HfCollate()([text_sample(6)])])
        assert loss == pytest.approx(only, rel=1e-6)
        assert_same_gradients(found, wanted)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    align=st.sampled_from([1, 2, 8, 16, 64]),
    axes=st.sampled_from([1, 3]),
)
def test_all_arrays_of_tokens_have_one_length_and_end_on_the_alignment(lengths, align, axes):
    """AM-04, AM-08: boundaries end at T, the tail is no longer than needed, and the longest counts it."""
    batch = HfCollate(align_tokens=align, position_axes=axes)([text_sample(n, seed=n) for n in lengths])
    assert {batch[name].shape[-1] for name in PER_TOKEN} == {batch["input_ids"].numel()}
    total, valid = batch["input_ids"].numel(), sum(lengths)
    assert total % align == 0
    assert valid <= total < valid + align
    sizes = batch["cu_seq_lens_q"].diff().tolist()
    assert sizes == lengths + [total - valid] * (total > valid)
    assert num_tail_tokens(batch, len(lengths)) == total - valid
    assert batch["max_length_q"] == batch["max_length_k"] == max(sizes)
    assert (batch["cu_seq_lens_q"].dtype, type(batch["max_length_q"])) == (torch.int32, int)
    text_row = batch["position_ids"].reshape(-1, total)[0]
    assert text_row.tolist() == [p for size in sizes for p in range(size)]
    assert batch["position_ids"].shape == ((1, total) if axes == 1 else (4, 1, total))


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), align=st.sampled_from([1, 16]))
def test_labels_are_those_of_our_own_packs_moved_by_one(lengths, align):
    rng = np.random.Generator(np.random.Philox(len(lengths)))
    samples = []
    for number, length in enumerate(lengths):
        labels = np.where(rng.random(length) < 0.5, rng.integers(0, 80, length), IGNORED_LABEL).astype(np.int32)
        labels[-1] = IGNORED_LABEL
        samples.append(
            LoadedSample(
                sample_id=number,
                place="",
                tokens=rng.integers(0, 80, length).astype(np.int32),
                labels=labels,
                position_ids=np.tile(np.arange(length), (3, 1)),
                visual_index=np.zeros(0, dtype=np.int64),
                patches=np.zeros((0, 4), dtype=np.float32),
                grids=np.zeros((0, 3), dtype=np.int64),
            )
        )
    batch, cell = HfCollate(align_tokens=align)(samples), pack_samples(samples, align_tokens=align)
    labels = batch["labels"][0].numpy()
    np.testing.assert_array_equal(labels[1:], cell.labels[:-1])
    assert labels[0] == IGNORED_LABEL
    np.testing.assert_array_equal(batch["cu_seq_lens_k"].numpy(), cell.cu_seqlens)
    assert batch["max_length_k"] == cell.max_seqlen
    assert count_labels(batch) == cell.num_label_tokens
    # what transformers' Trainer counts for losses that shift
    assert int((batch["labels"][..., 1:] != IGNORED_LABEL).sum()) == cell.num_label_tokens


def test_a_batch_that_stands_in_for_a_missing_sample_has_no_tail_of_one_segment():
    assert num_tail_tokens(HfCollate()([text_sample(1)]), 0) == 0
    assert num_tail_tokens(HfCollate(align_tokens=8)([text_sample(1)]), 0) == 7


def test_positions_of_a_sample_in_a_pack_are_its_own(all_kinds):
    """AM-02: on every axis, for samples with one and with several media; nothing is offset."""
    batch = HfCollate(image_token_id=IMAGE, video_token_id=VIDEO, align_tokens=16)(all_kinds)
    parts = segments_of(batch, batch["position_ids"][:, 0].T)
    for sample, part in zip(all_kinds, parts, strict=False):
        np.testing.assert_array_equal(part[:, 1:].T.numpy(), sample.position_ids)
        assert part[:, 0].tolist() == list(range(len(sample.tokens)))


def test_a_pack_of_text_has_no_pixels_and_keeps_its_length(sample_of):
    """AM-04: nothing about media touches the arrays of tokens."""
    batch = HfCollate(image_token_id=IMAGE, align_tokens=4)([sample_of(num_text=7)])
    assert batch["input_ids"].shape == (1, 8)
    assert not any("pixel" in name or "grid" in name for name in batch)


def test_the_keys_of_a_batch_are_those_that_transformers_reads(all_kinds):
    collate = HfCollate(image_token_id=IMAGE, video_token_id=VIDEO)
    assert list(collate(all_kinds)) == [
        *PER_TOKEN,
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "use_cache",
    ]
    assert "use_cache" not in HfCollate(no_cache=False)([text_sample(3)])


def test_mappings_and_loaded_samples_of_the_same_content_give_the_same_batch(all_kinds):
    collate = HfCollate(image_token_id=IMAGE, video_token_id=VIDEO, align_tokens=8)
    wanted = collate(all_kinds)
    mappings = []
    for sample in all_kinds:
        one = HfCollate(image_token_id=IMAGE, video_token_id=VIDEO)([sample])
        media = {name: value for name, value in one.items() if "pixel" in name or "grid" in name}
        mappings.append({**{name: one[name] for name in PER_TOKEN}, **media})
    found = collate(mappings)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value


def test_pixels_that_lie_one_behind_the_other_are_not_copied(sample_of):
    room = Room.of(4 * 1176 * 64)
    samples = []
    for seed in (1, 2):
        sample = sample_of([(1, (1, 4, 4), IMAGE)], seed=seed)
        patches = room.allocate(*sample.patches.shape)
        patches[...] = sample.patches
        samples.append(sample_of([(1, (1, 4, 4), IMAGE)], seed=seed, patches=patches))
    batch = HfCollate(image_token_id=IMAGE)(samples)
    assert batch["pixel_values"].data_ptr() == samples[0].patches.ctypes.data


def test_pixels_that_are_only_read_are_copied(sample_of):
    sample = sample_of([(1, (1, 4, 4), IMAGE)])
    sample.patches.flags.writeable = False
    batch = HfCollate(image_token_id=IMAGE)([sample])
    batch["pixel_values"].zero_()
    assert sample.patches.any()


def test_it_survives_the_way_to_a_worker(all_kinds):
    collate = HfCollate(image_token_id=IMAGE, video_token_id=VIDEO, align_tokens=8, ignore=frozenset({"x"}))
    again = pickle.loads(pickle.dumps(collate))
    assert again == collate
    loader = torch.utils.data.DataLoader(all_kinds, batch_size=2, collate_fn=collate)
    assert [batch["input_ids"].shape[1] % 8 for batch in loader] == [0, 0]


def test_options_come_from_the_config_of_the_model(qwen_vl, text_model):
    of_vl = HfCollate.for_model(qwen_vl, align_tokens=8, pad_token_id=3)
    assert of_vl == HfCollate(
        align_tokens=8, image_token_id=IMAGE, video_token_id=VIDEO, position_axes=3, pad_token_id=3
    )
    assert HfCollate.for_model(qwen_vl.config) == HfCollate.for_model(qwen_vl)
    assert HfCollate.for_model(text_model()) == HfCollate(position_axes=1)


@pytest.mark.parametrize(
    ("rope", "wanted"),
    [
        ({"mrope_section": [1, 2, 3]}, True),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": {"mrope_section": [1]}}, True),
        ({"rope_type": "default"}, False),
        (None, False),
    ],
)
def test_three_axes_are_known_by_their_rotary_sections(rope, wanted):
    assert has_three_axes(SimpleNamespace(rope_scaling=rope)) is wanted
    assert has_three_axes(SimpleNamespace(rope_parameters=rope)) is wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align_tokens": 0}, "^align_tokens=0: at least 1$"),
        ({"position_axes": 2}, "^position_axes=2: 1 or 3$"),
        ({"image_token_id": 5, "pad_token_id": 5}, "^pad_token_id=5 is a placeholder, for which the model expects pix"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(BalancerError, match=message):
        HfCollate(**options)


def test_what_cannot_be_flattened_is_refused_by_slot():
    with pytest.raises(BalancerError, match=r"^a micro-batch needs at least one sample$"):
        HfCollate()([])
    with pytest.raises(
        BalancerError, match=r"^sample 1 of the micro-batch is a Tensor; output='hf' takes LoadedSample or"
    ):
        HfCollate()([text_sample(3), torch.zeros(3)])


def test_positions_that_go_on_over_a_boundary_are_refused():
    """AM-05: a mask is cut by positions, so boundaries it cannot see must not reach the model."""
    with pytest.raises(BalancerError, match=r"^sample 1 of the micro-batch starts at position 3, right behind the end"):
        HfCollate()([text_sample(3), text_sample(4, start=3)])
