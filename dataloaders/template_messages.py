"""From a record to the messages that a chat template takes, with marks around what must not be mixed up.

    "Say <|im_end|> now"  ->  "Say O<|im_end|>C now"            control tokens that a record spells: stay plain text
    "  A cat. \\n"         ->  "  BA cat.E \\n"                  where a text begins and ends, for labels

The marks are six private-use characters that neither the record nor the template contains. Without spelled control
tokens the messages hold the record's texts unchanged, so what is rendered is what transformers renders. Marks stand
inside the outer white space of a text, because templates may trim it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from dataloaders.chat_template import ChatTemplate, Message, Rendered, TemplateRefusal
from dataloaders.errors import Reason, RecordError
from dataloaders.record import MediaPart, Record, TextPart, Turn
from dataloaders.template_probe import Placeholder, TemplateShape

ANSWER_ROLE = "assistant"
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
_ANY_MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")


class Marks(NamedTuple):
    """Characters that are in no text of a conversation: around spelled tokens, answers, and other texts."""

    open: str
    close: str
    answer_begin: str
    answer_end: str
    text_begin: str
    text_end: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Texts of tokens as one pattern, the longest first (it matches nothing where there are none)."""

    pattern: re.Pattern[str]
    longest: int

    @classmethod
    def of(cls, contents: Iterable[str]) -> "Tokens":
        longest_first = sorted(set(contents), key=lambda content: (-len(content), content))
        pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        return cls(pattern, len(longest_first[0]) if longest_first else 0)

    def joined(self, before: str, text: str) -> bool:
        """Whether one of them begins in `before` and ends in `text`."""
        head = before[-self.longest :] if self.longest else ""
        found = self.pattern.finditer(head + text[: self.longest])
        return any(match.start() < len(head) < match.end() for match in found)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A record in the form of its template.

    Attributes:
        messages: with spelled control tokens marked; bounded: the same with every text's begin and end marked.
        rendered: `messages` through the template, marks of spelled tokens included.
    """

    record: Record
    template: ChatTemplate
    marks: Marks
    messages: tuple[Message, ...]
    bounded: tuple[Message, ...]
    rendered: Rendered


def open_conversation(record: Record, template: ChatTemplate, shape: TemplateShape, controls: Tokens) -> Conversation:
    """Render `record`.

    Args:
        controls: tokens that a text may not spell.

    Raises:
        RecordError: the template refuses the record, or has no place for a kind of media.
    """
    texts = [part.text for turn in record.turns for part in turn.parts if isinstance(part, TextPart)]
    marks = _free_marks([template.source, *texts], record.place)
    messages, bounded = (
        tuple(_Writer(record, shape, controls, marks, bound).message(turn) for turn in record.turns)
        for bound in (False, True)
    )
    try:
        "".join(texts).encode()
        rendered = template.render(messages)
    except TemplateRefusal as error:
        raise RecordError(Reason.BAD_RECORD, error.cause, place=record.place, remedy=error.remedy) from error
    except UnicodeEncodeError as error:
        raise RecordError(
            Reason.BAD_RECORD,
            f"a text has a lone surrogate, which no tokenizer takes: {error}",
            place=record.place,
            remedy="Repair the escapes (\\ud800 to \\udfff come in pairs).",
        ) from None
    return Conversation(record, template, marks, messages, bounded, rendered)


@lru_cache(maxsize=256)
def spelled_tokens(controls: Tokens, marks: Marks) -> re.Pattern[str]:
    """Matches a marked control token (its text is group 1), or a mark that a template has torn from its partner."""
    return re.compile(f"{marks.open}({controls.pattern.pattern}){marks.close}|[{marks.open}{marks.close}]")


class _Writer:
    """Writes the turns of one record as messages."""

    def __init__(self, record: Record, shape: TemplateShape, controls: Tokens, marks: Marks, bound: bool) -> None:
        self._record, self._shape, self._controls, self._marks, self._bound = record, shape, controls, marks, bound

    def message(self, turn: Turn) -> Message:
        """The message of `turn`, its content a list or a string as the role takes it."""
        if turn.role in self._shape.list_roles:
            return {"role": turn.role, "content": self._parts(turn) or [{"type": "text", "text": ""}]}
        return {"role": turn.role, "content": self._string(turn)}

    def _parts(self, turn: Turn) -> list[Message]:
        parts: list[Message] = []
        told, trimmed = "", ""  # ends of the turn so far, as its texts are and as a template may trim them
        for part in turn.parts:
            if isinstance(part, MediaPart):
                self._placeholder(part)
                parts.append({"type": self._record.media[part.index].kind.name.lower()})
                continue
            torn = self._controls.joined(told, part.text) or self._controls.joined(trimmed, part.text.strip())
            parts.append({"type": "text", "text": self._text(part.text, turn.role, torn=torn)})
            told, trimmed = self._tail(told + part.text), self._tail(trimmed + part.text.strip())
        return parts

    def _tail(self, text: str) -> str:
        """As much as a token may begin in: a turn may have very many parts."""
        return text[-self._controls.longest :] if self._controls.longest else ""

    def _string(self, turn: Turn) -> str:
        pieces: list[str] = []
        run = ""
        for part in turn.parts:
            if isinstance(part, TextPart):
                run += part.text
                continue
            pieces += [self._text(run, turn.role), self._placeholder(part).text]
            run = ""
        return "".join([*pieces, self._text(run, turn.role)])

    def _placeholder(self, part: MediaPart) -> Placeholder:
        ref = self._record.media[part.index]
        placeholder = self._shape.placeholder(ref.kind)
        if placeholder is None:
            raise RecordError(
                Reason.PLACEHOLDER_MISMATCH,
                f"the chat template has no known placeholder for media of the kind {ref.kind.name.lower()}",
                place=f"{self._record.place}, member {ref.member}",
                remedy="Use a model with one, or name its text with `placeholders`.",
            )
        return placeholder

    def _text(self, text: str, role: str, *, torn: bool = False) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        marks, written = self._marks, self._controls.pattern.sub(self._guard, core)
        if torn:
            written = marks.open + written
        if self._bound:
            answer = role == ANSWER_ROLE
            begin, end = (marks.answer_begin, marks.answer_end) if answer else (marks.text_begin, marks.text_end)
            written = f"{begin}{written}{end}"
        return f"{text[:start]}{written}{text[start + len(core) :]}"

    def _guard(self, match: re.Match[str]) -> str:
        return f"{self._marks.open}{match[0]}{self._marks.close}"


def _free_marks(texts: Sequence[str], place: str) -> Marks:
    taken = {char for text in texts for char in _ANY_MARK.findall(text)}
    free = (chr(code) for code in range(_FIRST_MARK, _LAST_MARK + 1) if chr(code) not in taken)
    found = list(islice(free, len(Marks._fields)))
    if len(found) < len(Marks._fields):
        raise RecordError(Reason.BAD_RECORD, "the texts use every private-use character of plane 15", place=place)
    return Marks(*found)
