"""From a record to tokens and labels: the chat template, what is trained, and where media go.

    <|im_start|>user\\n  <|vision_start|> <|image_pad|> x count <|vision_end|>  What is it?  <|im_end|>\\n
    <|im_start|>assistant\\n  A cat.  <|im_end|>\\n
                              ^^^^^^^^^^^^^^^^^ trained under train_on="assistant"

Labels are shifted already: `labels[t]` is the token at t + 1 if that token is trained, else -100, so a loss compares
output t with label t and packs can be concatenated without a label crossing a border. Placeholders are never trained
and never cut: their number is exactly what the estimator planned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import MediaKind
from dataloaders.errors import DataError, Reason, RecordError
from dataloaders.record import MediaPart, Record, TextPart, Turn
from dataloaders.tokenizer import ByteTokenizer, Special

IGNORED_LABEL = -100
TrainOn: TypeAlias = Literal["assistant", "last", "all"]
TRAIN_ON: tuple[str, ...] = get_args(TrainOn)

_TOKENIZER = ByteTokenizer()
_PLACEHOLDER = {MediaKind.IMAGE: Special.IMAGE_PAD, MediaKind.VIDEO: Special.VIDEO_PAD}


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """`count` placeholders from position `start` on, for `Record.media[media_index]` (delimiters are outside)."""

    start: int
    count: int
    media_index: int


@dataclass(frozen=True, slots=True)
class TextSpan:
    """`count` text tokens from position `start` on, in turn `turn_index`, spoken by `role`."""

    start: int
    count: int
    turn_index: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedSample:
    """A tokenised record of T positions.

    Attributes:
        tokens: int32 [T].
        labels: int32 [T], shifted; -100 where nothing is learned, always at T - 1.
        spans: media in order; texts: text parts in order (empty where an encoder does not tell them apart).
    """

    tokens: NDArray[np.int32]
    labels: NDArray[np.int32]
    spans: tuple[MediaSpan, ...]
    texts: tuple[TextSpan, ...]

    @property
    def num_label_tokens(self) -> int:
        """Positions that carry a loss."""
        return int(np.count_nonzero(self.labels != IGNORED_LABEL))

    @property
    def num_visual_tokens(self) -> int:
        """Positions that receive a visual embedding."""
        return sum(span.count for span in self.spans)

    @property
    def visual_index(self) -> NDArray[np.int64]:
        """int64 [V]: positions that receive a visual embedding, in media order."""
        runs = [np.arange(span.start, span.start + span.count, dtype=np.int64) for span in self.spans]
        return np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)


def shifted_labels(tokens: NDArray[np.int32], trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    """int32 [T]: the token at t + 1 where that token is trained, else -100."""
    labels = np.full(len(tokens), IGNORED_LABEL, dtype=np.int32)
    labels[:-1] = np.where(trained[1:], tokens[1:], IGNORED_LABEL)
    return labels


class _Writer:
    """Collects token runs with a flag whether they are trained."""

    def __init__(self) -> None:
        self.length = 0
        self._runs: list[NDArray[np.int32]] = []
        self._trained: list[bool] = []

    def add(self, run: NDArray[np.int32], *, trained: bool) -> int:
        """Append a run; returns the position of its first token."""
        start = self.length
        self._runs.append(run)
        self._trained.append(trained)
        self.length += len(run)
        return start

    def text(self, text: str, *, trained: bool = False) -> int:
        return self.add(_TOKENIZER.encode_array(text), trained=trained)

    def special(self, token: Special, count: int = 1, *, trained: bool = False) -> int:
        return self.add(np.full(count, int(token), dtype=np.int32), trained=trained)

    def finish(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        tokens = np.concatenate(self._runs) if self._runs else np.zeros(0, dtype=np.int32)
        trained = np.repeat(np.array(self._trained, dtype=np.bool_), [len(run) for run in self._runs])
        return tokens, shifted_labels(tokens, trained)


def encode_record(record: Record, item_tokens: Sequence[int], *, train_on: str = "assistant") -> EncodedSample:
    """Tokenise `record`.

    Args:
        item_tokens: visual tokens of each medium, in the order of `record.media`.
        train_on: `assistant`: the content of every assistant turn and its end token. `last`: the same for the last
            assistant turn only. `all`: as `assistant`, and the text of every other turn.

    Raises:
        RecordError: media parts that are not 0, 1, 2, ... in order, or a number of counts that differs from the media.
        DataError: an unknown `train_on`.
    """
    _check_arguments(record, item_tokens, train_on)
    writer = _Writer()
    spans: list[MediaSpan] = []
    texts: list[TextSpan] = []
    for i, answer in enumerate(_answers(record, train_on)):
        _write_turn(writer, record, i, item_tokens, trained=answer or train_on == "all", spans=spans, texts=texts)
        writer.special(Special.IM_END, trained=answer)
        writer.text("\n")
    tokens, labels = writer.finish()
    return EncodedSample(tokens=tokens, labels=labels, spans=tuple(spans), texts=tuple(texts))


def count_record(record: Record, item_tokens: Sequence[int], *, train_on: str = "assistant") -> tuple[int, int]:
    """(tokens, label tokens) of what `encode_record` gives, without making it: a scan needs no more.

    Raises what `encode_record` raises.
    """
    _check_arguments(record, item_tokens, train_on)
    tokens = labels = 0
    for turn, answer in zip(record.turns, _answers(record, train_on), strict=True):
        text = sum(_num_bytes(part.text) for part in turn.parts if isinstance(part, TextPart))
        media = sum(item_tokens[part.index] + 2 for part in turn.parts if isinstance(part, MediaPart))
        tokens += _num_bytes(turn.role) + text + media + 4  # <|im_start|>, two line ends, <|im_end|>
        labels += (text if answer or train_on == "all" else 0) + answer
    return tokens, labels


def prompt_of(record: Record) -> Record:
    """`record` without its last assistant turn, what follows it, and the media those turns refer to."""
    answers = [i for i, turn in enumerate(record.turns) if turn.role == "assistant"]
    turns = record.turns[: answers[-1]] if answers else record.turns
    num_media = sum(isinstance(part, MediaPart) for turn in turns for part in turn.parts)
    return Record(shard=record.shard, key=record.key, turns=turns, media=record.media[:num_media], extra=record.extra)


def encode_prompt(record: Record, item_tokens: Sequence[int]) -> EncodedSample:
    """Tokens that a model continues with the last answer: `prompt_of(record)` and an open assistant turn.

    Args:
        item_tokens: visual tokens of each medium of `record`; those of media behind the prompt are not used.
    """
    prompt = prompt_of(record)
    check_media(record, item_tokens)
    encoded = encode_record(prompt, item_tokens[: len(prompt.media)])
    header = [int(Special.IM_START), *_TOKENIZER.encode("assistant\n")]
    tokens = np.concatenate([encoded.tokens, np.array(header, dtype=np.int32)])
    labels = np.full(len(tokens), IGNORED_LABEL, dtype=np.int32)
    return EncodedSample(tokens=tokens, labels=labels, spans=encoded.spans, texts=encoded.texts)


def fact_mask(record: Record, encoded: EncodedSample) -> NDArray[np.bool_]:
    """bool [T] aligned with `labels`: True where the label lies in a fact word of an assistant turn.

    Facts are the strings in `record.extra["facts"]`; every occurrence in assistant text counts. A position without a
    label is never marked.
    """
    mask = np.zeros(len(encoded.tokens), dtype=np.bool_)
    facts = record.extra.get("facts")
    words = [word for word in facts if isinstance(word, str) and word] if isinstance(facts, (list, tuple)) else []
    for span in encoded.texts:
        if span.role != "assistant":
            continue
        text = encoded.tokens[span.start : span.start + span.count].astype(np.uint8).tobytes()
        for word in {bytes(_TOKENIZER.encode(word)) for word in words}:
            at = text.find(word)
            while at >= 0:
                # The label of the token at k stands at k - 1.
                first = span.start + at - 1
                mask[first : first + len(word)] = True
                at = text.find(word, at + len(word))
    mask &= encoded.labels != IGNORED_LABEL
    return mask


def _check_arguments(record: Record, item_tokens: Sequence[int], train_on: str) -> None:
    if train_on not in TRAIN_ON:
        raise DataError(f"train_on={train_on!r}", place="encode_record", remedy=f"Choose one of {', '.join(TRAIN_ON)}.")
    check_media(record, item_tokens)


def _answers(record: Record, train_on: str) -> list[bool]:
    """For each turn: whether it is an answer that is trained."""
    answers = [turn.role == "assistant" for turn in record.turns]
    if train_on == "last" and any(answers):
        last = len(answers) - 1 - answers[::-1].index(True)
        return [i == last for i in range(len(answers))]
    return answers


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _write_turn(
    writer: _Writer,
    record: Record,
    turn_index: int,
    item_tokens: Sequence[int],
    *,
    trained: bool,
    spans: list[MediaSpan],
    texts: list[TextSpan],
) -> None:
    """Write header and content of one turn (not its end)."""
    turn: Turn = record.turns[turn_index]
    writer.special(Special.IM_START)
    writer.text(f"{turn.role}\n")
    for part in turn.parts:
        if isinstance(part, TextPart):
            start = writer.text(part.text, trained=trained)
            texts.append(TextSpan(start, writer.length - start, turn_index, turn.role))
            continue
        count = int(item_tokens[part.index])
        writer.special(Special.VISION_START)
        start = writer.special(_PLACEHOLDER[record.media[part.index].kind], count)
        writer.special(Special.VISION_END)
        spans.append(MediaSpan(start, count, part.index))


def check_media(record: Record, item_tokens: Sequence[int]) -> None:
    """Raise RecordError unless the turns use every medium once, in order, and each has one positive count."""
    used = [part.index for turn in record.turns for part in turn.parts if isinstance(part, MediaPart)]
    if used != list(range(len(record.media))):
        raise RecordError(
            Reason.PLACEHOLDER_MISMATCH,
            f"the turns refer to media {used}, but the sample has {len(record.media)} to be used once each, in order",
            place=record.place,
            remedy="Write one placeholder for each medium.",
        )
    if len(item_tokens) != len(record.media) or any(count < 1 for count in item_tokens):
        raise RecordError(
            Reason.PLACEHOLDER_MISMATCH,
            f"{len(record.media)} media, but visual token counts {[int(count) for count in item_tokens]}",
            place=record.place,
            remedy="Rebuild the cost index: each medium needs one positive count.",
        )
