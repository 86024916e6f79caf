"""An index with some rows changed reads like one that was written so."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.adjusted_index import AdjustedIndex, AdjustedRows
from dataloaders.adjustment import Adjustment, adjusted_estimator, cut_sample, media_end
from dataloaders.chat import IGNORED_LABEL, EncodedSample, MediaSpan, TextSpan
from dataloaders.errors import DataError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.estimators.base import MediaLimits
from dataloaders.estimators.qwen_vl_utils import QwenVLUtilsEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, CostIndex, IndexKey

N = 6
KEY = IndexKey(
    rules=1, source="s", estimator="e", tokenizer="t", train_on="all", apply_orientation=True, limits="", unfit="skip"
)


def base() -> CostIndex:
    samples = {name: np.arange(N).astype(dtype) for name, dtype in SAMPLE_COLUMNS.items()}
    samples["num_items"] = np.array([0, 1, 2, 0, 1, 0]).astype(SAMPLE_COLUMNS["num_items"])
    items = {name: (10 * np.arange(4)).astype(dtype) for name, dtype in ITEM_COLUMNS.items()}
    names = pa.table({"shard": ["a"] * N, "key": [str(i) for i in range(N)]})
    return CostIndex(key=KEY, samples=samples, items=items, names=names, bad=[], reasons=[""])


def adjusted() -> AdjustedIndex:
    return AdjustedIndex(
        base(),
        {2: Adjustment(keep_tokens=7), 4: Adjustment()},
        sample_rows=AdjustedRows(rows=np.array([2, 4]), columns={"llm_tokens": np.array([107, 109])}),
        item_rows=AdjustedRows(rows=np.array([3]), columns={"patches": np.array([55])}),
    )


rows = st.one_of(
    st.integers(-N, N - 1),
    st.lists(st.integers(-N, N - 1), max_size=9),
    st.lists(st.integers(0, N - 1), max_size=9).map(lambda rows: np.array(rows, dtype=np.int64)),
    st.slices(N),
    st.lists(st.booleans(), min_size=N, max_size=N).map(np.array),
)


@given(rows)
def test_rows_are_those_of_an_array_with_the_values_written_in(wanted: object) -> None:
    column, plain = adjusted().samples["llm_tokens"], np.array([0, 1, 107, 3, 109, 5])
    if isinstance(wanted, list):
        wanted = np.array(wanted, dtype=np.int64)
    assert np.array_equal(column[wanted], plain[wanted])  # type: ignore[index]


def test_whole_columns_work_through_numpy_and_the_base_stays_as_it_was() -> None:
    index = adjusted()
    column = index.samples["llm_tokens"]
    assert np.asarray(column).tolist() == [0, 1, 107, 3, 109, 5]
    assert (column + 1).tolist() == [1, 2, 108, 4, 110, 6]
    assert np.flatnonzero(column > 100).tolist() == [2, 4]
    assert (column.sum(), column.max(), len(column), column.dtype) == (225, 109, N, np.dtype(np.int32))
    assert index.base.samples["llm_tokens"].tolist() == list(range(N))
    assert index.items["patches"][[3, 0]].tolist() == [55, 0]
    assert index.items["frames"] is index.base.items["frames"], "what does not change costs nothing"
    with pytest.raises(IndexError, match="row 6 of a column of 6"):
        column[6]
    with pytest.raises(IndexError, match="rows 0 to 9 of a column of 6"):
        column[[0, 9]]
    with pytest.raises(ValueError, match="cannot be had without a copy"):
        np.array(column, copy=False)


def test_everything_else_is_that_of_the_base() -> None:
    index, plain = adjusted(), base()
    assert len(index) == N
    assert index.item_offsets.tolist() == plain.item_offsets.tolist()
    assert [index.keys(i) for i in range(N)] == [plain.keys(i) for i in range(N)]
    assert (index.shard(3), index.bad, index.shards) == ("a", [], ())
    assert index.shard_numbers.tolist() == plain.shard_numbers.tolist()
    assert index.samples["text_tokens"].tolist() == plain.samples["text_tokens"].tolist(), "text that was scanned"
    assert (plain.adjustment(2), index.adjustment(2), index.adjustment(3)) == (None, Adjustment(keep_tokens=7), None)


def test_the_fingerprint_follows_base_values_and_adjustments() -> None:
    index = adjusted()
    assert index.fingerprint == adjusted().fingerprint != index.base.fingerprint
    rows = AdjustedRows(rows=np.array([2]), columns={"llm_tokens": np.array([107])})
    none = AdjustedRows(rows=np.zeros(0, dtype=np.int64), columns={})
    made = [
        AdjustedIndex(base(), {2: what}, sample_rows=rows, item_rows=none).fingerprint
        for what in (Adjustment(keep_tokens=7), Adjustment(keep_tokens=8), Adjustment(limits=MediaLimits()))
    ]
    assert len(set(made)) == 3


def test_it_survives_pickling() -> None:
    there = pickle.loads(pickle.dumps(adjusted()))
    assert there.samples["llm_tokens"].tolist() == [0, 1, 107, 3, 109, 5]
    assert there.fingerprint == adjusted().fingerprint


def encoded() -> EncodedSample:
    """a [image of 3] b c d, all of it trained but the image."""
    tokens = np.array([1, 9, 9, 9, 2, 3, 4], dtype=np.int32)
    labels = np.array([-100, -100, -100, 2, 3, 4, -100], dtype=np.int32)
    texts = (TextSpan(0, 1, 0, "user"), TextSpan(4, 3, 1, "assistant"))
    return EncodedSample(tokens=tokens, labels=labels, spans=(MediaSpan(1, 3, 0),), texts=texts)


def test_a_cut_keeps_the_beginning_and_learns_nothing_at_its_end() -> None:
    cut = cut_sample(encoded(), 6)
    assert cut.tokens.tolist() == [1, 9, 9, 9, 2, 3]
    assert cut.labels.tolist() == [-100, -100, -100, 2, 3, IGNORED_LABEL]
    assert cut.texts == (TextSpan(0, 1, 0, "user"), TextSpan(4, 2, 1, "assistant"))
    assert cut.spans == encoded().spans
    assert encoded().labels.tolist()[5] == 4, "the original is not written to"


def test_a_cut_behind_the_end_and_none_change_nothing() -> None:
    sample = encoded()
    assert cut_sample(sample, None) is sample
    assert cut_sample(sample, 7) is sample


def test_a_medium_is_never_cut() -> None:
    assert media_end(encoded()) == 4
    assert len(cut_sample(encoded(), 4).tokens) == 4
    with pytest.raises(DataError, match="a cut to 3 tokens would go through a medium that ends at 4"):
        cut_sample(encoded(), 3)


@pytest.mark.parametrize("wrapped", [False, True])
def test_limits_bound_what_an_estimator_gives_and_stop_at_its_own_minimum(wrapped: bool) -> None:
    inner = Qwen25VLEstimator(Qwen25VLConfig(video_min_frames=6))
    estimator = QwenVLUtilsEstimator(inner) if wrapped else inner
    limits = MediaLimits(image_pixels=100 * 784, video_frames=10, frame_pixels=150 * 784)
    shrunk = adjusted_estimator(estimator, Adjustment(limits=limits))
    assert shrunk.image(2000, 1000).visual_tokens <= 100 < estimator.image(2000, 1000).visual_tokens
    video = (1280, 720, 240, 24.0, 10.0)
    assert (shrunk.video(*video).frames, estimator.video(*video).frames) == (10, 20)
    assert shrunk.video(*video).visual_tokens <= 5 * 150
    assert len(shrunk.frame_indices(240, 24.0, 10.0)) == 10
    least = adjusted_estimator(
        estimator, Adjustment(limits=MediaLimits(image_pixels=1, video_frames=1, frame_pixels=1))
    )
    assert least.video(*video).frames == estimator.min_video_frames == (4 if wrapped else 6)
    assert least.image(2000, 1000).visual_tokens >= 1
    assert shrunk.fingerprint != estimator.fingerprint


def test_a_fixed_number_of_frames_is_limited_too() -> None:
    estimator = Qwen25VLEstimator(Qwen25VLConfig(video_num_frames=16))
    shrunk = estimator.shrunk(MediaLimits(video_frames=7))
    assert shrunk.video(100, 100, 60, 10.0, 6.0).frames == 6


def test_no_adjustment_is_the_estimator_itself() -> None:
    estimator = Qwen25VLEstimator()
    assert adjusted_estimator(estimator, None) is estimator
    assert adjusted_estimator(estimator, Adjustment(keep_tokens=3)) is estimator
