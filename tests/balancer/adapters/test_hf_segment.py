"""One sample in transformers' spelling: labels, positions, media by kind, and what is refused with which words."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from balancer.adapters.hf_segment import loaded_segment, mapped_segment, tail_segment  # noqa: E402
from balancer.errors import BalancerError  # noqa: E402
from dataloaders.chat import IGNORED_LABEL, shifted_labels  # noqa: E402
from dataloaders.tokenizer import Special  # noqa: E402

pytestmark = pytest.mark.torch

IMAGE, VIDEO = 90, 91


def loaded(sample, *, image=IMAGE, video=VIDEO, axes=3):
    return loaded_segment(sample, image_token_id=image, video_token_id=video, position_axes=axes)


def mapped(features, *, axes=3, ignore=frozenset()):
    return mapped_segment(features, place="sample 5 of the micro-batch", position_axes=axes, ignore=ignore)


def features_of(length=6, **more):
    tokens = list(range(10, 10 + length))
    return {"input_ids": tokens, "labels": list(tokens), **more}


def test_labels_move_back_to_the_tokens_they_name_and_the_first_is_ignored(sample_of):
    tokens = np.array([5, 6, 7, 8], dtype=np.int32)
    shifted = shifted_labels(tokens, np.array([True, False, True, True]))
    segment = loaded(sample_of(num_text=4, tokens=tokens, labels=shifted))
    assert segment.labels.tolist() == [IGNORED_LABEL, IGNORED_LABEL, 7, 8]
    assert segment.labels.dtype == segment.tokens.dtype == np.int64
    assert (segment.labels != IGNORED_LABEL).sum() == (shifted != IGNORED_LABEL).sum()


def test_a_label_behind_the_end_is_refused_instead_of_lost(sample_of):
    sample = sample_of(num_text=3, seed=8, labels=np.array([1, 2, 3], dtype=np.int32))
    with pytest.raises(BalancerError, match=r"^sample 8 \(shard.tar, 008\): the last position has a label, but noth"):
        loaded(sample)


def test_media_are_sorted_by_kind_and_keep_their_order_and_pixels(sample_of):
    grids = [(1, 4, 4), (2, 6, 4), (1, 2, 2)]
    sample = sample_of([(1, grids[0], IMAGE), (2, grids[1], VIDEO), (0, grids[2], IMAGE)])
    segment = loaded(sample)
    assert segment.images.grids.tolist() == [list(grids[0]), list(grids[2])]
    assert segment.videos.grids.tolist() == [list(grids[1])]
    np.testing.assert_array_equal(
        np.concatenate(segment.images.patches), np.concatenate([sample.patches[:16], sample.patches[-4:]])
    )
    np.testing.assert_array_equal(segment.videos.patches[0], sample.patches[16:64])
    assert np.shares_memory(segment.videos.patches[0], sample.patches), "pixels are not copied"


def test_three_axes_get_a_text_row_in_front_and_one_axis_is_that_row_alone(sample_of):
    sample = sample_of([(2, (1, 4, 8), IMAGE)])
    three, one = loaded(sample), loaded(sample, axes=1)
    np.testing.assert_array_equal(three.positions[1:], sample.position_ids)
    assert three.positions[0].tolist() == one.positions[0].tolist() == list(range(len(sample.tokens)))
    assert one.positions.shape == (1, len(sample.tokens))


def stand_in(sample_of, items):
    """As `stand_in_sample` makes it: padding, no labels, the visual positions first, pixels of zero."""
    grids = np.array(items, dtype=np.int64).reshape(-1, 3)
    length = int(grids.prod(axis=1).sum()) // 4 + 5
    return sample_of(
        tokens=np.full(length, Special.PAD, dtype=np.int32),
        labels=np.full(length, IGNORED_LABEL, dtype=np.int32),
        position_ids=np.tile(np.arange(length), (3, 1)),
        visual_index=np.arange(length - 5),
        patches=np.zeros((int(grids.prod(axis=1).sum()), 8), dtype=np.float32),
        grids=grids,
        replaced="missing_media: gone",
    )


def test_a_stand_in_gets_the_placeholders_that_its_grids_need(sample_of):
    sample = stand_in(sample_of, [(1, 4, 4), (3, 2, 2)])
    before = sample.tokens.copy()
    segment = loaded(sample)
    assert segment.tokens.tolist() == [IMAGE] * 4 + [VIDEO] * 3 + [Special.PAD] * 5
    assert (len(segment.images.patches[0]), len(segment.videos.patches[0])) == (16, 12)
    np.testing.assert_array_equal(sample.tokens, before)


@pytest.mark.parametrize(("image", "video"), [(IMAGE, None), (None, VIDEO)])
def test_a_stand_in_for_a_model_of_one_kind_takes_that_kind(sample_of, image, video):
    segment = loaded(stand_in(sample_of, [(1, 4, 4), (3, 2, 2)]), image=image, video=video)
    assert segment.tokens[:7].tolist() == [image or video] * 7
    assert [len(segment.images.grids), len(segment.videos.grids)] == ([2, 0] if image else [0, 2])


def test_a_decoded_stand_in_keeps_its_own_placeholders(sample_of):
    segment = loaded(sample_of([(1, (1, 4, 4), VIDEO)], replaced="decode: cut file"))
    assert len(segment.videos.grids) == 1
    assert not len(segment.images.grids)


@pytest.mark.parametrize(
    ("items", "changes", "ids", "message"),
    [
        ([(1, (1, 4, 4), IMAGE)], {}, {"image": None, "video": None}, "has media, but image_token_id and video_token"),
        ([(1, (1, 4, 4), IMAGE)], {}, {"image": 77}, "medium 0 stands at token id 90, but image_token_id=77 and video"),
        ([(1, (1, 4, 4), IMAGE)], {"patches": np.zeros((0, 4), np.float32)}, {}, "0 of 16 patches; load it with pixe"),
        ([(1, (1, 4, 4), IMAGE)], {"visual_index": np.arange(2, 5)}, {}, "3 visual tokens cannot stand for 16 patches"),
        ([(1, (1, 4, 4), IMAGE)], {"visual_index": np.arange(0)}, {}, "0 visual tokens cannot stand for 16 patches"),
        ([(1, (1, 4, 4), IMAGE)], {"visual_index": np.arange(3, 7)}, {}, "medium 0 stands at token id 90, but image"),
        ([], {"tokens": np.array([IMAGE] * 6, np.int32)}, {}, r"6 placeholders for 0 visual embeddings.*\(90, 91\)"),
        ([], {"tokens": np.zeros(0, np.int32)}, {}, "has no tokens, which makes no segment of a pack. Filter such sam"),
    ],
)
def test_a_sample_that_does_not_fit_its_placeholders_is_named(sample_of, items, changes, ids, message):
    with pytest.raises(BalancerError, match=rf"^sample 3 \(shard.tar, 003\).*{message}"):
        loaded(sample_of(items, seed=3, **changes), **ids)


def test_the_tail_has_no_labels_and_positions_of_its_own():
    """AM-04: it is made of the same fields as a sample, so that no per-token array can be left out."""
    tail = tail_segment(3, pad_token_id=7, position_axes=3)
    assert tail.tokens.tolist() == [7, 7, 7]
    assert set(tail.labels.tolist()) == {IGNORED_LABEL}
    assert tail.positions.tolist() == [[0, 1, 2]] * 4
    assert not tail.images.patches
    assert not tail.videos.patches
    assert tail_segment(2, pad_token_id=0, position_axes=1).positions.tolist() == [[0, 1]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("batch_axis", [False, True])
def test_features_may_be_lists_arrays_or_tensors_with_or_without_a_batch_axis(kind, batch_axis):
    tokens, labels = [11, 12, 13], [11, IGNORED_LABEL, 13]
    wrap = (lambda x: kind([x])) if batch_axis else kind
    segment = mapped(
        {"input_ids": wrap(tokens), "labels": wrap(labels), "attention_mask": wrap([1, 1, 1])},
        axes=1,
    )
    assert segment.tokens.tolist() == tokens
    assert segment.labels.tolist() == [IGNORED_LABEL, IGNORED_LABEL, 13]
    assert segment.positions.tolist() == [[0, 1, 2]]


def test_the_features_of_the_caller_are_not_written_to():
    features = {name: np.array(value) for name, value in features_of().items()}
    mapped(features)
    assert features["labels"].tolist() == features["input_ids"].tolist()


@pytest.mark.parametrize("shape", ["3, t", "4, t", "3, 1, t", "4, 1, t"])
def test_positions_of_media_are_taken_over_in_any_shape_that_models_use(shape):
    rows = np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    given = np.concatenate([np.arange(6)[None], rows]) if shape.startswith("4") else rows
    given = given[:, None] if "1" in shape else given
    segment = mapped(
        features_of(
            position_ids=torch.from_numpy(given),
            pixel_values=torch.ones(16, 4, dtype=torch.bfloat16),
            image_grid_thw=[[1, 4, 4]],
        )
    )
    assert segment.positions.tolist() == [[0, 1, 2, 3, 4, 5], *rows.tolist()]
    assert segment.images.patches[0].dtype == np.float32
    assert segment.images.grids.tolist() == [[1, 4, 4]]


def test_text_needs_no_positions_and_plain_ones_serve_all_axes():
    for features in (features_of(4), features_of(4, position_ids=[0, 1, 2, 3])):
        assert mapped(features).positions.tolist() == [[0, 1, 2, 3]] * 4
    assert mapped(features_of(4, position_ids=[2, 3, 4, 5]), axes=1).positions.tolist() == [[2, 3, 4, 5]]


def test_media_without_positions_are_refused_with_the_line_to_add():
    features = features_of(pixel_values=np.zeros((16, 4)), image_grid_thw=[[1, 4, 4]])
    with pytest.raises(BalancerError, match=r"^sample 5 of the micro-batch has media but no position_ids") as error:
        mapped(features)
    assert "features['position_ids'] = model.model.get_rope_index(...)[0]" in str(error.value)
    assert mapped(features, axes=1).positions.shape == (1, 6), "one axis needs none"


def test_columns_that_are_numbers_or_texts_are_left_out():
    segment = mapped(features_of(length=6, url="x.html", score=0.5, kept=True, missing=None, id=np.int64(3)))
    assert len(segment.tokens) == 6


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"labels": None},
            r"has no 'labels' \(it has: input_ids, labels\). Labels of plain text are a copy of input_id",
        ),
        ({"labels": [1, 2]}, "2 labels for 6 tokens"),
        ({"input_ids": []}, "has no tokens"),
        ({"input_ids": [[1, 2], [3, 4]]}, r"input_ids has the shape \(2, 2\); one sample has \[tokens\]"),
        (
            {"attention_mask": [1, 1, 1, 1, 0, 0]},
            "attention_mask has zeros. Tokenise without padding: a pack needs none",
        ),
        ({"token_type_ids": [0] * 6}, r"'token_type_ids' \(list\) cannot be flattened. Remove the column.*'token_type"),
        (
            {"position_ids": [0, 1, 2]},
            r"position_ids have the shape \(3,\) where 6 tokens and 3 position axes were exp",
        ),
        (
            {"position_ids": [0, 1, 2, 0, 1, 2]},
            "the text positions do not count up one by one, so transformers would see",
        ),
        ({"position_ids": []}, r"position_ids have the shape \(0,\) where 6 tokens"),
        ({"pixel_values": [[0.0]]}, "image_grid_thw is missing; pixel_values and image_grid_thw go together"),
        ({"video_grid_thw": [[1, 2, 2]]}, "pixel_values_videos is missing; pixel_values_videos and video_grid_thw go"),
        (
            {"pixel_values": np.zeros((3, 4)), "image_grid_thw": [[1, 2, 2]]},
            r"pixel_values has the shape \(3, 4\), but image_grid_thw has 4 patches",
        ),
    ],
)
def test_features_that_cannot_be_flattened_are_refused_by_name(more, message):
    with pytest.raises(BalancerError, match=rf"^sample 5 of the micro-batch.*{message}"):
        mapped(features_of(**more))


def test_three_rows_of_positions_need_a_model_of_three_axes():
    with pytest.raises(BalancerError, match=r"6 tokens and 1 position axes.*HfCollate.for_model\(model\) sets"):
        mapped(features_of(position_ids=np.zeros((3, 6))), axes=1)


def test_an_unknown_array_can_be_left_out_by_name():
    assert len(mapped(features_of(spans=[[0, 1]]), ignore=frozenset({"spans"})).tokens) == 6
