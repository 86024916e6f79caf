"""Which characters of a rendered conversation are learned.

    <|im_start|>user\\n Hi <|im_end|>\\n <|im_start|>assistant\\n A cat. <|im_end|> \\n
                                                               [---- answer ----)

Where the template marks answers (`{% generation %}`) its marks are used, as transformers uses them. Elsewhere
- an answer starts where its prompt ends. The prompt is the turns before it, rendered with `add_generation_prompt`. It
  must be a prefix of the conversation, or part from it behind those turns (templates that open a `<think>` in the
  prompt): then the answer starts where they part, at its text at the latest. Without that switch it starts at its text;
- it ends with its text and the first special token directly behind it, white space between them included.
The end of the text is found by rendering once more with marks around every text, which must change nothing else.

Price: a template that writes earlier turns differently once there are later ones (Qwen3 drops their reasoning), or that
rewrites an answer, is refused for the answers in question instead of giving a wrong mask.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

from dataloaders.chat_template import TemplateRefusal
from dataloaders.errors import Reason, RecordError
from dataloaders.record import TextPart
from dataloaders.template_messages import ANSWER_ROLE, Conversation, Tokens

Span: TypeAlias = tuple[int, int]
_REMEDY = 'Use the variant of the template with {% generation %}, or train_on="last".'


def learned_spans(chat: Conversation, train_on: str, endings: Tokens) -> list[Span]:
    """(start, end) characters of `chat.rendered.text` that are learned under `train_on`, ascending.

    Args:
        endings: special tokens that may end an answer.

    Raises:
        RecordError: the answers cannot be told from the template's own text.
    """
    answers = [i for i, turn in enumerate(chat.record.turns) if turn.role == ANSWER_ROLE]
    wanted = answers[-1:] if train_on == "last" else answers
    marked = chat.template.marks_answers
    bounds = _find_bounds(chat) if train_on == "all" or (wanted and not marked) else _Bounds([], [])
    if not marked:
        spans = _derived(chat, answers, wanted, bounds, endings)
    elif train_on == "last":
        spans = _last_marked(chat, answers)
    else:
        spans = list(chat.rendered.answers)
    return sorted([*spans, *(bounds.texts if train_on == "all" else [])])


@dataclass(frozen=True, slots=True)
class _Bounds:
    """(start, end) of the texts in answers and elsewhere, without outer white space, in order."""

    answers: list[Span]
    texts: list[Span]


def _find_bounds(chat: Conversation) -> _Bounds:
    marks = chat.marks
    text = _render(chat, chat.bounded)
    bounds = _Bounds([], [])
    pattern = f"[{marks.answer_begin}{marks.answer_end}{marks.text_begin}{marks.text_end}]"
    begins, plain = {marks.answer_begin: marks.answer_end, marks.text_begin: marks.text_end}, 0
    awaited, start = "", 0
    for number, match in enumerate(re.finditer(pattern, text)):
        plain = match.start() - number  # each mark before it is one character that the real text lacks
        if not awaited and match[0] in begins:
            awaited, start = begins[match[0]], plain
        elif match[0] == awaited:
            (bounds.answers if awaited == marks.answer_end else bounds.texts).append((start, plain))
            awaited = ""
        else:
            raise _error(chat, "the chat template takes texts apart")
    if awaited or re.sub(pattern, "", text) != chat.rendered.text:
        raise _error(chat, "the chat template rewrites texts, so their ends cannot be told")
    return bounds


def _derived(chat: Conversation, answers: list[int], wanted: list[int], bounds: _Bounds, endings: Tokens) -> list[Span]:
    pieces = [_num_texts(chat, i) for i in answers]
    if wanted and sum(pieces) != len(bounds.answers):
        raise _error(chat, f"{sum(pieces)} texts of answers, but the chat template writes {len(bounds.answers)}")
    if len(wanted) * len(chat.rendered.text) > chat.template.limits.max_chars:
        raise _error(chat, f"{len(wanted)} answers in {len(chat.rendered.text)} characters need too much rendering")
    spans: list[Span] = []
    done = 0  # texts of the answers so far
    for i, count in zip(answers, pieces, strict=True):
        own = bounds.answers[done : done + count]
        done += count
        if i in wanted:
            spans += _one_answer(chat, i, own, endings)
    return spans


def _one_answer(chat: Conversation, i: int, texts: list[Span], endings: Tokens) -> list[Span]:
    """The span of turn `i`, whose texts stand at `texts`; none for an empty answer of unknown place."""
    turn, whole = chat.record.turns[i], chat.rendered.text
    if turn.parts and not isinstance(turn.parts[-1], TextPart):
        raise _error(chat, f"turn {i} is an answer that ends with a medium, so its end cannot be told")
    latest = texts[0][0] if texts else None
    start = _prompt_length(chat, i, latest) if i > 0 and chat.template.opens_answers else latest
    if start is None:
        return []
    end = texts[-1][1] if texts else start
    ending = re.compile(rf"\s*(?:{endings.pattern.pattern})").match(whole, end)
    return [(start, ending.end() if ending else end)]


def _last_marked(chat: Conversation, answers: list[int]) -> list[Span]:
    """Marked spans of the last answer: the last of as many spans as there are answers, else those behind its prompt."""
    spans = list(chat.rendered.answers)
    if len(spans) == len(answers) or not spans:
        return spans[-1:]
    start = _prompt_length(chat, answers[-1], None) if answers[-1] > 0 else 0
    return [(begin, end) for begin, end in spans if end > start]


def _prompt_length(chat: Conversation, i: int, latest: int | None) -> int:
    """Characters before the answer of turn `i`, whose text starts at `latest` (None: no text, or of unknown place)."""
    whole = chat.rendered.text
    prompt = _render(chat, chat.messages[:i], add_generation_prompt=True)
    if whole.startswith(prompt):
        start = len(prompt)
    else:
        before = _render(chat, chat.messages[:i])
        if latest is None or not whole.startswith(before) or not prompt.startswith(before):
            raise _error(
                chat, f"the chat template writes the turns before turn {i} otherwise when there are later ones"
            )
        start = min(_num_common(prompt, whole), latest)
    if latest is not None and start > latest:
        raise _error(chat, f"the prompt of turn {i} holds text of its answer")
    return start


def _num_common(first: str, second: str) -> int:
    """Characters that both begin with."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _num_texts(chat: Conversation, i: int) -> int:
    """Texts of turn `i` that have begin and end marks: counted in the messages, which join parts where need be."""
    content, begin = chat.bounded[i]["content"], chat.marks.answer_begin
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(part.count(begin) for part in parts)


def _render(chat: Conversation, messages: tuple[dict[str, object], ...], *, add_generation_prompt: bool = False) -> str:
    try:
        return chat.template.render(messages, add_generation_prompt=add_generation_prompt).text
    except TemplateRefusal as error:
        raise _error(chat, error.cause) from error


def _error(chat: Conversation, cause: str) -> RecordError:
    return RecordError(Reason.BAD_RECORD, cause, place=chat.record.place, remedy=_REMEDY)
