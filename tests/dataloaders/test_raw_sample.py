"""Samples in memory: exact there and back, hostile blobs refused, and a source like any other."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.counts import MediaKind
from dataloaders.errors import DataError, Reason, RecordError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS
from dataloaders.raw_sample import BadRecord, MemorySource, RawSample
from dataloaders.record import MediaPart, MediaRef, Record, TextPart, Turn
from dataloaders.sample import load_sample
from dataloaders.scan import scan_source
from dataloaders.source import SampleSource
from dataloaders.tar_source import TarSource

TEXT = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates as well
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def samples(draw: st.DrawFn) -> RawSample:
    media = tuple(draw(st.lists(st.binary(max_size=40), max_size=4)))
    refs = tuple(
        MediaRef(kind=draw(st.sampled_from(MediaKind)), member=draw(TEXT), size_bytes=len(medium)) for medium in media
    )
    part = TEXT.map(TextPart)
    if media:
        part |= st.integers(0, len(media) - 1).map(MediaPart)
    turn = st.builds(Turn, role=st.sampled_from(["user", "assistant"]), parts=st.lists(part, max_size=4).map(tuple))
    record = Record(
        shard=draw(TEXT),
        key=draw(TEXT),
        turns=tuple(draw(st.lists(turn, max_size=3))),
        media=refs,
        extra=draw(st.dictionaries(TEXT, JSON, max_size=3)),
    )
    return RawSample(record, media)


def whole(source: SampleSource, i: int) -> RawSample:
    """Sample `i` of any source, in memory."""
    record = source.record(i)
    return RawSample(record, tuple(source.media_bytes(i, j) for j in range(len(record.media))))


@settings(max_examples=50, deadline=None)
@given(samples())
def test_what_comes_back_is_what_went(sample: RawSample) -> None:
    assert RawSample.from_bytes(sample.to_bytes()) == sample
    assert RawSample.from_bytes(memoryview(bytearray(sample.to_bytes()))) == sample


@settings(max_examples=50, deadline=None)
@given(samples(), st.data())
def test_a_damaged_blob_is_refused_or_another_sample_but_never_anything_else(
    sample: RawSample, data: st.DataObject
) -> None:
    blob = bytearray(sample.to_bytes())
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    with suppress(DataError):
        assert isinstance(RawSample.from_bytes(blob), RawSample)


@settings(max_examples=50, deadline=None)
@given(samples(), st.data())
def test_a_cut_or_longer_blob_is_refused(sample: RawSample, data: st.DataObject) -> None:
    blob = sample.to_bytes()
    with pytest.raises(DataError, match="damaged"):
        RawSample.from_bytes(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(DataError, match="damaged"):
        RawSample.from_bytes(blob + b"x")


def test_a_head_that_names_more_than_there_is_allocates_nothing() -> None:
    blob = b"RAW1" + (2**32 - 1).to_bytes(4, "little") * 2
    with pytest.raises(DataError, match="does not fit its length"):
        RawSample.from_bytes(blob)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000,
        "{}",
        '["s","k",[],[],[],[]]',
        '["s","k",[["user",[0]]],[],[],{}]',
        '["s","k",[["user",[-1]]],[[0,"m"]],[0],{}]',
        '["s","k",[["user",[true]]],[[0,"m"]],[0],{}]',
        '["s","k",[],[[7,"m"]],[0],{}]',
        '["s",1,[],[],[],{}]',
    ],
)
def test_a_record_that_is_none_is_refused(text: str) -> None:
    blob = b"RAW1" + len(text).to_bytes(4, "little") + bytes(4) + text.encode()
    with pytest.raises(DataError, match="damaged"):
        RawSample.from_bytes(blob)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"a": b"bytes"}, "a value is a bytes"),
        ({"a": {1: 2}}, "a field is named 1, a int"),
        ({"a": (1, 2)}, "a value is a tuple"),
        ({"a": np.int64(3)}, "a value is a int64"),
    ],
)
def test_what_json_would_change_is_named_before_it_is_lost(extra: dict[str, object], said: str) -> None:
    sample = RawSample(Record(shard="s", key="k", turns=(), extra=extra))
    with pytest.raises(DataError, match=said) as error:
        sample.to_bytes()
    assert "shard s, key k" in str(error.value)


def test_nesting_is_bounded_and_nan_survives() -> None:
    deep: object = 0
    for _ in range(300):
        deep = [deep]
    with pytest.raises(DataError, match="nested deeper than 200"):
        RawSample(Record(shard="s", key="k", turns=(), extra={"a": deep})).to_bytes()
    sample = RawSample(Record(shard="s", key="k", turns=(), extra={"a": math.nan}))
    assert math.isnan(RawSample.from_bytes(sample.to_bytes()).record.extra["a"])  # type: ignore[arg-type]


def test_media_that_are_not_the_records_are_refused() -> None:
    record = Record(shard="s", key="k", turns=(), media=(MediaRef(kind=MediaKind.IMAGE, member="k.jpg", size_bytes=3),))
    with pytest.raises(DataError, match=r"media of \[3\] bytes, but media of \[2\]"):
        RawSample(record, (b"ab",))


def test_a_tar_in_memory_is_scanned_and_loaded_like_the_tar(small_shard: Path) -> None:
    tar, estimator = TarSource(str(small_shard)), Qwen25VLEstimator()
    memory = MemorySource([RawSample.from_bytes(whole(tar, i).to_bytes()) for i in range(len(tar))])
    assert isinstance(memory, SampleSource)
    there, here = scan_source(tar, estimator), scan_source(memory, estimator)
    for name in SAMPLE_COLUMNS:
        np.testing.assert_array_equal(there.samples[name], here.samples[name])
    for name in ITEM_COLUMNS:
        np.testing.assert_array_equal(there.items[name], here.items[name])
    for i in range(len(tar)):
        assert memory.place(i) == tar.place(i)
        of_tar, of_memory = load_sample(tar, there, i, estimator), load_sample(memory, here, i, estimator)
        np.testing.assert_array_equal(of_tar.patches, of_memory.patches)
        np.testing.assert_array_equal(of_tar.tokens, of_memory.tokens)


def test_a_bad_record_is_a_row_with_its_reason(chat_json: Callable[..., bytes]) -> None:
    good = RawSample(Record(shard="s", key="0", turns=(Turn(role="assistant", parts=(TextPart("a"),)),)))
    error = RecordError(Reason.BAD_RECORD, "the JSON does not parse", place="shard s, key 1")
    source = MemorySource([good, BadRecord(place="shard s, key 1", error=error)])
    index = scan_source(source, Qwen25VLEstimator())
    assert len(index) == 2
    (bad,) = index.bad
    assert (bad.sample_id, bad.reason, bad.place) == (1, "bad_record", "shard s, key 1")


def test_the_fingerprint_follows_every_byte_and_the_order() -> None:
    def sample(text: str) -> RawSample:
        return RawSample(Record(shard="s", key="k", turns=(Turn(role="user", parts=(TextPart(text),)),)))

    prints = {
        MemorySource(list(map(sample, texts))).fingerprint for texts in (["a", "b"], ["b", "a"], ["a"], ["a", "c"], [])
    }
    assert len(prints) == 5
    assert MemorySource([sample("a")], fingerprint="mine").fingerprint == "mine"


def test_ids_and_media_outside_are_index_errors() -> None:
    source = MemorySource([RawSample(Record(shard="s", key="k", turns=()))])
    with pytest.raises(IndexError, match="sample -1"):
        source.record(-1)
    with pytest.raises(IndexError, match="sample 1"):
        source.place(1)
    with pytest.raises(IndexError, match="medium 0"):
        source.media_bytes(0, 0)


def test_a_blob_holds_json_and_bytes_and_no_pickle() -> None:
    sample = RawSample(Record(shard="s", key="k", turns=(), extra={"a": 1}))
    blob = sample.to_bytes()
    assert json.loads(blob[12:]) == ["s", "k", [], [], [], {"a": 1}]
