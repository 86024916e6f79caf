"""Rows: from a mapping (a JSONL line, a row of a table, an item of a data set) to a record and where its media lie.

    {"id": .., "image": "1.jpg" | [..], "conversations": [{"from": "human", "value": "<image>\\nWhat?"}, ..]}    LLaVA
    {"conversations": [..], "images": [..], "videos": [..]}                                                    ShareGPT
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ..}}, ..]}, ..]}       OpenAI
    {"messages": [.. {"type": "image"} or "<image>" ..], "images": [..]}                                     TRL, Qwen
    {"image": .., "text" | "caption": "A cat."}                                                               captions

    row --fields, parts--> media in placeholder order --row_media--> bytes | reference --parse_fields--> Record

A placeholder whose part holds its medium takes that one, a part with an `index` takes that one of the list, and others
take the next one of the list of their kind. Numbers that differ are an error, never a guess. Which list holds images
and which videos is said by the field, not by extensions. Other fields go to `Record.extra`, untouched.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dataloaders.counts import MediaKind
from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.printable import printable
from dataloaders.probe.limits import ProbeLimits
from dataloaders.record import MediaRef, Record
from dataloaders.record_parser import (
    CONVERSATION_FIELDS,
    RecordLimits,
    listed_names,
    load_json,
    parse_fields,
    placeholders,
)
from dataloaders.row_media import InlineMedium, RowMedium, is_absent, row_medium

TEXT_FIELDS = ("text", "caption")
IMAGE_FIELDS = ("images", "image")
VIDEO_FIELDS = ("videos", "video")
MAX_LISTED = 20
MAX_MEDIA = 10_000  # of a record: each is looked at, and a name of two letters may stand there millions of times
SizeOf: TypeAlias = Callable[[str, str], int]
_MAX_NAME = 200  # characters of a path in messages


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFields:
    """Names of the fields (columns) of a row. A name that is given must occur in the data.

    Attributes:
        conversation: list of turns, or such a list as JSON; None: `messages` or `conversations`.
        text: caption of a row without a conversation; None: `text` or `caption`.
        images, videos: a name or several; None: `images` and `image`, `videos` and `video`.
    """

    conversation: str | None = None
    text: str | None = None
    images: str | tuple[str, ...] | None = None
    videos: str | tuple[str, ...] | None = None

    @property
    def conversations(self) -> tuple[str, ...]:
        """Where the turns may be, in order of preference."""
        return CONVERSATION_FIELDS if self.conversation is None else (self.conversation,)

    @property
    def texts(self) -> tuple[str, ...]:
        """Where a caption may be."""
        return TEXT_FIELDS if self.text is None else (self.text,)

    @property
    def media(self) -> dict[MediaKind, tuple[str, ...]]:
        """Where media of each kind may be."""
        return {
            MediaKind.IMAGE: _names(self.images, IMAGE_FIELDS),
            MediaKind.VIDEO: _names(self.videos, VIDEO_FIELDS),
        }

    @property
    def every(self) -> tuple[str, ...]:
        """All names that are read."""
        return (*self.conversations, *self.texts, *(name for names in self.media.values() for name in names))

    @property
    def named(self) -> tuple[str, ...]:
        """The names that were given, so that they must occur."""
        given = (self.conversation, self.text, *_names(self.images, ()), *_names(self.videos, ()))
        return tuple(name for name in given if name is not None)


@dataclass(frozen=True, slots=True)
class RowSample:
    """A record and, for each of its media in order, its bytes or where they lie."""

    record: Record
    media: tuple[RowMedium, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParser:
    """Parses the rows of one source."""

    fields: RowFields
    limits: RecordLimits
    media_limits: ProbeLimits

    def parse(self, row: Mapping[str, Any], size_of: SizeOf, *, shard: str, key: str) -> RowSample:
        """One row; `size_of(reference, place)` gives the encoded size of a medium that lies elsewhere.

        Raises:
            RecordError: neither conversation nor caption, an unknown shape, media that are missing or refused, or
                placeholders that do not match the media.
        """
        place = f"shard {shard}, key {key}"
        conversation, text = self._texts(row, shard=shard, key=key)
        made: dict[str, RowMedium] = {}  # a short record may name one large medium many times
        media: list[tuple[MediaKind, RowMedium]] = []
        for kind, name, value in self._in_order(row, conversation or {}, place):
            if len(media) >= MAX_MEDIA:
                raise _error(f"the row names more than {MAX_MEDIA} media", place, "Divide it.")
            if name not in made:
                made[name] = row_medium(value, name, limits=self.media_limits, place=place)
            media.append((kind, made[name]))
        refs = [_media_ref(kind, medium, size_of, place) for kind, medium in media]
        used = {*CONVERSATION_FIELDS, *(name for names in self.fields.media.values() for name in names)}
        used.add(next((name for name in self.fields.conversations if row.get(name) is not None), ""))
        if text is not None:
            used.update(self.fields.texts)
        extra = {name: value for name, value in row.items() if name not in used}
        record = parse_fields(extra | (conversation or {}), text, refs, shard=shard, key=key, limits=self.limits)
        queues = {kind: iter([medium for of, medium in media if of is kind]) for kind in MediaKind}
        return RowSample(record, tuple(next(queues[ref.kind]) for ref in record.media))

    def _texts(self, row: Mapping[str, Any], *, shard: str, key: str) -> tuple[dict[str, Any] | None, str | None]:
        """The conversation under the name that its turns speak, or the caption."""
        place = f"shard {shard}, key {key}"
        for name in self.fields.conversations:
            turns = row.get(name)
            if turns is None:
                continue
            if isinstance(turns, (str, bytes)):
                raw = turns if isinstance(turns, bytes) else turns.encode("utf-8", "surrogatepass")
                turns = load_json(raw, shard=shard, key=key, limits=self.limits)
            turns = list(turns) if isinstance(turns, tuple) else turns
            first = turns[0] if isinstance(turns, list) and turns else None
            spoken = "conversations" if isinstance(first, Mapping) and "from" in first else "messages"
            self._check_size(sum(map(len, _strings(turns))), place)
            return {spoken: turns}, None
        for name in self.fields.texts:
            if (text := row.get(name)) is not None:
                if not isinstance(text, str):
                    raise _error(f"`{name}` is a {type(text).__name__}", place, "A caption is a string.")
                self._check_size(len(text), place)
                return None, text
        raise _error(
            f"the row has the fields {listed_names(row)}, but no conversation "
            f"({listed_names(self.fields.conversations)}) and no caption ({listed_names(self.fields.texts)})",
            place,
            "Name the field with RowFields(conversation=...) or RowFields(text=...).",
        )

    def _check_size(self, num_characters: int, place: str) -> None:
        if num_characters > self.limits.max_bytes:
            raise _error(
                f"the text has {num_characters} characters, above max_bytes={self.limits.max_bytes}",
                place,
                "Raise RecordLimits.max_bytes if that is meant.",
            )

    def _in_order(
        self, row: Mapping[str, Any], conversation: Mapping[str, Any], place: str
    ) -> Iterator[tuple[MediaKind, str, object]]:
        """(kind, name, value) of all media: those of the placeholders in their order, then those without one."""
        listed = {kind: list(_listed_media(row, names)) for kind, names in self.fields.media.items()}
        taken: dict[MediaKind, set[int]] = {kind: set() for kind in MediaKind}
        following = dict.fromkeys(MediaKind, 0)
        for kind, where, part in _placeholders(conversation):
            own = _own_value(part, kind)
            number = part.get("index") if isinstance(part.get("index"), int) else following[kind]
            if own is not None:
                yield kind, where, own
            elif not isinstance(number, int) or not 0 <= number < len(listed[kind]):
                if "index" in part and part["index"] is not None:
                    raise _error(f"{where} has the index {number!r} of {len(listed[kind])} media", place, "Correct it.")
            else:
                taken[kind].add(number)
                following[kind] = number + 1
                yield kind, *listed[kind][number]
        for kind, media in listed.items():
            for number, (name, value) in enumerate(media):
                if number not in taken[kind]:
                    yield kind, name, value


def check_fields(rows: Sequence[Mapping[str, Any]], fields: RowFields, *, place: str, seen: Iterable[str] = ()) -> None:
    """Raise SourceError where the names of fields do not fit the data, before a scan or a training run notices.

    Args:
        rows: a bounded sample. seen: names that are known to occur besides.

    Raises:
        SourceError: a name that was given occurs in no row; or most rows have placeholders, and none has media.
    """
    keys = Counter(str(name) for row in rows for name in row)
    present = {*keys, *seen}
    said = ", ".join(f"{name!r} ({count})" for name, count in keys.most_common(MAX_LISTED)) or "none"
    if not rows:
        return
    if lacking := [name for name in fields.named if name not in present]:
        raise SourceError(
            f"no record has the field {listed_names(lacking)}; in {len(rows)} records there are the keys {said}",
            place=place,
            remedy="Give the names as the records spell them: RowFields(images=..., videos=..., conversation=..., "
            "text=...).",
        )
    bare = sum(_is_bare(row, fields) for row in rows)
    if 2 * bare > len(rows) and not any(_has_media(row, fields) for row in rows):
        names = listed_names(name for names in fields.media.values() for name in names)
        raise SourceError(
            f"{bare} of {len(rows)} records have placeholders for media, but none has media in {names}; there are the "
            f"keys {said}",
            place=place,
            remedy="Name the field that holds them with RowFields(images=...) or RowFields(videos=...).",
        )


def _is_bare(row: Mapping[str, Any], fields: RowFields) -> bool:
    return any(own is None for own in _own_values(row, fields))


def _has_media(row: Mapping[str, Any], fields: RowFields) -> bool:
    if any(not is_absent(row.get(name)) for names in fields.media.values() for name in names):
        return True
    return any(own is not None for own in _own_values(row, fields))


def _own_values(row: Mapping[str, Any], fields: RowFields) -> Iterator[object]:
    """For every placeholder of a conversation that is a list: the medium that its part holds, or None."""
    turns = next((row[name] for name in fields.conversations if row.get(name) is not None), None)
    return (_own_value(part, kind) for kind, _, part in _placeholders({"messages": turns}))


def _placeholders(conversation: Mapping[str, Any]) -> Iterator[tuple[MediaKind, str, Mapping[str, Any]]]:
    """(kind, where, part) of every placeholder, in order; the part is empty in string content."""
    for name, turns in conversation.items():
        for i, content in enumerate(_contents(turns)):
            where = f"{name}[{i}]"
            if isinstance(content, str):
                yield from ((kind, where, {}) for kind in placeholders(content))
            elif isinstance(content, list):
                for k, part in enumerate(content):
                    kinds = placeholders(part) if isinstance(part, Mapping) else []
                    yield from ((kind, f"{where}.content[{k}]", part) for kind in kinds)


def _own_value(part: Mapping[str, Any], kind: MediaKind) -> object:
    """The medium that a part holds itself, or None."""
    name = kind.name.lower()
    values = (part.get(field) for field in (name, f"{name}_url", "url", "path"))
    return next((value for value in values if not is_absent(value)), None)


def _listed_media(row: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, object]]:
    """(name, value) of the media in these fields."""
    for name in names:
        value = row.get(name)
        if is_absent(value):
            continue
        if isinstance(value, (list, tuple)):
            yield from ((f"{name}[{j}]", item) for j, item in enumerate(value))
        else:
            yield name, value


def _media_ref(kind: MediaKind, medium: RowMedium, size_of: SizeOf, place: str) -> MediaRef:
    if isinstance(medium, InlineMedium):
        return MediaRef(kind=kind, member=medium.name, size_bytes=medium.size)
    name = printable(medium.reference)[:_MAX_NAME]
    return MediaRef(kind=kind, member=name, size_bytes=size_of(medium.reference, f"{place}, member {name}"))


def _contents(turns: object) -> Iterator[object]:
    """What each turn of a conversation says; None where it is no turn."""
    for turn in turns if isinstance(turns, list) else ():
        yield turn.get("content", turn.get("value")) if isinstance(turn, Mapping) else None


def _strings(turns: object) -> Iterator[str]:
    """The texts of a conversation."""
    for content in _contents(turns):
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield text


def _names(given: str | tuple[str, ...] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if given is None else (given,) if isinstance(given, str) else tuple(given)


def _error(cause: str, place: str, remedy: str) -> RecordError:
    return RecordError(Reason.BAD_RECORD, cause, place=place, remedy=remedy)
