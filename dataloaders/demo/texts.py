"""Questions and answers of the demo corpus, and the JSON they are stored in.

One byte is one token, so questions and answers about media are short (at most about 60 bytes). `facts` lists those
substrings of the answer that can be known only from the pixels; each occurs in the answer exactly as often as it is
listed. The number of pictures is stated but is no fact: the placeholders give it away.

Text-only samples give the corpus a tail in text: up to about 600 bytes, without any media.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numpy.random import Generator

from dataloaders.demo.facts import Measure

_WORD_LIST = (
    "amber birch cedar delta ember fjord grove harbor island jasper kettle lemon meadow nectar olive "
    "pebble quartz river saddle timber umber valley willow yonder zephyr"
)
_WORDS = _WORD_LIST.split()
_SHORTEST, _LONGEST = 22.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One question with its answer; `facts` are the substrings of the answer that only the media tell."""

    question: str
    answer: str
    facts: tuple[str, ...] = ()


def ask_picture(question: int, facts: Measure) -> Dialogue:
    """About a single picture: brightness and colour, or one of them. `question` in 0..11."""
    if question < 5:
        answer = f"{facts.brightness} and {facts.colour}."
        return Dialogue(question="Brightness and colour?", answer=answer, facts=(facts.brightness, facts.colour))
    if question < 9:
        return Dialogue(question="Which colour dominates?", answer=f"Mostly {facts.colour}.", facts=(facts.colour,))
    return Dialogue(
        question="Is it dark, medium or bright?", answer=f"It is {facts.brightness}.", facts=(facts.brightness,)
    )


def ask_pictures(question: int, facts: Sequence[Measure]) -> Dialogue:
    """About 2 to 6 pictures: the colour of each, or their number and the colour of the last."""
    colours = tuple(item.colour for item in facts)
    if question < 8:
        answer = ", ".join(f"{i} {colour}" for i, colour in enumerate(colours, 1)) + "."
        return Dialogue(question="Which colour has each?", answer=answer, facts=colours)
    answer = f"{len(colours)}, the last is {colours[-1]}."
    return Dialogue(question="How many, and how is the last?", answer=answer, facts=(colours[-1],))


def ask_clip(question: int, facts: Measure, motion: str) -> Dialogue:
    """About a clip: where the camera goes, colour, brightness."""
    if question < 4:
        answer = f"Mostly {facts.colour}, it goes {motion}."
        return Dialogue(
            question="Which colour, and where does the camera go?", answer=answer, facts=(facts.colour, motion)
        )
    if question < 7:
        return Dialogue(question="Which colour has the clip?", answer=f"Mostly {facts.colour}.", facts=(facts.colour,))
    if question < 9:
        answer = f"{facts.brightness} and {facts.colour}."
        return Dialogue(question="Brightness and colour?", answer=answer, facts=(facts.brightness, facts.colour))
    return Dialogue(question="Where does the camera go?", answer=f"It goes {motion}.", facts=(motion,))


def text_only(question: int, length: float, rng: Generator) -> Dialogue:
    """A small task without media; `length` in [0, 1) sets its size in bytes, most of them short, a few long."""
    size = int(_SHORTEST * (_LONGEST / _SHORTEST) ** (length**1.6))
    if size < 40:
        first, second = (1 + int(rng.random() * 9) for _ in range(2))
        return Dialogue(question=f"What is {first} plus {second}?", answer=f"{first + second}.")
    if question % 2:
        start = 1 + int(rng.random() * 9)
        # About three bytes a number below 100 and four above it.
        stop = start + (size // 3 if size < 290 else 90 + (size - 290) // 4)
        numbers = " ".join(str(n) for n in range(start, stop + 1))
        return Dialogue(question=f"Count from {start} to {stop}.", answer=f"{numbers}.")
    words = [_WORDS[int(rng.random() * len(_WORDS))] for _ in range(max(2, (size - 24) // 7))]
    which, word = ("first", words[0]) if question % 4 else ("last", words[-1])
    return Dialogue(question=f"Give the {which} word: {' '.join(words)}", answer=f"{word}.")


def record_json(
    key: str,
    dialogue: Dialogue,
    media: Sequence[str],
    *,
    parts_style: bool,
    truth: Mapping[str, object],
) -> bytes:
    """The JSON member of a sample, UTF-8.

    Args:
        media: kind of each medium in order, `image` or `video`.
        parts_style: content as a list of parts; otherwise as one string with `<image>` and `<video>` placeholders.
        truth: everything measured, for tests and reports; not used in training.
    """
    pieces: list[dict[str, str]] = []
    for number, kind in enumerate(media, 1):
        # Several media are numbered, so that an answer can name them.
        pieces += [{"type": "text", "text": f"{number} "}] if len(media) > 1 else []
        pieces.append({"type": kind})
    pieces.append({"type": "text", "text": f"\n{dialogue.question}" if media else dialogue.question})
    flat = "".join(piece.get("text", f"<{piece['type']}>") for piece in pieces)
    record = {
        "id": key,
        "messages": [
            {"role": "user", "content": pieces if parts_style else flat},
            {"role": "assistant", "content": dialogue.answer},
        ],
        "facts": list(dialogue.facts),
        "truth": dict(truth),
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
