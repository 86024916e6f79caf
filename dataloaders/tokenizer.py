"""A byte-level tokenizer with the special tokens of a chat with media: one byte is one token, nothing is downloaded.

    "é<"  ->  [195, 169, 60]          special tokens are ids from 256 on and never come out of text

Property: every text round-trips, and text that spells `<|im_end|>` stays ten harmless bytes. Price: sequences about
four times as long as with a trained vocabulary.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError

NUM_BYTES = 256
VOCAB_SIZE = 264
"""Rows of an embedding for this tokenizer: 256 bytes, 7 special tokens, one spare (a multiple of 8)."""


class Special(IntEnum):
    """Ids of the special tokens."""

    PAD = 256
    IM_START = 257
    IM_END = 258
    VISION_START = 259
    VISION_END = 260
    IMAGE_PAD = 261
    VIDEO_PAD = 262


_NAMES = {int(special): f"<|{special.name.lower()}|>" for special in Special} | {VOCAB_SIZE - 1: "<|spare|>"}


class ByteTokenizer:
    """UTF-8 bytes as token ids. Lone surrogates, which JSON can smuggle in, become their three-byte form."""

    vocab_size = VOCAB_SIZE
    fingerprint = "byte-1"

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, each in 0..255."""
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_array(self, text: str) -> NDArray[np.int32]:
        """The same as int32 [n]."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Text of `ids`; special tokens by name, bytes that are not UTF-8 as U+FFFD.

        Raises:
            DataError: an id outside the vocabulary.
        """
        pieces: list[str] = []
        run = bytearray()
        for token in (int(i) for i in ids):
            if 0 <= token < NUM_BYTES:
                run.append(token)
                continue
            if token not in _NAMES:
                raise DataError(f"token id {token} is outside the vocabulary of {VOCAB_SIZE}", place="ByteTokenizer")
            pieces += [run.decode("utf-8", "replace"), _NAMES[token]]
            run.clear()
        return "".join([*pieces, run.decode("utf-8", "replace")])
