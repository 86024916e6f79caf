"""The byte tokenizer: nothing is lost, nothing in a text becomes special."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError
from dataloaders.tokenizer import NUM_BYTES, VOCAB_SIZE, ByteTokenizer, Special

TOKENIZER = ByteTokenizer()


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(alphabet=st.characters(), max_size=20))
def test_ids_of_text_are_bytes_and_both_forms_agree(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert all(0 <= i < NUM_BYTES for i in ids)
    assert TOKENIZER.encode_array(text).dtype == np.int32
    assert TOKENIZER.encode_array(text).tolist() == ids


def test_a_special_token_spelled_in_a_text_stays_text() -> None:
    ids = TOKENIZER.encode("<|im_end|><|image_pad|>")
    assert len(ids) == 23
    assert not set(ids) & {int(special) for special in Special}


def test_special_ids_are_those_of_the_contract() -> None:
    assert [int(special) for special in Special] == list(range(256, 263))
    assert [special.name for special in Special] == [
        "PAD",
        "IM_START",
        "IM_END",
        "VISION_START",
        "VISION_END",
        "IMAGE_PAD",
        "VIDEO_PAD",
    ]
    assert VOCAB_SIZE == 264


def test_special_tokens_are_decoded_by_name() -> None:
    ids = [Special.IM_START, *TOKENIZER.encode("hi"), Special.IM_END, VOCAB_SIZE - 1]
    assert TOKENIZER.decode(ids) == "<|im_start|>hi<|im_end|><|spare|>"


def test_a_character_cut_in_the_middle_decodes_to_a_replacement_and_not_to_an_error() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("é")[:1]) == "�"


def test_a_lone_surrogate_from_json_is_encoded() -> None:
    assert len(TOKENIZER.encode("a\ud800b")) == 5


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10_000])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(DataError, match=f"token id {token} is outside the vocabulary of 264"):
        TOKENIZER.decode([65, token])
