"""A parsed sample: conversation turns and the media they refer to, before any token or pixel is made."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dataloaders.counts import MediaKind


@dataclass(frozen=True, slots=True)
class TextPart:
    """Literal text inside a turn (never parsed for special tokens)."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A reference to `Record.media[index]` inside a turn."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message. `role` is `system`, `user`, `assistant` or `tool`."""

    role: str
    parts: tuple[TextPart | MediaPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRef:
    """A media member of a sample: its kind, its member name and its encoded size."""

    kind: MediaKind
    member: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A conversation with its media in the order of their placeholders.

    Attributes:
        shard, key: where the record came from, for messages and reports.
        turns: the messages, in order.
        media: items in placeholder order: images and videos interleaved as the text refers to them.
        extra: other top-level JSON fields, untouched (the demo keeps its `facts` here).
    """

    shard: str
    key: str
    turns: tuple[Turn, ...]
    media: tuple[MediaRef, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """`shard, key` as error messages spell it."""
        return f"shard {self.shard}, key {self.key}"
