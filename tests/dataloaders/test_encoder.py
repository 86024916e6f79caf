"""The protocol of encoders, the byte-level one, and the estimates that need no tokenizer."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.chat import encode_record
from dataloaders.counts import MediaKind
from dataloaders.encoder import ByteEncoder, RecordEncoder, TextCounts
from dataloaders.errors import DataError, RecordError
from dataloaders.record import MediaPart, MediaRef, Record, TextPart, Turn
from dataloaders.rough_encoder import RoughEncoder
from dataloaders.tokenizer import ByteTokenizer

DIALOGUE = Record(
    shard="s.tar",
    key="k",
    turns=(
        Turn(role="user", parts=(MediaPart(0), TextPart("What is it?"))),
        Turn(role="assistant", parts=(TextPart("A cat."),)),
        Turn(role="user", parts=(TextPart("Sure?"),)),
        Turn(role="assistant", parts=(TextPart("Yes."),)),
    ),
    media=(MediaRef(kind=MediaKind.IMAGE, member="k.jpg", size_bytes=1),),
)


@pytest.mark.parametrize("encoder", [ByteEncoder(), RoughEncoder()], ids=["bytes", "rough"])
def test_every_encoder_keeps_the_protocol_and_travels(encoder: RecordEncoder) -> None:
    assert isinstance(encoder, RecordEncoder)
    assert pickle.loads(pickle.dumps(encoder)) == encoder
    assert encoder.fingerprint
    with pytest.raises(RecordError, match="1 media, but visual token counts"):
        encoder.count(DIALOGUE, [])
    with pytest.raises(DataError, match=r"train_on='answers' at .* Choose one of assistant, last, all"):
        type(encoder)(train_on="answers")  # type: ignore[call-arg]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_the_byte_encoder_is_the_byte_level_template(train_on: str) -> None:
    encoder, expected = ByteEncoder(train_on), encode_record(DIALOGUE, [7], train_on=train_on)
    assert encoder.encode(DIALOGUE, [7]).labels.tolist() == expected.labels.tolist()
    assert encoder.count(DIALOGUE, [7]) == TextCounts(len(expected.tokens), expected.num_label_tokens)
    assert encoder.exact
    assert encoder.fingerprint == ByteTokenizer.fingerprint


def test_rough_counts_follow_the_formula() -> None:
    # bytes 11, 6, 5, 4 at 4 per token: 3, 2, 2, 1 tokens; 4 turns of 5 more; a medium of 7 and its 2 delimiters
    assert RoughEncoder().count(DIALOGUE, [7]) == TextCounts(8 + 20 + 9, 3 + 2)
    assert RoughEncoder(train_on="last").count(DIALOGUE, [7]) == TextCounts(37, 1 + 1)
    assert RoughEncoder(train_on="all").count(DIALOGUE, [7]) == TextCounts(37, 8 + 2)


@given(st.text(max_size=40), st.floats(0.5, 8))
def test_rough_counts_grow_with_the_text_and_shrink_with_the_bytes_of_a_token(text: str, size: float) -> None:
    def count(text: str, size: float) -> int:
        record = Record(shard="s", key="k", turns=(Turn(role="user", parts=(TextPart(text),)),))
        return RoughEncoder(bytes_per_token=size).count(record, []).llm_tokens

    assert 5 <= count(text, size) <= count(text + "x", size)
    assert count(text, size * 2) <= count(text, size)


def test_a_rough_encoder_is_marked_and_has_no_tokens() -> None:
    encoder = RoughEncoder(bytes_per_token=3)
    assert not encoder.exact
    assert encoder.fingerprint == "rough-1 bytes_per_token=3.0" != RoughEncoder().fingerprint
    with pytest.raises(DataError, match=r"estimates has no tokens to train on at shard s.tar, key k. Use Template"):
        encoder.encode(DIALOGUE, [7])


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_a_rough_encoder_without_a_sensible_size_is_refused(size: float) -> None:
    with pytest.raises(DataError, match="bytes_per_token="):
        RoughEncoder(bytes_per_token=size)
