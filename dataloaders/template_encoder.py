"""The encoder of a model folder: its chat template, its tokenizer, its placeholders, and labels on the answers.

    Record --messages--> template --> text, spans of answers
           "<|im_start|>user\\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\\n..."
      --tokenizer--> ids, offsets --> one marker a medium --x item_tokens[j]--> tokens [T], labels [T]

For ordinary texts the tokens are those of transformers' `apply_chat_template`, and the labels those of its assistant
mask where the template has `{% generation %}`, with two intended differences: placeholders are never learned, and the
date that a template may write stands still.

A record that spells a special token or a placeholder gets its letters, not the token, as transformers has it under
`sanitize_control_tokens`; `text_tokens` names special tokens that records may use, such as `<|box_start|>`. Added
tokens that are not special (`<think>`) are recognised in texts as usual.

Price: every position of a medium holds the placeholder's id, also where the processor writes separators or timestamps;
text that a processor puts at the edge of a medium is not merged with its neighbours.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataloaders.answer_spans import learned_spans
from dataloaders.chat import EncodedSample, MediaSpan, check_media, shifted_labels
from dataloaders.chat_template import FIXED_DATE, ChatTemplate, RenderLimits
from dataloaders.encoder import TextCounts, check_train_on
from dataloaders.errors import DataError, Reason, RecordError
from dataloaders.hf_tokenizer import LoadedTokenizer, TokenizerFile, read_object, read_tokenizer
from dataloaders.record import Record
from dataloaders.template_files import find_template
from dataloaders.template_messages import Conversation, Marks, Tokens, open_conversation, spelled_tokens
from dataloaders.template_probe import TemplateShape, probe_template

_RULES = "template-1"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True, kw_only=True)
class TemplateEncoder:
    """Tokens and labels as the model's own files make them; plain data that travels to workers.

    Attributes:
        train_on: `assistant`: answers and their end tokens; `last`: the last of them; `all`: the texts of other turns
            too, without outer white space.
        surround: whether the tokenizer's post-processor may put its tokens around a text that does not start with
            `bos_token`: processors let it, `apply_chat_template` of a tokenizer does not.
        text_tokens: special tokens that texts of records may spell.
    """

    tokenizer: TokenizerFile
    template: ChatTemplate
    shape: TemplateShape
    train_on: str = "assistant"
    surround: bool = False
    text_tokens: tuple[str, ...] = ()

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        train_on: str = "assistant",
        template_name: str = "default",
        variables: Mapping[str, Any] | None = None,
        placeholders: Mapping[str, str] | None = None,
        text_tokens: Sequence[str] = (),
        today: str = FIXED_DATE,
        limits: RenderLimits | None = None,
    ) -> "TemplateEncoder":
        """The encoder of the model in `folder`.

        Args:
            template_name: which of several named templates.
            variables: options of the template, such as `enable_thinking`.
            placeholders: texts that stand for an `image` and a `video`, where the files do not tell.
            today: the date that the template sees.

        Raises:
            DataError: a missing or damaged file, a template that does not compile, options that do not fit.
        """
        root = Path(folder)
        check_train_on(train_on, "TemplateEncoder")
        tokenizer = read_tokenizer(root)
        source, place = find_template(root, template_name)
        template = ChatTemplate(
            source=source,
            variables={**tokenizer.names, **(variables or {})},
            today=today,
            limits=limits or RenderLimits(),
            place=place,
        )
        shape = probe_template(
            template,
            tokenizer.load(),
            names=tokenizer.names,
            model=read_object(root / "config.json"),
            processor=read_object(root / "processor_config.json"),
            given=placeholders or {},
        )
        return cls(
            tokenizer=tokenizer,
            template=template,
            shape=shape,
            train_on=train_on,
            surround=any((root / name).is_file() for name in _PROCESSOR_FILES),
            text_tokens=tuple(text_tokens),
        )

    def __post_init__(self) -> None:
        if clash := self._reserved & set(self.text_tokens):
            raise DataError(
                f"text_tokens has {', '.join(sorted(clash))}, a placeholder", remedy="Write media as parts of a record."
            )

    @property
    def exact(self) -> bool:
        return True

    @property
    def rule(self) -> str:
        """The files that it is made of, for people."""
        tokenizer = Path(self.tokenizer.path).absolute()
        template = Path(self.template.place.partition(",")[0]).name or "a chat template"
        both = tokenizer.name if template == tokenizer.name else f"{tokenizer.name} and {template}"
        return f"{both} of {tokenizer.parent.name}"

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything but `train_on`, which is an option of the index of its own."""
        made_of = [
            _RULES,
            self.tokenizer.identity,
            [self.template.source, sorted(self.template.variables.items()), self.template.today],
            [sorted(self.shape.list_roles), *([s.text, s.marker, s.token_id] for s in self.shape.placeholders)],
            [self.surround, sorted(self.text_tokens)],
        ]
        return hashlib.sha256(json.dumps(made_of, default=str).encode()).hexdigest()

    def encode(self, record: Record, item_tokens: Sequence[int]) -> EncodedSample:
        check_media(record, item_tokens)
        tokenizer = self.tokenizer.load()
        chat = open_conversation(record, self.template, self.shape, self._controls)
        spans = learned_spans(chat, self.train_on, self._endings)
        text, learned = self._with_markers(chat, _char_mask(len(chat.rendered.text), spans))
        try:
            ids, offsets = _tokenise(tokenizer, text, chat, self._controls)
        except RecordError:
            raise
        except DataError as error:
            raise RecordError(Reason.BAD_RECORD, error.cause, place=record.place, remedy=error.remedy) from error
        trained = _token_mask(learned, offsets)
        if self.surround and not text.startswith(self.tokenizer.names.get("bos_token", "\0")):
            before, behind = tokenizer.surrounding
            ids = np.concatenate([np.array(before, np.int32), ids, np.array(behind, np.int32)])
            trained = np.pad(trained, (len(before), len(behind)))
        return self._expanded(record, item_tokens, ids, trained, tokenizer)

    def count(self, record: Record, item_tokens: Sequence[int]) -> TextCounts:
        encoded = self.encode(record, item_tokens)
        return TextCounts(len(encoded.tokens), encoded.num_label_tokens)

    @property
    def _reserved(self) -> set[str]:
        return {text for spot in self.shape.placeholders for text in (spot.text, spot.marker)}

    @cached_property
    def _controls(self) -> Tokens:
        """What texts may not spell."""
        return Tokens.of((set(self.tokenizer.load().special_contents()) | self._reserved) - set(self.text_tokens))

    @cached_property
    def _endings(self) -> Tokens:
        """What may end an answer."""
        return Tokens.of(set(self.tokenizer.load().special_contents()) - self._reserved)

    def _with_markers(self, chat: Conversation, learned: NDArray[np.bool_]) -> tuple[str, NDArray[np.bool_]]:
        """Text and mask with every placeholder as its marker; checks that the template wrote one for each medium."""
        record, text = chat.record, chat.rendered.text
        spots = {spot.text: spot for spot in self.shape.placeholders}
        spelled = spelled_tokens(self._controls, chat.marks).pattern
        pattern = re.compile(f"{spelled}|({Tokens.of(spots).pattern.pattern})")
        found = [match for match in pattern.finditer(text) if match[2] is not None]
        written = [match[2] for match in found]
        wanted = [spot.text for ref in record.media if (spot := self.shape.placeholder(ref.kind)) is not None]
        if written != wanted:
            raise RecordError(
                Reason.PLACEHOLDER_MISMATCH,
                f"the chat template writes {_shortly(written)} for media that need {_shortly(wanted)}",
                place=record.place,
                remedy="Order the media as the template does, or name their texts with `placeholders`.",
            )
        if all(spot.text == spot.marker for spot in spots.values()):
            return text, learned
        texts, masks, at = [], [], 0
        for match in found:
            marker = spots[match[2]].marker
            texts += [text[at : match.start()], marker]
            masks += [learned[at : match.start()], np.zeros(len(marker), dtype=np.bool_)]
            at = match.end()
        return "".join([*texts, text[at:]]), np.concatenate([*masks, learned[at:]])

    def _expanded(
        self,
        record: Record,
        item_tokens: Sequence[int],
        ids: NDArray[np.int32],
        trained: NDArray[np.bool_],
        tokenizer: LoadedTokenizer,
    ) -> EncodedSample:
        """Markers become runs of the placeholder's id, which are not learned."""
        markers = [tokenizer.backend.token_to_id(spot.marker) for spot in self.shape.placeholders]
        places = np.flatnonzero(np.isin(ids, [number for number in markers if number is not None]))
        if len(places) != len(record.media):
            raise RecordError(
                Reason.PLACEHOLDER_MISMATCH,
                f"{len(places)} placeholder tokens for {len(record.media)} media",
                place=record.place,
                remedy="Remove what the tokenizer normalises to a placeholder from the texts.",
            )
        counts = np.ones(len(ids), dtype=np.int64)
        counts[places] = item_tokens
        ids, trained = ids.copy(), trained.copy()
        trained[places] = False
        for place, ref in zip(places, record.media, strict=True):
            spot = self.shape.placeholder(ref.kind)
            ids[place] = spot.token_id if spot is not None else ids[place]
        starts = np.cumsum(counts) - counts
        tokens, learned = np.repeat(ids, counts), np.repeat(trained, counts)
        spans = (MediaSpan(int(starts[p]), int(counts[p]), j) for j, p in enumerate(places))
        return EncodedSample(tokens=tokens, labels=shifted_labels(tokens, learned), spans=tuple(spans), texts=())


