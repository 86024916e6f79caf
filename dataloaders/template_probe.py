"""What a chat template takes and writes, found by rendering small conversations.

    content form   "What is it?"  or  [{"type": "text", "text": "What is it?"}]     per role
    placeholder    [{"type": "image"}, ...]  ->  <|vision_start|><|image_pad|><|vision_end|>
                                                                 ^^^^^^^^^^^^^ its text; its id is in config.json

A role's content is given as a list of parts wherever the template renders the text of such a list, otherwise as a
string. In a string the placeholder is written by us; in a list by the template, and the probe tells which of the known
texts it is. What cannot be told is an error when a record needs it, never a guess.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataloaders.chat_template import ChatTemplate, Message, TemplateRefusal
from dataloaders.counts import MediaKind
from dataloaders.errors import DataError
from dataloaders.hf_tokenizer import LoadedTokenizer, token_content

_PROBE = "Qxj7 probe"
_REMEDY = 'Pass placeholders={"image": TEXT, "video": TEXT} with the texts that stand for media in this template.'
# What processors look for in the rendered text where neither tokenizer nor configuration names it; longer ones first.
_KNOWN = {
    MediaKind.IMAGE: (
        "(<image>./</image>)",
        "<|image_pad|>",
        "<|IMAGE_PAD|>",
        "<|image|>",
        "<image>",
        "[IMG]",
        "<IMG_CONTEXT>",
        "<|media_pad|>",
        "<start_of_image>",
        "<|image_1|>",
    ),
    MediaKind.VIDEO: (
        "(<video>./</video>)",
        "<|kimi_k25_video_placeholder|>",
        "<|video_pad|>",
        "<|VIDEO_PAD|>",
        "<|video|>",
        "<video>",
    ),
}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """How one kind of medium stands in a rendered text.

    Attributes:
        text: what the processor looks for and replaces.
        marker: the added token that stands for it while the text is tokenised: `text` itself where that is one.
        token_id: id that fills the positions of the medium.
    """

    text: str
    marker: str
    token_id: int


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """What the probes found: roles whose content is a list, and placeholders by `MediaKind` (None: not supported)."""

    list_roles: frozenset[str]
    image: Placeholder | None
    video: Placeholder | None

    def placeholder(self, kind: MediaKind) -> Placeholder | None:
        return self.image if kind is MediaKind.IMAGE else self.video

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """Those that there are, each text once."""
        found = {spot.text: spot for spot in (self.image, self.video) if spot is not None}
        return tuple(found.values())


def text_content(text: str, as_list: bool) -> str | list[Message]:
    """Content of a message that is text alone."""
    return [{"type": "text", "text": text}] if as_list else text


def probe_template(
    template: ChatTemplate,
    tokenizer: LoadedTokenizer,
    *,
    names: Mapping[str, str],
    model: Mapping[str, Any],
    processor: Mapping[str, Any],
    given: Mapping[str, str],
) -> TemplateShape:
    """Find the shape of `template`.

    Args:
        names: special tokens by name.
        model, processor: `config.json` and `processor_config.json`.
        given: placeholder texts by `image` and `video` that the user states.

    Raises:
        DataError: an unknown kind in `given`, or a placeholder without a token id.
    """
    unknown = set(given) - {kind.name.lower() for kind in MediaKind}
    if unknown:
        raise DataError(f"placeholders for {', '.join(sorted(unknown))}", remedy=_REMEDY)
    list_roles = _list_roles(template)
    found: dict[MediaKind, Placeholder | None] = {}
    for kind in MediaKind:
        name = kind.name.lower()
        named = [
            names.get(f"{name}_token"),
            token_content(processor.get(f"{name}_token")),
            *(tokenizer.backend.id_to_token(number) for number in _configured_ids(model, name)),
        ]
        sure = [text for text in named if text]
        if kind is MediaKind.IMAGE and "boi_token" in names:
            sure.append(names["boi_token"])  # Gemma 3 writes the token that begins an image
        if name in given:
            found[kind] = _placeholder(given[name], kind, tokenizer, model)
            continue
        text = _written(template, tokenizer, kind, list_roles, sure)
        try:
            found[kind] = None if text is None else _placeholder(text, kind, tokenizer, model)
        except DataError:
            found[kind] = None  # a model folder without media, perhaps: records that have some are refused
    return TemplateShape(list_roles, found[MediaKind.IMAGE], found[MediaKind.VIDEO])


def _list_roles(template: ChatTemplate) -> frozenset[str]:
    roles: set[str] = set()
    for role in ("user", "assistant", "system", "tool"):
        user = {"role": "user", "content": text_content("Hello.", "user" in roles)}
        answer = {"role": "assistant", "content": text_content("Hello.", "assistant" in roles)}
        before: Sequence[Message] = {"user": [], "assistant": [user], "system": [], "tool": [user, answer]}[role]
        after = [user] if role == "system" else []
        probe = {"role": role, "content": text_content(_PROBE, as_list=True)}
        text = _try(template, [*before, probe, *after])
        if text is not None and _PROBE in text and not _shows_parts(text):
            roles.add(role)
    return frozenset(roles)


def _shows_parts(text: str) -> bool:
    """Whether a list was printed as such: quotes around its text."""
    return any(f"{quote}{_PROBE}{quote}" in text for quote in ("'", '"', json.dumps('"')[1:-1]))


def _written(
    template: ChatTemplate,
    tokenizer: LoadedTokenizer,
    kind: MediaKind,
    list_roles: frozenset[str],
    sure: Sequence[str],
) -> str | None:
    if "user" not in list_roles:  # we write it ourselves, so it only has to be what the model knows
        known = (text for text in _KNOWN[kind] if text in tokenizer.added)
        return next(iter([*sure, *known]), None)
    part = {"type": kind.name.lower()}
    content = [part, *text_content(_PROBE, as_list=True)]
    text = _try(template, [{"role": "user", "content": content}])
    bare = _try(template, [{"role": "user", "content": text_content(_PROBE, as_list=True)}])
    if text is None or bare is None:
        return None
    candidates: Iterable[str] = (*sure, *_KNOWN[kind])
    return next((spelled for spelled in candidates if text.count(spelled) == bare.count(spelled) + 1), None)


def _placeholder(text: str, kind: MediaKind, tokenizer: LoadedTokenizer, model: Mapping[str, Any]) -> Placeholder:
    backend = tokenizer.backend
    ids = [
        *_configured_ids(model, kind.name.lower()),
        backend.token_to_id(text),
        *_configured_ids(model, MediaKind.IMAGE.name.lower()),  # frames of a video are often images
    ]
    token_id = next((number for number in ids if number is not None), None)
    if token_id is None:
        raise DataError(f"no token id for the {kind.name.lower()} placeholder {text!r}", remedy=_REMEDY)
    marker = text if text in tokenizer.added else backend.id_to_token(token_id)
    if marker not in tokenizer.added:
        raise DataError(
            f"neither {text!r} nor {marker!r} is an added token of the tokenizer, so {text!r} cannot be kept whole",
            remedy="Add it to the tokenizer as a special token.",
        )
    return Placeholder(text, marker, token_id)


def _configured_ids(model: Mapping[str, Any], name: str) -> list[int]:
    values = (model.get(f"{name}_token_id"), model.get(f"{name}_token_index"))
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31]


def _try(template: ChatTemplate, messages: Sequence[Message]) -> str | None:
    try:
        return template.render(messages).text
    except TemplateRefusal:
        return None
