"""From a record to tokens: what every encoder gives, and the byte-level one of the demo.

    Record, item_tokens [num_media] --encode--> EncodedSample(tokens [T], labels [T], spans)       to train on
                                    --count---> TextCounts(llm_tokens = T, label_tokens)           to plan with

`count` equals what `encode` would give where `exact` is True; where it is False the numbers are estimates, and the
index marks them so. Encoders are immutable, picklable and cheap to send to workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dataloaders.chat import TRAIN_ON, EncodedSample, count_record, encode_record
from dataloaders.errors import DataError
from dataloaders.record import Record
from dataloaders.tokenizer import ByteTokenizer


@dataclass(frozen=True, slots=True)
class TextCounts:
    """Positions of a sample (`llm_tokens`, media included) and those of them that carry a loss (`label_tokens`)."""

    llm_tokens: int
    label_tokens: int


@runtime_checkable
class RecordEncoder(Protocol):
    """Tokens and labels of records.

    Attributes:
        fingerprint: names tokenizer, template and options; it keys the index.
        exact: False: `count` estimates and `encode` raises.
        train_on: which turns carry labels: `assistant`, `last` or `all`, see `encode_record`.
    """

    @property
    def fingerprint(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def train_on(self) -> str: ...

    def encode(self, record: Record, item_tokens: Sequence[int]) -> EncodedSample:
        """Tokens and shifted labels; medium j takes `item_tokens[j]` positions.

        Raises:
            RecordError: the record does not fit the template, or its media do not match `item_tokens`.
            DataError: the encoder only counts.
        """
        ...

    def count(self, record: Record, item_tokens: Sequence[int]) -> TextCounts:
        """Sizes of what `encode` gives, or estimates of them. Raises RecordError as `encode` does."""
        ...


def check_train_on(train_on: str, place: str) -> None:
    """Raise DataError unless `train_on` is one of `TRAIN_ON`."""
    if train_on not in TRAIN_ON:
        raise DataError(f"train_on={train_on!r}", place=place, remedy=f"Choose one of {', '.join(TRAIN_ON)}.")


@dataclass(frozen=True, slots=True)
class ByteEncoder:
    """One byte is one token, in the template of `dataloaders.chat`: needs no files."""

    train_on: str = "assistant"

    def __post_init__(self) -> None:
        check_train_on(self.train_on, "ByteEncoder")

    @property
    def fingerprint(self) -> str:
        """The tokenizer's; `train_on` is an option of the index of its own."""
        return ByteTokenizer.fingerprint

    @property
    def exact(self) -> bool:
        return True

    def encode(self, record: Record, item_tokens: Sequence[int]) -> EncodedSample:
        return encode_record(record, item_tokens, train_on=self.train_on)

    def count(self, record: Record, item_tokens: Sequence[int]) -> TextCounts:
        return TextCounts(*count_record(record, item_tokens, train_on=self.train_on))