def _char_mask(length: int, spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    mask = np.zeros(length, dtype=np.bool_)
    for start, end in spans:
        mask[start:end] = True
    return mask


def _token_mask(learned: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [T]: tokens that overlap a learned character; one of no width counts inside a learned run."""
    sums = np.concatenate([[0], np.cumsum(learned)])
    starts, ends = offsets[:, 0], offsets[:, 1]
    inside = np.concatenate([[False], learned[:-1] & learned[1:], [False]]) if len(learned) else np.zeros(1, np.bool_)
    return np.where(starts == ends, inside[starts], sums[ends] > sums[starts])


def _tokenise(
    tokenizer: LoadedTokenizer, text: str, chat: Conversation, controls: Tokens
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Ids [n] and (start, end) characters [n, 2]; marked tokens as plain text."""
    marks: Marks = chat.marks
    if marks.open not in text and marks.close not in text:
        encoding = tokenizer.encode(text)
        return np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    at = 0
    for match in spelled_tokens(controls, marks).finditer(text):
        _add_text(tokenizer, text[at : match.start()], at, ids, offsets)
        if match[1] is not None:
            run = _behind_newline(tokenizer, match[1])
            if tokenizer.backend.token_to_id(match[1]) in run:
                raise RecordError(
                    Reason.BAD_RECORD,
                    f"a text spells {match[1]!r}, which this tokenizer can only read as a control token",
                    place=chat.record.place,
                    remedy="Change the text, or allow the token with `text_tokens`.",
                )
            ids += run
            offsets += [match.span(1)] * len(run)
        at = match.end()
    _add_text(tokenizer, text[at:], at, ids, offsets)
    return np.array(ids, dtype=np.int32), np.array(offsets, dtype=np.int64).reshape(-1, 2)


def _add_text(tokenizer: LoadedTokenizer, text: str, at: int, ids: list[int], offsets: list[tuple[int, int]]) -> None:
    """Encode a piece that stands at `at`: behind a line break unless it is the first, so that no space is put first."""
    lead = "\n" if at else ""
    newline = tokenizer.encode(lead).ids
    encoding = tokenizer.encode(lead + text)
    if encoding.ids[: len(newline)] != newline:
        lead, newline, encoding = "", [], tokenizer.encode(text)
    skip = len(newline)
    ids += encoding.ids[skip:]
    offsets += [(at + start - len(lead), at + end - len(lead)) for start, end in encoding.offsets[skip:]]


def _behind_newline(tokenizer: LoadedTokenizer, text: str) -> list[int]:
    newline = tokenizer.encode("\n").ids
    ids = tokenizer.encode_plainly("\n" + text)
    return ids[len(newline) :] if ids[: len(newline)] == newline else tokenizer.encode_plainly(text)


def _shortly(texts: Sequence[str], most: int = 8) -> str:
    return " ".join(texts[:most]) + (" ..." if len(texts) > most else "") or "nothing"
