"""Estimates of text tokens where no tokenizer is at hand: for scanning, never for training.

    llm_tokens = sum over turns of (ceil(UTF-8 bytes / bytes_per_token) + 5) + sum over media of (item_tokens + 2)

5 is what ChatML writes around a turn (`<|im_start|>`, role, line break, `<|im_end|>`, line break), 2 the delimiters of
a medium. An index made so is marked: its samples are estimated, and it has to be built again before training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite

from dataloaders.chat import EncodedSample, check_media
from dataloaders.encoder import TextCounts, check_train_on
from dataloaders.errors import DataError
from dataloaders.record import Record, TextPart, Turn

TURN_TOKENS = 5
MEDIUM_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RoughEncoder:
    """Counts from the bytes of a text; `encode` raises.

    Attributes:
        bytes_per_token: about 4 for English and code in vocabularies of 100,000 and more, 2 to 3 for other scripts.
    """

    bytes_per_token: float = 4.0
    train_on: str = "assistant"

    def __post_init__(self) -> None:
        check_train_on(self.train_on, "RoughEncoder")
        if not (isfinite(self.bytes_per_token) and self.bytes_per_token > 0):
            raise DataError(f"bytes_per_token={self.bytes_per_token!r}", remedy="Give a positive number, such as 4.0.")

    @property
    def fingerprint(self) -> str:
        return f"rough-1 bytes_per_token={float(self.bytes_per_token)!r}"

    @property
    def exact(self) -> bool:
        return False

    def encode(self, record: Record, item_tokens: Sequence[int]) -> EncodedSample:
        """Raises DataError always: an estimate has no tokens."""
        raise DataError(
            "an encoder that estimates has no tokens to train on",
            place=record.place,
            remedy="Use TemplateEncoder.from_folder(model_folder), and build the index again with it.",
        )

    def count(self, record: Record, item_tokens: Sequence[int]) -> TextCounts:
        check_media(record, item_tokens)
        texts = [self._text_tokens(turn) for turn in record.turns]
        answers = [i for i, turn in enumerate(record.turns) if turn.role == "assistant"]
        ended = answers[-1:] if self.train_on == "last" else answers
        learned = range(len(texts)) if self.train_on == "all" else ended
        media = sum(int(count) + MEDIUM_TOKENS for count in item_tokens)
        return TextCounts(
            llm_tokens=sum(texts) + TURN_TOKENS * len(texts) + media,
            label_tokens=sum(texts[i] for i in learned) + len(ended),
        )

    def _text_tokens(self, turn: Turn) -> int:
        texts = (part.text for part in turn.parts if isinstance(part, TextPart))
        return ceil(sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) / self.bytes_per_token)
