"""From the text members of a sample to a `Record`: conversation formats, placeholders, and bounds on hostile JSON.

    key.json  {"messages": [{"role": "user", "content": "<image>What is it?"}, ...]}
              {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "..."}]}, ...]}
              {"conversations": [{"from": "human", "value": "<image>\\nWhat?"}, {"from": "gpt", "value": "..."}]}
    key.txt   a caption, alone or beside a key.json without a conversation (as img2dataset writes them)

The k-th image placeholder stands for the k-th image member, and likewise for videos; numbers that differ are an error,
never a guess. In string content `<image>` and `<video>` are always placeholders; in a list of parts text is literal.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataloaders.counts import MediaKind
from dataloaders.errors import Reason, RecordError
from dataloaders.record import MediaPart, MediaRef, Record, TextPart, Turn

CONVERSATION_FIELDS = ("messages", "conversations")
_PLACEHOLDERS = {"<image>": MediaKind.IMAGE, "<video>": MediaKind.VIDEO}
_SPLIT = re.compile("(<image>|<video>)")
_MEDIA_TYPES = {
    "image": MediaKind.IMAGE,
    "image_url": MediaKind.IMAGE,
    "video": MediaKind.VIDEO,
    "video_url": MediaKind.VIDEO,
}
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}

# Where other formats name their files; ours are the members of the same key.
_MEDIA_FIELDS = ("image", "images", "video", "videos")

# A turn before its media are numbered: text or the kind of a placeholder.
_Piece = str | MediaKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLimits:
    """Bounds on one record: encoded size of its JSON or text, and nesting of its JSON."""

    max_bytes: int = 16 * 1024**2
    max_depth: int = 64


def parse_record(
    raw_json: bytes | None,
    text: bytes | str | None,
    media: Sequence[MediaRef],
    *,
    shard: str,
    key: str,
    limits: RecordLimits | None = None,
) -> Record:
    """Parse one sample; nothing in it is executed.

    Args:
        raw_json: content of `key.json`, or None.
        text: content of `key.txt`, or None.
        media: media members in their own order; `Record.media` has them in the order of the placeholders.
        shard, key: where the sample lies.

    Raises:
        RecordError: no text at all, JSON that is broken or beyond the limits, an unknown shape, or placeholders that do
            not match the media (`placeholder_mismatch`), or fields that name media of which there are none
            (`missing_media`).
    """
    parser = _Parser(shard=shard, key=key, limits=limits or RecordLimits())
    fields: Mapping[str, object] = {} if raw_json is None else parser.load(raw_json)
    if raw_json is not None and any(name in fields for name in CONVERSATION_FIELDS):
        return _record(parser, parser.conversation(fields), fields, media, shard=shard, key=key)
    if text is not None:
        return _record(parser, parser.captioned(text, media), fields, media, shard=shard, key=key)
    if raw_json is not None:
        raise parser.error(
            f"the JSON has the fields {listed_names(fields)} but no conversation",
            "Add `messages` (or `conversations`), or put a caption into a .txt member.",
        )
    raise parser.error("there is neither a .json nor a .txt member", "Add one with the same key.")


def parse_fields(
    fields: Mapping[str, object],
    text: str | None,
    media: Sequence[MediaRef],
    *,
    shard: str,
    key: str,
    limits: RecordLimits | None = None,
) -> Record:
    """As `parse_record`, of fields that are parsed already: a line, a row of a table.

    Args:
        fields: with one of `CONVERSATION_FIELDS`, unless there is `text`.
        text: the caption of a row without a conversation.
    """
    parser = _Parser(shard=shard, key=key, limits=limits or RecordLimits())
    turns = parser.conversation(fields) if text is None else parser.captioned(text, media)
    return _record(parser, turns, fields, media, shard=shard, key=key)


def load_json(raw: bytes, *, shard: str, key: str, limits: RecordLimits | None = None) -> object:
    """Any JSON value, bounded in size and depth. Raises RecordError."""
    return _Parser(shard=shard, key=key, limits=limits or RecordLimits()).load_value(raw)


def placeholders(content: str | Mapping[str, object]) -> list[MediaKind]:
    """Kinds of the placeholders in string content or in one part, in order."""
    if isinstance(content, str):
        return [_PLACEHOLDERS[piece] for piece in _SPLIT.findall(content)]
    kind = content.get("type")
    return [_MEDIA_TYPES[kind]] if isinstance(kind, str) and kind in _MEDIA_TYPES else []


def listed_names(names: Iterable[object], most: int = 10) -> str:
    """The first of these names, each bounded, for messages."""
    every = list(names)
    return ", ".join(repr(name)[:80] for name in every[:most]) + (", ..." if len(every) > most else "") or "(none)"


def _record(
    parser: "_Parser",
    turns: Sequence[tuple[str, Sequence[_Piece]]],
    fields: Mapping[str, object],
    media: Sequence[MediaRef],
    *,
    shard: str,
    key: str,
) -> Record:
    extra = {name: value for name, value in fields.items() if name not in CONVERSATION_FIELDS}
    record = Record(shard=shard, key=key, turns=(), extra=extra)
    if not media:
        parser.refuse_unread_media(turns, extra)
    return _with_media(record, turns, media)


def _with_media(record: Record, turns: Sequence[tuple[str, Sequence[_Piece]]], media: Sequence[MediaRef]) -> Record:
    """Number the placeholders of `turns` and put `media` into their order."""
    wanted = [piece for _, pieces in turns for piece in pieces if isinstance(piece, MediaKind)]
    for kind in MediaKind:
        placeholders, members = wanted.count(kind), sum(ref.kind is kind for ref in media)
        if placeholders != members:
            name = kind.name.lower()
            raise RecordError(
                Reason.PLACEHOLDER_MISMATCH,
                f"{placeholders} {name} placeholder(s) in the text, but {members} {name} member(s)"
                f" ({listed_names(ref.member for ref in media) if media else 'no media'})",
                place=record.place,
                remedy=f"Write one <{name}> for each {name} member; as list content, text is taken literally.",
            )
    queues = {kind: iter([ref for ref in media if ref.kind is kind]) for kind in MediaKind}
    ordered = tuple(next(queues[kind]) for kind in wanted)
    numbers = iter(range(len(ordered)))
    numbered = tuple(
        Turn(
            role=role,
            parts=tuple(
                TextPart(piece) if isinstance(piece, str) else MediaPart(next(numbers))
                for piece in pieces
                if piece != ""
            ),
        )
        for role, pieces in turns
    )
    return replace(record, turns=numbered, media=ordered)


class _Parser:
    """One record's parser: knows its place for messages."""

    def __init__(self, *, shard: str, key: str, limits: RecordLimits) -> None:
        self._place, self._limits = f"shard {shard}, key {key}", limits

    def error(self, cause: str, remedy: str = "") -> RecordError:
        return RecordError(Reason.BAD_RECORD, cause, place=self._place, remedy=remedy)

    def load(self, raw: bytes) -> Mapping[str, object]:
        """The top-level object of a JSON member."""
        value = self.load_value(raw)
        if not isinstance(value, dict):
            raise self.error(
                f"the JSON is a {type(value).__name__}, not an object", 'Wrap it: {"messages": [{"role": ...}, ...]}.'
            )
        return value

    def load_value(self, raw: bytes) -> object:
        """Any JSON value."""
        text = self._decode(raw, "JSON")
        try:
            value: object = json.loads(text)
        except RecursionError:
            raise self._too_deep() from None
        except ValueError as error:
            raise self.error(f"the JSON does not parse: {error}", "Repair the member.") from None
        brackets = raw.count(b"{") + raw.count(b"[")
        if brackets > self._limits.max_depth and _deeper_than(value, self._limits.max_depth):
            raise self._too_deep()
        return value

    def refuse_unread_media(self, turns: Sequence[tuple[str, Sequence[_Piece]]], extra: Mapping[str, object]) -> None:
        """Raise for a record without media and placeholders whose fields name media: it would train as text alone."""
        named = [name for name in _MEDIA_FIELDS if extra.get(name)]
        if named and not any(isinstance(piece, MediaKind) for _, pieces in turns for piece in pieces):
            raise RecordError(
                Reason.MISSING_MEDIA,
                f"the JSON names media in {listed_names(named)}, but the sample has no media member and no placeholder",
                place=self._place,
                remedy="Put the files beside the .json under its key and write one <image> or <video> for each.",
            )

    def captioned(self, text: bytes | str, media: Sequence[MediaRef]) -> list[tuple[str, Sequence[_Piece]]]:
        """The turns of a caption: all media, and the text as the answer."""
        return [("user", [ref.kind for ref in media]), ("assistant", [self.caption(text)])]

    def caption(self, text: bytes | str) -> str:
        stripped = (self._decode(text, "text") if isinstance(text, bytes) else text).strip()
        if not stripped:
            raise self.error("the caption is empty", "Fill the .txt member or remove the sample.")
        return stripped

    def conversation(self, fields: Mapping[str, object]) -> list[tuple[str, Sequence[_Piece]]]:
        """(role, pieces) of every turn."""
        name = next(name for name in CONVERSATION_FIELDS if name in fields)
        turns = fields[name]
        if not isinstance(turns, list) or not turns:
            raise self.error(f"`{name}` is {_kind_of(turns)}", "It must be a list of at least one turn.")
        role_field, content_field = ("role", "content") if name == "messages" else ("from", "value")
        parsed: list[tuple[str, Sequence[_Piece]]] = []
        for i, turn in enumerate(turns):
            where = f"{name}[{i}]"
            if not isinstance(turn, dict) or role_field not in turn or content_field not in turn:
                raise self.error(
                    f"{where} is {_kind_of(turn)}", f"A turn is an object with `{role_field}` and `{content_field}`."
                )
            role = turn[role_field]
            if not isinstance(role, str) or role not in _ROLES:
                raise self.error(f"{where}.{role_field} is {_named(role)}", f"Known roles: {', '.join(_ROLES)}.")
            parsed.append((_ROLES[role], self._pieces(turn[content_field], f"{where}.{content_field}")))
        return parsed

    def _pieces(self, content: object, where: str) -> list[_Piece]:
        if isinstance(content, str):
            return [_PLACEHOLDERS.get(piece, piece) for piece in _SPLIT.split(content)]
        if not isinstance(content, list):
            raise self.error(f"{where} is {_kind_of(content)}", "It must be a string or a list of parts.")
        return [self._piece(part, f"{where}[{i}]") for i, part in enumerate(content)]

    def _piece(self, part: object, where: str) -> _Piece:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(kind, str):
            if kind in _MEDIA_TYPES:
                return _MEDIA_TYPES[kind]
            if kind == "text" and isinstance(part.get("text"), str):
                return str(part["text"])
        raise self.error(
            f"{where} is {_kind_of(part)} of type {_named(kind)}",
            'A part is {"type": "text", "text": "..."}, {"type": "image"} or {"type": "video"}.',
        )

    def _decode(self, raw: bytes, what: str) -> str:
        if len(raw) > self._limits.max_bytes:
            raise self.error(
                f"the {what} has {len(raw)} bytes, above max_bytes={self._limits.max_bytes}",
                "Raise RecordLimits.max_bytes if that is meant.",
            )
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.error(f"the {what} is not UTF-8: {error}", "Store it as UTF-8.") from None

    def _too_deep(self) -> RecordError:
        return self.error(
            f"the JSON is nested deeper than max_depth={self._limits.max_depth}",
            "Flatten it, or raise RecordLimits.max_depth.",
        )


def _deeper_than(value: object, max_depth: int) -> bool:
    """Whether containers nest more than `max_depth` deep, without recursion."""
    level: list[object] = [value]
    for _ in range(max_depth):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _kind_of(value: object) -> str:
    if isinstance(value, (list, dict, str)) and not value:
        return f"an empty {type(value).__name__}"
    return "null" if value is None else f"a {type(value).__name__}"


def _named(value: object) -> str:
    """A value of a record that should have been a name; others may be endless, or integers too long to be written."""
    return repr(value[:40]) if isinstance(value, str) else _kind_of(value)
